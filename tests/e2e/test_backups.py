"""Queue pairs and regions that are made ahead on the NICs that stand in for others: on plain
devices, whose control verbs are an RNIC's."""

import pytest

from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.streams import UNTIL_STOPPED

WAIT_SECONDS = 20
QPS = 16
# The only GID of a plain RoCE port that leads to peers.
GID_INDEX = 3
PLAIN = ["--device", "plain", "--nics", "4"]


def backups(fabric: Fabric) -> list:
    """What the processes that answer have made ready."""
    return [process["backups"] for process in fabric.status()["processes"]]


def run(logs, env: dict, settled, at) -> tuple:
    """Two programs whose NIC a/0 dies once `settled` is true of what they have made ready. Gives
    what that was, and the NICs of host a that their queue pairs went to. `at`: what is to be so
    before the fault, as a failure says it."""
    with Fabric(logs, *PLAIN) as fabric:
        fabric.env.update(env)
        server, client = fabric.pair(
            "ib_write_bw", ["-F", "-D", UNTIL_STOPPED, "-q", QPS, "-x", GID_INDEX]
        )
        protected = lambda: [qp["protected"] for qp in fabric.status()["qps"]] == [True] * 2 * QPS
        wait_until(lambda: client.ended() or protected(), WAIT_SECONDS, "all are protected")
        wait_until(lambda: client.ended() or settled(backups(fabric)), WAIT_SECONDS, at)
        ready = backups(fabric)
        before = fabric.nics()
        fabric.fault("nic a/0 dead")
        switched = lambda: {e["qp"] for e in fabric.events("switch") if e["host"] == "a"}
        wait_until(lambda: client.ended() or len(switched()) == QPS, WAIT_SECONDS, "all have moved")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        sent = {
            nic: now["tx_payload_bytes"] - before[nic]["tx_payload_bytes"]
            for nic, now in fabric.nics().items()
        }
        return ready, {nic for nic in ("a/1", "a/2", "a/3") if sent[nic] > 1_000_000}


@pytest.mark.smoke
def test_each_queue_pair_has_one(logs, note):
    """All queue pairs of both programs have a backup before anything fails, and go on over the
    NICs that those are on."""
    settled = lambda all: [b["ready"] for b in all] == [QPS] * 2
    ready, used = run(logs, {}, settled, "each queue pair has a backup")
    if not used:
        raise Failure("no other NIC carried data")
    note(f"{ready[0]['mean_us']} µs each; over {', '.join(sorted(used))}")


def test_none_is_wanted(logs):
    """Without, a switch makes what it needs."""
    settled = lambda all: len(all) == 2
    ready, used = run(logs, {"UNBROKEN_BACKUPS": "0"}, settled, "both answer")
    if any(b["made"] or b["awaited"] for b in ready):
        raise Failure(f"there are some: {ready}")
    if not used:
        raise Failure("no other NIC carried data")


def test_on_the_nearest_only(logs):
    """With one backup NIC for each, all go there."""
    settled = lambda all: [b["ready"] for b in all] == [QPS] * 2
    _, used = run(logs, {"UNBROKEN_BACKUPS": "1"}, settled, "each queue pair has a backup")
    if used != {"a/1"}:
        raise Failure(f"they are made ready for a/1 and went to {used}")
