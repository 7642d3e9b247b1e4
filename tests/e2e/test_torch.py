"""PyTorch as it comes from PyPI, over verbs: TensorPipe trains a small GPT on two ranks
(tests/torch/gpt.py), and NICs fail meanwhile.

TensorPipe opens libibverbs with dlopen, makes RC QPs with a shared receive queue, and moves
everything by WRITE with immediate and SEND. The losses must be the bits that the same training over
TCP gives, and the NICs must have carried the tensors. `--long`: a NIC that dies at each of seven
instants while connections are made.
"""

import shutil
import time

import pytest

from lib import options
from lib.fabric import Fabric
from lib.paths import LOGS
from lib.ports import free_port
from lib.process import Failure, wait_until
from lib.pytorch import PROGRAMS, losses

pytestmark = [
    pytest.mark.torch,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]

STEPS = 20
SECONDS = 150
# Activations one way and gradients the other: 16 windows of 64 tokens of 128 floats, each step.
STEP_BYTES = 16 * 64 * 128 * 4
# After the NIC was opened; connections are made, and then there is traffic.
INSTANTS_MS = [0, 10, 30, 100, 300, 1000, 3000] if options.LONG else [30]
# TensorPipe takes port 1 and GID index 0, which leads nowhere on a plain RoCE port.
PLAIN = ("--device", "plain", "--link-layer", "infiniband")


def ranks(fabric: Fabric, python, transport: str, steps: int):
    """Both ranks: rank 0 on host a, rank 1 on host b. Over TCP they run without Unbroken."""
    port = free_port()
    started = []
    for rank, host in ((1, "b"), (0, "a")):
        args = [python, "-W", "ignore", PROGRAMS / "gpt.py", "--rank", rank, "--port", port]
        args += ["--transport", transport, "--steps", steps]
        name = f"rank{rank}-{transport}"
        over_verbs = transport == "ibv"
        started.append(fabric.run(host, args, name) if over_verbs else fabric.start(name, args))
    return started[1], started[0]


def expect(rank0, rank1, right: list):
    """Fails unless both ranks end well, with these losses."""
    rank0.expect_success(SECONDS)
    rank1.expect_success(SECONDS)
    got = losses(rank0.output())
    if got != right:
        raise Failure(f"the losses differ from those over TCP: {got} instead of {right}")


def carried(fabric: Fabric, nic: str) -> tuple:
    """Payload that a NIC has sent and received."""
    counters = fabric.nics().get(nic, {})
    return counters.get("tx_payload_bytes", 0), counters.get("rx_payload_bytes", 0)


def elsewhere(fabric: Fabric, nic: str) -> tuple:
    """What the other NICs of its host have carried."""
    return fabric.elsewhere(nic, "tx_payload_bytes"), fabric.elsewhere(nic, "rx_payload_bytes")


def over_tcp(logs, python, steps: int) -> list:
    """The losses of a training over TCP, which learns."""
    with Fabric(logs) as fabric:
        rank0, rank1 = ranks(fabric, python, "uv", steps)
        rank0.expect_success(SECONDS)
        rank1.expect_success(SECONDS)
        got = losses(rank0.output())
        if len(got) != steps or float.fromhex(got[-1]) >= float.fromhex(got[0]):
            raise Failure(f"this training does not learn: {got}")
        return got


def trained_over_tcp(name: str, python, steps: int) -> list:
    """The losses of a training, with logs in a folder of their own."""
    folder = LOGS / "torch" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return over_tcp(folder, python, steps)


@pytest.fixture(scope="module")
def short(torch_python):
    """The losses of a training over TCP."""
    return trained_over_tcp("short-over-tcp", torch_python, STEPS)


@pytest.fixture(scope="module")
def right(torch_python):
    """The losses of a longer training over TCP."""
    return trained_over_tcp("over-tcp", torch_python, 6 * STEPS)


def test_training_over_tcp(note, short, right):
    """Both trainings learn, and the shorter is the beginning of the longer."""
    note(f"{len(short)} and {len(right)} steps")
    assert right[: len(short)] == short


def test_training(logs, note, torch_python, short):
    with Fabric(logs) as fabric:
        rank0, rank1 = ranks(fabric, torch_python, "ibv", len(short))
        expect(rank0, rank1, short)
        sent, received = carried(fabric, "a/0")
        if min(sent, received) < len(short) * STEP_BYTES:
            raise Failure(
                f"a/0 sent {sent} and received {received} bytes, {len(short) * STEP_BYTES} are "
                "due each way"
            )
        note(
            f"losses equal over {len(short)} steps; a/0 sent {sent / 1e6:.1f} MB, received "
            f"{received / 1e6:.1f} MB"
        )


@pytest.mark.parametrize(
    "instant_ms", [None, *INSTANTS_MS], ids=lambda ms: "from-the-start" if ms is None else f"{ms}ms"
)
def test_nic_dies_early(logs, note, torch_python, right, instant_ms):
    """A NIC dies so long after a program has opened it; None: before the programs begin."""
    with Fabric(logs, "--hosts", "a,b") as fabric:
        if instant_ms is None:
            fabric.fault("nic a/0 dead")
        rank0, rank1 = ranks(fabric, torch_python, "ibv", len(right))
        if instant_ms is not None:
            wait_until(
                lambda: rank0.ended() or fabric.nics().get("a/0", {}).get("pids"),
                SECONDS,
                "a/0 is opened",
            )
            time.sleep(instant_ms / 1000)
            fabric.fault("nic a/0 dead")
        done = len(losses(rank0.output()))
        if done >= len(right) - 2:
            raise Failure(
                f"the training was over ({done} of {len(right)} steps) when the fault came"
            )
        expect(rank0, rank1, right)
        due = (len(right) - done - 2) * STEP_BYTES
        others = elsewhere(fabric, "a/0")
        if min(others) < due:
            raise Failure(f"the other NICs carried {others}, {due} are due each way")
        if fabric.events("give-up"):
            raise Failure(f"given up: {fabric.events('give-up')[0]}")
        note(f"losses equal; fault after {done} steps, {len(fabric.events('switch'))} switches")


def test_nic_is_drained(logs, note, torch_python, right):
    """A NIC is drained in the middle of the training: nothing is noticed, and from then on it
    carries nothing."""
    with Fabric(logs) as fabric:
        rank0, rank1 = ranks(fabric, torch_python, "ibv", len(right))
        before = len(right) // 4
        wait_until(
            lambda: rank0.ended() or len(losses(rank0.output())) >= before,
            SECONDS,
            f"{before} steps",
        )
        done = fabric.command("nic", "drain", "a/0")
        if done.returncode != 0:
            raise Failure(f"the drain: {done.stderr}")
        left = carried(fabric, "a/0")
        steps = len(losses(rank0.output()))
        expect(rank0, rank1, right)
        if carried(fabric, "a/0") != left:
            raise Failure(
                f"a/0 carried {left} bytes when it was drained, and {carried(fabric, 'a/0')} in "
                "the end"
            )
        sent, received = elsewhere(fabric, "a/0")
        if min(sent, received) < (len(right) - steps - 2) * STEP_BYTES:
            raise Failure(
                f"the others sent {sent} and received {received} bytes after step {steps}"
            )
        switches = fabric.events("switch")
        if not switches or any(s["kind"] != "planned" for s in switches):
            raise Failure(f"planned switches alone are right, not {switches}")
        note(f"losses equal; {done.stdout.strip().splitlines()[0]}")


@pytest.mark.parametrize(
    "fault, dead, settings",
    [
        pytest.param("nic a/0 dead", "a/0", (), id="nic-dead"),
        pytest.param("cable b/0 cut", "b/0", (), id="cable-cut"),
        pytest.param("nic a/0 dead", "a/0", PLAIN, id="plain-devices-nic-dead"),
    ],
)
def test_nic_fails(logs, note, torch_python, right, fault, dead, settings):
    """A NIC fails in the middle of the training."""
    with Fabric(logs, *settings) as fabric:
        rank0, rank1 = ranks(fabric, torch_python, "ibv", len(right))
        before = len(right) // 4
        wait_until(
            lambda: rank0.ended() or len(losses(rank0.output())) >= before,
            SECONDS,
            f"{before} steps",
        )
        fabric.fault(fault)
        done = len(losses(rank0.output()))
        if done >= len(right) - 2:
            raise Failure(
                f"the training was over ({done} of {len(right)} steps) when the fault came"
            )
        expect(rank0, rank1, right)
        due = (len(right) - done - 2) * STEP_BYTES
        sent, received = elsewhere(fabric, dead)
        if min(sent, received) < due:
            raise Failure(
                f"the others sent {sent} and received {received} bytes after the fault, {due} are "
                "due each way"
            )
        if min(carried(fabric, dead)) < before * STEP_BYTES:
            raise Failure(f"{dead} carried little before the fault")
        note(
            f"losses equal; fault after {done} steps, then the others sent {sent / 1e6:.1f} MB, "
            f"received {received / 1e6:.1f} MB"
        )
