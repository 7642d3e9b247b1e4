//! A training step on a cluster that has lost NICs, and what each strategy makes of it.

use std::collections::BTreeSet;

use serde::Serialize;
use unbroken_schedule::cost::{Clos, Costs, Switches};
use unbroken_schedule::{Collective, Form, Topology};

use crate::cluster::{Cluster, Loss};
use crate::exchange::Exchange;
use crate::job::{ContextExchange, Job, Layout};
use crate::outage::SwitchesLeft;
use crate::strategy::{Kind, Pair, Strategy};
use crate::{Error, Stop};

/// What a step takes, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Step {
    /// Computing, with the pipeline's bubble.
    pub compute_s: f64,
    /// Exchanges within hosts.
    pub tensor_s: f64,
    /// Activations between stages.
    pub pipeline_s: f64,
    /// Gradients (and parameters) among replicas.
    pub data_s: f64,
    /// Keys and values of divided sequences, where those are on several hosts.
    pub context_s: f64,
    /// Tokens to experts and back, where those of a layer are on several hosts.
    pub expert_s: f64,
}

impl Step {
    /// All.
    pub fn total_s(&self) -> f64 {
        self.compute_s + self.tensor_s + self.network_s()
    }

    /// What NICs carry.
    pub fn network_s(&self) -> f64 {
        self.pipeline_s + self.data_s + self.context_s + self.expert_s
    }

    /// The part of a step in which NICs are waited for.
    pub fn network_share(&self) -> f64 {
        self.network_s() / self.total_s()
    }
}

/// A job on a cluster, with what is the same whatever is lost.
pub struct Simulation {
    cluster: Cluster,
    job: Job,
    layout: Layout,
    costs: Costs,
    /// The switches, as they are now.
    clos: Clos,
    /// The form of those collectives that can have it, after a failure.
    form: Option<Form>,
    /// Of a healthy cluster.
    healthy: Waits,
    /// Of a job that begins on healthy hosts, below the switches as they are now.
    begun: Waits,
    stop: Stop,
}

/// What stages wait for, in seconds: of the slowest stage.
#[derive(Clone, Copy, Default)]
struct Waits {
    /// Exchanges among replicas, in a step.
    data_s: f64,
    /// One between two stages.
    hop_s: f64,
    /// For each micro-batch: parts of sequences, and tokens.
    context_s: f64,
    expert_s: f64,
}

/// What happened, and what is done about it.
#[derive(Clone, Copy)]
struct Case<'l> {
    lost: &'l [Loss],
    strategy: Strategy,
    clos: Clos,
    form: Option<Form>,
}

/// Ranks that exchange something: those of some hosts, so many of each, in so many groups that do
/// the same at the same time.
#[derive(Clone, Copy)]
struct Group {
    first: usize,
    /// From one host to the next.
    apart: usize,
    hosts: usize,
    ranks: usize,
    groups: usize,
}

impl Group {
    fn hosts(self) -> impl Iterator<Item = usize> + Clone {
        (0..self.hosts).map(move |number| self.first + number * self.apart)
    }

    fn has(self, host: usize) -> bool {
        let steps = host.checked_sub(self.first);
        steps.is_some_and(|s| s.is_multiple_of(self.apart) && s / self.apart < self.hosts)
    }
}

impl Simulation {
    /// Checks that the job fits the cluster.
    pub fn new(cluster: &Cluster, job: &Job) -> Result<Simulation, Error> {
        cluster.check()?;
        let layout = job.layout(cluster.hosts, cluster.gpus)?;
        let (cluster, job, clos) = (cluster.clone(), job.clone(), cluster.clos());
        let (costs, waits, stop) = (Costs::default(), Waits::default(), Stop::default());
        let mut new = Simulation {
            cluster,
            job,
            layout,
            costs,
            clos,
            form: None,
            healthy: waits,
            begun: waits,
            stop,
        };
        new.healthy = new.waits(new.nothing_lost())?;
        new.begun = new.healthy;
        Ok(new)
    }

    /// With so much of the spines (and of cores, where there are any) left, in parts of what they
    /// carry: steps after failures are over these, and [`Self::healthy`] stays what it was.
    pub fn with_switches(mut self, left: SwitchesLeft) -> Result<Simulation, Error> {
        self.clos = left.of(self.cluster.clos());
        self.begun = self.waits(self.nothing_lost())?;
        Ok(self)
    }

    /// The same job on fewer hosts: on as many of those that are left as it can be laid out on. An
    /// error: on none.
    pub fn on_fewer(&self, missing: usize) -> Result<Simulation, Error> {
        let left = self.cluster.hosts.saturating_sub(missing);
        let on = |hosts| Simulation::new(&Cluster { hosts, ..self.cluster.clone() }, &self.job);
        let fits = |hosts: &usize| self.job.layout(*hosts, self.cluster.gpus).is_ok();
        let hosts = (1..=left).rev().find(fits);
        hosts.map_or_else(|| Err(Error::value("hosts", "hosts", 0, "one must be left")), on)
    }

    /// With a form for those collectives of the job that can have it, after a failure.
    pub fn with_form(self, form: Option<Form>) -> Simulation {
        Simulation { form, ..self }
    }

    fn nothing_lost(&self) -> Case<'static> {
        Case { lost: &[], strategy: Strategy::Ours, clos: self.clos, form: None }
    }

    /// Sets how fast GPUs compute, so that communication between hosts has this share (above 0,
    /// below 1) of a step on the healthy cluster. An error where no speed gives that share.
    pub fn with_share(mut self, share: f64) -> Result<Simulation, Error> {
        if !(share > 0.0 && share < 1.0) {
            return Err(Error::value(
                "share",
                "the share of communication",
                share,
                "0 to 1 is right",
            ));
        }
        let healthy = self.healthy();
        let compute_s = healthy.network_s() * (1.0 - share) / share - healthy.tensor_s;
        let efficiency = self.job.efficiency * healthy.compute_s / compute_s;
        if !(efficiency > 0.0 && efficiency <= 1.0) {
            let most = Job { efficiency: 1.0, ..self.job.clone() }.compute_s(self.layout.replicas);
            let most = Step { compute_s: most, ..healthy }.network_share() * 100.0;
            let given = format!("{:.1} %", share * 100.0);
            let right = format!("GPUs at their peak give {most:.1} %, and less is right");
            return Err(Error::value("share", "the share of communication", given, right));
        }
        self.job.efficiency = efficiency;
        Ok(self)
    }

    /// Lets `stop` call off this simulation: then no step can be had ([`Error::Stopped`]), and what
    /// follows from steps, as [`crate::failures::goodput`], means nothing.
    pub fn with_stop(self, stop: Stop) -> Simulation {
        Simulation { stop, ..self }
    }

    /// The job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// The cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// How the job lies on it.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// A step while nothing is lost.
    pub fn healthy(&self) -> Step {
        self.step(self.layout.replicas, &self.healthy)
    }

    /// What a pipeline stage exchanges in a step, by volumes and counts.
    pub fn exchanges(&self) -> Vec<Exchange> {
        self.job.exchanges(&self.layout)
    }

    fn step(&self, replicas: usize, waits: &Waits) -> Step {
        let (job, nvlink_mbps) = (&self.job, self.cluster.nvlink_mbps);
        let rounds = job.rounds(replicas);
        Step {
            compute_s: job.compute_s(replicas),
            tensor_s: job.tensor_s(replicas, nvlink_mbps) + self.within_hosts_s() * rounds,
            pipeline_s: job.pipeline_waits(replicas) * waits.hop_s,
            data_s: waits.data_s,
            context_s: waits.context_s * rounds,
            expert_s: waits.expert_s * rounds,
        }
    }

    /// What groups exchange that lie within a host, for each micro-batch.
    fn within_hosts_s(&self) -> f64 {
        let within = |e: &Exchange| self.layout.hosts_of(e.ranks) < 2;
        let all = self.job.token_exchange().into_iter().chain(self.job.context_exchanges());
        // all t devices send their part at once
        let mbps = f64::from(self.cluster.nvlink_mbps) * self.job.tensor as f64;
        all.filter(within).map(|e| e.sent_bytes() * 8.0 / (mbps * 1e6)).sum()
    }

    /// A step after these losses. An error: the job cannot go on like this.
    pub fn after(&self, lost: &[Loss], strategy: Strategy) -> Result<Step, Error> {
        self.stop.check()?;
        lost.iter().try_for_each(|loss| self.cluster.check_loss(loss))?;
        match strategy {
            // other hosts are below the same switches
            Strategy::Restart => return Ok(self.step(self.layout.replicas, &self.begun)),
            Strategy::AdapCc => return self.without(lost),
            _ => {}
        }
        let case = Case { lost, strategy, clos: self.clos, form: self.form };
        let mut waits = self.waits(case)?;
        if self.is_kept(case) {
            // all stages wait for the slowest; those that have lost nothing are as before
            waits.data_s = waits.data_s.max(self.healthy.data_s);
            waits.hop_s = waits.hop_s.max(self.healthy.hop_s);
            waits.context_s = waits.context_s.max(self.healthy.context_s);
            waits.expert_s = waits.expert_s.max(self.healthy.expert_s);
        }
        Ok(self.step(self.layout.replicas, &waits))
    }

    /// Whether hosts that have lost nothing do what they did before.
    fn is_kept(&self, case: Case) -> bool {
        !case.lost.is_empty() && case.form.is_none() && case.clos == self.cluster.clos()
    }

    /// What stages wait for: of all that may differ, the slowest. Where hosts that have lost
    /// nothing do what they did before, of the others alone.
    fn waits(&self, case: Case) -> Result<Waits, Error> {
        let all_ranks = (self.layout.host_replicas, self.job.tensor);
        let groups = |hosts: usize, (ranks, groups): (usize, usize)| {
            let of = move |number| Group { first: number * hosts, apart: 1, hosts, ranks, groups };
            (0..self.cluster.hosts / hosts).map(of)
        };
        let stages = groups(self.layout.stage_hosts, all_ranks);
        let data = |stage: Group| {
            let all_s = self.all_s(stage, &self.job.data_exchanges(&self.layout), case)?;
            Ok(all_s + self.expert_data_s(stage, case)?)
        };
        let context_s = match self.layout.hosts_of(self.job.context) {
            0 | 1 => 0.0,
            hosts => self.context_s(groups(hosts, all_ranks), case)?,
        };
        let expert_s = match self.layout.hosts_of(self.job.expert_parallel) {
            0 | 1 => 0.0,
            hosts => {
                let tokens = self.job.token_exchange();
                let of = |group| self.all_s(group, tokens.as_slice(), case);
                self.slowest(groups(hosts, all_ranks), case, of)?
            }
        };
        Ok(Waits {
            data_s: self.slowest(stages, case, data)?,
            hop_s: self.slowest(self.hops(), case, |hop| self.hop_s(hop, case))?,
            context_s,
            expert_s,
        })
    }

    /// The longest time of some groups. Those that are alike are asked once: to which switches are
    /// the same, and that have lost the same.
    fn slowest(
        &self,
        groups: impl Iterator<Item = Group>,
        case: Case,
        time_s: impl Fn(Group) -> Result<f64, Error>,
    ) -> Result<f64, Error> {
        let (mut known, mut all_s) = (BTreeSet::new(), 0.0f64);
        let kept = self.is_kept(case);
        for group in groups {
            let of_group = |loss: &&Loss| group.has(loss.host);
            let lost = case.lost.iter().filter(of_group);
            let place = |host: usize| (host - group.first) / group.apart;
            let lost: Vec<Loss> =
                lost.map(|loss| Loss { host: place(loss.host), ..*loss }).collect();
            if kept && lost.is_empty() {
                continue;
            }
            let pattern = Switches::over(case.clos, group.hosts()).pattern(group.hosts);
            if known.insert((pattern, lost)) {
                all_s = all_s.max(time_s(group)?);
            }
        }
        Ok(all_s)
    }

    /// From a host to that of the next stage.
    fn hops(&self) -> impl Iterator<Item = Group> + '_ {
        let (apart, all) = (self.layout.stage_hosts, self.cluster.hosts);
        let hop = move |first: usize| {
            let (groups, ranks, hosts) = (self.cluster.gpus, 1, 2);
            match first + apart < all {
                true => Group { first, apart, hosts, ranks, groups },
                // from the last stage to the first: the other way round
                false => {
                    Group { first: first + apart - all, apart: all - apart, hosts, ranks, groups }
                }
            }
        };
        let last = match (self.job.pipeline, self.job.interleave) {
            (0 | 1, _) => 0,
            // from the last stage to the first only between chunks of layers
            (_, 1) => all - apart,
            _ => all,
        };
        (0..last).map(hop)
    }

    /// Without the replicas that the lost NICs' GPUs belong to, and those that share experts with
    /// them; the others do their part of the batch, too.
    fn without(&self, lost: &[Loss]) -> Result<Step, Error> {
        let Cluster { gpus, nics, .. } = self.cluster;
        let Job { context, expert_parallel, .. } = self.job;
        // both are runs of ranks that begin at a multiple of their length
        let together = least_multiple(context, expert_parallel);
        let part = |loss: &Loss| {
            let gpu = (loss.nic * gpus / nics).min(gpus - 1);
            let host = loss.host % self.layout.stage_hosts;
            (host * self.layout.host_replicas + gpu / self.job.tensor) / together
        };
        let gone = lost.iter().map(part).collect::<BTreeSet<usize>>().len();
        match self.layout.replicas.saturating_sub(gone * together / context) {
            0 => Err(Error::value("lost", "replicas", 0, "one must be left")),
            left => Ok(self.step(left, &self.begun)),
        }
    }

    /// Time that those of a stage exchange that have the same experts.
    fn expert_data_s(&self, stage: Group, case: Case) -> Result<f64, Error> {
        let exchanges = self.job.expert_data_exchanges(&self.layout);
        if exchanges.is_empty() {
            return Ok(0.0);
        }
        let of_host = self.layout.host_replicas;
        let together = of_host.min(self.job.expert_parallel);
        // hosts with the same experts stand so far apart
        let apart = self.layout.hosts_of(self.job.expert_parallel);
        let same = (0..apart).map(|first| Group {
            first: stage.first + first,
            apart,
            hosts: stage.hosts / apart,
            ranks: of_host / together,
            groups: self.job.tensor * together,
        });
        // those of this stage that have lost nothing count, too
        let all_s = |case| self.slowest(same.clone(), case, |g| self.all_s(g, &exchanges, case));
        let alike = Case { lost: &[], ..case };
        Ok(all_s(case)?.max(if self.is_kept(case) { all_s(alike)? } else { 0.0 }))
    }

    /// Time that groups exchange parts of sequences, for each micro-batch: of the slowest group.
    fn context_s(&self, groups: impl Iterator<Item = Group>, case: Case) -> Result<f64, Error> {
        let exchanges = self.job.context_exchanges();
        if self.job.context_exchange == ContextExchange::AllGather {
            return self.slowest(groups, case, |group| self.all_s(group, &exchanges, case));
        }
        // all send to their neighbours at once: only the last of a host leaves it
        let pairs = groups.flat_map(|group| {
            (0..group.hosts).map(move |place| {
                let (last, ranks, hosts) = (place + 1 == group.hosts, 1, 2);
                let apart = if last { place.max(1) } else { 1 };
                let first = if last { group.first } else { group.first + place };
                Group { first, apart, hosts, ranks, ..group }
            })
        });
        let all_s = self.slowest(pairs, case, |pair| self.all_s(pair, &exchanges, case))?;
        let several = self.layout.host_replicas > 1;
        Ok(all_s.max(if several { self.ring_within_s(&exchanges) } else { 0.0 }))
    }

    /// The same between neighbours of one host.
    fn ring_within_s(&self, exchanges: &[Exchange]) -> f64 {
        let mbps = f64::from(self.cluster.nvlink_mbps) * self.job.tensor as f64;
        exchanges.iter().map(|e| e.sent_bytes() * 8.0 / (mbps * 1e6)).sum()
    }

    /// Time that a micro-batch's activations take from a host to that of the next stage.
    fn hop_s(&self, hop: Group, case: Case) -> Result<f64, Error> {
        let bytes = self.job.activation_bytes() * self.layout.host_replicas as u64;
        Ok(self.done_us(hop, case, Kind::SendRecv, bytes)? / 1e6)
    }

    fn all_s(&self, group: Group, exchanges: &[Exchange], case: Case) -> Result<f64, Error> {
        exchanges.iter().try_fold(0.0, |all_s, e| {
            Ok(all_s + self.done_us(group, case, e.kind, e.bytes)? * e.times / 1e6)
        })
    }

    fn done_us(&self, group: Group, case: Case, kind: Kind, bytes: u64) -> Result<f64, Error> {
        let of_host = (group.ranks, group.groups);
        let of = |lost: &[Loss]| self.cluster.topology(group.hosts(), of_host, lost);
        let (healthy, now): (Topology, Topology) = (of(&[])?, of(case.lost)?);
        let before = Switches::over(self.cluster.clos(), group.hosts());
        let switches = Switches::over(case.clos, group.hosts());
        let pair = Pair {
            healthy: &healthy,
            now: &now,
            before: &before,
            switches: &switches,
            costs: &self.costs,
            form: case.form,
        };
        let collective: Collective = kind.of(bytes, healthy.ranks())?;
        Ok(pair.after(&collective, case.strategy)?.us)
    }
}

/// The least number that both divide.
fn least_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
