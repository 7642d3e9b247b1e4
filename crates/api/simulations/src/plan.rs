//! What is chosen for each collective after a failure, and what the failure costs.

use clap::Args;
use rayon::prelude::*;
use serde::Serialize;
use unbroken_schedule::cost::{Costs, Switches};
use unbroken_schedule::Form;
use unbroken_simulate::cluster::{Cluster, Loss};
use unbroken_simulate::exchange::Exchange;
use unbroken_simulate::failures::Recovery;
use unbroken_simulate::job::Job;
use unbroken_simulate::memory::Memory;
use unbroken_simulate::outage::{Outage, SwitchesLeft};
use unbroken_simulate::step::Simulation;
use unbroken_simulate::strategy::{Done, Kind, Pair, Strategy};
use unbroken_units::read;

use crate::messages;
use crate::options::{count, first_nics, outage, RecoveryArgs, SubjectArgs};
use crate::{on_cores, Error, Result, Watch};

/// The question.
#[derive(Args)]
pub struct PlanArgs {
    /// How many NICs of the first host are lost
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1,
        conflicts_with = "fail",
        value_parser = count::<usize>
    )]
    lost: usize,
    /// What fails: a NIC, like host3/nic2 (one port: host3/nic2/port0; a NIC that still carries a
    /// quarter: host3/nic2=25%), a leaf (tor3: counted pod by pod), a rail (rail2), a pod (pod1), a
    /// quarter of the spines (spine=75% is left), of the cores (core=75%); may be given again
    #[arg(long, value_name = "WHAT", value_parser = outage)]
    fail: Vec<Outage>,
    /// Bytes of each collective
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = read::size)]
    size: u64,
    /// The shape, after the failure, of those collectives that can have it (ring, stars, …;
    /// docs/guide/collectives.md)
    #[arg(long, value_name = "SHAPE")]
    shape: Option<Form>,
    #[command(flatten)]
    subject: SubjectArgs,
    #[command(flatten)]
    recovery: RecoveryArgs,
}

/// The answer.
#[derive(Serialize)]
pub struct Report {
    /// The cluster.
    pub cluster: Cluster,
    /// The job.
    pub job: Job,
    /// What fails, as it was asked for; empty where only the number of NICs was.
    pub fails: Vec<String>,
    /// The NICs that are lost.
    pub lost: Vec<Loss>,
    /// What is left of the spines, and of the cores, in parts of what they carry.
    pub spines_left: f64,
    /// See there.
    pub cores_left: f64,
    /// Bytes of each collective.
    pub bytes: u64,
    /// What a failure costs once.
    pub recovery: Recovery,
    /// Each collective.
    pub collectives: Vec<Row>,
    /// What a stage of the job exchanges in a step.
    pub exchanges: Vec<Exchange>,
    /// What a GPU of the job has in its memory, in bytes.
    pub memory: Memory,
    /// A step while nothing is lost.
    pub step_s: f64,
    /// The part of it in which NICs are waited for.
    pub network_share: f64,
    /// What becomes of the job.
    pub strategies: Vec<OfStrategy>,
}

/// What becomes of a collective.
#[derive(Serialize)]
pub struct Row {
    /// Which.
    pub collective: Kind,
    /// How the planner does it; missing where it cannot.
    pub form: Option<&'static str>,
    /// Its time while nothing is lost.
    pub healthy_us: f64,
    /// A time that nothing can beat.
    pub bound_us: f64,
    /// What it takes with each strategy that keeps all ranks.
    pub strategies: Vec<OfCollective>,
}

/// What a collective takes with a strategy.
#[derive(Serialize)]
pub struct OfCollective {
    /// Which.
    pub strategy: Strategy,
    /// Missing where it cannot go on.
    pub us: Option<f64>,
}

/// What becomes of the job with a strategy.
#[derive(Serialize)]
pub struct OfStrategy {
    /// Which.
    pub strategy: Strategy,
    /// A step; missing where it cannot go on.
    pub step_s: Option<f64>,
    /// Why it cannot.
    pub why_not: Option<String>,
    /// What the failure costs once.
    pub once_s: f64,
}

impl PlanArgs {
    /// What is lost of a cluster, and what is left of its switches.
    fn losses(&self, cluster: &Cluster) -> Result<(Vec<Loss>, SwitchesLeft)> {
        match self.fail.is_empty() {
            true => Ok((first_nics(self.lost, cluster)?, SwitchesLeft::default())),
            false => Ok(cluster.outages(&self.fail)?),
        }
    }

    /// Every message of a collective, instead.
    pub fn messages(&self, kind: Kind, watch: &Watch) -> Result<messages::Report> {
        let (simulation, _) = self.subject.read(watch)?;
        let cluster = simulation.cluster();
        messages::of(cluster, self.losses(cluster)?, (kind, self.size), self.shape)
    }
}

/// Answers it.
pub fn plan(args: &PlanArgs, watch: &Watch) -> Result<(Simulation, Report)> {
    let (simulation, contents) = args.subject.read(watch)?;
    let (lost, left) = args.losses(simulation.cluster())?;
    let simulation = simulation.with_form(args.shape);
    let simulation = match left == SwitchesLeft::default() {
        true => simulation,
        false => simulation.with_switches(left)?,
    };
    let cluster = simulation.cluster();
    let recovery = args.recovery.over(contents.over("recovery", Recovery::default())?);
    let healthy = simulation.healthy();
    let found = on_cores(None, || {
        let collectives = collectives(cluster, (&lost, left), (args.size, args.shape), watch)?;
        Ok::<_, Error>((collectives, strategies(&simulation, &lost, &recovery, watch)))
    })?;
    let (collectives, strategies) = found?;
    watch.check()?;
    let report = Report {
        cluster: cluster.clone(),
        job: simulation.job().clone(),
        fails: args.fail.iter().map(Outage::to_string).collect(),
        lost,
        spines_left: left.spines,
        cores_left: left.cores,
        bytes: args.size,
        recovery,
        collectives,
        exchanges: simulation.exchanges(),
        memory: simulation.job().memory(&simulation.layout()),
        step_s: healthy.total_s(),
        network_share: healthy.network_share(),
        strategies,
    };
    Ok((simulation, report))
}

/// An error if there is nobody to exchange with.
pub(crate) fn several_hosts(cluster: &Cluster) -> Result<()> {
    match cluster.hosts {
        0..2 => {
            let text = "one host has no other to exchange with; --hosts 2 is right";
            Err(Error::value("hosts", text))
        }
        _ => Ok(()),
    }
}

fn collectives(
    cluster: &Cluster,
    (lost, left): (&[Loss], SwitchesLeft),
    (bytes, form): (u64, Option<Form>),
    watch: &Watch,
) -> Result<Vec<Row>> {
    several_hosts(cluster)?;
    let topology = |lost: &[Loss]| cluster.topology(0..cluster.hosts, (cluster.gpus, 1), lost);
    let (healthy, now) = (topology(&[])?, topology(lost)?);
    let over = |clos| Switches::over(clos, 0..cluster.hosts);
    let (before, switches) = (over(cluster.clos()), over(left.of(cluster.clos())));
    let costs = &Costs::default();
    let pair =
        Pair { healthy: &healthy, now: &now, before: &before, switches: &switches, costs, form };
    // all ways of all operations side by side
    let of_kind = |kind| {
        let ways = [None].into_iter().chain(Strategy::IN_PLACE.map(Some));
        ways.map(move |strategy| (kind, strategy))
    };
    let asked: Vec<(Kind, Option<Strategy>)> = Kind::ALL.into_iter().flat_map(of_kind).collect();
    watch.expect(asked.len() + Strategy::ALL.len());
    let found: Vec<(Kind, Option<Strategy>, Option<Done>)> = asked
        .into_par_iter()
        .map(|(kind, strategy)| {
            watch.check()?;
            let collective = kind.of(bytes, healthy.ranks())?;
            let done = match strategy {
                None => Some(pair.before(&collective)?),
                // it cannot go on
                Some(strategy) => pair.after(&collective, strategy).ok(),
            };
            watch.add(1);
            Ok((kind, strategy, done))
        })
        .collect::<Result<_>>()?;
    let row = |of_kind: &[(Kind, Option<Strategy>, Option<Done>)]| {
        let mut row = Row {
            collective: of_kind[0].0,
            form: None,
            healthy_us: 0.0,
            bound_us: of_kind[0].0.bound_us(bytes, &now),
            strategies: Vec::new(),
        };
        for (_, strategy, done) in of_kind {
            let us = done.as_ref().map(|done| done.us);
            match strategy {
                None => row.healthy_us = us.unwrap_or(0.0),
                Some(strategy) => {
                    if *strategy == Strategy::Ours {
                        row.form = done.as_ref().map(Done::form);
                    }
                    row.strategies.push(OfCollective { strategy: *strategy, us });
                }
            }
        }
        row
    };
    Ok(found.chunks(1 + Strategy::IN_PLACE.len()).map(row).collect())
}

fn strategies(
    s: &Simulation,
    lost: &[Loss],
    recovery: &Recovery,
    watch: &Watch,
) -> Vec<OfStrategy> {
    let share = s.healthy().network_share();
    let of = |strategy: Strategy| {
        let step = s.after(lost, strategy);
        let can = step.is_ok();
        watch.add(1);
        OfStrategy {
            strategy,
            why_not: step.as_ref().err().map(|e| e.to_string()),
            step_s: step.ok().map(|step| step.total_s()),
            once_s: recovery.once_s(if can { strategy } else { Strategy::Restart }, share),
        }
    };
    Strategy::ALL.into_par_iter().map(of).collect()
}
