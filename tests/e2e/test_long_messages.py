"""Messages that take longer than any time by which a failure is noticed, over paths that live: each
is sent once, and nothing switches."""

import pytest

from lib import options
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.machine import GID_INDEX, MachineFabric
from lib.process import Failure

# Mbit/s and bytes: a message of 64 MiB takes 8 s; with --long one of 1 GiB takes 34 s.
MBITS, BYTES = (256, 1 << 30) if options.LONG else (64, 64 << 20)
# The fewest that perftest sends.
MESSAGES = 5
# A receive is posted so much later than the message that needs it is sent.
LATE_MS = 10_000
KINDS = {
    "full": lambda logs: Fabric(logs),
    "plain": lambda logs: Fabric(logs, "--device", "plain"),
    "machine": lambda logs: MachineFabric(logs),
}


def nothing_switched(fabric):
    switches = fabric.events("switch")
    if switches:
        raise Failure(f"nothing has failed, and queue pairs have moved: {switches}")


def payload(fabric) -> int:
    """Bytes of the application that have arrived anywhere."""
    return sum(nic["rx_payload_bytes"] for nic in fabric.nics().values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", ["ib_write_bw", "ib_read_bw"])
def test_a_message_of_many_seconds(logs, kind, tool):
    """It completes in the time that the line needs."""
    seconds = 8 * MESSAGES * BYTES // (MBITS * 1_000_000)
    with KINDS[kind](logs) as fabric:
        gid = [] if kind == "machine" else ["-x", GID_INDEX] if kind == "plain" else []
        sender = "a/0" if tool == "ib_write_bw" else "b/0"
        words = ["-F", "-s", BYTES, "-n", MESSAGES, "-t", 1, *gid]
        server, client = fabric.pair(tool, words)
        fabric.fault(f"rate {sender} {MBITS}Mbit")
        client.expect_success(2 * seconds + 60)
        server.expect_success(60)
        nothing_switched(fabric)
        # A message that began anew would have been carried twice.
        if payload(fabric) > 1.5 * MESSAGES * BYTES:
            raise Failure(f"{payload(fabric)} bytes have arrived for {MESSAGES} times {BYTES}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_receive_that_comes_late(logs, kind):
    """A message, and an atomic behind it, wait for a receive of the peer's program."""
    program = compile_c("late_receive", "-libverbs")
    env = {"TEST_GID_INDEX": "0" if kind == "full" else str(GID_INDEX)}
    with KINDS[kind](logs) as fabric:
        fabric.run("a", [program, "atomic", LATE_MS], "late", env=env).expect_success(90)
        nothing_switched(fabric)
