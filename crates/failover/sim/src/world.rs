//! The world of one schedule: events in virtual time, two hosts, and the last judgement.

use crate::app::App;
use crate::end::{app, ready_to_receive, ready_to_send, End, Life, Wcs, SQ_DEPTH};
use crate::env::SimEnv;
use crate::flush::Flush;
use crate::home;
use crate::memory::HostMemory;
use crate::mutants::Mutant;
use crate::net::{Conditions, Net};
use crate::phys::Phys;
use crate::plan::{Fault, Plan};
use crate::rng::Rng;
use crate::srq::SharedQueue;
use crate::stats::Stats;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use unbroken_failover_protocol::health::{PeerHealth, Verdict};
use unbroken_failover_protocol::{
    Config, Endpoint, Executor, Liveness, LogicalQp, Message, Policy, Reason, SlotPath, SlotTable,
    State,
};
use unbroken_types::{Gid, SendFlags};

/// After all faults are healed, everything must come to its end within this time: longer than a
/// silent peer is waited for.
const END_US: u64 = 60_000_000;
/// No schedule needs more events.
const MAX_EVENTS: u64 = 2_000_000;
/// A violation names at most this many steps back.
pub type Violation = String;

/// Something that happens at a time.
pub(crate) enum Event {
    Packet {
        host: usize,
        nic: usize,
        bytes: Vec<u8>,
    },
    Control {
        host: usize,
        nic: usize,
        from: usize,
        bytes: Vec<u8>,
    },
    Qp {
        host: usize,
        qp: usize,
        life: usize,
    },
    Path {
        host: usize,
        qp: usize,
    },
    Look {
        host: usize,
        qp: usize,
    },
    /// The directory was read for a message.
    Read {
        host: usize,
        qp: usize,
        message: Message,
    },
    Health {
        host: usize,
    },
    /// A host looks whether QPs can go home.
    Home {
        host: usize,
    },
    App {
        host: usize,
        qp: usize,
    },
    /// A NIC fails (why) or is well again.
    Nic {
        host: usize,
        nic: usize,
        reason: Option<Reason>,
    },
    Fault(Fault),
}

impl Event {
    /// The host whose process handles it.
    pub(crate) fn host(&self) -> Option<usize> {
        match *self {
            Event::Packet { host, .. } | Event::Control { host, .. } | Event::Qp { host, .. } => {
                Some(host)
            }
            Event::Path { host, .. } | Event::Look { host, .. } | Event::Read { host, .. } => {
                Some(host)
            }
            Event::Health { host } | Event::Home { host } => Some(host),
            Event::App { host, .. } | Event::Nic { host, .. } => Some(host),
            Event::Fault(Fault::Suspect { host, .. } | Fault::Plan { host, .. }) => Some(host),
            Event::Fault(_) => None,
        }
    }
}

/// An event in the heap: ordered by time, then by order of creation.
struct Due {
    at_us: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, o: &Due) -> bool {
        (self.at_us, self.order) == (o.at_us, o.order)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, o: &Due) -> Option<core::cmp::Ordering> {
        Some(self.cmp(o))
    }
}
impl Ord for Due {
    fn cmp(&self, o: &Due) -> core::cmp::Ordering {
        (self.at_us, self.order).cmp(&(o.at_us, o.order))
    }
}

/// All of a schedule.
pub(crate) struct World {
    pub now_us: u64,
    pub rng: Rng,
    pub plan: Plan,
    pub mutant: Mutant,
    pub net: Net,
    pub memory: [HostMemory; 2],
    pub ends: [Vec<End>; 2],
    pub apps: [Vec<App>; 2],
    pub health: [PeerHealth; 2],
    pub health_at_us: [u64; 2],
    pub crashed: [bool; 2],
    /// Another process answers in the place of the crashed one.
    pub restarted: [bool; 2],
    /// When each QP went home last, and into which epoch.
    pub homecomings: Vec<Option<(u64, u64)>>,
    /// Until when a process is stopped.
    pub stopped_us: [u64; 2],
    pub stats: Stats,
    pub trace: bool,
    /// What an executor was seen to do wrong.
    violation: Option<Violation>,
    heap: BinaryHeap<Reverse<Due>>,
    order: u64,
}

/// Runs the schedule of a seed. `trace` prints what happens.
pub fn run(seed: u64, mutant: Mutant, trace: bool) -> Result<Stats, Violation> {
    run_with(seed, mutant, None, trace)
}

/// Runs the schedule of a seed; with `flush` all plain devices flush so. `trace` prints what
/// happens.
pub fn run_with(
    seed: u64,
    mutant: Mutant,
    flush: Option<Flush>,
    trace: bool,
) -> Result<Stats, Violation> {
    let plan = Plan { flush, ..Plan::new(seed) };
    if trace {
        println!("{plan:#?}");
    }
    let mut world = World::new(plan, seed, mutant, trace);
    world.run().map_err(|e| format!("at {} us: {e}", world.now_us))?;
    world.stats.schedules = 1;
    Ok(world.stats)
}

/// The QPN of an epoch's life.
pub(crate) fn qpn_of(qp: usize, epoch: u64, mutant: Mutant) -> u32 {
    let life = if mutant == Mutant::SameQpn { 0 } else { epoch & 0x7fff };
    ((qp as u32 + 1) << 16) | (life as u32 + 2)
}

/// The logical QPN.
pub(crate) fn logical_qpn(qp: usize) -> u32 {
    qpn_of(qp, 0, Mutant::None)
}

pub(crate) fn endpoint(host: usize, qp: usize) -> Endpoint {
    Endpoint {
        gid: Gid([host as u8 + 1; 16]),
        qpn: logical_qpn(qp),
        incarnation: 7_000 + host as u64,
        connection: 0,
    }
}

impl World {
    fn new(plan: Plan, seed: u64, mutant: Mutant, trace: bool) -> World {
        let count = plan.qps.iter().flat_map(|q| q.msgs.iter().map(Vec::len)).max().unwrap_or(0);
        let defaults = || plan.own_keys().then(|| plan.qps.iter().map(|qp| qp.nic).collect());
        let memory =
            [0, 1].map(|_| HostMemory::new(plan.qps.len(), count, plan.max_len, defaults()));
        let apps = [0, 1].map(|h| {
            (0..plan.qps.len()).map(|q| App::new(h, q, &plan, SQ_DEPTH, &memory)).collect()
        });
        let ends = [0, 1]
            .map(|h| (0..plan.qps.len()).map(|q| Self::new_end(&plan, h, q, mutant)).collect());
        let net = Net::new(&plan);
        let health = [0, 1].map(|_| {
            let mut health = PeerHealth::new(mutant.health());
            for (local, remote) in
                (0..plan.rails).flat_map(|l| (0..plan.rails).map(move |r| (l, r)))
            {
                if net.connected(local, remote) {
                    health.add(SlotPath { local: local as u8, remote: remote as u8 });
                }
            }
            health
        });
        World {
            now_us: 0,
            rng: Rng::new(!seed),
            net,
            memory,
            ends,
            apps,
            health,
            health_at_us: [u64::MAX; 2],
            crashed: [false; 2],
            restarted: [false; 2],
            homecomings: vec![None; plan.qps.len()],
            stopped_us: [0; 2],
            stats: Stats::default(),
            trace,
            violation: None,
            heap: BinaryHeap::new(),
            order: 0,
            plan,
            mutant,
        }
    }

    fn new_end(plan: &Plan, host: usize, qp: usize, mutant: Mutant) -> End {
        let nic = plan.qps[qp].nic;
        let default = SlotPath { local: nic as u8, remote: nic as u8 };
        let table = SlotTable::new(default, plan.rails as u8, plan.rails as u8, host == 0);
        let config = Config { mutation: mutant.in_path(), ..Config::default() };
        let mut lqp = LogicalQp::new(endpoint(host, qp), endpoint(1 - host, qp), table, config, 0);
        if mutant == Mutant::NoHysteresis {
            lqp.set_policy(Arc::new(Policy { min_away_us: 0, ..Policy::default() }));
        }
        let (ours, theirs) = (host, 1 - host);
        let qpn = qpn_of(qp, 0, mutant);
        let srq = plan.qps[qp].srq[host].then(|| SharedQueue::new(mutant == Mutant::LostReceive));
        let mut life = Life {
            qpn,
            number: 0,
            nic,
            remote: nic,
            sq_psn: plan.psn_of(0, ours),
            qp: Phys::new(
                qpn,
                logical_qpn(qp),
                srq.as_ref(),
                plan.kind((host, qp), 0, (nic, nic), mutant),
            ),
            armed_us: u64::MAX,
            over: false,
            wrapped: false,
            failure_told: false,
            again: 0,
            sent: (0, 0),
        };
        life.qp.transport_mut().set_selective(plan.selective[host]);
        life.qp.transport_mut().set_mutation(mutant.in_roce());
        let mtu = plan.mtu[0].min(plan.mtu[1]);
        let none = &mut Wcs::default();
        let app = app(plan.timeout, plan.retry_cnt, plan.rnr_retry(host, qp));
        life.qp
            .modify(&ready_to_receive(&app, qpn, plan.psn_of(0, theirs), mtu), none)
            .expect("INIT to RTR");
        life.qp.modify(&ready_to_send(&app, life.sq_psn), none).expect("RTR to RTS");
        End {
            executor: Some(Executor::new(lqp)),
            lives: vec![life],
            srq,
            suspected: None,
            failed: false,
            app_sleeps: false,
            path_at_us: u64::MAX,
            look_at_us: u64::MAX,
            left_in: vec![None; plan.qps[qp].msgs[host].len()],
        }
    }

    pub(crate) fn push(&mut self, at_us: u64, event: Event) {
        self.order += 1;
        self.heap.push(Reverse(Due { at_us, order: self.order, event }));
    }

    /// Prints a line of the trace.
    pub(crate) fn say(&self, line: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>9} {}", self.now_us, line());
        }
    }

    fn run(&mut self) -> Result<(), Violation> {
        self.begin();
        let limit_us = self.plan.healed_us + END_US;
        let late_us = self.plan.late_us.max(1_000) + 4 * self.plan.latency_us;
        let mut until_us = u64::MAX;
        while let Some(Reverse(due)) = self.heap.pop() {
            if due.at_us > until_us {
                break;
            }
            self.now_us = due.at_us;
            self.stats.events += 1;
            self.handle(due.event)?;
            self.violation.take().map_or(Ok(()), Err)?;
            if until_us == u64::MAX && self.finished() {
                until_us = self.now_us.max(self.plan.healed_us) + late_us; // whatever is still on its way must do no harm
            }
            if self.stats.events > MAX_EVENTS || (until_us == u64::MAX && self.now_us > limit_us) {
                return Err(self.stuck());
            }
        }
        if until_us == u64::MAX {
            return Err(self.stuck());
        }
        self.judge()
    }

    fn begin(&mut self) {
        for host in 0..2 {
            for qp in 0..self.plan.qps.len() {
                self.push(0, Event::App { host, qp });
                self.with(host, qp, |executor, env| executor.beliefs_changed(env));
            }
        }
        if self.plan.goes_home {
            (0..2).for_each(|host| self.push(home::LOOK_US, Event::Home { host }));
        }
        for (at, fault) in self.plan.faults.clone() {
            self.push(at, Event::Fault(fault));
        }
    }

    /// Whether every application has all that it is owed, and no switch is under way.
    fn finished(&self) -> bool {
        (0..2).filter(|&h| !self.crashed[h]).all(|h| {
            let other_crashed = self.crashed[1 - h];
            let calm = |e: &End| e.executor().deadline_us().is_none();
            self.ends[h].iter().all(calm)
                && self.apps[h].iter().zip(&self.apps[1 - h]).all(|(a, peer)| match other_crashed {
                    true => a.sends_finished(),
                    false => a.finished(peer),
                })
        })
    }

    fn stuck(&self) -> Violation {
        let mut text = String::from("the work does not end:");
        for (host, ends) in self.ends.iter().enumerate() {
            for (qp, end) in ends.iter().enumerate() {
                let (app, path) = (&self.apps[host][qp], end.lqp());
                if !app.finished(&self.apps[1 - host][qp]) {
                    text += &format!(
                        " host {host} qp {qp} epoch {} {:?} outstanding {};",
                        path.epoch(),
                        path.state(),
                        app.outstanding()
                    );
                }
            }
        }
        text
    }

    /// The last look: memory, failures that had no cause, QPs that nothing touched.
    fn judge(&mut self) -> Result<(), Violation> {
        for qp in 0..self.plan.qps.len() {
            for host in 0..2 {
                self.apps[host][qp].check_memory(&self.memory, &self.apps[1 - host][qp])?;
                let (end, due) = (&self.ends[host][qp], self.apps[host][qp].receives_left());
                if end.unused_shared().is_some_and(|there| there != due) {
                    return Err(format!(
                        "qp {qp} host {host}: {:?} shared receives for {due}",
                        end.unused_shared()
                    ));
                }
                self.stats.plans_cancelled += end.lqp().counters().plans_cancelled;
                let hidden = self.plan.own_of(qp).is_some_and(|own| own.host == host);
                self.stats.hidden_own_errors +=
                    u64::from(hidden && !self.apps[host][qp].got_own_error());
                self.stats.given_back += end.srq.as_ref().map_or(0, |s| s.given_back());
            }
            let failed = [0, 1].map(|h: usize| {
                self.ends[h][qp].lqp().state() == State::Failed || self.apps[h][qp].failed()
            });
            // Planned switches alone fail nothing, atomics and what must not be replayed included.
            let own = self.plan.own_of(qp).is_some(); // see `App::check_memory`
            let excused = own
                || self.plan.crash
                || (self.plan.qps[qp].no_replay
                    && !self.plan.only_planned(qp)
                    && !self.plan.only_grey());
            if failed != [false; 2] && !excused {
                return Err(format!("qp {qp} failed without a cause: {failed:?}"));
            }
            if failed[0] != failed[1] && !self.plan.crash && !own {
                return Err(format!("qp {qp} failed at one end only: {failed:?}"));
            }
            if self.plan.spares_path(qp) {
                let moved = |end: &End| end.lqp().path() != end.lqp().slots().get(0);
                if self.ends.iter().any(|ends| moved(&ends[qp])) {
                    return Err(format!("qp {qp} left a path that works"));
                }
                self.stats.spared_paths += 1;
            }
            if self.plan.spares(qp) {
                self.stats.spared_qps += 1;
                if self.ends[0][qp].lqp().epoch() + self.ends[1][qp].lqp().epoch() > 0 {
                    return Err(format!("qp {qp} was switched though nothing touched it"));
                }
            }
        }
        Ok(())
    }

    // ---- beliefs and suspicions ----

    /// What a host knows of a path.
    pub(crate) fn liveness(&self, host: usize, path: SlotPath) -> Liveness {
        let (local, remote) = (usize::from(path.local), usize::from(path.remote));
        if !self.net.nic_works(host, local) {
            Liveness::NoNic
        } else if !self.net.connected(local, remote)
            || self.health[host].is_dead(path)
            || self.health[host].is_shunned(path)
        {
            Liveness::Silent
        } else {
            Liveness::Alive
        }
    }

    /// Whether the directory tells a host that the process at the other end is no more.
    pub(crate) fn knows_peer_ended(&self, host: usize) -> bool {
        self.crashed[1 - host] && self.plan.crash_is_told
    }

    /// Remembers what went wrong where nobody can be told.
    pub(crate) fn note(&mut self, result: Result<(), Violation>) {
        if let (Err(e), None) = (result, &self.violation) {
            self.violation = Some(e);
        }
    }

    /// It has been found out whether a path lives.
    pub(crate) fn verdict(&mut self, host: usize, path: SlotPath, verdict: Verdict) {
        self.say(|| format!("host {host} finds {path:?} {verdict:?}"));
        for qp in 0..self.ends[host].len() {
            self.watched(host, qp, |executor, env| executor.verdict(env, path, verdict));
        }
    }

    /// The end suspects its path.
    pub(crate) fn suspect(&mut self, host: usize, qp: usize, reason: Reason) {
        self.watched(host, qp, |executor, env| executor.suspect(env, reason));
    }

    /// Lets an executor work, and counts whether a switch began by it.
    pub(crate) fn watched<R>(
        &mut self,
        host: usize,
        qp: usize,
        f: impl FnOnce(&mut Executor, &mut SimEnv<'_>) -> R,
    ) -> R {
        let before = self.ends[host][qp].lqp().clone();
        let result = self.with(host, qp, f);
        let after = self.ends[host][qp].lqp();
        // A plain device takes its time: the QP leaves its epoch when it has stopped.
        let leaves = after.epoch() != before.epoch() || after.state() == State::Quiescing;
        let reason = after.attempt().map(|a| a.reason).filter(|_| leaves);
        if let Some(reason) =
            reason.filter(|r| before.state() == State::Active && *r != Reason::Peer)
        {
            let epoch = before.epoch();
            self.ends[host][qp].suspected = Some(epoch);
            self.stats.simultaneous += u64::from(self.ends[1 - host][qp].suspected == Some(epoch));
            self.stats.stalls += u64::from(reason == Reason::Stall);
            self.stats.wedged += u64::from(matches!(reason, Reason::Wedged(_)));
            self.say(|| format!("host {host} qp {qp} suspects epoch {epoch}: {reason:?}"));
        }
        result
    }

    pub(crate) fn data_conditions(&self) -> Conditions {
        let p = &self.plan;
        Conditions {
            loss_ppm: p.loss_ppm,
            dup_ppm: p.dup_ppm,
            late_ppm: p.late_ppm,
            late_us: p.late_us,
        }
    }

    pub(crate) fn control_conditions(&self) -> Conditions {
        let p = &self.plan;
        let late_us = p.late_us.max(50_000);
        Conditions {
            loss_ppm: p.ctrl_loss_ppm,
            dup_ppm: p.ctrl_late_ppm,
            late_ppm: p.ctrl_late_ppm,
            late_us,
        }
    }

    /// Whether message `k` of an end must not be sent in two lives.
    pub(crate) fn once_only(&self, host: usize, qp: usize, k: usize) -> bool {
        self.plan.qps[qp].msgs[host][k].flags.contains(SendFlags::NO_REPLAY)
    }
}
