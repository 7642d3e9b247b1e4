"""How long a reliable write takes over a link that loses packets, by scheme: in closed form and by
drawing lots.

After Khalilov et al., "SDR-RDMA" (SC 2025), section 4.2. A `Link` with a chunk size gives a
`Channel`: time to inject a chunk, round trip, loss of a chunk. A `Scheme` over a channel gives the
`Completion` of a message: the time seen by the sender, from the first chunk to the last
acknowledgement. It is asked for its mean, any quantile, the distribution, or samples. `Ring` is
ring all-reduce made of such writes.

The formulas are those of the Rust crate `unbroken-model`; a file of golden figures holds the two
together. Samples are vectorised.
"""

from .codes import Code, failure
from .completion import Completion
from .ec import ErasureCoding
from .link import LIGHT_M_PER_S, Channel, Link, chunk_loss
from .ring import Ring
from .scheme import Scheme
from .sr import SelectiveRepeat

__all__ = [
    "LIGHT_M_PER_S",
    "Channel",
    "Code",
    "Completion",
    "ErasureCoding",
    "Link",
    "Ring",
    "Scheme",
    "SelectiveRepeat",
    "chunk_loss",
    "failure",
]
