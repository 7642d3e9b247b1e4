//! The events of the log.

use serde::{Deserialize, Serialize};

use unbroken_runtime::{now_us, wall_us};

/// One line of the log.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Event {
    /// What happened; its `event` field names it.
    #[serde(flatten)]
    pub what: What,
    /// When, by [`now_us`]. A fault has the time at which it becomes active, which may be later
    /// than that of writing.
    pub time_us: u64,
    /// That instant by the wall clock, in µs since the epoch of Unix.
    pub wall_us: u64,
    /// The process that wrote it.
    pub pid: u32,
}

impl Event {
    /// An event that happens now.
    pub fn now(what: What) -> Event {
        Event::at(what, now_us())
    }

    /// An event of the instant `time_us`.
    pub fn at(what: What, time_us: u64) -> Event {
        let wall_us = wall_us().wrapping_add(time_us).wrapping_sub(now_us());
        Event { what, time_us, wall_us, pid: std::process::id() }
    }
}

/// What happened.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum What {
    /// A logical QP moved to another path.
    Switch(Switch),
    /// A fault becomes active.
    Fault {
        /// In the words of `unbroken fault set`.
        fault: String,
        /// Of one that comes again: for how long it holds, each time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lasts_us: Option<u64>,
        /// Of one that comes again: how often, from beginning to beginning.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        every_us: Option<u64>,
    },
    /// A fault was taken away.
    FaultClear {
        /// In the words of `unbroken fault set`.
        fault: String,
    },
    /// The port of a NIC went down.
    PortDown {
        /// The NIC, `a/0`.
        nic: String,
    },
    /// The port of a NIC came up, or a dead NIC is back.
    PortActive {
        /// The NIC, `a/0`.
        nic: String,
    },
    /// A NIC died.
    DeviceFatal {
        /// The NIC, `a/0`.
        nic: String,
    },
    /// A logical QP failed for good: the application got the original error.
    GiveUp {
        /// The host, `a`.
        host: String,
        /// The logical QPN.
        qp: u32,
        /// Why no switch was possible.
        why: String,
        /// The programs are the reason, and nothing of this host: the peer had ended or refused, or
        /// the two ends never fitted.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        of_programs: bool,
    },
    /// A logical QP was connected without a backup.
    Unprotected {
        /// The host, `a`.
        host: String,
        /// The logical QPN.
        qp: u32,
        /// Why.
        why: String,
    },
    /// A logical QP that had been said to be unprotected has found its peer.
    PeerFound {
        /// The host, `a`.
        host: String,
        /// The logical QPN.
        qp: u32,
        /// So long after it was connected.
        after_us: u64,
    },
    /// A QP went over to its alternate path (automatic path migration).
    PathMigrated {
        /// The host, `a`.
        host: String,
        /// The QPN.
        qp: u32,
        /// The path, by the own port and the peer's address, `a/0/2-127.77.2.64`.
        to: String,
    },
    /// A QP should have gone over to its alternate path, and could not.
    PathMigrationFailed {
        /// The host, `a`.
        host: String,
        /// The QPN.
        qp: u32,
        /// The path where it stays.
        from: String,
        /// The alternate path; empty where there is none.
        to: String,
    },
    /// The server that keeps the directory cannot be asked: what is connected from now on is not
    /// protected.
    DirectoryLost {
        /// The host, `a`.
        host: String,
        /// Why.
        why: String,
    },
    /// It can be asked again.
    DirectoryBack {
        /// The host, `a`.
        host: String,
    },
}

/// A switch of one logical QP, written when the first good WC came on the new path (at `time_us` of
/// the event).
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Switch {
    /// Forced by a failure, or planned.
    pub kind: SwitchKind,
    /// The host, `a`.
    pub host: String,
    /// The logical QPN.
    pub qp: u32,
    /// The path before, `a/0-b/0`.
    pub from: String,
    /// The path after.
    pub to: String,
    /// The epoch that the switch began.
    pub epoch: u32,
    /// What triggered it, in words.
    pub reason: String,
    /// When the QP came onto the path before, by [`now_us`]: it was connected, or an earlier switch
    /// was done.
    #[serde(default)]
    pub on_path_since_us: u64,
    /// The time of the first error, event or suspicion, by [`now_us`].
    pub detected_at_us: u64,
    /// From the fault to `detected_at_us`; of a fault that was older than the QP on that path, from
    /// `on_path_since_us`. Nothing that switches knows the fault: it is filled in when the log is
    /// read, and is `null` where the log has no fault that fits.
    pub detect_us: Option<u64>,
    /// From `detected_at_us` to the first good WC on the new path; of a switch that no send waited
    /// for, until the QP takes sends again.
    pub switch_us: u64,
    /// WRs that were sent again on the new path.
    pub replayed: u64,
}

/// The kind of a switch.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum SwitchKind {
    /// Forced by a failure.
    Passive,
    /// With nothing lost in flight.
    Planned,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields that the outside scripts against.
    #[test]
    fn a_switch_has_its_fields_on_one_level() {
        let event = Event::now(What::Switch(Switch {
            kind: SwitchKind::Passive,
            host: "a".into(),
            qp: 0x102,
            from: "a/0-b/0".into(),
            to: "a/1-b/1".into(),
            epoch: 1,
            reason: "retries exceeded".into(),
            on_path_since_us: 0,
            detected_at_us: 5,
            detect_us: None,
            switch_us: 300,
            replayed: 12,
        }));
        let json = serde_json::to_value(&event).unwrap();
        let object = json.as_object().unwrap();
        for field in [
            "event",
            "time_us",
            "pid",
            "kind",
            "host",
            "qp",
            "from",
            "to",
            "epoch",
            "reason",
            "detect_us",
            "switch_us",
            "replayed",
        ] {
            assert!(object.contains_key(field), "{field}");
        }
        assert_eq!(json["event"], "switch");
        assert_eq!(json["kind"], "passive");
        assert_eq!(serde_json::from_value::<Event>(json).unwrap(), event);
    }

    #[test]
    fn names_are_kebab_case() {
        let text =
            serde_json::to_string(&Event::now(What::FaultClear { fault: "nic a/0 dead".into() }))
                .unwrap();
        assert!(text.starts_with(r#"{"event":"fault-clear","fault":"nic a/0 dead""#), "{text}");
    }
}
