"""What failover adds to a post and to an empty poll, in instructions.

A program (tests/c/cost.c) posts and polls through the ABI under valgrind's callgrind, which
counts the instructions of one call at a time, and nothing else; it does so with failover and
without. Seconds on a shared machine are noise; these counts are the same on every machine, and
in every run but for a few instructions. A call may find a timer due, or the NIC in the hands of
a thread that valgrind has interrupted there, so that it has less to do, or has to wait: what
counts is the most that some batches of calls agree in.
"""

import re
import statistics

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.machine import GID_INDEX, MachineFabric
from lib.process import Failure, wait_until

# Under valgrind everything takes fifty times as long, on a machine that may be busy.
SECONDS = 120
# By how much batches of the same calls differ at most, and how many must be alike.
ALIKE = 0.02
LEAST_BATCHES = 3
# The most instructions that failover may add to a call; `post_list` posts eight sends. (20 are
# wanted of an empty poll: the two counts whose difference is taken vary by four.)
LIMITS = {
    # A physical QP that holds its own work: a branch.
    "full": {"post_send": 40, "post_list": 320, "post_recv": 40, "empty_poll": 24},
    # A journal, and a CQ of the device's behind the application's.
    "plain": {"post_send": 100, "post_list": 800, "post_recv": 100, "empty_poll": 24},
    # All of Unbroken between a program and its provider: 100, 100 and 20 are wanted. Of a send, 370
    # to 400 are Unbroken's own; the provider's thread is met more often, which is up to 80 more.
    "machine": {"post_send": 500, "post_list": 2200, "post_recv": 320, "empty_poll": 140},
}


def counts(logs, failover: bool, kind=Fabric) -> dict:
    """Instructions of one call of each kind, on NICs of that kind."""
    program, name = compile_c("cost", "-libverbs"), "failover" if failover else "bare"
    out = logs / f"{name}.callgrind"
    with kind(logs) as fabric:
        valgrind = ["valgrind", "--tool=callgrind", "--fair-sched=yes", "--collect-atstart=no"]
        valgrind += [f"--callgrind-out-file={out}"]
        process = fabric.run("a", [*valgrind, program], name, failover)
        done = lambda: process.ended() or "done" in process.output()
        wait_until(done, SECONDS, "the end of the calls")
        if process.ended():
            process.expect_success(0)
        protected = [qp["protected"] for qp in fabric.status()["qps"]]
        if protected != [failover, failover]:
            raise Failure(f"two QPs, protected: {failover}, are right; here they are {protected}")
        batches = re.findall(r"^(\w+) (\d+)$", process.output(), re.MULTILINE)
    figures = {}
    for number, (kind, calls) in enumerate(batches, 1):
        figures.setdefault(kind, []).append(counted(f"{out}.{number}", kind) / int(calls))
    return {kind: usual(kind, of_batches) for kind, of_batches in figures.items()}


def usual(kind: str, batches: list) -> float:
    """Instructions of a call that did all that there is to do: the most that some batches agree
    in."""
    for most in sorted(batches, reverse=True):
        alike = [batch for batch in batches if (1 - ALIKE) * most <= batch <= most]
        if len(alike) >= LEAST_BATCHES:
            return statistics.median(alike)
    raise Failure(f"no {LEAST_BATCHES} batches of {kind} are alike: {batches}")


def counted(path: str, kind: str) -> int:
    """The instructions of a dump of callgrind's."""
    with open(path, encoding="utf-8") as dump:
        text = dump.read()
    if f"Client Request: {kind}\n" not in text:
        raise Failure(f"{path} is not the dump of {kind}")
    return int(re.search(r"^totals: (\d+)$", text, re.MULTILINE)[1])


@pytest.mark.parametrize(
    "device", [pytest.param("full", marks=pytest.mark.smoke), "plain"], indirect=True
)
def test_instructions_that_failover_adds(logs, note, device):
    compare(note, LIMITS[device], counts(logs, False), counts(logs, True))


def test_instructions_over_the_provider(logs, note, monkeypatch):
    """The same on devices of the machine: what is added to the verbs of a provider."""
    over = counts(logs, True, MachineFabric)
    monkeypatch.setattr(Fabric, "device", ("--device", "plain"))
    monkeypatch.setattr(Fabric, "gid_index", GID_INDEX)
    compare(note, LIMITS["machine"], counts(logs, False), over)


def compare(note, limits: dict, bare: dict, with_failover: dict):
    if bare.keys() != limits.keys() or min(bare.values()) < 100:
        raise Failure(f"not every kind of call was counted: {bare}")
    added = {kind: with_failover[kind] - bare[kind] for kind in limits}
    figures = ", ".join(
        f"{kind} {bare[kind]:.0f} {added[kind]:+.0f} (at most {limits[kind]})" for kind in limits
    )
    note(figures)
    if any(added[kind] > limits[kind] for kind in limits):
        raise Failure(figures)
