"""A link as people know it, and as the model sees it."""

import math
from dataclasses import dataclass

# Light's speed as distances are turned into times: in vacuum, as the paper does (3750 km are 25 ms
# there and back).
LIGHT_M_PER_S = 3e8
# The highest loss of a chunk that is modelled; beyond it nothing gets through in any useful time.
HIGHEST_LOSS = 0.99


def chunk_loss(packet_loss: float, packets: int) -> float:
    """The loss of a chunk of so many packets: 1 - (1 - p)^N."""
    return -math.expm1(packets * math.log1p(-packet_loss)) if packet_loss < 1 else 1.0


@dataclass(frozen=True)
class Channel:
    """A link as the model sees it: seconds to put a chunk on the wire, a round trip in seconds, the
    probability that a chunk is lost."""

    injection_s: float
    rtt_s: float
    loss: float


@dataclass(frozen=True)
class Link:
    """A link between two datacentres, and how messages are cut for it. Of `packet_loss` and
    `chunk_loss`, one is given."""

    bandwidth_bps: float = 400e9
    rtt_s: float = 25e-3
    packet_loss: float | None = None
    chunk_loss: float | None = None
    mtu_bytes: int = 4096
    chunk_bytes: int = 65536

    def channel(self) -> Channel:
        """The channel that chunks see. A quantity that makes no sense is a ValueError."""
        if not 0 < self.bandwidth_bps < math.inf:
            raise ValueError(f"a bandwidth of {self.bandwidth_bps} bit/s; more than 0 is right")
        if not 0 <= self.rtt_s < math.inf:
            raise ValueError(f"a round trip of {self.rtt_s} s; 0 or more is right")
        if (self.packet_loss is None) == (self.chunk_loss is None):
            raise ValueError("give packet_loss or chunk_loss, one of them")
        given = self.chunk_loss if self.packet_loss is None else self.packet_loss
        if not 0 <= given <= 1:
            raise ValueError(f"a loss of {given}; a probability from 0 to 1 is right, such as 1e-5")
        if self.mtu_bytes < 1 or self.chunk_bytes < 1 or self.chunk_bytes % self.mtu_bytes:
            raise ValueError(
                f"chunks of {self.chunk_bytes} bytes with packets of {self.mtu_bytes}; a chunk is "
                "a multiple of a packet"
            )
        loss = (
            given
            if self.packet_loss is None
            else chunk_loss(given, self.chunk_bytes // self.mtu_bytes)
        )
        if loss > HIGHEST_LOSS:
            raise ValueError(
                f"{loss:.4f} of all chunks would be lost; up to {HIGHEST_LOSS} is modelled"
            )
        return Channel(8 * self.chunk_bytes / self.bandwidth_bps, self.rtt_s, loss)

    def chunks(self, message_bytes: int) -> int:
        """The chunks of a message, the last one filled up; an empty message takes one."""
        return max(1, -(-message_bytes // self.chunk_bytes))
