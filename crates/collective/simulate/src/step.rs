//! A training step on a cluster that has lost NICs, and what each strategy makes of it.

use std::collections::BTreeSet;

use serde::Serialize;
use unbroken_schedule::cost::Costs;
use unbroken_schedule::{Collective, Topology};

use crate::cluster::{Cluster, Loss};
use crate::exchange::Exchange;
use crate::job::{ContextExchange, Job, Layout};
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
    /// Of a healthy cluster.
    healthy: Waits,
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
    fn hosts(self) -> impl Iterator<Item = usize> {
        (0..self.hosts).map(move |number| self.first + number * self.apart)
    }
}

impl Simulation {
    /// Checks that the job fits the cluster.
    pub fn new(cluster: &Cluster, job: &Job) -> Result<Simulation, Error> {
        cluster.check()?;
        let layout = job.layout(cluster.hosts, cluster.gpus)?;
        let (cluster, job) = (cluster.clone(), job.clone());
        let (costs, healthy, stop) = (Costs::default(), Waits::default(), Stop::default());
        let mut new = Simulation { cluster, job, layout, costs, healthy, stop };
        let (none, ours): (&[Loss], Strategy) = (&[], Strategy::Ours);
        let experts_s = new.expert_data_s(0, none, ours)?;
        new.healthy = Waits {
            data_s: new.data_s(0, none, ours)? + experts_s,
            hop_s: new.hop_s(0, none, ours)?,
            context_s: new.context_s(0, none, ours)?,
            expert_s: new.tokens_s(0, none, ours)?,
        };
        Ok(new)
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
            Strategy::Restart => return Ok(self.healthy()),
            Strategy::AdapCc => return self.without(lost),
            _ => {}
        }
        let hosts = self.layout.stage_hosts;
        let mut waits = self.healthy;
        let lost_hosts: BTreeSet<usize> = lost.iter().map(|l| l.host).collect();
        let groups = |size: usize| lost_hosts.iter().map(|h| h / size).collect::<BTreeSet<_>>();
        // all stages wait for the slowest; those that have lost nothing are as before
        for stage in groups(hosts) {
            let data_s = self.data_s(stage, lost, strategy)?;
            let experts_s = self.expert_data_s(stage, lost, strategy)?;
            waits.data_s = waits.data_s.max(data_s + experts_s);
        }
        for number in groups(self.layout.hosts_of(self.job.context)) {
            waits.context_s = waits.context_s.max(self.context_s(number, lost, strategy)?);
        }
        for number in groups(self.layout.hosts_of(self.job.expert_parallel)) {
            waits.expert_s = waits.expert_s.max(self.tokens_s(number, lost, strategy)?);
        }
        for from in self.hops(&lost_hosts) {
            waits.hop_s = waits.hop_s.max(self.hop_s(from, lost, strategy)?);
        }
        Ok(self.step(self.layout.replicas, &waits))
    }

    /// Hosts from which activations go to or come from one of these.
    fn hops(&self, lost_hosts: &BTreeSet<usize>) -> BTreeSet<usize> {
        let (hosts, all) = (self.layout.stage_hosts, self.cluster.hosts);
        if self.job.pipeline < 2 {
            return BTreeSet::new();
        }
        let both = lost_hosts.iter().flat_map(|host| [(host + all - hosts) % all, *host]);
        // from the last stage to the first only between chunks of layers
        both.filter(|from| self.job.interleave > 1 || *from < all - hosts).collect()
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
            left => Ok(self.step(left, &self.healthy)),
        }
    }

    /// Time that replicas of a stage exchange in a step, but what is of experts.
    fn data_s(&self, stage: usize, lost: &[Loss], strategy: Strategy) -> Result<f64, Error> {
        let hosts = self.layout.stage_hosts;
        let (ranks, groups) = (self.layout.host_replicas, self.job.tensor);
        let group = Group { first: stage * hosts, apart: 1, hosts, ranks, groups };
        self.all_s(group, &self.job.data_exchanges(&self.layout), lost, strategy)
    }

    /// Time that those of a stage exchange that have the same experts.
    fn expert_data_s(&self, stage: usize, lost: &[Loss], strategy: Strategy) -> Result<f64, Error> {
        let exchanges = self.job.expert_data_exchanges(&self.layout);
        if exchanges.is_empty() {
            return Ok(0.0);
        }
        let (hosts, of_host) = (self.layout.stage_hosts, self.layout.host_replicas);
        let together = of_host.min(self.job.expert_parallel);
        // hosts with the same experts stand so far apart
        let apart = self.layout.hosts_of(self.job.expert_parallel);
        let of = |first: usize, lost: &[Loss]| {
            let group = Group {
                first: stage * hosts + first,
                apart,
                hosts: hosts / apart,
                ranks: of_host / together,
                groups: self.job.tensor * together,
            };
            self.all_s(group, &exchanges, lost, strategy)
        };
        let of_stage = lost.iter().filter(|l| l.host / hosts == stage);
        let firsts: BTreeSet<usize> = of_stage.map(|l| l.host % apart).collect();
        let healthy = of(0, &[])?;
        firsts.into_iter().try_fold(healthy, |most, first| Ok(of(first, lost)?.max(most)))
    }

    /// Time that a group exchanges parts of sequences, for each micro-batch.
    fn context_s(&self, number: usize, lost: &[Loss], strategy: Strategy) -> Result<f64, Error> {
        let hosts = self.layout.hosts_of(self.job.context);
        let exchanges = self.job.context_exchanges();
        if hosts < 2 {
            return Ok(0.0);
        }
        let (ranks, groups) = (self.layout.host_replicas, self.job.tensor);
        let group = Group { first: number * hosts, apart: 1, hosts, ranks, groups };
        if self.job.context_exchange == ContextExchange::AllGather {
            return self.all_s(group, &exchanges, lost, strategy);
        }
        // all send to their neighbours at once: only the last of a host leaves it
        let mut all_s = 0.0f64;
        let lost_in = |host: usize| lost.iter().any(|l| l.host == host);
        for place in 0..hosts {
            let (from, to) = (group.first + place, group.first + (place + 1) % hosts);
            // those that have lost nothing are alike
            if place > 0 && !lost_in(from) && !lost_in(to) {
                continue;
            }
            let pair = (from, to);
            all_s = all_s.max(self.pair_s(pair, groups, &exchanges, lost, strategy)?);
        }
        let inside = if ranks > 1 { self.ring_within_s(&exchanges) } else { 0.0 };
        Ok(all_s.max(inside))
    }

    /// The same between neighbours of one host.
    fn ring_within_s(&self, exchanges: &[Exchange]) -> f64 {
        let mbps = f64::from(self.cluster.nvlink_mbps) * self.job.tensor as f64;
        exchanges.iter().map(|e| e.sent_bytes() * 8.0 / (mbps * 1e6)).sum()
    }

    /// Time that tokens take to the experts of a group and back, for each micro-batch.
    fn tokens_s(&self, number: usize, lost: &[Loss], strategy: Strategy) -> Result<f64, Error> {
        let hosts = self.layout.hosts_of(self.job.expert_parallel);
        if hosts < 2 {
            return Ok(0.0);
        }
        let (ranks, groups) = (self.layout.host_replicas, self.job.tensor);
        let group = Group { first: number * hosts, apart: 1, hosts, ranks, groups };
        self.all_s(group, self.job.token_exchange().as_slice(), lost, strategy)
    }

    /// Time that a micro-batch's activations take from a host to that of the next stage.
    fn hop_s(&self, from: usize, lost: &[Loss], strategy: Strategy) -> Result<f64, Error> {
        if self.job.pipeline < 2 {
            return Ok(0.0);
        }
        let to = (from + self.layout.stage_hosts) % self.cluster.hosts;
        let bytes = self.job.activation_bytes() * self.layout.host_replicas as u64;
        let us = self.done_us(
            || [from, to].into_iter(),
            (1, self.cluster.gpus),
            lost,
            strategy,
            Kind::SendRecv,
            bytes,
        )?;
        Ok(us / 1e6)
    }

    fn pair_s(
        &self,
        (from, to): (usize, usize),
        groups: usize,
        exchanges: &[Exchange],
        lost: &[Loss],
        strategy: Strategy,
    ) -> Result<f64, Error> {
        let both = || [from, to].into_iter();
        exchanges.iter().try_fold(0.0, |all_s, e| {
            let us = self.done_us(both, (1, groups), lost, strategy, e.kind, e.bytes)?;
            Ok(all_s + us * e.times / 1e6)
        })
    }

    fn all_s(
        &self,
        group: Group,
        exchanges: &[Exchange],
        lost: &[Loss],
        strategy: Strategy,
    ) -> Result<f64, Error> {
        let of_host = (group.ranks, group.groups);
        exchanges.iter().try_fold(0.0, |all_s, e| {
            let us = self.done_us(|| group.hosts(), of_host, lost, strategy, e.kind, e.bytes)?;
            Ok(all_s + us * e.times / 1e6)
        })
    }

    fn done_us<H: Iterator<Item = usize>>(
        &self,
        hosts: impl Fn() -> H,
        groups: (usize, usize),
        lost: &[Loss],
        strategy: Strategy,
        kind: Kind,
        bytes: u64,
    ) -> Result<f64, Error> {
        let healthy: Topology = self.cluster.topology(hosts(), groups, &[])?;
        let now = self.cluster.topology(hosts(), groups, lost)?;
        let clos = self.cluster.clos();
        let pair =
            Pair { healthy: &healthy, now: &now, clos: &clos, costs: &self.costs, form: None };
        let collective: Collective = kind.of(bytes, healthy.ranks())?;
        Ok(pair.after(&collective, strategy)?.us)
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
