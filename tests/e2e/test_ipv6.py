"""NICs at IPv6 addresses, whatever bytes these have: a receiver must not take the header before a
datagram for one of IPv4. Needs root, iproute2 and nftables.
"""

import subprocess

import pytest

from lib.cc import compile_c
from lib.device import PLAIN_GID_INDEX
from lib.fabric import UNBROKEN, Fabric
from lib.namespaces import Namespaces
from lib.ports import free_port, listens
from lib.process import wait_until

pytestmark = pytest.mark.root

WAIT_SECONDS = 30
FLOWS = 4_000_000
GID_INDEX = {"full": 0, "plain": PLAIN_GID_INDEX}


def addresses(net: Namespaces, host: str, word: str) -> str:
    """Gives the interfaces of a host IPv6 addresses with that word before the last, too."""
    all_of_it = []
    for rail in range(net.rails):
        address = f"fd00:{rail + 1}::{word}:{1 + 'ab'.index(host)}"
        add = ["ip", "-n", net.name[host], "addr", "add", f"{address}/64", "nodad"]
        subprocess.run([*add, "dev", f"nic{rail}"], check=True, timeout=20)
        all_of_it.append(address)
    return ",".join(all_of_it)


@pytest.mark.parametrize("kind", ["full", "plain"])
@pytest.mark.parametrize(
    "word", [pytest.param("4500", marks=pytest.mark.smoke), "4000", "4f00", "5000", "3f00"]
)
def test_survives_at_any_address(logs, word, kind):
    """The switch cannot come without the messages of both ends, whose sender's address has that
    word where an IPv4 header would begin."""
    verifier = compile_c("verifier", "-libverbs")
    with Namespaces() as net, Fabric(logs) as fabric:
        port, programs = free_port(), []
        for host in "ba":
            nics = addresses(net, host, word)
            run = [UNBROKEN, "run", "--device", kind, "--nics", nics, "--"]
            tool = [verifier, "--gid-index", GID_INDEX[kind], "--stop-file", logs / "stop"]
            tool += ["--seconds", 10 * WAIT_SECONDS, *["--writes-repeat"] * (kind == "plain")]
            tool += ["--listen", port] if host == "b" else []
            tool += ["--connect", f"{net.addr('b', 1)}:{port}"] if host == "a" else []
            program = fabric.start(host, [*net.within(host), *run, *tool])
            programs.append(program)
            if host == "b":
                there = lambda: program.ended() or listens(program.pid, port)  # noqa: B023
                wait_until(there, WAIT_SECONDS, "the server listens")

        def flowing(rail, first=0):
            ended = [p for p in programs if p.ended()]
            assert not ended, f"{ended[0].name} has ended: {ended[0].output()[-300:]}"
            return net.bytes("a", rail)[0] - first > FLOWS

        wait_until(lambda: flowing(0), WAIT_SECONDS, "it flows")
        ready = lambda: (qps := fabric.status()["qps"]) and all(qp["protected"] for qp in qps)
        wait_until(ready, WAIT_SECONDS, "they are protected")
        before = net.bytes("a", 1)[0]
        net.drop("a", 0)
        wait_until(lambda: flowing(1, before), WAIT_SECONDS, "it flows by the other interface")
        (logs / "stop").touch()
        for program in reversed(programs):
            program.expect_success(WAIT_SECONDS)
        assert [e for e in fabric.events("switch") if e["kind"] == "passive"], fabric.events()
