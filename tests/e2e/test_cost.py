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
from lib.fabric import UNBROKEN, Fabric
from lib.machine import MachineFabric
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
}
# The most instructions of Unbroken's own library in a call on a device of the machine, whose
# provider does nothing (`NULL`): 100, 480, 80, 20 and 80 are wanted. docs/internals/lanes.md says
# where the others go.
MACHINE = {"post_send": 220, "post_list": 900, "post_recv": 170, "empty_poll": 125, "poll": 375}


def counts(logs, failover: bool, kind=Fabric, own=None) -> dict:
    """Instructions of one call of each kind, on NICs of that kind: all of them, or those of the
    library `own`."""
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
        figures.setdefault(kind, []).append(counted(f"{out}.{number}", kind, own) / int(calls))
    return {kind: usual(kind, of_batches) for kind, of_batches in figures.items()}


def usual(kind: str, batches: list) -> float:
    """Instructions of a call that did all that there is to do: the most that some batches agree
    in."""
    for most in sorted(batches, reverse=True):
        alike = [batch for batch in batches if (1 - ALIKE) * most <= batch <= most]
        if len(alike) >= LEAST_BATCHES:
            return statistics.median(alike)
    raise Failure(f"no {LEAST_BATCHES} batches of {kind} are alike: {batches}")


def counted(path: str, kind: str, own) -> int:
    """The instructions of a dump of callgrind's."""
    with open(path, encoding="utf-8") as dump:
        text = dump.read()
    if f"Client Request: {kind}\n" not in text:
        raise Failure(f"{path} is not the dump of {kind}")
    if own is None:
        return int(re.search(r"^totals: (\d+)$", text, re.MULTILINE)[1])
    return counted_in(text, str(own))


def counted_in(text: str, library: str) -> int:
    """The instructions of a dump that are in that library: what its functions execute themselves.
    Lines behind `calls=` have those of the function that is called."""
    names, of_library, called, total = {}, False, False, 0
    for line in text.splitlines():
        if file := re.match(r"(c?ob)=(\(\d+\))(?: (.*))?", line):
            where, number, name = file.groups()
            if name:
                names[number] = name
            if where == "ob":
                of_library = names.get(number) == library
        elif line.startswith("calls="):
            called = True
        elif cost := re.match(r"(?:[+-]?\d+|\*) (\d+)$", line):
            total += 0 if called or not of_library else int(cost[1])
            called = False
    return total


@pytest.mark.parametrize(
    "device", [pytest.param("full", marks=pytest.mark.smoke), "plain"], indirect=True
)
def test_instructions_that_failover_adds(logs, note, device):
    compare(note, LIMITS[device], counts(logs, False), counts(logs, True))


class NullFabric(MachineFabric):
    """Its provider does nothing."""

    def __init__(self, logs, *settings):
        super().__init__(logs, *settings)
        self.env["TEST_PROVIDER_NULL"] = "1"


@pytest.mark.parametrize("kind", [MachineFabric, NullFabric], ids=["provider", "null"])
def test_instructions_over_the_provider(logs, note, kind):
    """On devices of the machine: what is Unbroken's own of a call. Over a provider that does
    nothing, all calls, and also the poll that finds a completion."""
    figures = counts(logs, True, kind, own=UNBROKEN.with_name("libunbroken.so"))
    limits = {call: most for call, most in MACHINE.items() if call in figures}
    if len(limits) < len(MACHINE) - (kind is MachineFabric):
        raise Failure(f"not every kind of call was counted: {figures}")
    text = ", ".join(f"{call} {figures[call]:.0f} (at most {limits[call]})" for call in limits)
    note(text)
    if any(figures[call] > limits[call] for call in limits):
        raise Failure(text)


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
