//! Order-based matching: the *n*-th send is written into the *n*-th receive, once the receiver has
//! announced that receive.
//!
//! The receiver announces posted receives with [`Control::Clear`]: immediately, and again after a
//! timeout that doubles, until the sender acknowledges them. The sender acknowledges with
//! [`Control::Cleared`]. Both messages are cumulative, so loss and duplication are harmless. A
//! message that leaves a gap is answered with the current state.
//!
//! Invariants: the number of slots limits the announcements that the receiver repeats; the sender
//! stores the lengths of at most as many messages beyond its oldest unfinished one.

use crate::control::{max_cleared, Control};
use std::collections::VecDeque;

/// The initial timeout for repeating an announcement.
const FIRST_WAIT_US: u64 = 10_000;
/// The longest timeout.
const LONGEST_WAIT_US: u64 = 1_000_000;

/// The receiver's side.
#[derive(Debug, Default)]
pub struct Clearance {
    /// The first message that the sender has not acknowledged.
    first: u64,
    /// The lengths from there on, and the keys of each, if receives have keys.
    bytes: VecDeque<u64>,
    rkeys: VecDeque<u32>,
    /// How many of them have been announced.
    said: usize,
    again_us: Option<u64>,
    wait_us: u64,
    rtt_us: Option<u64>,
}

impl Clearance {
    /// Records that a receive for the next message has been posted, with its keys. All receives
    /// have the same number of keys.
    pub fn posted(&mut self, bytes: u64, rkeys: &[u32]) {
        self.bytes.push_back(bytes);
        self.rkeys.extend(rkeys);
    }

    /// The number of keys of each receive.
    fn channels(&self) -> usize {
        self.rkeys.len() / self.bytes.len().max(1)
    }

    /// Handles the sender's acknowledgement.
    pub fn on_cleared(&mut self, next: u64, stamp_us: u64, now_us: u64) {
        let known = next.saturating_sub(self.first).min(self.bytes.len() as u64);
        if known == 0 {
            return;
        }
        self.rkeys.drain(..known as usize * self.channels());
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

    /// Returns the messages to send now.
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
        let (from, all, channels) = (self.said, self.bytes.len(), self.channels());
        self.said = all;
        let most = max_cleared(channels);
        (from..all)
            .step_by(most)
            .map(|at| {
                let end = all.min(at + most);
                let bytes = self.bytes.range(at..end).copied().collect();
                let rkeys = self.rkeys.range(at * channels..end * channels).copied().collect();
                Control::Clear { first: self.first + at as u64, stamp_us: now_us, bytes, rkeys }
            })
            .collect()
    }

    /// When to call [`Clearance::poll`] again.
    pub fn deadline_us(&self) -> Option<u64> {
        if self.said < self.bytes.len() {
            return Some(0);
        }
        self.again_us.filter(|_| !self.bytes.is_empty())
    }
}

/// The sender's side.
#[derive(Debug, Default)]
pub struct Cleared {
    /// The first message that has not been announced.
    next: u64,
    /// The lengths of receives from `first` on, and the keys of each.
    first: u64,
    bytes: VecDeque<u64>,
    rkeys: VecDeque<u32>,
    /// The number of keys of each receive.
    channels: usize,
}

impl Cleared {
    /// Sets the number of keys of each receive of the peer: one for each channel, or none. Call
    /// this before any message arrives.
    pub fn with_keys(&mut self, channels: usize) {
        self.channels = channels;
    }

    /// Handles an announcement and returns the answer. `most` is the largest number of messages in
    /// flight.
    pub fn on_clear(
        &mut self,
        first: u64,
        stamp_us: u64,
        bytes: &[u64],
        rkeys: &[u32],
        most: u32,
    ) -> Control {
        let known = self.next.saturating_sub(first);
        let channels = self.channels;
        // With more or fewer keys than there are channels it is nothing that could be sent to.
        if first <= self.next && known < bytes.len() as u64 && rkeys.len() == channels * bytes.len()
        {
            for at in known as usize..bytes.len() {
                // A receiver that clears more than there are slots is out of its mind.
                if self.bytes.len() < most as usize {
                    self.bytes.push_back(bytes[at]);
                    self.rkeys.extend(&rkeys[at * channels..(at + 1) * channels]);
                    self.next += 1;
                }
            }
        }
        Control::Cleared { next: self.next, stamp_us }
    }

    /// The length of the receive for a message, in bytes, if the message may be sent.
    pub fn of(&self, seq: u64) -> Option<u64> {
        self.bytes.get(seq.checked_sub(self.first)? as usize).copied()
    }

    /// The key of a message for a channel, if receives have keys.
    pub fn rkey(&self, seq: u64, channel: usize) -> Option<u32> {
        if channel >= self.channels {
            return None;
        }
        let index = seq.checked_sub(self.first)? as usize;
        self.rkeys.get(index * self.channels + channel).copied()
    }

    /// Forgets all messages before this one, which are finished.
    pub fn forget(&mut self, before: u64) {
        while self.first < before && self.bytes.pop_front().is_some() {
            self.rkeys.drain(..self.channels);
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
                Control::Clear { first, stamp_us, bytes, rkeys } => {
                    match to.on_clear(*first, *stamp_us, bytes, rkeys, 1000) {
                        Control::Cleared { next, stamp_us } => (next, stamp_us),
                        other => panic!("{other:?}"),
                    }
                }
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn what_is_lost_is_said_again_until_it_is_known() {
        let (mut r, mut s) = (Clearance::default(), Cleared::default());
        (0..100).for_each(|bytes| r.posted(bytes, &[]));
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
            s.on_clear(i * 64, 0, &[1; 64], &[], 16);
        }
        assert_eq!((s.of(15), s.of(16)), (Some(1), None));
        s.on_clear(u64::MAX, 0, &[1; 64], &[], 16);
        s.on_clear(0, 0, &[], &[], 16);
    }

    #[test]
    fn keys_come_with_their_receives_whatever_is_lost() {
        const CHANNELS: usize = 3;
        let key = |seq: u64, channel: usize| (seq * 10) as u32 + channel as u32;
        let (mut r, mut s) = (Clearance::default(), Cleared::default());
        s.with_keys(CHANNELS);
        for seq in 0..100 {
            r.posted(
                seq + 7,
                &std::array::from_fn::<u32, CHANNELS, _>(|channel| key(seq, channel)),
            );
        }
        let mut now_us = 0;
        for round in 0.. {
            let said = r.poll(now_us);
            // The first half of it is lost, but once all of it is one message.
            let answers = talk(&said[said.len() / 2 * usize::from(round == 0)..], &mut s);
            r.on_cleared(answers.last().map_or(0, |(next, _)| *next), now_us, now_us);
            let Some(at_us) = r.deadline_us() else { break };
            now_us = at_us;
            assert!(round < 10);
        }
        // What is finished is forgotten with its keys.
        s.forget(20);
        assert_eq!((s.rkey(19, 0), s.of(19)), (None, None));
        for seq in 20..100 {
            assert_eq!(s.of(seq), Some(seq + 7));
            for channel in 0..CHANNELS {
                assert_eq!(s.rkey(seq, channel), Some(key(seq, channel)));
            }
        }
        assert_eq!((s.rkey(100, 0), s.rkey(50, CHANNELS)), (None, None));
        // Keys that are not one for each channel are none.
        for rkeys in [&[1, 2][..], &[]] {
            assert_eq!(
                s.on_clear(100, 0, &[5], rkeys, 1000),
                Control::Cleared { next: 100, stamp_us: 0 }
            );
        }
        assert_eq!(
            s.on_clear(100, 0, &[5], &[1, 2, 3], 1000),
            Control::Cleared { next: 101, stamp_us: 0 }
        );
    }
}
