"""Memory of other devices (dma-bufs): registered on the device that the program has and on those
that stand in for it, and told as missing where a device has none."""

import re

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.machine import MachineFabric
from lib.process import Failure, wait_until

SECONDS = 4


def test_a_region_of_a_dma_buf_outlives_its_nic(logs, note):
    program = compile_c("dmabuf", "-libverbs")
    with MachineFabric(logs) as fabric:
        process = fabric.run("a", [program, SECONDS], "dmabuf")
        wait_until(lambda: process.ended() or "flows" in process.output(), 20, "the writes")
        wait_until(lambda: fabric.nics()["a/0"]["tx_payload_bytes"] > 1e6, 20, "traffic")
        fabric.fault("nic a/0 dead")
        process.expect_success(SECONDS + 30)
        moved = sum(fabric.nics()[f"a/{nic}"]["tx_payload_bytes"] for nic in (1, 2, 3))
        if moved < 1e6 or not fabric.events("switch"):
            raise Failure(f"{moved} bytes left by the other NICs")
        # NCCL tells by this errno that there are dma-bufs.
        if "probe: EBADF" not in process.output():
            raise Failure(process.output())
        note(re.search(r"\d+ writes", process.output())[0])


def test_a_device_without_dma_bufs_says_so(logs):
    with Fabric(logs) as fabric:
        process = fabric.run("a", [compile_c("dmabuf", "-libverbs"), 0], "probe")
        process.expect_success(20)
    if "probe: EOPNOTSUPP" not in process.output():
        raise Failure(process.output())
