#!/usr/bin/env python3
"""NICs with two ports under unmodified programs: a queue pair goes to the other port by automatic path migration before it goes to another NIC,
and back. What each case asserts is in the counters of the ports and in the event log: bytes on the port that should carry them, who
migrated, and that nothing was replayed; the verifier (tests/c/verifier.c) sees to every message.
"""

import random
import sys
import time

from combined import Run
from lib import device
from lib.cc import compile_c
from lib.fabric import Fabric, now_us
from lib.process import Failure, wait_until
from lib.suite import Suite
from lib.traffic import GAP_WINDOW_US

PORTS = ["--ports", "2"]
SECONDS = 5
# What a stream moves at the least in the time in which it is watched, and control messages and the last packets before the fault at the most.
STREAM_BYTES, SILENCE_BYTES = 20_000_000, 1_000_000
WATCH_S, CARRY_S = 0.5, 3
GAP_STEP_S = 0.02
# Of a port, slow enough for both to be filled.
RATE_MBIT = 400
# By event; by silence it is what it takes to find a path dead.
TOLD_MS, SILENT_MS = 100, 400
# Faults of one lane, at both ends, and how soon they are noticed.
FAULTS = {"nic a/0/1 down": TOLD_MS, "nic b/0/1 down": TOLD_MS, "cable a/0/1 cut": SILENT_MS, "cable b/0/1 cut": SILENT_MS, "switch rail0 down": SILENT_MS}
TOOLS = {"ib_write_bw": [], "ib_send_bw": ["-q", 8], "ib_read_bw": [], "ib_atomic_bw": [], "ib_write_bw, both ways": ["-b"], "ib_send_bw, both ways": ["-b", "-q", 8]}


def sent_bytes(fabric) -> dict:
    return {name: nic["tx_bytes"] for name, nic in fabric.nics().items()}


def moved(fabric, seconds=WATCH_S) -> dict:
    """What each port sends in that time."""
    before = sent_bytes(fabric)
    time.sleep(seconds)
    return {name: sent - before[name] for name, sent in sent_bytes(fabric).items()}


def carries(fabric, ports: list, when: str, least=STREAM_BYTES):
    """Fails unless the stream goes over these ports and no other."""
    before, until = sent_bytes(fabric), time.monotonic() + CARRY_S
    sent = moved(fabric)
    while max(sent[port] for port in ports) < least and time.monotonic() < until:
        sent = {name: n - before[name] for name, n in sent_bytes(fabric).items()}
        time.sleep(GAP_STEP_S)
    if max(sent[port] for port in ports) < least or any(n > SILENCE_BYTES for port, n in sent.items() if port not in ports):
        raise Failure(f"{when}: {({port: n for port, n in sent.items() if n})}, where {ports} should carry")


def armed(fabric, count: int, lane=1):
    """Waits until all queue pairs are ARMED on that lane."""
    def all_armed():
        qps = fabric.status()["qps"]
        port = "" if lane == 1 else f"/{lane}"
        return len(qps) == count and all(
            qp["migration"] == "armed" and qp["protected"] and qp["primary"].startswith(f"{qp['host']}/0{port}-") for qp in qps)

    wait_until(all_armed, 20, f"{count} queue pairs are armed on lane {lane}")


def longest_gap_ms(fabric, pids: list, fault_us: int, told: bool) -> float:
    """The longest time without data around the fault at any of these receivers; to be asked at once, as few are kept. Where the NIC has told of the
    fault it may be too short to be among them, which is 0 here if data flows over port 2 by then."""
    seen = {pid: {} for pid in pids}
    while now_us() < fault_us + GAP_WINDOW_US:
        for pid, gaps in seen.items():
            gaps.update(fabric.gaps(pid))
        time.sleep(GAP_STEP_S)
    around = [length for gaps in seen.values() for start, length in gaps.items() if start + length >= fault_us]
    if not around and told and any(sent > SILENCE_BYTES // 100 for port, sent in moved(fabric, GAP_STEP_S).items() if port.count("/") == 2):
        return 0.0
    if not around:
        raise Failure("no receiver has recorded a gap around the fault")
    return max(around) / 1000


def perftest(logs, tool: str, fault: str):
    """A port fails under a perftest: the stream goes on over the other one, with nothing replayed, and back when it is well."""
    name, options = tool.split(",")[0], TOOLS[tool]
    qps = 2 * (8 if "-q" in options else 1)
    size = [] if "atomic" in name else ["-s", 65536]
    least = STREAM_BYTES // (20 if "atomic" in name else 1)
    with Fabric(logs, *PORTS) as fabric:
        server, client = fabric.pair(name, [*size, *options, "-F", "-D", SECONDS])
        receivers = [client.pid] if "read" in name else [server.pid] + ([client.pid] if "-b" in options else [])
        ends = ["b/0" if "read" in name else "a/0"] + (["b/0"] if "-b" in options else [])
        armed(fabric, qps)
        carries(fabric, ["a/0", "b/0"], "before the fault", least)
        fabric.fault(fault)
        fault_us = fabric.events("fault")[-1]["time_us"]
        # What atomics carry is not counted as data.
        gap_ms = 0 if "atomic" in name else longest_gap_ms(fabric, receivers, fault_us, FAULTS[fault] == TOLD_MS)
        wait_until(lambda: len(fabric.events("path-migrated")) >= qps, 5, "all queue pairs migrate")
        carries(fabric, ["a/0/2", "b/0/2"], "with the fault", least)
        for end in ends:
            if moved(fabric, 0.1)[f"{end}/2"] == 0:
                raise Failure(f"{end}/2 sends nothing")
        if switches := fabric.events("switch"):
            raise Failure(f"a switch, where a migration is enough: {switches[0]}")
        if gap_ms > FAULTS[fault]:
            raise Failure(f"a gap of {gap_ms:.1f} ms")
        fabric.clear()
        cleared_us = now_us()
        wait_until(lambda: moved(fabric, 0.1)[ends[0]] > least // 20, 5, "it goes back to port 1")
        back_s = (now_us() - cleared_us) / 1e6
        for end in (client, server):
            end.expect_success(30)
        if any(s["kind"] != "planned" or s["replayed"] for s in fabric.events("switch")):
            raise Failure(f"something was replayed: {fabric.events('switch')}")
        return f"gap {gap_ms:.1f} ms, {len(fabric.events('path-migrated'))} migrations, back on port 1 after {back_s:.1f} s"


def survives(logs, faults: list, left: list, settings=(), env=()):
    """The other port is dead, too: a switch to another NIC, and every message is verified. `left`: what may carry then."""
    with Fabric(logs, *PORTS, *settings) as fabric:
        run = Run(fabric, logs)
        armed(fabric, len(fabric.status()["qps"]))
        for fault, pause_s in faults:
            fabric.fault(fault)
            time.sleep(pause_s)
        wait_until(lambda: {e["host"] for e in fabric.events("switch") if e["kind"] == "passive"} == {"a", "b"}, 10, "both ends switch")
        run.progress("after the switch")
        sent = {port for port, n in moved(fabric).items() if n > SILENCE_BYTES}
        if not sent or any(port.split("/")[1] not in left for port in sent):
            raise Failure(f"{sent} carry, where only NICs {left} can")
        fabric.clear()
        return run.finish()


def one_nic(logs, tool: str):
    """Hosts with one NIC of two ports."""
    with Fabric(logs, *PORTS, "--nics", "1") as fabric:
        server, client = fabric.pair(tool, ["-F", "-s", 65536, "-D", SECONDS])
        armed(fabric, 2)
        fabric.fault("nic a/0/1 down")
        wait_until(lambda: len(fabric.events("path-migrated")) >= 2, 5, "both ends migrate")
        carries(fabric, ["a/0/2", "b/0/2"], "with the fault")
        fabric.clear()
        wait_until(lambda: moved(fabric, 0.1)["a/0"] > STREAM_BYTES // 20, 5, "it goes back to port 1")
        for end in (client, server):
            end.expect_success(30)
        return f"{len(fabric.events('switch'))} planned switches"


def one_nic_dark(logs):
    """Hosts with one NIC, both ports of which are dark for a second: it is waited for, as without failover."""
    with Fabric(logs, *PORTS, "--nics", "1") as fabric:
        server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-D", SECONDS])
        armed(fabric, 2)
        fabric.fault("nic a/0 down")
        time.sleep(1)
        fabric.clear()
        wait_until(lambda: sum(moved(fabric, 0.1).values()) > STREAM_BYTES // 20, 10, "it goes on")
        for end in (client, server):
            end.expect_success(30)


def off(logs):
    """UNBROKEN_APM=0: no other lane is loaded, and a port that fails is a switch."""
    with Fabric(logs, *PORTS) as fabric:
        fabric.env["UNBROKEN_APM"] = "0"
        server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-D", SECONDS])
        wait_until(lambda: sum(qp["protected"] for qp in fabric.status()["qps"]) == 2, 20, "both ends are protected")
        carries(fabric, ["a/0", "b/0"], "before the fault")
        fabric.fault("nic a/0/1 down")
        wait_until(lambda: len(fabric.events("switch")) == 2, 5, "both ends switch")
        sent = moved(fabric)
        if sent["a/0/2"] or fabric.events("path-migrated"):
            raise Failure(f"something has migrated: {sent}")
        for end in (client, server):
            end.expect_success(30)


def spread(logs):
    """UNBROKEN_APM=spread: queue pairs take turns over both ports, by migration, and have the rate of both; with one port dark all are on the other, and come back."""
    with Fabric(logs, *PORTS) as fabric:
        fabric.env["UNBROKEN_APM"] = "spread"
        for port in (1, 2):
            fabric.fault(f"rate a/0/{port} {RATE_MBIT}Mbit")
        server, client = fabric.pair("ib_write_bw", ["-F", "-s", 16384, "-q", 8, "-D", 8])
        wait_until(lambda: len(fabric.events("path-migrated")) >= 8, 10, "half of the queue pairs migrate")

        def shares(seconds=1.0):
            sent = moved(fabric, seconds)
            return [sent[port] * 8e-6 / seconds / RATE_MBIT for port in ("a/0", "a/0/2")]

        both = shares()
        if min(both) < 0.5:
            raise Failure(f"the ports carry {both} of their rates")
        fabric.fault("nic a/0/1 down")
        wait_until(lambda: shares(0.2)[0] < 0.05, 5, "port 1 carries nothing")
        one = shares(0.5)
        fabric.clear("nic a/0/1 down")
        wait_until(lambda: min(shares(0.3)) > 0.5, 5, "both carry again")
        for end in (client, server):
            end.expect_success(30)
        if any(s["kind"] != "planned" for s in fabric.events("switch")):
            raise Failure(f"a switch, where migrations are enough: {fabric.events('switch')[0]}")
        return f"{both[0]:.0%} and {both[1]:.0%} of {RATE_MBIT} Mbit/s a port; with port 1 dark {one[1]:.0%} of one"


def storm(logs, seed: int, rounds: int):
    """Ports, cables, switches and NICs fail at random, up to three at once, and every message is verified."""
    rng = random.Random(seed)
    with Fabric(logs, *PORTS) as fabric:
        run = Run(fabric, logs)
        armed(fabric, len(fabric.status()["qps"]))
        for i in range(rounds):
            rail = run.rail()
            host, port = rng.choice("ab"), rng.choice((1, 2))
            of_lane = [f"nic {host}/{rail}/{port} down", f"cable {host}/{rail}/{port} cut", f"switch rail{rail}{'b' if port == 2 else ''} down"]
            of_nic = [f"nic {host}/{rail} dead", f"cable {host}/{rail} cut"]
            faults = {rng.choice(of_lane)} | {rng.choice(of_lane + of_nic) for _ in range(rng.randrange(3))}
            for fault in faults:
                fabric.fault(fault)
                time.sleep(rng.choice((0, 0.002, 0.05, 0.3)))
            run.progress(f"in round {i} under {sorted(faults)}")
            fabric.clear()
            run.settled()
        done = run.finish()
        return f"{len(fabric.events('path-migrated'))} migrations, {done}"


def flapping(logs, fault: str):
    """A port that flaps: traffic goes on, and how often queue pairs go to and fro is bounded."""
    with Fabric(logs, *PORTS) as fabric:
        run = Run(fabric, logs)
        count = len(fabric.status()["qps"])
        armed(fabric, count)
        fabric.fault(fault)
        for i in range(8):
            time.sleep(0.5)
            run.progress(f"under '{fault}', part {i}")
        fabric.clear()
        migrations, switches = len(fabric.events("path-migrated")), len(fabric.events("switch"))
        # A lane that failed has to be steady, ever longer, before anybody goes back to it.
        if migrations > 6 * count or switches > 4 * count:
            raise Failure(f"{migrations} migrations and {switches} switches of {count} queue pairs in 4 s")
        return f"{migrations} migrations; {run.finish()}"


def quiet(logs):
    """Without a fault nothing migrates."""
    with Fabric(logs, *PORTS) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-q", 8, "-b", "-D", 3])
        for end in (client, server):
            end.expect_success(30)
        if events := [e for e in fabric.events() if e["event"] != "port-active"]:
            raise Failure(f"{len(events)} events without a fault, as {events[0]}")


def main() -> int:
    """Runs all of it."""
    parser = device.parser(__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose names have all these words")
    parser.add_argument("--storms", type=int, default=2, help="how many random storms")
    parser.add_argument("--all", action="store_true", help="every program with every fault (3 minutes)")
    options = parser.parse_args()
    suite = Suite(device.use("lanes", options.device), options.words)
    plain = options.device == "plain"
    for i, tool in enumerate(TOOLS):
        for j, fault in enumerate(FAULTS):
            # Each program, each fault, and other pairs of them on plain devices.
            if options.all or (i + plain) % len(FAULTS) == j and (i % 2 == 0 or not plain):
                suite.case(f"{tool}, {fault}", perftest, tool, fault)
    others = ["1", "2", "3"]
    suite.case("port 2 is known to be dead when port 1 goes down", survives, [("cable a/0/2 cut", 2.5), ("nic a/0/1 down", 0)], others)
    suite.case("port 2 goes down a moment before port 1", survives, [("nic b/0/2 down", 0), ("nic b/0/1 down", 0)], others)
    suite.case("both ports are cut at once", survives, [("cable a/0 cut", 0)], others)
    suite.case("port 2 fails after the migration", survives, [("nic a/0/1 down", 0.5), ("cable b/0/2 cut", 0)], others)
    suite.case("the NIC dies after the migration", survives, [("cable a/0/1 cut", 0.5), ("nic a/0 dead", 0)], others)
    suite.case("one NIC", one_nic, "ib_send_bw" if plain else "ib_write_bw")
    suite.case("one NIC, both ports dark for a second", one_nic_dark)
    suite.case("switched off", off)
    suite.case("spread over both ports", spread)
    for fault in ("flap a/0/1 down=50ms up=50ms", "flap cable b/0/1 down=200ms up=200ms"):
        suite.case(fault, flapping, fault)
    for seed in range(options.storms):
        suite.case(f"storm, seed {seed}", storm, seed, 8)
    suite.case("no fault", quiet)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
