"""PyTorch as it comes from PyPI, in a virtual environment of the tests' own, and its `torchrun`."""

import ast
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from .fabric import Fabric
from .paths import BUILD, ROOT
from .ports import free_port
from .process import Process, Skip

# The programs that run inside ranks, and what they need.
PROGRAMS = ROOT / "tests" / "torch"
REQUIREMENTS = PROGRAMS / "requirements.txt"
FREE_BYTES = 12_000_000_000
INSTALL_SECONDS = 1800
HOSTS = "a,b,c"


def interpreter() -> Path:
    """The interpreter of the virtual environment, which is made where there is none (5 GB, kept in
    $XDG_CACHE_HOME/unbroken, by default ~/.cache/unbroken). Skips where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unbroken"
    cache.mkdir(parents=True, exist_ok=True)
    number = subprocess.run(["cksum"], input=REQUIREMENTS.read_bytes(), capture_output=True)
    folder = cache / f"torch-{number.stdout.split()[0].decode()}"
    # Another run of the tests may make it now.
    with open(cache / "torch.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            make(folder)
    return folder / "bin" / "python"


def make(folder: Path):
    """Makes the virtual environment."""
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < FREE_BYTES:
        shown = f"{free_bytes / 1e9:.0f} GB free, {FREE_BYTES / 1e9:.0f} are needed"
        raise Skip(f"PyTorch: {folder.parent} has {shown}")
    shutil.rmtree(folder, ignore_errors=True)
    install = [folder / "bin" / "pip", "install", "-q", "-r", REQUIREMENTS]
    for command in (["python3", "-m", "venv", folder], install):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            raise Skip(f"PyTorch cannot be installed within {INSTALL_SECONDS} s") from None
        if done.returncode != 0:
            raise Skip(f"PyTorch cannot be installed: {done.stderr.strip()[-500:]}")
    (folder / "complete").touch()


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
