#!/usr/bin/env python3
"""Unmodified perftest programs outlive every fault of a NIC, a cable or a switch.

Each case runs a program for some seconds between two hosts of a fabric of its own and sets a fault in mid-stream. It passes if
both ends exit with 0 *and*, from 200 ms after the fault to the end, the counters of the backup NICs at both ends show at least
half of the rate before the fault (a perftest with -D ends with 0 even when nothing moves).

The interruption is the longest interval between packets with data at the receiver. It is printed always; since machines are
noisy, a case fails only where it is ten times the limit (20 ms where the NIC tells of the failure, 150 ms where only silence does).
"""

import argparse
import statistics
import sys
from itertools import product

from lib.fabric import Fabric
from lib.pairs import covering
from lib.process import Died, Failure
from lib.suite import Suite
from lib.traffic import TRIES, survive, with_tries

TOOLS = ["ib_write_bw", "ib_send_bw", "ib_read_bw"]
FAULTS = ["nic dead", "nic down", "cable cut", "switch down"]
ENDS = ["a", "b"]
SIZES = [65536, 1 << 20]
QPS = [1, 8]
WAYS = ["one-way", "-b"]
GAP_LIMIT_MS = {"nic dead": 20, "nic down": 20, "cable cut": 150, "switch down": 150}
TOLERANCE = 10
SECONDS = 3


class Case:
    """A program, a fault, and the shape of the stream."""

    def __init__(self, tool, fault, end, size, qps, way, options=(), settings=(), weather=()):
        self.tool, self.kind, self.end, self.size, self.qps, self.way = tool, fault, end, size, qps, way
        self.options, self.settings, self.weather = options, settings, weather
        place, state = fault.split()
        self.fault = "switch rail0 down" if place == "switch" else f"{place} {end}/0 {state}"
        shown = "64K" if size == 65536 else "1M"
        self.name = " ".join([f"{tool} {place}-{state} at {end}, {shown}, {qps} QP, {way}", *options, *settings, *(f"({w})" for w in weather)])

    def run(self, logs, failover=True):
        """Runs it; fails where the stream does not live on."""
        args = ["-F", "-s", self.size, "-q", self.qps] + (["-b"] if self.way == "-b" else []) + list(self.options)

        def once():
            with Fabric(logs, *self.settings) as fabric:
                for fault in self.weather:
                    fabric.fault(fault)
                return survive(fabric, self.tool, args, SECONDS, self.fault, self.way == "-b", failover)

        result, _ = with_tries(once)
        limit_ms = GAP_LIMIT_MS[self.kind]
        if result.gap_ms is not None and result.gap_ms > TOLERANCE * limit_ms:
            raise Failure(f"the gap is more than {TOLERANCE} times its limit of {limit_ms} ms: {result.note}")
        result.kind = self.kind
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
    """Without a fault nothing switches. (A good path may be suspected where a program waits long for a core, but not always.)"""
    for turn in range(1, TRIES + 1):
        with Fabric(logs) as fabric:
            server, client = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-q", 8, "-b", "-D", 2])
            client.expect_success(30)
            server.expect_success(10)
            events = [e for e in fabric.events() if e["event"] not in ("port-active",)]
        if not events:
            return f"no event at try {turn}"
        print(f"again: {len(events)} events without a fault, as {events[0]}", flush=True)
    raise Failure("each time there were events without a fault")


def summarize(results):
    """Prints the medians for each kind of fault, beside the limits."""
    for kind in FAULTS:
        of_kind = [r for r in results if r.kind == kind]
        if not of_kind:
            continue
        gaps = [r.gap_ms for r in of_kind if r.gap_ms is not None]
        within = sum(g <= GAP_LIMIT_MS[kind] for g in gaps)
        figures = [
            f"{what} {statistics.median(values):.{digits}f} {unit}"
            for what, values, digits, unit in (
                ("gap", gaps, 1, "ms"),
                ("detect", [r.detect_us for r in of_kind if r.detect_us is not None], 0, "us"),
                ("switch", [r.switch_us for r in of_kind if r.switch_us is not None], 0, "us"),
            )
            if values
        ]
        print(f"median of {len(of_kind)} x {kind}: {', '.join(figures)}; {within} of {len(gaps)} gaps within {GAP_LIMIT_MS[kind]} ms")


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
    cases = [Case(*values) for values in (product(*dimensions) if whole else covering(dimensions))] + SHARED + INFINIBAND + LOSSY
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
    results = []
    for case in cases:
        for turn in range(options.repeat):
            name = case.name if options.repeat == 1 else f"{case.name} #{turn + 1}"
            results.append(suite.case(name, case.run))
    summarize([r for r in results if r])
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
