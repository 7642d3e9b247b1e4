"""What failover costs on devices of the machine: perftest with it and without it in turn, over the
same provider, whose devices are softnic's plain ones. What a call costs in instructions:
test_cost.py."""

import math
import random
import statistics

import pytest

from lib import options
from lib.machine import MachineFabric
from lib.process import Failure

PAIRS = 20 if options.LONG else 6
END_SECONDS = 60
# The tool, its arguments, the column of its figure, whether more is better, and how many times as
# slow the run with failover may be: the lower end of the interval is held against that.
# (The goal for the latency is 1.03: docs/internals/lanes.md.)
CASES = {
    "latency": ("ib_write_lat", ["-s", 8, "-n", 10_000], 4, False, 1.4),
    "message-rate": ("ib_write_bw", ["-s", 8, "-n", 60_000], 4, True, 1.03),
}


def figure(fabric, failover: bool, case: str) -> float:
    """What perftest says: a typical latency in µs, or millions of messages in a second."""
    tool, arguments, column, *_ = CASES[case]
    server, client = fabric.pair(tool, ["-F", *arguments], failover)
    client.expect_success(END_SECONDS)
    server.expect_success(END_SECONDS)
    lines = [line.split() for line in client.output().splitlines()]
    return float([words for words in lines if len(words) > 4 and words[0] == "8"][-1][column])


def interval(ratios: list) -> tuple:
    """The middle 95 % of what the mean of these ratios might have been, by drawing them anew."""
    logs, chance = [math.log(ratio) for ratio in ratios], random.Random(1)
    means = sorted(statistics.fmean(chance.choices(logs, k=len(logs))) for _ in range(2000))
    return math.exp(means[50]), math.exp(means[-51])


@pytest.mark.timing
@pytest.mark.parametrize("case", CASES)
def test_failover_takes_no_speed(logs, note, case):
    ratios = []
    for n in range(PAIRS):
        figures = {}
        for failover in (True, False) if n % 2 else (False, True):
            with MachineFabric(logs, "--nics", "2") as fabric:
                figures[failover] = figure(fabric, failover, case)
        slower = figures[True] / figures[False]
        ratios.append(1 / slower if CASES[case][3] else slower)
    low, high = interval(ratios)
    text = f"{statistics.median(ratios):.3f} times as slow, [{low:.3f}, {high:.3f}]"
    note(text)
    if low > CASES[case][4]:
        raise Failure(f"{text}: {[round(ratio, 3) for ratio in ratios]}")
