"""Ends that must come: a killed peer, no NIC left, failover switched off. And the plain use of the
devices."""

import signal
import time

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.paths import ROOT
from lib.ports import free_port, listens
from lib.process import Failure, Skip, wait_until

# A peer may be stopped, not dead, and a NIC may come back: failover gives up after 20 s without a
# path or a message.
DEADLINE_SECONDS = 20
LATE_SECONDS = 20
EVENT_MESSAGES = 50000
# One in some fifty dies where a thread may still be inside of such a function.
PATCHED_ROUNDS = 200
NOT_KNOWN_HERE = 77


def flows(fabric, client) -> bool:
    """Whether traffic has come to host b, or the client has ended."""
    return client.ended() or fabric.nics()["b/0"]["rx_payload_bytes"] > 1e6


def stream(fabric, tool="ib_write_bw", failover=True, seconds=30, extra=()):
    """A stream that would run for long; returns when it flows."""
    server, client = fabric.pair(
        tool, ["-F", "-s", 65536, "-q", 4, "-D", seconds, *extra], failover
    )
    wait_until(lambda: server.ended() or flows(fabric, client), 20, "traffic")
    for process in (server, client):
        if process.ended():
            raise Failure(f"{process.name} ended before any traffic flowed")
    return server, client


def explains(event, *words):
    """A QP that is given up says in the event what is known, since nothing else is left of it."""
    missing = [w for w in words if w not in event["why"]]
    if missing:
        raise Failure(f"the event does not say {missing}: {event}")


@pytest.mark.smoke
def test_peer_killed(logs, note):
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
        note(f"error after {client.ended_at - killed:.1f} s")


@pytest.mark.parametrize("hosts", ["a", "ab"], ids=["one host", "both hosts"])
def test_all_nics_dead(logs, note, hosts):
    """Every NIC of some hosts dies and none comes back: the original error at both ends, within
    the deadline."""
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
            lost = "working NIC here" if event["host"] in hosts else "NIC of the peer"
            explains(
                event, f"; without a {lost}: {path}", " was left ", " epoch", "; the error is "
            )
        took_s = [f"{process.ended_at - dead:.1f} s" for process in (client, server)]
        note(f"errors after {' and '.join(took_s)}")


def test_all_nics_of_a_host_down_for_a_second(logs, note):
    """Every NIC of a host goes down; one comes back before the deadline: the stream goes on."""
    with Fabric(logs) as fabric:
        server, client = stream(fabric, "ib_send_bw", seconds=5, extra=["-b"])
        for nic in [name for name in fabric.nics() if name[0] == "a"]:
            fabric.fault(f"nic {nic} down")

        def carried():
            nics = fabric.nics().items()
            return sum(nic["rx_payload_bytes"] for name, nic in nics if name[0] == "b")

        time.sleep(1)
        still = carried()
        fabric.clear("nic a/2")
        client.expect_success(30)
        server.expect_success(10)
        # By whatever path: host b may use any of its NICs.
        if fabric.nics()["a/2"]["tx_payload_bytes"] < 1e6:
            raise Failure(f"of {carried() - still} bytes since then, a/2 sent few")
        note(f"{(carried() - still) / 1e9:.2f} GB after a second without any NIC")


@pytest.mark.smoke
def test_no_failover(logs, note):
    """`--no-failover` shows what the fault does without us."""
    with Fabric(logs) as fabric:
        server, client = stream(fabric, failover=False)
        fabric.fault("nic a/0 dead")
        client.expect_error(20)
        server.kill()
        if fabric.events("switch"):
            raise Failure("a switch without failover")
        output = client.output().splitlines()
        lines = [line for line in output if "ailed" in line or "rror" in line]
        if not lines:
            raise Failure("the client does not tell of an error")
        note(f"'{lines[0].strip()}'")


@pytest.mark.parametrize("fault", ["nic a/0 dead", "cable b/0 cut"], ids=["nic dead", "cable cut"])
def test_completion_events(logs, note, fault):
    """Sleeping for completion events (-e, which perftest allows for SEND with a number of
    messages only), through a fault."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-e", "-n", EVENT_MESSAGES])
        wait_until(lambda: flows(fabric, client), 20, "traffic")
        fabric.fault(fault)
        client.expect_success(60)
        server.expect_success(10)
        carried = fabric.elsewhere("b/0", "rx_payload_bytes")
        if carried < 1e6:
            raise Failure(f"only {carried} bytes on other rails")
        note(f"{carried / 1e9:.2f} GB on other rails")


@pytest.mark.parametrize("tool", ["ib_send_lat", "ib_write_lat", "ib_read_lat"])
def test_latency_programs(logs, note, tool):
    """The latency programs: short messages, no fault."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair(tool, ["-F", "-s", 8, "-n", 2000])
        client.expect_success(60)
        server.expect_success(10)
        output = client.output().splitlines()
        figures = [line.split() for line in output if line.strip().startswith("8 ")]
        if not figures or len(figures[0]) < 5 or float(figures[0][4]) <= 0:
            raise Failure(f"the client printed no figures: {client.output()[-500:]}")
        note(f"typical {figures[0][4]} us")


def test_several_programs_on_the_same_nics(logs):
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


def test_tools_and_a_program_without_verbs(logs):
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
        code = "import socket, subprocess; subprocess.run(['true'], check=True); print('fine')"
        plain = fabric.run("a", ["python3", "-c", code])
        plain.expect_success(20)
        if "fine" not in plain.output() or len(plain.output().splitlines()) != 1:
            raise Failure(f"a program without verbs was disturbed: {plain.output()}")


def test_memory_functions_overwritten(logs):
    """A program that overwrites the C library's functions for memory as soon as a device is
    open, as Open MPI and UCX do."""
    program = compile_c("patched", "-libverbs")
    with Fabric(logs) as fabric:
        for turn in range(PATCHED_ROUNDS):
            delay_us = turn % 2 * turn * 10
            process = fabric.run("a", [program, "unb0", delay_us], "patched")
            if process.wait(20) == NOT_KNOWN_HERE:
                raise Skip("only x86-64 is known to patched.c")
            process.expect_success(0)


def newer_functions() -> list:
    """The functions of the newer libibverbs that this library stands for, too."""
    lines = (ROOT / "crates/api/preload" / "libibverbs.txt").read_text().splitlines()
    return [line.split()[0] for line in lines if not line.startswith("#")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("signals", id="a signal ends a wait"),
        pytest.param("forked", id="a forked child"),
        pytest.param("unmapped", id="unmapped memory"),
        pytest.param("overrun", id="a CQ overrun"),
        pytest.param("newer", id="functions of a newer libibverbs"),
    ],
)
def test_one_host(logs, note, name):
    """A C program that needs one host, and prints what it did."""
    program = compile_c(name, "-libverbs")
    args = newer_functions() if name == "newer" else []
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, *args], name)
        process.expect_success(60)
        note(process.output().splitlines()[-1])


def test_standard_error_is_full(logs, note):
    """Reasons that are asked for and cannot be written: the program gets the same errors,
    without them."""
    program, shell = compile_c("newer", "-libverbs"), ["sh", "-c", 'exec "$0" "$@" 2> /dev/full']
    with Fabric(logs) as fabric:
        line = [*shell, program, *newer_functions()]
        process = fabric.run("a", line, "newer", env={"UNBROKEN_LOG": "1"})
        process.expect_success(60)
        note(process.output().splitlines()[-1])


@pytest.mark.smoke
@pytest.mark.parametrize(
    "program, extra",
    [("ibv_rc_pingpong", []), ("ibv_rc_pingpong", ["-e"]), ("ibv_ud_pingpong", [])],
    ids=["ibv_rc_pingpong", "ibv_rc_pingpong events", "ibv_ud_pingpong"],
)
def test_pingpong(logs, note, program, extra):
    """The examples of rdma-core between two hosts."""
    with Fabric(logs) as fabric:
        port = free_port()
        args = [program, "-d", "unb0", "-g", 0, "-p", port, "-n", 1000, *extra]
        server = fabric.run("b", args, "b-pingpong")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, f"{program} listens")
        client = fabric.run("a", args + ["127.0.0.1"], "a-pingpong")
        client.expect_success(30)
        server.expect_success(10)
        note(client.output().splitlines()[-1])
