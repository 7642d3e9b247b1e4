//! The congestion window, in packets: slow start, then one packet more for each window
//! acknowledged.
//!
//! Silence, when nothing tells what has arrived, makes it begin anew with [`MIN_PACKETS`]: what was
//! sent may still be there, behind a peer that is kept from its core, and would come twice. What a
//! loss does depends on how it is repaired:
//! - *Go-back-N*: half the window. A loss costs all that follows it, so fewer packets are best. A
//!   window's losses count once: no other counts until everything sent before the first one was
//!   known is acknowledged.
//! - *Selective*: the window shrinks by the packets that were lost in it, but for one of
//!   [`CHANCE`], which are taken for chance. Where a socket buffer is overrun, what arrived is what
//!   fits: the window finds the right size at once. Packets that are lost at random say nothing
//!   about room, and to halve the window for each would make 1 % of loss cost most of the
//!   throughput.

use crate::encoding::psn_diff;

const INITIAL_PACKETS: u32 = 32;
const MIN_PACKETS: u32 = 2;

/// One packet of so many, and one in any window, may be lost by chance.
const CHANCE: u32 = 16;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    packets: u32,
    min: u32,
    max: u32,
    slow_start_below: u32,
    /// Packets acknowledged since the last growth by one.
    credit: u32,
    /// The PSN that must be acknowledged before another loss counts, or chance has its share again.
    recovery: Option<u32>,
    /// Packets that may yet be lost by chance in this window.
    chance: u32,
}

impl Window {
    pub(crate) fn new(max: u32) -> Window {
        let max = max.max(MIN_PACKETS);
        Window {
            packets: INITIAL_PACKETS.min(max),
            min: MIN_PACKETS,
            max,
            slow_start_below: max,
            credit: 0,
            recovery: None,
            chance: 0,
        }
    }

    pub(crate) fn packets(&self) -> u32 {
        self.packets
    }

    /// Losses say nothing about room any more, or do again: the window is no smaller than the one
    /// that a QP begins with, or may be.
    pub(crate) fn insist(&mut self, insists: bool) {
        self.min = if insists { INITIAL_PACKETS.min(self.max) } else { MIN_PACKETS };
        self.packets = self.packets.max(self.min);
    }

    /// `n` more packets are acknowledged, all before `una`.
    pub(crate) fn acknowledged(&mut self, n: u32, una: u32) {
        if self.recovery.is_some_and(|r| psn_diff(una, r) >= 0) {
            self.recovery = None;
        }
        if self.packets < self.slow_start_below {
            self.packets = (self.packets + n).min(self.max);
            return;
        }
        self.credit += n;
        if self.credit >= self.packets {
            self.credit -= self.packets;
            self.packets = (self.packets + 1).min(self.max);
        }
    }

    /// A packet before `frontier` was lost.
    pub(crate) fn lost(&mut self, frontier: u32) {
        if self.recovery.is_none() {
            self.recovery = Some(frontier);
            self.packets = (self.packets / 2).max(self.min);
            self.slow_start_below = self.packets;
            self.credit = 0;
        }
    }

    /// Nothing was heard for as long as it should take: begins anew, and doubles up to half of what
    /// it was.
    pub(crate) fn silent(&mut self) {
        if self.packets > self.min {
            self.slow_start_below = (self.packets / 2).max(self.min);
        }
        self.packets = self.min;
        (self.credit, self.recovery) = (0, None);
    }

    /// A packet before `frontier` was lost, and is repeated alone.
    pub(crate) fn lost_one(&mut self, frontier: u32) {
        if self.recovery.is_none() {
            self.recovery = Some(frontier);
            self.chance = self.packets / CHANCE + 1;
        }
        if self.chance > 0 {
            self.chance -= 1;
            return;
        }
        self.packets = (self.packets - 1).max(self.min);
        self.slow_start_below = self.packets;
        self.credit = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_halves_and_stays_in_its_bounds() {
        let mut w = Window::new(100);
        assert_eq!(w.packets(), 32);
        w.acknowledged(32, 32);
        assert_eq!(w.packets(), 64, "slow start doubles in a round trip");
        w.lost(96);
        w.lost(96);
        assert_eq!(w.packets(), 32, "the losses of one window count once");
        w.acknowledged(31, 63);
        w.acknowledged(1, 64);
        assert_eq!(w.packets(), 33, "then one packet more for a window");
        w.lost(97);
        assert_eq!(w.packets(), 33, "sent before the first loss");
        w.acknowledged(32, 96);
        w.lost(130);
        assert_eq!(w.packets(), 16);
        for n in 0..5 {
            w.acknowledged(16, 200 + n * 100);
            w.lost(300 + n * 100);
        }
        assert_eq!(w.packets(), MIN_PACKETS);
        w.acknowledged(100_000, 2000);
        (0..1000).for_each(|_| w.acknowledged(64, 2000));
        assert_eq!(w.packets(), 100);
    }
    #[test]
    fn after_silence_it_begins_anew_and_doubles_up_to_half() {
        let mut w = Window::new(256);
        w.acknowledged(224, 224);
        w.silent();
        w.silent();
        assert_eq!(w.packets(), MIN_PACKETS);
        w.acknowledged(126, 350);
        assert_eq!(w.packets(), 128);
        w.acknowledged(128, 478);
        assert_eq!(w.packets(), 129, "then one packet more for a window");
    }

    #[test]
    fn what_does_not_fit_is_taken_off_and_chance_is_not() {
        let mut w = Window::new(256);
        w.acknowledged(224, 224);
        assert_eq!(w.packets(), 256);
        (0..17).for_each(|_| w.lost_one(480));
        assert_eq!(w.packets(), 256, "one of sixteen, and one");
        (0..100).for_each(|_| w.lost_one(480));
        assert_eq!(w.packets(), 156, "a buffer that held the rest");
        w.acknowledged(256, 480);
        w.lost_one(700);
        assert_eq!(w.packets(), 157, "one more, as in every window");
        (0..1000).for_each(|_| w.lost_one(700));
        assert_eq!(w.packets(), MIN_PACKETS);
    }
}
