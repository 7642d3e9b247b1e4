"""SDR over devices of the machine (lib/machine.py): reliable writes by UC queue pairs of a
provider, whose memory windows take late packets' targets away, over a network that loses."""

import json

import pytest

from lib.fabric import UNBROKEN
from lib.machine import MachineFabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

SECONDS = 60
WRITE_BYTES = 256 << 10
WORDS = f"--size {WRITE_BYTES}B --chunk 16K --in-flight 4 --rate 200M --verify --json".split()
LITTLE_LOSS = [f"loss {host}/{nic} 1% tx" for host in "ab" for nic in (0, 1)]
SCHEMES = ["sr-rto", "sr-nack", "mds:16,8", "xor:16,8", "adaptive"]


def bench(fabric, *arguments) -> dict:
    """A bench from a to b; its object."""
    place = f"127.0.0.1:{(port := free_port())}"
    server = fabric.run("b", [UNBROKEN, "sdr", "bench", "--listen", place], "server")
    wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the far end listens")
    line = [UNBROKEN, "sdr", "bench", "--connect", place, *WORDS, *arguments]
    client = fabric.run("a", line, "client")
    client.expect_success(SECONDS)
    server.expect_success(SECONDS)
    return json.loads(client.output().splitlines()[-1])


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(s, marks=pytest.mark.smoke if s == "sr-nack" else ()) for s in SCHEMES],
)
def test_writes(logs, note, scheme):
    """Every byte arrives although packets are lost, over both devices."""
    with MachineFabric(logs, "--nics", "2") as fabric:
        for fault in LITTLE_LOSS:
            fabric.fault(fault)
        got = bench(fabric, "--scheme", scheme, "--messages", 60, "--channels", 2)
        if got["messages"] != 60 or not got["verified"]:
            raise Failure(f"not all was written: {got}")
        carried = [fabric.nics()[f"b/{nic}"]["rx_payload_bytes"] for nic in (0, 1)]
        if min(carried) < 60 * WRITE_BYTES // 2:
            raise Failure(f"the devices of b have received {carried} bytes")
        note(f"{got['gbit_per_s']:.2f} Gbit/s, {got['chunks_repeated']} chunks again")
