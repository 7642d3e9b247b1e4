"""Unmodified perftest programs survive every fault of a NIC, a cable or a switch.

Each case runs a program for some seconds between two hosts of a fabric of its own and sets a fault
in mid-stream. It passes if both ends exit with 0 *and*, from 200 ms after the fault to the end, the
counters of the backup NICs at both ends show traffic like that before the fault (a perftest with -D
ends with 0 even when nothing moves).

The interruption is the longest interval between packets with data of the program at the receiver.
`test_interruption` (`make bench`) holds the medians over all cases of a kind to what is promised:
20 ms where the NIC tells of the failure, 200 ms where only silence does, and half of the rate
before. Without `--long` the cases are a covering set: each pair of values meets once.
"""

import statistics
from itertools import product

import pytest

from lib import options
from lib.device import FLUSHES
from lib.fabric import Fabric
from lib.pairs import covering
from lib.process import Died, Failure
from lib.traffic import TYPICAL_SHARE, survive

TOOLS = ["ib_write_bw", "ib_send_bw", "ib_read_bw"]
TOLD, SILENT = "failures of which the NIC tells", "silent failures"
FAULTS = {"nic dead": TOLD, "nic down": TOLD, "cable cut": SILENT, "switch down": SILENT}
ENDS = ["a", "b"]
SIZES = [65536, 1 << 20]
QPS = [1, 8]
DIRECTIONS = ["one-way", "-b"]
# The median over the cases of a kind. A failure of which the NIC tells is noticed at once: before
# a timeout with all its retries (120 ms) could have noticed it.
TYPICAL_GAP_MS = {TOLD: 20, SILENT: 200}
SECONDS = 3


class Case:
    """A program, a fault, and the shape of the stream."""

    def __init__(
        self,
        tool,
        fault,
        end,
        size,
        qps,
        direction,
        options=(),
        settings=(),
        background=(),
        flush=None,
    ):
        self.tool, self.kind, self.size, self.qps = tool, FAULTS[fault], size, qps
        self.both_ways = direction == "-b"
        self.options, self.settings, self.background = options, settings, background
        self.flush = flush
        place, state = fault.split()
        self.fault = "switch rail0 down" if place == "switch" else f"{place} {end}/0 {state}"
        shown = "64K" if size == 65536 else "1M"
        direction = "both-ways" if self.both_ways else "one-way"
        words = [tool, place, state, "at", end, shown, f"{qps}qp", direction]
        words += [*options, *settings, *background]
        self.name = " ".join([*words, *([f"flush {flush}"] if flush else [])])

    def run(self, logs, failover=True):
        """Runs it; fails where the stream does not go on."""
        args = ["-F", "-s", self.size, "-q", self.qps, *(["-b"] if self.both_ways else [])]
        args += self.options
        with Fabric(logs, *self.settings) as fabric:
            if self.flush:
                fabric.env["UNBROKEN_DEVICE_FLUSH"] = self.flush
            for fault in self.background:
                fabric.fault(fault)
            return survive(fabric, self.tool, args, SECONDS, self.fault, self.both_ways, failover)


# Receives that all QPs share: the sender's NIC dies, the receiver's, and both ends have such a
# queue.
SHARED = [
    Case("ib_send_bw", fault, end, 65536, 8, way, ["--use-srq"])
    for fault, end, way in [
        ("nic dead", "a", "one-way"),
        ("nic dead", "b", "one-way"),
        ("nic dead", "b", "-b"),
        ("cable cut", "b", "-b"),
    ]
]
# Peers that know each other by LID.
BY_LID = ["--link-layer", "infiniband"]
INFINIBAND = [
    Case("ib_write_bw", "nic dead", "a", 65536, 1, "one-way", settings=BY_LID),
    Case("ib_send_bw", "cable cut", "b", 65536, 8, "-b", settings=BY_LID),
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
# ... and however their providers flush, or do not.
ODD = [
    Case(tool, fault, end, 65536, qps, way, ["-x", "3", *more], ["--device", "plain"], flush=flush)
    for flush in FLUSHES
    for tool, fault, end, qps, way, more in [
        ("ib_write_bw", "cable cut", "a", 1, "one-way", []),
        ("ib_send_bw", "nic down", "b", 8, "-b", []),
        ("ib_send_bw", "nic dead", "b", 8, "-b", ["--use-srq"]),
    ]
]
# Packets are lost and overtake each other while it happens.
NOISE = ["loss a/0 1%", "reorder a/0 1%"]
LOSSY = [Case("ib_write_bw", "nic dead", "a", 65536, 1, "one-way", background=NOISE)]


DIMENSIONS = [TOOLS, FAULTS, ENDS, SIZES, QPS, DIRECTIONS]
# One for each tool and each kind of fault: the first of them is what `make check` runs.
SMOKE = [
    Case("ib_write_bw", "nic dead", "a", 65536, 1, "one-way"),
    Case("ib_send_bw", "cable cut", "b", 65536, 8, "-b"),
    Case("ib_read_bw", "switch down", "a", 65536, 1, "one-way"),
    Case("ib_write_bw", "nic down", "b", 1 << 20, 8, "one-way"),
]


def cases():
    """All cases as parameters: the smoke tests, a covering set (`--long`: the whole matrix), and
    those with other queues, link layers, devices and networks."""
    matrix = product(*DIMENSIONS) if options.LONG else covering(DIMENSIONS)
    smoke = {case.name for case in SMOKE}
    rest = [Case(*values) for values in matrix] + SHARED + INFINIBAND
    rest += PLAIN + ODD + LOSSY
    # Two ways to flush: some flushes are missing, and the markers of receives.
    smoke |= {PLAIN[0].name, ODD[0].name, ODD[4].name}
    everything = {case.name: case for case in [*SMOKE, *rest]}
    for name, case in everything.items():
        yield pytest.param(case, id=name, marks=pytest.mark.smoke if name in smoke else ())


@pytest.mark.parametrize("case", cases())
def test_survives(logs, note, case):
    note(case.run(logs).note)


@pytest.mark.smoke
def test_must_not_survive_without_failover(logs, note):
    """The mutant: without failover the same assertions must fail, else they prove nothing."""
    case = SMOKE[0]
    with pytest.raises(Died) as death:
        case.run(logs, failover=False)
    note(death.value)


@pytest.mark.smoke
def test_no_fault_no_switch(logs):
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-q", 8, "-b", "-D", 2])
        client.expect_success(30)
        server.expect_success(10)
        events = [e for e in fabric.events() if e["event"] not in ("port-active",)]
        assert not events, f"{len(events)} events without a fault"


@pytest.mark.timing
@pytest.mark.parametrize("kind", [TOLD, SILENT])
def test_interruption(logs, note, kind):
    """The medians over a covering set of cases of a kind, beside what is promised."""
    chosen = [c for c in map(lambda v: Case(*v), covering(DIMENSIONS)) if c.kind == kind]
    results = [case.run(logs) for case in chosen]
    gap_ms = statistics.median(r.gap_ms for r in results)
    share = statistics.median(r.share for r in results)
    figures = [f"gap {gap_ms:.1f} ms of {len(results)}, {share:.0%} of the rate"]
    for what in ("detect_us", "switch_us"):
        values = [getattr(r, what) for r in results if getattr(r, what) is not None]
        figures += [f"{what} {statistics.median(values):.0f}"] if values else []
    note(", ".join(figures))
    if gap_ms > TYPICAL_GAP_MS[kind]:
        raise Failure(f"the median is longer than {TYPICAL_GAP_MS[kind]} ms: {figures}")
    if share < TYPICAL_SHARE:
        raise Failure(f"the backups carry less than {TYPICAL_SHARE:.0%} in the median: {figures}")
