#!/usr/bin/env python3
"""Ends that must come: a killed peer, no NIC left, failover switched off. And the plain use of the devices."""

import signal
import sys
import time

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, Skip, wait_until
from lib.suite import ROOT, Suite

# A peer may be stopped, not dead, and a NIC may come back: after 20 s without a path or a word, shift gives up.
DEADLINE_SECONDS = 20
LATE_SECONDS = 20
EVENT_MESSAGES = 50000
# One in some fifty dies where a thread may still be inside of such a function.
PATCHED_ROUNDS = 200
NOT_KNOWN_HERE = 77


def stream(fabric, tool="ib_write_bw", failover=True, seconds=30, extra=()):
    """A stream that would run for long; returns when it flows."""
    server, client = fabric.pair(tool, ["-F", "-s", 65536, "-q", 4, "-D", seconds, *extra], failover)
    wait_until(lambda: client.ended() or server.ended() or fabric.nics()["b/0"]["rx_payload_bytes"] > 1e6, 20, "traffic")
    for process in (server, client):
        if process.ended():
            raise Failure(f"{process.name} ended before any traffic flowed")
    return server, client


def explains(event, *words):
    """A QP that is given up says in the event what is known, since nothing else is left of it."""
    missing = [w for w in words if w not in event["why"]]
    if missing:
        raise Failure(f"the event does not say {missing}: {event}")


def killed_peer(logs):
    """SIGKILL to the server in mid-stream: the client ends with an error."""
    with Fabric(logs) as fabric:
        server, client = stream(fabric)
        server.kill(signal.SIGKILL)
        killed = time.monotonic()
        client.expect_error(DEADLINE_SECONDS)
        if "error" not in client.output().lower() and "fail" not in client.output().lower():
            raise Failure("the client does not tell of an error")
        for event in fabric.events("give-up"):
            explains(event, "its process has ended", "a/0-b/0")
        return f"error after {client.ended_at - killed:.1f} s"


def nothing_left(logs, hosts):
    """Every NIC of some hosts dies and none comes back: the original error at both ends, within the deadline."""
    with Fabric(logs) as fabric:
        server, client = stream(fabric, "ib_send_bw", seconds=60, extra=["-b"])
        for nic in [name for name in fabric.nics() if name[0] in hosts]:
            fabric.fault(f"nic {nic} dead")
        dead = time.monotonic()
        for process in (client, server):
            process.expect_error(DEADLINE_SECONDS + LATE_SECONDS)
        if {e["host"] for e in fabric.events("give-up")} != {"a", "b"}:
            raise Failure("a give-up event is missing")
        for event in fabric.events("give-up"):
            path = {"a": "a/0-b/0", "b": "b/0-a/0"}[event["host"]]
            where = "; without a working NIC here: " if event["host"] in hosts else "; without a NIC of the peer: "
            explains(event, where + path, " was left ", " epoch", "; the error is ")
        return f"errors after {client.ended_at - dead:.1f} s and {server.ended_at - dead:.1f} s"


def all_down_for_a_while(logs):
    """Every NIC of a host goes down; one comes back before the deadline: the stream goes on."""
    with Fabric(logs) as fabric:
        server, client = stream(fabric, "ib_send_bw", seconds=5, extra=["-b"])
        for nic in [name for name in fabric.nics() if name[0] == "a"]:
            fabric.fault(f"nic {nic} down")

        def carried():
            return sum(nic["rx_payload_bytes"] for name, nic in fabric.nics().items() if name[0] == "b")

        time.sleep(1)
        still = carried()
        fabric.clear("nic a/2")
        client.expect_success(30)
        server.expect_success(10)
        # By whatever path: host b may use any of its NICs.
        if fabric.nics()["a/2"]["tx_payload_bytes"] < 1e6:
            raise Failure(f"of {carried() - still} bytes since then, a/2 sent few")
        return f"{(carried() - still) / 1e9:.2f} GB after a second without any NIC"


def no_failover(logs):
    """`--no-failover` shows what the fault does without us."""
    with Fabric(logs) as fabric:
        server, client = stream(fabric, failover=False)
        fabric.fault("nic a/0 dead")
        client.expect_error(20)
        server.kill()
        if fabric.events("switch"):
            raise Failure("a switch without failover")
        lines = [line for line in client.output().splitlines() if "ailed" in line or "rror" in line]
        if not lines:
            raise Failure("the client does not tell of an error")
        return f"'{lines[0].strip()}'"


def event_driven(logs, fault):
    """Sleeping for completion events (-e, which perftest allows for SEND with a number of messages only), through a fault."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-e", "-n", EVENT_MESSAGES])
        wait_until(lambda: client.ended() or fabric.nics()["b/0"]["rx_payload_bytes"] > 1e6, 20, "traffic")
        fabric.fault(fault)
        client.expect_success(60)
        server.expect_success(10)
        carried = fabric.elsewhere("b/0", "rx_payload_bytes")
        if carried < 1e6:
            raise Failure(f"only {carried} bytes on other rails")
        return f"{carried / 1e9:.2f} GB on other rails"


def latency(logs, tool):
    """The latency programs: short messages, no fault."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair(tool, ["-F", "-s", 8, "-n", 2000])
        client.expect_success(60)
        server.expect_success(10)
        figures = [line.split() for line in client.output().splitlines() if line.strip().startswith("8 ")]
        if not figures or len(figures[0]) < 5 or float(figures[0][4]) <= 0:
            raise Failure(f"the client printed no figures: {client.output()[-500:]}")
        return f"typical {figures[0][4]} us"


def ends(logs):
    """Programs that end or begin while others use the same NICs."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-D", 3])
        others = [fabric.pair("ib_send_bw", ["-F", "-s", 4096, "-n", 500]) for _ in range(4)]
        for pair in others:
            for process in pair:
                process.expect_success(30)
        client.expect_success(30)
        server.expect_success(10)
        if fabric.events("switch"):
            raise Failure("a switch without a fault")
        return "5 pairs on the same NICs"


def tools(logs):
    """ibv_devices, ibv_devinfo, and a program that has nothing to do with verbs."""
    with Fabric(logs) as fabric:
        listing = fabric.run("a", ["ibv_devices"])
        listing.expect_success(20)
        if "unb0" not in listing.output() or "unb3" not in listing.output():
            raise Failure(f"ibv_devices: {listing.output()}")
        info = fabric.run("b", ["ibv_devinfo", "-v"])
        info.expect_success(20)
        for word in ("unb0", "PORT_ACTIVE", "Ethernet", "GID[  0]"):
            if word not in info.output():
                raise Failure(f"ibv_devinfo does not show '{word}'")
        fabric.fault("nic b/0 down")
        down = fabric.run("b", ["ibv_devinfo", "-d", "unb0"], "devinfo-down")
        down.expect_success(20)
        if "PORT_DOWN" not in down.output():
            raise Failure("ibv_devinfo does not show a port that is down")
        plain = fabric.run("a", ["python3", "-c", "import socket, subprocess; subprocess.run(['true'], check=True); print('fine')"])
        plain.expect_success(20)
        if "fine" not in plain.output() or len(plain.output().splitlines()) != 1:
            raise Failure(f"a program without verbs was disturbed: {plain.output()}")
        return ""


def patched(logs):
    """A program that overwrites the C library's functions for memory as soon as a device is open, as Open MPI and UCX do."""
    program = compile_c("patched", "-libverbs")
    with Fabric(logs) as fabric:
        for turn in range(PATCHED_ROUNDS):
            delay_us = turn % 2 * turn * 10
            process = fabric.run("a", [program, "unb0", delay_us], "patched")
            if process.wait(20) == NOT_KNOWN_HERE:
                raise Skip("only x86-64 is known to patched.c")
            process.expect_success(0)
        return f"{PATCHED_ROUNDS} rounds"


def newer_functions() -> list:
    """The functions of the newer libibverbs that this library stands for, too."""
    lines = (ROOT / "crates/api/preload" / "libibverbs.txt").read_text().splitlines()
    return [line.split()[0] for line in lines if not line.startswith("#")]


def alone(logs, name, args=()):
    """A C program that needs one host, and says what it did."""
    program = compile_c(name, "-libverbs")
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, *args], name)
        process.expect_success(60)
        return process.output().splitlines()[-1]


def speechless(logs):
    """Reasons that are asked for and cannot be written: the program gets the same errors, without them."""
    program, shell = compile_c("newer", "-libverbs"), ["sh", "-c", 'exec "$0" "$@" 2> /dev/full']
    with Fabric(logs) as fabric:
        process = fabric.run("a", [*shell, program, *newer_functions()], "newer", env={"UNBROKEN_LOG": "1"})
        process.expect_success(60)
        return process.output().splitlines()[-1]


def pingpong(logs, program, extra):
    """The examples of rdma-core between two hosts."""
    with Fabric(logs) as fabric:
        port = free_port()
        args = [program, "-d", "unb0", "-g", 0, "-p", port, "-n", 1000, *extra]
        server = fabric.run("b", args, "b-pingpong")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, f"{program} listens")
        client = fabric.run("a", args + ["127.0.0.1"], "a-pingpong")
        client.expect_success(30)
        server.expect_success(10)
        return client.output().splitlines()[-1]


def main() -> int:
    """Runs all of it."""
    suite = Suite("lifecycle", sys.argv[1:])
    suite.case("ibv_devices, ibv_devinfo, a program without verbs", tools)
    suite.case("the C library's functions overwritten", patched)
    suite.case("a signal ends a wait", alone, "signals")
    suite.case("a forked child", alone, "forked")
    suite.case("memory that is not there", alone, "unmapped")
    suite.case("a completion queue that overruns", alone, "overrun")
    suite.case("functions of a newer libibverbs", alone, "newer", newer_functions())
    suite.case("standard error is full", speechless)
    suite.case("ibv_rc_pingpong", pingpong, "ibv_rc_pingpong", [])
    suite.case("ibv_rc_pingpong with events", pingpong, "ibv_rc_pingpong", ["-e"])
    suite.case("ibv_ud_pingpong", pingpong, "ibv_ud_pingpong", [])
    for tool in ("ib_send_lat", "ib_write_lat", "ib_read_lat"):
        suite.case(tool, latency, tool)
    suite.case("several programs on the same NICs", ends)
    suite.case("ib_send_bw -e, nic dead", event_driven, "nic a/0 dead")
    suite.case("ib_send_bw -e, cable cut", event_driven, "cable b/0 cut")
    suite.case("no failover", no_failover)
    suite.case("all NICs of one end down for a second", all_down_for_a_while)
    suite.case("all NICs of one end dead", nothing_left, "a")
    suite.case("all NICs of both ends dead", nothing_left, "ab")
    suite.case("peer killed", killed_peer)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
