//! Faults in words: `nic a/0 dead`, `loss a/0 1%`.

use std::fmt;
use std::str::FromStr;

use crate::config::NicName;
use crate::error::{FabricError, Result};

/// All of a ratio, in parts per million.
pub(crate) const FULL_PPM: u32 = 1_000_000;

/// Every form that is understood, for error messages.
const FORMS: &str = "'nic a/0 dead', 'nic a/0 down', 'cable a/0 cut', 'switch rail0 down', 'loss a/0 1%' (also 'loss a/0 1% tx' or 'rx')";

/// The direction of an impairment, seen from the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// What it sends and what it receives.
    Both,
    /// What it sends.
    Tx,
    /// What it receives.
    Rx,
}

/// A fault of the fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The NIC does nothing more; its host sees a device-fatal event, its peers see silence.
    NicDead(NicName),
    /// The port is down: its host sees a port-down event.
    NicDown(NicName),
    /// The cable between NIC and switch is cut: silence at both ends.
    CableCut(NicName),
    /// The switch of a rail is off: silence on the whole rail.
    SwitchDown {
        /// The rail, from 0.
        rail: u8,
    },
    /// Packets are lost at random.
    Loss {
        /// The NIC.
        nic: NicName,
        /// How many, in parts per million.
        ppm: u32,
        /// Which.
        way: Way,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::NicDead(nic) => write!(f, "nic {nic} dead"),
            Fault::NicDown(nic) => write!(f, "nic {nic} down"),
            Fault::CableCut(nic) => write!(f, "cable {nic} cut"),
            Fault::SwitchDown { rail } => write!(f, "switch rail{rail} down"),
            Fault::Loss { nic, ppm, way } => {
                write!(f, "loss {nic} {}%", Percent(*ppm))?;
                match way {
                    Way::Both => Ok(()),
                    Way::Tx => write!(f, " tx"),
                    Way::Rx => write!(f, " rx"),
                }
            }
        }
    }
}

impl FromStr for Fault {
    type Err = FabricError;

    fn from_str(text: &str) -> Result<Fault> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let unknown = |what: String| FabricError::Name(format!("fault '{text}': {what}; faults are {FORMS}"));
        match words[..] {
            ["nic", nic, "dead"] => Ok(Fault::NicDead(nic.parse()?)),
            ["nic", nic, "down"] => Ok(Fault::NicDown(nic.parse()?)),
            ["cable", nic, "cut"] => Ok(Fault::CableCut(nic.parse()?)),
            ["switch", rail, "down"] => Ok(Fault::SwitchDown { rail: parse_rail(rail)? }),
            ["loss", nic, share] => Ok(Fault::Loss { nic: nic.parse()?, ppm: parse_percent(share)?, way: Way::Both }),
            ["loss", nic, share, "tx"] => {
                Ok(Fault::Loss { nic: nic.parse()?, ppm: parse_percent(share)?, way: Way::Tx })
            }
            ["loss", nic, share, "rx"] => {
                Ok(Fault::Loss { nic: nic.parse()?, ppm: parse_percent(share)?, way: Way::Rx })
            }
            ["nic", _, state] => Err(unknown(format!("a NIC can be 'dead' or 'down', not '{state}'"))),
            ["cable", _, state] => Err(unknown(format!("a cable can be 'cut', not '{state}'"))),
            ["switch", _, state] => Err(unknown(format!("a switch can be 'down', not '{state}'"))),
            ["loss", _, _, way] => Err(unknown(format!("a direction is 'tx' or 'rx', not '{way}'"))),
            ["nic" | "cable" | "switch" | "loss", ..] => Err(unknown("three words are right".into())),
            [first, ..] => Err(unknown(format!("'{first}' is not known"))),
            [] => Err(unknown("nothing is there".into())),
        }
    }
}

/// Names faults to clear: a whole fault, or its first two words (`nic a/0`: dead and down; `loss a/0`: whatever share).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(String);

impl Selector {
    /// Whether it names this fault.
    pub fn matches(&self, fault: &Fault) -> bool {
        let text = fault.to_string();
        text.strip_prefix(&self.0).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    }

    /// A fault that it could name, to check that NIC or rail exist.
    pub(crate) fn example(&self) -> Result<Fault> {
        let text = match self.0.split(' ').collect::<Vec<_>>()[..] {
            ["nic", _] => format!("{} dead", self.0),
            ["cable", _] => format!("{} cut", self.0),
            ["switch", _] => format!("{} down", self.0),
            ["loss", _] => format!("{} 1%", self.0),
            _ => self.0.clone(),
        };
        text.parse()
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Selector {
    type Err = FabricError;

    fn from_str(text: &str) -> Result<Selector> {
        let mut selector = Selector(text.split_whitespace().collect::<Vec<_>>().join(" "));
        let example = selector.example()?;
        if selector.0.split(' ').count() > 2 {
            // In the words of `Display`, so that `loss a/0 1.0%` finds `loss a/0 1%`.
            selector.0 = example.to_string();
        }
        Ok(selector)
    }
}

/// Parts per million, shown as percent without needless zeroes.
struct Percent(u32);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:04}", self.0 / 10_000, self.0 % 10_000);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

fn parse_rail(text: &str) -> Result<u8> {
    let rail = text.strip_prefix("rail").and_then(|n| n.parse().ok());
    rail.ok_or_else(|| {
        FabricError::Name(format!("'{text}' is not the name of a switch; a switch is named like 'rail0'"))
    })
}

fn parse_percent(text: &str) -> Result<u32> {
    let wrong = || FabricError::Name(format!("'{text}' is not a share; 0.0001% to 100% are right, like '1%'"));
    let (whole, part) = text.strip_suffix('%').map(|n| n.split_once('.').unwrap_or((n, "0"))).ok_or_else(wrong)?;
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || whole.len() > 3 || part.len() > 4 {
        return Err(wrong());
    }
    let number = |s: &str| s.parse::<u32>().map_err(|_| wrong());
    let ppm = number(whole)? * 10_000 + number(&format!("{part:0<4}"))?;
    (1..=FULL_PPM).contains(&ppm).then_some(ppm).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for text in [
            "nic a/0 dead",
            "nic b/3 down",
            "cable a/0 cut",
            "switch rail0 down",
            "loss a/0 1%",
            "loss a/0 100% rx",
            "loss a/0 0.5% tx",
            "loss a/0 0.0001%",
        ] {
            assert_eq!(text.parse::<Fault>().unwrap().to_string(), text);
        }
        assert_eq!(" nic  a/0   dead ".parse::<Fault>().unwrap().to_string(), "nic a/0 dead");
    }

    #[test]
    fn errors_say_what_is_right() {
        for (text, hint) in [
            ("nic a/0 ded", "not 'ded'"),
            ("nic a0 dead", "named like 'a/0'"),
            ("cable a/0 down", "can be 'cut'"),
            ("switch 0 down", "named like 'rail0'"),
            ("loss a/0 1", "like '1%'"),
            ("loss a/0 101%", "0.0001% to 100%"),
            ("loss a/0 0%", "0.0001% to 100%"),
            ("loss a/0 -1%", "0.0001% to 100%"),
            ("loss a/0 4294967297%", "0.0001% to 100%"),
            ("loss a/0 1% up", "'tx' or 'rx'"),
            ("nic a/0", "three words"),
            ("fire a/0", "'fire' is not known"),
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
        assert!(names("switch rail0", "switch rail0 down"));
        for wrong in ["", "a/0", "nic", "nic a", "rail0", "switch a/0"] {
            assert!(wrong.parse::<Selector>().is_err(), "{wrong}");
        }
    }
}
