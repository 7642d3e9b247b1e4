"""Many busy queue pairs between the hosts b and a of a fabric (tests/c/storm.c)."""

from lib.cc import compile_c
from lib.ports import free_port, listens
from lib.process import wait_until


def storm(fabric, qps: int, seconds: int, *more, ready_seconds=60):
    """Starts both ends, waits until all queue pairs are busy, and gives (listener, other)."""
    program, port = compile_c("storm", "-libverbs"), free_port()
    args = ["-q", qps, "-t", seconds, *more]
    listener = fabric.run("b", [program, "--listen", port, *args], "b-storm")
    wait_until(lambda: listener.ended() or listens(listener.pid, port), 20, "the storm listens")
    other = fabric.run("a", [program, "--connect", f"127.0.0.1:{port}", *args], "a-storm")
    wait_until(
        lambda: other.ended() or "running" in other.output(), ready_seconds, "all QPs are busy"
    )
    return listener, other


def many(fabric, qps: int):
    """A process on host a with so many queue pairs, connected and idle (tests/c/many.c)."""
    process = fabric.run("a", [compile_c("many", "-libverbs"), qps], "a-many")
    wait_until(lambda: process.ended() or "ready" in process.output(), 120, f"{qps} QPs are there")
    if process.ended():
        process.expect_success(1)
    return process
