"""A host edge to test: `unbroken edge lab` in namespaces, its faults, its counters, and a probe
through it."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from .fabric import UNBROKEN, now_us
from .paths import LOGS
from .ports import free_port
from .process import Failure, Process, Skip, wait_until

PROBE = Path(__file__).resolve().parents[1] / "edge" / "probe.py"
MONITOR = PROBE.with_name("routes.py")
# The table that all look at and bgpd's routes in it; and the table of fast failover.
MAIN, BGP, FAILOVER = 254, 186, 4100
PERIOD_US = 1000
# What is heard of a route so much after the end of an outage may have ended it.
LATE_US = 2000
# A moment of traffic between a fault and what comes next.
STREAM_BYTES = 2_000_000
# How long a link that flaps is down, and up: what the fault is, and no wait for anything.
FLAP_S = 0.2
# What `faults` gives.
FAULT_NAMES = ["carrier loss", "silent loss", "ToR death", "ToR BGP daemon killed", "uplink flaps"]
_DROP = """table inet {table} {{
    chain out {{ type filter hook output priority 0; oifname {nic} drop; }}
    chain forward {{ type filter hook forward priority 0; oifname {nic} drop; iifname {nic} drop; }}
    chain in {{ type filter hook input priority 0; iifname {nic} drop; }}
}}
"""
# RFC 5881's port for single hops.
_MUTE = """table inet {table} {{
    chain out {{ type filter hook output priority 0; oifname {nic} udp dport 3784 drop; }}
    chain in {{ type filter hook input priority 0; iifname {nic} udp dport 3784 drop; }}
}}
"""


def run(*args, stdin=None, seconds=60) -> str:
    """Runs a command and gives what it wrote."""
    done = subprocess.run(
        [str(a) for a in args], input=stdin, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode != 0:
        raise Failure(f"{' '.join(map(str, args))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def lab_folder(name: str) -> Path:
    """An empty folder for the logs of a lab that several tests share."""
    folder = LOGS / name / "lab"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def settled(lab):
    """Waits until a fault has left no trace."""
    wait_until(lab.both_ways_back, 60, "both ways are back")
    wait_until(lab.sessions_up, 60, "all BFD sessions are up again")


def need_root_and_tools():
    """Skips where a lab cannot be built."""
    if os.geteuid() != 0:
        raise Skip("network namespaces need root")
    for tool, package in (("ip", "iproute2"), ("nft", "nftables"), ("vtysh", "frr")):
        if shutil.which(tool) is None:
            raise Skip(f"'{tool}' is missing (Debian package {package})")


def mac(host: int) -> str:
    """The MAC address of a host's virtual function."""
    return f"02:00:00:00:09:{host:02x}"


class Lab:
    """A context: hosts h1… with the uplinks p1 and p2 to the switches t1 and t2."""

    def __init__(self, logs: Path, hosts=4, *options: str, rules="none", prefix=None):
        need_root_and_tools()
        if not UNBROKEN.exists():
            raise Failure(f"{UNBROKEN} is missing; 'make all' builds it")
        # Logs of programs go to `logs`, which may be another folder for each test; `folder` stays.
        self.logs, self.folder, self.hosts = logs, logs, hosts
        self.prefix = prefix or f"ut{os.getpid()}"
        # Whether flower rules carry the traffic, and not bridges.
        self.flower = rules != "none"
        self.options = ["--prefix", self.prefix, "--hosts", hosts, "--rules", rules, *options]
        self.processes = []

    def __enter__(self):
        run(UNBROKEN, "edge", "lab", "up", *self.options, seconds=120)
        try:
            wait_until(self.learned, 60, "every host learns every other by EVPN")
            wait_until(self.sessions_up, 30, "all BFD sessions are up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for node in self.nodes():
            for log in (self.state(node) / "frr").glob("*.log"):
                shutil.copy(log, self.folder / f"{node.removeprefix(self.prefix)}-{log.name}")
            events = self.state(node) / "events.jsonl"
            if events.exists():
                shutil.copy(events, self.folder / f"{node.removeprefix(self.prefix)}-events.log")
        run(UNBROKEN, "edge", "lab", "down", *self.options, seconds=120)

    # Nodes

    def nodes(self) -> list:
        """The namespaces of all hosts and switches."""
        hosts = [self.node(f"h{h}") for h in range(1, self.hosts + 1)]
        return [*hosts, self.node("t1"), self.node("t2")]

    def node(self, name: str) -> str:
        """The namespace of a node."""
        return self.prefix + name

    def state(self, node: str) -> Path:
        """The folder of a namespace's edge."""
        return Path("/run/unbroken-edge") / node

    def within(self, name: str) -> list:
        """What goes before a command so that it runs at a node."""
        return ["ip", "netns", "exec", self.node(name)]

    def edge(self, name: str, *args, seconds=60) -> str:
        """Runs `unbroken edge …` at a node."""
        return run(*self.within(name), UNBROKEN, "edge", *args, seconds=seconds)

    def vtysh(self, name: str, command: str):
        """What FRR says, as JSON."""
        folder = self.state(self.node(name)) / "frr/run"
        return json.loads(
            run(*self.within(name), "vtysh", "--vty_socket", folder, "-c", command + " json")
        )

    def start(self, host: str | None, name: str, args: list, env=None) -> Process:
        """Starts a program at a host, or in no host's namespace."""
        within = self.within(host) if host else []
        process = Process(
            name, [*within, *args], self.logs / f"{name}.log", {**os.environ, **(env or {})}
        )
        self.processes.append(process)
        return process

    def daemon(self, name: str, daemon: str) -> int:
        """The process of one of a node's FRR daemons."""
        return int((self.state(self.node(name)) / "frr" / f"{daemon}.pid").read_text())

    def events(self, name: str) -> list:
        """What the node's daemon has written down. It may be writing: a line counts once it has its
        end."""
        path = self.state(self.node(name)) / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    # State

    def learned(self) -> bool:
        """Whether every host knows the addresses of all others, from EVPN."""
        for h in range(1, self.hosts + 1):
            table = json.loads(
                run("bridge", "-n", self.node(f"h{h}"), "-j", "fdb", "show", "dev", "vni100")
            )
            found = {
                e["mac"]: e["dst"] for e in table if "extern_learn" in e["flags"] and "dst" in e
            }
            others = {mac(o): f"10.255.0.{o}" for o in range(1, self.hosts + 1) if o != h}
            if found != others:
                return False
        return True

    def sessions_up(self) -> bool:
        """Whether all BFD sessions of the hosts are up."""
        for h in range(1, self.hosts + 1):
            peers = self.vtysh(f"h{h}", "show bfd peers")
            if len(peers) != 2 or any(p["status"] != "up" for p in peers):
                return False
        return True

    def bfd_down(self, name: str, peer: str) -> bool:
        """Whether a node's BFD session with a peer is down."""
        return any(
            p["peer"] == peer and p["status"] == "down" for p in self.vtysh(name, "show bfd peers")
        )

    def routes_over(self, name: str, to: str) -> set:
        """The devices that FRR's route to an address leads over."""
        found = json.loads(
            run("ip", "-n", self.node(name), "-j", "route", "show", to, "proto", "bgp")
        )
        hops = [hop for route in found for hop in route.get("nexthops", [route])]
        return {hop["dev"] for hop in hops if "linkdown" not in hop.get("flags", [])}

    def both_ways_back(self) -> bool:
        """Whether every host has two ways to every other, and every switch a direct one to every
        host."""
        hosts = range(1, self.hosts + 1)
        pairs = [(a, b) for a in hosts for b in hosts if a != b]
        return all(
            self.routes_over(f"h{a}", f"10.255.0.{b}") == {"p1", "p2"} for a, b in pairs
        ) and all(
            self.routes_over(f"t{t}", f"10.255.0.{h}") == {f"h{h}"} for t in (1, 2) for h in hosts
        )

    def bytes(self, name: str, device: str) -> tuple:
        """The bytes that a device has sent and received."""
        link = json.loads(
            run("ip", "-n", self.node(name), "-s", "-j", "link", "show", "dev", device)
        )[0]
        return link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]

    def rule_bytes(self, host: int, to: int, port="rep0") -> int:
        """The bytes that the flower rule of a port for the virtual function of another host has
        sent there."""
        tc = ["tc", "-n", self.node(f"h{host}"), "-s", "-j"]
        shown = json.loads(run(*tc, "filter", "show", "dev", port, "ingress"))
        ours = [
            f["options"]
            for f in shown
            if f.get("options", {}).get("keys", {}).get("dst_mac") == mac(to)
        ]
        return sum(f["actions"][0]["stats"]["bytes"] for f in ours)

    def rule_writes(self, host: int) -> int:
        """How many netlink operations a host's reconciler has made."""
        status = self.state(self.node(f"h{host}")) / "status.json"
        return json.loads(status.read_text())["rules"]["operations"]

    def address(self, host: int) -> str:
        """The address of a host's virtual function."""
        return f"192.168.9.{host}"

    def configuration(self, name: str) -> Path:
        """The edge.toml of a node."""
        return Path("/run/unbroken-edge") / f".lab-{self.prefix}" / f"{self.node(name)}.toml"

    # Faults

    def carrier(self, tor: str, device: str, state: str):
        """Sets a switch's port up or down: the other end loses its carrier."""
        run("ip", "-n", self.node(tor), "link", "set", device, state)

    def _nft(self, name: str, rules: str):
        run(*self.within(name), "nft", "-f", "-", stdin=rules)

    def silence(self, name: str, device: str):
        """Drops every packet of a device without a report."""
        self._nft(name, _DROP.format(table=f"cut_{device}", nic=device))

    def heal(self, name: str, device: str):
        """Undoes `silence`."""
        run(*self.within(name), "nft", "delete", "table", "inet", f"cut_{device}")

    @contextmanager
    def silenced(self, name: str, device: str):
        """A context in which a device is silent."""
        self.silence(name, device)
        try:
            yield
        finally:
            self.heal(name, device)

    def mute_bfd(self, name: str, *devices: str):
        """Drops BFD's packets of devices, of all at once, and no others: both ends take a link for
        dead that carries everything."""
        self._nft(name, "".join(_MUTE.format(table=f"bfd_{d}", nic=d) for d in devices))

    def unmute_bfd(self, name: str, *devices: str):
        """Undoes `mute_bfd`."""
        self._nft(name, "".join(f"delete table inet bfd_{d}\n" for d in devices))


class Probe:
    """Datagrams from one host to another for some seconds, one each millisecond."""

    def __init__(self, lab: Lab, source: int, to: int, seconds: float, port: int):
        self.path = lab.logs / f"probe-{source}-{to}-{port}.txt"
        self.path.unlink(missing_ok=True)
        name = f"probe-{source}-{to}-{port}"
        address = {h: lab.address(h) for h in (source, to)}
        # Who measures goes before what is measured, where all share few cores.
        probe = ["nice", "-n", "-20", sys.executable, PROBE]
        self.receiver = lab.start(
            f"h{to}", name + "-to", [*probe, "receive", address[to], port, self.path]
        )
        wait_until(
            lambda: "listening" in self.receiver.output() or self.receiver.ended(),
            10,
            "the probe listens",
        )
        self.seconds = seconds
        args = [*probe, "send", address[source], address[to], port, PERIOD_US, seconds]
        self.began_us = now_us()
        self.sender = lab.start(f"h{source}", name + "-from", args)

    def rows(self) -> list:
        """Number, sent, received of each datagram, when it is over."""
        self.sender.expect_success(self.seconds + 20)
        self.receiver.expect_success(20)
        return [tuple(map(int, line.split())) for line in self.path.read_text().splitlines()]


class Monitor:
    """A context: every change of a route at a node, as the kernel tells it."""

    def __init__(self, lab: Lab, name: str):
        self.path = lab.logs / f"routes-{name}.txt"
        self.path.unlink(missing_ok=True)
        # Who measures goes before what is measured, where all share few cores.
        command = ["chrt", "-f", "1", sys.executable, MONITOR, self.path]
        self.process = lab.start(name, f"routes-{name}", command)

    def __enter__(self):
        listening = lambda: "listening" in self.process.output() or self.process.ended()
        wait_until(listening, 10, "the monitor of routes listens")
        return self

    def __exit__(self, *_):
        self.process.kill()

    def changed(self, to: str, since_us: int):
        """When a route changed first that leads packets to an address: BGP's, or fast failover's.
        The last ways that the daemon keeps behind BGP's lead none while there is BGP's."""
        for line in self.path.read_text().splitlines():
            heard_us, table, protocol, destination = line.split()
            leads = (int(table), int(protocol)) == (MAIN, BGP) or int(table) == FAILOVER
            if leads and destination == f"{to}/32" and int(heard_us) >= since_us:
                return int(heard_us)
        return None


def parts_us(began_us: int, ended_us: int, detected_us, routed_us) -> tuple:
    """Detection, routing and the rest of an outage, which they sum to. What came before the outage
    or after its end did not end it, and neither did BFD's word where the route changed without
    it."""
    # A route works before its change is heard of.
    within = lambda us: us is not None and began_us <= us <= ended_us + LATE_US
    heard = [min(us, ended_us) if within(us) else None for us in (detected_us, routed_us)]
    detected_us, routed_us = heard
    waited = detected_us is not None and (routed_us is None or routed_us >= detected_us)
    detection_end = detected_us if waited else began_us
    routing_end = detection_end if routed_us is None else routed_us
    return detection_end - began_us, routing_end - detection_end, ended_us - routing_end


def outage(rows: list, fault_us: int, within_us: int = 3_000_000) -> tuple:
    """The longest time without a datagram that ends after a fault, less the pace: how long it was
    (µs), and when it ended."""
    worst, ended = 0, fault_us
    for before, after in zip(rows, rows[1:]):
        if after[2] >= fault_us and before[2] <= fault_us + within_us:
            gap = after[2] - before[2] - PERIOD_US
            if gap > worst:
                worst, ended = gap, after[2]
    return worst, ended


def most_lost(rows: list) -> int:
    """The most datagrams in a row that were lost: a receiver that has to wait for a core gets them
    later, and loses none."""
    numbers = [0, *sorted(row[0] for row in rows)]
    return max(after - before - 1 for before, after in zip(numbers, numbers[1:]))


def first(lab, node: str, event: str, since_us: int):
    """When a node's daemon first wrote an event after a fault, in µs since it: that BFD has lost a
    neighbour, and that BGP has changed a route, and not the daemon itself."""
    for e in lab.events(node):
        if (
            e["event"] == event
            and e["time_us"] >= since_us
            and (event != "bfd" or e["state"] == "down")
            and (event != "routes" or e["by"] == "bgp")
        ):
            return e["time_us"] - since_us
    return None


def perftest(lab, tool, source, to, name, *args):
    """A perftest program from one host's virtual function to another's; gives server and client."""
    port = free_port()
    programs = []
    for host in (to, source):
        command = [UNBROKEN, "run", "--nics", lab.address(host), "--", tool]
        command += ["-d", "unb0", "-F", "-p", port, *args]
        command += [lab.address(to)] if host == source else []
        env = {"UNBROKEN_RUNTIME": str(lab.folder / "runtime")}
        program = lab.start(f"h{host}", f"{name}-h{host}", command, env)
        programs.append(program)
        if host == to:
            listening = lambda p=program: (
                p.ended() or f":{port} " in run(*lab.within(f"h{to}"), "ss", "-Hltn")
            )
            wait_until(listening, 20, f"{tool} listens")
    return programs


def used(lab, host, direction):
    """The uplink that carries most of what a host sends (0) or receives (1) now."""
    before = {d: lab.bytes(host, d)[direction] for d in ("p1", "p2")}

    def busy():
        moved = {d: lab.bytes(host, d)[direction] - before[d] for d in before}
        return max(moved, key=moved.get) if max(moved.values()) > STREAM_BYTES else None

    return wait_until(busy, 60, f"traffic at {host}")


def other_uplink(uplink: str) -> str:
    """The uplink that is left."""
    return {"p1": "p2", "p2": "p1"}[uplink]


def latencies_us(output: str) -> list:
    """The time of each message, as perftest's `-U` lists them."""
    return [float(row.group(1)) for row in re.finditer(r"^\d+, ([0-9.e+]+)$", output, re.MULTILINE)]


def faults(lab):
    """What breaks and what heals, by the names in FAULT_NAMES."""

    def tor(uplink):
        return "t" + uplink[1]

    def carrier(state):
        return lambda uplink: lab.carrier(tor(uplink), "h1", state)

    def death(uplink):
        """The switch forwards nothing more, and its daemons say nothing more."""
        for device in [f"h{h}" for h in range(1, lab.hosts + 1)] + ["isl"]:
            lab.silence(tor(uplink), device)

    def rebirth(uplink):
        for device in [f"h{h}" for h in range(1, lab.hosts + 1)] + ["isl"]:
            lab.heal(tor(uplink), device)

    def kill_bgp(uplink):
        pid = lab.daemon(tor(uplink), "bgpd")
        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        # It holds its files until it has ended.
        ended, _, _ = select.select([process], [], [], 10)
        os.close(process)
        if not ended:
            raise Failure("bgpd was killed and has not ended after 10 s")

    def start_bgp(uplink):
        lab.edge(tor(uplink), "up", "--config", lab.configuration(tor(uplink)))

    def flap(uplink):
        for _ in range(3):
            lab.carrier(tor(uplink), "h1", "down")
            time.sleep(FLAP_S)
            lab.carrier(tor(uplink), "h1", "up")
            time.sleep(FLAP_S)
        lab.carrier(tor(uplink), "h1", "down")

    silent = (lambda u: lab.silence(tor(u), "h1"), lambda u: lab.heal(tor(u), "h1"))
    both = [(carrier("down"), carrier("up")), silent, (death, rebirth)]
    both += [(kill_bgp, start_bgp), (flap, carrier("up"))]
    return dict(zip(FAULT_NAMES, both, strict=True))


class FaultCycle:
    """A context: links between switches and hosts fall silent in turn at the switch, each for
    `down_s`, `up_s` apart, until it is left.

    The first comes after `first_s`, or after `up_s`."""

    def __init__(
        self,
        lab: Lab,
        links: list,
        down_s: float = 20,
        up_s: float = 20,
        first_s: float | None = None,
    ):
        self.lab, self.links, self.down_s, self.up_s = lab, links, down_s, up_s
        self.first_s = up_s if first_s is None else first_s
        # Of each fault: when it began and ended, which link, and the bytes that its host sent over
        # it since the fault before.
        self.faults, self.error = [], None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        if self.error:
            raise self.error

    def _run(self):
        try:
            for n in range(1000):
                tor, host = self.links[n % len(self.links)]
                uplink = "p" + tor[1]
                before = self.lab.bytes(host, uplink)[0]
                if self.over.wait(self.up_s if n else self.first_s):
                    return
                carried = self.lab.bytes(host, uplink)[0] - before
                fault = {"from_us": now_us(), "link": f"{tor}-{host}", "carried": carried}
                self.lab.silence(tor, host)
                self.faults.append(fault)
                self.over.wait(self.down_s)
                self.lab.heal(tor, host)
                fault["until_us"] = now_us()
        except Exception as error:  # whoever leaves the context gets it
            self.error = error
