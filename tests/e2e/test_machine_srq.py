"""Shared receive queues on devices of the machine: a device has a share of the program's receives,
as many as its completion queues hold."""

import pytest

from lib.machine import MachineFabric
from lib.process import Failure, wait_until
from lib.streams import UNTIL_STOPPED

WAIT_SECONDS = 30
FLOWS = 4_000_000


@pytest.mark.parametrize("fixed", [False, True], ids=["resizable", "fixed"])
@pytest.mark.parametrize("receives", [64, 4000])
def test_survives(logs, receives, fixed):
    """Four queue pairs that take from one queue, while their NIC dies; on a provider that can
    change the size of a CQ, and on one that cannot."""
    with MachineFabric(logs, "--nics", "2") as fabric:
        if fixed:
            fabric.env["TEST_PROVIDER_FIXED_CQS"] = "1"
        words = ["-F", "-D", UNTIL_STOPPED, "-s", 4096, "--use-srq", "-q", 4, "-r", 16]
        server, client = fabric.pair("ib_send_bw", words, server_args=["-r", receives])
        arrived = lambda nic: fabric.nics()[nic]["rx_payload_bytes"]
        wait_until(lambda: client.ended() or arrived("b/0") > FLOWS, WAIT_SECONDS, "traffic")
        fabric.fault("nic b/0 dead")
        # From a/0, too, where that path has answered its first probe before the one from a/1.
        wait_until(lambda: client.ended() or arrived("b/1") > FLOWS, WAIT_SECONDS, "the other NIC")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        if arrived("b/1") < FLOWS:
            raise Failure(f"{arrived('b/1')} bytes arrived at the other NIC")
