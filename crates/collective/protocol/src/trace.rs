//! Tracing a failure: who is asked what, so that [`locate`] can judge.
//!
//! The lower rank of a path that has failed opens a *trace*, one a rail at a time. If its own NIC
//! has no link, the verdict is that. Else it asks the other end to probe it, and a rank of a third
//! host to probe both; when all have answered, or the time is over, it judges and all ranks are
//! told.
//!
//! A probe is a queue pair at each end, made for it: the prober offers, the other accepts (or says
//! that its NIC cannot), the prober writes no bytes, and both end it. Data goes on over other paths
//! meanwhile; nothing waits for a trace.

use crate::engine::Engine;
use crate::env::{Env, ProbeId};
use crate::locate::{locate, Evidence, Fault, Outcome, Place, Verdict};
use crate::message::{Message, News, Probe};
use crate::paths::State;
use crate::Rank;

/// How long a trace lasts, and within that a probe.
const TRACE_US: u64 = 1_500_000;
const PROBE_US: u64 = 1_000_000;
/// Probes that a rank makes, and answers, at one time.
const MAX_PROBES: usize = 64;

/// A trace that waits for answers.
#[derive(Clone, Copy, Debug)]
struct Trace {
    id: u32,
    peer: Rank,
    evidence: Evidence,
    /// The rank of a third host.
    aux: Option<Rank>,
    until_us: u64,
}

/// A probe for somebody's trace.
#[derive(Clone, Copy, Debug)]
struct Probing {
    id: ProbeId,
    for_rank: Rank,
    trace: u32,
    target: Rank,
    until_us: u64,
}

/// What goes on.
#[derive(Debug)]
pub(crate) struct Traces {
    /// By rail.
    open: Vec<Option<Trace>>,
    probing: Vec<Probing>,
    answering: Vec<(ProbeId, u64)>,
    next: u32,
}

impl Traces {
    pub(crate) fn new(rails: usize) -> Traces {
        Traces { open: vec![None; rails], probing: Vec::new(), answering: Vec::new(), next: 0 }
    }
}

impl Engine {
    /// A path that was up has failed.
    pub(crate) fn trace(&mut self, peer: Rank, rail: u8, env: &mut impl Env) {
        let (me, at) = (self.config.me, self.index(rail));
        let (host, its) = (self.config.hosts[me], self.config.hosts[peer]);
        let known = self.is_known(host, rail) || self.is_known(its, rail);
        // One that has left has closed what there was.
        let gone = self.failure.is_some() || self.left[peer].is_some();
        if me > peer || known || gone || self.traces.open[at].is_some() {
            return;
        }
        if !env.has_link(rail) {
            return self.find(Fault::Nic(Place { host, rail }), env);
        }
        self.traces.next += 1;
        let id = self.traces.next;
        let third = |rank: &Rank| ![host, its].contains(&self.config.hosts[*rank]);
        let aux = (0..self.peers.len()).find(third);
        let evidence = Evidence { near: Outcome::Answers, ..Evidence::default() };
        let until_us = self.now_us + TRACE_US;
        self.traces.open[at] = Some(Trace { id, peer, evidence, aux, until_us });
        let ask = |target| Message::Probe(Probe::Ask { id, target, rail });
        env.tell(peer, &ask(me));
        if let Some(aux) = aux {
            env.tell(aux, &ask(me));
            env.tell(aux, &ask(peer));
        }
    }

    fn find(&mut self, fault: Fault, env: &mut impl Env) {
        let verdict = Verdict { by: self.config.me, fault };
        self.spread(None, &News::Verdict(verdict), env);
        self.on_verdict(&verdict, env);
    }

    /// Judges a trace.
    fn close_trace(&mut self, at: usize, env: &mut impl Env) {
        let Some(trace) = self.traces.open[at].take() else { return };
        let place = |rank: Rank| Place { host: self.config.hosts[rank], rail: at as u8 };
        let fault = locate(&trace.evidence, place(self.config.me), place(trace.peer), trace.peer);
        // It is over: what was wrong has been mended meanwhile.
        if self.peers[trace.peer].paths[at].state == State::Up
            && !matches!(fault, Fault::QueuePair(..))
        {
            return;
        }
        self.find(fault, env);
    }

    pub(crate) fn on_probe(&mut self, from: Rank, probe: &Probe, env: &mut impl Env) {
        match probe {
            Probe::Ask { id, target, rail }
                if *target < self.peers.len() && *rail < self.config.rails =>
            {
                self.begin_probe(from, *id, *target, *rail, env);
            }
            Probe::Told { id, target, outcome } => self.on_told(from, *id, *target, *outcome, env),
            Probe::Offer { id, rail, address } if *rail < self.config.rails => {
                let id = ProbeId { prober: from, number: *id };
                let mine = match self.traces.answering.len() < MAX_PROBES && env.has_link(*rail) {
                    true => env.open_probe(id, *rail),
                    false => None,
                };
                let address = mine.filter(|_| env.connect_probe(id, address)).unwrap_or_default();
                if address.is_empty() {
                    env.close_probe(id);
                } else {
                    self.traces.answering.push((id, self.now_us + 2 * PROBE_US));
                }
                env.tell(from, &Message::Probe(Probe::Accept { id: id.number, address }));
            }
            Probe::Accept { id, address } => {
                let id = ProbeId { prober: self.config.me, number: *id };
                if self.traces.probing.iter().any(|p| p.id == id && p.target == from) {
                    if address.is_empty() {
                        self.end_probe(id, Outcome::ItsNic, env);
                    } else if !env.connect_probe(id, address) || !env.send_probe(id) {
                        self.end_probe(id, Outcome::OwnNic, env);
                    }
                }
            }
            Probe::Over { id } => {
                let id = ProbeId { prober: from, number: *id };
                self.traces.answering.retain(|(other, _)| *other != id);
                env.close_probe(id);
            }
            _ => self.broke(from, 12, env),
        }
    }

    /// Probes a rank for somebody.
    fn begin_probe(
        &mut self,
        for_rank: Rank,
        trace: u32,
        target: Rank,
        rail: u8,
        env: &mut impl Env,
    ) {
        self.traces.next += 1;
        let id = ProbeId { prober: self.config.me, number: self.traces.next };
        let room = self.traces.probing.len() < MAX_PROBES;
        let address = if room && env.has_link(rail) { env.open_probe(id, rail) } else { None };
        let Some(address) = address else {
            let told = Probe::Told { id: trace, target, outcome: Outcome::OwnNic };
            return env.tell(for_rank, &Message::Probe(told));
        };
        self.traces.probing.push(Probing {
            id,
            for_rank,
            trace,
            target,
            until_us: self.now_us + PROBE_US,
        });
        env.tell(target, &Message::Probe(Probe::Offer { id: id.number, rail, address }));
    }

    /// What came of a probe's write.
    pub fn on_probed(&mut self, id: ProbeId, answered: bool, env: &mut impl Env) {
        let outcome = if answered { Outcome::Answers } else { Outcome::Silent };
        if id.prober == self.config.me {
            self.end_probe(id, outcome, env);
        }
    }

    fn end_probe(&mut self, id: ProbeId, outcome: Outcome, env: &mut impl Env) {
        let Some(at) = self.traces.probing.iter().position(|p| p.id == id) else { return };
        let probing = self.traces.probing.swap_remove(at);
        env.close_probe(id);
        env.tell(probing.target, &Message::Probe(Probe::Over { id: id.number }));
        let told = Probe::Told { id: probing.trace, target: probing.target, outcome };
        env.tell(probing.for_rank, &Message::Probe(told));
    }

    fn on_told(&mut self, from: Rank, id: u32, target: Rank, outcome: Outcome, env: &mut impl Env) {
        let of = |trace: &Option<Trace>| trace.is_some_and(|t| t.id == id);
        let Some(at) = self.traces.open.iter().position(of) else { return };
        let me = self.config.me;
        let Some(trace) = &mut self.traces.open[at] else { return };
        let e = &mut trace.evidence;
        if from == trace.peer {
            match outcome {
                Outcome::OwnNic => e.far = Outcome::OwnNic,
                // It has died since.
                Outcome::ItsNic => (e.near, e.far) = (Outcome::OwnNic, Outcome::Answers),
                other => (e.far, e.direct) = (Outcome::Answers, other),
            }
        } else if trace.aux == Some(from) {
            match (outcome, target == me) {
                // One whose own NIC is bad has seen nothing.
                (Outcome::OwnNic, _) => trace.aux = None,
                (seen, true) => e.aux_near = seen,
                (seen, false) => e.aux_far = seen,
            }
        }
        let e = trace.evidence;
        let aux_done = trace.aux.is_none() || ![e.aux_near, e.aux_far].contains(&Outcome::Unknown);
        let clear = [e.near, e.far].contains(&Outcome::OwnNic) || e.direct == Outcome::Answers;
        if clear || (e.direct != Outcome::Unknown && aux_done) {
            self.close_trace(at, env);
        }
    }

    /// Ends what has lasted too long.
    pub(crate) fn tend_traces(&mut self, env: &mut impl Env) {
        let now_us = self.now_us;
        for at in 0..self.traces.open.len() {
            if self.traces.open[at].is_some_and(|t| t.until_us <= now_us) {
                self.close_trace(at, env);
            }
        }
        while let Some(probing) = self.traces.probing.iter().find(|p| p.until_us <= now_us).copied()
        {
            self.end_probe(probing.id, Outcome::Silent, env);
        }
        while let Some(at) = self.traces.answering.iter().position(|(_, until)| *until <= now_us) {
            let (id, _) = self.traces.answering.swap_remove(at);
            env.close_probe(id);
        }
    }
}
