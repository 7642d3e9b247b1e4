"""Forked processes: a child opens its devices anew, is protected, and does not disturb its parent
(tests/c/forks.c, helpers/fork_workers.py)."""

import json

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.paths import ROOT
from lib.process import Failure, wait_until

# The interpreter that has Debian's pyverbs.
PYTHON = "/usr/bin/python3"
QPS_EACH = 2
END_SECONDS = 60


def reports(process, key):
    """The lines of JSON with this key that the processes have written."""
    lines = [json.loads(line) for line in process.output().splitlines() if line.startswith("{")]
    return [line for line in lines if key in line]


def through_a_death(fabric, process, stop, count):
    """Waits for the traffic of so many processes, has the NIC die under all of them, and lets
    them go on a while. Gives what they report."""
    running = lambda: process.ended() or len(reports(process, "running")) == count
    wait_until(running, 30, f"traffic of {count} processes")
    if process.ended():
        raise Failure(f"it ended early: {process.output()[-300:]}")
    pids = {line["running"] for line in reports(process, "running")}

    def protected():
        qps = [qp for qp in fabric.status()["qps"] if qp["pid"] in pids]
        return len(qps) == QPS_EACH * count and all(qp["protected"] for qp in qps)

    wait_until(protected, 20, "all QPs are protected")
    fabric.fault("nic a/0 dead")
    moved = lambda: {(s["pid"], s["qp"]) for s in fabric.events("switch")}
    wait_until(lambda: process.ended() or len(moved()) >= QPS_EACH * count, 30, "all QPs moved")
    carried = lambda: fabric.elsewhere("a/0", "rx_payload_bytes")
    before = carried()
    wait_until(lambda: process.ended() or carried() > before + 1e6, 30, "traffic on other NICs")
    if {pid for pid, _ in moved()} != pids:
        raise Failure(
            f"QPs of {sorted(pid for pid, _ in moved())} moved, of {sorted(pids)} is right"
        )
    stop.touch()
    process.expect_success(END_SECONDS)
    return reports(process, "messages")


@pytest.mark.parametrize(
    "how, count",
    [
        ("list", 2),
        ("closed", 2),
        pytest.param("live", 2, marks=pytest.mark.smoke),
        ("nested", 4),
    ],
    ids=["after ibv_get_device_list", "after open and close", "beside traffic", "forks of forks"],
)
def test_forked_children(logs, note, how, count):
    """A C program of so many processes."""
    program = compile_c("forks", "-libverbs", "-lpthread")
    with Fabric(logs) as fabric:
        stop = fabric.files / "stop"
        process = fabric.run("a", [program, how, stop], "forks")
        done = through_a_death(fabric, process, stop, count)
        note(f"{[d['messages'] for d in done]} messages")


@pytest.mark.smoke
def test_multiprocessing_of_python(logs, note):
    """multiprocessing with the start method fork: three workers that use pyverbs, as the parent
    does."""
    workers = ROOT / "tests" / "e2e" / "helpers" / "fork_workers.py"
    with Fabric(logs) as fabric:
        stop = fabric.files / "stop"
        process = fabric.run("a", [PYTHON, workers, stop], "python")
        done = through_a_death(fabric, process, stop, 4)
        note(f"{[d['messages'] for d in done]} messages")
