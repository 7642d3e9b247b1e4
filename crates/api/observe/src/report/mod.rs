//! What happened to jobs, from event logs of one or many hosts, as one page.
//!
//! [`read`] takes logs from folders and files, [`Report::of`] puts them together, and
//! [`Report::html`] makes a page that needs nothing else. The last two are pure.

mod advice;
mod found;
mod html;
mod incidents;
mod input;

use std::collections::BTreeMap;

use serde::Serialize;
use unbroken_events::{Event, What};

pub use incidents::Incident;
pub use input::{read, Log, NicBytes, MAX_EVENTS, MAX_FILE_BYTES, MAX_LOGS};

use crate::totals::{kind_name, outage_us, Times};

/// A job: what it met, and what that cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Job {
    /// Its name.
    pub job: String,
    /// Where its logs come from.
    pub logs: Vec<String>,
    /// Processes that wrote of a switch or of a failure.
    pub processes: usize,
    /// Forced switches of its queue pairs.
    pub passive: u64,
    /// Planned ones.
    pub planned: u64,
    /// Outages of its queue pairs.
    pub outages: Times,
    /// Work requests that were sent again.
    pub replayed: u64,
    /// Queue pairs that failed for good.
    pub failed: u64,
    /// Queue pairs that were connected without a backup.
    pub unprotected: u64,
}

/// All that logs say, put together.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The first and the last event, by the wall clock in µs; zeros where there is none.
    pub span_us: (u64, u64),
    /// Logs, and their events.
    pub logs: Vec<(String, usize)>,
    /// What failed, in the order of time.
    pub incidents: Vec<Incident>,
    /// Jobs, by name.
    pub jobs: Vec<Job>,
    /// Why queue pairs had no backup, and how many.
    pub unprotected: BTreeMap<String, u64>,
    /// Switches by kind and reason.
    pub reasons: BTreeMap<(&'static str, String), u64>,
    /// What NICs carried, where counters were given.
    pub nics: Vec<NicBytes>,
    /// What to do.
    pub advice: Vec<String>,
    /// What could not be read, or was left out.
    pub notes: Vec<String>,
}

impl Report {
    /// Puts logs together; their clocks are those of their hosts.
    pub fn of(logs: &[Log]) -> Report {
        let mut report = Report::default();
        let mut jobs: BTreeMap<&str, (Job, Vec<u32>)> = BTreeMap::new();
        for log in logs {
            report.logs.push((log.name.clone(), log.events.len()));
            report.notes.extend(log.notes.iter().cloned());
            report.nics.extend(log.nics.iter().cloned());
            let (job, pids) = jobs.entry(&log.job).or_default();
            job.job.clone_from(&log.job);
            job.logs.push(log.name.clone());
            for event in &log.events {
                add(job, pids, event);
                report.add(event);
            }
        }
        report.jobs = jobs.into_values().map(|(job, pids)| finished(job, pids)).collect();
        let beyond;
        (report.incidents, beyond) = incidents::incidents(logs);
        if beyond > 0 {
            let told = incidents::MAX_INCIDENTS;
            report.notes.push(format!(
                "{beyond} failures beyond the first {told} were left out; what they cost is in \
                 the tables of jobs and reasons"
            ));
        }
        report.advice = advice::advice(&report);
        report
    }

    fn add(&mut self, event: &Event) {
        let (first, last) = &mut self.span_us;
        let at = event.wall_us;
        *first = if *first == 0 { at } else { at.min(*first) };
        *last = at.max(*last);
        match &event.what {
            What::Switch(s) => {
                *self.reasons.entry((kind_name(s.kind), s.reason.clone())).or_default() += 1;
            }
            What::Unprotected { why, .. } => {
                *self.unprotected.entry(why.clone()).or_default() += 1;
            }
            _ => {}
        }
    }
}

fn add(job: &mut Job, pids: &mut Vec<u32>, event: &Event) {
    match &event.what {
        What::Switch(switch) => {
            if kind_name(switch.kind) == "passive" {
                job.passive += 1;
                job.outages.add(outage_us(switch));
            } else {
                job.planned += 1;
            }
            job.replayed += switch.replayed;
        }
        What::GiveUp { .. } => job.failed += 1,
        What::Unprotected { .. } => job.unprotected += 1,
        _ => return,
    }
    pids.push(event.pid);
}

fn finished(mut job: Job, mut pids: Vec<u32>) -> Job {
    pids.sort_unstable();
    pids.dedup();
    job.processes = pids.len();
    job
}

#[cfg(test)]
mod tests;
