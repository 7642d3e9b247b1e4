//! Faults in words: `nic a/0 dead`, `loss a/0 1%`, `flap rail0 down=200ms up=1s`.
//!
//! What [`Fault`] shows can be read back (see `grammar`), and is how faults appear in lists and in
//! the event log.

use std::fmt;
use std::str::FromStr;

use crate::config::NicName;
use crate::error::{FabricError, Result};
use crate::grammar;
use crate::kind::Kind;
use crate::units::{Rate, Share, TimeUs};

/// The direction of an impairment, seen from the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// What a NIC sends and what it receives. Of a switch: what enters it, so that a packet is
    /// struck once; a rate: both.
    Both,
    /// What NICs send.
    Tx,
    /// What NICs receive.
    Rx,
}

/// A rail: the ports of that number of the NICs of that number, of all hosts, and the switch that
/// joins them. `rail0` has port 1 of the NICs 0, `rail0b` port 2 of those that have two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rail {
    /// The NICs' number, from 0.
    pub nic: u8,
    /// The port, from 1.
    pub port: u8,
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rail{}{}", self.nic, if self.port > 1 { "b" } else { "" })
    }
}

/// Where an impairment or a flap is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A NIC, `a/0`, or one of its ports, `a/0/2`.
    Nic(NicName),
    /// The cable between a NIC and its switch, `cable a/0`; without a port, those of all.
    Cable(NicName),
    /// The switch of a rail, `rail0` or `rail0b`: every NIC of the rail, at that port. A rate is
    /// that of each of the switch's ports.
    Switch {
        /// The rail.
        rail: Rail,
    },
}

/// What happens to packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Impairment {
    /// Each is lost with this chance.
    Loss {
        /// In parts per million.
        ppm: u32,
    },
    /// They are lost in bursts (Gilbert's model: a link is good or bad, and loses all while it is
    /// bad).
    BurstLoss {
        /// How many are lost in the mean, in parts per million.
        ppm: u32,
        /// The mean length of a burst, in packets.
        burst: u32,
    },
    /// A bit is flipped, so that the receiver finds a wrong ICRC.
    Corrupt {
        /// How many, in parts per million.
        ppm: u32,
    },
    /// They come twice.
    Duplicate {
        /// How many, in parts per million.
        ppm: u32,
    },
    /// They are held back, so that later ones overtake them.
    Reorder {
        /// How many, in parts per million.
        ppm: u32,
        /// For how long they are held back.
        by_us: u64,
    },
    /// They leave, or arrive, at no more than this rate at each port, all processes that use the
    /// NIC taken together.
    Rate {
        /// In bit/s of RoCE packets (UDP payload).
        bits_per_s: u64,
    },
    /// They are late by this time.
    Delay {
        /// The time.
        us: u64,
    },
    /// They are late by a random time up to this, and keep their order.
    Jitter {
        /// The time.
        us: u64,
    },
}

impl Impairment {
    fn kind(&self) -> Kind {
        match self {
            Impairment::Loss { .. } => Kind::Loss,
            Impairment::BurstLoss { .. } => Kind::BurstLoss,
            Impairment::Corrupt { .. } => Kind::Corrupt,
            Impairment::Duplicate { .. } => Kind::Duplicate,
            Impairment::Reorder { .. } => Kind::Reorder,
            Impairment::Rate { .. } => Kind::Rate,
            Impairment::Delay { .. } => Kind::Delay,
            Impairment::Jitter { .. } => Kind::Jitter,
        }
    }

    /// The word that it begins with.
    pub fn name(&self) -> &'static str {
        self.kind().word()
    }
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
        /// The rail.
        rail: Rail,
    },
    /// What joins the switches is off: nothing comes from NICs of one rail to those of another.
    SpineDown,
    /// Packets suffer.
    Impaired {
        /// Where.
        place: Place,
        /// Which packets.
        direction: Direction,
        /// What happens to them.
        what: Impairment,
    },
    /// A port, a cable or a switch that goes down and comes up again and again. It begins with
    /// being down.
    Flap {
        /// A NIC's port, a cable or a switch.
        place: Place,
        /// For how long it is down.
        down_us: u64,
        /// For how long it is up.
        up_us: u64,
    },
    /// The next send that is posted to an RC or UC QP of the NIC is made invalid, so that the QP
    /// fails (SHIFT §5.1). Strikes once each time that it falls due, whichever process posts first.
    WqeError(NicName),
}

impl Fault {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Fault::NicDead(_) => Kind::NicDead,
            Fault::NicDown(_) | Fault::CableCut(_) => Kind::Down,
            Fault::SwitchDown { .. } | Fault::SpineDown => Kind::Down,
            Fault::Impaired { what, .. } => what.kind(),
            Fault::Flap { .. } => Kind::Flap,
            Fault::WqeError(_) => Kind::WqeError,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Nic(nic) => write!(f, "{nic}"),
            Place::Cable(nic) => write!(f, "cable {nic}"),
            Place::Switch { rail } => write!(f, "{rail}"),
        }
    }
}

impl fmt::Display for Impairment {
    /// Its values, without its name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Impairment::Loss { ppm }
            | Impairment::Corrupt { ppm }
            | Impairment::Duplicate { ppm } => {
                write!(f, "{}", Share(ppm))
            }
            Impairment::BurstLoss { ppm, burst } => write!(f, "{} burst={burst}", Share(ppm)),
            Impairment::Reorder { ppm, by_us } => write!(f, "{} by={}", Share(ppm), TimeUs(by_us)),
            Impairment::Rate { bits_per_s } => write!(f, "{}", Rate(bits_per_s)),
            Impairment::Delay { us } | Impairment::Jitter { us } => write!(f, "{}", TimeUs(us)),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::NicDead(nic) => write!(f, "nic {nic} dead"),
            Fault::NicDown(nic) => write!(f, "nic {nic} down"),
            Fault::CableCut(nic) => write!(f, "cable {nic} cut"),
            Fault::SwitchDown { rail } => write!(f, "switch {rail} down"),
            Fault::SpineDown => write!(f, "spine down"),
            Fault::Impaired { place, direction, what } => {
                let direction = match direction {
                    Direction::Both => "",
                    Direction::Tx => " tx",
                    Direction::Rx => " rx",
                };
                write!(f, "{} {place}{direction} {what}", what.name())
            }
            Fault::Flap { place, down_us, up_us } => {
                write!(f, "flap {place} down={} up={}", TimeUs(*down_us), TimeUs(*up_us))
            }
            Fault::WqeError(nic) => write!(f, "wqe-error {nic}"),
        }
    }
}

impl FromStr for Fault {
    type Err = FabricError;

    fn from_str(text: &str) -> Result<Fault> {
        grammar::parse(text)
    }
}

/// Names faults to clear: a whole fault, or its first words (`nic a/0`: dead and down; `loss a/0`:
/// whatever share).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    text: String,
    example: Fault,
}

impl Selector {
    /// Whether it names this fault.
    pub fn matches(&self, fault: &Fault) -> bool {
        let text = fault.to_string();
        text.strip_prefix(&self.text).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    }

    /// A fault that it could name, to check that NIC or rail exist.
    pub(crate) fn example(&self) -> &Fault {
        &self.example
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Selector {
    type Err = FabricError;

    fn from_str(text: &str) -> Result<Selector> {
        let (text, example) = grammar::parse_selector(text)?;
        Ok(Selector { text, example })
    }
}
