"""Programs under sanitizers, valgrind and gdb, with Unbroken beneath, while the NIC under them dies
(docs/guide/debugging.md).

The program is tests/c/threads.c: many threads use all verbs at once, and it verifies every byte.
The tools must find nothing in it; and what is wrong with a program (tests/c/faulty.c) they must
find as without Unbroken.
"""

import json
import shutil
import subprocess
from itertools import product

import pytest

from lib.cc import compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.paths import BUILD, ROOT
from lib.process import Failure, Skip, wait_until

SECONDS = 3
# Valgrind runs one thread at a time, some thirty times as slowly.
VALGRIND_SECONDS = 8
END_SECONDS = 120
NOTES = [
    "ThreadSanitizer",
    "AddressSanitizer",
    "LeakSanitizer",
    "runtime error",
    "ERROR:",
    "WARNING:",
]
VALGRIND = [
    "valgrind",
    "--leak-check=full",
    f"--suppressions={ROOT / 'docs' / 'valgrind.supp'}",
    "--error-exitcode=3",
]
COMPILERS = ["gcc", "clang"]


def need(tool):
    """Skips where a tool is not installed."""
    if not shutil.which(tool):
        raise Skip(f"{tool} is not installed")


def build(name, compiler, sanitizer, *more):
    """A program of tests/c as a compiler makes it with a sanitizer."""
    need(compiler)
    options = ["-g", "-O1", f"-fsanitize={sanitizer}", *more]
    return compile_c(name, "-libverbs", "-lpthread", compiler=compiler, options=options)


def through_a_death(fabric, program, before=(), seconds=SECONDS):
    """Runs the program, and has the NIC die under it. Gives the process when it has ended well,
    and what it did."""
    process = fabric.run("a", [*before, program, "--seconds", seconds, "--faults"], "a-threads")
    wait_until(lambda: process.ended() or "running" in process.output(), END_SECONDS, "traffic")
    fabric.fault("nic a/0 dead")
    process.expect_success(END_SECONDS)
    result = json.loads(
        next(line for line in process.output().splitlines() if line.startswith("{"))
    )
    if len(fabric.events("switch")) < 4:
        raise Failure(f"{len(fabric.events('switch'))} QPs moved, four are right")
    if min(result["messages"], result["events"]) < 20:
        raise Failure(f"too little was done: {result}")
    return process, f"{result['messages']} messages, {len(fabric.events('switch'))} switches"


def check_clean(logs, compiler, sanitizer, *more):
    """A program that is right: the sanitizer has nothing to say."""
    program = build("threads", compiler, sanitizer, *more)
    with Fabric(logs) as fabric:
        process, figures = through_a_death(fabric, program)
        found = [line for line in process.output().splitlines() if any(n in line for n in NOTES)]
        if found:
            raise Failure(f"the sanitizer says: {found[0]}")
        return figures


def combinations(smoke):
    """Each compiler with each sanitizer."""
    for compiler, sanitizer in product(COMPILERS, ["thread", "address", "undefined"]):
        marks = pytest.mark.smoke if (compiler, sanitizer) == smoke else ()
        yield pytest.param(compiler, sanitizer, id=f"{compiler} {sanitizer}", marks=marks)


@pytest.mark.parametrize("compiler, sanitizer", combinations(smoke=("gcc", "address")))
def test_sanitizer_finds_nothing(logs, note, compiler, sanitizer):
    note(check_clean(logs, compiler, sanitizer))


def test_sanitizer_in_a_shared_runtime(logs, note):
    """With -shared-libsan the runtime of AddressSanitizer is a library, which `unbroken run`
    puts first."""
    need("clang")
    command = ["clang", "-print-runtime-dir"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    options = ["-shared-libsan", f"-Wl,-rpath,{done.stdout.strip()}"]
    note(check_clean(logs, "clang", "address", *options))


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "sanitizer, mistake, words",
    [
        ("thread", "race", "WARNING: ThreadSanitizer: data race"),
        ("address", "overflow", "heap-buffer-overflow"),
        pytest.param("address", "leak", "12345 byte(s)", marks=pytest.mark.smoke),
    ],
    ids=["thread race", "address overflow", "address leak"],
)
def test_sanitizer_finds_a_mistake(logs, compiler, sanitizer, mistake, words):
    """A program that is wrong: the sanitizer says so."""
    program = build("faulty", compiler, sanitizer)
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, mistake], "faulty")
        process.expect_error(END_SECONDS)
        if words not in process.output():
            raise Failure(f"the sanitizer does not say '{words}': {process.output()[-300:]}")


def test_suppressions_of_the_user(logs):
    """`unbroken run` says what the user's own file of suppressions needs, and the options stay."""
    program = build("faulty", "gcc", "thread")
    with Fabric(logs) as fabric:
        mine = fabric.path / "mine.supp"
        mine.write_text("race:writer\ncalled_from_lib:libunbroken.so\n")
        env = {"TSAN_OPTIONS": f"suppressions={mine}"}
        process = fabric.run("a", [program, "race"], "faulty", env=env)
        process.expect_success(END_SECONDS)
        if "called_from_lib:libunbroken.so" not in process.output():
            raise Failure("nothing says what the file needs")


def test_sanitizer_in_a_library_alone(logs):
    """A library with AddressSanitizer in a program without: the runtime is put first by hand."""
    with Fabric(logs) as fabric:
        built = logs / "library.so"
        source = "int overflow(void) { int a[4]; int *volatile p = a; return p[4]; }"
        command = [
            "gcc",
            "-g",
            "-fsanitize=address",
            "-fPIC",
            "-shared",
            "-o",
            built,
            "-x",
            "c",
            "-",
        ]
        subprocess.run(command, input=source, text=True, check=True)
        command = ["gcc", "-print-file-name=libasan.so"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        libraries = f"{done.stdout.strip()}:{BUILD / 'libunbroken.so'}"
        preload = ["env", "ASAN_OPTIONS=detect_leaks=0", f"LD_PRELOAD={libraries}"]
        script = (
            "import ctypes\n"
            "assert ctypes.CDLL('libibverbs.so.1').ibv_get_device_list(None)\n"
            f"ctypes.CDLL('{built}').overflow()"
        )
        process = fabric.run("a", [*preload, "python3", "-c", script], "python")
        process.expect_error(END_SECONDS)
        if "stack-buffer-overflow" not in process.output():
            raise Failure(f"the overflow is not found: {process.output()[-300:]}")


def test_valgrind_finds_nothing(logs, note):
    """Memcheck, with its search for leaks and our file of suppressions."""
    program = compile_c("threads", "-libverbs", "-lpthread", options=["-g"])
    with Fabric(logs) as fabric:
        process, figures = through_a_death(fabric, program, VALGRIND, VALGRIND_SECONDS)
        if "ERROR SUMMARY: 0 errors" not in process.output():
            raise Failure("valgrind finds errors")
        note(figures)


def test_valgrind_finds_a_leak(logs):
    """A leak of the program's own is found for all the suppressions."""
    program = compile_c("faulty", "-libverbs", "-lpthread", options=["-g"])
    with Fabric(logs) as fabric:
        process = fabric.run("a", [*VALGRIND, program, "leak"], "faulty")
        process.expect_error(END_SECONDS)
        if "12,345 bytes in 1 blocks are definitely lost" not in process.output():
            raise Failure("the leak is not found")


@pytest.mark.parametrize("first", ["unbroken", "gdb"])
def test_gdb(logs, note, first):
    """A breakpoint, a variable and a stack, then the NIC dies and the program goes on to its end.

    `first`: what stands first on the command line."""
    program = compile_c("threads", "-libverbs", "-lpthread", options=["-g"])
    commands = ["set breakpoint pending on", "break run_threads", "run", "backtrace"]
    commands += ["print seconds", "continue"]
    words = [word for command in commands for word in ("-ex", command)]
    debugger = ["gdb", "-nx", "-batch", "-return-child-result", *words, "--args"]
    with Fabric(logs) as fabric:
        if first == "unbroken":
            process, figures = through_a_death(fabric, program, debugger)
        else:
            line = [UNBROKEN, "run", "--host", "a", "--", program, "--seconds", SECONDS, "--faults"]
            process = fabric.start("gdb", [*debugger, *line])
            running = lambda: process.ended() or "\nrunning" in process.output()
            wait_until(running, END_SECONDS, "traffic")
            fabric.fault("nic a/0 dead")
            process.expect_success(END_SECONDS)
            figures = f"{len(fabric.events('switch'))} switches"
        for words in ("run_threads ()", "main (", f"$1 = {SECONDS}", "exited normally"):
            if words not in process.output():
                raise Failure(f"gdb does not say '{words}'")
        note(figures)
