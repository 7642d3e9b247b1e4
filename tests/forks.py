#!/usr/bin/env python3
"""Forked processes: a child opens its devices anew, is protected, and disturbs its parent in nothing (tests/c/forks.c, tests/fork_workers.py)."""

import json
import sys

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.suite import ROOT, Suite

QPS_EACH = 2
END_SECONDS = 60


def said(process, key):
    """What the processes have said under this key, by their pids."""
    lines = [json.loads(line) for line in process.output().splitlines() if line.startswith("{")]
    return [line for line in lines if key in line]


def through_a_death(fabric, process, stop, count):
    """Waits for the traffic of so many processes, has the NIC die under all of them, and lets them go on a while. Gives what they say."""
    wait_until(lambda: process.ended() or len(said(process, "running")) == count, 30, f"traffic of {count} processes")
    if process.ended():
        raise Failure(f"it ended early: {process.output()[-300:]}")
    pids = {line["running"] for line in said(process, "running")}
    mine = lambda: [qp for qp in fabric.status()["qps"] if qp["pid"] in pids]
    wait_until(lambda: len(mine()) == QPS_EACH * count and all(qp["protected"] for qp in mine()), 20, "all QPs are protected")
    fabric.fault("nic a/0 dead")
    moved = lambda: {(s["pid"], s["qp"]) for s in fabric.events("switch")}
    wait_until(lambda: process.ended() or len(moved()) >= QPS_EACH * count, 30, "all QPs moved")
    before = fabric.elsewhere("a/0", "rx_payload_bytes")
    wait_until(lambda: process.ended() or fabric.elsewhere("a/0", "rx_payload_bytes") > before + 1e6, 30, "traffic on other NICs")
    if {pid for pid, _ in moved()} != pids:
        raise Failure(f"QPs of {sorted(pid for pid, _ in moved())} moved, of {sorted(pids)} is right")
    stop.touch()
    process.expect_success(END_SECONDS)
    return said(process, "messages")


def forks(logs, how, count):
    """A C program of so many processes."""
    program = compile_c("forks", "-libverbs", "-lpthread")
    with Fabric(logs) as fabric:
        stop = fabric.path / "stop"
        process = fabric.run("a", [program, how, stop], "forks")
        done = through_a_death(fabric, process, stop, count)
        return f"{[d['messages'] for d in done]} messages"


def python(logs):
    """multiprocessing with the start method fork: three workers that use pyverbs, as the parent does."""
    with Fabric(logs) as fabric:
        stop = fabric.path / "stop"
        process = fabric.run("a", [sys_python(), ROOT / "tests" / "fork_workers.py", stop], "python")
        done = through_a_death(fabric, process, stop, 4)
        return f"{[d['messages'] for d in done]} messages"


def sys_python():
    """The interpreter that has Debian's pyverbs."""
    return "/usr/bin/python3"


def main() -> int:
    """Runs all of it."""
    suite = Suite("forks", sys.argv[1:])
    suite.case("after ibv_get_device_list", forks, "list", 2)
    suite.case("after open and close", forks, "closed", 2)
    suite.case("beside traffic of the parent", forks, "live", 2)
    suite.case("forks of forks", forks, "nested", 4)
    suite.case("Python's multiprocessing", python)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
