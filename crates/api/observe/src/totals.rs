//! What the event log comes to: counts, times of outages, and what is wrong since when.

use std::collections::{BTreeMap, HashMap, VecDeque};

use serde::Serialize;
use unbroken_events::{Event, Switch, SwitchKind, What};

/// Upper bounds of the buckets of an outage, in µs.
pub const BOUNDS_US: [u64; 12] =
    [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 100_000, 500_000, 1_000_000, 10_000_000];
/// Different words that are counted apart; others are counted together, as [`OTHER`].
const MAX_WORDS: usize = 64;
/// What is counted together, where there are too many different words.
pub const OTHER: &str = "other";
/// Queue pairs whose first path is remembered.
const MAX_QPS: usize = 20_000;
/// Faults, and NICs with something wrong, that are remembered.
const MAX_FAULTS: usize = 1_024;
/// Events of late that are kept.
const RECENT: usize = 256;

/// A distribution of times.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// How many were at most each of [`BOUNDS_US`], and longer than the one before; the last:
    /// longer than all.
    pub buckets: [u64; BOUNDS_US.len() + 1],
    /// All together, in µs.
    pub sum_us: u64,
    /// The longest, in µs.
    pub max_us: u64,
}

impl Times {
    /// Counts one.
    pub fn add(&mut self, us: u64) {
        self.buckets[BOUNDS_US.partition_point(|bound| *bound < us)] += 1;
        self.sum_us = self.sum_us.saturating_add(us);
        self.max_us = self.max_us.max(us);
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

/// What is counted by host, kind and reason of a switch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct SwitchKey {
    /// The host whose QP switched.
    pub host: String,
    /// `passive` or `planned`.
    pub kind: &'static str,
    /// Why, in the log's words.
    pub reason: String,
}

/// Something that is wrong with a NIC, as the log tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Trouble {
    /// In words: `device fatal`, `port down`.
    pub what: String,
    /// Since when, by the clock of [`unbroken_runtime::now_us`].
    pub since_us: u64,
    /// Since when, by the wall clock, in µs since the epoch of Unix.
    pub wall_us: u64,
}

/// A queue pair that failed for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailedQp {
    /// When, and why.
    pub trouble: Trouble,
    /// The programs are the reason, and nothing of the host.
    pub of_programs: bool,
}

/// A fault that somebody has set.
#[derive(Clone, Debug)]
struct SetFault {
    fault: String,
    from_us: u64,
    wall_us: u64,
    until_us: Option<u64>,
}

/// The path of a QP before its first switch.
#[derive(Clone, Debug)]
struct FirstPath {
    path: String,
    left: Trouble,
}

/// What the events come to that were taken in so far.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Events.
    pub events: u64,
    /// Switches.
    pub switches: BTreeMap<SwitchKey, u64>,
    /// From the fault, where the log has it, else from the first sign of it, to the first good
    /// completion on the new path: of passive switches, by host.
    pub outages: BTreeMap<String, Times>,
    /// From the first sign to the first good completion on the new path, by kind.
    pub switching: BTreeMap<&'static str, Times>,
    /// Work requests that were sent again, by host.
    pub replayed: BTreeMap<String, u64>,
    /// QPs that failed for good, by host.
    pub give_ups: BTreeMap<String, u64>,
    /// Ports that went down, by NIC.
    pub port_downs: BTreeMap<String, u64>,
    /// Deaths, by NIC.
    pub deaths: BTreeMap<String, u64>,
    /// Automatic path migrations: those that were done, and those that could not be.
    pub migrations: [u64; 2],
    /// How often the directory was lost.
    pub directory_losses: u64,
    /// The hosts that cannot ask the directory now, and since when.
    pub directory_lost: BTreeMap<String, Trouble>,
    /// NICs whose last event is that they died or went down.
    pub troubles: BTreeMap<String, Trouble>,
    /// QPs that failed for good: process and QP, with when and why.
    pub failed: HashMap<(u32, String, u32), FailedQp>,
    /// The last events, the oldest first.
    pub recent: VecDeque<Event>,
    faults: VecDeque<SetFault>,
    /// When a port became active last.
    active_us: u64,
    first_paths: HashMap<(u32, String, u32), FirstPath>,
}

impl Totals {
    /// Takes an event in; they come in the order of the log.
    pub fn add(&mut self, event: &Event) {
        self.events += 1;
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(event.clone());
        let trouble = |what: &str| Trouble {
            what: what.into(),
            since_us: event.time_us,
            wall_us: event.wall_us,
        };
        match &event.what {
            What::Switch(switch) => self.add_switch(event, switch),
            What::Fault { fault, .. } => self.add_fault(event, fault),
            What::FaultClear { fault } => {
                let open = |set: &&mut SetFault| {
                    set.fault == *fault && set.until_us.is_none_or(|until| until > event.time_us)
                };
                let until_us = Some(event.time_us);
                self.faults.iter_mut().filter(open).for_each(|set| set.until_us = until_us);
            }
            What::PortDown { nic } => {
                count(&mut self.port_downs, nic);
                put(&mut self.troubles, nic, trouble("port down"));
            }
            What::DeviceFatal { nic } => {
                count(&mut self.deaths, nic);
                put(&mut self.troubles, nic, trouble("device fatal"));
            }
            What::PortActive { nic } => {
                self.troubles.remove(nic);
                self.active_us = self.active_us.max(event.time_us);
            }
            What::GiveUp { host, qp, why, of_programs } => {
                count(&mut self.give_ups, host);
                if self.failed.len() < MAX_QPS {
                    let failed = FailedQp { trouble: trouble(why), of_programs: *of_programs };
                    self.failed.insert((event.pid, host.clone(), *qp), failed);
                }
            }
            What::PathMigrated { .. } => self.migrations[0] += 1,
            What::PathMigrationFailed { .. } => self.migrations[1] += 1,
            What::DirectoryLost { host, why } => {
                self.directory_losses += 1;
                put(&mut self.directory_lost, host, trouble(why));
            }
            What::DirectoryBack { host } => drop(self.directory_lost.remove(host)),
            What::Unprotected { .. } | What::PeerFound { .. } => {}
        }
    }

    fn add_switch(&mut self, event: &Event, switch: &Switch) {
        let kind = kind_name(switch.kind);
        let mut key = SwitchKey { host: switch.host.clone(), kind, reason: short(&switch.reason) };
        if !self.switches.contains_key(&key) && self.switches.len() >= MAX_WORDS {
            (key.host, key.reason) = (OTHER.into(), OTHER.into());
        }
        *self.switches.entry(key).or_default() += 1;
        self.switching.entry(kind).or_default().add(switch.switch_us);
        *self.replayed.entry(self.known_host(&switch.host)).or_default() += switch.replayed;
        if switch.kind == SwitchKind::Passive {
            let host = self.known_host(&switch.host);
            self.outages.entry(host).or_default().add(outage_us(switch));
        }
        let qp = (event.pid, switch.host.clone(), switch.qp);
        let is_home = self.first_paths.get(&qp).map(|first| first.path == switch.to);
        match is_home {
            Some(true) => drop(self.first_paths.remove(&qp)),
            None if self.first_paths.len() < MAX_QPS && switch.from != switch.to => {
                let since_us = switch.detected_at_us;
                let wall_us = event.wall_us.saturating_sub(event.time_us.saturating_sub(since_us));
                let left = Trouble { what: switch.reason.clone(), since_us, wall_us };
                self.first_paths.insert(qp, FirstPath { path: switch.from.clone(), left });
            }
            Some(false) | None => {}
        }
    }

    /// A host that is counted by its name.
    fn known_host(&self, host: &str) -> String {
        let known = self.replayed.contains_key(host) || self.replayed.len() < MAX_WORDS;
        if known { host } else { OTHER }.into()
    }

    fn add_fault(&mut self, event: &Event, fault: &str) {
        if self.faults.len() == MAX_FAULTS {
            self.faults.pop_front();
        }
        let (from_us, wall_us) = (event.time_us, event.wall_us);
        self.faults.push_back(SetFault { fault: fault.into(), from_us, wall_us, until_us: None });
    }

    /// Since when a fault that holds now was set, by both clocks.
    pub fn fault_since(&self, fault: &str, now_us: u64) -> Option<Trouble> {
        let holds = |set: &&SetFault| {
            set.fault == fault
                && set.from_us <= now_us
                && set.until_us.is_none_or(|until| until > now_us)
        };
        let set = self.faults.iter().rev().find(holds)?;
        Some(Trouble { what: fault.into(), since_us: set.from_us, wall_us: set.wall_us })
    }

    /// Whether a fault has ended, or a port has become active, between that time and now.
    pub fn recovered_since(&self, at_us: u64, now_us: u64) -> bool {
        let ended = |set: &SetFault| set.until_us.is_some_and(|t| (at_us..=now_us).contains(&t));
        self.active_us > at_us || self.faults.iter().any(ended)
    }

    /// The path that a QP was on before its switches, and when and why it left it; `None` where it
    /// has not, or has come back.
    pub fn left(&self, pid: u32, host: &str, qp: u32, path: &str) -> Option<(&str, &Trouble)> {
        let first = self.first_paths.get(&(pid, host.to_owned(), qp))?;
        (first.path != path).then_some((first.path.as_str(), &first.left))
    }

    /// Whether any QP is known to have left its first path.
    pub fn any_left(&self) -> bool {
        !self.first_paths.is_empty()
    }

    /// Forgets the QPs of processes that have ended.
    pub fn forget_all_but(&mut self, pids: &[u32]) {
        self.first_paths.retain(|(pid, ..), _| pids.contains(pid));
    }
}

/// The name of a kind of switch, as in the log.
pub fn kind_name(kind: SwitchKind) -> &'static str {
    match kind {
        SwitchKind::Passive => "passive",
        SwitchKind::Planned => "planned",
    }
}

/// For how long a switch kept a QP from going on, as far as the log knows, in µs.
pub fn outage_us(switch: &Switch) -> u64 {
    switch.detect_us.unwrap_or(0).saturating_add(switch.switch_us)
}

/// A reason that fits a label.
fn short(reason: &str) -> String {
    reason.chars().filter(|c| !c.is_control()).take(80).collect()
}

fn count(counts: &mut BTreeMap<String, u64>, of: &str) {
    let known = counts.contains_key(of) || counts.len() < MAX_FAULTS;
    *counts.entry(if known { of } else { OTHER }.into()).or_default() += 1;
}

fn put(troubles: &mut BTreeMap<String, Trouble>, of: &str, trouble: Trouble) {
    if troubles.len() < MAX_FAULTS {
        troubles.entry(of.into()).or_insert(trouble);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(from: &str, to: &str, kind: SwitchKind, time_us: u64) -> Event {
        let switch = Switch {
            kind,
            host: "a".into(),
            qp: 2,
            from: from.into(),
            to: to.into(),
            epoch: 1,
            reason: "the NIC died".into(),
            on_path_since_us: 0,
            detected_at_us: time_us,
            detect_us: Some(300),
            switch_us: 400,
            replayed: 3,
        };
        Event { pid: 7, ..Event::at(What::Switch(switch), time_us) }
    }

    #[test]
    fn switches_are_counted_and_timed() {
        let mut totals = Totals::default();
        totals.add(&switch("a/0-b/0", "a/1-b/1", SwitchKind::Passive, 10));
        totals.add(&switch("a/1-b/1", "a/2-b/2", SwitchKind::Planned, 20));
        let counts: Vec<(&str, u64)> = totals.switches.iter().map(|(k, n)| (k.kind, *n)).collect();
        assert_eq!(counts, [("passive", 1), ("planned", 1)]);
        let outages = &totals.outages["a"];
        assert_eq!((outages.count(), outages.sum_us, outages.buckets[3]), (1, 700, 1));
        assert_eq!(totals.switching["planned"].buckets[2], 1, "400 us is at most 500");
        assert_eq!(totals.replayed["a"], 6);
    }

    #[test]
    fn a_qp_is_away_until_it_is_back_on_its_first_path() {
        let mut totals = Totals::default();
        totals.add(&switch("a/0-b/0", "a/1-b/1", SwitchKind::Passive, 10));
        totals.add(&switch("a/1-b/1", "a/2-b/2", SwitchKind::Planned, 20));
        let (path, why) = totals.left(7, "a", 2, "a/2-b/2").unwrap();
        assert_eq!((path, why.since_us, why.what.as_str()), ("a/0-b/0", 10, "the NIC died"));
        assert!(totals.left(8, "a", 2, "a/2-b/2").is_none(), "another process");
        totals.add(&switch("a/2-b/2", "a/0-b/0", SwitchKind::Planned, 30));
        assert!(totals.left(7, "a", 2, "a/0-b/0").is_none() && !totals.any_left());
    }

    #[test]
    fn a_nic_is_in_trouble_until_its_port_is_active() {
        let mut totals = Totals::default();
        let nic = || "a/0".to_owned();
        totals.add(&Event::at(What::DeviceFatal { nic: nic() }, 5));
        totals.add(&Event::at(What::PortDown { nic: nic() }, 6));
        assert_eq!(totals.troubles["a/0"].what, "device fatal", "the first one is the cause");
        totals.add(&Event::at(What::PortActive { nic: nic() }, 7));
        assert!(totals.troubles.is_empty());
        assert_eq!((totals.deaths["a/0"], totals.port_downs["a/0"]), (1, 1));
    }

    #[test]
    fn a_fault_holds_from_its_time_until_it_is_cleared() {
        let mut totals = Totals::default();
        let fault = || "nic a/0 dead".to_owned();
        totals.add(&Event::at(What::Fault { fault: fault(), lasts_us: None, every_us: None }, 50));
        assert!(totals.fault_since(&fault(), 49).is_none());
        assert_eq!(totals.fault_since(&fault(), 60).unwrap().since_us, 50);
        totals.add(&Event::at(What::FaultClear { fault: fault() }, 70));
        assert!(totals.fault_since(&fault(), 80).is_none());
    }

    #[test]
    fn hostile_logs_are_bounded() {
        let mut totals = Totals::default();
        for n in 0..3_000 {
            let mut event = switch("a/0-b/0", "a/1-b/1", SwitchKind::Passive, n);
            let What::Switch(switch) = &mut event.what else { unreachable!() };
            (switch.reason, switch.host) = (format!("reason {n}"), format!("h{n}"));
            totals.add(&event);
            totals.add(&Event::at(What::DeviceFatal { nic: format!("a/{n}") }, n));
        }
        assert!(totals.switches.len() <= MAX_WORDS + 2, "{}", totals.switches.len());
        assert!(totals.outages.len() <= MAX_WORDS + 1 && totals.recent.len() == RECENT);
        assert!(totals.troubles.len() <= MAX_FAULTS && totals.deaths.len() <= MAX_FAULTS + 1);
        assert_eq!(totals.switches.values().sum::<u64>(), 3_000, "none is lost");
    }
}
