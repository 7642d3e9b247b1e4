"""A training with FSDP over protected queue pairs that saves its state when a NIC has failed, ends,
and goes on from there (SHIFT §4.4, Figure 10)."""

import pytest

from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.pytorch import PROGRAMS, losses, torchrun

pytestmark = [pytest.mark.torch, pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, EVERY, FAULT_STEP, RANKS, SECONDS = 120, 1000, 40, 2, 240
PROTECTED = {"UNBROKEN_COLL_LOGICAL": "1"}


def train(fabric, python, name, folder, *options):
    """Starts the training; its checkpoints are in `folder`."""
    script = [PROGRAMS / "checkpointed.py", STEPS, EVERY, folder, *options]
    return torchrun(fabric, python, name, RANKS, script, PROTECTED)


def checkpoints(training):
    """What it said of checkpoints: its log names its file, too, which is not meant."""
    return [line for line in training.output().splitlines() if line.startswith("checkpoint ")]


def test_a_training_saves_itself_at_a_switch(logs, note, torch_python, tmp_path):
    """No checkpoint is due. The one at the switch is all that the next run needs: both together
    have the losses of a run without a fault, bit for bit."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with Fabric(logs, "--nics", "2") as fabric:
        healthy = train(fabric, torch_python, "healthy", tmp_path / "none")
        healthy.expect_success(SECONDS)
        right = losses(healthy.output())
        written, switches = checkpoints(healthy), fabric.events("switch")
        if len(right) != STEPS or written or switches:
            raise Failure(f"{len(right)} losses of {STEPS}, {written}, {switches}")
        first = train(fabric, torch_python, "first", folder, "--at-switch", "--leave")
        far = lambda: first.ended() or len(losses(first.output())) >= FAULT_STEP
        wait_until(far, SECONDS, f"{FAULT_STEP} steps")
        fabric.fault("nic a/0 dead")
        first.expect_success(SECONDS)
        before = losses(first.output())
        if checkpoints(first) != [f"checkpoint {len(before)} switch"]:
            raise Failure(f"not one checkpoint at the switch: {checkpoints(first)}")
        # The NIC is still dead.
        second = train(fabric, torch_python, "second", folder)
        second.expect_success(SECONDS)
        after = losses(second.output())
    if before + after != right:
        raise Failure(f"{len(before)} and {len(after)} losses are not those of the healthy run")
    note(f"saved after {len(before) - FAULT_STEP} steps from the fault, nothing lost")
