//! What the environment says about failover, read once for each process.

use unbroken_environment as environment;
use unbroken_verbs::{Error, Result};

/// Longest transport timeout of a protected QP: the application's own. Whether a path lives is
/// found out by asking it, long before a transport gives up; a shorter timeout would only send more
/// again where a peer is slow.
const TIMEOUT_CODE: u8 = 0;

/// Which ports of its NICs a QP uses (`UNBROKEN_APM`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PortUse {
    /// The one that the program has connected (`0`).
    Connected,
    /// That one, and another while it does not work (`1`).
    Migrate,
    /// All: QPs are spread over them, and migrate (`spread`).
    Spread,
}

/// The settings of a process.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Failover is on (`UNBROKEN_FAILOVER`).
    pub(crate) failover: bool,
    /// Events that a switch absorbs are shown to the application all the same
    /// (`UNBROKEN_SHOW_EVENTS`).
    pub(crate) show_events: bool,
    /// QPs go back to the path that they were connected on (`UNBROKEN_FAILBACK`, on unless it is
    /// off).
    pub(crate) fails_back: bool,
    /// How many NICs are made ready beforehand to carry a NIC's QPs (`UNBROKEN_BACKUPS`).
    pub(crate) backups: usize,
    /// Which ports of its NICs a QP uses.
    pub(crate) port_use: PortUse,
    /// Where QPs of which NIC go, as `UNBROKEN_MAP` says it.
    pub(crate) map: String,
    /// Longest transport timeout of a protected QP, by its code; 0 leaves the application's
    /// (`UNBROKEN_TIMEOUT`).
    pub(crate) timeout_code: u8,
}

/// Whether failover is on (`UNBROKEN_FAILOVER`, on unless it is off).
pub fn failover_is_on() -> bool {
    environment::flag(environment::FAILOVER)
}

impl Settings {
    /// Reads the environment; an error names the variable that is wrong, and what would be right.
    pub(crate) fn from_env() -> Result<Settings> {
        Ok(Settings {
            failover: failover_is_on(),
            show_events: environment::flag(environment::SHOW_EVENTS),
            fails_back: environment::flag(environment::FAILBACK),
            backups: backups_from_env()?,
            port_use: port_use_from_env()?,
            map: environment::text(environment::MAP).unwrap_or_default(),
            timeout_code: timeout_from_env()?,
        })
    }

    /// Whether QPs use several ports of a NIC.
    pub(crate) fn uses_all_ports(&self) -> bool {
        self.failover && self.port_use != PortUse::Connected
    }

    /// The transport timeout of a protected QP whose application asked for `app` (0: none).
    pub(crate) fn protected_timeout(&self, app: u8) -> u8 {
        match (app, self.timeout_code) {
            (app, 0) => app,
            (0, code) => code,
            (app, code) => app.min(code),
        }
    }
}

fn port_use_from_env() -> Result<PortUse> {
    let Some(text) = environment::text(environment::APM) else { return Ok(PortUse::Migrate) };
    match (text.trim(), environment::parse_flag(&text)) {
        (_, Some(true)) => Ok(PortUse::Migrate),
        (_, Some(false)) => Ok(PortUse::Connected),
        ("spread", None) => Ok(PortUse::Spread),
        (text, None) => Err(Error::invalid(format!(
            "UNBROKEN_APM={text}: give 0 (off), 1 (on) or spread (over all ports)"
        ))),
    }
}

fn backups_from_env() -> Result<usize> {
    let Some(text) = environment::text(environment::BACKUPS) else { return Ok(usize::MAX) };
    text.trim().parse::<u8>().map(usize::from).map_err(|_| {
        Error::invalid(format!(
            "UNBROKEN_BACKUPS={text}: give how many NICs are made ready for each, from 0 to 255"
        ))
    })
}

fn timeout_from_env() -> Result<u8> {
    let Some(text) = environment::text(environment::TIMEOUT) else { return Ok(TIMEOUT_CODE) };
    text.trim().parse().ok().filter(|c| *c < 32).ok_or_else(|| {
        Error::invalid(format!(
            "UNBROKEN_TIMEOUT={text}: give 0 (the application's own) or a code from 1 to 31 \
             (4.096 µs · 2^code)"
        ))
    })
}
