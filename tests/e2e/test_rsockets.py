"""TCP programs over rsockets: librspreload has them use librdmacm, without a change."""

from pathlib import Path

import pytest

from lib.fabric import Fabric
from lib.paths import BUILD
from lib.ports import free_port
from lib.process import Failure, needs, wait_until
from lib.rdmacm import address, listens

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so")
SECONDS = 4
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="librspreload is missing: librdmacm1")


def _start(fabric, host, args, name):
    preload = f"LD_PRELOAD={BUILD / 'libunbroken.so'}:{LIBRARY}"
    return fabric.run(host, ["env", preload, *args], name)


def _bytes_of(line):
    """What a line of iperf's report in CSV says was moved."""
    return int(line.split(",")[7])


@pytest.mark.parametrize(
    "fault, carrier",
    [
        (None, "a/0"),
        ("nic a/0 dead", "a/1"),
        ("nic b/0 down", "a/1"),
        ("cable a/0 cut", "a/1"),
    ],
)
def test_iperf(logs, note, fault, carrier):
    """iperf 2 streams over TCP sockets that are connections of rdma_cm; both ends count the same
    bytes."""
    needs("iperf", "iperf")
    port = free_port()
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        to = address(fabric, "b/0")
        args = ["iperf", "-p", port, "-y", "C"]
        server = _start(fabric, "b", [*args, "-s", "-B", to, "-P", 1], "b-iperf")
        wait_until(lambda: server.ended() or listens(fabric, "b", port), 30, "iperf listens")
        client = _start(fabric, "a", [*args, "-c", to, "-t", SECONDS], "a-iperf")
        wait_until(lambda: fabric.nics()["a/0"]["tx_bytes"] > 10_000_000, 30, "traffic")
        if fault:
            fabric.fault(fault)
        client.expect_success(60)
        server.expect_success(60)
        sent, received = (_bytes_of(end.output().splitlines()[-1]) for end in (client, server))
        if sent != received:
            raise Failure(f"{sent} bytes were sent, and {received} received")
        carried = fabric.nics()[carrier]["tx_bytes"]
        if carried < 10_000_000:
            raise Failure(f"{carrier} has sent {carried} bytes")
        note(f"{received / SECONDS / 1e6:.0f} MB/s")
