"""Erasure coding: parity goes with the data, and only submessages that cannot be recovered are sent
again, by Selective Repeat.

A message of M chunks is cut into submessages of k, each with m parity chunks; what is left is a
shorter last submessage of k' chunks with ceil(k'*m/k), so there are ceil(M*m/k) parity chunks in
all. If all are recovered the message takes B + RTT with B = (M + ceil(M*m/k))*T. Else the receiver
waits for its timeout B + beta*RTT, says which failed, and their data chunks are sent again: B + (1
+ beta)*RTT + T_SR(their chunks).
"""

import math

import numpy as np

from .codes import Code, failure
from .completion import Case, Completion
from .link import Channel
from .sr import SelectiveRepeat

# Numbers of failures that are less likely than the likeliest by this are left out.
NEVER = 1e-20


def binomial(n: int, fails: float) -> list:
    """The binomial distribution: how many of `n` fail, and how likely that is, where it is likely
    at all."""
    if n == 0 or fails <= 0 or fails >= 1:
        return [(n if fails >= 1 else 0, 1.0)]
    odds = fails / (1 - fails)
    likeliest = min(math.floor((n + 1) * fails), n)
    down, f, weight = [], likeliest, 1.0
    while f > 0 and weight > NEVER:
        weight *= f / ((n - f + 1) * odds)
        f -= 1
        down.append((f, weight))
    every, f, weight = down[::-1] + [(likeliest, 1.0)], likeliest, 1.0
    while f < n and weight > NEVER:
        weight *= (n - f) * odds / (f + 1)
        f += 1
        every.append((f, weight))
    total = sum(weight for _, weight in every)
    return [(f, weight / total) for f, weight in every]


class ErasureCoding:
    """The model of erasure coding over a channel; what fails is sent again with a timeout of
    `rto_s`, and the receiver waits `beta` round trips before it says so."""

    def __init__(self, channel: Channel, code: Code, rto_s: float, beta: float):
        self.channel, self.code, self.beta = channel, code, beta
        self.sr = SelectiveRepeat(channel, rto_s)

    def cut(self, chunks: int):
        """Whole submessages, and the code of a shorter one behind them."""
        whole, rest = divmod(chunks, self.code.data)
        return whole, self.code.for_last(rest) if rest else None

    def parity(self, chunks: int) -> int:
        """The parity chunks of a message: ceil(M*m/k)."""
        whole, last = self.cut(chunks)
        return whole * self.code.parity + (last.parity if last else 0)

    def sent_s(self, chunks: int) -> float:
        """The time until all is sent once: B."""
        return (chunks + self.parity(chunks)) * self.channel.injection_s

    def failures(self, last: Code | None):
        """The probabilities that whole submessages fail, and that the last one does."""
        return failure(self.code, self.channel.loss), failure(
            last, self.channel.loss
        ) if last else 0.0

    def fallback(self, chunks: int) -> float:
        """The probability that something must be sent again: 1 - P_EC^L."""
        whole, last = self.cut(chunks)
        p_whole, p_last = self.failures(last)
        if (whole and p_whole == 1) or p_last == 1:
            return 1.0
        return -math.expm1((whole * math.log1p(-p_whole) if whole else 0.0) + math.log1p(-p_last))

    def message(self, chunks: int) -> Completion:
        """The time to complete a message of so many chunks."""
        whole, last = self.cut(chunks)
        p_whole, p_last = self.failures(last)
        sent_s = self.sent_s(chunks)
        told_s = sent_s + (1 + self.beta) * self.channel.rtt_s
        undisturbed, cases = 0.0, []
        for failed, weight in binomial(whole, p_whole):
            for weight_of, rest in (
                (weight * (1 - p_last), 0),
                (weight * p_last, last.data if last else 0),
            ):
                again = failed * self.code.data + rest
                if again == 0:
                    undisturbed += weight_of
                elif weight_of > 0:
                    cases.append(Case(weight_of, told_s, again))

        def draw_cases(samples: int, rng: np.random.Generator):
            again = rng.binomial(whole, p_whole, samples) * self.code.data
            if last:
                again = again + (rng.random(samples) < p_last) * last.data
            return np.where(again > 0, told_s, sent_s), again

        return Completion(self.sr, [Case(undisturbed, sent_s, 0), *cases], draw_cases)

    def paper_mean_s(self, chunks: int) -> float:
        """The paper's own estimate of the mean (section 4.2.3): Selective Repeat of the *expected*
        number of failed chunks (whole ones, rounded up) is added whether or not anything fails. It
        is called a lower bound there and is none."""
        whole, last = self.cut(chunks)
        p_whole, p_last = self.failures(last)
        again = whole * p_whole * self.code.data + (p_last * last.data if last else 0.0)
        told_s = self.fallback(chunks) * (1 + self.beta) * self.channel.rtt_s
        return self.sent_s(chunks) + told_s + self.sr.mean_s(math.ceil(again))
