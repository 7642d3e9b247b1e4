"""Two network namespaces joined by veth pairs, with names of their own, removed at the end whatever
happens."""

import ctypes
import ipaddress
import json
import os
import shutil
import subprocess
import threading

from .process import Failure, Skip, wait_until

_RULES = """table inet {table} {{
    chain out {{ type filter hook output priority 0; oifname {nic} drop; }}
    chain in {{ type filter hook input priority 0; iifname {nic} drop; }}
}}
"""


def _run(*args, stdin=None) -> str:
    try:
        done = subprocess.run(
            [str(a) for a in args], input=stdin, capture_output=True, text=True, timeout=20
        )
    except subprocess.TimeoutExpired as late:
        raise Failure(f"{' '.join(map(str, args))}: not done after 20 s") from late
    if done.returncode != 0:
        raise Failure(f"{' '.join(map(str, args))}: {done.stderr.strip()}")
    return done.stdout


_CLONE_NEWNET = 0x40000000


def _counters(name: str) -> int:
    """An open file that tells the counters of a namespace's interfaces whenever it is read: nothing
    has to be started for it."""
    opened = []

    def enter():
        # Only this thread goes there. What it opens stays what it is.
        space = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET) == 0:
                opened.append(os.open("/proc/thread-self/net/dev", os.O_RDONLY))
        finally:
            os.close(space)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if not opened:
        raise Failure(f"the namespace {name} cannot be entered")
    return opened[0]


class Namespaces:
    """A context: hosts a and b, each with the interfaces nic0, nic1, …, rail to rail. Host h has
    10.<x>.<rail>.<1 or 2>."""

    hosts = "ab"

    def __init__(self, rails=2, octet: int | None = None):
        if os.geteuid() != 0:
            raise Skip("network namespaces need root")
        for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
            if shutil.which(tool) is None:
                raise Skip(f"'{tool}' is missing (Debian package {package})")
        self.rails = rails
        self.octet = 100 + os.getpid() % 100 if octet is None else octet
        self.name = {host: f"unbtest{os.getpid()}{host}" for host in self.hosts}
        self.counters = {}

    def __enter__(self):
        try:
            for name in self.name.values():
                try:
                    _run("ip", "netns", "add", name)
                except Failure as failure:
                    raise Skip(f"namespaces cannot be made here: {failure}") from failure
                _run("ip", "-n", name, "link", "set", "lo", "up")
            self.counters = {host: _counters(name) for host, name in self.name.items()}
            for rail in range(self.rails):
                _run(
                    "ip",
                    "link",
                    "add",
                    f"nic{rail}",
                    "netns",
                    self.name["a"],
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"nic{rail}",
                    "netns",
                    self.name["b"],
                )
                for host in "ab":
                    self._up(host, f"nic{rail}", self.addr(host, rail))
            self._more()
            # The kernel sees the carrier of a new veth a moment later.
            wait_until(self._all_up, 10, "the interfaces are up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        while self.counters:
            os.close(self.counters.popitem()[1])
        for name in self.name.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _up(self, host: str, interface: str, addr):
        _run("ip", "-n", self.name[host], "addr", "add", f"{addr}/24", "dev", interface)
        _run("ip", "-n", self.name[host], "link", "set", interface, "up")

    def _more(self):
        """What else a subclass has."""

    def _all_up(self) -> bool:
        links = [
            link
            for name in self.name.values()
            for link in json.loads(_run("ip", "-n", name, "-j", "link"))
        ]
        return all(link["operstate"] == "UP" for link in links if link["ifname"].startswith("nic"))

    def addr(self, host: str, rail: int) -> ipaddress.IPv4Address:
        """The address of a NIC."""
        return ipaddress.IPv4Address(f"10.{self.octet}.{rail}.{1 + 'ab'.index(host)}")

    def within(self, host: str) -> list:
        """What goes before a command so that it runs at a host."""
        return ["ip", "netns", "exec", self.name[host]]

    def link(self, host: str, rail: int, state: str):
        """Sets an interface up or down."""
        _run("ip", "-n", self.name[host], "link", "set", f"nic{rail}", state)

    def drop(self, host: str, rail: int):
        """Drops every packet of an interface, both ways, and tells nobody."""
        rules = _RULES.format(table=f"cut{rail}", nic=f"nic{rail}")
        _run(*self.within(host), "nft", "-f", "-", stdin=rules)

    def undrop(self, host: str, rail: int):
        """Takes `drop` back."""
        _run(*self.within(host), "nft", "delete", "table", "inet", f"cut{rail}")

    def bytes(self, host: str, rail: int) -> tuple:
        """The bytes that an interface has sent and received."""
        for line in os.pread(self.counters[host], 65536, 0).decode().splitlines():
            interface, _, figures = line.partition(":")
            if interface.strip() == f"nic{rail}":
                received, sent = [int(figure) for figure in figures.split()][0:9:8]
                return sent, received
        raise Failure(f"{host} has no interface nic{rail}")


class Cluster(Namespaces):
    """With a third host, m, apart from the rails: a and b each have an interface to it, `mgmt`, and
    reach a server there, and each other by it."""

    hosts = "abm"

    def _more(self):
        for host, other in ("ab", "ba"):
            name = self.name[host]
            _run(
                "ip",
                "link",
                "add",
                "mgmt",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"to-{host}",
                "netns",
                self.name["m"],
            )
            self._up(host, "mgmt", self.manager(host))
            self._up("m", f"to-{host}", self.server(host))
            _run(
                "ip",
                "-n",
                name,
                "route",
                "add",
                f"{self.manager(other)}/32",
                "via",
                self.server(host),
            )
        _run(*self.within("m"), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def _management(self, host: str, number: int) -> ipaddress.IPv4Address:
        return ipaddress.IPv4Address(f"10.{self.octet}.{200 + 'ab'.index(host)}.{number}")

    def manager(self, host: str) -> ipaddress.IPv4Address:
        """The address of a host for management."""
        return self._management(host, 1)

    def server(self, host: str) -> ipaddress.IPv4Address:
        """The address of m, as a host sees it."""
        return self._management(host, 254)
