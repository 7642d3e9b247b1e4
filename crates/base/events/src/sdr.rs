//! Counters of SDR, which lies above the verbs and has no status socket of its own: the status of
//! the process carries them.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// What the SDR queue pairs of a process have counted, ended ones too.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SdrStatus {
    /// Queue pairs that there are.
    pub qps: u64,
    /// Packets sent.
    pub sent: u64,
    /// Packets that came.
    pub received: u64,
    /// Those that had come before.
    pub duplicates: u64,
    /// Those that came too late for their message.
    pub late: u64,
    /// Those beyond their message.
    pub outside: u64,
    /// How often a queue of receives was found empty.
    pub under_runs: u64,
}

static SOURCE: OnceLock<fn() -> SdrStatus> = OnceLock::new();

/// Names the function that gives the counters. The first one stays: there is one SDR in a process.
pub fn set_sdr_source(source: fn() -> SdrStatus) {
    let _ = SOURCE.set(source);
}

/// The counters, where the process has SDR queue pairs.
pub fn sdr_status() -> Option<SdrStatus> {
    SOURCE.get().map(|source| source())
}
