"""The Python package: its wheel, an environment that has it, and the examples of its pages."""

import os
import subprocess
from pathlib import Path

from .paths import BUILD, ROOT
from .process import Failure

RUN_SECONDS = 300


def run(*args, env: dict | None = None, cwd: Path | None = None) -> str:
    """Runs a command to its end; gives what it printed, or fails with it."""
    line, told = [str(a) for a in args], {"capture_output": True, "text": True}
    done = subprocess.run(line, env=env, cwd=cwd, timeout=RUN_SECONDS, **told)
    if done.returncode != 0:
        raise Failure(f"{args}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def clean(**more: str) -> dict:
    """An environment in which nothing says where the libraries are."""
    others = ("UNBROKEN_", "LD_", "PYTHON", "MAKE", "MFLAGS", "VIRTUAL_ENV")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(others)}, **more}


def build(folder: Path) -> Path:
    """Builds the wheel of this build into a folder that is new."""
    run(ROOT / "packaging/wheel.sh", BUILD, folder, env=clean(), cwd=ROOT)
    [found] = folder.glob("*.whl")
    return found


def examples(page: Path, heading: str) -> list:
    """The Python programs below a heading of a page."""
    found, below, program = [], False, None
    for line in page.read_text().splitlines():
        if program is not None and line == "```":
            found.append("\n".join(program))
            program = None
        elif program is not None:
            program.append(line)
        elif line.startswith("#"):
            below = line.lstrip("# ") == heading
        elif below and line == "```python":
            program = []
    return found
