"""Ring all-reduce between datacentres: 2N - 2 rounds, in each of which everyone sends a part of the
buffer on as soon as it has both finished its own last round and received its neighbour's."""

import numpy as np

from .link import Channel
from .scheme import Scheme


class Ring:
    """Ring all-reduce of a buffer of so many chunks over N datacentres; an N-th of it is sent a
    round, over links that are all alike."""

    def __init__(self, channel: Channel, scheme: Scheme, chunks: int, datacentres: int):
        self.datacentres = max(2, datacentres)
        self.step = scheme.message(channel, max(1, -(-chunks // self.datacentres)))

    def rounds(self) -> int:
        """2N - 2."""
        return 2 * self.datacentres - 2

    def least_mean_s(self) -> float:
        """A lower bound of the mean time, in seconds: (2N - 2)(C + mu), rounds times the mean time
        of one write."""
        return self.rounds() * self.step.mean_s()

    def draw_s(self, samples: int, rng: np.random.Generator) -> np.ndarray:
        """Samples of the time until the last datacentre is done: T(i, r) = max(T(i-1, r-1), T(i,
        r-1)) + t(i, r)."""
        done_s = np.zeros((self.datacentres, samples))
        for _ in range(self.rounds()):
            ready_s = np.maximum(np.roll(done_s, 1, axis=0), done_s)
            done_s = ready_s + self.step.draw_s(self.datacentres * samples, rng).reshape(
                done_s.shape
            )
        return done_s.max(axis=0)
