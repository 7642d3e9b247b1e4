"""RDMA of the kernel's own (rxe) over a host edge. rxe of Linux 6.1 works in the initial namespace
only, so the virtual functions of the hosts come there, and rules keep them apart: what leaves by
one goes into its host's edge, though the other end is in the same namespace.

That changes how the whole machine routes, until the context is left: for a VM of the test's own."""

import threading
import time
from pathlib import Path

from .edge import Lab, mac, run
from .fabric import now_us
from .ports import free_port
from .process import Failure, Skip, wait_until

# The rules of the kernel come after those of the devices; both ends of a packet may be of this
# machine.
_ROUTING = (
    "ip rule add pref 200 lookup local",
    "ip rule del pref 0",
    "sysctl -qw net.ipv4.conf.all.accept_local=1 net.ipv4.conf.all.rp_filter=0",
)
_ROUTING_BACK = (
    "ip rule add pref 0 lookup local",
    "ip rule del pref 200",
    "sysctl -qw net.ipv4.conf.all.accept_local=0",
)
_COUNTER = "/sys/class/infiniband/{}/ports/1/hw_counters/rcvd_pkts"
# The index of the IPv4 address among those of an rxe; the first is of IPv6.
_GID = 1


class Rxe:
    """A context: an rxe on the virtual functions of some hosts of a lab."""

    def __init__(self, lab: Lab, hosts: tuple):
        self.lab, self.hosts = lab, hosts

    def __enter__(self):
        try:
            run("modprobe", "-a", "rdma_rxe", "ib_uverbs", "rdma_ucm")
        except (Failure, FileNotFoundError) as error:
            raise Skip(f"this kernel has no rxe ({error})") from None
        for command in _ROUTING:
            run(*command.split())
        for host in self.hosts:
            self._bring(host)
        self._announce()
        return self

    def __exit__(self, *_):
        for host in self.hosts:
            run("rdma", "link", "del", self.name(host))
            run("ip", "rule", "del", "pref", 100 + host)
            run("ip", "link", "set", self.name(host), "down")
            node = self.lab.node(f"h{host}")
            run("ip", "link", "set", self.name(host), "name", "vf0", "netns", node)
            address = f"{self.lab.address(host)}/24"
            run("ip", "-n", node, "addr", "add", address, "dev", "vf0")
            run("ip", "-n", node, "link", "set", "vf0", "up")
        for command in _ROUTING_BACK:
            run(*command.split())
        self._announce()

    @staticmethod
    def name(host: int) -> str:
        """The rxe of a host, and its network device."""
        return f"rxe{host}"

    def _bring(self, host: int):
        name, address = self.name(host), self.lab.address(host)
        # netns 1: that of the first process.
        run("ip", "-n", self.lab.node(f"h{host}"), "link", "set", "vf0", "down")
        run("ip", "-n", self.lab.node(f"h{host}"), "link", "set", "vf0", "name", name, "netns", 1)
        run("ip", "link", "set", name, "up")
        run("ip", "addr", "add", f"{address}/24", "dev", name)
        run("ip", "rule", "add", "pref", 100 + host, "oif", name, "lookup", 100 + host)
        run(
            "ip", "route", "add", "192.168.9.0/24", "dev", name, "src", address, "table", 100 + host
        )
        for other in self.hosts:
            if other != host:
                entry = [self.lab.address(other), "lladdr", mac(other)]
                run("ip", "neigh", "replace", *entry, "dev", name, "nud", "permanent")
        run("rdma", "link", "add", name, "type", "rxe", "netdev", name)

    def _announce(self):
        """A bridge forgets what was behind a port that lost its carrier, and EVPN tells the others:
        as `edge up`, say it again."""
        for host in self.hosts:
            node, entry = self.lab.node(f"h{host}"), [mac(host), "dev", "rep0", "master", "dynamic"]
            run("bridge", "-n", node, "fdb", "replace", *entry)
        wait_until(self.lab.learned, 60, "every host learns every other by EVPN")

    def perftest(self, tool: str, source: int, to: int, name: str, *args):
        """A perftest program from one host's rxe to another's; gives server and client. They meet
        over the loopback device."""
        port = free_port()
        programs = []
        for host in (to, source):
            command = [tool, "-d", self.name(host), "-x", _GID, "-F", "-p", port, *args]
            program = self.lab.start(
                None, f"{name}-h{host}", command + (["127.0.0.1"] if host == source else [])
            )
            programs.append(program)
            if host == to:
                wait_until(
                    lambda p=program: p.ended() or f":{port} " in run("ss", "-Hltn"),
                    20,
                    f"{tool} listens",
                )
        return programs

    def arrivals(self, host: int) -> "Arrivals":
        """When packets come to a host's rxe."""
        return Arrivals(Path(_COUNTER.format(self.name(host))))


class Arrivals:
    """A context: looks at a counter of packets about once a millisecond, and keeps the times
    without one."""

    def __init__(self, counter: Path):
        self.counter, self.gaps, self.over = counter, [], threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def _look(self):
        count, since_us = self.counter.read_text(), now_us()
        while not self.over.is_set():
            time.sleep(0.001)
            now, at_us = self.counter.read_text(), now_us()
            if now != count:
                self.gaps.append((since_us, at_us))
                count, since_us = now, at_us

    def longest(self, fault_us: int) -> tuple:
        """From when to when the longest time without a packet was that ended after a fault."""
        after = [gap for gap in self.gaps if gap[1] >= fault_us]
        if not after:
            raise Failure("no packet of rxe came after the fault")
        return max(after, key=lambda gap: gap[1] - gap[0])
