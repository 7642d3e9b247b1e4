"""Virtual environments with packages of PyPI, made once and kept for all runs of the tests."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from .process import Skip

INSTALL_SECONDS = 1800


def interpreter(
    name: str, what: str, requirements: Path, free_bytes: int, above: Path | None = None
) -> Path:
    """The interpreter of the virtual environment with these packages, which is made where there is
    none, in $XDG_CACHE_HOME/unbroken, by default ~/.cache/unbroken. It also has the packages of the
    interpreter `above`, if that is given. Skips where it cannot be had, or would leave less than
    `free_bytes` of the disk; `what` it is says so."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unbroken"
    cache.mkdir(parents=True, exist_ok=True)
    number = subprocess.run(["cksum"], input=requirements.read_bytes(), capture_output=True)
    folder = cache / f"{name}-{number.stdout.split()[0].decode()}"
    # Another run of the tests may make it now.
    with open(cache / f"{name}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            make(folder, what, requirements, free_bytes, above)
    return folder / "bin" / "python"


def make(folder: Path, what: str, requirements: Path, needed_bytes: int, above: Path | None):
    """Makes the virtual environment."""
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < needed_bytes:
        shown = f"{free_bytes / 1e9:.0f} GB free, {needed_bytes / 1e9:.0f} are needed"
        raise Skip(f"{what}: {folder.parent} has {shown}")
    shutil.rmtree(folder, ignore_errors=True)
    install(what, ["python3", "-m", "venv", folder])
    pip = [folder / "bin" / "pip", "install", "-q", "-r", requirements]
    if above is not None:
        [seen] = above.parents[1].glob("lib/python3*/site-packages")
        [packages] = folder.glob("lib/python3*/site-packages")
        (packages / "above.pth").write_text(f"{seen}\n")
        # Sources that are built need what is above, too.
        pip.append("--no-build-isolation")
    install(what, pip)
    (folder / "complete").touch()


def install(what: str, command: list):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise Skip(f"{what} cannot be installed within {INSTALL_SECONDS} s") from None
    if done.returncode != 0:
        raise Skip(f"{what} cannot be installed: {done.stderr.strip()[-500:]}")
