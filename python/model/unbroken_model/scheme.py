"""The schemes by name, with the paper's settings."""

from dataclasses import dataclass

from .codes import Code
from .completion import Completion
from .ec import ErasureCoding
from .link import Channel
from .sr import SelectiveRepeat

# Timeout of a chunk in round trips: RTO = RTT + ALPHA*RTT.
ALPHA = 2.0
# What the receiver of erasure coding waits beyond the injection, in round trips: half of ALPHA,
# since half of the way is behind.
BETA = ALPHA / 2


@dataclass(frozen=True)
class Scheme:
    """How a write is made reliable. The timeout of a chunk is in round trips; without a code it is
    Selective Repeat."""

    name: str
    rto_rtts: float
    code: Code | None = None

    @staticmethod
    def sr_rto() -> "Scheme":
        """Selective Repeat; a chunk is sent again after three round trips."""
        return Scheme("SR-RTO", 1 + ALPHA)

    @staticmethod
    def sr_nack() -> "Scheme":
        """Selective Repeat with negative acknowledgements; a chunk is sent again after one round
        trip, at best."""
        return Scheme("SR-NACK", 1.0)

    @staticmethod
    def ec(kind: str, data: int, parity: int) -> "Scheme":
        """Erasure coding; `sr_rto` for what it cannot recover."""
        return Scheme(f"EC-{kind.upper()}({data}, {parity})", 1 + ALPHA, Code(kind, data, parity))

    def coding(self, channel: Channel) -> ErasureCoding:
        """The model of erasure coding with these settings."""
        return ErasureCoding(channel, self.code, self.rto_rtts * channel.rtt_s, BETA)

    def message(self, channel: Channel, chunks: int) -> Completion:
        """The time to complete a message of so many chunks."""
        if self.code:
            return self.coding(channel).message(chunks)
        return SelectiveRepeat(channel, self.rto_rtts * channel.rtt_s).message(chunks)
