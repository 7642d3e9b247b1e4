"""All verbs from many threads at once, on the same objects (tests/c/threads.c): undisturbed, and
while the NIC under them fails."""

import json

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.process import Failure, wait_until

# Its threads take all cores.
pytestmark = pytest.mark.serial


SECONDS = 2
# The program itself gives up when something does not complete within 40 s.
END_SECONDS = 60


@pytest.mark.parametrize(
    "fault, failover",
    [
        pytest.param(None, False, id="no-failover"),
        pytest.param(None, True, id="failover"),
        pytest.param("nic a/0 dead", True, id="nic-dead", marks=pytest.mark.smoke),
        pytest.param("cable a/0 cut", True, id="cable-cut"),
    ],
)
def test_many_threads(logs, note, device, fault, failover):
    """One run; its program checks everything."""
    program = compile_c("threads", "-libverbs", "-lpthread")
    with Fabric(logs) as fabric:
        args = ["--seconds", SECONDS + bool(fault)] + ["--faults"] * bool(fault)
        process = fabric.run("a", [program, *args], "a-threads", failover)
        if fault:
            wait_until(lambda: process.ended() or "running" in process.output(), 20, "traffic")
            fabric.fault(fault)
        process.expect_success(END_SECONDS)
        result = json.loads(process.output().splitlines()[-1])
        if fault and len(fabric.events("switch")) < 4:
            raise Failure(f"{len(fabric.events('switch'))} QPs moved, four are right")
        if min(result["messages"], result["events"], result["churned"]) < 100:
            raise Failure(f"too little was done: {result}")
        note(
            f"{result['sends']} sends, {result['messages']} messages, {result['events']} events, "
            f"{result['churned']} other verbs"
        )
