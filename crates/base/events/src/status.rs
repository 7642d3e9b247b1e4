//! The status that `unbroken status` shows.

use serde::{Deserialize, Serialize};

use crate::counters::NicCounters;
use crate::sdr::SdrStatus;

/// A NIC.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct NicStatus {
    /// Its name, `a/0`; its address where it is not in the fabric.
    pub nic: String,
    /// Its address.
    pub addr: String,
    /// What it can do: `full`, `plain`, or `unknown` where it is not in the fabric.
    pub device: String,
    /// `active`, `down`, `dead`, or `unknown` where it is not in the fabric.
    pub state: String,
    /// The faults on its way, in the words of `unbroken fault set`.
    pub faults: Vec<String>,
    /// Devices of the machine: the legs that are down of the bond behind it. It carries less, and
    /// verbs report nothing.
    #[serde(default)]
    pub legs_down: Vec<String>,
    /// Living processes that have it open.
    pub pids: Vec<u32>,
    /// Bytes of memory regions that are registered, and pinned, on it, where each NIC has its own:
    /// devices of the machine.
    #[serde(default)]
    pub registered_bytes: u64,
    /// What it did.
    #[serde(flatten)]
    pub counters: NicCounters,
}

/// A logical QP.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct QpStatus {
    /// The logical QPN.
    pub qp: u32,
    /// The host, `a`.
    pub host: String,
    /// Its own GID and QPN, `127.77.1.0:258`, which its peer has as `peer`.
    pub own: String,
    /// The peer's GID and QPN, `127.77.2.0:258`; empty while it is not connected.
    pub peer: String,
    /// The path in use, `a/0-b/0`; empty while it is not connected.
    pub path: String,
    /// Which of the paths so far this is, as both ends number them. A switch may take several.
    pub epoch: u32,
    /// Whether a failure of its NIC would be survived.
    pub protected: bool,
    /// It is not protected yet, and will be as soon as its peer is found: that is still asked.
    #[serde(default)]
    pub pending: bool,
    /// Why it is not protected, or not yet; empty where it is.
    pub why: String,
    /// `init`, `active`, `switching`, `failed`, …
    pub state: String,
    /// Of a QP that is not protected: the path in use, by the own port and the peer's address,
    /// `a/0-127.77.2.0`; empty elsewhere.
    #[serde(default)]
    pub primary: String,
    /// Its alternate path (automatic path migration), written as `primary` is; empty without one.
    #[serde(default)]
    pub alternate: String,
    /// How far its path migration is: `migrated`, `rearm`, `armed`; empty where it cannot migrate.
    #[serde(default)]
    pub migration: String,
}

/// What a process answers on its status socket.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Default)]
pub struct ProcessStatus {
    /// The process.
    pub pid: u32,
    /// The name of its program.
    pub program: String,
    /// Its host, `a`.
    pub host: String,
    /// Control datagrams that it dropped since they carried no seal of the runtime folder: somebody
    /// forges them.
    #[serde(default)]
    pub forged: u64,
    /// Its logical QPs.
    pub qps: Vec<QpStatus>,
    /// Its NICs that have no page in the runtime folder: devices of the machine.
    #[serde(default)]
    pub nics: Vec<NicStatus>,
    /// Its QPs that are made ahead on other NICs.
    #[serde(default)]
    pub backups: BackupsStatus,
    /// What its SDR queue pairs have counted, where it has had any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sdr: Option<SdrStatus>,
}

/// What a process has made ready on the NICs that its QPs would go to.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct BackupsStatus {
    /// QPs that have their backup: a QP on another NIC that only needs to be connected.
    pub ready: u32,
    /// QPs that are to be looked at.
    pub awaited: u32,
    /// Backups made so far.
    pub made: u64,
    /// What one has taken on average, in microseconds.
    pub mean_us: u64,
    /// How often a device has refused one.
    pub failures: u64,
    /// Commands to devices, such as the end of a QP that was left, that have no answer yet.
    #[serde(default)]
    pub unanswered: u32,
    /// QPs that a device refused to destroy: they are kept until the process ends.
    #[serde(default)]
    pub undestroyed: u32,
}
