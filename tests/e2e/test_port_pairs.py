"""NICs with two ports under unmodified programs: port 1 of both ends is a pair, and so is port 2.

A queue pair goes to the other port pair by automatic path migration before it goes to another NIC,
and fails back. Each test looks at the counters of the ports and at the event log: bytes on the port
that should carry them, who migrated, and that nothing was replayed. The verifier
(tests/c/verifier.c) checks every message.
"""

import random
import statistics
import time

import pytest

from lib import options
from lib.fabric import Fabric, now_us
from lib.process import Failure, wait_until
from lib.redis import Redis
from lib.traffic import GAP_WINDOW_US
from lib.verifier import Verifier

PORTS = ["--ports", "2"]
SECONDS = 5
# What a stream moves at the least in the time in which it is watched, and control messages and the
# last packets before the fault at the most.
STREAM_BYTES, SILENCE_BYTES = 20_000_000, 1_000_000
WATCH_S, CARRY_S = 0.5, 3
# Of the random faults.
SEEDS, ROUNDS = (10, 8) if options.LONG else (2, 8)
GAP_STEP_S = 0.02
# Of a port, slow enough for both to be filled.
RATE_MBIT = 400
# Shares of that rate: of a port that carries no stream, at the most, and of one that is used well,
# at the least.
SILENT_SHARE, HALF = 0.05, 0.5
# The gap of a stream where the NIC reports the failure, and where it takes silence to find a path
# dead.
TOLD_MS, SILENT_MS = 100, 400
GAPS = 3
# To the directory's server, each way.
LATE_MS = 100
# Faults of one port pair, at both ends, and how soon they are noticed.
FAULTS = {
    "nic a/0/1 down": TOLD_MS,
    "nic b/0/1 down": TOLD_MS,
    "cable a/0/1 cut": SILENT_MS,
    "cable b/0/1 cut": SILENT_MS,
    "switch rail0 down": SILENT_MS,
}
TOOLS = {
    "ib_write_bw": [],
    "ib_send_bw": ["-q", 8],
    "ib_read_bw": [],
    "ib_atomic_bw": [],
    "ib_write_bw-both-ways": ["-b"],
    "ib_send_bw-both-ways": ["-b", "-q", 8],
}


def sent_bytes(fabric) -> dict:
    """What each port has sent."""
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
    if max(sent[port] for port in ports) < least or any(
        n > SILENCE_BYTES for port, n in sent.items() if port not in ports
    ):
        raise Failure(
            f"{when}: { ({port: n for port, n in sent.items() if n}) }, where {ports} should carry"
        )


def armed(fabric, count: int):
    """Waits until all queue pairs are ARMED on port 1."""

    def all_armed():
        qps = fabric.status()["qps"]
        return len(qps) == count and all(
            qp["migration"] == "armed"
            and qp["protected"]
            and qp["primary"].startswith(f"{qp['host']}/0-")
            for qp in qps
        )

    wait_until(all_armed, 20, f"{count} queue pairs are armed on port 1")


def longest_gap_ms(fabric, pids: list, fault_us: int, reported: bool) -> float:
    """The longest time without data around the fault at any of these receivers; to be asked at
    once, as few are kept. Where the NIC reports the fault, it may be too short to be among them,
    which is 0 here if data flows over port 2 by then."""
    seen = {pid: {} for pid in pids}
    while now_us() < fault_us + GAP_WINDOW_US:
        for pid, gaps in seen.items():
            gaps.update(fabric.gaps(pid))
        time.sleep(GAP_STEP_S)
    around = [
        length
        for gaps in seen.values()
        for start, length in gaps.items()
        if start + length >= fault_us
    ]
    if (
        not around
        and reported
        and any(
            sent > SILENCE_BYTES // 100
            for port, sent in moved(fabric, GAP_STEP_S).items()
            if port.count("/") == 2
        )
    ):
        return 0.0
    if not around:
        raise Failure("no receiver has recorded a gap around the fault")
    return max(around) / 1000


def perftest(logs, tool: str, fault: str):
    """A port fails under a perftest: the stream goes on over the other one, with nothing replayed,
    and back when it is well. Gives the gap at its receivers in ms, and what it showed in words."""
    name, arguments = tool.split("-")[0], TOOLS[tool]
    qps = 2 * (8 if "-q" in arguments else 1)
    size = [] if "atomic" in name else ["-s", 65536]
    least = STREAM_BYTES // (20 if "atomic" in name else 1)
    with Fabric(logs, *PORTS) as fabric:
        server, client = fabric.pair(name, [*size, *arguments, "-F", "-D", SECONDS])
        receivers = (
            [client.pid]
            if "read" in name
            else [server.pid] + ([client.pid] if "-b" in arguments else [])
        )
        ends = ["b/0" if "read" in name else "a/0"] + (["b/0"] if "-b" in arguments else [])
        armed(fabric, qps)
        carries(fabric, ["a/0", "b/0"], "before the fault", least)
        fabric.fault(fault)
        fault_us = fabric.events("fault")[-1]["time_us"]
        # What atomics carry is not counted as data.
        gap_ms = (
            0
            if "atomic" in name
            else longest_gap_ms(fabric, receivers, fault_us, FAULTS[fault] == TOLD_MS)
        )
        wait_until(lambda: len(fabric.events("path-migrated")) >= qps, 5, "all queue pairs migrate")
        carries(fabric, ["a/0/2", "b/0/2"], "with the fault", least)
        for end in ends:
            if moved(fabric, 0.1)[f"{end}/2"] == 0:
                raise Failure(f"{end}/2 sends nothing")
        # A receiver whose peer was found late gets its port pair by a planned one.
        if switches := [e for e in fabric.events("switch") if e["kind"] != "planned"]:
            raise Failure(f"a switch, where a migration is enough: {switches[0]}")
        fabric.clear()
        cleared_us = now_us()
        wait_until(lambda: moved(fabric, 0.1)[ends[0]] > least // 20, 5, "it goes back to port 1")
        back_s = (now_us() - cleared_us) / 1e6
        for end in (client, server):
            end.expect_success(30)
        if any(s["kind"] != "planned" or s["replayed"] for s in fabric.events("switch")):
            raise Failure(f"something was replayed: {fabric.events('switch')}")
        migrations = len(fabric.events("path-migrated"))
        shown = f"gap {gap_ms:.1f} ms, {migrations} migrations"
        return gap_ms, f"{shown}, back on port 1 after {back_s:.1f} s"


@pytest.mark.smoke
def test_peers_that_are_found_late(logs):
    """The directory answers long after the queue pairs are connected. Receivers stay in RTR, where
    no port pair can be loaded: they get theirs with a fresh life, once, and then migrate."""
    count = 16
    with Redis(None, logs) as redis, Fabric(logs, *PORTS) as fabric:
        redis.start()
        redis.start_proxy()
        redis.delay(LATE_MS)
        fabric.env |= redis.env()
        args = ["-s", 65536, "-q", count // 2, "-F", "-D", 2 * SECONDS]
        ends = fabric.pair("ib_send_bw", args)
        armed(fabric, count)
        switches = fabric.events("switch")
        fresh = {(e["qp"], e["reason"]) for e in switches if e["reason"] == "port-pair"}
        if len(fresh) != count // 2 or any(e["kind"] != "planned" for e in switches):
            raise Failure(f"not each receiver has been given its port pair: {switches}")
        carries(fabric, ["a/0", "b/0"], "before the fault")
        fabric.fault("cable a/0/1 cut")
        migrated = lambda: len(fabric.events("path-migrated")) >= count
        wait_until(migrated, 5, "all queue pairs migrate")
        carries(fabric, ["a/0/2", "b/0/2"], "with the fault")
        for end in ends:
            end.expect_success(30)
        again = [e for e in fabric.events("switch")[len(switches) :] if e["kind"] != "planned"]
        if again:
            raise Failure(f"a switch, where a migration is enough: {again[0]}")


def pairs_of_tool_and_fault() -> list:
    """Each program and each fault, on both kinds of device (`--long`: each program with each
    fault)."""
    chosen = []
    for i, tool in enumerate(TOOLS):
        for j, fault in enumerate(FAULTS):
            for device in ("full", "plain"):
                plain = device == "plain"
                covering = (i + plain) % len(FAULTS) == j and (i % 2 == 0 or not plain)
                if options.LONG or covering:
                    name = f"{device}-{tool}-{word(fault)}"
                    chosen.append(pytest.param(device, tool, fault, id=name))
    return chosen


def word(fault: str) -> str:
    """The id of a fault."""
    return fault.replace("/", "").replace(" ", "-")


@pytest.mark.parametrize("device, tool, fault", pairs_of_tool_and_fault(), indirect=["device"])
def test_perftest(logs, note, device, tool, fault):
    note(perftest(logs, tool, fault)[1])


@pytest.mark.timing
@pytest.mark.parametrize("fault", FAULTS, ids=word)
def test_gap(logs, note, fault):
    """The median gap of a stream whose port fails."""
    gaps_ms = []
    for n in range(GAPS):
        folder = logs / str(n)
        folder.mkdir()
        gaps_ms.append(perftest(folder, "ib_write_bw", fault)[0])
    gap_ms = statistics.median(gaps_ms)
    note(f"median of {GAPS} gaps {gap_ms:.1f} ms")
    assert gap_ms <= FAULTS[fault], f"gaps of {gaps_ms} ms"


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(
            [("cable a/0/2 cut", 2.5), ("nic a/0/1 down", 0)], id="port-2-known-to-be-dead"
        ),
        pytest.param([("nic b/0/2 down", 0), ("nic b/0/1 down", 0)], id="port-2-a-moment-before"),
        pytest.param([("cable a/0 cut", 0)], id="both-at-once"),
        pytest.param(
            [("nic a/0/1 down", 0.5), ("cable b/0/2 cut", 0)],
            id="port-2-after-the-migration",
            marks=pytest.mark.smoke,
        ),
        pytest.param(
            [("cable a/0/1 cut", 0.5), ("nic a/0 dead", 0)], id="nic-dies-after-the-migration"
        ),
    ],
)
def test_switch_where_both_ports_fail(logs, note, device, faults):
    """The other port is dead, too: a switch to another NIC, and every message is verified."""
    left = ["1", "2", "3"]
    with Fabric(logs, *PORTS) as fabric:
        run = Verifier(fabric, logs)
        armed(fabric, len(fabric.status()["qps"]))
        for fault, pause_s in faults:
            fabric.fault(fault)
            time.sleep(pause_s)
        wait_until(
            lambda: (
                {e["host"] for e in fabric.events("switch") if e["kind"] == "passive"} == {"a", "b"}
            ),
            10,
            "both ends switch",
        )
        run.progress("after the switch")
        sent = {port for port, n in moved(fabric).items() if n > SILENCE_BYTES}
        if not sent or any(port.split("/")[1] not in left for port in sent):
            raise Failure(f"{sent} carry, where only NICs {left} can")
        fabric.clear()
        note(run.finish())


def test_one_nic(logs, note, device):
    """Hosts with one NIC of two ports."""
    tool = "ib_send_bw" if device == "plain" else "ib_write_bw"
    with Fabric(logs, *PORTS, "--nics", "1") as fabric:
        server, client = fabric.pair(tool, ["-F", "-s", 65536, "-D", SECONDS])
        armed(fabric, 2)
        fabric.fault("nic a/0/1 down")
        wait_until(lambda: len(fabric.events("path-migrated")) >= 2, 5, "both ends migrate")
        carries(fabric, ["a/0/2", "b/0/2"], "with the fault")
        fabric.clear()
        wait_until(
            lambda: moved(fabric, 0.1)["a/0"] > STREAM_BYTES // 20, 5, "it goes back to port 1"
        )
        for end in (client, server):
            end.expect_success(30)
        note(f"{len(fabric.events('switch'))} planned switches")


def test_one_nic_both_ports_down(logs, device):
    """Hosts with one NIC, both ports of which are down for a second: it is waited for, as without
    failover."""
    with Fabric(logs, *PORTS, "--nics", "1") as fabric:
        server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-D", SECONDS])
        armed(fabric, 2)
        fabric.fault("nic a/0 down")
        time.sleep(1)
        fabric.clear()
        wait_until(lambda: sum(moved(fabric, 0.1).values()) > STREAM_BYTES // 20, 10, "it goes on")
        for end in (client, server):
            end.expect_success(30)


def test_switched_off(logs, device):
    """UNBROKEN_APM=0: no other port pair is loaded, and a port that fails is a switch."""
    with Fabric(logs, *PORTS) as fabric:
        fabric.env["UNBROKEN_APM"] = "0"
        server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-D", SECONDS])
        wait_until(
            lambda: sum(qp["protected"] for qp in fabric.status()["qps"]) == 2,
            20,
            "both ends are protected",
        )
        carries(fabric, ["a/0", "b/0"], "before the fault")
        fabric.fault("nic a/0/1 down")
        wait_until(lambda: len(fabric.events("switch")) == 2, 5, "both ends switch")
        sent = moved(fabric)
        if sent["a/0/2"] or fabric.events("path-migrated"):
            raise Failure(f"something has migrated: {sent}")
        for end in (client, server):
            end.expect_success(30)


def spread(logs) -> tuple:
    """UNBROKEN_APM=spread: queue pairs take turns over both ports, by migration, and have the rate
    of both; with one port dark all are on the other, and come back. Gives the shares of its rate
    that each port carries, and what it showed in words."""
    with Fabric(logs, *PORTS) as fabric:
        fabric.env["UNBROKEN_APM"] = "spread"
        for port in (1, 2):
            fabric.fault(f"rate a/0/{port} {RATE_MBIT}Mbit")
        server, client = fabric.pair("ib_write_bw", ["-F", "-s", 16384, "-q", 8, "-D", 20])
        wait_until(
            lambda: len(fabric.events("path-migrated")) >= 8, 10, "half of the queue pairs migrate"
        )

        def shares(seconds=1.0):
            sent = moved(fabric, seconds)
            return [sent[port] * 8e-6 / seconds / RATE_MBIT for port in ("a/0", "a/0/2")]

        both = shares()
        fabric.fault("nic a/0/1 down")
        wait_until(lambda: shares(0.2)[0] < SILENT_SHARE, 5, "port 1 carries nothing")
        one = shares(0.5)
        fabric.clear("nic a/0/1 down")
        # How much a busy machine carries at all says nothing of the ports.
        balanced = lambda: (now := shares(0.3)) and min(now) > max(SILENT_SHARE, max(now) / 4)
        wait_until(balanced, 12, "both carry again")
        for end in (client, server):
            end.expect_success(30)
        if any(s["kind"] != "planned" for s in fabric.events("switch")):
            raise Failure(f"a switch, where migrations are enough: {fabric.events('switch')[0]}")
        shown = f"{both[0]:.0%} and {both[1]:.0%} of {RATE_MBIT} Mbit/s a port"
        return both, f"{shown}; with port 1 down {one[1]:.0%} of one"


def test_spread_over_both_ports(logs, note, device):
    both, shown = spread(logs)
    note(shown)
    assert min(both) > SILENT_SHARE, f"the ports carry {both} of their rates"


@pytest.mark.timing
def test_spread_has_the_rate_of_both_ports(logs, note):
    both, shown = spread(logs)
    note(shown)
    assert min(both) >= HALF, f"the ports carry {both} of their rates"


@pytest.mark.parametrize("seed", range(options.SEED, options.SEED + SEEDS))
def test_random_faults(logs, note, device, seed):
    """Ports, cables, switches and NICs fail at random, up to three at once, and every message is
    verified."""
    rng = random.Random(seed)
    with Fabric(logs, *PORTS) as fabric:
        run = Verifier(fabric, logs)
        armed(fabric, len(fabric.status()["qps"]))
        for i in range(ROUNDS):
            rail = run.rail()
            host, port = rng.choice("ab"), rng.choice((1, 2))
            switch = f"switch rail{rail}{'b' if port == 2 else ''} down"
            of_pair = [f"nic {host}/{rail}/{port} down", f"cable {host}/{rail}/{port} cut", switch]
            of_nic = [f"nic {host}/{rail} dead", f"cable {host}/{rail} cut"]
            faults = {rng.choice(of_pair)} | {
                rng.choice(of_pair + of_nic) for _ in range(rng.randrange(3))
            }
            for fault in faults:
                fabric.fault(fault)
                time.sleep(rng.choice((0, 0.002, 0.05, 0.3)))
            run.progress(f"in round {i} under {sorted(faults)}")
            fabric.clear()
            run.settled()
        done = run.finish()
        note(f"{len(fabric.events('path-migrated'))} migrations, {done}")


@pytest.mark.parametrize(
    "fault",
    ["flap a/0/1 down=50ms up=50ms", "flap cable b/0/1 down=200ms up=200ms"],
    ids=["port", "cable"],
)
def test_port_flaps(logs, note, device, fault):
    """A port that flaps: traffic goes on, and how often queue pairs go to and fro is bounded."""
    with Fabric(logs, *PORTS) as fabric:
        run = Verifier(fabric, logs)
        count = len(fabric.status()["qps"])
        armed(fabric, count)
        fabric.fault(fault)
        for i in range(8):
            time.sleep(0.5)
            run.progress(f"under '{fault}', part {i}")
        fabric.clear()
        migrations, switches = len(fabric.events("path-migrated")), len(fabric.events("switch"))
        # A port pair that failed has to be steady, ever longer, before anybody goes back to it.
        if migrations > 6 * count or switches > 4 * count:
            raise Failure(
                f"{migrations} migrations and {switches} switches of {count} queue pairs in 4 s"
            )
        note(f"{migrations} migrations; {run.finish()}")


def test_no_fault_no_migration(logs, device):
    """Without a fault nothing migrates."""
    with Fabric(logs, *PORTS) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-q", 8, "-b", "-D", 3])
        for end in (client, server):
            end.expect_success(30)
        if events := [e for e in fabric.events() if e["event"] != "port-active"]:
            raise Failure(f"{len(events)} events without a fault, as {events[0]}")
