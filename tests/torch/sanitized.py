"""The backend with the library built for AddressSanitizer: the library's accesses are checked, and PyTorch's memory is of the sanitizer's allocator.

Building takes minutes, so `run.sh --all` alone does it."""

import os
import subprocess
from pathlib import Path

from lib.fabric import Fabric
from lib.process import Failure, Skip
from lib.suite import BUILD, ROOT

from backend import torchrun

HERE = Path(__file__).resolve().parent
SECONDS = 400
TARGET = "x86_64-unknown-linux-gnu"
CHECKS = ("refused_operations_leave_nothing_behind", "many_are_dropped", "callbacks_that_wait", "threads", "tags_and_any_source", "what_needs_a_backend")


def runtime() -> str:
    """GCC's, which knows what rustc's instrumentation calls; with the C++ library, whose exceptions it looks for when it starts."""
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            raise Skip(f"gcc has no {name}")
        found.append(path)
    return ":".join(found)


def build() -> Path:
    folder = BUILD.parent / "asan"
    env = {**os.environ, "RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": "-Zsanitizer=address -Cdebuginfo=1"}
    line = ["cargo", "build", "-q", "--release", "--target", TARGET, "--target-dir", folder, "-p", "unbroken-collective"]
    subprocess.run(line, cwd=ROOT, env=env, check=True)
    return folder / TARGET / "release" / "libunbroken_coll.so"


def run(logs, python: str, library: Path, script: list, clean: bool):
    """Two ranks under the sanitizer, whose findings are files; `clean`: there are none, else there are."""
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


def cases(suite, python: str):
    library = suite.case("the library is built for AddressSanitizer", lambda logs: build())
    if library:
        suite.case("memory freed under an operation is noticed", run, python, library, [HERE / "freed.py"], False)
        suite.case("waits, callbacks, threads, groups under AddressSanitizer", run, python, library, [HERE / "checks.py", *CHECKS], True)
        suite.case("every operation on tensors of every kind under AddressSanitizer", run, python, library, [HERE / "strided.py"], True)
