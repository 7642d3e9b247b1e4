"""Thousands of QPs and regions in one process, all used; and a process that may not open as many
files as it needs.

tests/c/scale.c makes and uses 1,000 connected RC QPs several times and 10,000 regions; an idle
QP with 128+128 entries stays within 16 KiB. Where descriptors are not enough, a program gets a
clear error and does not crash. tests/c/leaks.c makes and destroys everything under
LeakSanitizer.
"""

import json

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, Skip, wait_until

QPS, REGIONS = 1000, 10000
# Twice what one takes (docs/guide/softnic.md): allocators and pages differ by machine. `make
# bench` has
# the figure.
MOST_QP_BYTES = 2 * 16384
LEAK_ROUNDS = 300
DESCRIPTORS = [*range(6, 60, 4), 256]


@pytest.mark.parametrize(
    "failover",
    [pytest.param(True, id="failover"), pytest.param(False, id="no failover")],
)
def test_1000_qps_and_10000_regions(logs, note, failover):
    program = compile_c("scale", "-libverbs")
    with Fabric(logs) as fabric:
        port = free_port()
        args = ["--qps", QPS, "--mrs", REGIONS, "--rounds", 3, "--ms", 50]
        server = fabric.run("b", [program, "--listen", port, *args], "b-scale", failover)
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "scale listens")
        client = fabric.run(
            "a", [program, "--connect", f"127.0.0.1:{port}", *args], "a-scale", failover
        )
        client.expect_success(120)
        server.expect_success(20)
        figures = json.loads(client.output().splitlines()[-1])
        size = figures["bytes_per_qp"]
        if size > MOST_QP_BYTES:
            raise Failure(f"an idle QP takes {size} bytes, {MOST_QP_BYTES} are allowed")
        note(f"{QPS} QPs, {REGIONS} regions, {size} bytes for each QP")


@pytest.mark.smoke
def test_too_few_descriptors(logs, note):
    """With any number of descriptors a program succeeds, or says that they are too few; it never
    dies of a signal."""
    with Fabric(logs) as fabric:
        fabric.status()
        failed = 0
        for limit in DESCRIPTORS:
            script = f"ulimit -n {limit}; exec ibv_devinfo -v"
            line, env = ["sh", "-c", script], {"UNBROKEN_LOG": "1"}
            program = fabric.run("a", line, f"devinfo-{limit}", env=env)
            code, output = program.wait(30), program.output()
            if code < 0 or "panicked" in output:
                raise Failure(f"with {limit} descriptors: status {code}: {output[-500:]}")
            if code and "Too many open files" not in output:
                raise Failure(f"with {limit} descriptors, no word of that: {output[-500:]}")
            failed += code != 0
        if not 0 < failed < len(DESCRIPTORS):
            raise Failure(f"{failed} of {len(DESCRIPTORS)} failed: the limits are badly chosen")
        note(f"{failed} of {len(DESCRIPTORS)} limits were too low, and were named")


@pytest.mark.smoke
def test_nothing_leaks(logs, note):
    """Everything made and destroyed under LeakSanitizer, with and without a leak that it must
    find."""
    program = compile_c("leaks", "-g", "-fsanitize=leak", "-libverbs")
    with Fabric(logs) as fabric:
        lost = fabric.run("a", [program, LEAK_ROUNDS, "--leak"], "with-a-leak")
        code = lost.wait(60)
        if "fatal error" in lost.output():
            raise Skip(f"LeakSanitizer cannot run here: {lost.output()[-200:]}")
        if code == 0 or "in ibv_get_device_list" not in lost.output():
            raise Failure(
                f"LeakSanitizer does not see what libunbroken.so allocates: status {code}"
            )
        for failover in (True, False):
            name = f"leaks-failover-{failover}"
            fabric.run("a", [program, LEAK_ROUNDS], name, failover).expect_success(60)
        note(f"{LEAK_ROUNDS} rounds, nothing lost")
