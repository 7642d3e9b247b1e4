"""Selective Repeat: a chunk that is lost is sent again when its timeout is over, until it arrives.

Chunk i of M, lost r times before it arrives, is done at X_i = i*T + r*O, with the time to inject a
chunk T and the cost of a loss O = RTO + T; r is at least n with probability p^n. The message is
done a round trip after the last of its chunks.

With N_n(x) = min(M, floor((x - n*O)/T)), the chunks that have had time for n retransmissions by x
(0 where that is negative),

    ln P(max X_i <= x) = M ln(1 - p)
                    + sum over n >= 1 of N_n(x) [ln(1 - p^(n+1)) - ln(1 - p^n)], x >= M*T

The expectation is M*T + integral of (1 - P) + RTT. Between the points where some N_n begins to grow
or is full, P is a geometric sequence over steps of T, one for each phase between two of the N_n: so
the integral has a closed form, and the cost does not depend on M.
"""

import math

import numpy as np

from .link import Channel

# Retransmissions that are less likely than this are not counted.
NEVER = 1e-30


def geometric(log_first: float, gain: float, terms: float) -> float:
    """The sum of e^(log_first + t*gain), t from 0 to terms - 1; no term is above 1."""
    if terms == 0:
        return 0.0
    log_last = min(log_first + (terms - 1) * gain, 0.0)
    if gain == 0:
        return terms * math.exp(log_last)
    return math.exp(log_last) * math.expm1(-terms * gain) / math.expm1(-gain)


class SelectiveRepeat:
    """The model of Selective Repeat over a channel, a chunk being sent again after `rto_s` seconds
    without an acknowledgement."""

    def __init__(self, channel: Channel, rto_s: float):
        self.step, self.rtt_s, self.loss = channel.injection_s, channel.rtt_s, channel.loss
        self.overhead_s = rto_s + channel.injection_s
        # ln(1 - p^n) at n; at 0 there is nothing of use.
        self.log_done = [0.0]
        power = 1.0
        while power > NEVER:
            power *= channel.loss
            self.log_done.append(math.log1p(-power))
        self.most = len(self.log_done) - 2

    def gain(self, n: int) -> float:
        """By how much ln P grows where a chunk gets time for its nth retransmission."""
        return self.log_done[n + 1] - self.log_done[n]

    def reached(self, n: int, chunks: int, x: float) -> float:
        """N_n(x)."""
        return min(max(math.floor((x - n * self.overhead_s) / self.step), 0), chunks)

    def log_probability(self, chunks: int, x: float) -> float:
        """ln P(max X_i <= x)."""
        if x < chunks * self.step:
            return -math.inf
        total = chunks * self.log_done[1]
        for n in range(1, self.most + 1):
            reached = self.reached(n, chunks, x)
            if reached == 0:
                break
            total += reached * self.gain(n)
        return min(total, 0.0)

    def probability(self, chunks: int, time_s: float) -> float:
        """The probability to be done by then."""
        return math.exp(self.log_probability(chunks, time_s - self.rtt_s))

    def least_s(self, chunks: int) -> float:
        """The time without losses."""
        return chunks * self.step + self.rtt_s

    def no_loss(self, chunks: int) -> float:
        """The probability that no chunk is lost."""
        return math.exp(chunks * math.log1p(-self.loss))

    def mean_s(self, chunks: int) -> float:
        """The mean, in seconds."""
        return chunks * self.step + self._excess_s(chunks) + self.rtt_s

    def _excess_s(self, chunks: int) -> float:
        """The integral of 1 - P from M*T on."""
        own = chunks * self.step
        # From `growing` to `last` the N_n grow; those before are full.
        growing, last = 1, 0
        while last < self.most and (last + 1) * self.overhead_s <= own:
            last += 1
        begin, total = own, 0.0
        while growing <= self.most:
            next_begins = (last + 1) * self.overhead_s if last < self.most else math.inf
            next_full = growing * self.overhead_s + own if growing <= last else math.inf
            end = min(next_begins, next_full)
            total += self._stretch(chunks, begin, end, range(growing, last + 1))
            if next_begins <= next_full:
                last += 1
            else:
                growing += 1
            begin = end
        return total

    def _stretch(self, chunks: int, begin: float, end: float, growing: range) -> float:
        """The integral of 1 - P over a stretch on which the same N_n grow."""
        log_p = chunks * self.log_done[growing.start]
        phases, gain = [], 0.0
        for n in growing:
            reached = self.reached(n, chunks, begin)
            log_p += reached * self.gain(n)
            gain += self.gain(n)
            phase = n * self.overhead_s + (reached + 1) * self.step - begin
            phases.append((min(max(phase, 0.0), self.step), self.gain(n)))
        phases.sort(key=lambda phase: phase[0])
        phases.append((self.step, 0.0))
        steps = math.floor((end - begin) / self.step)
        rest = (end - begin) - steps * self.step
        total, at = 0.0, 0.0
        for phase, gained in phases:
            # 1 - P over all whole steps, then over the last one, as far as it goes.
            total += (steps - geometric(log_p, gain, steps)) * (phase - at)
            total += -math.expm1(min(log_p + steps * gain, 0.0)) * min(
                max(rest - at, 0.0), phase - at
            )
            log_p += gained
            at = phase
        return total

    def draw_s(
        self, chunks: np.ndarray, rng: np.random.Generator, lossy: bool = False
    ) -> np.ndarray:
        """A sample of the time for each number of chunks. If `lossy`, of those times in which a
        chunk is lost at least.

        Only chunks that are lost more often than all behind them can be the last one to be done.
        From one such to the next, from the end of the message to its beginning, the distance is
        geometric.
        """
        chunks = np.asarray(chunks, dtype=float)
        latest = chunks * self.step
        if self.loss <= 0:
            return latest + self.rtt_s
        index, retries = chunks + 1, np.zeros_like(chunks)
        alive = np.arange(chunks.size)
        log_loss = math.log(self.loss)
        for turn in range(self.most):
            with np.errstate(divide="ignore", invalid="ignore"):
                log_less = np.log1p(-(self.loss ** (retries[alive] + 1)))
                uniform = 1 - rng.random(alive.size)
                if lossy and turn == 0:
                    some = -np.expm1(chunks * log_less)
                    passed_over = np.minimum(
                        np.floor(np.log1p(-uniform * some) / log_less), chunks - 1
                    )
                else:
                    passed_over = np.floor(np.log(uniform) / log_less)
            index[alive] -= passed_over + 1
            alive = alive[index[alive] >= 1]
            if alive.size == 0:
                break
            retries[alive] += 1 + np.floor(np.log(1 - rng.random(alive.size)) / log_loss)
            latest[alive] = np.maximum(
                latest[alive], index[alive] * self.step + retries[alive] * self.overhead_s
            )
        return latest + self.rtt_s

    def message(self, chunks: int):
        """The time to complete a message of so many chunks."""
        from .completion import Case, Completion

        return Completion(self, [Case(1.0, 0.0, chunks)])
