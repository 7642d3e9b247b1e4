//! From events to what failed: switches that answer the same failure are told together.

use serde::Serialize;
use unbroken_events::{Event, Switch, SwitchKind, What};

use super::found::Found;
use super::input::Log;
use crate::totals::{outage_us, Times};

/// A switch that began so long after the last sign of a failure belongs to another one.
const APART_US: u64 = 5_000_000;
/// Clocks of hosts differ by no more than this; where NTP fails they do, and failures are told
/// twice.
const CLOCKS_US: u64 = 500_000;
/// Incidents that are told; of those beyond it is told how many there are.
pub(super) const MAX_INCIDENTS: usize = 10_000;
/// Reasons of switches that are told apart for one incident; others count as the last.
const MAX_REASONS: usize = 64;

/// Something that failed, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Incident {
    /// What failed: a fault in its words, a NIC's death, or what the first switch was for.
    pub what: String,
    /// The NICs whose paths were left, by name.
    pub nics: Vec<String>,
    /// When it began, by the wall clock in µs.
    pub began_us: u64,
    /// When it was over; 0 where the logs do not say.
    pub over_us: u64,
    /// Whether somebody set it on purpose, in an emulated network or on a device.
    pub is_fault_set: bool,
    /// How it was noticed: reasons of switches, with their counts.
    pub noticed: Vec<(String, u64)>,
    /// From the failure to its first sign.
    pub detect: Times,
    /// From the failure, as far as it is known, to work on the new path.
    pub outages: Times,
    /// Work requests that were sent again.
    pub replayed: u64,
    /// Queue pairs that went back afterwards.
    pub back: u64,
    /// Queue pairs that failed for good, with reasons.
    pub failed: Vec<String>,
    /// The jobs that met it.
    pub jobs: Vec<String>,
    #[serde(skip)]
    pub(super) last_us: u64,
}

/// What failed, in the order of time, and how many failures were left out.
pub(super) fn incidents(logs: &[Log]) -> (Vec<Incident>, usize) {
    let mut all: Vec<(&Log, &Event)> =
        logs.iter().flat_map(|log| log.events.iter().map(move |event| (log, event))).collect();
    all.sort_by_key(|(_, event)| began_us(event));
    let mut found = Found::default();
    for (log, event) in all {
        found.take(log, event);
    }
    let mut told = found.all;
    told.retain(Incident::is_worth_telling);
    let beyond = told.len().saturating_sub(MAX_INCIDENTS);
    told.truncate(MAX_INCIDENTS);
    (told, beyond + found.beyond)
}

/// When what an event tells of began, by the wall clock.
fn began_us(event: &Event) -> u64 {
    match &event.what {
        What::Switch(s) => {
            event.wall_us.saturating_sub(event.time_us - s.detected_at_us.min(event.time_us))
        }
        _ => event.wall_us,
    }
}

impl Found {
    /// Takes an event; they come in the order of time.
    fn take(&mut self, log: &Log, event: &Event) {
        let at = began_us(event);
        match &event.what {
            What::Fault { fault, .. } => {
                let set = |new: &mut Incident| new.is_fault_set = true;
                self.begin(fault.clone(), at, set);
            }
            What::FaultClear { fault } => {
                self.open_fault(fault).into_iter().for_each(|i| i.over_us = at)
            }
            What::DeviceFatal { nic } | What::PortDown { nic } => {
                let number = self.near([nic.as_str()].into_iter(), at).or_else(|| {
                    let is_dead = matches!(event.what, What::DeviceFatal { .. });
                    let what = if is_dead { "died" } else { "lost its link" };
                    self.begin(format!("NIC {nic} {what}"), at, |_| {})
                });
                number.into_iter().for_each(|number| self.change(number, |i| i.touch(nic, at)));
            }
            What::PortActive { nic } => self.works_again(nic, at),
            What::Switch(switch) => self.take_switch(log, switch, at),
            What::GiveUp { why, qp, .. } => {
                let number = self
                    .nearest(at)
                    .or_else(|| self.begin("a queue pair failed".into(), at, |_| {}));
                let words = format!("QP {qp:#x} of pid {}: {why}", event.pid);
                number.into_iter().for_each(|number| {
                    self.change(number, |i| {
                        i.failed.push(words.clone());
                        i.add_job(&log.job);
                    });
                });
            }
            _ => {}
        }
    }

    fn take_switch(&mut self, log: &Log, switch: &Switch, at: u64) {
        if switch.kind == SwitchKind::Planned {
            // Back to where a failure had driven it from.
            self.last_of_nics(ends(&switch.to)).into_iter().for_each(|i| i.back += 1);
            return;
        }
        let number = self
            .near(ends(&switch.from), at)
            .or_else(|| self.begin(format!("{}: {}", switch.from, switch.reason), at, |_| {}));
        let Some(number) = number else { return };
        self.change(number, |incident| incident.add_switch(log, switch, at));
    }
}

/// The NICs at both ends of a path.
pub(super) fn ends(path: &str) -> impl Iterator<Item = &str> {
    path.split('-').filter(|end| !end.is_empty())
}

impl Incident {
    /// A switch that answers it.
    fn add_switch(&mut self, log: &Log, switch: &Switch, at: u64) {
        self.last_us = self.last_us.max(at);
        let nics: Vec<&str> = ends(&switch.from).collect();
        // What the fault names is where it was; else both ends are, until one of them is known.
        let named = nics.iter().filter(|nic| self.what.split(' ').any(|word| word == **nic));
        let named: Vec<&str> = named.copied().collect();
        let nics = if named.is_empty() { nics } else { named };
        nics.iter().for_each(|nic| self.add_nic(nic));
        let known = self.noticed.iter().position(|(reason, _)| *reason == switch.reason);
        match known {
            Some(n) => self.noticed[n].1 += 1,
            None if self.noticed.len() < MAX_REASONS => {
                self.noticed.push((switch.reason.clone(), 1));
            }
            None => self.noticed[MAX_REASONS - 1].1 += 1,
        }
        switch.detect_us.into_iter().for_each(|us| self.detect.add(us));
        self.outages.add(outage_us(switch));
        self.replayed += switch.replayed;
        self.add_job(&log.job);
    }

    /// Whether something that began then may belong to it.
    pub(super) fn is_near(&self, at: u64) -> bool {
        let until = match self.over_us {
            0 if self.is_fault_set => u64::MAX,
            0 => self.last_us,
            over => over,
        };
        at.saturating_add(CLOCKS_US) >= self.began_us && at <= until.saturating_add(APART_US)
    }

    fn touch(&mut self, nic: &str, at: u64) {
        self.last_us = self.last_us.max(at);
        self.add_nic(nic);
    }

    fn add_nic(&mut self, nic: &str) {
        if !self.nics.iter().any(|known| known == nic) && self.nics.len() < 64 {
            self.nics.push(nic.into());
        }
    }

    fn add_job(&mut self, job: &str) {
        if !self.jobs.iter().any(|known| known == job) && self.jobs.len() < 64 {
            self.jobs.push(job.into());
        }
    }

    /// A fault that nobody met is no failure of anything.
    fn is_worth_telling(&self) -> bool {
        !self.is_fault_set
            || self.outages.count() > 0
            || !self.failed.is_empty()
            || !self.nics.is_empty()
    }

    /// How many queue pairs had to switch.
    pub fn switches(&self) -> u64 {
        self.outages.count()
    }
}
