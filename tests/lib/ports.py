"""TCP ports that no other suite of this machine has: a port found by binding port 0 is held by a
locked file while we live."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_held = []


def free_port() -> int:
    """A TCP port for a test program, held until this process ends."""
    registry = Path(tempfile.gettempdir()) / f"unbroken-test-ports-{os.getuid()}"
    registry.mkdir(mode=0o700, exist_ok=True)
    for _ in range(64):
        with socket.socket() as probe:
            probe.bind(("0.0.0.0", 0))
            port = probe.getsockname()[1]
        lock = open(registry / str(port), "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
    raise RuntimeError("no free TCP port found in 64 attempts")


def listens(pid: int, port: int) -> bool:
    """Whether somebody listens at the TCP port, in the network namespace of a process. Nothing
    connects to find out."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                return True
    return False
