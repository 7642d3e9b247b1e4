//! A stream: frames in order from one rank to another, whatever carries them.
//!
//! There is one for each rail between two ranks that exchange something over it, and one through
//! memory. Frames have numbers; frame *n* lies in slot *n* mod [`Tx::new`]'s `slots`, at both ends,
//! and stays in the sender's slot until the receiver has done with it.
//!
//! | count | of | grows when |
//! | --- | --- | --- |
//! | `staged` | sender | a frame was put into its slot |
//! | `posted` | sender | it was given to a queue pair; goes **back** at a migration |
//! | `arrived` | receiver | the next frame in order lies complete in its slot |
//! | `used` | receiver | its payload was taken out |
//! | `freed` | sender | it has heard of `used` |
//!
//! `freed <= used <= arrived <= staged`, `freed <= posted <= staged <= freed + slots`.
//!
//! A stream that leaves a path goes on at `arrived`, *as the receiver says it once nothing more can
//! come over that path*. The sender knows only what it has posted, and what completed; what
//! completed lies in the receiver's memory, but the receiver may never have been told (its
//! completion was lost with its queue pair), so the sender's own count would leave a gap. A
//! completion that the receiver polls late makes a frame arrive that comes a second time, and is
//! dropped by its number.

use crate::frame::widen;

/// What a peer has said that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Impossible;

/// The sending end.
#[derive(Clone, Debug)]
pub struct Tx {
    slots: u64,
    staged: u64,
    posted: u64,
    freed: u64,
    /// The rail that carries it.
    carrier: Option<u8>,
    /// It is to leave its carrier by choice, and posts nothing until all that it posted has been
    /// used.
    leaves: bool,
    /// Posted to its carrier and not complete. What was used already may be among it: it came
    /// twice.
    on_way: u32,
    /// Bytes of the frames in the slots.
    lens: Vec<u32>,
}

impl Tx {
    /// A stream with so many slots.
    pub fn new(slots: u64) -> Tx {
        Tx {
            slots,
            staged: 0,
            posted: 0,
            freed: 0,
            carrier: None,
            leaves: false,
            on_way: 0,
            lens: vec![0; slots as usize],
        }
    }

    /// The rail that carries it now.
    pub fn carrier(&self) -> Option<u8> {
        self.carrier
    }

    /// Whether a slot is free.
    pub fn has_room(&self) -> bool {
        self.staged - self.freed < self.slots
    }

    /// Puts a frame of so many bytes in line and gives its number. Only with room.
    pub fn stage(&mut self, bytes: u32) -> u64 {
        debug_assert!(self.has_room());
        let seq = self.staged;
        self.lens[(seq % self.slots) as usize] = bytes;
        self.staged += 1;
        seq
    }

    /// The number that the next frame to be staged will have.
    pub fn next(&self) -> u64 {
        self.staged
    }

    /// The next frame to be posted and its bytes, if it may be.
    pub fn to_post(&self) -> Option<(u64, u32)> {
        let may = self.carrier.is_some() && !self.leaves && self.posted < self.staged;
        may.then(|| (self.posted, self.lens[(self.posted % self.slots) as usize]))
    }

    /// It was posted.
    pub fn was_posted(&mut self) {
        self.posted += 1;
        self.on_way += 1;
    }

    /// Something that was posted to its carrier is complete.
    pub fn was_sent(&mut self) {
        self.on_way = self.on_way.saturating_sub(1);
    }

    /// The receiver has done with so many frames.
    pub fn on_credit(&mut self, low: u32) -> Result<(), Impossible> {
        self.on_used(widen(low, self.freed))
    }

    /// The receiver has done with `used` frames since the stream began. A count that is older than
    /// one before changes nothing.
    pub fn on_used(&mut self, used: u64) -> Result<(), Impossible> {
        // What was posted before a migration may have arrived, so that more is used than is posted
        // now.
        if used > self.staged {
            return Err(Impossible);
        }
        self.freed = self.freed.max(used);
        self.posted = self.posted.max(self.freed);
        Ok(())
    }

    /// Its carrier is gone. It posts nothing until [`Tx::resume`].
    pub fn halt(&mut self) {
        self.carrier = None;
        self.leaves = false;
        self.on_way = 0;
    }

    /// It is carried by this rail from now on. After a failure `arrived` says where it goes on.
    pub fn resume(&mut self, rail: u8, arrived: Option<u64>) -> Result<(), Impossible> {
        if let Some(arrived) = arrived {
            if arrived > self.staged {
                return Err(Impossible);
            }
            // While it waited for a path it may have heard of frames that were polled late.
            self.posted = arrived.max(self.freed);
        }
        self.carrier = Some(rail);
        self.leaves = false;
        Ok(())
    }

    /// Where it would go on by what this end knows alone: all that it has posted. Wrong; for tests
    /// that prove it.
    pub fn own_count(&self) -> u64 {
        self.posted
    }

    /// It shall leave its carrier once nothing is on its way.
    pub fn leave(&mut self) {
        self.leaves = true;
    }

    /// It stays on its carrier after all: what it would have gone to has failed.
    pub fn stay(&mut self) {
        self.leaves = false;
    }

    /// Whether it has left: nothing that was posted is on its way, not even for the second time, to
    /// overwrite what comes by another way.
    pub fn has_left(&self) -> bool {
        self.leaves && self.posted == self.freed && self.on_way == 0
    }

    /// Whether all frames have been used by the receiver.
    pub fn is_drained(&self) -> bool {
        self.freed == self.staged
    }
}

/// The receiving end.
#[derive(Clone, Debug)]
pub struct Rx {
    slots: u64,
    arrived: u64,
    used: u64,
    credited: u64,
}

impl Rx {
    /// A stream with so many slots.
    pub fn new(slots: u64) -> Rx {
        Rx { slots, arrived: 0, used: 0, credited: 0 }
    }

    /// A frame lies in its slot. `false`: it was there already.
    pub fn on_frame(&mut self, low: u32) -> Result<bool, Impossible> {
        let fresh = self.awaits(widen(low, self.arrived))?;
        self.arrived += u64::from(fresh);
        Ok(fresh)
    }

    /// Whether a frame is the next to arrive. `false`: it is there already.
    pub fn awaits(&self, seq: u64) -> Result<bool, Impossible> {
        match seq {
            _ if seq > self.arrived || seq >= self.used + self.slots => Err(Impossible),
            _ => Ok(seq == self.arrived),
        }
    }

    /// The frame that is to be used next, if it has arrived.
    pub fn next(&self) -> Option<u64> {
        (self.used < self.arrived).then_some(self.used)
    }

    /// It was used.
    pub fn was_used(&mut self) {
        self.used += 1;
    }

    /// What has arrived, and what was used: what the sender is told when a path has failed.
    pub fn counts(&self) -> (u64, u64) {
        (self.arrived, self.used)
    }

    /// The count that the sender should be told now: a quarter of the slots is free that it does
    /// not know of, or all that came is used.
    pub fn credit_due(&self) -> Option<u64> {
        let unsaid = self.used - self.credited;
        (unsaid > 0 && (4 * unsaid >= self.slots || self.used == self.arrived)).then_some(self.used)
    }

    /// The sender was told.
    pub fn was_credited(&mut self, count: u64) {
        self.credited = self.credited.max(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_used_again_only_when_the_receiver_has_done_with_it() {
        let (mut tx, mut rx) = (Tx::new(2), Rx::new(2));
        tx.resume(0, None).unwrap();
        assert_eq!((tx.stage(10), tx.stage(20), tx.has_room()), (0, 1, false));
        assert_eq!(tx.to_post(), Some((0, 10)));
        tx.was_posted();
        assert_eq!((rx.on_frame(0), rx.next()), (Ok(true), Some(0)));
        rx.was_used();
        assert_eq!(rx.credit_due(), Some(1));
        rx.was_credited(1);
        tx.on_credit(1).unwrap();
        assert!(tx.has_room() && rx.credit_due().is_none());
    }

    #[test]
    fn a_stream_goes_on_where_its_receiver_is() {
        let (mut tx, mut rx) = (Tx::new(8), Rx::new(8));
        tx.resume(0, None).unwrap();
        for _ in 0..4 {
            tx.stage(1);
            tx.was_posted();
        }
        assert_eq!(rx.on_frame(0), Ok(true));
        tx.halt();
        assert_eq!(tx.to_post(), None);
        let (arrived, used) = rx.counts();
        tx.on_used(used).unwrap();
        // a completion that was polled late
        assert_eq!(rx.on_frame(1), Ok(true));
        tx.resume(1, Some(arrived)).unwrap();
        assert_eq!(tx.to_post(), Some((1, 1)), "not its own count, which is 4");
        assert_eq!(rx.on_frame(1), Ok(false), "it comes twice, and counts once");
        assert_eq!(rx.on_frame(3), Err(Impossible), "a gap");
        assert_eq!(tx.resume(1, Some(5)), Err(Impossible), "more than there is");
    }

    #[test]
    fn leaving_by_choice_waits_until_nothing_is_on_its_way() {
        let mut tx = Tx::new(4);
        tx.resume(1, None).unwrap();
        tx.stage(1);
        tx.was_posted();
        tx.stage(1);
        tx.leave();
        assert!(tx.to_post().is_none() && !tx.has_left());
        tx.on_used(1).unwrap();
        assert!(!tx.has_left(), "it may come a second time yet");
        tx.stay();
        assert_eq!(tx.to_post(), Some((1, 1)), "nowhere to go: it goes on where it is");
        tx.leave();
        tx.was_sent();
        assert!(tx.has_left());
        tx.resume(0, None).unwrap();
        assert_eq!(tx.to_post(), Some((1, 1)));
    }
}
