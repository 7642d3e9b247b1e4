//! Noticing that a QP makes no progress. That is a question to its path ([`crate::health`]) and
//! never an answer: a peer that has no receive posted, a long message, a queue that is long, a
//! paused port, a thread without a core look the same from a single QP. So silence alone never
//! begins a message again, however long it lasts: while the path answers, only the QP's own
//! transport says that its packets do not arrive, by giving up.

/// Time without progress before the path is asked.
pub const ASK_AFTER_US: u64 = 20_000;

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
        assert_eq!((s.advanced(), s.since_us()), (2, Some(40)));
        assert_eq!(s.look(50, 0, 5), Look { moved: true, silent_since_us: None });
        assert_eq!(s.look(60, 0, 5), Look { moved: false, silent_since_us: None });
        assert_eq!((s.advanced(), s.since_us()), (5, None));
    }
}
