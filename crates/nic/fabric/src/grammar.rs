//! Reading faults.
//!
//! `KIND PLACE [tx|rx] VALUES`, values in any order, the direction anywhere after the place. Every
//! error names the wrong word and says what would be right.

use crate::config::NicName;
use crate::error::{FabricError, Result};
use crate::fault::{Direction, Fault, Impairment, Place, Rail};
use crate::kind::{Kind, FAULT_FORMS};
use crate::units::{parse_rate, parse_share, parse_time_us, Share, FULL_PPM};

/// For how long a reordered packet is held back where nothing is said.
const REORDER_BY_US: u64 = 200;
/// Longest delay, jitter and holding back.
const MAX_DELAY_US: u64 = 10_000_000;
/// Shortest part of a flap.
const MIN_FLAP_US: u64 = 1_000;
/// Longest mean burst, in packets.
const MAX_BURST: u32 = 100_000;

/// Reads a fault.
pub(crate) fn parse(text: &str) -> Result<Fault> {
    let words = Words::of(text)?;
    match words.kind {
        Kind::NicDead | Kind::Down => words.of_a_path(),
        Kind::Flap => words.flap(),
        Kind::WqeError => words.wqe_error(),
        Kind::Loss | Kind::BurstLoss | Kind::Corrupt | Kind::Duplicate => words.impaired(),
        Kind::Reorder | Kind::Rate | Kind::Delay | Kind::Jitter => words.impaired(),
    }
}

/// Reads a whole fault, or the first words of faults: kind and place, perhaps a direction. Gives
/// the words as faults show them, and a fault that they could name.
pub(crate) fn parse_selector(text: &str) -> Result<(String, Fault)> {
    let error = match parse(text) {
        Ok(fault) => return Ok((fault.to_string(), fault)),
        Err(e) => e,
    };
    let mut words = Words::of(text)?;
    let word = words.word;
    let example = match (word, &words.rest[..]) {
        ("nic", [nic]) => Fault::NicDown(nic.parse()?),
        ("cable", [nic]) => Fault::CableCut(nic.parse()?),
        ("switch", [rail]) => Fault::SwitchDown { rail: rail_of(rail)? },
        ("spine", []) => return Ok(("spine down".into(), Fault::SpineDown)),
        ("nic" | "cable" | "switch" | "spine", _) => return Err(error),
        _ => {
            let place = words.place()?;
            let direction = words.direction()?;
            if !words.rest.is_empty() {
                return Err(error);
            }
            let what = Impairment::Loss { ppm: FULL_PPM };
            let text = match direction {
                Direction::Both => format!("{word} {place}"),
                Direction::Tx => format!("{word} {place} tx"),
                Direction::Rx => format!("{word} {place} rx"),
            };
            return Ok((text, Fault::Impaired { place, direction, what }));
        }
    };
    Ok((format!("{word} {}", words.rest[0]), example))
}

/// The rail that is named.
fn rail_of(text: &str) -> Result<Rail> {
    let number = text.strip_prefix("rail").unwrap_or("");
    let (number, port) = number.strip_suffix('b').map_or((number, 1), |number| (number, 2));
    let nic =
        Some(number).filter(|n| n.bytes().all(|b| b.is_ascii_digit())).and_then(|n| n.parse().ok());
    nic.map(|nic| Rail { nic, port }).ok_or_else(|| {
        FabricError::Name(format!(
            "'{text}' is not the name of a switch; a switch is named like 'rail0', that of second \
             ports 'rail0b'"
        ))
    })
}

/// The forms that begin with a word, or all.
fn forms(word: Option<&str>) -> String {
    let forms = FAULT_FORMS.iter().filter(|form| word.is_none_or(|word| form.word == word));
    forms.map(|form| format!("'{}'", form.example)).collect::<Vec<_>>().join(", ")
}

/// The words of a fault that have not been understood yet.
struct Words<'a> {
    text: &'a str,
    word: &'static str,
    /// What the word stands for; of several kinds the first.
    kind: Kind,
    rest: Vec<&'a str>,
}

impl<'a> Words<'a> {
    fn of(text: &'a str) -> Result<Words<'a>> {
        let mut rest: Vec<&str> = text.split_whitespace().collect();
        let known =
            rest.first().and_then(|word| FAULT_FORMS.iter().find(|form| form.word == *word));
        let unknown = match (known, rest.first()) {
            (Some(form), _) => {
                rest.remove(0);
                return Ok(Words { text, word: form.word, kind: form.kind, rest });
            }
            (None, Some(word)) => format!("'{word}' is not known"),
            (None, None) => "nothing is there".into(),
        };
        Err(FabricError::Name(format!("fault '{text}': {unknown}; faults are {}", forms(None))))
    }

    fn wrong(&self, what: String) -> FabricError {
        FabricError::Name(format!(
            "fault '{}': {what}; right is {}",
            self.text,
            forms(Some(self.word))
        ))
    }

    /// A fault that takes a path away.
    fn of_a_path(self) -> Result<Fault> {
        match (self.word, &self.rest[..]) {
            ("nic", [nic, "dead"]) => Ok(Fault::NicDead(self.whole(nic.parse()?)?)),
            ("nic", [nic, "down"]) => Ok(Fault::NicDown(nic.parse()?)),
            ("cable", [nic, "cut"]) => Ok(Fault::CableCut(nic.parse()?)),
            ("switch", [rail, "down"]) => Ok(Fault::SwitchDown { rail: rail_of(rail)? }),
            ("spine", ["down"]) => Ok(Fault::SpineDown),
            ("spine", _) => Err(self.wrong("the spine can be 'down'".into())),
            ("nic", [_, state]) => {
                Err(self.wrong(format!("a NIC can be 'dead' or 'down', not '{state}'")))
            }
            ("cable", [_, state]) => {
                Err(self.wrong(format!("a cable can be 'cut', not '{state}'")))
            }
            ("switch", [_, state]) => {
                Err(self.wrong(format!("a switch can be 'down', not '{state}'")))
            }
            _ => Err(self.wrong("three words are right".into())),
        }
    }

    /// A NIC, not one of its ports: what befalls all of it.
    fn whole(&self, nic: NicName) -> Result<NicName> {
        let name = nic.at_port(0);
        (nic.port == 0)
            .then_some(nic)
            .ok_or_else(|| self.wrong(format!("this is of a NIC as a whole, '{name}'")))
    }

    fn flap(mut self) -> Result<Fault> {
        let place = self.place()?;
        let (down_us, up_us) = (self.flap_time("down")?, self.flap_time("up")?);
        self.nothing_more("")?;
        Ok(Fault::Flap { place, down_us, up_us })
    }

    fn wqe_error(mut self) -> Result<Fault> {
        let Place::Nic(nic) = self.place()? else {
            return Err(self.wrong("only a NIC has work requests".into()));
        };
        let nic = self.whole(nic)?;
        self.nothing_more("")?;
        Ok(Fault::WqeError(nic))
    }

    fn impaired(mut self) -> Result<Fault> {
        let place = self.place()?;
        let direction = self.direction()?;
        let what = self.impairment()?;
        self.nothing_more(" (a direction is 'tx' or 'rx')")?;
        Ok(Fault::Impaired { place, direction, what })
    }

    /// All words have been understood.
    fn nothing_more(&self, hint: &str) -> Result<()> {
        match self.rest.first() {
            None => Ok(()),
            Some(word) => Err(self.wrong(format!("'{word}' is not understood{hint}"))),
        }
    }

    fn impairment(&mut self) -> Result<Impairment> {
        Ok(match self.kind {
            Kind::Rate => Impairment::Rate { bits_per_s: self.value("a rate", parse_rate)? },
            Kind::Delay => Impairment::Delay { us: self.value("a time", delay)? },
            Kind::Jitter => Impairment::Jitter { us: self.value("a time", delay)? },
            Kind::BurstLoss => {
                let burst = self.burst()?;
                let ppm = self.value("a share", parse_share)?;
                self.check_burst(ppm, burst)?;
                Impairment::BurstLoss { ppm, burst }
            }
            Kind::Reorder => {
                let by_us = self.named("by").map_or(Ok(REORDER_BY_US), delay)?;
                Impairment::Reorder { ppm: self.value("a share", parse_share)?, by_us }
            }
            Kind::Corrupt => Impairment::Corrupt { ppm: self.value("a share", parse_share)? },
            Kind::Duplicate => Impairment::Duplicate { ppm: self.value("a share", parse_share)? },
            Kind::Loss => Impairment::Loss { ppm: self.value("a share", parse_share)? },
            Kind::NicDead | Kind::Down | Kind::Flap | Kind::WqeError => {
                return Err(self.wrong("it is not one of packets".into()))
            }
        })
    }

    /// Takes the place, which comes first.
    fn place(&mut self) -> Result<Place> {
        let (place, words) = match self.rest[..] {
            ["cable", nic, ..] => (Place::Cable(nic.parse()?), 2),
            ["nic", nic, ..] => (Place::Nic(nic.parse()?), 2),
            ["switch", rail, ..] => (Place::Switch { rail: rail_of(rail)? }, 2),
            [word, ..] if word.starts_with("rail") => (Place::Switch { rail: rail_of(word)? }, 1),
            [word, ..] => {
                let nic: NicName = word.parse().map_err(|_| {
                    self.wrong(format!(
                        "'{word}' is not a place; a NIC is named like 'a/0', a cable like 'cable \
                         a/0', a switch like 'rail0'"
                    ))
                })?;
                (Place::Nic(nic), 1)
            }
            [] => return Err(self.wrong("the place is missing".into())),
        };
        self.rest.drain(..words);
        Ok(place)
    }

    /// Takes the direction, if one is there.
    fn direction(&mut self) -> Result<Direction> {
        let found: Vec<&str> =
            self.rest.iter().copied().filter(|w| matches!(*w, "tx" | "rx")).collect();
        self.rest.retain(|w| !matches!(*w, "tx" | "rx"));
        match found[..] {
            [] => Ok(Direction::Both),
            ["tx"] => Ok(Direction::Tx),
            ["rx"] => Ok(Direction::Rx),
            _ => {
                Err(self
                    .wrong("there is more than one direction; without one both are meant".into()))
            }
        }
    }

    /// Takes the first word, as a value.
    fn value<T>(&mut self, what: &str, read: impl Fn(&str) -> Result<T>) -> Result<T> {
        if self.rest.is_empty() {
            return Err(self.wrong(format!("{what} is missing")));
        }
        read(self.rest.remove(0))
    }

    /// Takes the value of `name=value`.
    fn named(&mut self, name: &str) -> Option<&'a str> {
        let is_it = |w: &&str| w.strip_prefix(name).is_some_and(|rest| rest.starts_with('='));
        let at = self.rest.iter().position(is_it)?;
        Some(&self.rest.remove(at)[name.len() + 1..])
    }

    fn flap_time(&mut self, name: &str) -> Result<u64> {
        let text = self.named(name).ok_or_else(|| self.wrong(format!("'{name}=…' is missing")))?;
        let time_us = parse_time_us(text)?;
        if time_us < MIN_FLAP_US {
            return Err(self.wrong(format!("{name}={text} is too short; at least 1ms is right")));
        }
        Ok(time_us)
    }

    fn burst(&mut self) -> Result<u32> {
        let text = self.named("burst").ok_or_else(|| self.wrong("'burst=…' is missing".into()))?;
        text.parse().ok().filter(|burst| (1..=MAX_BURST).contains(burst)).ok_or_else(|| {
            self.wrong(format!(
                "'{text}' is not the length of a burst; 1 to {MAX_BURST} packets are right"
            ))
        })
    }

    /// Between two bursts at least one packet gets through, which bounds what bursts of a length
    /// can lose.
    fn check_burst(&self, ppm: u32, burst: u32) -> Result<()> {
        let most = (u64::from(burst) * u64::from(FULL_PPM) / (u64::from(burst) + 1)) as u32;
        if ppm <= most {
            return Ok(());
        }
        Err(self.wrong(format!(
            "bursts of {burst} lose at most {}, not {}",
            Share(most),
            Share(ppm)
        )))
    }
}

fn delay(text: &str) -> Result<u64> {
    let time_us = parse_time_us(text)?;
    if time_us > MAX_DELAY_US {
        return Err(FabricError::Name(format!(
            "'{text}' is too long for packets; at most 10s is right"
        )));
    }
    Ok(time_us)
}

#[cfg(test)]
mod tests {
    use crate::fault::{Fault, Selector};

    #[test]
    fn words_round_trip() {
        for text in [
            "nic a/0 dead",
            "nic b/3 down",
            "cable a/0 cut",
            "switch rail0 down",
            "switch rail3b down",
            "loss a/0 1%",
            "loss a/0 rx 100%",
            "loss cable a/0 tx 0.5%",
            "loss rail3 0.0001%",
            "loss a/0/2 rx 1%",
            "rate cable a/0/1 1Gbit",
            "delay rail0b 5ms",
            "burst-loss a/0 1% burst=8",
            "corrupt a/0 tx 2%",
            "duplicate rail0 rx 2%",
            "reorder a/0 2% by=1.5ms",
            "rate a/0 1Gbit",
            "rate rail1 tx 2.5Mbit",
            "delay cable a/0 5ms",
            "jitter a/0 rx 200us",
            "flap a/0 down=200ms up=1s",
            "flap cable a/0 down=1ms up=1.5s",
            "flap rail0 down=200ms up=1s",
            "flap rail0b down=200ms up=1s",
            "wqe-error a/0",
        ] {
            assert_eq!(text.parse::<Fault>().unwrap().to_string(), text);
        }
        for (text, shown) in [
            (" nic  a/0   dead ", "nic a/0 dead"),
            ("loss a/0 1% tx", "loss a/0 tx 1%"),
            ("loss nic a/0 1.0%", "loss a/0 1%"),
            ("delay switch rail0 5000us", "delay rail0 5ms"),
            ("burst-loss a/0 burst=8 1%", "burst-loss a/0 1% burst=8"),
            ("reorder a/0 1%", "reorder a/0 1% by=200us"),
            ("flap a/0 up=1s down=1000us", "flap a/0 down=1ms up=1s"),
            ("rate a/0 1000Mbit", "rate a/0 1Gbit"),
        ] {
            assert_eq!(text.parse::<Fault>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn errors_say_what_is_right() {
        for (text, hint) in [
            ("nic a/0 ded", "not 'ded'"),
            ("nic a0 dead", "named like 'a/0'"),
            ("nic a/0", "three words"),
            ("cable a/0 down", "can be 'cut'"),
            ("switch 0 down", "named like 'rail0'"),
            ("switch rail+1 down", "named like 'rail0'"),
            ("switch rail0c down", "'rail0b'"),
            ("loss a/0 1", "like '1%'"),
            ("loss a/0 101%", "0.0001% to 100%"),
            ("loss a/0 1% up", "'tx' or 'rx'"),
            ("loss a/0 tx 1% rx", "more than one direction"),
            ("loss a/0", "a share is missing; right is 'loss a/0 1%'"),
            ("loss", "the place is missing"),
            ("loss a0 1%", "a cable like 'cable a/0'"),
            ("loss railx 1%", "named like 'rail0'"),
            ("loss a/0 1% 2%", "'2%' is not understood"),
            ("burst-loss a/0 1%", "'burst=…' is missing"),
            ("burst-loss a/0 1% burst=0", "1 to 100000 packets"),
            ("burst-loss a/0 60% burst=1", "bursts of 1 lose at most 50%, not 60%"),
            ("rate a/0 1GB/s", "64kbit to 1000Gbit"),
            ("rate a/0", "a rate is missing; right is 'rate a/0 1Gbit'"),
            ("delay a/0 5", "like '200us', '5ms'"),
            ("delay a/0 11s", "at most 10s"),
            ("jitter a/0 by=5ms", "is not a time"),
            ("reorder a/0 1% by=soon", "'soon' is not a time"),
            ("flap a/0 down=200ms", "'up=…' is missing"),
            ("flap a/0 down=20us up=1s", "down=20us is too short"),
            ("flap a/0 down=1s up=1s tx", "'tx' is not understood"),
            ("wqe-error rail0", "only a NIC has work requests"),
            ("wqe-error a/0 now", "'now' is not understood"),
            ("fire a/0", "'fire' is not known; faults are 'nic a/0 dead', "),
            ("", "nothing is there"),
        ] {
            let error = text.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }

    #[test]
    fn selectors_name_faults() {
        let names = |selector: &str, fault: &str| {
            selector.parse::<Selector>().unwrap().matches(&fault.parse::<Fault>().unwrap())
        };
        assert!(names("nic a/0", "nic a/0 dead") && names("nic a/0", "nic a/0 down"));
        assert!(names("nic a/0 dead", "nic a/0 dead") && !names("nic a/0 dead", "nic a/0 down"));
        assert!(!names("nic a/0", "cable a/0 cut") && !names("nic a/1", "nic a/10 dead"));
        assert!(names("loss a/0", "loss a/0 2% rx") && names("loss a/0 2.0%", "loss a/0 2%"));
        assert!(names("loss a/0 rx", "loss a/0 2% rx") && !names("loss a/0 tx", "loss a/0 2% rx"));
        assert!(
            names("loss cable a/0", "loss cable a/0 2%") && !names("loss a/0", "loss cable a/0 2%")
        );
        assert!(names("delay a/0/2", "delay a/0/2 5ms") && !names("delay a/0", "delay a/0/2 5ms"));
        assert!(
            names("delay rail0b", "delay rail0b 5ms") && !names("delay rail0", "delay rail0b 5ms")
        );
        assert!(
            names("spine", "spine down")
                && names("switch rail0", "switch rail0 down")
                && names("rate rail0", "rate rail0 1Gbit")
        );
        assert!(
            names("flap a/0", "flap a/0 down=1s up=1s") && names("wqe-error a/0", "wqe-error a/0")
        );
        for wrong in [
            "",
            "a/0",
            "nic",
            "nic a",
            "rail0",
            "switch a/0",
            "loss",
            "loss a/0 b/0",
            "nic a/0 b/0",
        ] {
            assert!(wrong.parse::<Selector>().is_err(), "{wrong}");
        }
    }
}
