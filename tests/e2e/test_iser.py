"""A storage pair wholly in user space: tgt's iSER target, and libiscsi as the initiator."""

import shutil
import subprocess

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port
from lib.process import Failure, needs, wait_until
from lib.rdmacm import FAULTS, address, listens

TARGET = "iqn.2026-01.com.example:disk"
INITIATOR = "iqn.2026-01.com.example:initiator"
# tgt's option for another one is refused, by any value (its parser looks at a stale errno).
PORT = 3260
SECONDS = 8
DISK_BYTES = 32 << 20


def _admin(control, *args):
    line = ["tgtadm", "-C", control, "--lld", "iser", "--tid", "1", *args]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise Failure(f"{' '.join(map(str, line))}: {done.stdout}{done.stderr}")


def _target(fabric):
    """tgtd on host b, with a disk."""
    # tgtd's control sockets are named by numbers below 32768.
    control, disk = free_port() % 32_768, fabric.files / "disk"
    disk.write_bytes(bytes(DISK_BYTES))
    # Its TCP portal is not used, and must be nobody else's.
    portal = f"portal=127.0.0.1:{free_port()}"
    args = ["tgtd", "-f", "-C", control, "--iscsi", portal, "--iser", "pool_sz_mb=16"]
    target = fabric.run("b", args, "b-tgtd")
    wait_until(lambda: target.ended() or listens(fabric, "b", PORT), 30, "tgtd listens")
    # It has listened before it takes commands.
    system = ["tgtadm", "-C", str(control), "--mode", "sys", "--op", "show"]
    wait_until(lambda: subprocess.run(system, capture_output=True).returncode == 0, 20, "tgtd")
    _admin(control, "--mode", "target", "--op", "new", "--targetname", TARGET)
    _admin(control, "--mode", "logicalunit", "--op", "new", "--lun", "1", "-b", disk)
    # tgt's iSER asks for both.
    _admin(control, "--mode", "target", "--op", "bind", "-I", "ALL")
    _admin(control, "--mode", "target", "--op", "bind", "-Q", INITIATOR)
    return target


@pytest.mark.root
@pytest.mark.parametrize("fault, carrier", FAULTS.items())
def test_disk(logs, note, fault, carrier):
    """A disk is written, read back and compared, while a NIC, a port or a cable fails."""
    needs("tgtd", "tgt")
    if not shutil.which("tgtadm"):
        pytest.skip("tgtadm is missing: install Debian's tgt")
    program = compile_c("iser_disk", "-liscsi")
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        _target(fabric)
        url = f"iser://{address(fabric, 'b/0')}:{PORT}/{TARGET}/1"
        client = fabric.run("a", [program, url, INITIATOR, SECONDS], "a-disk")
        moving = lambda: fabric.nics()["a/0"]["rx_bytes"] > 1_000_000
        wait_until(lambda: client.ended() or moving(), 30, "blocks")
        before = fabric.nics()[carrier]["rx_bytes"]
        if fault:
            fabric.fault(fault)
        client.expect_success(60)
        after = fabric.nics()[carrier]["rx_bytes"]
        if after - before < 500_000:
            raise Failure(f"{carrier} has received {after - before} bytes")
        note(client.output().splitlines()[-1])
