#!/usr/bin/env python3
"""Automatic path migration: a C program over verbs (tests/c/apm.c) loads alternate paths between NICs with two ports, and goes on over them
by request, and when ports, cables and switches fail under it; every message is verified, and the counters say which port carried it.
Then the library of path migration (include/unbroken/apm.h), by tests/c/apm_library.c, and its example.
"""

import json
import subprocess
import sys

from lib import device
from lib.cc import FLAGS, compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.suite import BUILD, ROOT, TARGET, Suite

SECONDS = 60
RUN_MS = 3000
RETRY_EXC = 12
INFINIBAND = ("--link-layer", "infiniband")
# QPs, messages at a time on each, bytes.
PINGPONG, STREAM = ("1", "1", "4096"), ("1", "16", "65536")
SHAPES = {"ping-pong": PINGPONG, "streaming": STREAM, "8 QPs": ("8", "8", "8192"), "64 QPs": ("64", "2", "4096")}
# Each takes away the path of port 1.
FAULTS = ["nic a/0/1 down", "nic b/0/1 down", "cable a/0/1 cut", "cable b/0/1 cut", "switch rail0 down"]
# The same, of packets: lost, or later than the retries.
LOSSES = ["loss a/0/1 100%", "loss cable b/0/1 rx 100%", "loss rail0 100%"]
TOO_LATE = "delay rail0 1s"
# The time that a round trip takes longer than on a path that is well, where each way is late by half of it.
LATE_US = 20_000
LIBRARY = ["-I", ROOT / "include", "-L", BUILD, "-lunbroken_apm", "-libverbs", f"-Wl,-rpath,{BUILD}"]
# How many queue pairs, and rounds, times are measured with.
TIMES_QPS, TIMES_ROUNDS = tuple(1 << n for n in range(11)), 30
# What control messages and the last packets before the fault take on a port that is left.
SILENCE_BYTES = 1_000_000


def sent(fabric: Fabric, port: str) -> int:
    return fabric.nics()[port]["tx_payload_bytes"]


def running(fabric: Fabric, shape, *more, failover=False, ms=RUN_MS):
    """Starts both ends; gives them when all QPs are armed and messages flow."""
    program, port = compile_c("apm", "-libverbs"), free_port()
    server = fabric.run("b", [program, port], "b-apm", failover)
    wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the server listens")
    client = fabric.run("a", [program, f"127.0.0.1:{port}", *shape, ms, *more], "a-apm", failover)
    return server, client


def messages(client) -> int:
    """How many were complete at the client's last heartbeat."""
    lines = [line.split() for line in client.output().splitlines() if line.startswith("messages ")]
    return int(lines[-1][1]) if lines and len(lines[-1]) == 2 and lines[-1][1] else 0


def flows(client):
    """Waits for more messages than two heartbeats can have known of."""
    for _ in range(2):
        before = messages(client)
        wait_until(lambda: client.ended() or messages(client) > before, 20, "messages flow")
    if client.ended():
        raise Failure(f"the client ended early: {client.output()[-500:]}")


def result(server, client) -> dict:
    client.expect_success(SECONDS)
    server.expect_success(SECONDS)
    return json.loads(client.output().splitlines()[-1])


def check(found: dict, qps: int, error=0):
    """All QPs of both ends have migrated, once, and told so."""
    right = {"error": error, "migrated": qps, "peer_migrated": qps, "not_migrated": 0, "peer_not_migrated": 0}
    wrong = {k: found[k] for k, v in right.items() if found[k] != v}
    if wrong:
        raise Failure(f"{wrong} where {right} is right: {found}")


def carried(fabric: Fabric, first: int) -> str:
    """Fails unless port 2 has carried the rest, and port 1 little more than `first`."""
    one, two = sent(fabric, "a/0"), sent(fabric, "a/0/2")
    if one > first + SILENCE_BYTES or two == 0:
        raise Failure(f"port 1 carried {one} bytes ({first} before), port 2 {two}")
    return f"{one / 1e6:.1f} MB on port 1, {two / 1e6:.1f} MB on port 2"


def fault(logs, shape, text: str, settings=()):
    """The path of port 1 fails in mid-traffic."""
    with Fabric(logs, "--ports", "2", *settings) as fabric:
        server, client = running(fabric, shape)
        flows(client)
        if sent(fabric, "a/0/2"):
            raise Failure("port 2 carried something before the fault")
        fabric.fault(text)
        first = sent(fabric, "a/0")
        flows(client)
        statuses = [qp for qp in fabric.status()["qps"] if qp["migration"]]
        if not statuses or any(qp["migration"] != "migrated" or not qp["primary"].startswith(f"{qp['host']}/0/2-") for qp in statuses):
            raise Failure(f"unbroken status: {statuses[:2]}")
        found = result(server, client)
        check(found, int(shape[0]))
        events = fabric.events("path-migrated")
        if len(events) != 2 * int(shape[0]):
            raise Failure(f"{len(events)} migrations in the event log")
        return f"{found['messages']} messages, {carried(fabric, first)}, longest pause {found['longest_us'] / 1000:.1f} ms"


def request(logs, shape, settings=()):
    """The program asks for the migration."""
    with Fabric(logs, "--ports", "2", *settings) as fabric:
        server, client = running(fabric, shape, "request")
        found = result(server, client)
        check(found, int(shape[0]))
        note = carried(fabric, sent(fabric, "a/0"))
        return f"{found['messages']} messages, {note}, {found['event_us']} us to the last event, longest pause {found['longest_us'] / 1000:.1f} ms"


def delayed(logs):
    """Packets are late at port 1 alone: after the migration round trips are short again, in the same process and while the fault lasts."""
    with Fabric(logs, "--ports", "2") as fabric:
        fabric.fault(f"delay rail0 {LATE_US // 2}us")
        server, client = running(fabric, PINGPONG, "request")
        found = result(server, client)
        check(found, 1)
        before_us, after_us = found["least_us"]
        if before_us < LATE_US or not 0 < after_us < LATE_US // 2:
            raise Failure(f"the shortest round trip takes {before_us} us over port 1, {after_us} us over port 2: {found}")
        note = carried(fabric, sent(fabric, "a/0"))
        return f"{note}, shortest round trips {before_us} and {after_us} us"


def to_and_fro(logs, shape):
    """The client asks again and again, and both ends load the path that they have left."""
    with Fabric(logs, "--ports", "2") as fabric:
        server, client = running(fabric, shape, "rearm")
        found = result(server, client)
        least = int(shape[0]) * 2
        if found["error"] or found["not_migrated"] or min(found["migrated"], found["peer_migrated"]) < least:
            raise Failure(f"too few migrations, or an error: {found}")
        return f"{found['messages']} messages, {found['migrated']} migrations"


def dead_too(logs, text: str, told: bool):
    """Where the alternate path is dead, too, the program has the error that it would have had without one."""
    with Fabric(logs, "--ports", "2") as fabric:
        server, client = running(fabric, PINGPONG)
        flows(client)
        fabric.fault(text)
        found = result(server, client)
        events = (found["migrated"], found["not_migrated"])
        if found["error"] != RETRY_EXC or events != ((0, 1) if told else (1, 0)):
            raise Failure(f"{found}")


def failover(logs):
    """With failover on it is Unbroken that moves the QPs: alternate paths are refused."""
    with Fabric(logs, "--ports", "2") as fabric:
        server, client = running(fabric, PINGPONG, failover=True)
        wait_until(lambda: client.ended() and server.ended(), 20, "both ends are refused")
        for end in (server, client):
            if "to load the alternate path: Operation not supported" not in end.output():
                raise Failure(f"not refused: {end.output()[-500:]}")


class Library:
    """Both ends of tests/c/apm_library.c, or of another program of the same kind."""

    def __init__(self, fabric: Fabric, *words, name="apm_library", failover=False):
        program, port = compile_c(name, *LIBRARY), free_port()
        self.server = fabric.run("b", [program, port], "b-library", failover)
        wait_until(lambda: self.server.ended() or listens(self.server.pid, port), 20, "the server listens")
        self.client = fabric.run("a", [program, f"127.0.0.1:{port}", *words], "a-library", failover)

    def reach(self, stage: str):
        """Waits until the client says that it is there."""
        there = lambda: f"stage {stage}\n" in self.client.output()
        wait_until(lambda: there() or self.client.ended() or self.server.ended(), SECONDS, f"stage {stage}")
        if not there():
            raise Failure(f"an end has ended before stage {stage}: {self.client.output()[-300:]} {self.server.output()[-300:]}")

    def succeed(self) -> str:
        for end in (self.client, self.server):
            end.expect_success(SECONDS)
            if not end.output().endswith("all is well\n"):
                raise Failure(f"{end.name} says {end.output()[-500:]}")
        return self.client.output()


def library(logs, qps: int, mode: str):
    """Paths are chosen, loaded, migrated to by request, loaded again by themselves, and migrated back to."""
    with Fabric(logs, "--ports", "2") as fabric:
        Library(fabric, qps, mode).succeed()
        migrations = len(fabric.events("path-migrated"))
        right = 2 * qps if mode == "own" else 0 if mode == "refuse" else 4 * qps
        if migrations != right:
            raise Failure(f"{migrations} migrations in the event log, where {right} are right")


def measured(logs, qps: int, mode: str, rounds: int) -> dict:
    """How long paths take to load and to migrate, as tests/c/apm_library.c tells it."""
    with Fabric(logs, "--ports", "2") as fabric:
        return json.loads(Library(fabric, qps, mode, rounds).succeed().splitlines()[0])


def times(logs, qps: int, mode: str, rounds: int):
    """The same in words."""
    found = measured(logs, qps, mode, rounds)
    span = lambda what: f"{found[what + '_us']} us ({found[what + '_least_us']} to {found[what + '_most_us']})"
    return f"armed within {span('armed')}, event of the migration after {span('noticed')}, wait over after {span('migrated')}: medians of {rounds}, least and most"


def library_port(logs, qps: int, text: str):
    """The NIC migrates; the thread loads the path that was left when its port is back."""
    with Fabric(logs, "--ports", "2") as fabric:
        ends = Library(fabric, qps, "port")
        ends.reach("armed")
        fabric.fault(text)
        ends.reach("migrated")
        states = {qp["migration"] for qp in fabric.status()["qps"] if qp["host"] == text.split()[1][0]}
        if states != {"migrated"}:
            raise Failure(f"a path is loaded whose port is down: {states}")
        fabric.clear()
        ends.reach("rearmed")
        ends.succeed()


def library_unhealthy(logs, qps: int):
    """An alternate path whose port is down is respecified, at both ends, and holds when the first path fails."""
    with Fabric(logs, "--ports", "2") as fabric:
        ends = Library(fabric, qps, "unhealthy")
        ends.reach("armed")
        fabric.fault("nic a/0/2 down")
        ends.reach("respecified")
        fabric.fault("nic b/0/1 down")
        ends.reach("migrated")
        ends.succeed()


def library_processes(logs, qps: int):
    with Fabric(logs, "--ports", "2") as fabric:
        both = Library(fabric, qps, "processes")
        both.succeed()
        if len(fabric.events("path-migrated")) != qps:
            raise Failure(f"{len(fabric.events('path-migrated'))} migrations of {qps // 2} queue pairs at two ends")


def figures(logs, name: str):
    """What `make figures` measures, in its shortest form: that it works."""
    out = logs / f"{name}.json"
    done = subprocess.run([sys.executable, ROOT / "benches" / "apm" / "figures.py", name, "--quick", "--out", out], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode != 0 or not json.loads(out.read_text())["rows"]:
        raise Failure(f"{done.stdout[-500:]} {done.stderr[-1000:]}")


def library_refused(logs, settings: tuple, failover: bool, words: str):
    """Where a device does not migrate, the library says so."""
    with Fabric(logs, *settings) as fabric:
        ends = Library(fabric, 1, "event", failover=failover)
        wait_until(lambda: ends.client.ended() and ends.server.ended(), SECONDS, "both ends are refused")
        if words not in ends.client.output() + ends.server.output():
            raise Failure(f"not refused: {ends.client.output()[-500:]} {ends.server.output()[-500:]}")


def header(logs):
    """The header is C++, too."""
    source = logs / "header.cc"
    source.write_text("#include <unbroken/apm.h>\nint main() { return unbapm_last_error()[0]; }\n")
    compiled("c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", logs / "header", source, *LIBRARY)
    subprocess.run([str(logs / "header")], check=True, timeout=SECONDS)


def compiled(*words):
    """Runs a compiler as users do."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Failure(f"{words[0]} fails: {done.stderr[:2000]}")


def example(logs):
    """The example in C is short, migrates by request, and goes on when the port that it has gone to dies."""
    source, program = ROOT / "crates/apm/examples" / "migrate.c", TARGET / "tests-c" / "example-migrate"
    if len(source.read_text().splitlines()) > 100:
        raise Failure("examples are 100 lines at most")
    program.parent.mkdir(parents=True, exist_ok=True)
    compiled("cc", *FLAGS, "-o", program, source, *LIBRARY)
    with Fabric(logs, "--ports", "2") as fabric:
        port, index = free_port(), {"GID_INDEX": str(fabric.gid_index or 0)}
        server = fabric.run("b", [program, port], "b-example", failover=False, env=index)
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the server listens")
        client = fabric.run("a", [program, port, "127.0.0.1", 8], "a-example", failover=False, env=index)

        def says(*lines):
            wait_until(lambda: client.ended() or client.output().startswith("\n".join(lines)), SECONDS, f"the client says {lines}")

        before = ["armed: port 2", "migrated: port 2, by request", "armed: port 1"]
        says(*before)
        fabric.fault("nic a/0/2 down")
        says(*before, "migrated: port 1\n")
        for end in (client, server):
            end.expect_success(SECONDS)
            if not end.output().endswith("all is well\n"):
                raise Failure(f"{end.name} says {end.output()}")


def main() -> int:
    parser = device.parser(__doc__)
    parser.add_argument("--only", action="append", help="only cases whose names contain this")
    parser.add_argument("--times", action="store_true", help="only how long paths take to load and to migrate, for 1 to 1,024 QPs")
    args = parser.parse_args()
    suite = Suite(device.use("apm", args.device), args.only)
    if args.times:
        for qps in TIMES_QPS:
            for mode in ("event", "query"):
                suite.case(f"times, {qps} QPs, by {mode}", times, qps, mode, TIMES_ROUNDS)
        return suite.finish()
    for name, shape in SHAPES.items():
        suite.case(f"by request, {name}", request, shape)
        suite.case(f"port down, {name}", fault, shape, FAULTS[0])
    for shape in ("ping-pong", "8 QPs"):
        suite.case(f"link layer InfiniBand, by request, {shape}", request, SHAPES[shape], INFINIBAND)
    for text in FAULTS[0], FAULTS[2]:
        suite.case(f"link layer InfiniBand, {text}, streaming", fault, STREAM, text, INFINIBAND)
    for text in FAULTS[1:]:
        suite.case(f"{text}, streaming", fault, STREAM, text)
    for text in LOSSES:
        suite.case(f"{text}, streaming", fault, STREAM, text)
    suite.case(f"{TOO_LATE}, ping-pong", fault, PINGPONG, TOO_LATE)
    suite.case("delay at one port, ping-pong", delayed)
    suite.case("to and fro, 4 QPs", to_and_fro, ("4", "8", "4096"))
    suite.case("the alternate path is silent, too", dead_too, "cable a/0 cut", False)
    suite.case("the alternate port is down, too", dead_too, "nic a/0 down", True)
    suite.case("refused with failover", failover)
    for mode in ("event", "query"):
        suite.case(f"library: there and back, 64 QPs, by {mode}", library, 64, mode)
        suite.case(f"library: times, 64 QPs, by {mode}", times, 64, mode, 10)
    suite.case("library: the program reads its events", library, 4, "own")
    suite.case("library: bad input", library, 1, "refuse")
    for text in ("nic a/0/1 down", "nic b/0/1 down"):
        suite.case(f"library: {text}, loaded again when it is back, 8 QPs", library_port, 8, text)
    suite.case("library: an unhealthy alternate is respecified, 8 QPs", library_unhealthy, 8)
    suite.case("library: lists of processes, 16 QPs", library_processes, 16)
    for name in ("5-6", "7", "8", "computation"):
        suite.case(f"figures: {name}, in short", figures, name)
    suite.case("library: one port is refused", library_refused, ("--ports", "1"), False, "IBV_DEVICE_AUTO_PATH_MIG")
    suite.case("library: refused with failover", library_refused, ("--ports", "2"), True, "Operation not supported")
    suite.case("library: the header is C++", header)
    suite.case("library: the example", example)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
