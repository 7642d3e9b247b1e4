//! The numbers under which the provider is given work requests: its `wr_id`s.
//!
//! ```text
//!   bits 63..62   zero, so that the owner may have numbers of its own there
//!        61       a marker, behind everything else in its queue
//!        60       the receive queue
//!        59..48   zero
//!        47..0    the entry's index in its ring, modulo 2^48
//! ```

/// Bits of an index.
const INDEX_BITS: u32 = 48;
const MASK: u64 = (1 << INDEX_BITS) - 1;
const RECV: u64 = 1 << 60;
const MARKER: u64 = 1 << 61;

/// A queue of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    /// Sends.
    Send,
    /// Receives.
    Recv,
}

impl Queue {
    const fn bit(self) -> u64 {
        match self {
            Queue::Send => 0,
            Queue::Recv => RECV,
        }
    }
}

/// What a `wr_id` of the provider names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slot {
    /// An entry; the lower bits of its index.
    Entry(Queue, u64),
    /// The marker of a queue that is drained.
    Marker(Queue),
}

impl Slot {
    /// What a `wr_id` names; `None` if it is not one of the journal's.
    #[inline]
    pub const fn parse(wr_id: u64) -> Option<Slot> {
        let queue = if wr_id & RECV != 0 { Queue::Recv } else { Queue::Send };
        match wr_id & !(RECV | MASK) {
            0 => Some(Slot::Entry(queue, wr_id & MASK)),
            MARKER if wr_id & MASK == 0 => Some(Slot::Marker(queue)),
            _ => None,
        }
    }

    /// The `wr_id`.
    #[inline]
    pub const fn wr_id(self) -> u64 {
        match self {
            Slot::Entry(queue, index) => queue.bit() | index & MASK,
            Slot::Marker(queue) => queue.bit() | MARKER,
        }
    }
}

/// Where the entry with these lower bits is in a ring whose oldest has the index `first`: so many
/// places behind it. `None`: before it.
#[inline]
pub(crate) const fn distance(first: u64, low: u64) -> Option<u64> {
    let ahead = low.wrapping_sub(first) & MASK;
    if ahead < 1 << (INDEX_BITS - 1) {
        Some(ahead)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_back_and_strange_ones_nowhere() {
        for queue in [Queue::Send, Queue::Recv] {
            for slot in [Slot::Entry(queue, 0), Slot::Entry(queue, MASK), Slot::Marker(queue)] {
                assert_eq!(Slot::parse(slot.wr_id()), Some(slot));
            }
        }
        for wr_id in [1 << 63, 1 << 62, 1 << 48, MARKER | 1, u64::MAX] {
            assert_eq!(Slot::parse(wr_id), None, "{wr_id:#x}");
        }
        let first = (1 << 62) + MASK;
        let low = |index: u64| index & MASK;
        assert_eq!(distance(first, low(first)), Some(0));
        assert_eq!(distance(first, low(first + 3)), Some(3), "around the end of the bits");
        assert_eq!(distance(first, low(first - 1)), None);
    }
}
