"""Pairs of programs that connect by address, over librdmacm."""

from pathlib import Path

from .fabric import Fabric
from .process import wait_until

# Faults of a host with two NICs, and the NIC of a that carries the traffic then.
FAULTS = {
    None: "a/0",
    "nic a/0 dead": "a/1",
    "nic b/0 dead": "a/1",
    "nic a/0 down": "a/1",
    "cable a/0 cut": "a/1",
}


def address(fabric: Fabric, nic: str) -> str:
    """The address of a NIC, `b/0`."""
    return fabric.nics()[nic]["addr"]


def listens(fabric: Fabric, host: str, port: int, space: str = "tcp") -> bool:
    """Whether somebody on that host listens at a port of rdma_cm."""
    folder = fabric.path / "cm" / "ports" / host / f"{space}-{port}"
    try:
        return any(file.read_text() == "listens\n" for file in folder.glob("*@*"))
    except OSError:
        return False


def serve(fabric: Fabric, args: list, port: int, name=None, space="tcp", host="b", **more):
    """Starts a server on host b, and gives it when it listens."""
    server = fabric.run(host, args, name or f"{host}-{Path(args[0]).name}", **more)
    wait_until(
        lambda: server.ended() or listens(fabric, host, port, space),
        30,
        f"{args[0]} listens at port {port}",
    )
    return server
