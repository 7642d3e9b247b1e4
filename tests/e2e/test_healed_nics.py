"""Queue pairs that are connected after a NIC has died and was healed, to memory that peers know
from before: on plain devices, and devices of the machine, it has other keys on that NIC by then."""

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.machine import GID_INDEX, MachineFabric
from lib.ports import free_port
from lib.process import Failure, wait_until

WAIT_SECONDS = 60
# How long a client connects anew, with no fault and with faults.
CALM_SECONDS = 1
STORMY_SECONDS = 6
KINDS = {
    "plain": lambda logs: Fabric(logs, "--device", "plain", "--nics", "3"),
    "machine": lambda logs: MachineFabric(logs, "--nics", "3"),
}


class Healed:
    """A server on b, whose region is made when all NICs live, and clients on a."""

    def __init__(self, fabric, env):
        self.fabric, self.port, self.clients = fabric, free_port(), 0
        self.program = compile_c("healed", "-libverbs")
        self.env = {"TEST_GID_INDEX": str(GID_INDEX), **env}
        self.server = fabric.run("b", [self.program, self.port], "server", env=self.env)
        listening = lambda: self.server.ended() or "listening" in self.server.output()
        wait_until(listening, WAIT_SECONDS, "the server listens")

    def start(self, seconds, env=None):
        self.clients += 1
        line = [self.program, f"127.0.0.1:{self.port}", seconds]
        name = f"client-{self.clients}"
        return self.fabric.run("a", line, name, env={**self.env, **(env or {})})

    def connects(self):
        """A new process connects queue pairs, and each does what it asks of the old region."""
        self.start(CALM_SECONDS).expect_success(WAIT_SECONDS)
        if self.server.ended():
            raise Failure(f"the server has ended: {self.server.output()}")

    def dies(self, nic):
        """A NIC dies, as all processes notice, and is healed."""
        since = len(self.fabric.events())
        self.fabric.fault(f"nic {nic} dead")
        seen = lambda what: any(e["event"] == what for e in self.fabric.events()[since:])
        wait_until(lambda: seen("device-fatal"), WAIT_SECONDS, f"the death of {nic}")
        self.fabric.clear()
        wait_until(lambda: seen("port-active"), WAIT_SECONDS, f"{nic} is back")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="usual"),
        pytest.param({"TEST_SRQ": "1"}, id="srq"),
        pytest.param({"TEST_LATE": "1"}, id="another-region"),
        pytest.param({"UNBROKEN_BACKUPS": "1"}, id="one-backup"),
    ],
)
def test_keys_of_before(logs, kind, env):
    """Whichever NICs of the server have died and were healed, once or in turn, or twice: a region
    of before takes WRITEs, READs and atomics by the key that it had at first."""
    with KINDS[kind](logs) as fabric:
        healed = Healed(fabric, env)
        healed.connects()
        for nic in ["b/0", "b/1", "b/0"]:
            healed.dies(nic)
            healed.connects()


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_keys_while_a_nic_dies_again_and_again(logs, kind):
    """Queue pairs are connected and used at every moment of a NIC's death and of its return."""
    with KINDS[kind](logs) as fabric:
        healed = Healed(fabric, {"TEST_NO_ATOMICS": "1"})
        client = healed.start(STORMY_SECONDS)
        while not client.ended():
            healed.dies("b/0")
        client.expect_success(WAIT_SECONDS)
        healed.connects()
