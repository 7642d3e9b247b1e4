"""What a program is told of its own mistakes, and by which asynchronous events, is the same on each
kind of devices, with failover and without, but for what failover is there for. tests/c/outcomes.c
provokes each WC status and event; docs/reference/errors.md has what comes."""

import re

import pytest

from lib.cc import compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.machine import MachineFabric
from lib.paths import ROOT
from lib.process import Failure

PAGE = ROOT / "docs" / "reference" / "errors.md"
SECONDS = 300
KINDS = ("full", "plain", "machine")
NETWORK_FAULTS = ("TEST_FAULT", "TEST_CLEAR")
UNPOLLED = (
    "to ERR with an SRQ",
    "wrong rkey at an SRQ",
    "limit of an SRQ",
    "to SQD",
    "overrun by receives",
)


def rows(heading: str) -> list:
    """The rows of the table under a heading of the page."""
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def holds_in(where: str, kind: str, failover: bool) -> bool:
    """Whether a difference is one of these devices: "plain and machine, failover"."""
    kinds = [word for word in KINDS if word in where] or KINDS
    return kind in kinds and ("failover" in where) == failover


def expected(kind: str, failover: bool) -> dict:
    """What both ends of each case get."""
    cases = {case: (first, second) for case, first, second in rows("What both ends get")}
    for case, where, first, second, why in rows("What differs"):
        if case not in cases or not why:
            raise Failure(f"{PAGE.name}: '{case}' is no case, or has no reason")
        if holds_in(where, kind, failover):
            cases[case] = (first, second)
    return cases


def environment(fabric: Fabric, failover: bool) -> dict:
    """The commands that the program runs."""
    command = f"env -u LD_PRELOAD UNBROKEN_RUNTIME={{}} {UNBROKEN} {{}}"
    below = fabric.below / "runtime" if isinstance(fabric, MachineFabric) else fabric.path
    env = {
        "TEST_FAULT": command.format(below, "fault set"),
        "TEST_CLEAR": command.format(below, "fault clear"),
        "TEST_DEVICE_FAULT": command.format(fabric.path, "fault set"),
    }
    switches = command.format(fabric.path, "events --json") + " | grep '\"switch\"'"
    env["TEST_SWITCHED"] = f"switched() {{ {switches} | grep -q '\"qp\":'$1,; }}; switched"
    if failover:
        status = command.format(fabric.path, "status --json")
        env["TEST_PROTECTED"] = f"! {status} | tr -d ' ' | grep -q '\"protected\":false'"
    return env


def outcomes(fabric: Fabric, failover: bool, cases=(), commands=None) -> dict:
    """Runs the program, and gives what it printed for each case."""
    program = compile_c("outcomes", "-libverbs")
    env = {**environment(fabric, failover), **(commands or {})}
    process = fabric.run("a", [program, *cases], "outcomes", failover=failover, env=env)
    process.expect_success(SECONDS)
    lines = [re.split(r" *\| *", line) for line in process.output().splitlines()]
    return {line[0]: (line[1], line[2]) for line in lines if len(line) == 3}


def compare(right: dict, came: dict):
    wrong = [
        f"{case}: {came.get(case, 'nothing')}, {right.get(case, 'nothing')} is right"
        for case in dict.fromkeys([*right, *came])
        if came.get(case) != right.get(case)
    ]
    if wrong:
        raise Failure("\n  ".join([f"{len(wrong)} cases differ:", *wrong]))


@pytest.mark.parametrize("failover", [True, False], ids=["failover", "without"])
@pytest.mark.parametrize("device", KINDS, indirect=True)
def test_outcomes(logs, note, device, failover):
    """Every case, on one kind of devices."""
    with Fabric(logs, "--nics", "2") as fabric:
        came = outcomes(fabric, failover)
    compare(expected(device, failover), came)
    note(f"{len(came)} cases")


@pytest.mark.smoke
@pytest.mark.parametrize("device", ["plain", "machine"], indirect=True)
def test_events_that_nobody_polls_for(logs, device):
    """The program waits for the event, and polls no CQ until it is there."""
    with Fabric(logs, "--nics", "2") as fabric:
        came = outcomes(fabric, True, UNPOLLED)
    right = expected(device, True)
    compare({case: right[case] for case in UNPOLLED}, came)


@pytest.mark.parametrize("what", ["event", "status"])
def test_devices_of_the_machine(logs, note, what):
    """Each event that such a device raises by itself, and each status of its completions."""
    table = rows({"event": "Events of devices", "status": "Statuses of devices"}[what])
    right = {f"{what} {name}": (first, second) for name, first, second in table}
    with MachineFabric(logs, "--nics", "2") as fabric:
        fabric.faults = "a"
        came = outcomes(fabric, True, right)
    compare(right, came)
    note(f"{len(came)} cases")


def test_a_port_that_no_queue_pair_uses(logs):
    """Failover uses the first port of a device of the machine; the program hears of the others."""
    case = "port down and up, UC"
    with MachineFabric(logs, "--nics", "2", "--ports", "2") as fabric:
        env = environment(fabric, True)
        second = {name: f"f() {{ {env[name]} 'nic a/0/2 down'; }}; f" for name in NETWORK_FAULTS}
        came = outcomes(fabric, True, [case], second)
    compare({case: ("send SUCCESS; event PORT_ACTIVE, PORT_ERR; in RTS", "in RTS")}, came)
