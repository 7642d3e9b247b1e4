"""Programs that connect by address: unmodified librdmacm, and the programs over it."""

import re
import signal

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.paths import ROOT
from lib.ports import free_port
from lib.process import Failure, needs, wait_until
from lib.rdmacm import address, serve

TWO = ("--hosts", "a,b", "--nics", "2")


def _moved(fabric, nic, least):
    sent = fabric.nics()[nic]["tx_bytes"]
    if sent < least:
        raise Failure(f"{nic} has sent {sent} bytes; at least {least} were expected")


@pytest.mark.smoke
def test_rping(logs):
    """rping verifies each of its messages."""
    needs("rping", "rdmacm-utils")
    port, count, size = free_port(), 50, 4096
    with Fabric(logs, *TWO) as fabric:
        to = address(fabric, "b/0")
        server = serve(fabric, ["rping", "-s", "-p", port, "-V", "-C", count, "-S", size], port)
        client = fabric.run(
            "a", ["rping", "-c", "-a", to, "-p", port, "-V", "-C", count, "-S", size], "a-rping"
        )
        client.expect_success(60)
        server.expect_success(60)
        _moved(fabric, "a/0", count * size)
        _moved(fabric, "b/0", count * size)


def _rping_past(logs, count, when, meanwhile):
    """rping that goes on while something happens."""
    needs("rping", "rdmacm-utils")
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        to = address(fabric, "b/0")
        server = serve(fabric, ["rping", "-s", "-p", port, "-V", "-C", count], port)
        args = ["rping", "-c", "-a", to, "-p", port, "-V", "-C", count]
        client = fabric.run("a", args, "a-rping")
        wait_until(lambda: when(fabric), 30, "traffic")
        meanwhile(fabric)
        before = fabric.nics()["a/1"]["tx_bytes"]
        client.expect_success(120)
        server.expect_success(60)
        after = fabric.nics()["a/1"]["tx_bytes"]
        if after < before + 10_000:
            raise Failure(f"the backup carried {after - before} bytes")


@pytest.mark.parametrize("fault", ["nic a/0 dead", "nic b/0 dead", "nic a/0 down", "cable a/0 cut"])
def test_rping_outlives(logs, fault):
    """The QP that librdmacm has made is protected as any other."""
    moving = lambda fabric: fabric.nics()["b/0"]["tx_bytes"] > 20_000
    _rping_past(logs, 20_000, moving, lambda fabric: fabric.fault(fault))


SCENARIOS = [
    "wrong_commands",
    "not_blocking",
    "addresses",
    "nobody_listens",
    "private_data",
    "rejections",
    "backlog",
    "both_disconnect",
    "closing_a_channel",
    "forked",
    "attributes",
    "device_is_there",
    "unknown_addresses",
]
_PROGRAM = ["/usr/bin/python3", ROOT / "tests/rdmacm/scenarios.py"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_commands(logs, name):
    """What programs see of each command; see tests/rdmacm/scenarios.py."""
    with Fabric(logs, *TWO) as fabric:
        program = fabric.run("b", [*_PROGRAM, name, address(fabric, "b/0")], name)
        program.expect_success(60)
        if "right" not in program.output():
            raise Failure("the scenario did not come to its end")


# perftest's tools with options, and the NIC that sends the payload.
PERFTESTS = {
    "ib_write_bw": "a/0",
    "ib_write_lat": "a/0",
    "ib_send_bw": "a/0",
    "ib_send_lat": "a/0",
    "ib_read_bw": "b/0",
    "ib_read_lat": "b/0",
    "ib_atomic_bw": None,
    "ib_atomic_lat": None,
    "ib_write_bw -b": "b/0",
    "ib_write_bw -q 4": "a/0",
    "ib_send_bw -c UD": "a/0",
    "ib_send_lat -c UD": "a/0",
}


@pytest.mark.parametrize("link_layer", ["ethernet", "infiniband"])
@pytest.mark.parametrize("tool", PERFTESTS)
def test_perftest(logs, tool, link_layer):
    """perftest connects by rdma_cm."""
    program, *more = tool.split()
    needs(program, "perftest")
    port, count, size = free_port(), 1000, 2048
    sender = PERFTESTS[tool]
    with Fabric(logs, *TWO, "--link-layer", link_layer) as fabric:
        sizes = ["-s", size] if sender else []
        args = [program, "-R", "-F", "-p", port, "-n", count, *sizes, *more]
        server = serve(fabric, args, port)
        client = fabric.run("a", [*args, "127.0.0.1"], f"a-{program}")
        client.expect_success(60)
        server.expect_success(60)
        _moved(fabric, sender or "a/0", count * (size if sender else 8))


@pytest.mark.parametrize("fault", ["nic a/0 dead", "nic b/0 dead", "nic b/0 down", "cable a/0 cut"])
@pytest.mark.parametrize("tool", ["ib_write_bw", "ib_send_bw"])
def test_perftest_outlives(logs, tool, fault):
    """... and outlives what happens to its NIC."""
    needs(tool, "perftest")
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        args = [tool, "-R", "-F", "-p", port, "-D", 4, "-s", 65536]
        server = serve(fabric, args, port)
        client = fabric.run("a", [*args, "127.0.0.1"], f"a-{tool}")
        wait_until(lambda: fabric.nics()["a/0"]["tx_bytes"] > 10_000_000, 30, "traffic")
        fabric.fault(fault)
        client.expect_success(60)
        server.expect_success(60)
        _moved(fabric, "a/1", 10_000_000)


# Programs of rdmacm-utils that end by themselves, and what they are told at both ends; {port} and
# {ip} are filled in.
UTILITIES = {
    "ucmatose": (["-p", "{port}", "-C", 20, "-c", 4], ["-s", "{ip}"]),
    "udaddy": (["-C", 20, "-c", 4], ["-s", "{ip}"]),
    "rstream": (["-p", "{port}", "-S", 65536, "-C", 500], ["-s", "{ip}"]),
    "riostream": (["-p", "{port}", "-S", 65536, "-C", 500], ["-s", "{ip}"]),
    "rdma_server": (["-p", "{port}"], ["-s", "{ip}"]),
    "cmtime": (["-p", "{port}", "-c", 50], ["-s", "{ip}"]),
}
# udaddy's port cannot be chosen.
_UDADDY_PORT = 7174


@pytest.mark.parametrize("tool", UTILITIES)
def test_utilities(logs, tool):
    """The programs of rdmacm-utils."""
    needs(tool, "rdmacm-utils")
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        fill = {"port": port, "ip": address(fabric, "b/0"), "own": address(fabric, "a/0")}
        both, ours = ([str(word).format(**fill) for word in words] for words in UTILITIES[tool])
        at = (_UDADDY_PORT, "udp") if tool == "udaddy" else (port, "tcp")
        server = serve(fabric, [tool, *both], at[0], space=at[1])
        client = fabric.run("a", [tool.replace("server", "client"), *both, *ours], f"a-{tool}")
        client.expect_success(60)
        if tool not in ("udpong", "cmtime"):
            server.expect_success(60)


def _instructions(fabric, program, count, ours):
    """Instructions of a program that writes so often."""
    line = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, count]
    name = f"writes-{count}-{ours}"
    process = fabric.run("a", line, name) if ours else fabric.start(name, line)
    process.expect_success(60)
    return int(re.search(r"Collected : (\d+)", process.output())[1])


def test_write_costs_others_nothing(logs, note):
    """A program that has nothing to do with RDMA pays at most ten instructions for `write`."""
    needs("valgrind", "valgrind")
    program = compile_c("writes")
    with Fabric(logs, *TWO) as fabric:
        cost = {}
        for ours in (False, True):
            few, many = (_instructions(fabric, program, n, ours) for n in (1000, 3000))
            cost[ours] = (many - few) / 2000
        note(f"{cost[True] - cost[False]:g} instructions more")
        if cost[True] - cost[False] > 10:
            raise Failure(f"a write takes {cost[False]} instructions, and {cost[True]} with ours")


def test_a_waiting_thread_is_cancelled(logs):
    """pthread_cancel ends a thread that waits in rdma_get_cm_event."""
    program = compile_c("cmcancel", "-lrdmacm", "-lpthread")
    with Fabric(logs, *TWO) as fabric:
        process = fabric.run("a", [program], "a-cancel")
        process.expect_success(30)
        if "right" not in process.output():
            raise Failure("it did not come to its end")


def test_two_processes(logs):
    """A port is one process's; another host has ports of its own; a peer that is killed has
    disconnected."""
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        to = address(fabric, "b/0")
        server = serve(fabric, [*_PROGRAM, "serve", to, port], port, "server")
        taken = fabric.run("b", [*_PROGRAM, "is_taken", to, port], "taken")
        taken.expect_success(30)
        serve(fabric, [*_PROGRAM, "serve", to, port], port, "other", host="a")
        client = fabric.run("a", [*_PROGRAM, "hold", to, port], "client")
        wait_until(lambda: "connected" in client.output(), 30, "the connection")
        wait_until(lambda: "ESTABLISHED" in server.output(), 30, "the other end")
        client.kill()
        server.expect_success(30)


def test_a_program_ends_while_it_is_connected(logs):
    """Its peer is told at once, and nothing of ours fails in the end of the process, when threads'
    own data are gone already."""
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        to = address(fabric, "b/0")
        server = serve(fabric, [*_PROGRAM, "serve", to, port], port, "server")
        client = fabric.run("a", [*_PROGRAM, "leave", to, port], "client")
        client.expect_success(30)
        server.expect_success(30)
        if client.output().strip() != "right":
            raise Failure(f"the client says {client.output()}")


@pytest.mark.parametrize("fault", ["nic a/0 dead", "nic b/0 dead", "cable a/0 cut"])
def test_a_nic_dies_between_req_and_rtu(logs, fault):
    """A connection is made over the NICs that are left."""
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        to = address(fabric, "b/0")
        server = serve(fabric, [*_PROGRAM, "serve_late", to, port], port, "server")
        client = fabric.run("a", [*_PROGRAM, "hold", to, port], "client")
        wait_until(lambda: "asked" in server.output(), 30, "the request")
        fabric.fault(fault)
        server.popen.send_signal(signal.SIGUSR1)
        wait_until(lambda: "connected" in client.output(), 30, "the connection")
        server.expect_success(30)
        if "ESTABLISHED" not in server.output():
            raise Failure("the listening end has not heard of the connection")


def test_a_thousand_connections(logs, note):
    """A thousand connections, one after the other, are made and ended."""
    with Fabric(logs, *TWO) as fabric:
        program = fabric.run("b", [*_PROGRAM, "many", address(fabric, "b/0"), 1000], "many")
        program.expect_success(120)
        note(program.output().splitlines()[-2])


@pytest.mark.parametrize(
    "fault, carrier", [("nic b/0 dead", "b/1"), ("nic a/0 dead", "a/1"), ("cable b/0 cut", "b/1")]
)
def test_a_listener_is_reached(logs, fault, carrier):
    """The NIC that is named is dead, or its cable cut, before anybody begins."""
    needs("rping", "rdmacm-utils")
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        to = address(fabric, "b/0")
        fabric.fault(fault)
        server = serve(fabric, ["rping", "-s", "-p", port, "-V", "-C", 20], port)
        args = ["rping", "-c", "-a", to, "-p", port, "-V", "-C", 20]
        client = fabric.run("a", args, "a-rping")
        client.expect_success(60)
        server.expect_success(60)
        _moved(fabric, carrier, 1000)
