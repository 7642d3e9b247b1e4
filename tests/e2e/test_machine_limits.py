"""Devices of the machine that are smaller than what is asked of them, or than each other, and what
Unbroken takes of them for itself. The devices are those of lib/machine.py
(tests/c/provider_knobs.c).
"""

import re

import pytest

from lib.machine import MachineFabric
from lib.process import Failure, wait_until
from lib.streams import UNTIL_STOPPED

WAIT_SECONDS = 30
FLOWS = 4_000_000
# Queue sizes that a device of the test has at most, and a program asks for. (What Unbroken sends
# messages by has queues of 512, and a CQ of 2,048.)
MOST = 512
RC = "type=2"


class Devices(MachineFabric):
    """With a record of what the devices are asked for."""

    def __init__(self, logs, *settings, **knobs):
        super().__init__(logs, *settings)
        self.record = logs / "asked"
        self.env |= {"TEST_PROVIDER_LOG": str(self.record), "UNBROKEN_LOG": "1"}
        self.env |= {f"TEST_PROVIDER_{name}": value for name, value in knobs.items()}

    def asked(self, *words: str) -> list:
        """What devices were asked for, where it has these words."""
        text = self.record.read_text() if self.record.exists() else ""
        return [line for line in text.splitlines() if all(w in line.split() for w in words)]

    def protected_pair(self, tool: str, arguments: list):
        """A client on a and a server on b whose queue pairs are all protected."""
        server, client = self.pair(tool, ["-F", *arguments])
        ready = lambda: (qps := self.status()["qps"]) and all(qp["protected"] for qp in qps)
        wait_until(lambda: client.ended() or ready(), WAIT_SECONDS, "they are protected")
        return server, client

    def carried(self, nic: str) -> int:
        counters = self.nics()[nic]
        return counters["tx_payload_bytes"] + counters["rx_payload_bytes"]

    def goes_to(self, nic: str, *processes, amount: int = FLOWS):
        """Waits until a NIC has carried a stream since now."""
        first = self.carried(nic)
        there = lambda: any(p.ended() for p in processes) or self.carried(nic) - first > amount
        wait_until(there, WAIT_SECONDS, f"bytes on {nic}")
        if self.carried(nic) - first <= amount:
            raise Failure(f"a program has ended before its bytes came over {nic}")


def end(*processes):
    for process in processes:
        process.expect_success(WAIT_SECONDS)


@pytest.mark.smoke
def test_a_program_has_the_queues_that_its_device_has(logs):
    """All of 512 entries, of a device that would round one more up to 1,024: asked for as they are,
    and stopped all the same when a NIC fails."""
    with Devices(logs, "--nics", "2", LIMITS=f"*.max_qp_wr={MOST}") as fabric:
        arguments = ["-s", 4096, "-t", MOST, "-D", UNTIL_STOPPED]
        server, client = fabric.protected_pair("ib_write_bw", arguments)
        fabric.fault("nic a/0 down")
        fabric.goes_to("a/1", client, server)
        end(client, server)
        lines = "\n".join(fabric.asked("qp", RC))
        sends = {int(n) for n in re.findall(r"sends=(\d+)", lines)}
        assert max(sends) == MOST, fabric.asked("qp", RC)


SMALLER = {
    "max_qp_wr=512": ("ib_write_bw", ["-s", 4096, "-t", 1024], "max_send_wr is 1024"),
    "max_cqe=2048": ("ib_write_bw", ["-s", 4096, "-t", 4096], "entries in a CQ"),
    "max_qp_rd_atom=4": ("ib_read_bw", ["-s", 4096, "-o", 16], "max_dest_rd_atomic is 16"),
    "hidden_sends=64": ("ib_write_bw", ["-s", 4096, "-t", 128], "ibv_create_qp"),
}


@pytest.mark.parametrize("what", SMALLER)
def test_a_device_that_is_too_small_is_no_backup(logs, what):
    """The first NIC in line is passed over, with its reason, and the next one taken."""
    tool, arguments, why = SMALLER[what]
    with Devices(logs, "--nics", "3", LIMITS=f"unb1.{what}") as fabric:
        fabric.env["UNBROKEN_MAP"] = "0:1,2"
        server, client = fabric.protected_pair(tool, ["-D", UNTIL_STOPPED, *arguments])
        told = lambda: client.ended() or "unb1 is no backup" in client.output()
        wait_until(told, WAIT_SECONDS, "it is told")
        fabric.fault("nic a/0 dead")
        fabric.goes_to("a/2", client, server, amount=FLOWS // 20)
        end(client, server)
        lines = [line for line in client.output().splitlines() if "is no backup" in line]
        assert len(lines) == 1 and why in lines[0], client.output()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_cq_has_the_size_that_is_needed(logs, fixed):
    """Not more, unless the device cannot change it later."""
    knobs = {"FIXED_CQS": "1"} if fixed else {}
    with Devices(logs, "--nics", "2", **knobs) as fabric:
        end(*fabric.pair("ib_write_lat", ["-F", "-n", 1000, "-t", 16]))
        sizes = [int(n) for line in fabric.asked("cq") for n in re.findall(r"entries=(\d+)", line)]
        # One that is asked whether its size can be changed has one entry.
        sizes = [n for n in sizes if n > 1]
        assert (min(sizes) >= 1024) == fixed, sizes


@pytest.mark.smoke
def test_memory_is_registered_where_it_may_be_needed_and_told(logs):
    """`UNBROKEN_BACKUPS` holds, also when peers ask for keys; `status` says how much is pinned."""
    with Devices(logs, "--nics", "3") as fabric:
        fabric.env["UNBROKEN_BACKUPS"] = "1"
        # Its region is larger than all those of Unbroken together, and of another size.
        server, client = fabric.protected_pair("ib_write_bw", ["-s", 1 << 22, "-D", UNTIL_STOPPED])
        size = max(int(line.split()[2]) for line in fabric.asked("mr"))
        pinned = lambda: {nic["nic"]: nic["registered_bytes"] for nic in fabric.status()["nics"]}
        told = lambda: client.ended() or pinned()["unb1"] >= 2 * size
        wait_until(told, WAIT_SECONDS, "it is told")
        assert pinned()["unb2"] < size and pinned()["unb0"] >= 2 * size, pinned()
        assert "memory pinned: unb0" in fabric.command("status").stdout
        fabric.fault("nic a/0 dead")
        fabric.goes_to("a/1", client, server)
        end(client, server)
        assert fabric.asked("mr", "unb1", str(size)) and not fabric.asked("mr", "unb2", str(size))
