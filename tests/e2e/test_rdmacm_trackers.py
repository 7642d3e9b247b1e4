"""What users of rdma_cm report when a NIC fails, as tests: tests/c/cm_storage.c makes the calls of
a storage target and its initiator, and ends at any event that a NIC's failure raises."""

import re

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port
from lib.process import Failure, wait_until
from lib.rdmacm import address, serve

SECONDS = 8
# The report, and what happens to the target's or the initiator's first NIC.
REPORTS = {
    # An initiator crashes while the target's interface goes up and down.
    "spdk-3588": "flap b/0 down=300ms up=300ms",
    # A target crashes at RDMA_CM_EVENT_DEVICE_REMOVAL; its listeners are gone when the device comes
    # back (2786); an initiator does not connect again (2342).
    "spdk-1184": "nic b/0 dead",
    # Connections do not work after a cable was pulled and put back.
    "libfabric-7803": "cable a/0 cut",
    # RDMA_CM_EVENT_UNREACHABLE comes for a connection that stands.
    "libfabric-12362": "cable b/0 cut",
    # An initiator does not connect again after a bond has changed its leg.
    "accelio-88": "nic a/0 down",
    # ... or finds another device under its new connection than under its protection domain.
    "nbs-6940": "nic a/0 dead",
}


@pytest.mark.parametrize("report", REPORTS)
def test_report(logs, note, report):
    """Neither end sees anything: connections that stand go on, and new ones are made, during the
    fault and after it."""
    port, program = free_port(), compile_c("cm_storage", "-lrdmacm", "-libverbs")
    sent = lambda nic: fabric.nics()[nic]["tx_bytes"]
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        server = serve(fabric, [program, port], port, "b-target")
        to = address(fabric, "b/0")
        client = fabric.run("a", [program, port, to, SECONDS], "a-initiator")
        wait_until(lambda: client.ended() or sent("b/0") > 1e6, 30, "blocks")
        fabric.fault(REPORTS[report])
        wait_until(lambda: client.ended() or sent("b/1") > 1e6, 30, "blocks over the other NIC")
        fabric.clear()
        client.expect_success(60)
        server.expect_success(60)
        blocks, made = map(int, re.findall(r"\d+", client.output()))
        if made < 3:
            raise Failure(f"{made} connections were made in {SECONDS} s")
        note(f"{blocks} blocks, {made} connections")
