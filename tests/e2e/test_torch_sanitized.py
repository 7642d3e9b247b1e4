"""The backend of torch.distributed with the library built for AddressSanitizer: the library's
accesses are checked, and PyTorch's memory is of the sanitizer's allocator. Building takes minutes,
so `--long` alone does it."""

import os
import subprocess
from pathlib import Path

import pytest

from lib import options
from lib.fabric import Fabric
from lib.paths import ROOT, TARGET
from lib.process import Failure, Skip
from lib.pytorch import PROGRAMS, torchrun

pytestmark = [
    pytest.mark.torch,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not options.LONG, reason="it builds the library again: --long runs it"),
]

SECONDS = 400
PLATFORM = "x86_64-unknown-linux-gnu"
CHECKS = [
    "refused_operations_leave_nothing_behind",
    "many_are_dropped",
    "callbacks_that_wait",
    "threads",
    "tags_and_any_source",
    "what_needs_a_backend",
]


def runtime() -> str:
    """GCC's, which knows what rustc's instrumentation calls; with the C++ library, whose exceptions
    it looks for when it starts."""
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if not Path(path).is_absolute():
            raise Skip(f"gcc has no {name}")
        found.append(path)
    return ":".join(found)


@pytest.fixture(scope="module")
def library() -> Path:
    """The library built for AddressSanitizer."""
    folder = TARGET / "asan"
    env = {**os.environ, "RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": "-Zsanitizer=address -Cdebuginfo=1"}
    line = ["cargo", "build", "-q", "--release", "-p", "unbroken-collective"]
    line += ["--target", PLATFORM, "--target-dir", folder]
    subprocess.run(line, cwd=ROOT, env=env, check=True)
    return folder / PLATFORM / "release" / "libunbroken_coll.so"


def run(logs, python, library: Path, script: list, clean: bool):
    """Two ranks under the sanitizer, whose findings are files; `clean`: there are none, else there
    are."""
    for old in logs.glob("asan.*"):
        old.unlink()
    started = logs / "python"
    # Not in torchrun's own process, whose children are not all Python.
    started.write_text(f'#!/bin/sh\nLD_PRELOAD={runtime()} exec {python} "$@"\n')
    started.chmod(0o755)
    env = {
        "UNBROKEN_COLLECTIVE_LIBRARY": str(library),
        # Python and PyTorch keep what they have until the end.
        "ASAN_OPTIONS": f"detect_leaks=0:handle_segv=0:use_sigaltstack=0:log_path={logs}/asan",
    }
    with Fabric(logs) as fabric:
        process = torchrun(fabric, python, "sanitized", 2, ["--no-python", started, *script], env)
        if clean:
            process.expect_success(SECONDS)
        else:
            process.wait(SECONDS)
        found = [path.read_text() for path in logs.glob("asan.*")]
        if clean and found:
            raise Failure(found[0][:2000])
        if not clean and not any("heap-use-after-free" in text for text in found):
            raise Failure("memory was freed under an operation, and nobody noticed")


def test_memory_freed_under_an_operation_is_noticed(logs, torch_python, library):
    run(logs, torch_python, library, [PROGRAMS / "freed.py"], False)


def test_checks(logs, torch_python, library):
    """Waits, callbacks, threads, groups."""
    run(logs, torch_python, library, [PROGRAMS / "checks.py", *CHECKS], True)


def test_every_operation(logs, torch_python, library):
    """On tensors of every kind."""
    run(logs, torch_python, library, [PROGRAMS / "strided.py"], True)
