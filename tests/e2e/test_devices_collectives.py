"""Collectives over RDMA devices of the machine: two ranks, each with two devices of the kernel's
rxe, in a VM (tests/vm/devices.sh). The guest is emulated in software, so nothing here asserts a
time."""

import json

import pytest

from lib.host_devices import FLOWS, IN_THE_GUEST, Fault, Pair, sent
from lib.paths import BUILD
from lib.process import Failure, wait_until

pytestmark = IN_THE_GUEST

OPERATIONS = ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all"]
OPERATIONS += ["send-recv"]
# Each operation meets the fault of one of these links, which come in turn.
LINKS = ["A0", "B1", "A1", "B0"]
SECONDS = 120


class Job:
    """A rank on each host, which do the same operation for as long as a file is there."""

    def __init__(self, pair, logs, *options):
        self.pair, self.goes = pair, logs / "goes"
        self.goes.touch()
        self.ranks = [self._start(rank, logs, options) for rank in (0, 1)]

    def _start(self, rank, logs, options):
        line = [BUILD / "unbroken", "coll", "bench", "--rank", rank, "--ranks", 2, "--json"]
        line += ["--id-file", logs / "id", "--for", "300s", "--while", self.goes, "--check-all"]
        return self.pair.start("AB"[rank], [*line, *options], f"rank{rank}")

    def carries(self, link):
        """Waits until an interface has sent that much since now."""
        self.pair.flowing(link, SECONDS, FLOWS)

    def leaves(self, links):
        """Waits until these interfaces send nothing but what the kernel says by itself."""

        def quiet():
            before = [sent(link) for link in links]
            self.carries("A0" if "A1" in links else "A1")
            return all(sent(link) - n < FLOWS // 20 for link, n in zip(links, before))

        wait_until(quiet, SECONDS, f"nothing goes by {links}")

    def end(self):
        """All results were right."""
        self.goes.unlink()
        self.pair.succeed(SECONDS, *self.ranks)
        lines = [line for line in self.ranks[0].output().splitlines() if line.startswith("{")]
        results = [json.loads(line) for line in lines]
        if not results or any(line["wrong"] for line in results):
            raise Failure(f"wrong results: {results}")
        return results[-1]


def sizes(op: str) -> list:
    root = ["--root", 1] if op == "reduce" else []
    return ["--op", op, "--min", "256K", "--max", "256K", *root]


@pytest.mark.parametrize("op", OPERATIONS)
def test_link_down(logs, note, op):
    """A link of either end goes down in mid-stream, and comes back."""
    link = LINKS[OPERATIONS.index(op) % len(LINKS)]
    rail = link[1]
    with Pair(logs) as pair, Fault("down", link) as broken:
        job = Job(pair, logs, *sizes(op))
        job.carries(f"A{rail}")
        broken.make()
        job.leaves([f"A{rail}"])
        broken.mend()
        job.carries(f"A{rail}")
        line = job.end()
        note(f"{line['iterations']} operations, {line['moves']} streams moved")
        if not line["failures"]:
            raise Failure(f"nothing was survived: {line}")


def test_links_are_lost_in_turn(logs, note):
    """Each link of one host, then of the other: one is always there."""
    with Pair(logs) as pair:
        job = Job(pair, logs, *sizes("all-reduce"))
        for link in LINKS:
            with Fault("down", link) as broken:
                job.carries(f"A{link[1]}")
                broken.make()
                job.leaves([f"A{link[1]}"])
        for rail in "01":
            job.carries(f"A{rail}")
        note(f"{job.end()['iterations']} operations")
