//! What is said more than once, in case it is lost.
//!
//! The end of a write, its beginning, and the list of what a code could not recover are each one
//! small message. Where one is lost, the other end waits for a retransmission timeout, three round
//! trips, which on a long link is many times what the write takes: at a loss of 1 % one write in
//! fifty would wait so. So they go several times, a part of a round trip apart, as bursts of losses
//! are shorter than that. On a short link it is not worth the messages.

/// How often each is said.
pub(crate) const COPIES: u32 = 3;
/// Between two messages about the same lies at least this.
pub(crate) const LEAST_US: u64 = 200;
/// And at most this.
pub(crate) const MOST_US: u64 = 10_000;
/// A round trip from which on copies are sent.
const FAR_US: u64 = 1_000;

/// Between two messages about the same: an eighth of a round trip.
pub(crate) fn part_us(rtt_us: u64) -> u64 {
    (rtt_us / 8).clamp(LEAST_US, MOST_US)
}

/// Between two copies; `None`: there are none.
pub(crate) fn interval_us(rtt_us: u64) -> Option<u64> {
    (rtt_us >= FAR_US).then(|| part_us(rtt_us))
}
