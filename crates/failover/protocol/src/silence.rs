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

/// How often a path was found alive while its QP was silent. All times count from the beginning of
/// the silence, as of the look that came next: so none is too early.
#[derive(Clone, Copy, Debug, Default)]
struct Signs {
    /// It was found alive since the last look.
    fresh: bool,
    /// When it was found alive last; 0: never.
    last_us: u64,
    /// The longest time without a sign of life before that.
    longest_us: u64,
}

/// A path was alive all the time if it gave a sign of life in every part of it, of which there are
/// so many. A transport that doubles its timeout sends the last time when a third has passed.
const PARTS: u64 = 3;

/// The watch over one life of a logical QP. Make a new one for each life.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silence {
    advanced: u64,
    since_us: Option<u64>,
    /// How long the QP had been silent at the last look.
    for_us: u64,
    signs: Signs,
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

    /// The path has been found alive.
    pub fn path_lives(&mut self) {
        self.signs.fresh = self.since_us.is_some();
    }

    /// Whether the path was found alive at all since the QP is silent.
    pub fn path_was_alive(&self) -> bool {
        self.signs.last_us > 0
    }

    /// Whether the path was found alive again and again since the QP is silent, so that what its
    /// transport sent in vain had a path that lived.
    pub fn path_was_always_alive(&self) -> bool {
        let Signs { last_us, longest_us, .. } = self.signs;
        let longest_us = longest_us.max(self.for_us.saturating_sub(last_us));
        self.path_was_alive() && longest_us.saturating_mul(PARTS) <= self.for_us
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
        self.for_us = self.since_us.map_or(0, |since_us| now_us.saturating_sub(since_us));
        let Signs { fresh, last_us, longest_us } = self.signs;
        self.signs = match self.for_us {
            0 => Signs::default(),
            at_us if fresh => Signs {
                fresh: false,
                last_us: at_us,
                longest_us: longest_us.max(at_us.saturating_sub(last_us)),
            },
            _ => self.signs,
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

    /// Looks each 10 ms for 90 ms; before these looks the path is found alive.
    fn always_alive(found_before: &[u64]) -> bool {
        let mut s = Silence::default();
        for n in 0..10 {
            if found_before.contains(&n) {
                s.path_lives();
            }
            s.look(1_000_000 + 10_000 * n, 1, 0);
        }
        s.path_was_always_alive()
    }

    #[test]
    fn a_path_was_always_alive_if_it_was_found_so_in_each_third_of_the_silence() {
        assert!(always_alive(&[3, 6, 9]) && always_alive(&[1, 2, 4, 7]));
        assert!(!always_alive(&[]) && !always_alive(&[8, 9]), "it has just come back");
        assert!(!always_alive(&[3]) && !always_alive(&[1, 9]), "nobody knows of what was between");
        assert!(!always_alive(&[0, 4, 7]), "that it was alive before says nothing");
    }

    #[test]
    fn what_moves_ends_the_silence_and_what_was_found_in_it() {
        let mut s = Silence::default();
        s.look(0, 1, 0);
        s.path_lives();
        s.look(10, 1, 0);
        assert!(s.path_was_alive());
        s.look(20, 1, 1);
        assert!(!s.path_was_alive() && !s.path_was_always_alive());
    }
}
