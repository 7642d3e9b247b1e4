"""TCP programs over rsockets: librspreload has them use librdmacm, without a change."""

from pathlib import Path

import pytest

from lib.fabric import Fabric
from lib.ports import free_port
from lib.process import Failure, needs, wait_until
from lib.rdmacm import address, listens

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so")
TWO = ("--hosts", "a,b", "--nics", "2")
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="librspreload is missing: librdmacm1")


def _start(fabric, host, args, name):
    return fabric.run(host, ["env", f"LD_PRELOAD={_libraries()}", *args], name)


def _libraries():
    from lib.paths import BUILD

    return f"{BUILD / 'libunbroken.so'}:{LIBRARY}"


@pytest.mark.parametrize("fault", [None, "nic a/0 dead", "nic b/0 down"])
def test_iperf3(logs, fault):
    """iperf3's connections, its control connection too."""
    needs("iperf3", "iperf3")
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        to = address(fabric, "b/0")
        server = _start(fabric, "b", ["iperf3", "-s", "-1", "-B", to, "-p", port], "b-iperf3")
        wait_until(lambda: server.ended() or listens(fabric, "b", port), 30, "iperf3 listens")
        client = _start(fabric, "a", ["iperf3", "-c", to, "-p", port, "-t", 4], "a-iperf3")
        wait_until(lambda: fabric.nics()["a/0"]["tx_bytes"] > 10_000_000, 30, "traffic")
        if fault:
            fabric.fault(fault)
        client.expect_success(60)
        carrier = "a/1" if fault else "a/0"
        sent = fabric.nics()[carrier]["tx_bytes"]
        if sent < 10_000_000:
            raise Failure(f"{carrier} has sent {sent} bytes")
