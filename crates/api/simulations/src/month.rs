//! What failures and repairs at random leave of a time.

use clap::Args;
use rayon::prelude::*;
use serde::Serialize;
use unbroken_simulate::cluster::Cluster;
use unbroken_simulate::failures::{events_of_parts, goodput, Goodput, PartRates, Rates, Recovery};
use unbroken_simulate::job::Job;
use unbroken_simulate::step::Simulation;
use unbroken_simulate::strategy::Strategy;
use unbroken_units::read;

use crate::options::{count, within, RecoveryArgs, SparesArgs, SubjectArgs};
use crate::{on_cores, Error, Result, Watch};

/// The question.
#[derive(Args)]
pub struct MonthArgs {
    /// Mean time between failures of a NIC, with its cables; switches do not fail
    #[arg(
        long,
        value_name = "TIME",
        value_parser = mtbf,
        conflicts_with_all = ["nic_mtbf", "cable_mtbf", "switch_mtbf"]
    )]
    mtbf: Option<f64>,
    /// Of a NIC alone [default: 3033381h, published]
    #[arg(long, value_name = "TIME", value_parser = mtbf)]
    nic_mtbf: Option<f64>,
    /// Of a cable from a NIC's port to its leaf [default: 606676h, published of cables or switches]
    #[arg(long, value_name = "TIME", value_parser = mtbf)]
    cable_mtbf: Option<f64>,
    /// Of a leaf [default: never]
    #[arg(long, value_name = "TIME", value_parser = mtbf)]
    switch_mtbf: Option<f64>,
    /// How long a repair takes [default: 1d, assumed]
    #[arg(long, value_name = "TIME", value_parser = read::time)]
    repair: Option<f64>,
    /// How long all is watched [default: 30d]
    #[arg(long = "for", value_name = "TIME", value_parser = read::time)]
    lasts: Option<f64>,
    /// So many times, with other failures each
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = within::<1, 100_000>)]
    runs: u64,
    /// Which failures
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count::<u64>)]
    seed: u64,
    #[command(flatten)]
    subject: SubjectArgs,
    #[command(flatten)]
    recovery: RecoveryArgs,
    #[command(flatten)]
    spares: SparesArgs,
}

/// A time, or never.
fn mtbf(text: &str) -> std::result::Result<f64, String> {
    match text {
        "never" => Ok(f64::INFINITY),
        text => read::time(text),
    }
}

impl MonthArgs {
    fn rates(&self, of_file: PartRates) -> PartRates {
        let repair_s = self.repair.unwrap_or(of_file.repair_s);
        let horizon_s = self.lasts.unwrap_or(of_file.horizon_s);
        if let Some(mtbf_s) = self.mtbf {
            return PartRates::from(Rates { mtbf_s, repair_s, horizon_s });
        }
        PartRates {
            nic_mtbf_s: self.nic_mtbf.unwrap_or(of_file.nic_mtbf_s),
            cable_mtbf_s: self.cable_mtbf.unwrap_or(of_file.cable_mtbf_s),
            switch_mtbf_s: self.switch_mtbf.unwrap_or(of_file.switch_mtbf_s),
            repair_s,
            horizon_s,
        }
    }
}

impl MonthArgs {
    /// The error by the option that was given.
    fn named(&self, mut error: Error) -> Error {
        let of_nic = error.argument.as_deref() == Some("nic-mtbf");
        if of_nic && self.mtbf.is_some() {
            error.argument = Some("mtbf".into());
        }
        error
    }
}

/// The answer.
#[derive(Serialize)]
pub struct Report {
    /// The cluster.
    pub cluster: Cluster,
    /// The job.
    pub job: Job,
    /// How often parts fail.
    pub rates: PartRates,
    /// What a failure costs once.
    pub recovery: Recovery,
    /// Which failures.
    pub seed: u64,
    /// So many times.
    pub runs: u64,
    /// What becomes of the job.
    pub strategies: Vec<Row>,
}

/// What becomes of the job with a strategy: means of all runs.
#[derive(Serialize)]
pub struct Row {
    /// Which.
    pub strategy: Strategy,
    /// How many NICs fail.
    pub failures: f64,
    /// Time in which nothing is computed, or what is computed again.
    pub stopped_s: f64,
    /// Work done, in parts of what a healthy cluster does.
    pub share: f64,
    /// Work done in the worst run, in parts of what a healthy cluster does.
    pub least: f64,
    /// The most spare hosts that stood for others at once, in any run.
    pub spares: usize,
    /// Time on fewer hosts, since no spare host was left.
    pub fewer_s: f64,
}

/// Answers it.
pub fn month(args: &MonthArgs, watch: &Watch) -> Result<(Simulation, Report)> {
    let (simulation, contents) = args.subject.read(watch)?;
    let recovery = args.recovery.over(contents.over("recovery", Recovery::default())?);
    let recovery = args.spares.over(recovery);
    let rates = args.rates(contents.over("rates", PartRates::default())?);
    watch.expect(args.runs as usize);
    let of_run = |number| {
        watch.check()?;
        let events = events_of_parts(simulation.cluster(), &rates, args.seed, number);
        let events = events.map_err(|e| args.named(e.into()))?;
        let of = |s| goodput(&simulation, &events, rates.horizon_s, &recovery, s);
        let all = Strategy::ALL.into_iter().map(of).collect();
        watch.add(1);
        Ok(all)
    };
    let runs = on_cores(None, || {
        (0..args.runs).into_par_iter().map(of_run).collect::<Result<Vec<Vec<Goodput>>>>()
    })??;
    watch.check()?;
    let row = |(at, strategy): (usize, Strategy)| {
        let mean = |of: fn(&Goodput) -> f64| {
            runs.iter().map(|run| of(&run[at])).sum::<f64>() / runs.len() as f64
        };
        Row {
            strategy,
            failures: mean(|g| g.failures as f64),
            stopped_s: mean(|g| g.stopped_s),
            share: mean(|g| g.share),
            least: runs.iter().map(|run| run[at].share).fold(1.0, f64::min),
            spares: runs.iter().map(|run| run[at].spares).max().unwrap_or(0),
            fewer_s: mean(|g| g.fewer_s),
        }
    };
    let report = Report {
        cluster: simulation.cluster().clone(),
        job: simulation.job().clone(),
        rates,
        recovery,
        seed: args.seed,
        runs: args.runs,
        strategies: Strategy::ALL.into_iter().enumerate().map(row).collect(),
    };
    Ok((simulation, report))
}
