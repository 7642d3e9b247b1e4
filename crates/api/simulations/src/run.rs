//! A job that loses NICs at given times, or as a file says.

use std::path::PathBuf;

use clap::Args;
use rayon::prelude::*;
use serde::Serialize;
use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::failures::{goodput, moments, Event, Goodput, Lost, Recovery};
use unbroken_simulate::job::Job;
use unbroken_simulate::outage::Outage;
use unbroken_simulate::step::Simulation;
use unbroken_simulate::strategy::Strategy;
use unbroken_simulate::trace::{self, Failing};
use unbroken_units::{read, show};

use crate::file;
use crate::options::{outage, RecoveryArgs, SparesArgs, SubjectArgs};
use crate::{on_cores, Error, Result, Watch};

/// The question.
#[derive(Args)]
pub struct RunArgs {
    /// A NIC, a leaf (tor3), a rail (rail2) or a pod (pod1), and when it fails, like
    /// host3/nic2@120s (repaired after an hour: @120s+1h); may be given again
    #[arg(
        long,
        value_name = "WHAT@TIME",
        value_parser = failure,
        required_unless_present = "trace"
    )]
    fail: Vec<Failure>,
    /// Instead: failures of this file
    #[arg(long, value_name = "FILE", conflicts_with = "fail")]
    trace: Option<PathBuf>,
    /// How long all is watched
    #[arg(long = "for", value_name = "TIME", value_parser = read::time)]
    lasts: f64,
    #[command(flatten)]
    subject: SubjectArgs,
    #[command(flatten)]
    recovery: RecoveryArgs,
    #[command(flatten)]
    spares: SparesArgs,
}

/// What fails, when, and how long its repair takes.
#[derive(Clone, Copy, Debug)]
struct Failure {
    what: Outage,
    at_s: f64,
    repair_s: Option<f64>,
}

fn failure(text: &str) -> std::result::Result<Failure, String> {
    const RIGHT: &str = "host3/nic2@120s and host3/nic2@120s+1h are right";
    let (nic, when) =
        text.split_once('@').ok_or_else(|| format!("'{text}' has no time; {RIGHT}"))?;
    let (at, repair) = match when.split_once('+') {
        Some((at, repair)) => (at, Some(repair)),
        None => (when, None),
    };
    Ok(Failure {
        what: outage(nic)?,
        at_s: read::time(at)?,
        repair_s: repair.map(read::time).transpose()?,
    })
}

/// The answer.
#[derive(Serialize)]
pub struct Report {
    /// The cluster.
    pub cluster: Cluster,
    /// The job.
    pub job: Job,
    /// How long all is watched.
    pub horizon_s: f64,
    /// What a failure costs once, and which hosts stand ready.
    pub recovery: Recovery,
    /// What is lost, and what a step then takes.
    pub changes: Vec<Change>,
    /// What becomes of the job.
    pub strategies: Vec<OfStrategy>,
}

/// What is lost from some time on, and what a step then takes.
#[derive(Serialize)]
pub struct Change {
    /// From when on.
    pub at_s: f64,
    /// What is lost.
    pub lost: Vec<Loss>,
    /// In the order of [`Strategy::ALL`]; missing where it cannot go on.
    pub step_s: Vec<Option<f64>>,
}

/// What becomes of the job with a strategy.
#[derive(Serialize)]
pub struct OfStrategy {
    /// Which.
    pub strategy: Strategy,
    /// What of the time it makes use of.
    #[serde(flatten)]
    pub goodput: Goodput,
}

/// Answers it.
pub fn run(args: &RunArgs, watch: &Watch) -> Result<(Simulation, Report)> {
    let (simulation, contents) = args.subject.read(watch)?;
    let recovery = args.recovery.over(contents.over("recovery", Recovery::default())?);
    let recovery = args.spares.over(recovery);
    let events = trace::events(&args.failing(&simulation)?, args.lasts);
    watch.expect(1 + moments(&events).count() + Strategy::ALL.len());
    let of = |strategy| {
        let goodput = goodput(&simulation, &events, args.lasts, &recovery, strategy);
        watch.add(1);
        OfStrategy { strategy, goodput }
    };
    let (changes, strategies) = on_cores(None, || {
        let changes = changes(&simulation, &events, watch);
        (changes, Strategy::ALL.into_par_iter().map(of).collect())
    })?;
    watch.check()?;
    let report = Report {
        cluster: simulation.cluster().clone(),
        job: simulation.job().clone(),
        horizon_s: args.lasts,
        recovery,
        changes,
        strategies,
    };
    Ok((simulation, report))
}

impl RunArgs {
    /// The failures that options or a file name.
    fn failing(&self, simulation: &Simulation) -> Result<Vec<Failing>> {
        if let Some(path) = &self.trace {
            let read = trace::failures(&file::text("trace", path)?, simulation.cluster());
            let wrong = |e| Error::value("trace", format!("{}: {e}", path.display()));
            return read.map_err(wrong);
        }
        let mut all = Vec::new();
        for Failure { what, at_s, repair_s } in self.fail.iter().copied() {
            let lost = trace::nics_of(simulation.cluster(), what)?;
            all.extend(lost.into_iter().map(|loss| Failing { loss, at_s, repair_s }));
            if at_s >= self.lasts {
                let text = format!(
                    "{what} fails after {}, and all is watched for {}; a longer --for is right",
                    show::time_s(at_s),
                    show::time_s(self.lasts)
                );
                return Err(Error::value("for", text));
            }
        }
        if let Some((first, again)) = trace::twice(&all) {
            let (first, again) = (&all[first], &all[again]);
            let text = format!(
                "{} is lost already when it fails after {}; a repair of its failure after {} \
                 before that is right",
                again.loss,
                show::time_s(again.at_s),
                show::time_s(first.at_s)
            );
            return Err(Error::value("fail", text));
        }
        Ok(all)
    }
}

fn changes(simulation: &Simulation, events: &[Event], watch: &Watch) -> Vec<Change> {
    let (mut lost, mut all) = (Lost::default(), vec![(0.0, Vec::new())]);
    for moment in moments(events) {
        lost.note(moment);
        all.push((moment[0].at_s, lost.all()));
    }
    let change = |(at_s, lost): (f64, Vec<Loss>)| {
        let step = |s| simulation.after(&lost, s).ok().map(|step| step.total_s());
        let step_s = Strategy::ALL.into_iter().map(step).collect();
        watch.add(1);
        Change { at_s, lost, step_s }
    };
    all.into_par_iter().map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_read_with_their_times() {
        let found = failure("host3/nic2@120s+1h").unwrap();
        assert_eq!((found.at_s, found.repair_s), (120.0, Some(3600.0)));
        assert_eq!(failure("host3/nic2@2m").unwrap().repair_s, None);
        assert!(failure("host3/nic2").unwrap_err().contains("has no time"));
        assert!(failure("host3/nic2@5").unwrap_err().contains("has no unit"));
        assert!(failure("nic2@5s").unwrap_err().contains("tor3, rail2, pod1"));
    }
}
