"""How an outage is taken apart: the parts sum to it, whatever was heard and when."""

import pytest

from lib.edge import LATE_US, parts_us

BEGAN, ENDED = 10_000, 110_000


@pytest.mark.parametrize(
    "detected, routed, parts",
    [
        (40_000, 90_000, (30_000, 50_000, 20_000)),
        (40_000, ENDED + 30, (30_000, 70_000, 0)),
        (40_000, None, (30_000, 0, 70_000)),
        (40_000, ENDED + LATE_US + 1, (30_000, 0, 70_000)),
        # The route changed without BFD's word.
        (90_000, 40_000, (0, 30_000, 70_000)),
        (None, 40_000, (0, 30_000, 70_000)),
        # BFD's word of before the outage, or of long after it.
        (5_000, None, (0, 0, 100_000)),
        (300_000, 400_000, (0, 0, 100_000)),
        (None, None, (0, 0, 100_000)),
    ],
)
def test_parts_sum_to_the_outage(detected, routed, parts):
    assert parts_us(BEGAN, ENDED, detected, routed) == parts
    assert sum(parts) == ENDED - BEGAN
