//! Snapshots for tests.

use std::sync::Arc;

use unbroken_events::{Event, NicCounters, NicStatus, QpStatus, Switch, SwitchKind, What};
use unbroken_observe::{Process, ProcessQp, QpCounts, SeenQp, Snapshot, Totals};

/// Two hosts with two NICs each, of which `a/0` is dead if `dead`; all NICs have sent `tx_bytes`.
pub(crate) fn with(time_us: u64, tx_bytes: u64, dead: bool) -> Snapshot {
    let nic = |name: &str| {
        let dead = dead && name == "a/0";
        NicStatus {
            nic: name.into(),
            addr: "127.1.0.0".into(),
            device: "full".into(),
            state: if dead { "dead" } else { "active" }.into(),
            faults: if dead { vec!["nic a/0 dead".into()] } else { Vec::new() },
            legs_down: Vec::new(),
            pids: vec![7],
            registered_bytes: 0,
            counters: NicCounters { tx_bytes, ..NicCounters::default() },
        }
    };
    let qp = |n: u32, host: &str, protected: bool| {
        let qp = QpStatus {
            qp: n,
            host: host.into(),
            path: if dead { "a/1-b/1" } else { "a/0-b/0" }.into(),
            peer: "127.1.1.0:2".into(),
            protected,
            why: if protected { String::new() } else { "it has memory windows".into() },
            state: "rts".into(),
            ..QpStatus::default()
        };
        let first_path = if dead { "a/0-b/0".into() } else { String::new() };
        SeenQp { qp: ProcessQp { process: 1, pid: 7, qp }, first_path, left_us: 1 }
    };
    let counts = QpCounts { all: 2, protected: 1, unprotected: 1, ..QpCounts::default() };
    let process = |pid: u32, host: &str| Process {
        id: u64::from(pid) - 6,
        pid,
        program: "ib_write_bw".into(),
        host: host.into(),
        ..Process::default()
    };
    Snapshot {
        time_us,
        wall_us: 1_700_000_000_000_000 + time_us,
        runtime: "/run/user/1000/unbroken".into(),
        emulated: true,
        nics: ["a/0", "a/1", "b/0", "b/1"].map(nic).into(),
        processes: Arc::new(vec![process(7, "a"), process(8, "b")]),
        qps: Arc::new(vec![qp(2, "a", false), qp(3, "a", true)]),
        counts: Arc::new([("a".to_owned(), counts)].into()),
        totals: Arc::new(totals(dead)),
        ..Snapshot::default()
    }
}

/// As [`with`], all well.
pub(crate) fn snapshot(time_us: u64, tx_bytes: u64) -> Snapshot {
    with(time_us, tx_bytes, false)
}

fn totals(dead: bool) -> Totals {
    let mut totals = Totals::default();
    if dead {
        let event = |what, time_us| Event { what, time_us, wall_us: 1_700_000_000_000_000, pid: 7 };
        let fault = What::Fault { fault: "nic a/0 dead".into(), lasts_us: None, every_us: None };
        totals.add(&event(fault, 500_000));
        let switch = Switch {
            kind: SwitchKind::Passive,
            host: "a".into(),
            qp: 2,
            from: "a/0-b/0".into(),
            to: "a/1-b/1".into(),
            epoch: 1,
            reason: "the NIC died".into(),
            on_path_since_us: 0,
            detected_at_us: 500_300,
            detect_us: Some(300),
            switch_us: 420,
            replayed: 12,
        };
        totals.add(&event(What::Switch(switch), 500_720));
    }
    totals
}
