"""PyTorch as it comes from PyPI, in a virtual environment of the tests' own, and its `torchrun`."""

import ast
from pathlib import Path

from . import venvs
from .fabric import Fabric
from .machine import MachineFabric
from .paths import BUILD, ROOT
from .ports import free_port
from .process import Failure, Process, wait_until

# The programs that run inside ranks, and what they need.
PROGRAMS = ROOT / "tests" / "torch"
REQUIREMENTS, LIBRARIES = PROGRAMS / "requirements.txt", PROGRAMS / "libraries.txt"
FREE_BYTES, MORE_BYTES = 12_000_000_000, 500_000_000
HOSTS = "a,b,c"
# Devices of the machine are those of the host that this names; torchrun starts all ranks alike.
ON_ITS_HOST = 'export TEST_PROVIDER_HOST=$(echo "$HOSTS" | cut -d, -f$((RANK + 1))); exec "$@"'


def interpreter() -> Path:
    """The interpreter of a virtual environment that has it (5 GB, made once)."""
    return venvs.interpreter("torch", "PyTorch", REQUIREMENTS, FREE_BYTES)


def with_libraries() -> Path:
    """One that has Accelerate and DeepSpeed, too, which use the same PyTorch (100 MB more)."""
    what = "Accelerate and DeepSpeed"
    return venvs.interpreter("torch-libraries", what, LIBRARIES, MORE_BYTES, above=interpreter())


def torchrun(
    fabric: Fabric, python: Path, name: str, ranks: int, script: list, more: dict | None = None
) -> Process:
    """Starts a script at so many ranks, each on a host of its own, by torchrun; with more in its
    environment."""
    run = [python, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    run += ["--master-port", free_port()]
    env = {
        "PYTHONPATH": str(ROOT / "python" / "unbroken"),
        "UNBROKEN_COLLECTIVE_LIBRARY": str(BUILD / "libunbroken_coll.so"),
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }
    if isinstance(fabric, MachineFabric):
        rank = ["--no-python", "sh", "-c", ON_ITS_HOST, "rank", python, *script]
        return fabric.run("a", [*run, *rank], name, env={**env, "HOSTS": HOSTS})
    return fabric.start(name, [*run, *script], env={**env, "UNBROKEN_HOSTS": HOSTS})


def losses(text: str) -> list:
    """The losses that a training has printed, as it wrote them: bit by bit."""
    return [line.split()[2] for line in text.splitlines() if line.startswith("loss ")]


def counters(text: str) -> list:
    """What each rank has counted."""
    lines = [line for line in text.splitlines() if line.startswith("counters ")]
    return [ast.literal_eval(line.split(maxsplit=2)[2]) for line in lines]


def flap(fabric: Fabric, process: Process, ranks: int, seconds: float) -> int:
    """NICs of all hosts of a training die, lose their ports and come back, one after the other,
    until it has ended; how many did."""
    hosts = HOSTS.split(",")[:ranks]
    steps = lambda: len(losses(process.output()))
    wait_until(lambda: process.ended() or steps(), seconds, "the first step")
    flaps, at = 0, steps()
    while not process.ended():
        state = "dead" if flaps % 2 else "down"
        fabric.fault(f"nic {hosts[flaps % ranks]}/{flaps % 4} {state}")
        # Until steps were done with it: then it comes back, and the next one goes.
        wait_until(lambda: process.ended() or steps() > at + 1, seconds, "another step")
        fabric.clear()
        at, flaps = steps(), flaps + 1
    return flaps


def same_bits(got: list, right: list):
    """Fails where losses differ."""
    if got != right:
        first = next((k for k, (a, b) in enumerate(zip(got, right)) if a != b), len(right))
        raise Failure(f"{len(got)} losses of {len(right)}, which differ from step {first} on")
