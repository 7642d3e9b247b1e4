"""A full softnic on one side, plain devices on the other: a connection between them is protected,
too. The plain side's memory has other keys on each of its NICs, which the full side must learn.

The NICs are addresses of the loopback interface, so there are no faults: drains move the queue
pairs. Through faults: test_softnic_and_rxe.py."""

import json
import os

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.ports import free_port, listens
from lib.process import wait_until

# Bytes that say that a stream flows.
FLOWS = 5_000_000
KINDS = {"full-to-plain": ("full", "plain"), "plain-to-full": ("plain", "full")}
# Which side of a tool's programs sends the payload.
SENDER = {"ib_write_bw": 0, "ib_send_bw": 0, "ib_read_bw": 1}


class Mixed:
    """The two sides of a connection: each of a kind, with two NICs."""

    def __init__(self, fabric: Fabric, kinds: tuple):
        self.fabric, self.kinds = fabric, kinds
        # Addresses that no other test has.
        net = f"127.{100 + (os.getpid() >> 8) % 100}.{os.getpid() & 0xff}"
        self.nics = [[f"{net}.{1 + 2 * side + i}" for i in (0, 1)] for side in (0, 1)]

    def start(self, side: int, line: list):
        """A program at one side."""
        gid = ["-x", 3] if self.kinds[side] == "plain" else []
        nics = ["--nics", ",".join(self.nics[side]), "--device", self.kinds[side]]
        words = [UNBROKEN, "run", *nics, "--", line[0], "-d", "unb0", *gid, *line[1:]]
        return self.fabric.start(f"{side}-{self.kinds[side]}", words, {})

    def sent(self, nic: str) -> int:
        status = json.loads(self.fabric.command("status", "--json").stdout)
        return next((n["tx_bytes"] for n in status["nics"] if n["nic"] == nic), 0)

    def flows(self, nic: str, *programs):
        first = self.sent(nic)
        enough = lambda: any(p.ended() for p in programs) or self.sent(nic) - first >= FLOWS
        wait_until(enough, 30, f"{FLOWS} bytes by {nic}")
        assert self.sent(nic) - first >= FLOWS, [p.output()[-300:] for p in programs]


@pytest.mark.parametrize(
    "tool, kinds",
    [
        pytest.param(tool, kinds, marks=pytest.mark.smoke if (tool, kinds) == smoke else ())
        for smoke in [("ib_write_bw", "full-to-plain")]
        for tool in SENDER
        for kinds in KINDS
    ],
)
def test_moves(logs, tool, kinds):
    with Fabric(logs) as fabric:
        mixed, port = Mixed(fabric, KINDS[kinds]), free_port()
        line = [tool, "-s", 65536, "-D", 6, "-F", "-m", 1024, "-p", port]
        server = mixed.start(1, line)
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "it listens")
        client = mixed.start(0, [*line, "127.0.0.1"])
        first, second = mixed.nics[SENDER[tool]]
        mixed.flows(first, client, server)
        fabric.command("nic", "drain", first)
        mixed.flows(second, client, server)
        for process in (client, server):
            process.expect_success(30)
