//! Failures, and what a month of them costs. They come at random ([`events`], [`events_of_parts`]),
//! or from a file ([`crate::trace`]).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, Loss};
use crate::random::Random;
pub use crate::rates::{events, events_of_parts, PartRates, Rates};
use crate::step::Simulation;
use crate::strategy::Strategy;

/// So many lost NICs, all choices alike: pattern `number` of a seed.
pub fn pattern(cluster: &Cluster, count: usize, seed: u64, number: u64) -> Vec<Loss> {
    let mut random = Random::part(seed, number.wrapping_add((count as u64) << 40));
    let nics = cluster.nics;
    let chosen = random.choose(count, cluster.hosts * nics).into_iter();
    chosen.map(|nic| Loss { host: nic / nics, nic: nic % nics, port: None, left: None }).collect()
}

/// What a failure costs once, whatever the job does afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recovery {
    /// From the failure until a restarted job computes again, in seconds: 68 minutes in the median
    /// (T. He et al., *Unicorn*, 2023, as R²CCL §2.2 cites it).
    pub restart_s: f64,
    /// From one checkpoint to the next; half of it is computed again after a restart.
    pub checkpoint_s: f64,
    /// From the failure until an operation goes on over other NICs. Our queue pairs give up a dead
    /// path after about 0.4 s where nothing tells of it.
    pub switch_s: f64,
    /// Hosts that stand ready to replace others. A replaced host is ready again when it is repaired.
    /// Without one the job starts again on fewer hosts. Missing: as many as it takes.
    pub spares: Option<usize>,
    /// From the failure until a spare host is in the place of another, before the restart.
    pub replace_s: f64,
}

impl Default for Recovery {
    fn default() -> Recovery {
        Recovery {
            restart_s: 68.0 * 60.0,
            checkpoint_s: 1800.0,
            switch_s: 0.4,
            spares: None,
            replace_s: 0.0,
        }
    }
}

impl Recovery {
    /// What a failure costs once in a step in which NICs are waited for so much of the time. AdapCC
    /// leaves ranks out between operations; a failure within one ends the job (R²CCL §2.1).
    pub fn once_s(&self, strategy: Strategy, share: f64) -> f64 {
        let again = self.restart_s + self.checkpoint_s / 2.0;
        match strategy {
            Strategy::Restart => again,
            // it restarts on the hosts that are there
            Strategy::AdapCc => share * again,
            _ => self.switch_s,
        }
    }
}

/// What of a time a job has made use of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// Failures.
    pub failures: usize,
    /// Time in which nothing was computed, or what is computed again, in seconds.
    pub stopped_s: f64,
    /// Work done, in parts of what a healthy cluster does in the same time.
    pub share: f64,
    /// The most spare hosts that stood for others at once.
    pub spares: usize,
    /// Time on fewer hosts, since no spare host was left, in seconds.
    pub fewer_s: f64,
}

/// A failure or a repair, in seconds from the beginning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// When.
    pub at_s: f64,
    /// Which NIC.
    pub loss: Loss,
    /// Whether it is repaired.
    pub repaired: bool,
}

/// NICs that are lost, each for as many reasons as it has.
#[derive(Clone, Debug, Default)]
pub struct Lost(BTreeMap<Loss, usize>);

impl Lost {
    /// Takes note of what happens at one time. Whether something is lost that was there before.
    pub fn note(&mut self, events: &[Event]) -> bool {
        let mut fresh = false;
        for event in events.iter().filter(|e| !e.repaired) {
            let reasons = self.0.entry(event.loss).or_default();
            fresh |= *reasons == 0;
            *reasons += 1;
        }
        for event in events.iter().filter(|e| e.repaired) {
            // what spare hosts have replaced is not there
            if let Some(reasons) = self.0.get_mut(&event.loss) {
                *reasons -= 1;
                if *reasons == 0 {
                    self.0.remove(&event.loss);
                }
            }
        }
        fresh
    }

    /// All of them, in order.
    pub fn all(&self) -> Vec<Loss> {
        self.0.keys().copied().collect()
    }
}

/// What happens at each time: a switch takes NICs of many hosts along at once.
pub fn moments(events: &[Event]) -> impl Iterator<Item = &[Event]> {
    events.chunk_by(|a, b| a.at_s == b.at_s)
}

/// What a job makes of such a time. Where it cannot go on, it starts again with spare hosts for
/// those that have lost something, or on fewer hosts; so it does after each failure if that is the
/// strategy.
pub fn goodput(
    simulation: &Simulation,
    events: &[Event],
    horizon_s: f64,
    recovery: &Recovery,
    strategy: Strategy,
) -> Goodput {
    let healthy = simulation.healthy();
    let share = healthy.network_share();
    let (mut done_s, mut stopped_s, mut at_s) = (0.0, 0.0, 0.0);
    let (mut lost, mut rate, mut failures) = (Lost::default(), 1.0, 0);
    let (mut pool, mut fewer_s) = (Pool::new(recovery.spares), 0.0);
    let mut smaller = Smaller::default();
    for moment in moments(events) {
        let passed_s = moment[0].at_s - at_s;
        done_s += passed_s * rate;
        fewer_s += if pool.missing.is_empty() { 0.0 } else { passed_s };
        at_s = moment[0].at_s;
        let fresh = lost.note(moment);
        // who was missing is taken back, at a checkpoint
        stopped_s += if pool.repaired(moment) { recovery.restart_s } else { 0.0 };
        if fresh {
            failures += 1;
            stopped_s += recovery.once_s(strategy, share);
        }
        let cannot = simulation.after(&lost.all(), strategy).is_err();
        if cannot || (fresh && strategy == Strategy::Restart) {
            if cannot {
                stopped_s += recovery.once_s(Strategy::Restart, share);
            }
            stopped_s += if pool.replace(&mut lost) { recovery.replace_s } else { 0.0 };
        }
        let step = simulation.after(&lost.all(), strategy).unwrap_or(healthy);
        rate = healthy.total_s() / step.total_s() * smaller.rate(simulation, pool.missing.len());
    }
    done_s += (horizon_s - at_s) * rate;
    fewer_s += if pool.missing.is_empty() { 0.0 } else { horizon_s - at_s };
    let share = ((done_s - stopped_s) / horizon_s).max(0.0);
    Goodput { failures, stopped_s, share, spares: pool.most, fewer_s }
}

/// Spare hosts, and hosts that are being repaired.
struct Pool {
    /// Spare hosts that stand ready; none: as many as it takes.
    ready: Option<usize>,
    /// What hosts have lost that were replaced or left out, each for as many reasons as it has.
    away: BTreeMap<Loss, usize>,
    /// Hosts that were left out, since there was no spare one.
    missing: BTreeSet<usize>,
    /// Spare hosts that stand for others now, and the most that did.
    used: usize,
    most: usize,
}

impl Pool {
    fn new(ready: Option<usize>) -> Pool {
        Pool { ready, away: BTreeMap::new(), missing: BTreeSet::new(), used: 0, most: 0 }
    }

    /// Spare hosts take the places of those that have lost something; where there are none, these
    /// are left out. Whether there was one.
    fn replace(&mut self, lost: &mut Lost) -> bool {
        let mut replaced = false;
        let hosts: BTreeSet<usize> = lost.0.keys().map(|loss| loss.host).collect();
        for (loss, reasons) in std::mem::take(&mut lost.0) {
            *self.away.entry(loss).or_default() += reasons;
        }
        for host in hosts {
            if self.missing.contains(&host) {
                continue;
            }
            if self.ready.is_none_or(|ready| self.used < ready) {
                self.used += 1;
                self.most = self.most.max(self.used);
                replaced = true;
            } else {
                self.missing.insert(host);
            }
        }
        replaced
    }

    /// Takes note of hosts that are repaired. Whether one of them takes the place of one that is
    /// missing.
    fn repaired(&mut self, events: &[Event]) -> bool {
        let mut back = false;
        for event in events.iter().filter(|e| e.repaired) {
            let Some(reasons) = self.away.get_mut(&event.loss) else { continue };
            *reasons -= 1;
            if *reasons > 0 {
                continue;
            }
            self.away.remove(&event.loss);
            let host = event.loss.host;
            if self.away.keys().any(|loss| loss.host == host) {
                continue;
            }
            // whatever place it had: one that is missing has a host again
            match self.missing.take(&host).or_else(|| self.missing.pop_first()) {
                Some(_) => back = true,
                None => self.used = self.used.saturating_sub(1),
            }
        }
        back
    }
}

/// What a job does on fewer hosts, in parts of what it does on all; by how many are missing.
#[derive(Default)]
struct Smaller(BTreeMap<usize, f64>);

impl Smaller {
    fn rate(&mut self, simulation: &Simulation, missing: usize) -> f64 {
        let of = || {
            let step = simulation.on_fewer(missing).map(|smaller| smaller.healthy().total_s());
            step.map_or(0.0, |step_s| simulation.healthy().total_s() / step_s)
        };
        if missing == 0 {
            return 1.0;
        }
        *self.0.entry(missing).or_insert_with(of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;

    #[test]
    fn patterns_are_those_of_their_seed() {
        let cluster = Cluster::default();
        let one = pattern(&cluster, 10, 7, 3);
        assert_eq!(one, pattern(&cluster, 10, 7, 3));
        assert_ne!(one, pattern(&cluster, 10, 7, 4));
        assert_ne!(one, pattern(&cluster, 10, 8, 3));
        assert!(one.windows(2).all(|w| w[0] < w[1]), "each NIC once");
    }

    #[test]
    fn a_restart_costs_its_time_and_balance_its_rate() {
        let cluster = Cluster { hosts: 4, ..Cluster::default() };
        let simulation = Simulation::new(&cluster, &Job::default()).unwrap();
        let loss = Loss { host: 1, nic: 2, port: None, left: None };
        let events = [
            Event { at_s: 100_000.0, loss, repaired: false },
            Event { at_s: 600_000.0, loss, repaired: true },
        ];
        let recovery = Recovery::default();
        let of = |strategy| goodput(&simulation, &events, 1e6, &recovery, strategy);
        let restart = of(Strategy::Restart);
        assert!((restart.share - (1.0 - (4080.0 + 900.0) / 1e6)).abs() < 1e-9, "{restart:?}");
        let balance = of(Strategy::Balance);
        let step = simulation.after(&[loss], Strategy::Balance).unwrap();
        let rate = simulation.healthy().total_s() / step.total_s();
        assert!((balance.share - (0.5 + 0.5 * rate - 0.4e-6)).abs() < 1e-9, "{balance:?}");
        assert!(of(Strategy::Ours).share > balance.share);
    }

    /// A switch that takes four NICs along stops the job once, and a NIC that is lost for two
    /// reasons is back after both.
    #[test]
    fn what_fails_at_once_stops_a_job_once() {
        let cluster = Cluster { hosts: 4, ..Cluster::default() };
        let simulation = Simulation::new(&cluster, &Job::default()).unwrap();
        let event = |at_s, host, repaired| {
            let loss = Loss { host, nic: 2, port: None, left: None };
            Event { at_s, loss, repaired }
        };
        let rail = |at_s, repaired| (0..4).map(move |host| event(at_s, host, repaired));
        let mut events: Vec<Event> = rail(100.0, false).collect();
        events.push(event(200.0, 1, false));
        events.extend(rail(300.0, true));
        events.push(event(400.0, 1, true));
        let recovery = Recovery::default();
        let of = |strategy| goodput(&simulation, &events, 1000.0, &recovery, strategy);
        let found = of(Strategy::Ours);
        // what is lost already cannot be lost again
        assert_eq!(found.failures, 1);
        assert!((found.stopped_s - 0.4).abs() < 1e-12, "{found:?}");
        let rate = |hosts: std::ops::Range<usize>| {
            let lost: Vec<Loss> =
                hosts.map(|host| Loss { host, nic: 2, port: None, left: None }).collect();
            let after = simulation.after(&lost, Strategy::Ours).unwrap();
            simulation.healthy().total_s() / after.total_s()
        };
        let done_s = 700.0 + 200.0 * rate(0..4) + 100.0 * rate(1..2);
        assert!((found.share - (done_s - 0.4) / 1000.0).abs() < 1e-12, "{found:?}");
    }

    /// Four hosts, of which three lose a NIC; two spare hosts.
    #[test]
    fn without_a_spare_host_a_job_goes_on_with_fewer() {
        let cluster = Cluster { hosts: 4, ..Cluster::default() };
        let simulation = Simulation::new(&cluster, &Job::default()).unwrap();
        let event = |at_s, host, repaired| {
            let loss = Loss { host, nic: 2, port: None, left: None };
            Event { at_s, loss, repaired }
        };
        let events = [
            event(10_000.0, 0, false),
            event(20_000.0, 1, false),
            event(30_000.0, 2, false),
            event(80_000.0, 0, true),
            event(90_000.0, 1, true),
            event(95_000.0, 2, true),
        ];
        let of = |spares| {
            let recovery = Recovery { spares, replace_s: 600.0, ..Recovery::default() };
            goodput(&simulation, &events, 100_000.0, &recovery, Strategy::Restart)
        };
        let once_s = 4080.0 + 900.0;
        let endless = of(None);
        assert_eq!((endless.spares, endless.fewer_s), (3, 0.0));
        assert!((endless.stopped_s - 3.0 * (once_s + 600.0)).abs() < 1e-6, "{endless:?}");
        let two = of(Some(2));
        assert_eq!((two.spares, two.fewer_s), (2, 50_000.0));
        // the host that is repaired first is taken by the job, which starts again for it
        let stopped_s = 3.0 * once_s + 2.0 * 600.0 + 4080.0;
        assert!((two.stopped_s - stopped_s).abs() < 1e-6, "{two:?}");
        // three hosts of four
        let rate =
            simulation.healthy().total_s() / simulation.on_fewer(1).unwrap().healthy().total_s();
        assert!((0.7..0.8).contains(&rate), "{rate}");
        let done_s = 50_000.0 + 50_000.0 * rate - stopped_s;
        assert!((two.share - done_s / 100_000.0).abs() < 1e-9, "{two:?}");
        assert!(of(Some(0)).share < two.share && two.share < endless.share);
        // what goes on in place needs none
        let recovery = Recovery { spares: Some(0), ..Recovery::default() };
        let ours = goodput(&simulation, &events, 100_000.0, &recovery, Strategy::Ours);
        assert_eq!((ours.spares, ours.fewer_s), (0, 0.0));
    }
}
