"""Programs that connect by address: unmodified librdmacm, and the programs over it."""

import pytest

from lib.fabric import Fabric
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
