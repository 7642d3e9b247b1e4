#!/usr/bin/env python3
"""Unmodified perftest programs outlive every fault of a NIC, a cable or a switch.

Each case runs a program for some seconds between two hosts of a fabric of its own and sets a fault in mid-stream. It passes if
both ends exit with 0 *and*, from 200 ms after the fault to the end, the counters of the backup NICs at both ends show traffic like
that before the fault (a perftest with -D ends with 0 even when nothing moves).

The interruption is the longest interval between packets with data of the program at the receiver. Machines are noisy, so a single
case is held to wide bars, and the medians over all cases of a kind to those that are promised: 20 ms where the NIC tells of the
failure, 150 ms where only silence does, and half of the rate before.
"""

import argparse
import statistics
import sys
from itertools import product

from lib.fabric import Fabric
from lib.pairs import covering
from lib.process import Died, Failure
from lib.suite import Suite
from lib.traffic import TYPICAL_SHARE, survive

TOOLS = ["ib_write_bw", "ib_send_bw", "ib_read_bw"]
TOLD, SILENT = "failures of which the NIC tells", "silent failures"
FAULTS = {"nic dead": TOLD, "nic down": TOLD, "cable cut": SILENT, "switch down": SILENT}
ENDS = ["a", "b"]
SIZES = [65536, 1 << 20]
QPS = [1, 8]
WAYS = ["one-way", "-b"]
# The median over the cases of a kind, and each single one. A failure of which the NIC tells is noticed at once: before a timeout
# with all its retries (120 ms) could have noticed it.
TYPICAL_GAP_MS = {TOLD: 20, SILENT: 200}
GAP_MS = {TOLD: 100, SILENT: 400}
# Fewer cases of a kind have no median worth the name.
LEAST_CASES = 5
SECONDS = 3


# What lived, also where its gap was too long: the medians are over all of them.
SEEN = []


class Case:
    """A program, a fault, and the shape of the stream."""

    def __init__(self, tool, fault, end, size, qps, way, options=(), settings=(), weather=()):
        self.tool, self.kind, self.end, self.size, self.qps, self.way = tool, FAULTS[fault], end, size, qps, way
        self.options, self.settings, self.weather = options, settings, weather
        place, state = fault.split()
        self.fault = "switch rail0 down" if place == "switch" else f"{place} {end}/0 {state}"
        shown = "64K" if size == 65536 else "1M"
        self.name = " ".join([f"{tool} {place}-{state} at {end}, {shown}, {qps} QP, {way}", *options, *settings, *(f"({w})" for w in weather)])

    def run(self, logs, failover=True):
        """Runs it; fails where the stream does not live on."""
        args = ["-F", "-s", self.size, "-q", self.qps] + (["-b"] if self.way == "-b" else []) + list(self.options)

        with Fabric(logs, *self.settings) as fabric:
            for fault in self.weather:
                fabric.fault(fault)
            result = survive(fabric, self.tool, args, SECONDS, self.fault, self.way == "-b", failover)
        result.kind = self.kind
        SEEN.append(result)
        if result.gap_ms > GAP_MS[self.kind]:
            raise Failure(f"the gap is longer than {GAP_MS[self.kind]} ms: {result.note}")
        return result


# Receives that all QPs share: the sender's NIC dies, the receiver's, and both ends have such a queue.
SHARED = [
    Case("ib_send_bw", fault, end, 65536, 8, way, ["--use-srq"])
    for fault, end, way in [("nic dead", "a", "one-way"), ("nic dead", "b", "one-way"), ("nic dead", "b", "-b"), ("cable cut", "b", "-b")]
]
# Peers that know each other by LID.
INFINIBAND = [
    Case("ib_write_bw", "nic dead", "a", 65536, 1, "one-way", settings=["--link-layer", "infiniband"]),
    Case("ib_send_bw", "cable cut", "b", 65536, 8, "-b", settings=["--link-layer", "infiniband"]),
]
# Devices with plain verbs: their QPs flush, their keys and queues are their own.
PLAIN = [
    Case(tool, fault, end, 65536, qps, way, ["-x", "3"], ["--device", "plain"])
    for tool, fault, end, qps, way in [
        ("ib_write_bw", "nic dead", "a", 1, "one-way"),
        ("ib_send_bw", "nic dead", "b", 8, "-b"),
        ("ib_read_bw", "nic down", "a", 1, "one-way"),
        ("ib_write_bw", "cable cut", "a", 8, "one-way"),
        ("ib_send_bw", "cable cut", "b", 1, "one-way"),
        ("ib_read_bw", "switch down", "a", 8, "one-way"),
    ]
]
# Packets are lost and overtake each other while it happens.
LOSSY = [Case("ib_write_bw", "nic dead", "a", 65536, 1, "one-way", weather=["loss a/0 1%", "reorder a/0 1%"])]


def must_not_survive(logs):
    """The mutant: without failover the same assertions must fail, else they prove nothing."""
    try:
        Case("ib_write_bw", "nic dead", "a", 65536, 1, "one-way").run(logs, failover=False)
    except Died as death:
        return f"({death})"
    raise Failure("the run without failover passed the assertions of survival")


def quiet(logs):
    """Without a fault nothing switches."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-q", 8, "-b", "-D", 2])
        client.expect_success(30)
        server.expect_success(10)
        events = [e for e in fabric.events() if e["event"] not in ("port-active",)]
        if events:
            raise Failure(f"{len(events)} events without a fault, as {events[0]}")
        return "no event"


def typical(_logs, kind: str, results: list):
    """The medians over the cases of a kind, beside what is promised."""
    gap_ms, share = statistics.median(r.gap_ms for r in results), statistics.median(r.share for r in results)
    figures = [f"gap {gap_ms:.1f} ms of {len(results)}, {share:.0%} of the rate"]
    for what in ("detect_us", "switch_us"):
        values = [getattr(r, what) for r in results if getattr(r, what) is not None]
        figures += [f"{what.split('_')[0]} {statistics.median(values):.0f} us"] if values else []
    if gap_ms > TYPICAL_GAP_MS[kind]:
        raise Failure(f"the median gap is longer than {TYPICAL_GAP_MS[kind]} ms: {', '.join(figures)}")
    if share < TYPICAL_SHARE:
        raise Failure(f"the backups carry less than {TYPICAL_SHARE:.0%} in the median: {', '.join(figures)}")
    return ", ".join(figures)


def main() -> int:
    """Runs the covering set, or what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the whole matrix (196 cases, about 15 minutes)")
    parser.add_argument(
        "--only",
        metavar="WORDS",
        action="append",
        help="the case of that name, or those of the whole matrix whose names have all these words, as in --only 'write_bw dead 64K'; may be given again",
    )
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="each case N times")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args()
    dimensions = [TOOLS, FAULTS, ENDS, SIZES, QPS, WAYS]
    whole = options.all or options.only
    cases = [Case(*values) for values in (product(*dimensions) if whole else covering(dimensions))] + SHARED + INFINIBAND + PLAIN + LOSSY
    if options.only:
        def named(words):
            return [c for c in cases if c.name == words] or [c for c in cases if all(w in c.name for w in words.split())]

        chosen = [named(words) for words in options.only]
        for words, found in zip(options.only, chosen):
            if not found:
                parser.error(f"no case has all the words '{words}'; --all --list shows them")
        cases = [c for c in cases if any(c in found for found in chosen)]
    if options.list:
        print("\n".join(c.name for c in cases))
        return 0
    suite = Suite("repeat" if options.repeat > 1 else "survival")
    if not options.only:
        suite.case("no fault, no switch", quiet)
        suite.case("no failover, no survival", must_not_survive)
    for case in cases:
        for turn in range(options.repeat):
            name = case.name if options.repeat == 1 else f"{case.name} #{turn + 1}"
            suite.case(name, case.run)
    for kind in (TOLD, SILENT):
        of_kind = [r for r in SEEN if r.kind == kind]
        if len(of_kind) >= LEAST_CASES:
            suite.case(f"the medians of {kind}", typical, kind, of_kind)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
