"""SDR over the UC queue pairs of the kernel's rxe, in a VM (tests/vm/devices.sh): reliable writes
through packets that are lost. The guest is emulated in software, so nothing here asserts a time."""

import json

import pytest

from lib.host_devices import IN_THE_GUEST, Pair, sent, sh
from lib.paths import BUILD
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

pytestmark = IN_THE_GUEST

SECONDS = 150
MESSAGES, WRITE_BYTES = 12, 64 << 10
WORDS = f"--size {WRITE_BYTES}B --chunk 8K --mtu 1K --in-flight 2 --rate 20M --deadline 60s"


@pytest.fixture
def lossy():
    """Each link loses one packet in a hundred, in both directions."""
    links = ["A0", "B0"]
    for link in links:
        sh(f"tc qdisc add dev {link} root netem loss 1%")
    yield
    for link in links:
        sh(f"tc qdisc del dev {link} root")


@pytest.mark.parametrize("scheme", ["sr-rto", "sr-nack", "mds:16,8", "xor:16,8", "adaptive"])
def test_writes(logs, note, lossy, scheme):
    with Pair(logs) as pair:
        bench = [BUILD / "unbroken", "sdr", "bench", "--nics", 0]
        place = f"127.0.0.1:{(port := free_port())}"
        server = pair.start("B", [*bench, "--listen", place], "server")
        wait_until(lambda: server.ended() or listens(server.pid, port), 40, "the far end listens")
        line = [*bench, "--connect", place, "--scheme", scheme, *WORDS.split()]
        line += ["--messages", MESSAGES, "--verify", "--json"]
        before = sent("A0")
        client = pair.start("A", line, "client")
        pair.succeed(SECONDS, client, server)
        got = json.loads(client.output().splitlines()[-1])
        if got["messages"] != MESSAGES or not got["verified"]:
            raise Failure(f"not all was written: {got}")
        if sent("A0") - before < MESSAGES * WRITE_BYTES:
            raise Failure(f"A0 has sent {sent('A0') - before} bytes")
        note(f"{got['chunks_repeated']} chunks again, {got['chunks_recovered']} recovered")
