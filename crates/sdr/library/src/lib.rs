//! The SDR SDK: messages over unreliable queue pairs whose receivers see, chunk by chunk, what has
//! come; and reliable writes on them.
//!
//! A [`Context`] is some NICs of a host and the workers on them; a [`Qp`] is connected to one of a
//! peer. A receive is posted ([`Qp::recv_post`]), the peer's send of the same number is written
//! into it packet by packet, and [`Recv::bitmap`] shows which chunks are whole. What happens to the
//! others is the user's business, or that of [`Reliable`].
//!
//! ```text
//!   Qp ── C channels × G generations of UC queue pairs ── channel c on NIC c mod n, generation g under root key g, or a window for each message
//!    │         ▲ one worker for each channel: completions → bitmap, packets → queue pairs
//!    └── one UC queue pair on each NIC for control messages (clear to send, ACKs); what one says goes over all of them
//! ```
//!
//! What is decided is decided in `unbroken-sdr-protocol`, which does no I/O; here are queue pairs,
//! keys, threads and the clock. Where work is done is a trait ([`Workers`]), which programs may
//! implement; the one here has a thread for each channel, and some that encode beside them. A
//! processor on the NIC would be another.
//!
//! Lock order: the queue pair's receives → a channel's sending half → the queue pair's state → the
//! board's gates. A worker inside a gate takes no lock.
//!
//! Failure cases: a NIC that dies takes its channels along, and the others carry on; with the last
//! one sends fail. A NIC with neither indirect keys nor memory windows is refused: nothing else
//! here takes a buffer from under late packets (`keys`). The network may lose everything: raw
//! messages then stay incomplete, for ever if nobody completes them; reliable writes end by their
//! deadline.
#![warn(missing_debug_implementations)]

mod aside;
mod c;
mod clock;
mod context;
mod control;
mod debug;
mod encoding;
mod handles;
mod info;
mod keys;
mod lanes;
mod memory;
mod published;
mod qp;
mod reliable;
mod worker;

pub use context::{Context, ContextOptions};
pub use handles::{Recv, Send};
pub use keys::Protection;
pub use memory::Memory;
pub use qp::{Counters, Qp, QpOptions};
pub use reliable::{Reliable, ReliableOptions, Transfer};
pub use unbroken_erasure::Code;
pub use unbroken_sdr_model::choose::Objective;
pub use unbroken_sdr_model::Scheme;
pub use unbroken_sdr_protocol::adapt::Choice;
pub use unbroken_sdr_protocol::attr::Attr;
pub use unbroken_sdr_protocol::imm::Split;
pub use worker::{ChannelWork, CpuWorkers, Job, Kick, Polled, Running, Workers};

/// Why something cannot be done.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not now: resources are in use, and will be free again.
    #[error("try again: {0}")]
    Retry(String),
    /// Never so: what is wrong, and what would be right.
    #[error("{0}")]
    Wrong(String),
    /// The verbs below.
    #[error("{0}")]
    Verbs(#[from] unbroken::Error),
}

impl Error {
    pub(crate) fn wrong(what: impl std::fmt::Display) -> Error {
        Error::Wrong(what.to_string())
    }

    pub(crate) fn retry(what: impl std::fmt::Display) -> Error {
        Error::Retry(what.to_string())
    }
}

/// The result of all that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Locks a mutex; a panic elsewhere does not make what it guards useless.
pub(crate) fn lock<T: ?Sized>(m: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
