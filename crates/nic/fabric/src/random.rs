//! Schedules of random faults that come out the same for the same seed.
//!
//! Something can always survive them: of the faults that take a path away (NIC, port, cable,
//! switch, flap), one is over for a while before the next one begins. Impairments come at any time,
//! also together.

use std::time::Duration;

use crate::config::NicName;
use crate::fabric::Schedule;
use crate::fault::{Direction, Fault, Impairment, Place, Rail};
use crate::kind::{Kind, Sort};

/// Faults of a schedule.
const MOST: u64 = 100;
/// Time between two faults of a sort, in the mean.
const MEAN_PAUSE_US: u64 = 800_000;
/// For how long a fault lasts.
const LASTS_US: std::ops::Range<u64> = 50_000..1_500_000;

/// Faults on the given NICs and their switches from now on, over by `lasts`. At most 200; long
/// times have longer pauses.
///
/// ```
/// use unbroken_fabric::{random_schedule, NicName};
/// let nics = [NicName::new("a", 0), NicName::new("a", 1)];
/// let minute = std::time::Duration::from_secs(60);
/// assert_eq!(random_schedule(7, minute, &nics), random_schedule(7, minute, &nics));
/// ```
pub fn random_schedule(seed: u64, lasts: Duration, nics: &[NicName]) -> Vec<(Fault, Schedule)> {
    let end_us = u64::try_from(lasts.as_micros()).unwrap_or(u64::MAX);
    let pause_us = MEAN_PAUSE_US.max(end_us / MOST);
    let mut all: Vec<(Fault, Schedule)> = Vec::new();
    let pools = [pool(&[Sort::Breakdown]), pool(&[Sort::Strike, Sort::Impairment])];
    for (hard, pool) in [true, false].into_iter().zip(&pools) {
        let mut dice = Dice::new(seed, hard);
        let mut now_us = 0;
        for _ in 0..MOST {
            if nics.is_empty() {
                break;
            }
            let from_us = now_us + dice.range(pause_us / 2..pause_us * 3 / 2);
            let lasts_us = dice.range(LASTS_US);
            let nic = nics[dice.below(nics.len() as u64) as usize].clone();
            let kind = pool[dice.below(pool.len() as u64) as usize];
            let fault = fault(&mut dice, kind, nic);
            if from_us + lasts_us > end_us {
                break;
            }
            now_us = if hard { from_us + lasts_us } else { from_us };
            let (at, lasts) =
                (Duration::from_micros(from_us), Some(Duration::from_micros(lasts_us)));
            all.push((fault, Schedule { at, lasts, every: None }));
        }
    }
    all.sort_by_key(|(_, s)| s.at);
    all
}

/// The kinds of some sorts; those that are drawn more often are there more than once.
fn pool(sorts: &[Sort]) -> Vec<Kind> {
    let weight = |kind: Kind| match kind {
        // Of NICs, of cables, and now and then of a switch.
        Kind::Down => 5,
        Kind::NicDead => 2,
        _ => 1,
    };
    let kinds = Kind::ALL.iter().copied().filter(|kind| sorts.contains(&kind.sort()));
    kinds.flat_map(|kind| std::iter::repeat_n(kind, weight(kind))).collect()
}

/// A fault of a kind on this NIC, its cable or its switch.
fn fault(dice: &mut Dice, kind: Kind, nic: NicName) -> Fault {
    let ppm = dice.range(1..50) as u32 * 1000;
    let what = match kind {
        Kind::NicDead => return Fault::NicDead(nic),
        Kind::Down => {
            return match dice.below(5) {
                0 | 1 => Fault::NicDown(nic),
                2 | 3 => Fault::CableCut(nic),
                _ => Fault::SwitchDown { rail: Rail { nic: nic.index, port: 1 } },
            }
        }
        Kind::Flap => {
            let place = place(dice, nic);
            return Fault::Flap { place, down_us: dice.millis(5..100), up_us: dice.millis(5..200) };
        }
        Kind::WqeError => return Fault::WqeError(nic),
        Kind::Loss => Impairment::Loss { ppm },
        Kind::BurstLoss => Impairment::BurstLoss { ppm, burst: dice.range(2..20) as u32 },
        Kind::Corrupt => Impairment::Corrupt { ppm },
        Kind::Duplicate => Impairment::Duplicate { ppm },
        Kind::Reorder => Impairment::Reorder { ppm, by_us: dice.range(1..10) * 100 },
        Kind::Rate => Impairment::Rate { bits_per_s: dice.range(1..100) * 100_000_000 },
        Kind::Delay => Impairment::Delay { us: dice.range(1..20) * 100 },
        Kind::Jitter => Impairment::Jitter { us: dice.range(1..20) * 100 },
    };
    let place = place(dice, nic);
    let direction = [Direction::Both, Direction::Tx, Direction::Rx][dice.below(3) as usize];
    Fault::Impaired { place, direction, what }
}

fn place(dice: &mut Dice, nic: NicName) -> Place {
    match dice.below(3) {
        0 => Place::Nic(nic),
        1 => Place::Cable(nic),
        _ => Place::Switch { rail: Rail { nic: nic.index, port: 1 } },
    }
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn new(seed: u64, hard: bool) -> Dice {
        Dice(seed.wrapping_mul(2).wrapping_add(u64::from(hard)))
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(x ^ x >> 31) * u128::from(n)) >> 64) as u64
    }

    fn range(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    fn millis(&mut self, range: std::ops::Range<u64>) -> u64 {
        self.range(range) * 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nics() -> Vec<NicName> {
        ["a", "b"].iter().flat_map(|h| (0..4).map(|n| NicName::new(h, n))).collect()
    }

    #[test]
    fn a_seed_says_it_all() {
        let minute = Duration::from_secs(60);
        let one = random_schedule(7, minute, &nics());
        assert_eq!(one, random_schedule(7, minute, &nics()));
        assert_ne!(one, random_schedule(8, minute, &nics()));
        assert!(one.len() > 50, "{}", one.len());
        assert!(random_schedule(7, minute, &[]).is_empty());
    }

    #[test]
    fn every_kind_comes() {
        let schedules =
            (0..20).flat_map(|seed| random_schedule(seed, Duration::from_secs(60), &nics()));
        let drawn: Vec<Kind> = schedules.map(|(fault, _)| fault.kind()).collect();
        for kind in Kind::ALL {
            let count = drawn.iter().filter(|k| *k == kind).count();
            assert!(count > 20, "{kind:?} comes {count} times");
        }
    }

    #[test]
    fn schedules_are_bounded_and_leave_something_alive() {
        for seed in 0..200 {
            let lasts = Duration::from_secs(10 + seed * 50);
            let schedule = random_schedule(seed, lasts, &nics());
            assert!(schedule.len() <= 2 * MOST as usize);
            let mut free = Duration::ZERO;
            for (fault, when) in &schedule {
                assert_eq!(&fault.to_string().parse::<Fault>().unwrap(), fault);
                let over = when.at + when.lasts.unwrap();
                assert!(over <= lasts);
                if fault.kind().sort() == Sort::Breakdown {
                    assert!(when.at > free);
                    free = over;
                }
            }
        }
    }
}
