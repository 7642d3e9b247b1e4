"""Compiles the C programs of tests/c against the installed libibverbs, or Open MPI."""

import os
import subprocess
from pathlib import Path

from .paths import ROOT, TARGET
from .process import Failure

# The most lines of an example in C.
EXAMPLE_LINES = 140
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]


def compile_c(name: str, *libraries: str, compiler="cc", options=()) -> Path:
    """The program tests/c/<name>.c, compiled anew if it, or a header beside it or of ours, is
    newer. With other options it is another program."""
    variant = "-".join([name, *([compiler, *options] if options else [])])
    source, program = (
        ROOT / "tests" / "c" / f"{name}.c",
        TARGET / "tests-c" / variant.replace("/", "_"),
    )
    newest = max(
        file.stat().st_mtime
        for file in (source, *source.parent.glob("*.h"), *(ROOT / "include").rglob("*.h"))
    )
    if program.exists() and program.stat().st_mtime >= newest:
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    # Another suite may compile, or run, the same now: the program comes to its place whole.
    made = program.with_name(f"{name}-{os.getpid()}")
    command = [compiler, *FLAGS, *options, "-o", made, source, *libraries]
    done = subprocess.run([str(a) for a in command], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Failure(
            f"{source.name} does not compile (needs a C compiler and libibverbs-dev): "
            f"{done.stderr[:2000]}"
        )
    made.replace(program)
    return program


def compiled(*words):
    """Runs a compiler as users do."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Failure(f"{words[0]} fails: {done.stderr[:2000]}")


def check_header_in_cpp(logs: Path, header: str, call: str, *libraries):
    """Compiles, links and runs a C++ program that includes a header and calls a function of it."""
    source, program = logs / "header.cc", logs / "header"
    source.write_text(f"#include <{header}>\nint main() {{ return {call}[0]; }}\n")
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    compiled("c++", *strict, "-o", program, source, *libraries)
    subprocess.run([program], check=True, timeout=20)


def compile_example(source: Path, *libraries) -> Path:
    """An example in C, compiled as its users do, and as strictly as our own programs."""
    program = TARGET / "tests-c" / f"example-{source.stem}"
    program.parent.mkdir(parents=True, exist_ok=True)
    compiled("cc", *FLAGS, "-o", program, source, *libraries)
    return program
