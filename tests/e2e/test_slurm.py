"""The examples for Slurm under Slurm itself: Debian's slurmctld and slurmd on one node.

The NICs of the jobs are softnics. What `unbroken doctor` finds is set by the test, since it looks
at devices of the machine."""

import json

import pytest

from lib.process import Failure, wait_until
from lib.slurm import Slurm

pytestmark = [pytest.mark.root, pytest.mark.slow]

# A stream between two hosts of the job's emulated network, both ends under Unbroken.
_STREAM = """unbroken fabric up --hosts a,b --nics 2 >/dev/null || exit
unbroken run --host b -- ib_write_bw -d unb0 -D 90 >/dev/null 2>&1 &
server=$!
tries=0
until unbroken status | grep -q ib_write_bw || [ $((tries += 1)) = 200 ]; do sleep 0.1; done
unbroken run --host a -- ib_write_bw -d unb0 -D 90 127.0.0.1
status=$?
kill $server 2>/dev/null
exit $status"""


def test_a_node_is_drained_and_comes_back(logs, note):
    """TaskProlog gives the job a runtime folder in which its program is protected. The health check
    leaves the node in service where a NIC's death was survived and only failures drain; drains it
    with the reason otherwise, and the job goes on; gives it back when the NIC is well. After a
    failure the job's folder goes with the job, and the node stays away until the doctor finds no
    problem. TaskEpilog keeps the log."""
    with Slurm(logs) as slurm:
        slurm.set(drain_when="failed")
        job = slurm.srun("stream", "sh", "-c", _STREAM)
        has_begun = lambda: job.ended() or slurm.runtime.exists()
        wait_until(has_begun, 60, "the job has a runtime folder")
        if job.ended():
            raise Failure(job.output())
        qps = lambda: json.loads(slurm.unbroken("status", "--json") or "{}").get("qps", [])
        protected = lambda: [qp["protected"] for qp in qps()] == [True, True]
        wait_until(lambda: job.ended() or protected(), 60, "the job's program is protected")

        slurm.unbroken("fault", "set", "nic a/0 dead")
        health = lambda: json.loads(slurm.unbroken("health", "--json"))["verdict"]
        wait_until(lambda: health() == "degraded, survived", 20, "it is degraded")
        slurm.wait_for_health_checks()
        if "DRAIN" in slurm.state():
            raise Failure(f"what was survived has drained the node: {slurm.reason()}")

        slurm.set(drain_when="degraded")
        wait_until(lambda: "DRAIN" in slurm.state(), 30, "the node is drained")
        degraded = slurm.reason()
        if not degraded.startswith("unbroken: degraded, survived: host a: "):
            raise Failure(f"it is drained for another reason: {degraded}")
        if job.ended() or "ALLOCATED" not in slurm.state():
            raise Failure(f"draining has ended the job: {job.output()}")

        slurm.unbroken("fault", "clear")
        wait_until(lambda: "DRAIN" not in slurm.state(), 60, "the node is in service again")

        slurm.set(drain_when="failed")
        for nic in ("a/0", "a/1"):
            slurm.unbroken("fault", "set", f"nic {nic} dead")
        wait_until(lambda: "DRAIN" in slurm.state(), 30, "the node is drained")
        failed = slurm.reason()
        if not failed.startswith("unbroken: failed: host a: "):
            raise Failure(f"it is drained for another reason: {failed}")
        job.expect_error(60)
        wait_until(lambda: not slurm.runtime.exists(), 30, "the folder has gone with the job")
        slurm.wait_for_health_checks()
        if slurm.state() != "IDLE+DRAIN":
            raise Failure(f"nothing says that its NICs are well: {slurm.state()}, {slurm.reason()}")

        slurm.set(doctor=0)
        wait_until(lambda: slurm.state() == "IDLE", 30, "the doctor gives the node back")
        [log] = slurm.kept.glob("unbroken-*.jsonl")
        kinds = {json.loads(line)["event"] for line in log.read_text().splitlines()}
        if not {"fault", "switch", "device-fatal"} <= kinds:
            raise Failure(f"{log.name} has only {kinds}")
        note(f"drained: {degraded}; {failed}")


def test_a_job_that_does_not_ask(logs):
    """Without UNBROKEN_DEVICES a job is as without us."""
    with Slurm(logs) as slurm:
        job = slurm.srun("plain", "sh", "-c", "echo ${UNBROKEN_RUNTIME-none}", UNBROKEN_DEVICES="")
        job.expect_success(60)
        if job.output() != "none\n" or slurm.runtime.exists() or list(slurm.kept.iterdir()):
            raise Failure(f"{job.output()}, {list(slurm.kept.iterdir())}")
