//! Noticing that a QP makes no progress. That is a question to its path ([`crate::health`]) and
//! never an answer: a peer that has no receive posted, a queue that is long, a thread without a
//! core look the same from a single QP.

use crate::action::Reason;
use crate::health::Answer;
use unbroken_types::WcStatus;

/// Time without progress before the path is asked.
pub const ASK_AFTER_US: u64 = 20_000;

/// A QP that has been silent for so long, while its path answers and its peer does not say that it
/// has no receive, is wedged by itself: one of its ends is in error and the other does not know. It
/// gets a fresh life on the same path.
pub const WEDGED_AFTER_US: u64 = 3_000_000;

/// What its path's answer means for a QP that has been silent since then: why it must leave, if it
/// must.
pub fn judge(
    clock_us: u64,
    since_us: u64,
    answer: Answer,
    waits_for_receive: bool,
) -> Option<Reason> {
    let wedged = since_us + WEDGED_AFTER_US <= clock_us && !waits_for_receive;
    match answer {
        Answer::Dead => Some(Reason::Stall),
        Answer::Alive if wedged => Some(Reason::Wedged(WcStatus::RetryExcErr)),
        Answer::Alive | Answer::Asked => None,
    }
}

/// What one look at a QP shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    /// A round trip was completed since the last look: the path lives.
    pub moved: bool,
    /// Sends have been outstanding, and nothing has moved, since then.
    pub silent_since_us: Option<u64>,
}

/// The watch over one life of a logical QP. Make a new one for each life.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silence {
    advanced: u64,
    since_us: Option<u64>,
}

impl Silence {
    /// How far it had advanced at the last look.
    pub fn advanced(&self) -> u64 {
        self.advanced
    }

    /// Since when it is silent, as of the last look.
    pub fn since_us(&self) -> Option<u64> {
        self.since_us
    }

    /// Looks at the progress of the physical QP: sends outstanding, and a number that grows with
    /// every acknowledgement and READ answer.
    pub fn look(&mut self, now_us: u64, outstanding: u32, advanced: u64) -> Look {
        let moved = core::mem::replace(&mut self.advanced, advanced) != advanced;
        self.since_us = match outstanding {
            0 => None,
            _ if moved => Some(now_us),
            _ => Some(self.since_us.unwrap_or(now_us)),
        };
        Look { moved, silent_since_us: self.since_us }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_begins_with_the_last_movement_and_needs_something_outstanding() {
        let mut s = Silence::default();
        assert_eq!(s.look(10, 0, 0), Look { moved: false, silent_since_us: None });
        assert_eq!(s.look(20, 1, 0), Look { moved: false, silent_since_us: Some(20) });
        assert_eq!(s.look(30, 1, 0), Look { moved: false, silent_since_us: Some(20) });
        assert_eq!(s.look(40, 3, 2), Look { moved: true, silent_since_us: Some(40) });
        assert_eq!(s.look(50, 0, 5), Look { moved: true, silent_since_us: None });
        assert_eq!(s.look(60, 0, 5), Look { moved: false, silent_since_us: None });
    }
}
