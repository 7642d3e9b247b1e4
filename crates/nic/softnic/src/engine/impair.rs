//! What an impaired link does to packets: it loses, delays, damages, repeats and reorders them, and
//! keeps to a rate.
//!
//! Each port has one [`Impair`] for what leaves and one for what arrives, only while something is
//! wrong there: a NIC whose links are well costs the packet path one compare.
//! Packets that are only lost at random are never copied. All others are copied and held until they
//! are due, in the order of their times; the engine's timers count these.
//!
//! In order: a packet is lost, or takes its place on the line (where a rate is set), is late by
//! delay and jitter, and perhaps comes twice, damaged or out of turn. The line of a port is shared
//! by all processes of the NIC. What leaves is held back at its source: the QPs of the port wait
//! while the line is taken for [`AHEAD_US`]. What arrives cannot wait: the queue is as long as rate
//! and delay need, with [`SLACK_BYTES`] more, and what does not fit is lost.
//!
//! Invariants: one port's faults change nothing for the packets of another; packets without jitter
//! and reordering keep their order; no more than the limit's bytes are held. When the link is well
//! again, what is held is due at once; when nothing passes any more, it is lost; when the NIC is
//! closed, it leaves.

use super::dest::Dest;
use crate::faults::Dice;
use crate::socket::Marks;
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use unbroken_fabric::{Conditions, Line, MAX_PORTS};
use unbroken_wire::IcrcFlow;

/// QPs wait while the line is taken for longer than this.
const AHEAD_US: u64 = 500;
/// Bytes that a queue may hold beyond what rate and delay need, like the buffer of a switch.
const SLACK_BYTES: u64 = 1 << 20;
/// Bytes that a queue may hold at most.
const HELD_BYTES: u64 = 64 << 20;
/// What holding a packet takes beside its bytes, about.
const PACKET_BYTES: usize = 256;
/// Damage strikes behind the first bytes of the BTH: one of them is not covered by the ICRC.
const UNHARMED_BYTES: usize = 8;

/// A packet on its way.
pub(super) struct Held<T> {
    due_us: u64,
    /// Counts, so that packets that are due at one time keep their order.
    number: u64,
    pub(super) tag: T,
    pub(super) bytes: Vec<u8>,
    /// The packet is to be damaged: chooses the bit.
    pub(super) damage: Option<u64>,
}

impl<T> Ord for Held<T> {
    /// The one that is due first is the greatest, as a heap wants it.
    fn cmp(&self, other: &Held<T>) -> Ordering {
        (other.due_us, other.number).cmp(&(self.due_us, self.number))
    }
}

impl<T> PartialOrd for Held<T> {
    fn partial_cmp(&self, other: &Held<T>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Held<T> {
    fn eq(&self, other: &Held<T>) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Held<T> {}

/// Flips one bit of a packet, which its ICRC then does not fit any more.
pub(super) fn flip_bit(packet: &mut [u8], choice: u64) {
    let Some(tail) = packet.get_mut(UNHARMED_BYTES..).filter(|t| !t.is_empty()) else { return };
    let bit = choice % (tail.len() as u64 * 8);
    tail[(bit / 8) as usize] ^= 1 << (bit % 8);
}

/// One direction of a port's impaired link.
pub(crate) struct Impair<T> {
    conditions: Conditions,
    dice: Dice,
    /// The link is in a burst of loss.
    bad: bool,
    held: BinaryHeap<Held<T>>,
    held_bytes: usize,
    limit_bytes: usize,
    number: u64,
    /// When the last packet is due that was not out of turn.
    last_due_us: u64,
}

impl<T: Copy> Impair<T> {
    pub(super) fn new(seed: u64) -> Impair<T> {
        Impair {
            conditions: Conditions::GOOD,
            dice: Dice::new(seed),
            bad: false,
            held: BinaryHeap::new(),
            held_bytes: 0,
            limit_bytes: 0,
            number: 0,
            last_due_us: 0,
        }
    }

    pub(super) fn set(&mut self, conditions: Conditions) {
        if conditions == self.conditions {
            return;
        }
        let c = &conditions;
        let time_us = c.delay_us.saturating_add(c.jitter_us).saturating_add(c.reorder_by_us);
        let needed = u128::from(c.rate_bits_per_s / 8) * u128::from(time_us) / 1_000_000
            + u128::from(SLACK_BYTES);
        let limit = if c.rate_bits_per_s == 0 {
            u128::from(HELD_BYTES)
        } else {
            needed.min(u128::from(HELD_BYTES))
        };
        self.limit_bytes = limit as usize;
        self.conditions = conditions;
        self.last_due_us = 0;
        if !self.holds() {
            let all = std::mem::take(&mut self.held).into_iter();
            self.held = all.map(|h| Held { due_us: 0, ..h }).collect();
        }
    }

    /// Whether packets must be copied and held, be it for no time.
    pub(super) fn holds(&self) -> bool {
        let c = &self.conditions;
        let late = c.rate_bits_per_s != 0 || c.delay_us != 0 || c.jitter_us != 0;
        late || c.corrupt_ppm != 0 || c.duplicate_ppm != 0 || c.reorder_ppm != 0
    }

    /// Whether the next packet is lost.
    pub(super) fn loses(&mut self) -> bool {
        let burst = self.conditions.burst.is_some_and(|b| {
            // Gilbert's model. Good becomes bad so often that the share of bad is the loss.
            let (share, ends) = (f64::from(b.ppm) / 1e6, 1.0 / f64::from(b.packets.max(1)));
            let change =
                if self.bad { ends } else { (share * ends / (1.0 - share).max(1e-9)).min(1.0) };
            self.bad ^= self.dice.happens(change);
            self.bad
        });
        burst || self.dice.chance(self.conditions.loss_ppm)
    }

    /// Until when senders must wait; a time in the past if they need not.
    pub(super) fn blocked_until_us(&self, now_us: u64, line: &Line) -> u64 {
        match self.conditions.rate_bits_per_s {
            0 => 0,
            _ => line.free_us(now_us).saturating_sub(AHEAD_US),
        }
    }

    /// Holds a packet that takes `wire_bytes` on the line. False: there is no room, and it is lost.
    pub(super) fn hold(
        &mut self,
        now_us: u64,
        line: &Line,
        wire_bytes: usize,
        bytes: Vec<u8>,
        tag: T,
    ) -> bool {
        let c = self.conditions;
        let copy = self.dice.chance(c.duplicate_ppm).then(|| bytes.clone());
        let taken = self.hold_one(now_us, line, wire_bytes, bytes, tag);
        taken && copy.is_none_or(|copy| self.hold_one(now_us, line, wire_bytes, copy, tag))
    }

    fn hold_one(
        &mut self,
        now_us: u64,
        line: &Line,
        wire_bytes: usize,
        bytes: Vec<u8>,
        tag: T,
    ) -> bool {
        let c = self.conditions;
        if self.held_bytes + bytes.len() + PACKET_BYTES > self.limit_bytes {
            return false;
        }
        let rate = c.rate_bits_per_s;
        let left_us =
            if rate == 0 { now_us } else { line.take(now_us, wire_bytes, rate).max(now_us) };
        let jitter_us = if c.jitter_us == 0 { 0 } else { self.dice.below(c.jitter_us + 1) };
        let mut due_us =
            left_us.saturating_add(c.delay_us).saturating_add(jitter_us).max(self.last_due_us);
        if self.dice.chance(c.reorder_ppm) {
            due_us = due_us.saturating_add(c.reorder_by_us);
        } else {
            self.last_due_us = due_us;
        }
        let damage = self.dice.chance(c.corrupt_ppm).then(|| self.dice.next());
        self.held_bytes += bytes.len() + PACKET_BYTES;
        self.number += 1;
        self.held.push(Held { due_us, number: self.number, tag, bytes, damage });
        true
    }

    /// When the next packet is due.
    fn due_us(&self) -> u64 {
        self.held.peek().map_or(u64::MAX, |h| h.due_us)
    }

    /// Takes a packet that is due.
    pub(super) fn pop(&mut self, now_us: u64) -> Option<Held<T>> {
        if self.due_us() > now_us {
            return None;
        }
        let held = self.held.pop()?;
        self.held_bytes -= held.bytes.len() + PACKET_BYTES;
        Some(held)
    }

    /// Loses what is held; gives how many packets that were.
    pub(super) fn lose_all(&mut self) -> u64 {
        self.held_bytes = 0;
        self.held.drain().count() as u64
    }
}

/// What must be known of a packet that leaves later; its bytes are header and payload.
#[derive(Clone, Copy)]
pub(crate) struct TxTag {
    pub(super) dest: Dest,
    pub(super) socket: usize,
    pub(super) header_bytes: usize,
    pub(super) control: bool,
}

/// What must be known of a packet that arrives later; its bytes are those of the datagram.
#[derive(Clone, Copy)]
pub(super) struct RxTag {
    pub(super) flow: IcrcFlow,
    pub(super) marks: Marks,
    /// Its place in the run that it came in.
    pub(super) place: u16,
}

/// Both directions of a port's impaired link.
pub(super) struct ImpairedPort {
    pub(super) tx: Impair<TxTag>,
    pub(super) rx: Impair<RxTag>,
}

impl ImpairedPort {
    pub(super) fn new(seed: u64, port: usize) -> ImpairedPort {
        let seed = seed.rotate_left(34 * port as u32);
        ImpairedPort { tx: Impair::new(seed), rx: Impair::new(seed.rotate_left(17)) }
    }

    /// The link is well again, and nothing is held.
    fn is_over(&self) -> bool {
        let idle = self.tx.held.is_empty() && self.rx.held.is_empty();
        idle && [self.tx.conditions, self.rx.conditions] == WELL
    }
}

/// What packets of both directions suffer at a port that is well.
pub(super) const WELL: [Conditions; 2] = [Conditions::GOOD; 2];

/// The impaired links of a NIC, port by port; a port that is well has none.
#[derive(Default)]
pub(crate) struct Impairments(pub(super) [Option<ImpairedPort>; MAX_PORTS as usize]);

impl Impairments {
    /// What leaves through a port, from 0, if packets suffer there.
    #[inline]
    pub(super) fn tx(&mut self, port: usize) -> Option<&mut Impair<TxTag>> {
        self.0[port].as_mut().map(|i| &mut i.tx)
    }

    /// What arrives at a port, from 0, if packets suffer there.
    #[inline]
    pub(super) fn rx(&mut self, port: usize) -> Option<&mut Impair<RxTag>> {
        self.0[port].as_mut().map(|i| &mut i.rx)
    }

    /// When the next packet is due.
    #[inline]
    pub(super) fn due_us(&self) -> u64 {
        self.0.iter().flatten().map(|i| i.tx.due_us().min(i.rx.due_us())).min().unwrap_or(u64::MAX)
    }

    /// Forgets what is over; gives whether all is.
    pub(super) fn end(&mut self) -> bool {
        for port in &mut self.0 {
            port.take_if(|i| i.is_over());
        }
        self.0.iter().all(Option::is_none)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_fabric::{Burst, NicPage, Runtime};

    fn impair(conditions: Conditions) -> Impair<u32> {
        let mut i = Impair::new(7);
        i.set(conditions);
        i
    }

    /// A line of a page of its own.
    fn with_line(test: impl FnOnce(&Line)) {
        let dir = tempfile::tempdir().unwrap();
        let page =
            NicPage::open(&Runtime::at(dir.path()).unwrap(), "10.0.0.1".parse().unwrap()).unwrap();
        test(&page.lines()[0]);
    }

    #[test]
    fn losses_are_about_what_was_asked_for() {
        let mut i = impair(Conditions { loss_ppm: 100_000, ..Conditions::GOOD });
        assert!(!i.holds());
        let lost = (0..100_000).filter(|_| i.loses()).count();
        assert!((9_000..11_000).contains(&lost), "{lost}");
        let mut i = impair(Conditions { loss_ppm: 1_000_000, ..Conditions::GOOD });
        assert!((0..1000).all(|_| i.loses()));
        let mut i = impair(Conditions::GOOD);
        assert!(!(0..1000).any(|_| i.loses()));
    }

    #[test]
    fn bursts_have_their_length_and_their_share() {
        for (ppm, packets) in [(10_000, 8), (200_000, 50), (500_000, 1)] {
            let mut i =
                impair(Conditions { burst: Some(Burst { ppm, packets }), ..Conditions::GOOD });
            let fate: Vec<bool> = (0..2_000_000).map(|_| i.loses()).collect();
            let lost = fate.iter().filter(|l| **l).count() as f64;
            let bursts = fate.windows(2).filter(|w| !w[0] && w[1]).count() as f64;
            let (share, length) =
                (lost / 2e6 * 1e6 / f64::from(ppm), lost / bursts / f64::from(packets));
            assert!(
                (0.9..1.1).contains(&share) && (0.9..1.1).contains(&length),
                "{ppm} {packets}: {share} {length}"
            );
        }
    }

    #[test]
    fn delay_and_jitter_keep_the_order_and_reordering_does_not() {
        with_line(|line| {
            let order = |conditions: Conditions| {
                let mut i = impair(conditions);
                (0..1000u32)
                    .for_each(|n| assert!(i.hold(u64::from(n) * 10, line, 100, vec![0; 100], n)));
                let mut out = Vec::new();
                for now_us in 0..100_000 {
                    while let Some(h) = i.pop(now_us) {
                        let late_us = now_us - u64::from(h.tag) * 10;
                        assert!(
                            (conditions.delay_us..=conditions.delay_us + 1_100).contains(&late_us),
                            "{late_us}"
                        );
                        out.push(h.tag);
                    }
                }
                assert_eq!((out.len(), i.held_bytes), (1000, 0));
                out
            };
            let sorted = order(Conditions { delay_us: 5_000, jitter_us: 900, ..Conditions::GOOD });
            assert!(sorted.is_sorted());
            let mixed = order(Conditions {
                reorder_ppm: 100_000,
                reorder_by_us: 1_000,
                ..Conditions::GOOD
            });
            let turned = mixed.windows(2).filter(|w| w[0] > w[1]).count();
            assert!((50..150).contains(&turned), "{turned}");
        });
    }

    #[test]
    fn what_does_not_fit_is_lost() {
        with_line(|line| {
            // 8 Mbit/s and 100 ms: 100,000 bytes, and the slack.
            let c =
                Conditions { rate_bits_per_s: 8_000_000, delay_us: 100_000, ..Conditions::GOOD };
            let mut i = impair(c);
            let held =
                (0..10_000).filter(|n| i.hold(1_000_000, line, 1000, vec![0; 1000], *n)).count();
            assert_eq!(held, (100_000 + SLACK_BYTES as usize) / (1000 + PACKET_BYTES));
            assert!(i.blocked_until_us(1_000_000, line) > 1_500_000);
            assert!(i.pop(1_090_000).is_none());
            // The link is well again: all is due.
            i.set(Conditions::GOOD);
            assert_eq!(std::iter::from_fn(|| i.pop(0)).count(), held);
            assert_eq!((i.held_bytes, i.blocked_until_us(1_000_000, line)), (0, 0));
        });
    }

    #[test]
    fn packets_are_damaged_and_repeated() {
        with_line(|line| {
            let mut i = impair(Conditions {
                corrupt_ppm: 500_000,
                duplicate_ppm: 500_000,
                ..Conditions::GOOD
            });
            (0..1000).for_each(|n| assert!(i.hold(0, line, 50, vec![0; 50], n)));
            let out: Vec<Held<u32>> = std::iter::from_fn(|| i.pop(0)).collect();
            assert!((1400..1600).contains(&out.len()));
            let damaged = out.iter().filter(|h| h.damage.is_some()).count();
            assert!((650..850).contains(&damaged));
        });
        for choice in 0..1000 {
            let mut packet = [0; 20];
            flip_bit(&mut packet, choice * 7919);
            assert_eq!(packet.iter().map(|b| b.count_ones()).sum::<u32>(), 1);
            assert_eq!(packet[..UNHARMED_BYTES], [0; UNHARMED_BYTES]);
        }
        flip_bit(&mut [0; 5], 3);
    }
}
