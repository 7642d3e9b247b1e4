//! Order-based matching: the *n*-th send goes into the *n*-th receive, once the receiver has said that it is posted.
//!
//! The receiver says so by [`Control::Clear`] for all posted receives of which the sender has not said yet that it knows them, at once and again after a
//! timeout that doubles. The sender answers with how far it knows ([`Control::Cleared`]). Both are cumulative: a message that is lost or comes twice
//! does no harm, and one with a gap before it is answered with what is known.
//!
//! Invariants: what the receiver repeats is bounded by the slots; the sender knows lengths of at most as many messages beyond its oldest unfinished one.

use crate::control::{Control, MAX_CLEARED};
use std::collections::VecDeque;

/// The first wait before something is said again.
const FIRST_WAIT_US: u64 = 10_000;
/// The longest.
const LONGEST_WAIT_US: u64 = 1_000_000;

/// The receiver's part.
#[derive(Debug, Default)]
pub struct Clearance {
    /// The first message that the sender may not know of.
    first: u64,
    /// Lengths from there on.
    bytes: VecDeque<u64>,
    /// How many of them have been said.
    said: usize,
    again_us: Option<u64>,
    wait_us: u64,
    rtt_us: Option<u64>,
}

impl Clearance {
    /// A receive of the next message has been posted.
    pub fn posted(&mut self, bytes: u64) {
        self.bytes.push_back(bytes);
    }

    /// The sender has said how far it knows.
    pub fn on_cleared(&mut self, next: u64, stamp_us: u64, now_us: u64) {
        let known = next.saturating_sub(self.first).min(self.bytes.len() as u64);
        if known == 0 {
            return;
        }
        self.bytes.drain(..known as usize);
        self.first += known;
        self.said = self.said.saturating_sub(known as usize);
        self.rtt_us = Some(now_us.saturating_sub(stamp_us));
        self.wait_us = self.first_wait_us();
        self.again_us = (self.said > 0).then_some(now_us + self.wait_us);
    }

    fn first_wait_us(&self) -> u64 {
        self.rtt_us.map_or(FIRST_WAIT_US, |rtt_us| (3 * rtt_us).max(FIRST_WAIT_US))
    }

    /// What is to be said now.
    pub fn poll(&mut self, now_us: u64) -> Vec<Control> {
        if self.again_us.is_some_and(|at_us| at_us <= now_us) {
            self.said = 0;
            self.wait_us = (2 * self.wait_us).min(LONGEST_WAIT_US);
        }
        if self.said == self.bytes.len() {
            return Vec::new();
        }
        let wait_us = self.wait_us.max(self.first_wait_us());
        self.again_us = Some(now_us + wait_us);
        self.wait_us = wait_us;
        let (from, all) = (self.said, self.bytes.len());
        self.said = all;
        (from..all)
            .step_by(MAX_CLEARED)
            .map(|at| {
                let bytes = self.bytes.range(at..all.min(at + MAX_CLEARED)).copied().collect();
                Control::Clear { first: self.first + at as u64, stamp_us: now_us, bytes }
            })
            .collect()
    }

    /// When [`Clearance::poll`] has something to say again.
    pub fn deadline_us(&self) -> Option<u64> {
        if self.said < self.bytes.len() {
            return Some(0);
        }
        self.again_us.filter(|_| !self.bytes.is_empty())
    }
}

/// The sender's part.
#[derive(Debug, Default)]
pub struct Cleared {
    /// The first message of which nothing is known.
    next: u64,
    /// Lengths of receives from `first` on.
    first: u64,
    bytes: VecDeque<u64>,
}

impl Cleared {
    /// The receiver has said what is posted; gives the answer. `most`: messages that may be in flight at once.
    pub fn on_clear(&mut self, first: u64, stamp_us: u64, bytes: &[u64], most: u32) -> Control {
        let known = self.next.saturating_sub(first);
        if first <= self.next && known < bytes.len() as u64 {
            for bytes in &bytes[known as usize..] {
                // A receiver that clears more than there are slots is out of its mind.
                if self.bytes.len() < most as usize {
                    self.bytes.push_back(*bytes);
                    self.next += 1;
                }
            }
        }
        Control::Cleared { next: self.next, stamp_us }
    }

    /// Bytes of the receive of a message, if it is clear to be sent.
    pub fn of(&self, seq: u64) -> Option<u64> {
        self.bytes.get(seq.checked_sub(self.first)? as usize).copied()
    }

    /// All messages before this one are finished.
    pub fn forget(&mut self, before: u64) {
        while self.first < before && self.bytes.pop_front().is_some() {
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk(said: &[Control], to: &mut Cleared) -> Vec<(u64, u64)> {
        said.iter()
            .map(|m| match m {
                Control::Clear { first, stamp_us, bytes } => match to.on_clear(*first, *stamp_us, bytes, 1000) {
                    Control::Cleared { next, stamp_us } => (next, stamp_us),
                    other => panic!("{other:?}"),
                },
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn what_is_lost_is_said_again_until_it_is_known() {
        let (mut r, mut s) = (Clearance::default(), Cleared::default());
        (0..100).for_each(|bytes| r.posted(bytes));
        let said = r.poll(0);
        assert_eq!(said.len(), 2, "64 receives a message");
        assert_eq!(talk(&said[1..], &mut s), [(0, 0)], "a gap: nothing is known");
        assert!(r.poll(FIRST_WAIT_US - 1).is_empty());
        let said = r.poll(FIRST_WAIT_US);
        assert_eq!(talk(&said[..1], &mut s), [(64, FIRST_WAIT_US)]);
        assert_eq!((s.of(63), s.of(64)), (Some(63), None));
        r.on_cleared(64, FIRST_WAIT_US, 15_000);
        r.on_cleared(64, FIRST_WAIT_US, 15_000);
        let at_us = r.deadline_us().unwrap();
        let said = r.poll(at_us);
        assert_eq!(talk(&said, &mut s), [(100, at_us)]);
        assert_eq!(talk(&said, &mut s), [(100, at_us)], "twice is once");
        r.on_cleared(100, at_us, at_us);
        assert_eq!(r.deadline_us(), None);
        s.forget(99);
        assert_eq!((s.of(98), s.of(99), s.of(100)), (None, Some(99), None));
    }

    #[test]
    fn a_receiver_out_of_its_mind_fills_nothing() {
        let mut s = Cleared::default();
        for i in 0..100 {
            s.on_clear(i * 64, 0, &[1; 64], 16);
        }
        assert_eq!((s.of(15), s.of(16)), (Some(1), None));
        s.on_clear(u64::MAX, 0, &[1; 64], 16);
        s.on_clear(0, 0, &[], 16);
    }
}
