#!/usr/bin/env python3
"""Programs under sanitizers, valgrind and gdb, with Unbroken beneath, while the NIC under them dies (docs/guide/debugging.md).

The program is tests/c/threads.c: many threads use all verbs at once, and it verifies every byte. Nothing may be told of it; and what is
wrong with a program (tests/c/faulty.c) must be told as without Unbroken."""

import json
import shutil
import subprocess
import sys

from lib.cc import compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.process import Failure, Skip, wait_until
from lib.suite import BUILD, ROOT, Suite

SECONDS = 3
# Valgrind runs one thread at a time, some thirty times as slowly.
VALGRIND_SECONDS = 8
END_SECONDS = 120
NOTES = ("ThreadSanitizer", "AddressSanitizer", "LeakSanitizer", "runtime error", "ERROR:", "WARNING:")


def build(name, compiler, sanitizer, *more):
    """A program of tests/c as a compiler makes it with a sanitizer."""
    if not shutil.which(compiler):
        raise Skip(f"{compiler} is not installed")
    return compile_c(name, "-libverbs", "-lpthread", compiler=compiler, options=["-g", "-O1", f"-fsanitize={sanitizer}", *more])


def through_a_death(fabric, program, before=(), seconds=SECONDS):
    """Runs the program, and has the NIC die under it. Gives the process when it has ended well, and what it says it did."""
    process = fabric.run("a", [*before, program, "--seconds", seconds, "--faults"], "a-threads")
    wait_until(lambda: process.ended() or "running" in process.output(), END_SECONDS, "traffic")
    fabric.fault("nic a/0 dead")
    process.expect_success(END_SECONDS)
    result = json.loads(next(line for line in process.output().splitlines() if line.startswith("{")))
    if len(fabric.events("switch")) < 4:
        raise Failure(f"{len(fabric.events('switch'))} QPs moved, four are right")
    if min(result["messages"], result["events"]) < 20:
        raise Failure(f"too little was done: {result}")
    return process, f"{result['messages']} messages, {len(fabric.events('switch'))} switches"


def clean(logs, compiler, sanitizer, *more):
    """A program that is right: the sanitizer has nothing to say."""
    program = build("threads", compiler, sanitizer, *more)
    with Fabric(logs) as fabric:
        process, note = through_a_death(fabric, program)
        told = [line for line in process.output().splitlines() if any(n in line for n in NOTES)]
        if told:
            raise Failure(f"the sanitizer says: {told[0]}")
        return note


def found(logs, compiler, sanitizer, mistake, words, env=None):
    """A program that is wrong: the sanitizer says so."""
    program = build("faulty", compiler, sanitizer)
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, mistake], "faulty", env=env)
        process.expect_error(END_SECONDS)
        if words not in process.output():
            raise Failure(f"'{words}' is not told: {process.output()[-300:]}")
        return words


def own_suppressions(logs):
    """Who has a file of suppressions is told what to write into it, and the options stay."""
    program = build("faulty", "gcc", "thread")
    with Fabric(logs) as fabric:
        mine = fabric.path / "mine.supp"
        mine.write_text("race:writer\ncalled_from_lib:libunbroken.so\n")
        process = fabric.run("a", [program, "race"], "faulty", env={"TSAN_OPTIONS": f"suppressions={mine}"})
        process.expect_success(END_SECONDS)
        if "called_from_lib:libunbroken.so" not in process.output():
            raise Failure("nothing is told of what the file needs")
        return "told"


def library(logs):
    """A library with AddressSanitizer in a program without: the runtime is put first by hand."""
    with Fabric(logs) as fabric:
        built = logs / "library.so"
        source = "int overflow(void) { int a[4]; int *volatile p = a; return p[4]; }"
        command = ["gcc", "-g", "-fsanitize=address", "-fPIC", "-shared", "-o", built, "-x", "c", "-"]
        subprocess.run(command, input=source, text=True, check=True)
        runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
        preload = ["env", "ASAN_OPTIONS=detect_leaks=0", f"LD_PRELOAD={runtime}:{BUILD / 'libunbroken.so'}"]
        script = f"import ctypes; c = ctypes.CDLL('libibverbs.so.1'); assert c.ibv_get_device_list(None); ctypes.CDLL('{built}').overflow()"
        process = fabric.run("a", [*preload, "python3", "-c", script], "python")
        process.expect_error(END_SECONDS)
        if "stack-buffer-overflow" not in process.output():
            raise Failure(f"the overflow is not told: {process.output()[-300:]}")
        return "stack-buffer-overflow"


def valgrind(logs):
    """Memcheck, with its search for leaks and our file of suppressions."""
    program = compile_c("threads", "-libverbs", "-lpthread", options=["-g"])
    tool = ["valgrind", "--leak-check=full", f"--suppressions={ROOT / 'docs' / 'valgrind.supp'}", "--error-exitcode=3"]
    with Fabric(logs) as fabric:
        process, note = through_a_death(fabric, program, tool, VALGRIND_SECONDS)
        if "ERROR SUMMARY: 0 errors" not in process.output():
            raise Failure("valgrind tells of errors")
        return note


def valgrind_finds(logs):
    """A leak of the program's own is told for all the suppressions."""
    program = compile_c("faulty", "-libverbs", "-lpthread", options=["-g"])
    tool = ["valgrind", "--leak-check=full", f"--suppressions={ROOT / 'docs' / 'valgrind.supp'}", "--error-exitcode=3"]
    with Fabric(logs) as fabric:
        process = fabric.run("a", [*tool, program, "leak"], "faulty")
        process.expect_error(END_SECONDS)
        if "12,345 bytes in 1 blocks are definitely lost" not in process.output():
            raise Failure("the leak is not told")
        return "12,345 bytes"


def gdb(logs, first):
    """A breakpoint, a variable and a stack, then the NIC dies and the program goes on to its end. `first`: what stands first on the command line."""
    program = compile_c("threads", "-libverbs", "-lpthread", options=["-g"])
    commands = ["set breakpoint pending on", "break run_threads", "run", "backtrace", "print seconds", "continue"]
    debugger = ["gdb", "-nx", "-batch", "-return-child-result", *(word for c in commands for word in ("-ex", c)), "--args"]
    with Fabric(logs) as fabric:
        if first == "unbroken":
            process, note = through_a_death(fabric, program, debugger)
        else:
            line = [UNBROKEN, "run", "--host", "a", "--", program, "--seconds", SECONDS, "--faults"]
            process = fabric.start("gdb", [*debugger, *line])
            wait_until(lambda: process.ended() or "\nrunning" in process.output(), END_SECONDS, "traffic")
            fabric.fault("nic a/0 dead")
            process.expect_success(END_SECONDS)
            note = f"{len(fabric.events('switch'))} switches"
        for words in ("run_threads ()", "main (", f"$1 = {SECONDS}", "exited normally"):
            if words not in process.output():
                raise Failure(f"gdb does not say '{words}'")
        return note


def main() -> int:
    """Runs all of it."""
    suite = Suite("debuggers", sys.argv[1:])
    for compiler in ("gcc", "clang"):
        suite.case(f"ThreadSanitizer, {compiler}", clean, compiler, "thread")
        suite.case(f"ThreadSanitizer, {compiler}, a race", found, compiler, "thread", "race", "WARNING: ThreadSanitizer: data race")
        suite.case(f"AddressSanitizer, {compiler}", clean, compiler, "address")
        suite.case(f"AddressSanitizer, {compiler}, an overflow", found, compiler, "address", "overflow", "heap-buffer-overflow")
        suite.case(f"AddressSanitizer, {compiler}, a leak", found, compiler, "address", "leak", "12345 byte(s)")
        suite.case(f"UndefinedBehaviorSanitizer, {compiler}", clean, compiler, "undefined")
    suite.case("AddressSanitizer, clang, shared runtime", shared_clang)
    suite.case("AddressSanitizer in a library alone", library)
    suite.case("ThreadSanitizer with suppressions of the user's", own_suppressions)
    suite.case("valgrind", valgrind)
    suite.case("valgrind, a leak", valgrind_finds)
    suite.case("gdb under unbroken run", gdb, "unbroken")
    suite.case("unbroken run under gdb", gdb, "gdb")
    return suite.finish()


def shared_clang(logs):
    """With -shared-libsan the runtime is a library, which `unbroken run` puts first."""
    folder = compile_folder("clang")
    return clean(logs, "clang", "address", "-shared-libsan", f"-Wl,-rpath,{folder}")


def compile_folder(compiler):
    """Where a compiler has its runtimes."""
    if not shutil.which(compiler):
        raise Skip(f"{compiler} is not installed")
    return subprocess.run([compiler, "-print-runtime-dir"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
