"""PyTorch as it comes from PyPI, in a virtual environment of the tests' own, and its `torchrun`."""

import ast
from pathlib import Path

from . import venvs
from .fabric import Fabric
from .paths import BUILD, ROOT
from .ports import free_port
from .process import Process

# The programs that run inside ranks, and what they need.
PROGRAMS = ROOT / "tests" / "torch"
REQUIREMENTS = PROGRAMS / "requirements.txt"
FREE_BYTES = 12_000_000_000
HOSTS = "a,b,c"


def interpreter() -> Path:
    """The interpreter of a virtual environment that has it (5 GB, made once)."""
    return venvs.interpreter("torch", "PyTorch", REQUIREMENTS, FREE_BYTES)


def torchrun(
    fabric: Fabric, python: Path, name: str, ranks: int, script: list, more: dict | None = None
) -> Process:
    """Starts a script at so many ranks, each on a host of its own, by torchrun; with more in its
    environment."""
    run = ["-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    env = {
        "PYTHONPATH": str(ROOT / "python" / "unbroken"),
        "UNBROKEN_COLLECTIVE_LIBRARY": str(BUILD / "libunbroken_coll.so"),
        "UNBROKEN_HOSTS": HOSTS,
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }
    return fabric.start(name, [python, *run, "--master-port", free_port(), *script], env=env)


def losses(text: str) -> list:
    """The losses that a training has printed, as it wrote them: bit by bit."""
    return [line.split()[2] for line in text.splitlines() if line.startswith("loss ")]


def counters(text: str) -> list:
    """What each rank has counted."""
    lines = [line for line in text.splitlines() if line.startswith("counters ")]
    return [ast.literal_eval(line.split(maxsplit=2)[2]) for line in lines]
