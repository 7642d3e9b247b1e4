"""Libraries above torch.distributed over the backend `unbroken`: Accelerate (DDP and FSDP) and
DeepSpeed (the stages of ZeRO) train while NICs of all hosts die and come back."""

import pytest

from lib.fabric import Fabric
from lib.process import Failure
from lib.pytorch import PROGRAMS, counters, flap, losses, same_bits, torchrun, with_libraries

pytestmark = [
    pytest.mark.torch,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]

# The first one of DeepSpeed compiles, for minutes.
RANKS, STEPS, SECONDS = 2, 200, 600
LIBRARIES = ("accelerate", "accelerate-fsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3")


@pytest.fixture(scope="module")
def python():
    return with_libraries()


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_trains_while_nics_flap(logs, note, python, library):
    """The losses are the same bits as without a fault, and it learns."""

    def start(fabric, name):
        script = [PROGRAMS / "trainers.py", "unbroken", library, STEPS]
        # DeepSpeed compiles what it can; it is kept for the next test.
        more = {"TORCH_EXTENSIONS_DIR": str(python.parents[1] / "extensions")}
        return torchrun(fabric, python, name, RANKS, script, more)

    with Fabric(logs) as fabric:
        healthy = start(fabric, "healthy")
        healthy.expect_success(SECONDS)
        right = losses(healthy.output())
        first, last = (float.fromhex(right[step]) for step in (0, -1))
        if len(right) != STEPS or not last < first:
            raise Failure(f"{len(right)} losses from {first} to {last}")
        process = start(fabric, "flapping")
        flaps = flap(fabric, process, RANKS, SECONDS)
        process.expect_success(SECONDS)
        same_bits(losses(process.output()), right)
        lost = [each["paths_failed"] for each in counters(process.output())]
        if flaps < 3 or len(lost) != RANKS or not any(lost):
            raise Failure(f"{flaps} faults, and {lost} paths have failed: nothing was survived")
        note(f"losses equal over {STEPS} steps; {flaps} faults, paths failed at each rank: {lost}")
