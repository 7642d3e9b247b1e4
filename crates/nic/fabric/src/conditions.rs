//! What packets of one direction suffer, all faults taken together.

use crate::entry::Entry;
use crate::kind::Kind;
use crate::units::FULL_PPM;

/// Loss in bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst {
    /// How many packets are lost in the mean, in parts per million.
    pub ppm: u32,
    /// The mean length of a burst, in packets; at least 1.
    pub packets: u32,
}

/// What packets of one direction suffer.
///
/// Chances of several faults are those of independent ones, delays add up, the lowest rate counts,
/// and of bursts the one that loses most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// Lost at random, in parts per million.
    pub loss_ppm: u32,
    /// Lost in bursts.
    pub burst: Option<Burst>,
    /// Damaged, in parts per million.
    pub corrupt_ppm: u32,
    /// Sent twice, in parts per million.
    pub duplicate_ppm: u32,
    /// Held back, in parts per million.
    pub reorder_ppm: u32,
    /// For how long those are held back, in µs.
    pub reorder_by_us: u64,
    /// The rate in bit/s; 0 for none.
    pub rate_bits_per_s: u64,
    /// All are late by this, in µs.
    pub delay_us: u64,
    /// And by a random time up to this, in µs.
    pub jitter_us: u64,
}

impl Conditions {
    /// Packets pass unharmed.
    pub const GOOD: Conditions = Conditions {
        loss_ppm: 0,
        burst: None,
        corrupt_ppm: 0,
        duplicate_ppm: 0,
        reorder_ppm: 0,
        reorder_by_us: 0,
        rate_bits_per_s: 0,
        delay_us: 0,
        jitter_us: 0,
    };

    /// Takes an impairment in; other faults change nothing. The page is shared memory: values
    /// beyond the grammar's are cut down.
    pub(crate) fn add(&mut self, entry: &Entry) {
        let ppm = entry.value.min(u64::from(FULL_PPM)) as u32;
        let time_us = |us: u64| us.min(crate::units::MAX_TIME_US);
        match entry.kind {
            Kind::Loss => self.loss_ppm = either(self.loss_ppm, ppm),
            Kind::Corrupt => self.corrupt_ppm = either(self.corrupt_ppm, ppm),
            Kind::Duplicate => self.duplicate_ppm = either(self.duplicate_ppm, ppm),
            Kind::BurstLoss => {
                let burst = Burst { ppm, packets: entry.more.clamp(1, u64::from(u32::MAX)) as u32 };
                if self.burst.is_none_or(|b| b.ppm < burst.ppm) {
                    self.burst = Some(burst);
                }
            }
            Kind::Reorder => {
                self.reorder_ppm = either(self.reorder_ppm, ppm);
                self.reorder_by_us = self.reorder_by_us.max(time_us(entry.more));
            }
            Kind::Rate => {
                let rate = entry.value.max(1);
                let lower = self.rate_bits_per_s == 0 || rate < self.rate_bits_per_s;
                self.rate_bits_per_s = if lower { rate } else { self.rate_bits_per_s };
            }
            Kind::Delay => self.delay_us = self.delay_us.saturating_add(time_us(entry.value)),
            Kind::Jitter => self.jitter_us = self.jitter_us.saturating_add(time_us(entry.value)),
            Kind::NicDead | Kind::Down | Kind::Flap | Kind::WqeError => {}
        }
    }
}

/// The chance that one of two independent things happens.
fn either(a: u32, b: u32) -> u32 {
    let (a, b, full) = (u64::from(a), u64::from(b), u64::from(FULL_PPM));
    (a + b - a * b / full) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{Spot, SpotKind};

    fn of(faults: &[&str]) -> Conditions {
        let mut conditions = Conditions::GOOD;
        let spot = Spot { kind: SpotKind::Nic, host: 1, index: 0, port: 0 };
        for fault in faults {
            conditions.add(&Entry::of(&fault.parse().unwrap(), spot));
        }
        conditions
    }

    #[test]
    fn faults_add_up() {
        assert_eq!(of(&[]), Conditions::GOOD);
        let all = of(&[
            "loss a/0 50%",
            "loss cable a/0 50%",
            "delay a/0 5ms",
            "delay rail0 3ms",
            "jitter a/0 1ms",
        ]);
        assert_eq!((all.loss_ppm, all.delay_us, all.jitter_us), (750_000, 8_000, 1_000));
        let all = of(&["rate a/0 1Gbit", "rate rail0 10Mbit", "rate cable a/0 1Gbit"]);
        assert_eq!(all.rate_bits_per_s, 10_000_000);
        let all = of(&[
            "burst-loss a/0 1% burst=8",
            "burst-loss rail0 2% burst=3",
            "reorder a/0 1% by=1ms",
        ]);
        assert_eq!(all.burst, Some(Burst { ppm: 20_000, packets: 3 }));
        assert_eq!((all.reorder_ppm, all.reorder_by_us), (10_000, 1_000));
        assert_eq!(of(&["corrupt a/0 100%", "corrupt rail0 100%"]).corrupt_ppm, FULL_PPM);
    }
}
