"""How ranks of collective jobs meet: among unknown sources, late, on hosts without common memory,
with few descriptors; and what communicators cost."""

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import threading
import time

import pytest

from lib import options
from lib.cc import compile_c
from lib.collective import (
    LIBRARY,
    SECONDS,
    STARTS,
    Job,
    communicators,
    rounds,
    splitting,
)
from lib.fabric import UNBROKEN, Fabric
from lib.process import Failure, Skip, ticks, wait_until


class UnknownSources:
    """Connections to a rank that say nothing, or a byte now and then, which are made again when
    they are closed. A context."""

    def __init__(self, address, count):
        host, port = address.rsplit(":", 1)
        self.to, self.count, self.received = (host, int(port)), count, b""
        self.all, self.goes = [], True
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while self.goes:
            for connection in list(self.all):
                try:
                    self.received = max(
                        self.received, connection.recv(4096, socket.MSG_DONTWAIT), key=len
                    )
                    connection.send(b"?", socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError:
                    self.all.remove(connection)
                    connection.close()
            with contextlib.suppress(OSError):
                while len(self.all) < self.count:
                    self.all.append(socket.create_connection(self.to, timeout=1))
            time.sleep(0.3)

    def __enter__(self):
        self.thread.start()
        wait_until(
            lambda: len(self.all) == self.count,
            STARTS,
            f"{self.count} connections of unknown sources",
        )
        return self

    def __exit__(self, *_):
        self.goes = False
        self.thread.join()
        for connection in self.all:
            connection.close()


def address_in(id_file) -> str:
    """Where the ranks of an id meet."""
    wait_until(id_file.exists, STARTS, "the id")
    return id_file.read_bytes().split(b"/")[0].decode()


@pytest.mark.smoke
def test_silent_unknown_sources(logs, note):
    """Unknown sources that hold connections to a rank without a word keep nobody out, and learn
    nothing."""
    count = 300
    with Fabric(logs) as fabric:
        job = Job(fabric, [])
        args = ["--min", "1K", "--max", "1K"]
        job.ranks = [job.start(fabric, 0, "a", 2, "zero", *args)]
        with UnknownSources(address_in(job.id_file), count) as others:
            began = time.monotonic()
            job.ranks.append(job.start(fabric, 1, "b", 2, "one", *args))
            job.succeed()
            took = time.monotonic() - began
            # A greeting: what it is, and a number.
            if len(others.received) > 40:
                raise Failure(f"an unknown source receives {others.received}")
    if took > 20:
        raise Failure(f"unknown sources held up a job for {took:.0f} s")
    note(f"{count} unknown sources, {took:.1f} s")


def test_unknown_sources_at_splits(logs):
    """The same while communicators are split, for which ranks connect again and again."""
    with Fabric(logs) as fabric:
        ranks = splitting(fabric, "abc", 20_000)
        with UnknownSources(address_in(fabric.files / "split.id"), 300):
            rounds(ranks, 3)
            (fabric.files / "goes").unlink()
            for process in ranks:
                process.expect_success(SECONDS)


def test_unknown_sources_take_all_descriptors(logs, note):
    """Where unknown sources take all descriptors of a rank, it does not spin, and its job goes
    on."""
    with Fabric(logs) as fabric:
        job = Job(fabric, [])
        args = ["--min", "1K", "--max", "1K"]
        line = [UNBROKEN, "coll", "bench", "--rank", 0, "--ranks", 2, "--host", "a"]
        line = ["prlimit", "--nofile=100", *line, "--id-file", job.id_file, "--json"]
        job.ranks = [fabric.start("zero", [*line, *args])]
        with UnknownSources(address_in(job.id_file), 200):
            before = ticks(job.ranks[0].pid)
            time.sleep(2)
            spent = ticks(job.ranks[0].pid) - before
            if spent > os.sysconf("SC_CLK_TCK"):
                raise Failure(f"a rank that waits without descriptors takes {spent} ticks in 2 s")
            job.ranks.append(job.start(fabric, 1, "b", 2, "one", *args))
            job.succeed()
    note(f"{spent} ticks in 2 s")


@pytest.mark.smoke
def test_id_is_for_its_user(logs):
    """The file with the job's secret is its user's alone; one that others may read, or that is a
    link, is not believed."""
    with Fabric(logs) as fabric:
        job = Job(fabric, [])
        elsewhere = fabric.files / "elsewhere"
        job.id_file.symlink_to(elsewhere)
        args = ["--min", "1K", "--max", "1K"]
        job.ranks = [job.start(fabric, 0, "a", 2, "zero", *args)]
        wait_until(lambda: not job.id_file.is_symlink() and job.id_file.exists(), STARTS, "the id")
        if elsewhere.exists() or stat.S_IMODE(job.id_file.stat().st_mode) != 0o600:
            raise Failure(
                f"mode {job.id_file.stat().st_mode:o}; written through the link: "
                f"{elsewhere.exists()}"
            )
        copy, link = shutil.copy(job.id_file, fabric.files / "copy.id"), fabric.files / "link.id"
        os.chmod(copy, 0o644)
        link.symlink_to(job.id_file)
        for name, path, words in (("copy", copy, "600 is right"), ("link", link, "is a link")):
            wrong = job.start(fabric, 1, "b", 2, name, *args, id_file=path)
            wrong.expect_error(20)
            if words not in wrong.output():
                raise Failure(f"{name}: {wrong.output()[-300:]}")
        job.ranks.append(job.start(fabric, 1, "b", 2, "one", *args))
        job.succeed()


RANKS_LATE = [pytest.param(0, 3, False, id="too-late")]
if options.LONG:
    RANKS_LATE.append(pytest.param(75, 120, True, id="75s-of-120s", marks=pytest.mark.slow))


@pytest.mark.parametrize("late, given, well", RANKS_LATE)
def test_rank_is_late(logs, late, given, well):
    """Ranks wait for each other for the time that is set, longer than a minute or shorter."""
    with Fabric(logs) as fabric:
        job = Job(fabric, [])
        args = ["--min", "1K", "--max", "1K", "--patience", f"{given}s"]
        zero = job.start(fabric, 0, "a", 2, "zero", *args)
        time.sleep(late)
        if not well:
            zero.expect_error(20)
            if f"rank 1 of 2 has not come within {given} s" not in zero.output():
                raise Failure(f"it says {zero.output()[-300:]}")
            return
        job.ranks = [zero, job.start(fabric, 1, "b", 2, "one", *args)]
        job.succeed()


class Disk(Fabric):
    """Its folder is not in /dev/shm, which programs may have for themselves."""

    root = "/tmp"


@pytest.mark.root
@pytest.mark.parametrize("op", ["all-reduce", "all-to-all"])
def test_ranks_without_common_memory(logs, op):
    """Ranks of one host that have a /dev/shm each go over NICs, beside two that share theirs."""
    if os.geteuid() != 0:
        raise Skip("only root mounts a /dev/shm of its own")
    with Disk(logs) as fabric:
        job = Job(fabric, [])
        args = [
            "--op",
            op,
            "--min",
            "1M",
            "--max",
            "1M",
            "--check-all",
            "--timeout",
            "10s",
            "--json",
        ]
        # What is left there afterwards is of this job alone.
        common = logs / "shm"
        common.mkdir(mode=0o1777)
        within = ["unshare", "--mount", "sh", "-c"]
        own = [*within, 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        shared = [*within, f'mount --bind {common} /dev/shm && exec "$@"', "sh"]
        for rank, prefix in enumerate((own, shared, shared)):
            line = [UNBROKEN, "coll", "bench", "--rank", rank, "--ranks", 3, "--host", "a"]
            line += ["--id-file", job.id_file]
            job.ranks.append(fabric.start(f"rank{rank}", [*prefix, *line, *args]))
        wait_until(
            lambda: any(p.ended() for p in job.ranks) or len(communicators(fabric)) == 3,
            STARTS,
            "three communicators",
        )
        hosts = [s["hosts"] for s in communicators(fabric)]
        job.succeed()
        if any(len(set(h)) != 2 or h[1] != h[2] for h in hosts):
            raise Failure(f"which ranks share memory is taken for {hosts}")
        if left := list(common.iterdir()):
            raise Failure(f"left behind in the shared memory: {left}")


def test_runtime_folder_with_a_long_path(logs):
    """A runtime folder whose path is longer than a socket's name may be."""
    with Fabric(logs) as fabric:
        long = fabric.files / ("long" * 30)
        long.mkdir(mode=0o700)
        env = {"UNBROKEN_RUNTIME": str(long)}
        line = [UNBROKEN, "coll", "bench", "--hosts", "a,b", "--min", "1K", "--max", "1K"]
        line += ["--for", "60s", "--while", fabric.files / "goes"]
        (fabric.files / "goes").touch()
        bench = fabric.start("bench", line, env)

        def shown():
            status = [UNBROKEN, "coll", "status", "--json"]
            env_there = {**fabric.env, **env}
            done = subprocess.run(status, env=env_there, capture_output=True, text=True, timeout=20)
            return json.loads(done.stdout)

        wait_until(lambda: bench.ended() or len(shown()) == 2, STARTS, "two communicators")
        (fabric.files / "goes").unlink()
        bench.expect_success(SECONDS)


@pytest.mark.parametrize(
    "hosts, settings",
    [
        pytest.param("ab", [], id="two-ranks", marks=pytest.mark.smoke),
        pytest.param("abcd", [], id="four-ranks"),
        pytest.param("ab", ["--device", "plain"], id="plain-devices"),
    ],
)
def test_further_communicators(logs, note, hosts, settings):
    """Communicators of a process share its NICs, with the threads that drive them, and its
    listening socket: another costs a fraction of the first."""
    with Fabric(logs, *settings) as fabric:
        ranks = fabric.start("comms", [compile_c("comms", *LIBRARY), hosts, 6])
        ranks.expect_success(SECONDS)
        lines = [list(map(int, line.split())) for line in ranks.output().splitlines()]
    costs = [
        [now - then for now, then in zip(line[1:], before[1:])]
        for before, line in zip(lines, lines[1:7])
    ]
    first, last = costs[0], [max(column) for column in zip(*costs[2:])]
    most_of_each = (8 + 2 * len(hosts), 1, 16_384 * len(hosts) // 2)
    for what, one, more, most in zip(("descriptors", "threads", "KiB"), first, last, most_of_each):
        if more > most or more >= one:
            raise Failure(f"another communicator costs {more} {what}, the first {one}: {lines}")
    note(
        f"the first costs {first[0]} descriptors, {first[1]} threads, {first[2] / 1024:.1f} MiB, "
        f"another {last[0]}, {last[1]}, {last[2] / 1024:.1f}"
    )


def test_too_few_descriptors(logs):
    """A soft limit of descriptors that is in the way is raised; a hard one is named, with what
    raises it."""
    with Fabric(logs) as fabric:
        program = compile_c("comms", *LIBRARY)
        fabric.start("soft", ["prlimit", "--nofile=64:4096", program, "ab", 8]).expect_success(
            SECONDS
        )
        for limit in (20, 30, 40, 52):
            process = fabric.start(
                f"hard{limit}", ["prlimit", f"--nofile={limit}", program, "ab", 8]
            )
            process.expect_error(SECONDS)
            if (
                f"this process may have {limit} descriptors: `ulimit -n` raises that"
                not in process.output()
            ):
                raise Failure(f"with {limit} it says {process.output()[-500:]}")
