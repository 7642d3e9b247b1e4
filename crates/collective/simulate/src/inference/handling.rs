//! What becomes of requests when a NIC is lost.
//!
//! Communicators that cannot go on without a NIC end their instance, and with it the KV cache of
//! all that it has:
//!
//! - *none*: nothing is done. What the instance has, and what comes later, is lost.
//! - *restart*: the instance is out of service for a time, and then works on healthy hosts. What it
//!   had begins again from its prompt, before what has come in between.
//! - *reroute*: what the instance had begins again on a second replica, and all that comes goes
//!   there, too. That replica has as many requests of its own.
//! - *DéjàVu* (F. Strati et al., ICML '24): while all is well, each host sends new parts of its KV
//!   cache to its neighbour's memory, beside what it computes. After a failure the instance is out
//!   of service as after a restart; the lost host's part of the cache is then fetched back, and
//!   requests go on with the pass that was cut off.
//!
//! Where communicators go on, all that waits for the network stands still for the time of a switch,
//! and communication between hosts takes as long as [`crate::strategy`] says: *HotRepair*,
//! *Balance*, *ours*.
//!
//! What was shown to a client stays shown. A request that begins again makes the same tokens once
//! more, and goes on being shown behind them: its first token is the first that was ever shown, and
//! the time that it lost is part of its time per token.

use serde::{Deserialize, Serialize};

use crate::strategy::Strategy;
use crate::Error;

/// What is done about a lost NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Handling {
    /// Nothing.
    None,
    /// The instance starts again.
    Restart,
    /// Another replica takes over.
    Reroute,
    /// The instance starts again with a copy of its KV cache.
    DejaVu,
    /// One other NIC carries what the lost one carried (R²CCL §4.3).
    HotRepair,
    /// All others carry a part (R²CCL §5.1).
    Balance,
    /// What the planner of this project chooses.
    Ours,
}

impl Handling {
    /// All.
    pub const ALL: [Handling; 7] = [
        Handling::None,
        Handling::Restart,
        Handling::Reroute,
        Handling::DejaVu,
        Handling::HotRepair,
        Handling::Balance,
        Handling::Ours,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Handling::None => "none",
            Handling::Restart => "restart",
            Handling::Reroute => "reroute",
            Handling::DejaVu => "DejaVu",
            Handling::HotRepair => "HotRepair",
            Handling::Balance => "Balance",
            Handling::Ours => "ours",
        }
    }

    /// How communicators go on, if they do.
    pub fn in_place(self) -> Option<Strategy> {
        match self {
            Handling::HotRepair => Some(Strategy::HotRepair),
            Handling::Balance => Some(Strategy::Balance),
            Handling::Ours => Some(Strategy::Ours),
            _ => None,
        }
    }
}

impl std::str::FromStr for Handling {
    type Err = Error;

    fn from_str(text: &str) -> Result<Handling, Error> {
        let found = Handling::ALL.into_iter().find(|h| h.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| {
            let names = Handling::ALL.map(|h| h.name().to_lowercase()).join(", ");
            let right = format!("there are {names}");
            Error::Unknown { argument: "strategy", name: text.into(), right }
        })
    }
}

/// What a failure costs once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    /// From the failure until a restarted instance computes again, in seconds: 35 as R²CCL §8.1
    /// measured it.
    pub restart_s: f64,
    /// From the failure until communication goes on over other NICs. Our queue pairs give up a dead
    /// path after about 0.4 s where nothing tells of it.
    pub switch_s: f64,
}

impl Default for Times {
    fn default() -> Times {
        Times { restart_s: 35.0, switch_s: 0.4 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_shown() {
        for handling in Handling::ALL {
            assert_eq!(handling.name().parse::<Handling>().unwrap(), handling);
            assert_eq!(handling.name().to_lowercase().parse::<Handling>().unwrap(), handling);
        }
        let says = "adapcc".parse::<Handling>().unwrap_err().to_string();
        assert!(says.contains("restart, reroute, dejavu"), "{says}");
    }
}
