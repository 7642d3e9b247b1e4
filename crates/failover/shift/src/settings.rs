//! What the environment says about failover, read once for each process.

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
    /// (`UNBROKEN_SHOW_EVENTS=1`).
    pub(crate) show_events: bool,
    /// QPs go back to the path that they were connected on (`UNBROKEN_FAILBACK`, on unless it is
    /// 0).
    pub(crate) fails_back: bool,
    /// Which ports of its NICs a QP uses.
    pub(crate) port_use: PortUse,
    /// Troubles are reported on stderr (`UNBROKEN_LOG`).
    pub(crate) complains: bool,
    /// Where QPs of which NIC go, as `UNBROKEN_MAP` says it.
    pub(crate) map: String,
    /// Longest transport timeout of a protected QP, by its code; 0 leaves the application's
    /// (`UNBROKEN_TIMEOUT`).
    pub(crate) timeout_code: u8,
}

/// Whether failover is on (`UNBROKEN_FAILOVER`, on unless it is 0).
pub fn failover_is_on() -> bool {
    std::env::var("UNBROKEN_FAILOVER").map_or(true, |v| v != "0")
}

impl Settings {
    /// Reads the environment; an error names the variable that is wrong, and what would be right.
    pub(crate) fn from_env() -> Result<Settings> {
        Ok(Settings {
            failover: failover_is_on(),
            show_events: std::env::var("UNBROKEN_SHOW_EVENTS").is_ok_and(|v| v == "1"),
            fails_back: std::env::var("UNBROKEN_FAILBACK").map_or(true, |v| v != "0"),
            port_use: port_use_from_env()?,
            complains: std::env::var_os("UNBROKEN_LOG").is_some_and(|v| !v.is_empty() && v != "0"),
            map: std::env::var("UNBROKEN_MAP").unwrap_or_default(),
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
    match std::env::var("UNBROKEN_APM").as_deref() {
        Err(_) | Ok("" | "1") => Ok(PortUse::Migrate),
        Ok("0") => Ok(PortUse::Connected),
        Ok("spread") => Ok(PortUse::Spread),
        Ok(text) => Err(Error::invalid(format!(
            "UNBROKEN_APM={text}: give 0 (off), 1 (on) or spread (over all ports)"
        ))),
    }
}

fn timeout_from_env() -> Result<u8> {
    let Ok(text) = std::env::var("UNBROKEN_TIMEOUT") else { return Ok(TIMEOUT_CODE) };
    text.parse().ok().filter(|c| *c < 32).ok_or_else(|| {
        Error::invalid(format!(
            "UNBROKEN_TIMEOUT={text}: give 0 (the application's own) or a code from 1 to 31 \
             (4.096 µs · 2^code)"
        ))
    })
}
