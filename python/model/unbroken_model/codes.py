"""Erasure codes, as far as the model needs them: sizes, and how likely a submessage cannot be
recovered."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """`data` chunks with `parity` chunks: "mds" recovers from any `parity` losses, "xor" from one
    in each group of chunks j mod `parity`."""

    kind: str
    data: int
    parity: int

    def __post_init__(self):
        if self.kind not in ("mds", "xor"):
            raise ValueError(f'a code of kind "{self.kind}"; "mds" and "xor" are right')
        if not (
            1 <= self.data <= 128
            and 1 <= self.parity <= 32
            and (self.kind == "mds" or self.parity <= self.data)
        ):
            raise ValueError(
                f"{self.data} data and {self.parity} parity chunks; 1 to 128, and 1 to 32 (XOR: no "
                "more than data) are right"
            )

    def for_last(self, data: int) -> "Code":
        """The code of a last submessage of `data` chunks only: the same ratio of parity, rounded
        up."""
        return Code(self.kind, data, -(-data * self.parity // self.data))

    def groups(self) -> list:
        """XOR: the chunks of each group, parity included."""
        return [len(range(group, self.data, self.parity)) + 1 for group in range(self.parity)]


def more_than(few: int, n: int, loss: float) -> float:
    """The probability that more than `few` of `n` chunks are lost."""
    if loss <= 0:
        return 0.0
    if loss >= 1:
        return float(few < n)
    odds = loss / (1 - loss)
    term = (1 - loss) ** n
    total = 0.0
    for i in range(1, n + 1):
        term *= odds * (n - i + 1) / i
        if i > few:
            total += term
    return min(total, 1.0)


def failure(code: Code, loss: float) -> float:
    """The probability that a submessage loses more than its code recovers, if each of its chunks is
    lost with probability `loss`."""
    if code.kind == "mds":
        return more_than(code.parity, code.data + code.parity, loss)
    fails = [more_than(1, chunks, loss) for chunks in code.groups()]
    return 1.0 if max(fails) == 1.0 else -math.expm1(sum(math.log1p(-f) for f in fails))
