//! An entry of the fault table: a fault as numbers, and when it holds.
//!
//! Whether a fault holds is a function of the time, so that schedules need no process: it holds
//! from `from_us` on, for `lasts_us`, again every `every_us`. A flap is down for the first part of
//! each of its rounds.

use crate::config::NicName;
use crate::fault::{Direction, Fault, Impairment, Place, Rail};
use crate::kind::Kind;

/// Where a fault is, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) kind: SpotKind,
    /// Host number; 0 for a switch.
    pub(crate) host: u8,
    /// NIC or rail.
    pub(crate) index: u8,
    /// Port of the NIC, or of the NICs of the rail, from 1; 0 for all.
    pub(crate) port: u8,
}

impl Spot {
    /// Whether it is at a port, from 1, or at one of all (0).
    pub(crate) fn strikes(&self, port: u8) -> bool {
        self.port == 0 || port == 0 || self.port == port
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SpotKind {
    Nic = 0,
    Cable = 1,
    Switch = 2,
    /// What joins the switches: of all NICs.
    Spine = 3,
}

/// An entry of the table, read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) spot: Spot,
    pub(crate) direction: Direction,
    /// What the kind makes of it: a share, a rate, a time.
    pub(crate) value: u64,
    /// The second value: length of a burst, time of holding back, time up.
    pub(crate) more: u64,
    pub(crate) from_us: u64,
    /// 0: for ever.
    pub(crate) lasts_us: u64,
    /// 0: once.
    pub(crate) every_us: u64,
}

impl Entry {
    /// What tells this fault from others; values and times do not.
    pub(crate) fn what(&self) -> u64 {
        let Spot { kind, host, index, port } = self.spot;
        u64::from_le_bytes([
            self.kind as u8,
            host,
            index,
            self.direction as u8,
            kind as u8,
            port,
            0,
            0,
        ])
    }

    /// The inverse of [`Entry::what`]: kind, place and direction. `None`: free, or of a newer
    /// program, and not ours to apply.
    pub(crate) fn from_what(what: u64) -> Option<Entry> {
        let [kind, host, index, direction, spot, port, ..] = what.to_le_bytes();
        let kind = *Kind::ALL.iter().find(|k| **k as u8 == kind)?;
        let direction =
            *[Direction::Both, Direction::Tx, Direction::Rx].get(usize::from(direction))?;
        let spot = *[SpotKind::Nic, SpotKind::Cable, SpotKind::Switch, SpotKind::Spine]
            .get(usize::from(spot))?;
        let spot = Spot { kind: spot, host, index, port };
        Some(Entry {
            kind,
            spot,
            direction,
            value: 0,
            more: 0,
            from_us: 0,
            lasts_us: 0,
            every_us: 0,
        })
    }

    /// A fault at a place; it has no times yet.
    pub(crate) fn of(fault: &Fault, spot: Spot) -> Entry {
        let (direction, value, more) = match *fault {
            Fault::NicDead(_) | Fault::WqeError(_) => (Direction::Both, 0, 0),
            Fault::NicDown(_) | Fault::CableCut(_) => (Direction::Both, 0, 0),
            Fault::SwitchDown { .. } | Fault::SpineDown => (Direction::Both, 0, 0),
            Fault::Flap { down_us, up_us, .. } => (Direction::Both, down_us, up_us),
            Fault::Impaired { direction, what, .. } => {
                let (value, more) = match what {
                    Impairment::Loss { ppm }
                    | Impairment::Corrupt { ppm }
                    | Impairment::Duplicate { ppm } => (u64::from(ppm), 0),
                    Impairment::BurstLoss { ppm, burst } => (u64::from(ppm), u64::from(burst)),
                    Impairment::Reorder { ppm, by_us } => (u64::from(ppm), by_us),
                    Impairment::Rate { bits_per_s } => (bits_per_s, 0),
                    Impairment::Delay { us } | Impairment::Jitter { us } => (us, 0),
                };
                (direction, value, more)
            }
        };
        Entry {
            kind: fault.kind(),
            spot,
            direction,
            value,
            more,
            from_us: 0,
            lasts_us: 0,
            every_us: 0,
        }
    }

    /// The fault, given the name of its host ("" for a switch, and for the spine).
    pub(crate) fn fault(&self, host: &str) -> Fault {
        let nic = NicName::new(host, self.spot.index).at_port(self.spot.port);
        let rail = Rail { nic: self.spot.index, port: self.spot.port };
        let place = match self.spot.kind {
            SpotKind::Nic => Place::Nic(nic.clone()),
            SpotKind::Cable => Place::Cable(nic.clone()),
            SpotKind::Switch => Place::Switch { rail },
            // It can be down, and that is all.
            SpotKind::Spine => return Fault::SpineDown,
        };
        let (value, more) = (self.value, self.more);
        let ppm = value as u32;
        let what = match self.kind {
            Kind::NicDead => return Fault::NicDead(nic),
            Kind::Down => {
                return match self.spot.kind {
                    SpotKind::Nic => Fault::NicDown(nic),
                    SpotKind::Cable => Fault::CableCut(nic),
                    SpotKind::Switch => Fault::SwitchDown { rail },
                    SpotKind::Spine => Fault::SpineDown,
                }
            }
            Kind::Flap => return Fault::Flap { place, down_us: value, up_us: more },
            Kind::WqeError => return Fault::WqeError(nic),
            Kind::Loss => Impairment::Loss { ppm },
            Kind::BurstLoss => Impairment::BurstLoss { ppm, burst: more as u32 },
            Kind::Corrupt => Impairment::Corrupt { ppm },
            Kind::Duplicate => Impairment::Duplicate { ppm },
            Kind::Reorder => Impairment::Reorder { ppm, by_us: more },
            Kind::Rate => Impairment::Rate { bits_per_s: value },
            Kind::Delay => Impairment::Delay { us: value },
            Kind::Jitter => Impairment::Jitter { us: value },
        };
        Fault::Impaired { place, direction: self.direction, what }
    }

    /// For how long of each round it holds, and the length of a round; 0 for a round that does not
    /// end.
    fn round_us(&self) -> (u64, u64) {
        match self.kind {
            Kind::Flap => (self.value, self.value.saturating_add(self.more)),
            _ => (self.lasts_us, self.every_us),
        }
    }

    /// When it is over for good; `u64::MAX` for never.
    pub(crate) fn until_us(&self) -> u64 {
        let ends = self.lasts_us != 0 && (self.every_us == 0 || self.kind == Kind::Flap);
        if ends {
            self.from_us.saturating_add(self.lasts_us)
        } else {
            u64::MAX
        }
    }

    /// When it began to hold for the last time; `None` before the first time.
    pub(crate) fn began_us(&self, now_us: u64) -> Option<u64> {
        let since_us = now_us.min(self.until_us().saturating_sub(1)).checked_sub(self.from_us)?;
        let (_, round_us) = self.round_us();
        Some(self.from_us + since_us.checked_div(round_us).unwrap_or(0) * round_us)
    }

    /// Whether it holds, and when that changes next (`u64::MAX` for never).
    pub(crate) fn at(&self, now_us: u64) -> (bool, u64) {
        let until_us = self.until_us();
        if now_us >= until_us {
            return (false, u64::MAX);
        }
        let Some(began_us) = self.began_us(now_us) else { return (false, self.from_us) };
        let (on_us, round_us) = self.round_us();
        if round_us == 0 {
            return (true, until_us);
        }
        // Without a length it only strikes when a round begins.
        if on_us != 0 && now_us - began_us < on_us {
            (true, until_us.min(began_us.saturating_add(on_us)))
        } else {
            (self.kind == Kind::WqeError, until_us.min(began_us.saturating_add(round_us)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::{FaultForm, FAULT_FORMS};

    fn entry(fault: &str, from_us: u64, lasts_us: u64, every_us: u64) -> Entry {
        let spot = Spot { kind: SpotKind::Nic, host: 1, index: 0, port: 0 };
        Entry { from_us, lasts_us, every_us, ..Entry::of(&fault.parse().unwrap(), spot) }
    }

    #[test]
    fn faults_survive_the_table() {
        let of_a_nic = |form: &&FaultForm| {
            !matches!(form.word, "cable" | "switch" | "spine") && !form.example.contains("/2 ")
        };
        for text in
            FAULT_FORMS.iter().filter(of_a_nic).map(|form| form.example).chain(["loss a/0 tx 1%"])
        {
            let entry = entry(text, 5, 6, 7);
            let read = Entry::from_what(entry.what()).unwrap();
            let read = Entry {
                value: entry.value,
                more: entry.more,
                from_us: 5,
                lasts_us: 6,
                every_us: 7,
                ..read
            };
            assert_eq!(read, entry);
            assert_eq!(read.fault("a").to_string(), text);
        }
        let spot = Spot { kind: SpotKind::Spine, host: 0, index: 0, port: 0 };
        let entry = Entry::of(&Fault::SpineDown, spot);
        assert_eq!(Entry::from_what(entry.what()), Some(entry));
        assert_eq!(entry.fault(""), Fault::SpineDown);
        let next = Kind::ALL.iter().map(|kind| *kind as u64).max().unwrap() + 1;
        for wrong in [0, next, 1 | 3 << 24, 1 | 4 << 32] {
            assert_eq!(Entry::from_what(wrong), None);
        }
    }

    #[test]
    fn a_fault_holds_for_ever_once_or_in_rounds() {
        let for_ever = entry("nic a/0 down", 100, 0, 0);
        assert_eq!(
            [99, 100, 1 << 60].map(|t| for_ever.at(t)),
            [(false, 100), (true, u64::MAX), (true, u64::MAX)]
        );
        let once = entry("nic a/0 down", 100, 10, 0);
        assert_eq!(
            [99, 100, 109, 110].map(|t| once.at(t)),
            [(false, 100), (true, 110), (true, 110), (false, u64::MAX)]
        );
        let rounds = entry("nic a/0 down", 100, 10, 50);
        assert_eq!(
            [99, 100, 109, 110].map(|t| rounds.at(t)),
            [(false, 100), (true, 110), (true, 110), (false, 150)]
        );
        assert_eq!(
            [149, 150, 160].map(|t| rounds.at(t)),
            [(false, 150), (true, 160), (false, 200)]
        );
        let flap = entry("flap a/0 down=2ms up=3ms", 1_000, 8_000, 0);
        assert_eq!(
            [1_000, 3_000, 6_000].map(|t| flap.at(t)),
            [(true, 3_000), (false, 6_000), (true, 8_000)]
        );
        assert_eq!(
            [8_000, 8_999, 9_000].map(|t| flap.at(t)),
            [(false, 9_000), (false, 9_000), (false, u64::MAX)]
        );
    }

    #[test]
    fn it_is_known_when_a_round_began() {
        let rounds = entry("wqe-error a/0", 100, 0, 50);
        assert_eq!(
            [99, 100, 149, 150].map(|t| rounds.began_us(t)),
            [None, Some(100), Some(100), Some(150)]
        );
        assert_eq!(entry("wqe-error a/0", 100, 0, 0).began_us(1_000), Some(100));
        let flap = entry("flap a/0 down=2ms up=3ms", 1_000, 8_000, 0);
        assert_eq!(flap.began_us(1 << 40), Some(6_000), "the last time before its end");
    }
}
