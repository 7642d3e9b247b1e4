"""The times in the event log are right: when a failure was noticed and how long a switch took,
also of QPs that were idle, that are connected to themselves, or that were connected after the
fault."""

import json
import time

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric, now_us
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

BUSY_MS = 1500
# Longer than any noticing takes, also where a core must be waited for.
OLD_FAULT_SECONDS = 3
# An idle QP is reported a second after its switch: that second must not be in its times.
REPORT_WAIT_US = 1_000_000
# The time of an event is derived from that of the wall clock, or by another thread.
SLACK_US = 50_000


def switch_after(fabric, fault_us) -> dict:
    """The switch that answered a fault; its times must fit together."""
    switch = wait_until(lambda: next(iter(fabric.events("switch")), None), 10, "a switch event")
    moved_us = switch["detected_at_us"] + switch["switch_us"]
    if not fault_us <= switch["detected_at_us"] <= moved_us <= now_us():
        raise Failure(f"times out of order after a fault at {fault_us}: {switch}")
    if abs(switch["time_us"] - moved_us) > SLACK_US:
        raise Failure(
            f"the event is of {switch['time_us']}, its switch was done at {moved_us}: {switch}"
        )
    return switch


@pytest.mark.parametrize(
    "idle",
    [pytest.param(False, id="busy"), pytest.param(True, id="idle", marks=pytest.mark.smoke)],
)
def test_qp_connected_to_itself(logs, note, idle):
    """A QP that is connected to itself goes on when its NIC dies, whether or not it has anything
    to do at that time."""
    program = compile_c("flush", "-libverbs")
    with Fabric(logs) as fabric:
        go_on = logs / "go-on"
        go_on.unlink(missing_ok=True)
        flush = fabric.run("a", [program, 50 if idle else BUSY_MS, go_on], "a-flush")
        word = "idle" if idle else "reading"
        wait_until(lambda: flush.ended() or word in flush.output(), 20, f"the program is {word}")
        protected = lambda: all(qp["protected"] for qp in fabric.status()["qps"])
        wait_until(protected, 20, "the QP is protected")
        fabric.fault("nic a/0 dead")
        fault_us = fabric.events("fault")[0]["time_us"]
        switch = switch_after(fabric, fault_us)
        go_on.touch()
        flush.expect_success(30)
        if switch["from"] != "a/0-a/0" or not switch["on_path_since_us"] < fault_us:
            raise Failure(
                f"another path, or the QP would have come there after the fault: {switch}"
            )
        if switch["detect_us"] != switch["detected_at_us"] - fault_us:
            raise Failure(
                f"noticed {switch['detect_us']} us after the fault at {fault_us}: {switch}"
            )
        if idle and switch["switch_us"] >= REPORT_WAIT_US:
            raise Failure(f"the wait for the report is in the time of the switch: {switch}")
        result = json.loads(flush.output().splitlines()[-1])
        times = f"noticed after {switch['detect_us']} us, switched in {switch['switch_us']} us"
        note(f"{result['reads']} READs; {times} to {switch['to']}")


def test_program_that_goes_on_later(logs, note):
    """A QP has nothing to do when its NIC dies, and again for some time afterwards, which is no
    part of its switch; then the program ends at once."""
    program = compile_c("flush", "-libverbs")
    with Fabric(logs) as fabric:
        go_on = logs / "go-on"
        go_on.unlink(missing_ok=True)
        flush = fabric.run("a", [program, 1, go_on], "a-flush")
        wait_until(lambda: flush.ended() or "idle" in flush.output(), 20, "the program is idle")
        qps = lambda: fabric.status()["qps"]
        wait_until(lambda: all(qp["protected"] for qp in qps()), 20, "the QP is protected")
        fabric.fault("nic a/0 dead")
        moved = lambda: [qp for qp in qps() if qp["epoch"] > 0 and qp["state"] == "rts"]
        wait_until(moved, 20, "the QP has moved")
        usable_us = now_us()
        # The program posts nothing for a while, which must not count as a part of the switch.
        time.sleep(0.2)
        go_on.touch()
        flush.expect_success(30)
        switch = switch_after(fabric, fabric.events("fault")[0]["time_us"])
        done_us = switch["detected_at_us"] + switch["switch_us"]
        if done_us > usable_us:
            raise Failure(f"usable at {usable_us}, done at {done_us}: {switch}")
        note(f"switched in {switch['switch_us']} us")


def test_qp_connected_after_the_fault(logs, note):
    """A QP that is connected over a path that was cut long before: its time to notice begins
    when it is connected."""
    program = compile_c("verifier", "-libverbs")
    with Fabric(logs) as fabric:
        fabric.fault("cable a/0 cut")
        time.sleep(OLD_FAULT_SECONDS)
        port, programs = free_port(), {}
        for host in "ba":
            meet = ["--listen", port] if host == "b" else ["--connect", f"127.0.0.1:{port}"]
            programs[host] = fabric.run(host, [program, *meet, "--seconds", 1], f"{host}-verifier")
            if host == "b":
                server = programs["b"]
                listening = lambda: server.ended() or listens(server.pid, port)
                wait_until(listening, 20, "the verifier listens")
        for process in programs.values():
            process.expect_success(60)
        fault_us = fabric.events("fault")[0]["time_us"]
        switches = [s for s in fabric.events("switch") if "a/0" in s["from"]]
        if not switches:
            raise Failure("no switch away from the path that is cut")
        for switch in switches:
            since_us = switch["on_path_since_us"]
            took_us = switch["detected_at_us"] - since_us
            if since_us < fault_us + OLD_FAULT_SECONDS * 1e6 or switch["detect_us"] != took_us:
                raise Failure(f"the fault was at {fault_us}, the QP came later: {switch}")
        note(f"noticed {[s['detect_us'] for s in switches]} us after the connection")
