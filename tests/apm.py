#!/usr/bin/env python3
"""Automatic path migration: a C program over verbs (tests/c/apm.c) loads alternate paths between NICs with two ports, and goes on over them
by request, and when ports, cables and switches fail under it; every message is verified, and the counters say which port carried it.
"""

import argparse
import json
import sys

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.suite import Suite

SECONDS = 60
RUN_MS = 3000
RETRY_EXC = 12
# QPs, messages at a time on each, bytes.
PINGPONG, STREAM = ("1", "1", "4096"), ("1", "16", "65536")
SHAPES = {"ping-pong": PINGPONG, "streaming": STREAM, "8 QPs": ("8", "8", "8192"), "64 QPs": ("64", "2", "4096")}
# Each takes away the path of port 1.
FAULTS = ["nic a/0/1 down", "nic b/0/1 down", "cable a/0/1 cut", "cable b/0/1 cut", "switch rail0 down"]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="only cases whose names contain this")
    suite = Suite("apm", parser.parse_args().only)
    for name, shape in SHAPES.items():
        suite.case(f"by request, {name}", request, shape)
        suite.case(f"port down, {name}", fault, shape, FAULTS[0])
    for text in FAULTS[1:]:
        suite.case(f"{text}, streaming", fault, STREAM, text)
    suite.case("to and fro, 4 QPs", to_and_fro, ("4", "8", "4096"))
    suite.case("the alternate path is silent, too", dead_too, "cable a/0 cut", False)
    suite.case("the alternate port is down, too", dead_too, "nic a/0 down", True)
    suite.case("refused with failover", failover)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
