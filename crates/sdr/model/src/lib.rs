//! How long a reliable write takes over a link that loses packets, by scheme: Selective Repeat and
//! erasure coding, in closed form and by drawing lots.
//!
//! After Khalilov et al., "SDR-RDMA" (SC 2025), section 4.2. A [`Link`] with a chunk size gives a
//! [`Channel`]: time to inject a chunk, round trip, loss of a chunk. A [`Scheme`] over a channel
//! gives the [`Completion`] of a message: the time seen by the sender, from the first chunk to the
//! last acknowledgement. It is asked for its mean, any quantile, the distribution, or samples.
//!
//! The mean is the expectation itself, not an approximation of it (`sr` says how). Quantiles are
//! the least time by which the share is reached. Selective Repeat costs a microsecond or so,
//! whatever the message; a code that much for each number of failures that is likely. So the choice
//! of a scheme can be made anew for each message ([`choose`]).
//!
//! What the model leaves out: acknowledgements are not lost, chunks are lost independently of each
//! other, and retransmissions take no bandwidth from first transmissions. So for messages longer
//! than the timeout the time is a lower bound.
//!
//! The crate does no I/O and draws no randomness that it was not given ([`Lots`] are seeded). The
//! Python package `unbroken_sdr_model` has the same formulas; a file of golden figures holds the
//! two together.
#![forbid(unsafe_code)]

pub mod choose;
mod completion;
mod ec;
mod failure;
mod link;
mod lots;
mod ring;
mod scheme;
mod sr;

pub use completion::Completion;
pub use ec::ErasureCoding;
pub use failure::failure;
pub use link::{chunk_loss, Channel, Link, LinkError, Loss, LIGHT_M_PER_S};
pub use lots::Lots;
pub use ring::Ring;
pub use scheme::Scheme;
pub use sr::SelectiveRepeat;
