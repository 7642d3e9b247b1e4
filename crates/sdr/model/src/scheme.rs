//! The schemes by name, with the paper's settings.

use unbroken_erasure::Code;

use crate::{Channel, Completion, ErasureCoding, SelectiveRepeat};

/// Timeout of a chunk in round trips: `RTO = RTT + α·RTT`.
pub const ALPHA: f64 = 2.0;
/// What the receiver of erasure coding waits beyond the injection, in round trips: half of
/// [`ALPHA`], since half of the way is behind.
pub const BETA: f64 = ALPHA / 2.0;

/// How a write is made reliable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Selective Repeat; a chunk is sent again after three round trips.
    SrRto,
    /// Selective Repeat with negative acknowledgements; a chunk is sent again after one round trip,
    /// at best.
    SrNack,
    /// Erasure coding; [`Scheme::SrRto`] for what it cannot recover.
    Ec(Code),
}

impl Scheme {
    /// The time to complete a message of so many chunks.
    pub fn message(self, channel: &Channel, chunks: u64) -> Completion {
        let rto_s = (1.0 + ALPHA) * channel.rtt_s;
        match self {
            Scheme::SrRto => SelectiveRepeat::new(channel, rto_s).message(chunks),
            Scheme::SrNack => SelectiveRepeat::new(channel, channel.rtt_s).message(chunks),
            Scheme::Ec(code) => Scheme::coding(channel, code).message(chunks),
        }
    }

    /// The model of erasure coding with these settings.
    pub fn coding(channel: &Channel, code: Code) -> ErasureCoding {
        ErasureCoding::new(channel, code, (1.0 + ALPHA) * channel.rtt_s, BETA)
    }

    /// Chunks that a message is sent with in the mean: parity, and what is sent again.
    pub fn sent(self, channel: &Channel, chunks: u64) -> f64 {
        match self {
            Scheme::Ec(code) => Scheme::coding(channel, code).sent_chunks(chunks),
            _ => chunks as f64 / (1.0 - channel.loss),
        }
    }

    /// Parity chunks that a message is sent with.
    pub fn parity(self, channel: &Channel, chunks: u64) -> u64 {
        match self {
            Scheme::Ec(code) => Scheme::coding(channel, code).parity(chunks),
            _ => 0,
        }
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheme::SrRto => f.pad("SR-RTO"),
            Scheme::SrNack => f.pad("SR-NACK"),
            Scheme::Ec(code) => f.pad(&format!("EC-{code}")),
        }
    }
}
