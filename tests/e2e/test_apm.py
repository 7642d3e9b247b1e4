"""Automatic path migration.

A C program over verbs (tests/c/apm.c) loads alternate paths between NICs with two ports, and goes
on over them by request, and when ports, cables and switches fail under it. Every message is
verified, and the counters show which port carried it. Then the library of path migration
(include/unbroken/apm.h), by tests/c/apm_library.c, and its example.
"""

import json
import subprocess
import sys

import pytest

from lib.apm import LIBRARY, SECONDS, TIMES_QPS, TIMES_ROUNDS, Library, measured, sent
from lib.cc import EXAMPLE_LINES, check_header_in_cpp, compile_c, compile_example
from lib.fabric import Fabric
from lib.paths import ROOT
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

RUN_MS = 3000
RETRY_EXC = 12
INFINIBAND = ("--link-layer", "infiniband")
# QPs, messages at a time on each, bytes.
PINGPONG, STREAM = ("1", "1", "4096"), ("1", "16", "65536")
EIGHT_QPS, QPS_64 = ("8", "8", "8192"), ("64", "2", "4096")
SHAPES = {"ping-pong": PINGPONG, "8-qps": EIGHT_QPS, "64-qps": QPS_64}
# Each takes away the path of port 1.
FAULTS = [
    "nic a/0/1 down",
    "nic b/0/1 down",
    "cable a/0/1 cut",
    "cable b/0/1 cut",
    "switch rail0 down",
]
# The same, of packets: lost, or later than the retries.
LOSSES = ["loss a/0/1 100%", "loss cable b/0/1 rx 100%", "loss rail0 100%"]
TOO_LATE = "delay rail0 1s"
# The time that a round trip takes longer than on a path that is well, where each way is late by
# half of it.
LATE_US = 20_000
# What control messages and the last packets before the fault take on a port that is left.
SILENCE_BYTES = 1_000_000


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
    """What the client reports at its end, when both ends have ended well."""
    client.expect_success(SECONDS)
    server.expect_success(SECONDS)
    return json.loads(client.output().splitlines()[-1])


def check(found: dict, qps: int, error=0):
    """All QPs of both ends have migrated, once, and told so."""
    right = {
        "error": error,
        "migrated": qps,
        "peer_migrated": qps,
        "not_migrated": 0,
        "peer_not_migrated": 0,
    }
    wrong = {k: found[k] for k, v in right.items() if found[k] != v}
    if wrong:
        raise Failure(f"{wrong} where {right} is right: {found}")


def carried(fabric: Fabric, first: int) -> str:
    """Fails unless port 2 has carried the rest, and port 1 little more than `first`."""
    one, two = sent(fabric, "a/0"), sent(fabric, "a/0/2")
    if one > first + SILENCE_BYTES or two == 0:
        raise Failure(f"port 1 carried {one} bytes ({first} before), port 2 {two}")
    return f"{one / 1e6:.1f} MB on port 1, {two / 1e6:.1f} MB on port 2"


def through_a_fault(logs, shape, text: str, settings=()):
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
        if not statuses or any(
            qp["migration"] != "migrated" or not qp["primary"].startswith(f"{qp['host']}/0/2-")
            for qp in statuses
        ):
            raise Failure(f"unbroken status: {statuses[:2]}")
        found = result(server, client)
        check(found, int(shape[0]))
        events = fabric.events("path-migrated")
        if len(events) != 2 * int(shape[0]):
            raise Failure(f"{len(events)} migrations in the event log")
        return (
            f"{found['messages']} messages, {carried(fabric, first)}, longest pause "
            f"{found['longest_us'] / 1000:.1f} ms"
        )


def by_request(logs, shape, settings=()):
    """The program asks for the migration."""
    with Fabric(logs, "--ports", "2", *settings) as fabric:
        server, client = running(fabric, shape, "request")
        found = result(server, client)
        check(found, int(shape[0]))
        note = carried(fabric, sent(fabric, "a/0"))
        return (
            f"{found['messages']} messages, {note}, {found['event_us']} us to the last event, "
            f"longest pause {found['longest_us'] / 1000:.1f} ms"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_by_request(logs, note, shape):
    note(by_request(logs, SHAPES[shape]))


def test_stream_by_request(logs, note, device):
    note(by_request(logs, STREAM))


@pytest.mark.parametrize("shape", ["ping-pong", "8-qps"])
def test_by_request_infiniband(logs, note, shape):
    note(by_request(logs, SHAPES[shape], INFINIBAND))


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=pytest.mark.smoke if s == "8-qps" else ()) for s in SHAPES],
)
def test_port_down(logs, note, shape):
    note(through_a_fault(logs, SHAPES[shape], FAULTS[0]))


def word(fault: str) -> str:
    """The id of a fault."""
    return fault.removesuffix(" 100%").replace("/", "").replace(" ", "-")


@pytest.mark.parametrize("fault", [FAULTS[0], FAULTS[2]], ids=word)
def test_stream_through_fault_infiniband(logs, note, device, fault):
    note(through_a_fault(logs, STREAM, fault, INFINIBAND))


@pytest.mark.parametrize("fault", FAULTS + LOSSES, ids=word)
def test_stream_through_fault(logs, note, device, fault):
    note(through_a_fault(logs, STREAM, fault))


def test_packets_too_late(logs, note):
    note(through_a_fault(logs, PINGPONG, TOO_LATE))


def test_delay_at_one_port(logs, note):
    """Packets are late at port 1 alone: after the migration round trips are short again, in the
    same process and while the fault lasts."""
    with Fabric(logs, "--ports", "2") as fabric:
        fabric.fault(f"delay rail0 {LATE_US // 2}us")
        server, client = running(fabric, PINGPONG, "request")
        found = result(server, client)
        check(found, 1)
        before_us, after_us = found["least_us"]
        if before_us < LATE_US or not 0 < after_us < LATE_US // 2:
            raise Failure(
                f"the shortest round trip takes {before_us} us over port 1, {after_us} us over "
                f"port 2: {found}"
            )
        moved = carried(fabric, sent(fabric, "a/0"))
        note(f"{moved}, shortest round trips {before_us} and {after_us} us")


def test_to_and_fro(logs, note):
    """The client asks again and again, and both ends load the path that they have left."""
    shape = ("4", "8", "4096")
    with Fabric(logs, "--ports", "2") as fabric:
        server, client = running(fabric, shape, "rearm")
        found = result(server, client)
        least = int(shape[0]) * 2
        if (
            found["error"]
            or found["not_migrated"]
            or min(found["migrated"], found["peer_migrated"]) < least
        ):
            raise Failure(f"too few migrations, or an error: {found}")
        note(f"{found['messages']} messages, {found['migrated']} migrations")


@pytest.mark.parametrize(
    "text, told",
    [("cable a/0 cut", False), ("nic a/0 down", True)],
    ids=["silent", "port-down"],
)
def test_alternate_path_is_dead(logs, text: str, told: bool):
    """Where the alternate path is dead, too, the program has the error that it would have had
    without one."""
    with Fabric(logs, "--ports", "2") as fabric:
        server, client = running(fabric, PINGPONG)
        flows(client)
        fabric.fault(text)
        found = result(server, client)
        events = (found["migrated"], found["not_migrated"])
        if found["error"] != RETRY_EXC or events != ((0, 1) if told else (1, 0)):
            raise Failure(f"{found}")


@pytest.mark.smoke
def test_refused_with_failover(logs):
    """With failover on it is Unbroken that moves the QPs: alternate paths are refused."""
    with Fabric(logs, "--ports", "2") as fabric:
        server, client = running(fabric, PINGPONG, failover=True)
        wait_until(lambda: client.ended() and server.ended(), 20, "both ends are refused")
        for end in (server, client):
            if "to load the alternate path: Operation not supported" not in end.output():
                raise Failure(f"not refused: {end.output()[-500:]}")


@pytest.mark.parametrize(
    "qps, mode",
    [
        pytest.param(64, "event", id="there-and-back-by-event", marks=pytest.mark.smoke),
        pytest.param(64, "query", id="there-and-back-by-query"),
        pytest.param(4, "own", id="program-reads-its-events"),
        pytest.param(1, "refuse", id="bad-input"),
    ],
)
def test_library(logs, qps: int, mode: str):
    """Paths are chosen, loaded, migrated to by request, loaded again by themselves, and migrated
    back to."""
    with Fabric(logs, "--ports", "2") as fabric:
        Library(fabric, qps, mode).succeed()
        migrations = len(fabric.events("path-migrated"))
        right = 2 * qps if mode == "own" else 0 if mode == "refuse" else 4 * qps
        if migrations != right:
            raise Failure(f"{migrations} migrations in the event log, where {right} are right")


def shown(found: dict, rounds: int) -> str:
    """Those times in words."""

    def span(what):
        least, most = found[what + "_least_us"], found[what + "_most_us"]
        return f"{found[what + '_us']} us ({least} to {most})"

    return (
        f"armed within {span('armed')}, event of the migration after {span('noticed')}, wait over "
        f"after {span('migrated')}: medians of {rounds}, least and most"
    )


@pytest.mark.parametrize("mode", ["event", "query"])
def test_library_times_are_told(logs, note, mode):
    note(shown(measured(logs, 64, mode, 10), 10))


@pytest.mark.timing
@pytest.mark.parametrize("mode", ["event", "query"])
@pytest.mark.parametrize("qps", TIMES_QPS)
def test_library_times(logs, note, qps, mode):
    """How long 1 to 1,024 QPs take to load a path and to migrate."""
    note(shown(measured(logs, qps, mode, TIMES_ROUNDS), TIMES_ROUNDS))


@pytest.mark.parametrize("text", ["nic a/0/1 down", "nic b/0/1 down"], ids=word)
def test_library_port_is_loaded_again(logs, text):
    """The NIC migrates; the thread loads the path that was left when its port is back."""
    with Fabric(logs, "--ports", "2") as fabric:
        ends = Library(fabric, 8, "port")
        ends.reach("armed")
        fabric.fault(text)
        ends.reach("migrated")
        states = {
            qp["migration"] for qp in fabric.status()["qps"] if qp["host"] == text.split()[1][0]
        }
        if states != {"migrated"}:
            raise Failure(f"a path is loaded whose port is down: {states}")
        fabric.clear()
        ends.reach("rearmed")
        ends.succeed()


def test_library_respecifies_an_unhealthy_path(logs):
    """An alternate path whose port is down is respecified, at both ends, and holds when the first
    path fails."""
    with Fabric(logs, "--ports", "2") as fabric:
        ends = Library(fabric, 8, "unhealthy")
        ends.reach("armed")
        fabric.fault("nic a/0/2 down")
        ends.reach("respecified")
        fabric.fault("nic b/0/1 down")
        ends.reach("migrated")
        ends.succeed()


def test_library_lists_of_processes(logs):
    with Fabric(logs, "--ports", "2") as fabric:
        qps = 16
        both = Library(fabric, qps, "processes")
        both.succeed()
        if len(fabric.events("path-migrated")) != qps:
            raise Failure(
                f"{len(fabric.events('path-migrated'))} migrations of {qps // 2} queue pairs at "
                "two ends"
            )


@pytest.mark.parametrize("name", ["5-6", "7", "8", "computation"])
def test_figures(logs, name: str):
    """What `make figures` measures, in its shortest form: that it works."""
    out = logs / f"{name}.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benches" / "apm" / "figures.py", name, "--quick", "--out", out],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode != 0 or not json.loads(out.read_text())["rows"]:
        raise Failure(f"{done.stdout[-500:]} {done.stderr[-1000:]}")


@pytest.mark.parametrize(
    "settings, failover, words",
    [
        (("--ports", "1"), False, "IBV_DEVICE_AUTO_PATH_MIG"),
        (("--ports", "2"), True, "Operation not supported"),
    ],
    ids=["one-port", "failover"],
)
def test_library_refused(logs, settings: tuple, failover: bool, words: str):
    """Where a device does not migrate, the library says so."""
    with Fabric(logs, *settings) as fabric:
        ends = Library(fabric, 1, "event", failover=failover)
        wait_until(
            lambda: ends.client.ended() and ends.server.ended(), SECONDS, "both ends are refused"
        )
        if words not in ends.client.output() + ends.server.output():
            raise Failure(
                f"not refused: {ends.client.output()[-500:]} {ends.server.output()[-500:]}"
            )


def test_header_in_cpp(logs):
    check_header_in_cpp(logs, "unbroken/apm.h", "unbapm_last_error()", *LIBRARY)


def test_example(logs):
    """The example in C is short, migrates by request, and goes on when the port that it has gone to
    dies."""
    source = ROOT / "crates/apm/examples/migrate.c"
    if len(source.read_text().splitlines()) > EXAMPLE_LINES:
        raise Failure(f"examples are {EXAMPLE_LINES} lines at most")
    program = compile_example(source, *LIBRARY)
    with Fabric(logs, "--ports", "2") as fabric:
        port, index = free_port(), {"GID_INDEX": str(fabric.gid_index or 0)}
        server = fabric.run("b", [program, port], "b-example", failover=False, env=index)
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the server listens")
        client = fabric.run(
            "a", [program, port, "127.0.0.1", 8], "a-example", failover=False, env=index
        )

        def says(*lines):
            wait_until(
                lambda: client.ended() or client.output().startswith("\n".join(lines)),
                SECONDS,
                f"the client says {lines}",
            )

        before = ["armed: port 2", "migrated: port 2, by request", "armed: port 1"]
        says(*before)
        fabric.fault("nic a/0/2 down")
        says(*before, "migrated: port 1\n")
        for end in (client, server):
            end.expect_success(SECONDS)
            if not end.output().endswith("all is well\n"):
                raise Failure(f"{end.name} says {end.output()}")
