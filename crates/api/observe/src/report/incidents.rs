//! From events to what failed: switches that answer the same failure are told together.

use serde::Serialize;
use unbroken_events::{fault_touches, Event, Switch, SwitchKind, What};

use super::input::Log;
use crate::totals::{outage_us, Times};

/// A switch that began so long after the last sign of a failure belongs to another one.
const APART_US: u64 = 5_000_000;
/// Clocks of hosts differ by no more than this; where NTP fails they do, and failures are told
/// twice.
const CLOCKS_US: u64 = 500_000;
/// Incidents that are kept.
const MAX_INCIDENTS: usize = 10_000;

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
    last_us: u64,
}

/// What failed, in the order of time.
pub(super) fn incidents(logs: &[Log]) -> Vec<Incident> {
    let mut all: Vec<(&Log, &Event)> =
        logs.iter().flat_map(|log| log.events.iter().map(move |event| (log, event))).collect();
    all.sort_by_key(|(_, event)| began_us(event));
    let mut found: Vec<Incident> = Vec::new();
    for (log, event) in all {
        take(&mut found, log, event);
    }
    found.retain(|incident| incident.is_worth_telling());
    found
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

fn take(found: &mut Vec<Incident>, log: &Log, event: &Event) {
    let at = began_us(event);
    match &event.what {
        What::Fault { fault, .. } => begin(found, fault.clone(), at, |new| new.is_fault_set = true),
        What::FaultClear { fault } => {
            let open = |i: &&mut Incident| i.what == *fault && i.over_us == 0;
            found.iter_mut().rev().find(open).into_iter().for_each(|i| i.over_us = at);
        }
        What::DeviceFatal { nic } | What::PortDown { nic } => {
            let known = found.iter_mut().rev().find(|i| i.is_of_nic(nic) && i.is_near(at));
            match known {
                Some(incident) => incident.touch(nic, at),
                None => {
                    let is_dead = matches!(event.what, What::DeviceFatal { .. });
                    let what = if is_dead { "died" } else { "lost its link" };
                    begin(found, format!("NIC {nic} {what}"), at, |new| new.touch(nic, at));
                }
            }
        }
        What::PortActive { nic } => {
            let open =
                |i: &&mut Incident| !i.is_fault_set && i.over_us == 0 && i.nics.contains(nic);
            found.iter_mut().rev().filter(open).for_each(|i| i.over_us = at);
        }
        What::Switch(switch) => take_switch(found, log, switch, at),
        What::GiveUp { why, qp, .. } => {
            let near = found.iter_mut().rev().find(|i| i.is_near(at));
            let words = format!("QP {qp:#x} of pid {}: {why}", event.pid);
            let add = |incident: &mut Incident| {
                incident.failed.push(words.clone());
                incident.add_job(&log.job);
            };
            match near {
                Some(incident) => add(incident),
                None => begin(found, "a queue pair failed".into(), at, add),
            }
        }
        _ => {}
    }
}

fn take_switch(found: &mut Vec<Incident>, log: &Log, switch: &Switch, at: u64) {
    if switch.kind == SwitchKind::Planned {
        // Back to where a failure had driven it from.
        let from_there =
            |i: &&mut Incident| i.nics.iter().any(|nic| ends(&switch.to).any(|e| e == nic));
        found.iter_mut().rev().find(from_there).into_iter().for_each(|i| i.back += 1);
        return;
    }
    let near = found.iter_mut().rev().find(|i| i.is_of_path(&switch.from) && i.is_near(at));
    let add = |incident: &mut Incident| {
        incident.last_us = incident.last_us.max(at);
        let nics: Vec<&str> = ends(&switch.from).collect();
        // What the fault names is where it was; else both ends are, until one of them is known.
        let named = nics.iter().filter(|nic| incident.what.split(' ').any(|word| word == **nic));
        let named: Vec<String> = named.map(ToString::to_string).collect();
        let nics =
            if named.is_empty() { nics.iter().map(ToString::to_string).collect() } else { named };
        nics.iter().for_each(|nic| incident.add_nic(nic));
        match incident.noticed.iter_mut().find(|(reason, _)| *reason == switch.reason) {
            Some((_, count)) => *count += 1,
            None => incident.noticed.push((switch.reason.clone(), 1)),
        }
        switch.detect_us.into_iter().for_each(|us| incident.detect.add(us));
        incident.outages.add(outage_us(switch));
        incident.replayed += switch.replayed;
        incident.add_job(&log.job);
    };
    match near {
        Some(incident) => add(incident),
        None => begin(found, format!("{}: {}", switch.from, switch.reason), at, add),
    }
}

fn begin(found: &mut Vec<Incident>, what: String, at: u64, fill: impl FnOnce(&mut Incident)) {
    if found.len() < MAX_INCIDENTS {
        let mut new = Incident { what, began_us: at, last_us: at, ..Incident::default() };
        fill(&mut new);
        found.push(new);
    }
}

/// The NICs at both ends of a path.
fn ends(path: &str) -> impl Iterator<Item = &str> {
    path.split('-').filter(|end| !end.is_empty())
}

impl Incident {
    /// Whether something that began then may belong to it.
    fn is_near(&self, at: u64) -> bool {
        let until = match self.over_us {
            0 if self.is_fault_set => u64::MAX,
            0 => self.last_us,
            over => over,
        };
        at.saturating_add(CLOCKS_US) >= self.began_us && at <= until.saturating_add(APART_US)
    }

    fn is_of_path(&self, path: &str) -> bool {
        self.is_fault_set && fault_touches(&self.what, path)
            || ends(path).any(|end| self.nics.iter().any(|nic| nic == end))
    }

    fn is_of_nic(&self, nic: &str) -> bool {
        self.is_fault_set && fault_touches(&self.what, nic) || self.nics.iter().any(|n| n == nic)
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
