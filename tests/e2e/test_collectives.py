"""Collectives between processes whose NICs die, are cut off and come back in mid-stream.

Every result is right, traffic is where it should be, and what cannot go on ends in time with an
error that names what is gone.
"""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from lib import options
from lib.cc import check_header_in_cpp, compile_c, compile_example
from lib.collective import (
    ENOUGH,
    LIBRARY,
    LONG,
    SECONDS,
    STARTS,
    Job,
    carries,
    communicators,
    done,
    found,
    portion,
    rounds,
    runs,
    sent,
    shares,
    since,
    splitting,
)
from lib.fabric import Fabric
from lib.paths import ROOT
from lib.process import Failure, wait_until

# The share of an operation's size that each of so many hosts sends.
FACTOR = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
}
EXAMPLES = ROOT / "crates/collective/library/examples"
OPERATIONS = [
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "reduce",
    "all-to-all",
    "send-recv",
    "barrier",
]
PLAIN = ["--device", "plain"]
# A fault, the NICs that are left to host a, what is reported of it, and what is planned without.
LOCATED = [
    ("nic a/0 dead", [1, 2, 3], "host 0 NIC 0 is dead or its port is down", ["0/0"]),
    ("nic a/1 down", [0, 2, 3], "host 0 NIC 1 is dead or its port is down", ["0/1"]),
    ("cable a/2 cut", [0, 1, 3], "the cable of host 0 NIC 2 is cut", ["0/2"]),
    ("switch rail3 down", [0, 1, 2], "the switch of rail 3 is down", ["0/3", "1/3", "2/3"]),
]


@pytest.mark.parametrize(
    "op, hosts, arguments",
    [
        pytest.param(op, "abc", [], id=op, marks=pytest.mark.smoke if op == "all-reduce" else ())
        for op in OPERATIONS
    ]
    + [
        pytest.param("all-reduce", "aabb", [], id="all-reduce-two-ranks-on-each-host"),
        pytest.param(
            "all-reduce", "ab", ["--logical", "--type", "bf16"], id="all-reduce-bf16-logical-qps"
        ),
    ],
)
def test_healthy(logs, note, op, hosts, arguments):
    """Results are right, from 8 bytes to 1 MiB, and NICs carry what they must and hardly more."""
    with Fabric(logs) as fabric:
        size, iterations, warmup = 1 << 20, 20, 3
        sizes = ["--min", 8, "--max", size, "--factor", 32]
        lines = Job(fabric, hosts, "--op", op, *sizes, "--check-all", *arguments).succeed()
        runs_of_one_size = ["--min", size, "--max", size]
        # Busy cores may be taken for slow NICs, of whose hosts others own more.
        runs_of_one_size += ["--iterations", iterations, "--warmup", warmup, "--no-measure"]
        job = Job(fabric, hosts, "--op", op, *runs_of_one_size, *arguments)
        before = sent(fabric, "a")
        job.succeed()
        carried = sum(since(fabric, "a", before))
        n = len(set(hosts))
        if op in FACTOR and len(hosts) == n:
            due = FACTOR[op](n) * size * (iterations + warmup)
            if not 0.99 * due <= carried <= 1.1 * due:
                raise Failure(f"host a has sent {carried} bytes where {due:.0f} are due")
        note(f"{lines[-1]['busbw_gbps']:.1f} Gbit/s")


@pytest.mark.parametrize(
    "op, fault, left, found_as, settings, arguments",
    [
        pytest.param(
            "all-reduce",
            fault,
            left,
            (verdict, down),
            [],
            [],
            id=name,
            marks=pytest.mark.smoke if name in ("nic-dead", "cable-cut") else (),
        )
        for name, (fault, left, verdict, down) in zip(
            ["nic-dead", "nic-down", "cable-cut", "switch-down"], LOCATED
        )
    ]
    + [
        pytest.param("all-reduce", "nic a/0 dead", [1, 2, 3], None, PLAIN, [], id="plain-devices"),
        pytest.param(
            "all-reduce", "nic a/0 dead", [1, 2, 3], None, [], ["--logical"], id="logical-qps"
        ),
        pytest.param("all-gather", "nic a/3 dead", [0, 1, 2], None, [], [], id="all-gather"),
        pytest.param(
            "reduce-scatter", "cable a/0 cut", [1, 2, 3], None, [], [], id="reduce-scatter"
        ),
    ],
)
def test_fault(logs, note, op, fault, left, found_as, settings, arguments):
    """A fault in mid-stream: NICs that are left carry on, results are right; it is located,
    and its share is spread. When it is over, all NICs carry again."""
    with Fabric(logs, *settings) as fabric:
        job = Job(
            fabric, ["a", "b", "c"], "--op", op, "--min", "4M", "--max", "4M", *LONG, *arguments
        )
        runs(fabric, job)
        fabric.fault(fault)
        carries(fabric, job, left)
        if found_as:
            found(fabric, job, *found_as)
            shares(fabric, job, left)
        fabric.clear()
        carries(fabric, job, [0, 1, 2, 3])
        line = job.end()[-1]
        # Beneath us SHIFT moves queue pairs, and we see nothing.
        if (line["moves"] == 0 or line["failures"] == 0) != ("--logical" in arguments):
            raise Failure(f"rank 0 has survived nothing, or what it should not have seen: {line}")
        note(
            f"{line['iterations']} operations, {line['moves']} streams moved, the longest "
            f"operation took {line['longest_us'] / 1000:.0f} ms"
        )


def test_plan_is_kept(logs):
    """With the plan kept, one other NIC carries what the lost one did, and nobody plans anew."""
    with Fabric(logs) as fabric:
        job = Job(fabric, ["a", "b", "c"], "--min", "4M", "--max", "4M", *LONG, "--no-balance")
        runs(fabric, job)
        fabric.fault("nic a/0 dead")
        carries(fabric, job, [1, 2, 3])

        def twice_as_much():
            *others, most = sorted(portion(fabric, "a")[1:])
            return min(others) > ENOUGH and 1.7 < most / max(others) and most / min(others) < 2.3

        wait_until(twice_as_much, STARTS, "one NIC that carries twice as much as the others")
        if any(s["down"] for s in communicators(fabric)):
            raise Failure(f"planned anew: {communicators(fabric)}")
        fabric.clear()
        shares(fabric, job, [0, 1, 2, 3])
        job.end()


@pytest.mark.parametrize("host", ["a", "c"])
def test_nic_is_dead_at_first(logs, host):
    """A NIC that is dead when a job begins is found, planned without, and used when it is well."""
    with Fabric(logs) as fabric:
        fabric.fault(f"nic {host}/1 dead")
        job = Job(fabric, ["a", "b", "c"], "--min", "4M", "--max", "4M", *LONG)
        runs(fabric, job)
        number = "abc".index(host)
        found(fabric, job, f"host {number} NIC 1 is dead or its port is down", [f"{number}/1"])
        shares(fabric, job, [0, 2, 3], host)
        fabric.clear()
        carries(fabric, job, [0, 1, 2, 3], host)
        job.end()


def test_work_request_fails(logs):
    """A work request fails; nothing else is wrong, and the stream fails back at once."""
    with Fabric(logs) as fabric:
        job = Job(fabric, ["a", "b"], "--min", "4M", "--max", "4M", *LONG)
        runs(fabric, job)
        fabric.fault("wqe-error a/1", "--at", "0s")
        wait_until(
            lambda: any(s["happened"] for s in communicators(fabric)), STARTS, "news of the fault"
        )
        fabric.clear()
        carries(fabric, job, [0, 1, 2, 3])
        line = job.end()[-1]
        if line["failures"] == 0:
            raise Failure(f"the fault had no effect: {line}")


def test_nics_die_one_after_the_other(logs, note):
    """NICs die down the chain of backups until one is left."""
    with Fabric(logs) as fabric:
        job = Job(fabric, ["a", "b", "c"], "--min", "2M", "--max", "2M", *LONG)
        runs(fabric, job)
        for rail in range(3):
            fabric.fault(f"nic a/{rail} dead")
            carries(fabric, job, list(range(rail + 1, 4)))
        fabric.clear()
        carries(fabric, job, [0, 1, 2, 3])
        note(f"{job.end()[-1]['iterations']} operations")


@pytest.mark.parametrize("seed", range(options.SEED, options.SEED + 3))
def test_random_faults(logs, note, seed):
    """Random faults all the time, on all hosts."""
    with Fabric(logs) as fabric:
        fabric.random_faults(seed, 6, "a", "b", "c")
        job = Job(
            fabric, ["a", "b", "c"], "--min", "1M", "--max", "1M", "--for", "7s", "--check-all"
        )
        line = job.succeed()[-1]
        note(
            f"{line['iterations']} operations, {line['failures']} paths failed, {line['moves']} "
            "streams moved"
        )


@pytest.mark.parametrize(
    "faults",
    [["flap cable a/0 down=400ms up=300ms"], ["corrupt a/0 1%", "corrupt rail1 1%"]],
    ids=["cable-flaps", "packets-are-damaged"],
)
def test_impaired_network(logs, note, faults):
    """Faults that paths outlive, or not: every result is right."""
    with Fabric(logs) as fabric:
        for fault in faults:
            fabric.fault(fault)
        job = Job(
            fabric, ["a", "b", "c"], "--min", "1M", "--max", "1M", "--for", "6s", "--check-all"
        )
        line = job.succeed()[-1]
        note(f"{line['iterations']} operations, {line['failures']} paths failed")


def test_no_nic_is_left(logs, note):
    """No NIC is left: an error at all ranks, in the time that was asked for."""
    with Fabric(logs) as fabric:
        job = Job(
            fabric, ["a", "b", "c"], "--min", "1M", "--max", "1M", "--for", "60s", "--timeout", "3s"
        )
        runs(fabric, job)
        for rail in range(4):
            fabric.fault(f"nic b/{rail} dead")
        began = time.monotonic()
        for process in job.ranks:
            process.expect_error(20)
            output = process.output()
            if "have had no path for 3 s" not in output and "stands still" not in output:
                raise Failure(f"{process.name} says {output[-300:]}")
        note(f"after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize(
    "hosts, victim",
    [
        pytest.param("abc", 1, id="of-three", marks=pytest.mark.smoke),
        pytest.param("aabcd", 4, id="of-five-two-of-which-share-a-host"),
    ],
)
def test_process_is_killed(logs, note, hosts, victim):
    """A process is killed: an error at all others that names its rank, at once."""
    with Fabric(logs) as fabric:
        job = Job(fabric, hosts, "--min", "1M", "--max", "1M", "--for", "60s")
        runs(fabric, job)
        job.ranks[victim].kill()
        began = time.monotonic()
        for rank, process in enumerate(job.ranks):
            if rank != victim:
                process.expect_error(10)
                if f"the process of rank {victim} is gone" not in process.output():
                    raise Failure(f"rank {rank} says {process.output()[-300:]}")
        note(f"after {time.monotonic() - began:.2f} s")


def test_process_is_stopped(logs, note):
    """A process stands still: an error at all others in the time that was asked for. It names the
    rank that nothing came from: this one, or one that waits for it itself."""
    with Fabric(logs) as fabric:
        job = Job(
            fabric, ["a", "b", "c"], "--min", "1M", "--max", "1M", "--for", "60s", "--timeout", "2s"
        )
        # One that has not begun yet would be named, too.
        at_work = lambda: [done(s) > 2 for s in communicators(fabric)] == [True] * 3
        wait_until(at_work, STARTS, "operations of all ranks")
        os.kill(job.ranks[2].pid, signal.SIGSTOP)
        began = time.monotonic()
        for process in job.ranks[:2]:
            process.expect_error(20)
        said = [process.output() for process in job.ranks[:2]]
        pattern = r"nothing came from rank (\d), or was taken by it, within 2 s"
        named = [found and int(found[1]) for found in (re.search(pattern, text) for text in said)]
        if named not in ([2, 2], [2, 0], [1, 2]):
            raise Failure(f"the ranks say {[text[-300:] for text in said]}")
        note(f"after {time.monotonic() - began:.1f} s")


@pytest.mark.smoke
def test_ranks_disagree(logs):
    """One rank asks for something else: all get an error that names who, and what."""
    with Fabric(logs) as fabric:
        job = Job(fabric, [])
        args = ["--min", "1K", "--max", "1K"]
        job.ranks = [
            job.start(
                fabric,
                rank,
                "abc"[rank],
                3,
                f"own{rank}",
                *args,
                *(["--reduce", "max"] if rank == 1 else []),
            )
            for rank in range(3)
        ]
        for process in job.ranks:
            process.expect_error(20)
            if (
                "rank 1 has AllReduce of 256 F32, Max, rank 0 has AllReduce of 256 F32, Sum"
                not in process.output()
            ):
                raise Failure(f"{process.name} says {process.output()[-400:]}")


def test_rank_is_there_twice(logs):
    """A rank that is there twice is refused, and the job goes on without the second."""
    with Fabric(logs) as fabric:
        job = Job(fabric, [])
        args = ["--min", "1K", "--max", "1K"]
        zero = job.start(fabric, 0, "a", 2, "zero", *args)
        wait_until(lambda: zero.ended() or job.id_file.exists(), STARTS, "the id")
        # The file goes when two have met, and both must have the id.
        copy = shutil.copy(job.id_file, fabric.files / "again.id")
        first = job.start(fabric, 1, "b", 2, "first", *args, id_file=copy)
        second = job.start(fabric, 1, "b", 2, "second", *args, id_file=copy)
        ended = [process for process in (first, second) if process.wait(SECONDS) != 0]
        zero.expect_success(SECONDS)
        output = [process.output() for process in ended]
        if len(ended) != 1 or not any(
            what in output[0]
            for what in (
                "rank 1 has come already",
                "is this one there twice?",
                "is the process that made the id there?",
            )
        ):
            raise Failure(f"{len(ended)} were refused: {output}")


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(options.SEED, marks=pytest.mark.smoke),
        pytest.param(options.SEED + 1),
    ],
)
def test_split_under_random_faults(logs, note, seed):
    """Communicators are split while NICs of all hosts die, flap and come back: ranks and sums are
    right."""
    with Fabric(logs) as fabric:
        ranks = splitting(fabric, "abcda", 20_000)
        rounds(ranks, 1)
        fabric.random_faults(seed, SECONDS, "a", "b", "c", "d")
        # Of whom some paths of new communicators have failed.
        hit = lambda: [
            p
            for p in ranks
            if not p.output().rstrip().endswith(" 0 paths of new communicators failed")
        ]
        wait_until(
            lambda: any(p.ended() for p in ranks) or hit(), SECONDS, "an effect of the faults"
        )
        rounds(ranks, max(p.output().count("round ") for p in ranks) + 10)
        (fabric.files / "goes").unlink()
        for process in ranks:
            process.expect_success(SECONDS)
            if "splits are right" not in process.output():
                raise Failure(f"{process.name} says {process.output()[-300:]}")
        # "23 splits are right, 4 paths failed"
        output = [process.output().strip().splitlines()[-1] for process in ranks]
        note(
            f"{output[0].split(',')[0]}; paths failed at each rank: "
            f"{[int(line.split()[-3]) for line in output]}"
        )


@pytest.mark.parametrize(
    "sig, words",
    [(signal.SIGKILL, ["is gone"]), (signal.SIGSTOP, ["stands still", "is gone"])],
    ids=["killed", "stopped"],
)
def test_split_loses_a_rank(logs, note, sig, words):
    """A rank is killed or stopped while communicators are split: an error at all others, of the old
    communicator or of a new one. Who has its error ends, so that to others it may be that one who
    is gone."""
    with Fabric(logs) as fabric:
        ranks = splitting(fabric, "abcd", 2000)
        rounds(ranks, 2)
        os.kill(ranks[2].pid, sig)
        began = time.monotonic()
        for rank, process in enumerate(ranks):
            if rank == 2:
                continue
            process.expect_error(20)
            if not any(word in process.output() for word in words):
                raise Failure(f"{process.name} says {process.output()[-300:]}")
        note(f"after {time.monotonic() - began:.2f} s")


@pytest.mark.smoke
def test_c_api(logs):
    """Every function of the header, and what it refuses, between three processes."""
    with Fabric(logs) as fabric:
        process = fabric.start("coll", [compile_c("coll", *LIBRARY)])
        process.expect_success(SECONDS)
        if process.output().count("all is as the header says") != 3:
            raise Failure(f"not all ranks say so: {process.output()}")


def test_header_in_cpp(logs):
    check_header_in_cpp(logs, "unbroken/coll.h", "ubcollGetLastError()", *LIBRARY)


def test_examples_are_short():
    long = [
        f"{e.name}: {n}" for e in EXAMPLES.iterdir() if (n := len(e.read_text().splitlines())) > 100
    ]
    if long:
        raise Failure(f"examples are 100 lines at most: {long}")


def ring(fabric, program, seconds: int, env=None) -> list:
    """Three ranks of the example in C."""
    line = [3, "abc", seconds, fabric.files / "ring.id"]
    return [fabric.start(f"ring{rank}", [program, rank, *line], env) for rank in range(3)]


def test_c_example(logs, note):
    """The example in C, through the death of a NIC."""
    program = compile_example(EXAMPLES / "ring.c", *LIBRARY)
    with Fabric(logs) as fabric:
        ranks = ring(fabric, program, 5)
        before = sent(fabric, "a")
        wait_until(
            lambda: ranks[0].ended() or sum(since(fabric, "a", before)) > ENOUGH, STARTS, "traffic"
        )
        fabric.fault("nic a/0 dead")
        for process in ranks:
            process.expect_success(SECONDS)
            if "sums are right" not in process.output() or "; 0 paths failed" in process.output():
                raise Failure(f"{process.name} says {process.output()}")
        note(ranks[0].output().strip())


def test_shape_from_the_environment(logs):
    """A C program that asks for nothing itself: the paper's AllReduce, with half of a host's NICs
    lost."""
    program = compile_example(EXAMPLES / "ring.c", *LIBRARY)
    env = {"UNBROKEN_COLL_SHAPE": "r2ccl", "UNBROKEN_COLL_ANY_ORDER": "1"}

    def shaped(down):
        shown = communicators(fabric)
        return len(shown) == 3 and all(s["shape"] == "r2ccl" and s["down"] == down for s in shown)

    with Fabric(logs) as fabric:
        ranks = ring(fabric, program, 20, env)
        wait_until(lambda: shaped([]), STARTS, "three ranks with the shape")
        fabric.fault("nic a/0 dead")
        fabric.fault("nic a/1 dead")
        wait_until(lambda: shaped(["0/0", "0/1"]), STARTS, "the shape without the lost NICs")
        for process in ranks:
            process.expect_success(SECONDS)
            if "sums are right" not in process.output():
                raise Failure(f"{process.name} says {process.output()}")


@pytest.mark.parametrize("shape", ["r2ccl", "leaves", "bridged-ring"])
def test_shape(logs, shape):
    """A shape that is asked for, through NICs that die and come back."""
    with Fabric(logs) as fabric:
        words = ["--min", "4M", "--max", "4M", "--shape", shape, "--any-order", *LONG]
        job = Job(fabric, ["a", "b", "c"], *words)
        runs(fabric, job)
        fabric.fault("nic a/0 dead")
        fabric.fault("nic a/1 dead")
        carries(fabric, job, [2, 3])
        wait_until(
            lambda: all(s["down"] == ["0/0", "0/1"] for s in communicators(fabric)),
            STARTS,
            "plans without both",
        )
        fabric.clear()
        carries(fabric, job, [0, 1, 2, 3])
        line = job.end()[-1]
        if line["shape"] != shape or not line["failures"]:
            raise Failure(f"done as {line['shape']} through {line['failures']} failures")


@pytest.mark.parametrize(
    "words, said",
    [
        pytest.param(["--shape", "rings"], "bridged-ring", id="unknown"),
        pytest.param(["--shape", "ring"], "order of its own", id="in-order"),
        pytest.param(
            ["--shape", "r2ccl", "--any-order", "--op", "broadcast"],
            "Broadcast cannot have it; right is direct, ring",
            id="operation",
        ),
    ],
)
def test_shape_that_cannot_be(logs, words, said):
    """What is wrong with a shape is told, with what would be right."""
    with Fabric(logs) as fabric:
        done = fabric.command("coll", "bench", "--hosts", "a,b", *words)
        if done.returncode == 0 or said not in done.stderr:
            raise Failure(f"{words}: {done.returncode} {done.stderr}")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--hosts", "a,b", "--min", "4M", "--max", "1M"], "more than --max"),
        (["--hosts", "a,b", "--iterations", "0"], "1.."),
        (["--hosts", "a,b", "--timeout", "0s"], "1ms or more is right"),
        (["--hosts", "a,b", "--patience", "0s"], "1ms or more is right"),
        (["--hosts", "a,b", "--for", "0s"], "1ms or more is right"),
        (["--hosts", "a,b", "--op", "broadcast", "--root", "2"], "of 2 the last is 1"),
        (["--rank", "3", "--ranks", "2", "--id-file", "none"], "of 2 the last is 1"),
        (["--rank", "0", "--ranks", "0", "--id-file", "none"], "one rank at least"),
    ],
    ids=lambda value: "_".join(value[-2:]) if isinstance(value, list) else "",
)
def test_arguments_that_cannot_be(logs, words, said):
    """Arguments of `coll bench` that make no sense, alone or together, are told at once, with what
    would be right."""
    with Fabric(logs) as fabric:
        done = fabric.command("coll", "bench", *words)
        if done.returncode == 0 or words[-2] not in done.stderr + " --id-file":
            raise Failure(f"{words}: {done.returncode} {done.stderr}")
        if said not in done.stderr:
            raise Failure(f"{words}: {done.stderr}")


def test_rust_example(note):
    rust = subprocess.run(
        ["cargo", "run", "-q", "--release", "--example", "overlap"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    if rust.returncode != 0 or "40 sums of 3 ranks are right" not in rust.stdout:
        raise Failure(f"the example in Rust does not end well: {rust.stdout} {rust.stderr[-1000:]}")
    note(rust.stdout.strip())
