//! The congestion window, in packets: slow start, then one packet more for each window acknowledged; half on a loss.
//!
//! A window's losses count once: after a loss no other counts until everything sent before it is acknowledged.

use crate::encoding::psn_diff;

const INITIAL_PACKETS: u32 = 32;
const MIN_PACKETS: u32 = 2;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    packets: u32,
    max: u32,
    slow_start_below: u32,
    /// Packets acknowledged since the last growth by one.
    credit: u32,
    /// The PSN that must be acknowledged before another loss counts.
    recovery: Option<u32>,
}

impl Window {
    pub(crate) fn new(max: u32) -> Window {
        let max = max.max(MIN_PACKETS);
        Window { packets: INITIAL_PACKETS.min(max), max, slow_start_below: max, credit: 0, recovery: None }
    }

    pub(crate) fn packets(&self) -> u32 {
        self.packets
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
            self.packets = (self.packets / 2).max(MIN_PACKETS);
            self.slow_start_below = self.packets;
            self.credit = 0;
        }
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
}
