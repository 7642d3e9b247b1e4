#!/usr/bin/env python3
"""Collectives between processes, whose NICs die, are cut off and come back in mid-stream: every result is right, traffic is where it should be,
and what cannot go on is an error that names what is gone, in time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

from lib.cc import FLAGS, compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.process import Failure, wait_until
from lib.suite import BUILD, ROOT, TARGET, Suite

SECONDS = 60
# Until all ranks run, and until what was set has had its effect on a loaded machine.
STARTS = 30
# Longer than what is waited for takes on a loaded machine.
LONG = ["--seconds", 4 * STARTS, "--check-all"]
# More than an operation of 4 MiB sends over one of four NICs, twice.
ENOUGH = 4 << 20
FACTOR = {"all-reduce": lambda n: 2 * (n - 1) / n, "all-gather": lambda n: (n - 1) / n, "reduce-scatter": lambda n: (n - 1) / n}


LIBRARY = ["-I", ROOT / "include", "-L", BUILD, "-lunbroken_coll", f"-Wl,-rpath,{BUILD}"]
EXAMPLES = ROOT / "crates" / "collective" / "examples"


class Job:
    """Ranks of `unbroken coll bench`, one process each."""

    def __init__(self, fabric: Fabric, hosts: list, *options):
        self.id_file, self.goes = fabric.path / "bench.id", fabric.path / "goes"
        self.goes.touch()
        self.ranks = []
        for rank, host in enumerate(hosts):
            self.ranks.append(self.start(fabric, rank, host, len(hosts), f"rank{rank}", *options))

    def start(self, fabric, rank, host, ranks, name, *options, id_file=None):
        line = [UNBROKEN, "coll", "bench", "--rank", rank, "--ranks", ranks, "--host", host, "--id-file", id_file or self.id_file]
        goes = ["--while", self.goes] if "--seconds" in options else []
        return fabric.start(name, [*line, "--json", *options, *goes])

    def end(self) -> list:
        """All has been seen that was waited for: those that run `LONG` end before their time."""
        self.goes.unlink()
        return self.succeed()

    def succeed(self) -> list:
        """The lines of rank 0, when all have ended well."""
        for process in self.ranks:
            process.expect_success(SECONDS)
        lines = [json.loads(line) for line in self.ranks[0].output().splitlines()]
        wrong = [line for line in lines if line["wrong"]]
        if wrong or not lines:
            raise Failure(f"wrong results: {wrong or 'none at all'}")
        return lines


def sent(fabric, host) -> list:
    """Payload that each NIC of a host has sent."""
    nics = fabric.nics()
    return [nics[f"{host}/{rail}"]["tx_payload_bytes"] if f"{host}/{rail}" in nics else 0 for rail in range(4)]


def since(fabric, host, before) -> list:
    return [now - then for now, then in zip(sent(fabric, host), before)]


def runs(fabric, job, host="a"):
    """Waits until the NICs carry something."""
    before = sent(fabric, host)
    wait_until(lambda: any(p.ended() for p in job.ranks) or sum(since(fabric, host, before)) > 1 << 20, STARTS, "traffic")


def carries(fabric, job, rails, host="a"):
    """Waits until exactly these NICs of a host carry payload: the others nothing at all, while these carry more than operations need that
    were under way."""

    def so():
        if any(p.ended() for p in job.ranks):
            raise Failure(f"a rank has ended: {[p.output()[-300:] for p in job.ranks if p.ended()]}")
        before = sent(fabric, host)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = since(fabric, host, before)
            if all(now[rail] > ENOUGH for rail in rails):
                return all(now[rail] == 0 for rail in range(4) if rail not in rails)
        return False

    wait_until(so, STARTS, f"traffic on the NICs {rails} of host {host} alone")


def communicators(fabric) -> list:
    """`unbroken coll status --json`."""
    done = fabric.command("coll", "status", "--json")
    if done.returncode != 0:
        raise Failure(f"coll status: {done.stderr}")
    return json.loads(done.stdout)


def found(fabric, job, verdict, down):
    """Waits until all ranks have heard where the failure is, and plan without those NICs."""

    def so():
        if any(p.ended() for p in job.ranks):
            raise Failure(f"a rank has ended: {[p.output()[-300:] for p in job.ranks if p.ended()]}")
        shown = communicators(fabric)
        heard = [s for s in shown if any(verdict in h["what"] for h in s["happened"]) and s["down"] == down]
        return len(heard) == len(job.ranks)

    try:
        wait_until(so, STARTS, "")
    except Failure as error:
        happened = {s["rank"]: [h["what"] for h in s["happened"]] + s["down"] for s in communicators(fabric)}
        raise Failure(f"not all find '{verdict}' and plan without {down}: {happened} {error}") from error


def portion(fabric, host) -> list:
    """What each NIC of a host carries of the next so many bytes: each of those that carry, more than `ENOUGH`."""
    before = sent(fabric, host)
    wait_until(lambda: sum(since(fabric, host, before)) > 8 * ENOUGH, STARTS, f"traffic of host {host}")
    return since(fabric, host, before)


def shares(fabric, job, rails, host="a"):
    """Waits until these NICs of a host carry alike."""

    def so():
        now = portion(fabric, host)
        carried = [now[rail] for rail in rails]
        return min(carried) > ENOUGH and max(carried) < 2 * min(carried)

    wait_until(so, STARTS, f"equal shares of the NICs {rails} of host {host}")


def healthy(logs, op, hosts, *options):
    """Results are right, from 8 bytes to 1 MiB, and NICs carry what they must and hardly more."""
    with Fabric(logs) as fabric:
        size, iterations, warmup = 1 << 20, 20, 3
        lines = Job(fabric, hosts, "--op", op, "--min", 8, "--max", size, "--factor", 32, "--check-all", *options).succeed()
        job = Job(fabric, hosts, "--op", op, "--min", size, "--max", size, "--iterations", iterations, "--warmup", warmup, *options)
        before = sent(fabric, "a")
        job.succeed()
        carried = sum(since(fabric, "a", before))
        n = len(set(hosts))
        if op in FACTOR and len(hosts) == n:
            due = FACTOR[op](n) * size * (iterations + warmup)
            if not 0.99 * due <= carried <= 1.1 * due:
                raise Failure(f"host a has sent {carried} bytes where {due:.0f} are due")
        return f"{lines[-1]['busbw_gbps']:.1f} Gbit/s"


def broken(logs, op, fault, left, found_as, settings, *options):
    """A fault in mid-stream: NICs that are left carry on, results are right; it is found where it is, and its share is spread; when it is over, all
    NICs carry again."""
    with Fabric(logs, *settings) as fabric:
        job = Job(fabric, ["a", "b", "c"], "--op", op, "--min", "4M", "--max", "4M", *LONG, *options)
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
        if (line["moves"] == 0 or line["failures"] == 0) != ("--logical" in options):
            raise Failure(f"rank 0 has survived nothing, or what it should not have seen: {line}")
        return f"{line['iterations']} operations, {line['moves']} streams moved, the longest operation took {line['longest_us'] / 1000:.0f} ms"


def unbalanced(logs):
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


def dead_at_first(logs, host):
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


def queue_pair_error(logs):
    """A work request fails; nothing else is wrong, and the stream goes home at once."""
    with Fabric(logs) as fabric:
        job = Job(fabric, ["a", "b"], "--min", "4M", "--max", "4M", *LONG)
        runs(fabric, job)
        fabric.fault("wqe-error a/1", "--at", "0s")
        wait_until(lambda: any(s["happened"] for s in communicators(fabric)), STARTS, "news of the fault")
        fabric.clear()
        carries(fabric, job, [0, 1, 2, 3])
        line = job.end()[-1]
        if line["failures"] == 0:
            raise Failure(f"the fault had no effect: {line}")


def one_after_the_other(logs, *options):
    """NICs die down the chain of backups until one is left."""
    with Fabric(logs) as fabric:
        job = Job(fabric, ["a", "b", "c"], "--min", "2M", "--max", "2M", *LONG, *options)
        runs(fabric, job)
        for rail in range(3):
            fabric.fault(f"nic a/{rail} dead")
            carries(fabric, job, list(range(rail + 1, 4)))
        fabric.clear()
        carries(fabric, job, [0, 1, 2, 3])
        return f"{job.end()[-1]['iterations']} operations"


def flapping(logs, seed, *options):
    """Random faults all the time, on all hosts."""
    with Fabric(logs) as fabric:
        fabric.random_faults(seed, 6, "a", "b", "c")
        job = Job(fabric, ["a", "b", "c"], "--min", "1M", "--max", "1M", "--seconds", 7, "--check-all", *options)
        line = job.succeed()[-1]
        return f"{line['iterations']} operations, {line['failures']} paths failed, {line['moves']} streams moved"


def troubled(logs, *faults):
    """Faults that paths outlive, or not: every result is right."""
    with Fabric(logs) as fabric:
        for fault in faults:
            fabric.fault(fault)
        job = Job(fabric, ["a", "b", "c"], "--min", "1M", "--max", "1M", "--seconds", 6, "--check-all")
        line = job.succeed()[-1]
        return f"{line['iterations']} operations, {line['failures']} paths failed"


def none_left(logs):
    """No NIC is left: an error at all ranks, in the time that was asked for."""
    with Fabric(logs) as fabric:
        job = Job(fabric, ["a", "b", "c"], "--min", "1M", "--max", "1M", "--seconds", 60, "--timeout", 3)
        runs(fabric, job)
        for rail in range(4):
            fabric.fault(f"nic b/{rail} dead")
        began = time.monotonic()
        for process in job.ranks:
            process.expect_error(20)
            said = process.output()
            if "have had no NIC in common for 3 s" not in said and "stands still" not in said:
                raise Failure(f"{process.name} says {said[-300:]}")
        return f"after {time.monotonic() - began:.1f} s"


def dies(logs, hosts, victim):
    """A process is killed: an error at all others that names its rank, at once."""
    with Fabric(logs) as fabric:
        job = Job(fabric, hosts, "--min", "1M", "--max", "1M", "--seconds", 60)
        runs(fabric, job)
        job.ranks[victim].kill()
        began = time.monotonic()
        for rank, process in enumerate(job.ranks):
            if rank != victim:
                process.expect_error(10)
                if f"the process of rank {victim} is gone" not in process.output():
                    raise Failure(f"rank {rank} says {process.output()[-300:]}")
        return f"after {time.monotonic() - began:.2f} s"


def stopped(logs):
    """A process stands still: an error at all others that names its rank, in the time that was asked for."""
    with Fabric(logs) as fabric:
        job = Job(fabric, ["a", "b", "c"], "--min", "1M", "--max", "1M", "--seconds", 60, "--timeout", 2)
        runs(fabric, job)
        os.kill(job.ranks[2].pid, signal.SIGSTOP)
        began = time.monotonic()
        for process in job.ranks[:2]:
            process.expect_error(20)
            if "nothing came from rank 2, or was taken by it, within 2 s" not in process.output():
                raise Failure(f"{process.name} says {process.output()[-300:]}")
        return f"after {time.monotonic() - began:.1f} s"


def disagree(logs):
    """One rank asks for something else: all are told who, and what."""
    with Fabric(logs) as fabric:
        job = Job(fabric, [])
        args = ["--min", "1K", "--max", "1K"]
        job.ranks = [job.start(fabric, rank, "abc"[rank], 3, f"own{rank}", *args, *(["--reduce", "max"] if rank == 1 else [])) for rank in range(3)]
        for process in job.ranks:
            process.expect_error(20)
            if "rank 1 has AllReduce of 256 F32, Max, rank 0 has AllReduce of 256 F32, Sum" not in process.output():
                raise Failure(f"{process.name} says {process.output()[-400:]}")


def twice(logs):
    """A rank that is there twice is refused, and the job goes on without the second."""
    with Fabric(logs) as fabric:
        job = Job(fabric, [])
        args = ["--min", "1K", "--max", "1K"]
        zero = job.start(fabric, 0, "a", 2, "zero", *args)
        wait_until(lambda: zero.ended() or job.id_file.exists(), STARTS, "the id")
        # The file goes when two have met, and both are to have the id.
        copy = shutil.copy(job.id_file, fabric.path / "again.id")
        first = job.start(fabric, 1, "b", 2, "first", *args)
        second = job.start(fabric, 1, "b", 2, "second", *args, id_file=copy)
        ended = [process for process in (first, second) if process.wait(SECONDS) != 0]
        zero.expect_success(SECONDS)
        said = [process.output() for process in ended]
        if len(ended) != 1 or not any(what in said[0] for what in ("rank 1 has come already", "is this one there twice?", "is the process that made the id there?")):
            raise Failure(f"{len(ended)} were refused: {said}")


def splitting(fabric, hosts, timeout_ms) -> list:
    """Ranks that split their communicator again and again, until a file is gone."""
    program = compile_c("split", *LIBRARY)
    (fabric.path / "goes").touch()
    line = [fabric.path / "split.id", fabric.path / "goes", timeout_ms]
    return [fabric.start(f"split{rank}", [program, rank, hosts, *line]) for rank in range(len(hosts))]


def rounds(ranks, count):
    """Waits until all have done so many."""
    wait_until(lambda: any(p.ended() for p in ranks) or all(p.output().count("round ") >= count for p in ranks), SECONDS, f"{count} rounds")


def split(logs, seed):
    """Communicators are split while NICs of all hosts die, flap and come back: ranks and sums are right."""
    with Fabric(logs) as fabric:
        ranks = splitting(fabric, "abcda", 20_000)
        rounds(ranks, 1)
        fabric.random_faults(seed, SECONDS, "a", "b", "c", "d")
        # Of whom some paths of new communicators have failed.
        hit = lambda: [p for p in ranks if not p.output().rstrip().endswith(" 0 paths of new communicators failed")]
        wait_until(lambda: any(p.ended() for p in ranks) or hit(), SECONDS, "an effect of the faults")
        rounds(ranks, max(p.output().count("round ") for p in ranks) + 10)
        (fabric.path / "goes").unlink()
        for process in ranks:
            process.expect_success(SECONDS)
            if "splits are right" not in process.output():
                raise Failure(f"{process.name} says {process.output()[-300:]}")
        # "23 splits are right, 4 paths failed"
        said = [process.output().strip().splitlines()[-1] for process in ranks]
        return f"{said[0].split(',')[0]}; paths failed at each rank: {[int(line.split()[-3]) for line in said]}"


def split_loses(logs, sig, words):
    """A rank is killed or stopped while communicators are split: an error at all others, of the old communicator or of a new one. Who has its error
    ends, so that to others it may be that one who is gone."""
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
        return f"after {time.monotonic() - began:.2f} s"


def compiled(*words):
    """Runs a compiler as users do."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Failure(f"{words[0]} fails: {done.stderr[:2000]}")


def c_api(logs):
    """Every function of the header, and what it refuses, between three processes."""
    with Fabric(logs) as fabric:
        process = fabric.start("coll", [compile_c("coll", *LIBRARY)])
        process.expect_success(SECONDS)
        if process.output().count("all is as the header says") != 3:
            raise Failure(f"not all ranks say so: {process.output()}")


def headers(logs):
    """The header is C++, too."""
    source = logs / "header.cc"
    source.write_text("#include <unbroken/coll.h>\nint main() { return ubcollGetLastError()[0]; }\n")
    compiled("c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", logs / "header", source, *LIBRARY)
    subprocess.run([str(logs / "header")], check=True, timeout=SECONDS)


def examples(logs):
    """The example in C, through the death of a NIC, and the one in Rust, which has its own; both are short."""
    long = [f"{e.name}: {n}" for e in EXAMPLES.iterdir() if (n := len(e.read_text().splitlines())) > 100]
    if long:
        raise Failure(f"examples are 100 lines at most: {long}")
    program = TARGET / "tests-c" / "example-ring"
    program.parent.mkdir(parents=True, exist_ok=True)
    compiled("cc", *FLAGS, "-o", program, EXAMPLES / "ring.c", *LIBRARY)
    with Fabric(logs) as fabric:
        ranks = [fabric.start(f"ring{rank}", [program, rank, 3, "abc", 5]) for rank in range(3)]
        before = sent(fabric, "a")
        wait_until(lambda: ranks[0].ended() or sum(since(fabric, "a", before)) > ENOUGH, STARTS, "traffic")
        fabric.fault("nic a/0 dead")
        for process in ranks:
            process.expect_success(SECONDS)
            if "sums are right" not in process.output() or "; 0 paths failed" in process.output():
                raise Failure(f"{process.name} says {process.output()}")
        said = ranks[0].output().strip()
    rust = subprocess.run(["cargo", "run", "-q", "--release", "--example", "overlap"],
                          capture_output=True, text=True, cwd=ROOT, timeout=600)
    if rust.returncode != 0 or "40 sums of 3 ranks are right" not in rust.stdout:
        raise Failure(f"the example in Rust does not end well: {rust.stdout} {rust.stderr[-1000:]}")
    return f"{said}; {rust.stdout.strip()}"


def main():
    suite = Suite("coll", sys.argv[1:])
    suite.case("C API", c_api)
    suite.case("the header in C++", headers)
    suite.case("examples", examples)
    for op in ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all", "send-recv", "barrier"):
        suite.case(f"{op}, three hosts", healthy, op, ["a", "b", "c"])
    suite.case("all-reduce, two ranks on each of two hosts", healthy, "all-reduce", ["a", "a", "b", "b"])
    suite.case("all-reduce, bf16, over logical queue pairs", healthy, "all-reduce", ["a", "b"], "--logical", "--type", "bf16")
    plain = ["--device", "plain"]
    for fault, left, verdict, down in (
        ("nic a/0 dead", [1, 2, 3], "host 0 NIC 0 is dead or its port is down", ["0/0"]),
        ("nic a/1 down", [0, 2, 3], "host 0 NIC 1 is dead or its port is down", ["0/1"]),
        ("cable a/2 cut", [0, 1, 3], "the cable of host 0 NIC 2 is cut", ["0/2"]),
        ("switch rail3 down", [0, 1, 2], "the switch of rail 3 is down", ["0/3", "1/3", "2/3"]),
    ):
        suite.case(f"all-reduce, {fault}", broken, "all-reduce", fault, left, (verdict, down), [])
    suite.case("all-reduce on plain devices, nic a/0 dead", broken, "all-reduce", "nic a/0 dead", [1, 2, 3], None, plain)
    suite.case("all-reduce over logical queue pairs, nic a/0 dead", broken, "all-reduce", "nic a/0 dead", [1, 2, 3], None, [], "--logical")
    suite.case("all-gather, nic a/3 dead", broken, "all-gather", "nic a/3 dead", [0, 1, 2], None, [])
    suite.case("reduce-scatter, cable a/0 cut", broken, "reduce-scatter", "cable a/0 cut", [1, 2, 3], None, [])
    for host in "ac":
        suite.case(f"a NIC of host {host} is dead at first", dead_at_first, host)
    suite.case("the plan is kept, nic a/0 dead", unbalanced)
    suite.case("a work request fails", queue_pair_error)
    suite.case("NICs die one after the other", one_after_the_other)
    for seed in range(3):
        suite.case(f"random faults, seed {seed}", flapping, seed)
    suite.case("a cable flaps", troubled, "flap cable a/0 down=400ms up=300ms")
    suite.case("packets are damaged", troubled, "corrupt a/0 1%", "corrupt rail1 1%")
    suite.case("no NIC is left", none_left)
    suite.case("a process of three is killed", dies, ["a", "b", "c"], 1)
    suite.case("a process of five is killed, two of which share a host", dies, ["a", "a", "b", "c", "d"], 4)
    suite.case("a process of three is stopped", stopped)
    for seed in range(2):
        suite.case(f"communicators are split under random faults, seed {seed}", split, seed)
    suite.case("a process is killed while communicators are split", split_loses, signal.SIGKILL, ["is gone"])
    suite.case("a process is stopped while communicators are split", split_loses, signal.SIGSTOP, ["stands still", "is gone"])
    suite.case("ranks disagree", disagree)
    suite.case("a rank is there twice", twice)
    sys.exit(suite.finish())


if __name__ == "__main__":
    main()
