"""The time to complete a message, as a mixture: with some probability so long a wait, and then
Selective Repeat of so many chunks."""

import math
import sys
from dataclasses import dataclass

import numpy as np

from .sr import SelectiveRepeat


@dataclass(frozen=True)
class Case:
    """With which probability what is sent after which wait. Without chunks it takes a round
    trip."""

    weight: float
    wait_s: float
    chunks: int


class Completion:
    """The distribution of the time to complete a message, in seconds.

    There is one case, or the first is the one in which nothing is sent again. What else can be
    drawn than by the weights: `draw_cases`.
    """

    def __init__(self, sr: SelectiveRepeat, cases: list, draw_cases=None):
        self.sr, self.cases, self._draw_cases = sr, cases, draw_cases

    def mean_s(self) -> float:
        """The mean."""
        return sum(case.weight * (case.wait_s + self.sr.mean_s(case.chunks)) for case in self.cases)

    def probability(self, time_s: float) -> float:
        """The probability to be done by then."""
        return min(
            1.0,
            sum(
                case.weight * self.sr.probability(case.chunks, time_s - case.wait_s)
                for case in self.cases
            ),
        )

    def least_s(self) -> float:
        """The shortest time that it can take."""
        return min(case.wait_s + self.sr.least_s(case.chunks) for case in self.cases)

    def quantile_s(self, share: float) -> float:
        """The least time by which a share (below 1) of all such messages is done: 0.5 gives the
        median."""
        least_s = self.least_s()
        # At the very place of a step, rounding may put the time on its wrong side.
        if self.probability(least_s * (1 + 1e-12)) >= share:
            return least_s
        early, late = least_s, 2 * least_s
        while self.probability(late) < share and late < math.inf:
            early, late = late, 2 * late
        while late - early > 4 * sys.float_info.epsilon * late:
            middle = early + (late - early) / 2
            if self.probability(middle) < share:
                early = middle
            else:
                late = middle
        return late

    def undisturbed(self) -> float:
        """The probability that nothing is sent again."""
        if len(self.cases) == 1:
            return self.cases[0].weight * self.sr.no_loss(self.cases[0].chunks)
        return self.cases[0].weight

    def draw_s(self, samples: int, rng: np.random.Generator) -> np.ndarray:
        """Samples."""
        wait_s, chunks = (
            self._draw_cases(samples, rng)
            if self._draw_cases
            else self._pick(self.cases, samples, rng)
        )
        return wait_s + self.sr.draw_s(chunks, rng)

    def draw_disturbed_s(self, samples: int, rng: np.random.Generator) -> np.ndarray:
        """Samples of those in which something is sent again: the others all take `least_s`, so that
        estimates become better without them."""
        if len(self.cases) == 1:
            only = self.cases[0]
            return only.wait_s + self.sr.draw_s(np.full(samples, only.chunks), rng, lossy=True)
        wait_s, chunks = self._pick(self.cases[1:], samples, rng)
        return wait_s + self.sr.draw_s(chunks, rng)

    @staticmethod
    def _pick(cases: list, samples: int, rng: np.random.Generator):
        weights = np.cumsum([case.weight for case in cases])
        picked = np.minimum(
            np.searchsorted(weights, rng.random(samples) * weights[-1], side="right"),
            len(cases) - 1,
        )
        return np.array([case.wait_s for case in cases])[picked], np.array(
            [case.chunks for case in cases]
        )[picked]
