//! Control messages that are sent redundantly.
//!
//! The beginning of a write, its end, and the list of submessages that a code could not recover are
//! each one small message. If one is lost, the other end waits for a retransmission timeout of
//! three round trips. On a long link, that is many times the duration of the write, and at a loss
//! of 1 % it would happen to one write in fifty. So each message is sent several times, a fraction
//! of a round trip apart, because bursts of losses are shorter than that. On a short link the
//! copies are not worthwhile.

/// How many times each message is sent.
pub(crate) const COPIES: u32 = 3;
/// The shortest interval between copies.
pub(crate) const LEAST_US: u64 = 200;
/// The longest interval between copies.
pub(crate) const MOST_US: u64 = 10_000;
/// The shortest round trip for which copies are sent.
const FAR_US: u64 = 1_000;

/// The interval between copies: an eighth of a round trip.
pub(crate) fn part_us(rtt_us: u64) -> u64 {
    (rtt_us / 8).clamp(LEAST_US, MOST_US)
}

/// The interval between copies; `None`: a single message is sent.
pub(crate) fn interval_us(rtt_us: u64) -> Option<u64> {
    (rtt_us >= FAR_US).then(|| part_us(rtt_us))
}
