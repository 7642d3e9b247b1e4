#!/usr/bin/env python3
"""Programs that keep the NIC busy, without a fault, on a machine that computes beside them: nothing is suspected.

A NIC is software here and waits for a core like everybody else; a failover that takes such a wait for a failure does harm where
nothing is wrong. So beside endless loops, two for each core, no switch and no other word of a failure may be in the event log, the
programs must end well, and their bytes must have gone through the NICs. The same holds for many busy QPs on an idle machine
(tests/c/storm.c). `--all` has 2,000 QPs that are busy for a minute, more programs, idle machine and busy, and the bandwidth with failover
beside that without.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, describe_exit, wait_until
from lib.suite import Suite
from lib.qperf import LATENCIES as QPERF_LATENCIES, RATES as QPERF_RATES, qperf

LOOPS = 2 * (os.cpu_count() or 2)
SECONDS = 5
MINUTE_SECONDS = 60
END_SECONDS = 60
# A thousand QPs with the queues that perftest takes by default would have a million entries.
SHALLOW = ("-t", 16, "-r", 16)
# A false suspicion ends atomics for good, whatever it is that they wait for, so they are asked more often.
ATOMIC_RUNS = 3
# What a fault-free run has in its event log; everything else is a suspicion, or what came of one.
HARMLESS = {"port-active"}
# perftest -D ends with its last READs under way, and the end that is done first closes. Were it not true, the other end would fail.
PEER_ENDED = "the peer closed its QP, its process has ended"
# Far less than any of the programs carries in its time, and far more than setting up takes.
LEAST_BYTES = 1_000_000
# qperf's ends may spin on memory, and are given a core in turns with the loops: a round can take a second.
LEAST_PACKETS = 2
# Of four runs each, with, without, without, with; the median of the ratios.
TURNS = 3
# About 1 where nothing else runs; other work on the machine moves single runs by more than a tenth. `make bench` has the figure.
LEAST_RATIO = 0.5


class Loops:
    """A context: endless loops beside the programs under test."""

    def __init__(self, count: int):
        self.count, self.running = count, []

    def __enter__(self):
        self.running = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(self.count)]
        return self

    def __exit__(self, *_):
        if any(loop.poll() is not None for loop in self.running):
            raise Failure("a loop ended by itself: there was no load")
        for loop in self.running:
            loop.kill()
            loop.wait()


def check_calm(fabric: Fabric) -> None:
    """Fails where a path was suspected, or a QP moved or gave up."""
    events = [e for e in fabric.events() if e["event"] not in HARMLESS and not e.get("why", "").startswith(PEER_ENDED)]
    if events:
        switches = [e for e in events if e["event"] == "switch"]
        reasons = sorted({e["reason"] for e in switches})
        first = [{k: v for k, v in e.items() if v is not None} for e in events[:2]]
        raise Failure(f"{len(switches)} switches {reasons}, {len(events)} events without a fault, the first of them {first}")


def carried(fabric: Fabric) -> str:
    """The bytes that came over rail 0, headers included (atomics carry no payload); fails if they are too few."""
    nics = fabric.nics()
    came = sum(nics[f"{host}/0"]["rx_bytes"] for host in "ab")
    if came < LEAST_BYTES:
        raise Failure(f"{came} bytes came over rail 0, {LEAST_BYTES} at least are right")
    return f"{came / 1e6:.0f} MB, {sum(nics[f'{host}/0']['retransmits'] for host in 'ab')} packets sent again"


def judge(fabric: Fabric, *processes, seconds: int = SECONDS) -> str:
    """Waits for the programs. What the event log says of an early end is the better reason, so it comes before their statuses."""
    statuses = [(p.name, p.wait(seconds + END_SECONDS)) for p in processes]
    check_calm(fabric)
    for name, status in statuses:
        if status != 0:
            raise Failure(f"{name} {describe_exit(status)}")
    return carried(fabric)


def perftest(logs, loops: int, tool: str, *args):
    """One perftest for some seconds."""
    with Fabric(logs) as fabric, Loops(loops):
        server, client = fabric.pair(tool, ["-F", "-D", SECONDS, *args])
        return judge(fabric, client, server)


def storm(logs, loops: int, qps: int, *args):
    """tests/c/storm.c: many QPs, all busy."""
    return storm_for(SECONDS, logs, loops, qps, *args)


def storm_for(seconds: int, logs, loops: int, qps: int, *args):
    """The same for another time than all."""
    program = compile_c("storm", "-libverbs")
    with Fabric(logs) as fabric, Loops(loops):
        port = free_port()
        options = ["-q", qps, "-m", 8, "-s", 512, "-t", seconds, *args]
        server = fabric.run("b", [program, "--listen", port, *options], "b-storm")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "storm listens")
        client = fabric.run("a", [program, "--connect", f"127.0.0.1:{port}", *options], "a-storm")
        figures = judge(fabric, client, server, seconds=seconds)
        result = json.loads(client.output().splitlines()[-1])
        return f"{figures}, no work request took longer than {result['worst_ms']:.0f} ms"


def bandwidth(fabric: Fabric, failover: bool, tool: str, *args) -> float:
    """What perftest says it carried, in MiB/s."""
    server, client = fabric.pair(tool, ["-F", "-D", SECONDS, *args], failover)
    judge(fabric, client, server)
    # The figures stand in one line: bytes, iterations, peak, average, messages.
    figures = [words for words in map(str.split, client.output().splitlines()) if len(words) == 5 and words[0].isdigit()]
    return float(figures[-1][3])


def in_turns(logs, tool: str, *args):
    """With and without failover in turns: what it takes of the bandwidth."""
    ratios = []
    for turn in range(TURNS):
        order = (True, False, False, True) if turn % 2 == 0 else (False, True, True, False)
        rates = {True: [], False: []}
        for failover in order:
            with Fabric(logs) as fabric:
                rates[failover].append(bandwidth(fabric, failover, tool, *args))
        ratios.append(sum(rates[True]) / sum(rates[False]))
    note = f"with failover {statistics.median(ratios):.2f} of the bandwidth without: {', '.join(f'{r:.2f}' for r in ratios)}"
    if statistics.median(ratios) < LEAST_RATIO:
        raise Failure(note)
    return note


def everything(suite: Suite):
    """What takes long: the largest, with nothing beside it and beside loops."""
    for tool, *args in [("ib_read_bw", "-q", 500, "-o", 1), ("ib_send_bw", "-q", 500, *SHALLOW, "-s", 8192), ("ib_send_bw", "-q", 1000, *SHALLOW)]:
        suite.case(f"{tool} {' '.join(map(str, args))}, with and without failover in turns", in_turns, tool, *args)
    for where, loops in (("idle", 0), ("busy", LOOPS)):
        suite.case(f"2,000 busy QPs for a minute, {where} machine", lambda l, n=loops: storm_for(MINUTE_SECONDS, l, n, 2000))
        suite.case(f"ib_read_bw -q 500 -o 1, {where} machine", perftest, loops, "ib_read_bw", "-q", 500, "-o", 1)
        suite.case(f"ib_send_bw -q 500, {where} machine", perftest, loops, "ib_send_bw", "-q", 500, *SHALLOW, "-s", 8192)
        suite.case(f"ib_send_bw -q 1000, {where} machine", perftest, loops, "ib_send_bw", "-q", 1000, *SHALLOW)
        suite.case(f"ib_atomic_bw -q 64, {where} machine", perftest, loops, "ib_atomic_bw", "-q", 64)
        for test, poll in itertools.product([*QPERF_LATENCIES, *QPERF_RATES], (0, 1)):
            name = f"qperf {test}, {'polling' if poll else 'with events'}, {where} machine"
            suite.case(name, lambda l, t=test, p=poll, n=loops: beside(n, qperf, l, t, p, SECONDS, LEAST_PACKETS))


def beside(loops: int, run, *args):
    """Runs a case of another suite beside endless loops."""
    with Loops(loops):
        return run(*args)


def main() -> int:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also what takes long (17 minutes)")
    parser.add_argument("words", nargs="*", help="only cases whose names have all these words")
    options = parser.parse_args()
    suite = Suite("load", options.words)
    if options.all:
        everything(suite)
    suite.case("500 busy QPs, idle machine", storm, 0, 500)
    suite.case("1,000 busy QPs, idle machine", storm, 0, 1000)
    suite.case("ib_send_bw -q 64, busy machine", perftest, LOOPS, "ib_send_bw", "-q", 64)
    for turn in range(ATOMIC_RUNS):
        suite.case(f"ib_atomic_bw -q 16, busy machine #{turn + 1}", perftest, LOOPS, "ib_atomic_bw", "-q", 16)
    suite.case("ib_read_bw -q 64 -o 1, busy machine", perftest, LOOPS, "ib_read_bw", "-q", 64, "-o", 1)
    suite.case("500 busy QPs, busy machine", storm, LOOPS, 500)
    suite.case("500 QPs that WRITE both ways, busy machine", storm, LOOPS, 500, "-w", "-b")
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
