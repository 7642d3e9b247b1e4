"""qemu moves a guest to another host by RDMA, and a NIC, a port or a cable fails meanwhile. What
was in the guest's memory is compared afterwards."""

import json
import random
import socket
from pathlib import Path

import pytest

from lib.fabric import Fabric
from lib.ports import free_port
from lib.process import Failure, needs, wait_until
from lib.rdmacm import FAULTS, address, serve

MEMORY_MIB, AT = 192, 32 << 20
PAYLOAD = 64 << 20
# So it takes some seconds.
BYTES_PER_SECOND = 16 << 20
QEMU = ["qemu-system-x86_64", "-accel", "tcg", "-m", MEMORY_MIB, "-display", "none", "-nodefaults"]
QEMU += ["-vga", "none", "-S"]


class Qmp:
    """qemu's control socket."""

    def __init__(self, path: Path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(path))
        self.lines = self.socket.makefile("r")
        self.lines.readline()
        self("qmp_capabilities")

    def __call__(self, command, **arguments):
        line = json.dumps({"execute": command, "arguments": arguments})
        self.socket.sendall(line.encode())
        while True:
            answer = json.loads(self.lines.readline())
            if "error" in answer:
                raise Failure(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]


def _control(fabric, process, path):
    wait_until(lambda: process.ended() or path.exists(), 30, f"{process.name} has started")
    return Qmp(path)


@pytest.mark.parametrize("fault, carrier", FAULTS.items())
def test_migration(logs, fault, carrier):
    """A guest arrives with the memory that it had."""
    needs("qemu-system-x86_64", "qemu-system-x86")
    port = free_port()
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        payload, arrived = fabric.files / "payload", fabric.files / "arrived"
        payload.write_bytes(random.Random(1).randbytes(PAYLOAD))
        sockets = {host: fabric.files / f"{host}.qmp" for host in "ab"}
        control = {h: ["-qmp", f"unix:{path},server,nowait"] for h, path in sockets.items()}
        uri = f"rdma:{address(fabric, 'b/0')}:{port}"
        target = serve(fabric, [*QEMU, *control["b"], "-incoming", uri], port, "b-qemu")
        load = ["-device", f"loader,file={payload},addr={AT:#x},force-raw=on"]
        source = fabric.run("a", [*QEMU, *control["a"], *load], "a-qemu")
        here, there = (
            _control(fabric, end, sockets[host]) for end, host in ((source, "a"), (target, "b"))
        )
        here("migrate-set-parameters", **{"max-bandwidth": BYTES_PER_SECOND})
        here("migrate", uri=uri)
        wait_until(lambda: fabric.nics()["a/0"]["tx_bytes"] > PAYLOAD // 8, 60, "memory moves")
        if fault:
            fabric.fault(fault)
        over = lambda: here("query-migrate")["status"] in ("completed", "failed", "cancelled")
        wait_until(over, 120, "the end of the migration")
        state = here("query-migrate")
        if state["status"] != "completed":
            raise Failure(f"the migration has {state['status']}: {state.get('error-desc')}")
        there("pmemsave", val=AT, size=PAYLOAD, filename=str(arrived))
        if arrived.read_bytes() != payload.read_bytes():
            raise Failure("the guest's memory is another")
        sent = fabric.nics()[carrier]["tx_bytes"]
        if sent < PAYLOAD // 4:
            raise Failure(f"{carrier} has sent {sent} bytes")
