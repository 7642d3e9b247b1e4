#!/usr/bin/env python3
"""Connections made and destroyed without end, with all operations: no leak, no stuck QP, no wrong byte.

tests/c/churn.c runs on hosts a and b with several threads each. A third process has its own connections to b and is killed and
started again all the time. One run has failover and faults (NICs die and come back, cables are cut, packets are lost and overtake
each other), one has neither. The descriptors, threads, mappings and memory of a and b may not grow, and in the end no QP is left.
`--seconds N` says how long each run takes (30).
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from pathlib import Path

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.suite import Suite

THREADS = 3
# What a switch may take, and the round around it.
END_SECONDS = 150
SAMPLE_SECONDS = 0.5
# Samples before this share of the run are of caches that fill.
WARM_UP = 0.25
# Growth of the median from the first to the last quarter of the samples that is none: rounds differ in what they have open.
SLACK = {"descriptors": 8, "threads": 1, "mappings": 48, "rss_kb": 6144}
FAULTS = ["nic {} dead", "nic {} down", "cable {} cut", "loss {} 0.5%", "reorder {} 1%", "switch rail{rail} down"]
KILL_SECONDS = (0.3, 2.5)
# Pages of the dead are kept for readers, this many; and the last ones are not yet removed.
LEFT_FILES = 64 + 4


def sample(pid: int) -> dict:
    """What a process has of the machine."""
    proc = Path(f"/proc/{pid}")
    status = (proc / "status").read_text()

    def field(name):
        return int(re.search(rf"{name}:\s+(\d+)", status)[1])

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
        what: statistics.median(s[what] for s in last) - statistics.median(s[what] for s in first) for what in SLACK
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
        self.fabric, self.faults, self.random = fabric, faults, random.Random(seed)
        self.program = compile_c("churn", "-libverbs", "-lpthread")
        self.options = ["--faults"] if faults else []
        self.port = free_port()
        self.server = fabric.run("b", [self.program, "--listen", self.port, *self.options], "b-churn", failover=faults)
        wait_until(lambda: self.server.ended() or listens(self.server.pid, self.port), 20, "churn listens")
        self.client = self.connect("a-churn", THREADS, seconds, seed)
        self.seconds, self.seed = seconds, seed
        self.victim, self.kill_at, self.victims = None, 0, 0
        self.fault, self.fault_until, self.fault_count = None, 0, 0
        self.samples = {self.client: [], self.server: []}

    def connect(self, name, threads, seconds, seed):
        """A process on host a with connections to b."""
        args = [self.program, "--connect", f"127.0.0.1:{self.port}", "--threads", threads, "--seconds", seconds, "--seed", seed]
        return self.fabric.run("a", args + self.options, name, failover=self.faults)

    def check(self):
        """Fails if a program has ended that must not have."""
        for process in (self.client, self.server):
            if process.ended():
                raise Failure(f"{process.name} ended with {process.popen.returncode}")
        if self.victim and self.victim.ended() and not self.victim_may_fail():
            raise Failure(f"the victim ended by itself with {self.victim.popen.returncode}: {self.victim.output()[-300:]}")

    def victim_may_fail(self):
        """A process that starts while a NIC is dead cannot open it."""
        return self.faults and "cannot open device" in self.victim.output()

    def step(self):
        """Kills and starts the victim, sets and clears faults, as their times come."""
        now = time.monotonic()
        if now >= self.kill_at:
            if self.victim:
                self.victim.kill()
                self.fabric.processes.remove(self.victim)
            self.victims += 1
            self.victim = self.connect("a-victim", 1, self.seconds + 60, self.seed + 1000 * self.victims)
            self.kill_at = now + self.random.uniform(*KILL_SECONDS)
        if self.faults and now >= self.fault_until:
            if self.fault:
                self.fabric.clear()
                self.fault, self.fault_until = None, now + self.random.uniform(0.1, 0.8)
            else:
                rail = self.random.randrange(4)
                nic = f"{self.random.choice('ab')}/{rail}"
                self.fault = self.random.choice(FAULTS).format(nic, rail=rail)
                self.fabric.fault(self.fault)
                self.fault_count += 1
                self.fault_until = now + self.random.uniform(0.2, 1.2)

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


def left_behind(fabric) -> list:
    """Pages and sockets of processes that are no more."""
    stale = []
    for folder in ("shm/proc", "sockets"):
        for file in (fabric.path / folder).glob("*"):
            pid = file.name.split(".")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                stale.append(f"{folder}/{file.name}")
    return stale


def churn(logs, seconds, seed, faults):
    """One run."""
    with Fabric(logs) as fabric:
        fabric.status()
        run = Churn(fabric, seconds, seed, faults)
        run.run()
        run.end()
        a, b = report(run.client), report(run.server)
        growth = {process.name: grown(samples) for process, samples in run.samples.items()}
        note = (
            f"seed {seed}: {a['rounds']} + {b['rounds'] - a['rounds']} rounds, {a['operations'] + b['operations']} operations, "
            f"{(a['bytes'] + b['bytes']) / 1e9:.2f} GB, {run.victims} peers killed, {run.fault_count} faults, "
            f"{len(fabric.events('switch'))} switches, {a['abandoned']} rounds given up, {a['lost'] + b['lost']} UC and UD messages lost, "
            f"{a['stale_refused'] + b['stale_refused']} old keys refused, RC failed {a['rc_failed'] + b['rc_failed']}; growth {growth}"
        )
        too_much = [f"{name}: {what} {n:+g}" for name, by in growth.items() for what, n in by.items() if n > SLACK[what]]
        if too_much:
            raise Failure(f"leaks: {'; '.join(too_much)}; {note}")
        # Both ends have known each other from the beginning, as a victim and its peer have not.
        if a["rc_failed"]:
            raise Failure(f"{a['rc_failed']} protected RC QPs failed: {note}")
        stale = left_behind(fabric)
        if len(stale) > LEFT_FILES:
            raise Failure(f"{len(stale)} files of ended processes are left: {stale[:6]}; {note}")
        return note


def main() -> int:
    """Runs both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30, help="of each run (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn")
    parser.add_argument("--only", choices=["faults", "plain"], help="one of the runs")
    options = parser.parse_args()
    suite = Suite("churn")
    if options.only != "faults":
        suite.case("churn without failover and faults", churn, options.seconds, options.seed, False)
    if options.only != "plain":
        suite.case("churn with failover and faults", churn, options.seconds, options.seed, True)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
