"""Collectives over devices of the machine (lib/machine.py): all operations, while NICs die, are cut
off and come back in mid-stream."""

import pytest

from lib.collective import LONG, Job, carries, found, runs
from lib.fabric import UNBROKEN
from lib.machine import MachineFabric
from test_collectives import OPERATIONS

NICS = ["--nics", "4"]
SIZES = ["--min", "4M", "--max", "4M", *LONG]
# A fault of either end, the rails that are left, and where it is found to be.
FAULTS = {
    "nic-down": ("nic a/0 down", [1, 2, 3], "host 0 NIC 0 is dead or its port is down", ["0/0"]),
    "nic-dead": ("nic b/1 dead", [0, 2, 3], "host 1 NIC 1 is dead or its port is down", ["1/1"]),
    "cable-cut": ("cable a/2 cut", [0, 1, 3], "the cable of host 0 NIC 2 is cut", ["0/2"]),
}


class MachineJob(Job):
    """Ranks on devices of the machine."""

    def start(self, fabric, rank, host, ranks, name, *options, id_file=None):
        line = [UNBROKEN, "coll", "bench", "--rank", rank, "--ranks", ranks]
        line += ["--id-file", id_file or self.id_file]
        running = ["--while", self.while_file] if "--for" in options else []
        return fabric.run(host, [*line, "--json", *options, *running], name)


@pytest.mark.parametrize("op", OPERATIONS)
def test_operations(logs, op):
    """Results are right from 8 bytes to 1 MiB, by direct and by logical queue pairs."""
    sizes = ["--op", op, "--min", 8, "--max", "1M", "--factor", 32, "--check-all"]
    with MachineFabric(logs, *NICS) as fabric:
        for arguments in [], ["--logical"]:
            MachineJob(fabric, "abc", *sizes, *arguments).succeed()


@pytest.mark.parametrize(
    "op, fault",
    [
        pytest.param(op, fault, marks=pytest.mark.smoke if n == 0 else ())
        for n, op in enumerate(op for op in OPERATIONS if op != "barrier")
        for fault in ([*FAULTS] if op == "all-reduce" else [[*FAULTS][n % len(FAULTS)]])
    ],
)
def test_fault(logs, op, fault):
    """The NICs that are left carry on, and all of them once the fault is over."""
    text, left, verdict, down = FAULTS[fault]
    with MachineFabric(logs, *NICS) as fabric:
        # (Host a sends in each operation; and a third host tells a cable from a path.)
        root = ["--root", 2] if op == "reduce" else []
        job = MachineJob(fabric, "abc", "--op", op, *SIZES, *root)
        runs(fabric, job)
        fabric.fault(text)
        host = "b" if fault == "nic-dead" else "a"
        carries(fabric, job, left, host)
        found(fabric, job, verdict, down)
        fabric.clear()
        carries(fabric, job, range(4), host)
        job.end()


def test_nics_are_lost_in_turn_and_come_back(logs):
    with MachineFabric(logs, *NICS) as fabric:
        job = MachineJob(fabric, "ab", "--op", "all-reduce", *SIZES)
        runs(fabric, job)
        for text, left in ("nic a/0 dead", [1, 2, 3]), ("nic b/3 down", [1, 2]):
            fabric.fault(text)
            carries(fabric, job, left)
        fabric.clear()
        carries(fabric, job, range(4))
        job.end()
