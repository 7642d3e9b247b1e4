//! Events in their order: requests that come, passes that end, KV caches that arrive, a failure.
//!
//! Every pass has a token at least, and nothing begins again more than once; so a run ends.
//! Passes of an instance go through its stages one behind the other, and end in that order.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::arrivals::Request;
use super::handling::{Handling, Times};
use super::instance::{Instance, Pass, Progress, Role};
use super::pace::{Load, Pace};
use super::results::{Outcome, Quantiles};
use super::serving::Serving;
use super::When;
use crate::{Error, Stop};

/// What a run needs.
pub(super) struct Setting<'s> {
    pub serving: &'s Serving,
    pub times: Times,
    pub handling: Handling,
    /// With all NICs.
    pub healthy: &'s Pace,
    /// With those that are left, where communicators go on.
    pub after: Option<&'s Pace>,
    /// When NICs are lost, and of which instances of the first replica.
    pub fault: Option<(When, &'s [usize])>,
    /// Whether the run is still wanted.
    pub stop: &'s Stop,
}

/// A time that can be ordered.
#[derive(Clone, Copy, Debug, PartialEq)]
struct At(f64);

impl Eq for At {}

impl Ord for At {
    fn cmp(&self, other: &At) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &At) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A request comes.
    Arrival(usize),
    /// A pass of an instance ends.
    Ended { instance: usize, pass: u64 },
    /// An instance's first stage is free.
    Free(usize),
    /// A replica may send a KV cache again.
    Send(usize),
    /// A KV cache has arrived.
    Sent { replica: usize, request: usize },
    /// NICs are lost.
    Fault,
    /// An instance is in service again.
    Back(usize),
}

/// KV caches on their way from prefill to decode.
#[derive(Default)]
struct Link {
    /// Requests whose prompts are computed, in order; the first may be on its way.
    queue: VecDeque<usize>,
    /// Which is, and when it arrives.
    sending: Option<(usize, f64)>,
    /// Nothing is sent before.
    held_s: f64,
}

pub(super) struct Engine<'s> {
    setting: Setting<'s>,
    requests: Vec<Request>,
    /// Of these the first are the first replica's.
    first: usize,
    progress: Vec<Progress>,
    /// Those of the first replica, then those of the second.
    instances: Vec<Instance>,
    links: Vec<Link>,
    events: BinaryHeap<Reverse<(At, u64, Event)>>,
    /// How many events there were: those of the same time come in this order.
    count: u64,
    passes: u64,
    now_s: f64,
    failed_at_s: Option<f64>,
}

impl<'s> Engine<'s> {
    /// Requests of the replica that is looked at, and of another that may take them over.
    pub fn new(setting: Setting<'s>, requests: &[Request], others: &[Request]) -> Engine<'s> {
        let serving = setting.serving;
        let roles: &[Role] = match serving.disaggregated {
            true => &[Role::Prefill, Role::Decode],
            false => &[Role::Whole],
        };
        let replicas = if setting.handling == Handling::Reroute { 2 } else { 1 };
        let others = if replicas == 2 { others } else { &[] };
        let of_replica = |_| roles.iter().map(|role| Instance::new(*role, serving));
        let all: Vec<Request> = requests.iter().chain(others).copied().collect();
        let mut engine = Engine {
            first: requests.len(),
            progress: vec![Progress::default(); all.len()],
            instances: (0..replicas).flat_map(of_replica).collect(),
            links: (0..replicas).map(|_| Link::default()).collect(),
            requests: all,
            events: BinaryHeap::new(),
            count: 0,
            passes: 0,
            now_s: 0.0,
            failed_at_s: None,
            setting,
        };
        for number in 0..engine.requests.len() {
            engine.at(engine.requests[number].arrival_s, Event::Arrival(number));
        }
        if let Some((When::Second(second), _)) = engine.setting.fault {
            engine.at(second, Event::Fault);
        }
        engine
    }

    fn at(&mut self, time_s: f64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((At(time_s.max(self.now_s)), self.count, event)));
    }

    /// Until nothing is left to do, or it is stopped.
    pub fn run(mut self) -> Result<Outcome, Error> {
        while let Some(Reverse((At(now_s), _, event))) = self.events.pop() {
            self.setting.stop.check()?;
            self.now_s = now_s;
            match event {
                Event::Arrival(request) => self.arrive(request),
                Event::Ended { instance, pass } => self.ended(instance, pass),
                Event::Free(instance) => {
                    self.instances[instance].wake_s = None;
                    self.begin(instance);
                }
                Event::Send(replica) => self.send(replica),
                Event::Sent { replica, request } => self.sent(replica, request),
                Event::Fault => self.fault(),
                Event::Back(instance) => {
                    self.instances[instance].up = true;
                    self.begin(instance);
                    self.send(self.replica_of(instance));
                }
            }
        }
        Ok(self.outcome())
    }

    fn outcome(&self) -> Outcome {
        let mine = || self.requests.iter().zip(&self.progress).take(self.first);
        let times = |of: fn(&Request, &Progress) -> Option<f64>| {
            Quantiles::of(mine().filter_map(|(r, p)| of(r, p)).collect())
        };
        let finished = mine().filter(|(_, p)| p.end_s.is_some()).count();
        Outcome {
            requests: self.first,
            finished,
            lost: self.first - finished,
            failed_at_s: self.failed_at_s,
            ttft_s: times(|r, p| Some(p.first_s? - r.arrival_s)),
            tpot_s: times(|r, p| match r.output {
                1 => None,
                tokens => Some((p.end_s? - p.first_s?) / f64::from(tokens - 1)),
            }),
            latency_s: times(|r, p| Some(p.end_s? - r.arrival_s)),
        }
    }

    fn replica_of(&self, instance: usize) -> usize {
        instance / self.setting.serving.instances()
    }

    /// The instance of a replica that takes prompts.
    fn entrance(&self, replica: usize) -> usize {
        replica * self.setting.serving.instances()
    }

    fn pace(&self, replica: usize) -> &'s Pace {
        match self.setting.after {
            Some(after) if replica == 0 && self.failed_at_s.is_some() => after,
            _ => self.setting.healthy,
        }
    }

    fn arrive(&mut self, request: usize) {
        let home = usize::from(request >= self.first);
        let failed = self.failed_at_s.is_some() && home == 0;
        let replica = match self.setting.handling {
            Handling::Reroute if failed => 1,
            _ => home,
        };
        let entrance = self.entrance(replica);
        self.instances[entrance].waiting.push_back(request);
        self.begin(entrance);
    }

    /// Begins as many passes as there is work and room for.
    fn begin(&mut self, number: usize) {
        let serving = self.setting.serving;
        let copied = self.setting.handling == Handling::DejaVu;
        let pace = &self.pace(self.replica_of(number)).instances[number % serving.instances()];
        loop {
            let instance = &mut self.instances[number];
            if !instance.up || instance.passes.len() >= serving.pipeline {
                return;
            }
            let free_s = instance.free_s[0];
            if free_s > self.now_s {
                if instance.wake_s.is_none() {
                    instance.wake_s = Some(free_s);
                    self.at(free_s, Event::Free(number));
                }
                return;
            }
            let parts = instance.compose(serving, &self.requests, &mut self.progress);
            if parts.is_empty() {
                return;
            }
            let mut load = Load::default();
            for (request, new) in &parts {
                load.add(self.progress[*request].context, *new);
            }
            let mut end_s = self.now_s;
            for stage in 0..serving.pipeline {
                let begins_s = end_s.max(instance.free_s[stage]);
                instance.free_s[stage] = begins_s + pace.stage_s(serving, stage, &load, copied);
                end_s = instance.free_s[stage] + pace.hop_s(serving, stage, load.tokens);
            }
            self.passes += 1;
            let pass = self.passes;
            instance.passes.push_back(Pass { number: pass, parts, end_s });
            self.at(end_s, Event::Ended { instance: number, pass });
        }
    }

    fn ended(&mut self, number: usize, pass: u64) {
        let instance = &mut self.instances[number];
        // else it was cut off
        let Some(end_s) = instance.passes.iter().find(|p| p.number == pass).map(|p| p.end_s) else {
            return;
        };
        if end_s > self.now_s {
            // it was held
            return self.at(end_s, Event::Ended { instance: number, pass });
        }
        let parts = instance.passes.pop_front().map(|p| p.parts).unwrap_or_default();
        for (request, new) in parts {
            let p = &mut self.progress[request];
            p.flying = false;
            p.context += new;
            if p.is_complete(&self.requests[request]) {
                self.complete(number, request);
            }
        }
        self.begin(number);
        self.send(self.replica_of(number));
    }

    /// All known tokens of a request are in the KV cache.
    fn complete(&mut self, number: usize, request: usize) {
        let replica = self.replica_of(number);
        let instance = &mut self.instances[number];
        if instance.role == Role::Prefill {
            instance.remove(request);
            return self.links[replica].queue.push_back(request);
        }
        let p = &mut self.progress[request];
        p.made += 1;
        if p.made > p.shown {
            p.shown = p.made;
            p.first_s.get_or_insert(self.now_s);
        }
        if p.made == self.requests[request].output {
            p.end_s = Some(self.now_s);
            instance.remove(request);
            instance.room += instance.role.claim(&self.requests[request]);
        }
        let shown = u64::from(p.shown);
        let waits = self.failed_at_s.is_none() && request == 0;
        if waits && matches!(self.setting.fault, Some((When::Token(t), _)) if t == shown) {
            self.at(self.now_s, Event::Fault);
        }
    }

    /// Sends the next KV cache, if it can be sent now.
    fn send(&mut self, replica: usize) {
        if !self.setting.serving.disaggregated || self.links[replica].sending.is_some() {
            return;
        }
        let Some(request) = self.links[replica].queue.front().copied() else { return };
        let (prefill, decode) = (self.entrance(replica), self.entrance(replica) + 1);
        let held_s = self.links[replica].held_s;
        let claim = Role::Decode.claim(&self.requests[request]);
        let ready = self.instances[prefill].up && self.instances[decode].up;
        if !ready || claim > self.instances[decode].room {
            return;
        }
        if held_s > self.now_s {
            return self.at(held_s, Event::Send(replica));
        }
        self.instances[decode].room -= claim;
        let prompt = self.requests[request].prompt;
        let takes_s = self.pace(replica).transfer_s(self.setting.serving, prompt);
        let end_s = self.now_s + takes_s;
        self.links[replica].sending = Some((request, end_s));
        self.at(end_s, Event::Sent { replica, request });
    }

    fn sent(&mut self, replica: usize, request: usize) {
        let end_s = match self.links[replica].sending {
            Some((sending, end_s)) if sending == request => end_s,
            // it was cut off
            _ => return,
        };
        if end_s > self.now_s {
            return self.at(end_s, Event::Sent { replica, request });
        }
        self.links[replica].sending = None;
        self.links[replica].queue.pop_front();
        let (prefill, decode) = (self.entrance(replica), self.entrance(replica) + 1);
        self.instances[prefill].room += Role::Prefill.claim(&self.requests[request]);
        // the last token of a prompt is computed once more, which makes the first of the answer
        self.progress[request].context -= 1;
        self.instances[decode].waiting.push_back(request);
        self.begin(decode);
        self.begin(prefill);
        self.send(replica);
    }

    fn fault(&mut self) {
        self.failed_at_s = Some(self.now_s);
        let Some((_, failed)) = self.setting.fault else { return };
        for number in failed {
            match self.setting.handling {
                Handling::HotRepair | Handling::Balance | Handling::Ours => self.hold(*number),
                Handling::DejaVu => self.fetch(*number),
                Handling::Restart => {
                    let all = self.end(*number);
                    let entrance = self.entrance(0);
                    all.into_iter().rev().for_each(|request| {
                        self.instances[entrance].waiting.push_front(request);
                    });
                    self.at(self.now_s + self.setting.times.restart_s, Event::Back(*number));
                    self.begin(entrance);
                }
                // nobody works on these, nor on what still comes
                Handling::None => drop(self.close(*number)),
                Handling::Reroute => {
                    let all = self.close(*number);
                    let entrance = self.entrance(1);
                    self.instances[entrance].waiting.extend(all);
                    self.begin(entrance);
                }
            }
        }
    }

    /// What needs the network stands still for the time of a switch.
    fn hold(&mut self, number: usize) {
        let (now_s, switch_s) = (self.now_s, self.setting.times.switch_s);
        if self.setting.serving.instance_hosts() > 1 {
            self.instances[number].hold(now_s, switch_s);
        }
        let link = &mut self.links[0];
        // one switch, of however many instances
        if link.held_s < now_s + switch_s {
            link.held_s = now_s + switch_s;
            if let Some((_, end_s)) = &mut link.sending {
                *end_s += switch_s;
            }
        }
    }

    /// The instance starts again, with its KV cache.
    fn fetch(&mut self, number: usize) {
        let serving = self.setting.serving;
        self.cut_sending();
        let instance = &mut self.instances[number];
        instance.up = false;
        instance.cut(self.now_s, &mut self.progress);
        let mut kept: Vec<usize> = instance.running.clone();
        kept.extend(instance.waiting.iter());
        if instance.role == Role::Prefill {
            kept.extend(self.links[0].queue.iter());
        }
        let tokens = kept.iter().map(|r| u64::from(self.progress[*r].context)).sum();
        let pace = &self.setting.healthy.instances[number];
        let restore_s = pace.restore_s(serving, tokens);
        self.at(self.now_s + self.setting.times.restart_s + restore_s, Event::Back(number));
    }

    /// A KV cache on its way does not arrive; it is sent again.
    fn cut_sending(&mut self) {
        if let Some((request, _)) = self.links[0].sending.take() {
            self.instances[1].room += Role::Decode.claim(&self.requests[request]);
        }
    }

    /// The instance ends: what it had has to begin again.
    fn end(&mut self, number: usize) -> Vec<usize> {
        self.cut_sending();
        let serving = self.setting.serving;
        let instance = &mut self.instances[number];
        instance.up = false;
        instance.cut(self.now_s, &mut self.progress);
        let mut all = Vec::new();
        if instance.role == Role::Prefill {
            all.extend(self.links[0].queue.drain(..));
        }
        all.extend(instance.empty(serving));
        all.iter().for_each(|request| self.progress[*request].reset());
        all
    }

    /// The same for good; without an instance that generates, prompts need not be computed either.
    fn close(&mut self, number: usize) -> Vec<usize> {
        let mut all = self.end(number);
        if self.instances[number].role == Role::Decode {
            all.extend(self.end(self.entrance(0)));
        }
        all
    }
}
