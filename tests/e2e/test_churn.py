"""Connections made and destroyed without end, with all operations: no leak, no stuck QP, no wrong
byte.

tests/c/churn.c runs on hosts a and b with several threads each. A third process has its own
connections to b and is killed and started again all the time. There are three runs: without
failover and faults; without failover, over paths that lose, delay, damage and reorder packets; with
failover and faults of all kinds, at once, repeated and by random schedules. The descriptors,
threads, mappings and memory of a and b may not grow, in the end no QP is left, and all operations
have been done and checked: one that never was is a failure.
"""

import json
import os
import random
import re
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from lib import options
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

# Of each run.
SECONDS = 600 if options.LONG else 20

THREADS = 3
# What a switch may take, and the round around it.
END_SECONDS = 150
SAMPLE_SECONDS = 0.5
# Samples before this share of the run are of caches that fill.
WARM_UP = 0.25
# Growth of the median from the first to the last quarter of the samples that is none: rounds differ
# in what they have open.
SLACK = {"descriptors": 8, "threads": 1, "mappings": 48, "rss_kb": 6144}
# Of a NIC and its rail, for a second or less; with what a schedule may have besides. In turns with
# random schedules.
BREAKDOWNS = [
    ("nic {nic} dead",),
    ("nic {nic} down",),
    ("cable {nic} cut",),
    ("switch rail{rail} down",),
    ("spine down",),
    ("nic {nic} dead", "--for", "60ms", "--every", "250ms"),
    ("cable {nic} cut", "--at", "50ms", "--for", "150ms", "--every", "400ms"),
    ("flap {nic} down=20ms up=60ms",),
    ("flap cable {nic} down=150ms up=200ms",),
    ("flap rail{rail} down=5ms up=50ms", "--for", "700ms"),
    ("wqe-error {nic}",),
    ("wqe-error {nic}", "--every", "30ms"),
]
# What RC gets over by itself.
IMPAIRMENTS = [
    ("loss {nic} 0.5%",),
    ("loss cable {nic} tx 2%",),
    ("burst-loss rail{rail} 1% burst=8",),
    ("corrupt {nic} 1%",),
    ("duplicate {nic} 2%",),
    ("reorder {nic} 1%",),
    ("rate {nic} 1Gbit",),
    ("delay rail{rail} 1ms",),
    ("jitter {nic} rx 1ms",),
]
FAULT_SECONDS = (0.2, 1.2)
# One of so many is a random schedule, which is longer.
RANDOM_FAULTS = 8
RANDOM_SECONDS = 4
# What QPs with atomics in flight or with windows may have; with the last, those that failed while
# nothing was outstanding.
ORIGINAL_ERRORS = {
    "transport retry counter exceeded",
    "local QP operation error",
    "fatal error",
    "Work Request Flushed Error",
}
KILL_SECONDS = (0.3, 2.5)
# What may be left of the dead: so many pages, which are kept for readers, and the last ones, which
# are not yet removed; no sockets.
LEFT_FILES = {"shm/proc": 64 + 4, "proc": 0}


def sample(pid: int) -> dict:
    """What a process has of the machine."""
    proc = Path(f"/proc/{pid}")
    status = (proc / "status").read_text()

    def field(name):
        found = re.search(rf"{name}:\s+(\d+)", status)
        # One that has ended, and is not waited for yet, has no memory.
        if found is None:
            raise Failure(f"the process {pid} has ended")
        return int(found[1])

    mappings = len((proc / "maps").read_text().splitlines())
    return {
        "descriptors": len(os.listdir(proc / "fd")),
        "threads": field("Threads"),
        "mappings": mappings,
        "rss_kb": field("RssAnon"),
    }


def grown(samples: list) -> dict:
    """By how much the medians of the last quarter exceed those of the first, after the warm-up."""
    samples = samples[int(len(samples) * WARM_UP) :]
    quarter = max(1, len(samples) // 4)
    first, last = samples[:quarter], samples[-quarter:]
    return {
        what: statistics.median(s[what] for s in last) - statistics.median(s[what] for s in first)
        for what in SLACK
    }


def report(process) -> dict | None:
    """What a program said at its end, if it has."""
    for line in reversed(process.output().splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return None


class Churn:
    """The programs of a run, the victim, the faults, and what is seen of them."""

    def __init__(self, fabric, seconds, seed, faults):
        self.fabric, self.failover, self.random = fabric, faults == "faults", random.Random(seed)
        self.faults = {"none": [], "impaired": IMPAIRMENTS, "faults": BREAKDOWNS + IMPAIRMENTS}[
            faults
        ]
        self.program = compile_c("churn", "-libverbs", "-lpthread")
        self.options = [] if faults == "none" else [f"--{faults}"]
        self.port = free_port()
        self.server = fabric.run(
            "b",
            [self.program, "--listen", self.port, *self.options],
            "b-churn",
            failover=self.failover,
        )
        wait_until(
            lambda: self.server.ended() or listens(self.server.pid, self.port), 20, "churn listens"
        )
        self.client = self.connect("a-churn", THREADS, seconds, seed)
        self.seconds, self.seed = seconds, seed
        self.victim, self.kill_at, self.victims = None, 0, 0
        self.fault, self.fault_until, self.faults_set = None, 0, Counter()
        self.samples = {self.client: [], self.server: []}

    def connect(self, name, threads, seconds, seed):
        """A process on host a with connections to b."""
        args = [self.program, "--connect", f"127.0.0.1:{self.port}"]
        args += ["--threads", threads, "--seconds", seconds, "--seed", seed]
        return self.fabric.run("a", args + self.options, name, failover=self.failover)

    def check(self):
        """Fails if a program has ended that must not have."""
        for process in (self.client, self.server):
            if process.ended():
                raise Failure(f"{process.name} ended with {process.popen.returncode}")
        if self.victim and self.victim.ended() and not self.victim_may_fail():
            raise Failure(
                f"the victim ended by itself with {self.victim.popen.returncode}: "
                f"{self.victim.output()[-300:]}"
            )

    def victim_may_fail(self):
        """A process that starts while a NIC is dead cannot open it."""
        return self.failover and "cannot open device" in self.victim.output()

    def step(self):
        """Kills and starts the victim, sets and clears faults, as their times come."""
        now = time.monotonic()
        if now >= self.kill_at:
            if self.victim:
                self.victim.kill()
                self.fabric.processes.remove(self.victim)
            self.victims += 1
            self.victim = self.connect(
                "a-victim", 1, self.seconds + 60, self.seed + 1000 * self.victims
            )
            self.kill_at = now + self.random.uniform(*KILL_SECONDS)
        if self.faults and now >= self.fault_until:
            if self.fault:
                self.fabric.clear()
                self.fault, self.fault_until = None, now + self.random.uniform(0.1, 0.8)
            else:
                rail = self.random.randrange(4)
                nic = f"{self.random.choice('ab')}/{rail}"
                if self.failover and self.random.randrange(RANDOM_FAULTS) == 0:
                    self.fault, schedule, lasts = "random", [], RANDOM_SECONDS
                    self.fabric.random_faults(self.random.randrange(1 << 32), lasts, "a", "b")
                else:
                    fault, *schedule = self.random.choice(self.faults)
                    self.fault, lasts = fault, self.random.uniform(*FAULT_SECONDS)
                    self.fabric.fault(fault.format(nic=nic, rail=rail), *schedule)
                self.faults_set[
                    " ".join([self.fault.split()[0], *(w for w in schedule if w.startswith("--"))])
                ] += 1
                self.fault_until = now + lasts

    def run(self):
        """Until the client says that its time is up."""
        until = time.monotonic() + self.seconds + END_SECONDS
        next_sample = 0
        while report(self.client) is None:
            if time.monotonic() > until:
                raise Failure(f"the rounds do not end: {END_SECONDS} s over their time")
            self.check()
            self.step()
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + SAMPLE_SECONDS
                for process, samples in self.samples.items():
                    samples.append(sample(process.pid))
            time.sleep(0.05)

    def end(self):
        """The victim first, then both programs; what they leave behind."""
        if self.fault:
            self.fabric.clear()
        if self.victim:
            self.victim.kill()
        pids = {self.client.pid, self.server.pid}

        def left():
            self.check_ends()
            return [qp for qp in self.fabric.status()["qps"] if qp["pid"] in pids]

        try:
            wait_until(lambda: not left(), END_SECONDS, "the end of all QPs")
        except Failure as failure:
            raise Failure(f"{failure}: {left()}") from None
        for process in (self.client, self.server):
            process.popen.terminate()
            process.expect_success(END_SECONDS)

    def check_ends(self):
        """Fails if a program has ended before it was told to."""
        for process in (self.client, self.server):
            if process.ended():
                raise Failure(f"{process.name} ended with {process.popen.returncode}")


def left_behind(fabric, folder: str) -> list:
    """Files (pages, sockets) of processes that are no more."""
    if not (fabric.path / folder).is_dir():
        raise Failure(f"the runtime folder has no '{folder}': this test looks in the wrong place")
    pids = [(file.name.split("-")[0], file.name) for file in (fabric.path / folder).iterdir()]
    return [
        f"{folder}/{name}"
        for pid, name in pids
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists())
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("faults", ["none", "impaired", "faults"])
def test_churn(logs, note, faults):
    """One run."""
    with Fabric(logs) as fabric:
        fabric.status()
        run = Churn(fabric, SECONDS, options.SEED, faults)
        run.run()
        run.end()
        a, b = report(run.client), report(run.server)
        done = {what: n + b["counts"][what] for what, n in a["counts"].items()}
        errors = Counter(a["errors"]) + Counter(b["errors"])
        growth = {process.name: grown(samples) for process, samples in run.samples.items()}
        shown = (
            f"seed {options.SEED}: {a['rounds']} + {b['rounds'] - a['rounds']} rounds, "
            f"{a['operations'] + b['operations']} operations, "
            f"{(a['bytes'] + b['bytes']) / 1e9:.2f} GB, {run.victims} peers killed, "
            f"{run.faults_set.total()} faults, "
            f"{len(fabric.events('switch'))} switches, {a['abandoned']} rounds given up, "
            f"{a['lost'] + b['lost']} UC and UD messages lost, "
            f"RC failed {a['rc_failed'] + b['rc_failed']}, with atomics "
            f"{a['atomics_failed'] + b['atomics_failed']}, "
            f"with windows {a['keys_failed'] + b['keys_failed']}; errors {dict(errors)}; growth "
            f"{growth}; done {done}; faults {dict(run.faults_set)}"
        )
        never = [what for what, n in done.items() if n == 0 and what != "kept_mr"]
        if never:
            raise Failure(f"never done: {', '.join(never)}; {shown}")
        too_much = [
            f"{name}: {what} {n:+g}"
            for name, by in growth.items()
            for what, n in by.items()
            if n > SLACK[what]
        ]
        if too_much:
            raise Failure(f"leaks: {'; '.join(too_much)}; {shown}")
        # Both ends have known each other from the beginning, as a victim and its peer have not.
        if a["rc_failed"]:
            raise Failure(f"{a['rc_failed']} protected RC QPs failed: {shown}")
        if set(errors) - ORIGINAL_ERRORS:
            raise Failure(
                f"QPs with atomics or windows have other errors than those of their paths: {shown}"
            )
        # Who asks for the status removes the sockets of the dead; the programs themselves ended
        # just now.
        fabric.status()
        for folder, most in LEFT_FILES.items():
            stale = left_behind(fabric, folder)
            if len(stale) > most:
                raise Failure(
                    f"{len(stale)} files of ended processes are left, {most} may be: {stale[:6]}; "
                    f"{shown}"
                )
        note(shown)
