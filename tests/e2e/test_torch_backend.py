"""The backend `unbroken` of torch.distributed: unmodified DDP and FSDP through torchrun, on hosts
of the emulated network whose NICs flap throughout; every operation on tensors of every kind, hooks
of DDP, waits, callbacks, threads, and groups that are made again."""

import re
import shutil

import pytest

from lib.fabric import Fabric
from lib.paths import LOGS
from lib.process import Failure, Skip, wait_until
from lib.pytorch import HOSTS, PROGRAMS, counters, flap, losses, same_bits, torchrun

pytestmark = [
    pytest.mark.torch,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]

# Until a training has ended, and until checks have.
TRAINING_SECONDS, SECONDS = 240, 400
# DDP or FSDP, ranks, steps.
TRAININGS = [("ddp", 2, 60), ("ddp", 3, 60), ("fsdp1", 2, 100), ("fsdp1", 3, 60), ("fsdp", 2, 200)]


def start(fabric: Fabric, python, backend: str, mode: str, ranks: int, steps: int):
    """Starts a training over a backend."""
    return torchrun(
        fabric, python, f"{backend}-{mode}", ranks, [PROGRAMS / "train.py", backend, mode, steps]
    )


def trained(process, ranks: int, steps: int) -> list:
    """The losses of a training over Unbroken that has ended well."""
    process.expect_success(TRAINING_SECONDS)
    got = losses(process.output())
    if len(got) != steps:
        raise Failure(f"{len(got)} losses of {steps}")
    if len(counters(process.output())) != ranks:
        raise Failure("not all ranks report what was lost")
    return got


def by_gloo(process, steps: int) -> tuple:
    """The losses of the same training over gloo, and how it ended, in words.

    Gloo, with nothing of Unbroken in its processes, has been seen to end in an abort of both
    (SIGABRT, once in hundreds of runs; why is not known). That is no verdict on Unbroken, and it is
    not run again: the losses that it gave are compared, where they are half of all or more; the
    note says how it ended."""
    status = process.wait(TRAINING_SECONDS)
    text = process.output()
    got = losses(text)
    if status == 0 and len(got) == steps:
        return got, ""
    aborted = re.search(r"^terminate called.*(?:\n.*what\(\):.*)?", text, re.MULTILINE)
    if not aborted and "(SIGABRT)" not in text:
        process.expect_success(TRAINING_SECONDS)
        raise Failure(f"gloo gave {len(got)} losses of {steps}")
    why = " ".join(aborted[0].split()) if aborted else "SIGABRT, and it does not say why"
    shown = f"gloo itself aborted after {len(got)} of {steps} steps: {why}"
    if len(got) < steps / 2:
        raise Skip(f"{shown}; so there is nothing to compare with")
    return got, f"; {shown}"


class Training:
    """The losses of a training without a fault."""

    def __init__(self, python, mode: str, ranks: int, steps: int):
        self.python, self.mode, self.ranks, self.steps = python, mode, ranks, steps
        folder = LOGS / "torch_backend" / f"{mode}-{ranks}-ranks"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with Fabric(folder) as fabric:
            self.losses = trained(self.start(fabric, "unbroken"), ranks, steps)

    def start(self, fabric: Fabric, backend: str):
        """Starts the same training, over this backend or another."""
        return start(fabric, self.python, backend, self.mode, self.ranks, self.steps)


@pytest.fixture(scope="module", params=TRAININGS, ids=lambda t: f"{t[0]}-{t[1]}-ranks")
def training(request, torch_python):
    return Training(torch_python, *request.param)


def test_training_beside_gloo(logs, note, training):
    """Without a fault it learns, and the losses are close to gloo's."""
    with Fabric(logs) as fabric:
        theirs, aborted = by_gloo(training.start(fabric, "gloo"), training.steps)
    numbers = [[float.fromhex(loss) for loss in all] for all in (theirs, training.losses)]
    far = max(abs(a - b) / abs(a) for a, b in zip(*numbers))
    # Whatever is no number is neither.
    if not (far <= 1e-3 and numbers[1][-1] <= 0.7 * numbers[1][0]):
        raise Failure(f"the losses differ from gloo's by {far}, or do not fall: {numbers}")
    note(f"losses within {far:.1e} of gloo's{aborted}")


def test_training_while_nics_flap(logs, note, training):
    """NICs of all hosts die, lose their ports and come back all the time: the losses are the same
    bits."""
    with Fabric(logs) as fabric:
        right, ranks = training.losses, training.ranks
        process = training.start(fabric, "unbroken")
        flaps = flap(fabric, process, ranks, TRAINING_SECONDS)
        got = trained(process, ranks, len(right))
        lost = [c["paths_failed"] for c in counters(process.output())]
        same_bits(got, right)
        if flaps < 5 or not any(lost):
            raise Failure(f"{flaps} faults, and {lost} paths have failed: nothing was survived")
        note(
            f"losses equal over {len(right)} steps; {flaps} faults, paths failed at each rank: "
            f"{lost}"
        )


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


@pytest.mark.parametrize(
    "ranks, flapping",
    [(2, False), (3, False), (3, True)],
    ids=["2-ranks", "3-ranks", "3-ranks-nics-flap"],
)
def test_every_operation(logs, note, torch_python, ranks, flapping):
    """Every operation, layout and type beside gloo; `flapping`: while NICs of all hosts die and
    come back."""
    with Fabric(logs) as fabric:
        process = torchrun(fabric, torch_python, "strided", ranks, [PROGRAMS / "strided.py"])
        faults = 0
        hosts = HOSTS.split(",")[:ranks]
        while flapping and not process.ended():
            fabric.fault(
                f"nic {hosts[faults % ranks]}/{faults % 4} {'dead' if faults % 2 else 'down'}"
            )
            before = carried(fabric)
            wait_until(
                lambda: process.ended() or carried(fabric) > before + 100_000,
                SECONDS,
                "more traffic",
            )
            fabric.clear()
            faults += 1
        process.expect_success(SECONDS)
        reported = re.findall(
            r"cases (\d+): (\d+) wrong; gloo right in (\d+), wrong in (\d+), refused (\d+)",
            process.output(),
        )
        if len(reported) != ranks:
            raise Failure(f"{len(reported)} of {ranks} ranks report a result")
        if (
            min(int(cases) for cases, *_ in reported) < 1000
            or min(int(right) for _, _, right, *_ in reported) < 300
        ):
            raise Failure(f"too few cases, or too few that gloo does right, too: {reported}")
        if flapping and faults < 5:
            raise Failure(f"{faults} faults are too few")
        cases, _, right, wrong, refused = reported[0]
        note(f"{cases} cases right; gloo right in {right}, wrong in {wrong}, refused {refused}")
        if flapping:
            note(f"{faults} faults")


def carried(fabric: Fabric) -> int:
    """Payload that all NICs have sent."""
    return sum(nic["tx_payload_bytes"] for nic in fabric.nics().values())


@pytest.mark.parametrize("ranks", [2, 3])
def test_hooks(logs, note, torch_python, ranks):
    with Fabric(logs) as fabric:
        process = torchrun(fabric, torch_python, "hooks", ranks, [PROGRAMS / "hooks.py"])
        process.expect_success(SECONDS)
        reported = re.findall(r"^(\w+) within (\S+)$", process.output(), re.MULTILINE)
        if [name for name, _ in reported] != ["plain", "bf16", "power_sgd"]:
            raise Failure(f"not every hook was tried: {reported}")
        note("losses within " + ", ".join(f"{far} ({name})" for name, far in reported))


@pytest.mark.parametrize(
    "ranks, names",
    [
        pytest.param(2, CHECKS, id="2-ranks"),
        pytest.param(3, CHECKS, id="3-ranks"),
        pytest.param(2, ("late_to_the_group",), id="2-ranks-one-65s-late"),
    ],
)
def test_checks(logs, note, torch_python, ranks, names):
    with Fabric(logs) as fabric:
        process = torchrun(fabric, torch_python, "checks", ranks, [PROGRAMS / "checks.py", *names])
        process.expect_success(SECONDS)
        done = [line.split()[1] for line in process.output().splitlines() if line.startswith("ok ")]
        missing = [name for name in names if done.count(name) != ranks]
        if missing:
            raise Failure(f"not done at each rank: {missing}")
        began = re.search(r"began in .*", process.output())
        note(f"{len(names)} checks")
        if began:
            note(f"while a rank was late operations {began[0]}")
