"""What the backend promises beside trainings: every operation on tensors of every kind, hooks of DDP, waits, callbacks, threads, and groups that are made again."""

import re
from pathlib import Path

from lib.fabric import Fabric
from lib.process import Failure, wait_until

from backend import HOSTS, torchrun

HERE = Path(__file__).resolve().parent
SECONDS = 400
CHECKS = (
    "refused_operations_leave_nothing_behind",
    "many_are_dropped",
    "callbacks_that_wait",
    "one_waits_another_sends",
    "begins_while_a_rank_is_late",
    "threads",
    "tags_and_any_source",
    "what_needs_a_backend",
    "again",
    "over_the_same_store",
    "interrupted",
    "forked_children",
    "functional",
)


def strided(logs, python: str, ranks: int, flap: bool):
    """Every operation, layout and type beside gloo; `flap`: while NICs of all hosts die and come back."""
    with Fabric(logs) as fabric:
        process = torchrun(fabric, python, "strided", ranks, [HERE / "strided.py"])
        faults = 0
        hosts = HOSTS.split(",")[:ranks]
        while flap and not process.ended():
            fabric.fault(f"nic {hosts[faults % ranks]}/{faults % 4} {'dead' if faults % 2 else 'down'}")
            before = carried(fabric)
            wait_until(lambda: process.ended() or carried(fabric) > before + 100_000, SECONDS, "more traffic")
            fabric.clear()
            faults += 1
        process.expect_success(SECONDS)
        said = re.findall(r"cases (\d+): (\d+) wrong; gloo right in (\d+), wrong in (\d+), refused (\d+)", process.output())
        if len(said) != ranks:
            raise Failure(f"{len(said)} of {ranks} ranks say what came of it")
        if min(int(cases) for cases, *_ in said) < 1000 or min(int(right) for _, _, right, *_ in said) < 300:
            raise Failure(f"too few cases, or too few that gloo does right, too: {said}")
        if flap and faults < 5:
            raise Failure(f"{faults} faults are too few")
        cases, _, right, wrong, refused = said[0]
        return f"{cases} cases right; gloo right in {right}, wrong in {wrong}, refused {refused}" + (f"; {faults} faults" if flap else "")


def carried(fabric: Fabric) -> int:
    return sum(nic["tx_payload_bytes"] for nic in fabric.nics().values())


def hooks(logs, python: str, ranks: int):
    with Fabric(logs) as fabric:
        process = torchrun(fabric, python, "hooks", ranks, [HERE / "hooks.py"])
        process.expect_success(SECONDS)
        said = re.findall(r"^(\w+) within (\S+)$", process.output(), re.MULTILINE)
        if [name for name, _ in said] != ["plain", "bf16", "power_sgd"]:
            raise Failure(f"not every hook was tried: {said}")
        return "losses within " + ", ".join(f"{far} ({name})" for name, far in said)


def checks(logs, python: str, ranks: int, names: tuple):
    with Fabric(logs) as fabric:
        process = torchrun(fabric, python, "checks", ranks, [HERE / "checks.py", *names])
        process.expect_success(SECONDS)
        done = [line.split()[1] for line in process.output().splitlines() if line.startswith("ok ")]
        missing = [name for name in names if done.count(name) != ranks]
        if missing:
            raise Failure(f"not done at each rank: {missing}")
        began = re.search(r"began in .*", process.output())
        return f"{len(names)} checks" + (f"; while a rank was late operations {began[0]}" if began else "")


def cases(suite, python: str):
    for ranks in (2, 3):
        suite.case(f"every operation on tensors of every kind beside gloo, {ranks} ranks", strided, python, ranks, False)
        suite.case(f"DDP with hooks beside gloo, {ranks} ranks", hooks, python, ranks)
        suite.case(f"waits, callbacks, threads, groups, {ranks} ranks", checks, python, ranks, CHECKS)
    suite.case("every operation on tensors of every kind while NICs flap, 3 ranks", strided, python, 3, True)
    suite.case("a rank that is 65 s late, 2 ranks", checks, python, 2, ("late_to_the_group",))
