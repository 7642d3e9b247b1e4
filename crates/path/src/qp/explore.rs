//! Explicit-state exploration of two [`LogicalQp`]s: the product's own code against the strongest adversary.
//!
//! Each end sends `messages` two-sided messages. Data of an epoch travels in order on its path, and only between the physical QPs of
//! that epoch. A path may die at any moment: all in flight on it is lost. An end may suspect its path at any moment, also wrongly, so
//! that old packets arrive late. Control messages are unreliable, unordered and repeated for ever: once sent, one may be delivered at
//! any later time. Time stands still: what a timer would repeat is said already.
//!
//! Checked in every state: each receiver takes each message once and in order; no sender takes a completion for what it has not sent;
//! no end fails; and when the network turns kind, the work comes to its end.

use super::*;
use crate::message::Message;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};
use unbroken_roce::PeerDone;

/// The limits of an exploration.
#[derive(Clone, Copy)]
struct Limits {
    rails: u8,
    messages: u64,
    wrong_suspicions: u32,
    /// Nobody suspects beyond this epoch.
    max_epoch: u64,
    mutation: crate::config::Mutation,
}

/// The data of one end.
#[derive(Default, Clone, Copy, Hash)]
struct Data {
    sent: u64,
    completed: u64,
    received: u64,
    life_completed: u64,
    life_received: u64,
    receives: bool,
    sends: bool,
}

#[derive(Clone)]
struct World {
    limits: Limits,
    ends: [LogicalQp; 2],
    data: [Data; 2],
    /// (epoch, sender) → packets in flight; an ACK has the high bit set.
    wire: BTreeMap<(u64, usize), VecDeque<u64>>,
    /// Everything that was ever said, and to whom.
    said: Vec<(usize, Message)>,
    dead: Vec<u8>,
    wrong_left: u32,
    now_us: u64,
}

/// Something that may happen next.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send(usize),
    Suspect(usize),
    Hear(usize),
    Arrive(u64, usize),
    Die(u8),
}

/// What must not be.
type Bad = String;

const ACK: u64 = 1 << 63;

impl World {
    fn new(limits: Limits) -> World {
        let end = |n: u8| {
            let me =
                |n: u8| Endpoint { gid: unbroken_types::Gid([n; 16]), qpn: 16, incarnation: n.into(), connection: 0 };
            let table = SlotTable::new(SlotPath { local: 0, remote: 0 }, limits.rails, limits.rails, n == 0);
            let config = Config { free_epochs: 64, mutation: limits.mutation, ..Config::default() };
            let mut q = LogicalQp::new(me(n), me(1 - n), table, config, 0);
            for (slot, path) in q.slots().clone().iter() {
                // Across rails there is no path, so that an epoch's rail is its number modulo the rails.
                let belief = if path.local == path.remote { Belief::Alive } else { Belief::NoNic };
                q.set_belief(0, slot, belief);
            }
            q
        };
        World {
            limits,
            ends: [end(0), end(1)],
            data: [Data { receives: true, sends: true, ..Data::default() }; 2],
            wire: BTreeMap::new(),
            said: Vec::new(),
            dead: Vec::new(),
            wrong_left: limits.wrong_suspicions,
            now_us: 0,
        }
    }

    fn rail(&self, epoch: u64) -> u8 {
        slot_path(&self.ends[0], epoch)
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for i in 0..2 {
            let epoch = self.ends[i].epoch();
            let dead = self.dead.contains(&self.rail(epoch));
            if self.data[i].sends && self.data[i].sent < self.limits.messages && !dead {
                steps.push(Step::Send(i));
            }
            if epoch < self.limits.max_epoch && (dead || self.wrong_left > 0) {
                steps.push(Step::Suspect(i));
            }
        }
        for rail in 0..self.limits.rails {
            if !self.dead.contains(&rail) && self.dead.len() + 1 < usize::from(self.limits.rails) {
                steps.push(Step::Die(rail));
            }
        }
        steps.extend((0..self.said.len()).map(Step::Hear));
        steps.extend(self.wire.keys().map(|&(epoch, from)| Step::Arrive(epoch, from)));
        steps
    }

    fn step(&mut self, step: Step) -> Result<(), Bad> {
        match step {
            Step::Send(i) => {
                let (epoch, d) = (self.ends[i].epoch(), &mut self.data[i]);
                self.wire.entry((epoch, i)).or_default().push_back(d.sent);
                d.sent += 1;
                Ok(())
            }
            Step::Suspect(i) => {
                let epoch = self.ends[i].epoch();
                if !self.dead.contains(&self.rail(epoch)) {
                    self.wrong_left -= 1;
                }
                for &rail in &self.dead {
                    let path = SlotPath { local: rail, remote: rail };
                    self.ends[i].set_path_belief(self.now_us, path, Belief::Silent);
                }
                self.ends[i].suspect(self.now_us, epoch, Reason::Stall);
                self.drive(i)
            }
            Step::Hear(n) => {
                let (to, message) = self.said[n];
                self.ends[to].handle_message(self.now_us, &message);
                self.drive(to)
            }
            Step::Arrive(epoch, from) => self.arrive(epoch, from),
            Step::Die(rail) => {
                self.dead.push(rail);
                self.dead.sort_unstable();
                let end = self.ends[0].clone();
                self.wire.retain(|&(epoch, _), _| slot_path(&end, epoch) != rail);
                Ok(())
            }
        }
    }

    fn drive(&mut self, i: usize) -> Result<(), Bad> {
        let now_us = self.now_us;
        while let Some(action) = self.ends[i].poll_action() {
            let d = &mut self.data[i];
            match action {
                Action::Fence { .. } | Action::Release { .. } => return Err("nobody plans here".into()),
                Action::Quiesce { .. } => {
                    let (executed, completed) = (d.life_received, d.life_completed);
                    let outstanding = self.limits.messages - d.completed;
                    (d.life_received, d.life_completed, d.receives, d.sends) = (0, 0, false, false);
                    let [executed, completed, outstanding] = [executed, completed, outstanding].map(Messages::writes);
                    let life =
                        Quiesced { executed, exact: true, completed, outstanding, progressed: true, idle: false };
                    self.ends[i].handle_quiesced(now_us, Ok(life));
                }
                Action::Open { epoch, .. } => {
                    let opened = Opened { qpn: epoch as u32 + 2, psn: 0, mtu: Mtu::B1024 };
                    self.ends[i].handle_opened(now_us, epoch, Ok(opened));
                }
                Action::CheckReplay { epoch, .. } => self.ends[i].handle_check(now_us, epoch, true),
                Action::Connect { peer_done, .. } => {
                    let PeerDone::Messages(peer_done) = peer_done else { panic!("counts are exact here") };
                    d.completed += peer_done; // they complete without the wire
                    d.life_completed = peer_done;
                    d.sent = d.completed;
                    d.receives = true;
                }
                Action::Start { .. } => d.sends = true,
                Action::Send { message, .. } => {
                    if !self.said.contains(&(1 - i, message)) {
                        self.said.push((1 - i, message));
                    }
                }
                Action::Fail { cause, .. } => return Err(format!("end {i} failed: {cause:?}")),
                Action::Report(_) => {}
            }
        }
        Ok(())
    }

    fn arrive(&mut self, epoch: u64, from: usize) -> Result<(), Bad> {
        let Some(queue) = self.wire.get_mut(&(epoch, from)) else { return Ok(()) };
        let packet = queue.pop_front();
        if queue.is_empty() {
            self.wire.remove(&(epoch, from));
        }
        let (Some(packet), to) = (packet, 1 - from) else { return Ok(()) };
        if self.ends[to].epoch() != epoch || !self.data[to].receives {
            return Ok(()); // an older life is stopped, a newer one is not connected yet
        }
        let d = &mut self.data[to];
        if packet & ACK != 0 {
            let through = (packet & !ACK) + 1;
            if through > d.sent {
                return Err(format!("end {to}: message {} completed before it was sent", through - 1));
            }
            let more = through.saturating_sub(d.completed);
            (d.completed, d.life_completed) = (d.completed + more, d.life_completed + more);
            return Ok(());
        }
        match packet.cmp(&d.received) {
            core::cmp::Ordering::Less => return Err(format!("end {to} got message {packet} again")),
            core::cmp::Ordering::Greater => return Ok(()), // behind one that was lost: go-back-N
            core::cmp::Ordering::Equal => (d.received, d.life_received) = (d.received + 1, d.life_received + 1),
        }
        self.wire.entry((epoch, to)).or_default().push_back(ACK | packet);
        self.ends[to].handle_progress(self.now_us, epoch);
        self.drive(to)
    }

    fn finished(&self) -> bool {
        self.data.iter().all(|d| d.completed == self.limits.messages && d.received == self.limits.messages)
    }

    /// The network turns kind: what was begun must come to its end. Data that was lost makes its sender suspect.
    fn finish(mut self) -> Result<(), Bad> {
        self.dead.clear();
        for i in 0..2 {
            for rail in 0..self.limits.rails {
                let path = SlotPath { local: rail, remote: rail };
                self.ends[i].set_path_belief(0, path, Belief::Alive);
                self.drive(i)?;
            }
        }
        for round in 0..200 {
            self.now_us += 1_000;
            for i in 0..2 {
                if round == 20 && !self.finished() {
                    let epoch = self.ends[i].epoch();
                    self.ends[i].suspect(self.now_us, epoch, Reason::Stall);
                }
                self.ends[i].handle_timeout(self.now_us);
                self.drive(i)?;
                while self.data[i].sends && self.data[i].sent < self.limits.messages {
                    self.step(Step::Send(i))?;
                }
            }
            for (to, message) in core::mem::take(&mut self.said) {
                self.ends[to].handle_message(self.now_us, &message);
                self.drive(to)?;
            }
            while let Some(&(epoch, from)) = self.wire.keys().next() {
                self.arrive(epoch, from)?;
            }
            if self.finished() {
                return Ok(());
            }
        }
        Err(format!("no end: {:?} and {:?}", self.ends[0].state(), self.ends[1].state()))
    }

    /// A name for all states that behave alike from here on.
    fn fingerprint(&self) -> u64 {
        let hash = |f: &dyn Fn(&mut DefaultHasher)| {
            let mut h = DefaultHasher::new();
            f(&mut h);
            h.finish()
        };
        let said = self.said.iter().fold(0u64, |sum, m| sum.wrapping_add(hash(&|h| m.hash(h))));
        hash(&|h| {
            for (end, data) in self.ends.iter().zip(&self.data) {
                let hello = end.peer_hello.filter(|p| p.epoch >= end.epoch);
                (end.state, end.epoch, end.executed, end.completed, end.outstanding, hello).hash(h);
                end.beliefs.hash(h);
                data.hash(h);
            }
            (&self.wire, said, &self.dead, self.wrong_left).hash(h);
        })
    }
}

fn slot_path(end: &LogicalQp, epoch: u64) -> u8 {
    end.slots.get(crate::slots::slot_of(epoch)).map_or(u8::MAX, |p| p.local)
}

/// Visits every state; says how many there are, or what is wrong with one, and how it came to be.
fn explore(limits: Limits) -> Result<usize, Bad> {
    let mut seen = HashSet::new();
    let mut stack = vec![World::new(limits)];
    while let Some(world) = stack.pop() {
        for step in world.steps() {
            let mut next = world.clone();
            next.step(step).map_err(|e| format!("{e}, after {} states, by {step:?}", seen.len()))?;
            if seen.insert(next.fingerprint()) {
                // Finishing is long; from one state in sixteen it tells enough.
                if seen.len() % 16 == 0 {
                    next.clone().finish()?;
                }
                stack.push(next);
            }
        }
    }
    Ok(seen.len())
}

fn limits(rails: u8, messages: u64, wrong_suspicions: u32) -> Limits {
    let max_epoch = u64::from(rails) + u64::from(wrong_suspicions);
    Limits { rails, messages, wrong_suspicions, max_epoch, mutation: crate::config::Mutation::None }
}

#[test]
fn no_state_of_small_cases_breaks_a_promise() {
    for (rails, messages, wrong) in [(2, 1, 1), (2, 2, 0)] {
        let states =
            explore(limits(rails, messages, wrong)).unwrap_or_else(|e| panic!("{rails} {messages} {wrong}: {e}"));
        println!("{rails} paths, {messages} messages, {wrong} wrong suspicions: {states} states");
        assert!(states > 1_000);
    }
}

/// 3.3 million states: for long test runs.
#[test]
#[ignore = "takes minutes"]
fn no_state_of_a_larger_case_breaks_a_promise() {
    let states = explore(limits(3, 1, 1)).unwrap_or_else(|e| panic!("{e}"));
    println!("3 paths, 1 message, 1 wrong suspicion: {states} states");
}

#[test]
fn a_rule_that_is_left_out_is_noticed() {
    use crate::config::Mutation::{Early, NoCounts, NoFollow};
    for mutation in [NoCounts, Early, NoFollow] {
        let found = explore(Limits { mutation, ..limits(2, 1, 1) });
        assert!(found.is_err(), "{mutation:?} is not noticed");
    }
}

#[test]
fn random_long_schedules_keep_every_promise() {
    // xorshift64*, so that a schedule is a number
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut below = |n: usize| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    };
    let mut switches = 0;
    for schedule in 0..1_000 {
        let mut world = World::new(Limits { max_epoch: 20, ..limits(3, 6, 12) });
        for _ in 0..200 {
            let steps = world.steps();
            if steps.is_empty() {
                break;
            }
            // Most of the steps are old messages: take the others as often.
            let step = steps[if below(2) == 0 { below(steps.len()) } else { below(steps.len().min(6)) }];
            world.step(step).unwrap_or_else(|e| panic!("schedule {schedule}: {e}"));
        }
        switches += world.ends[0].counters().switches;
        world.finish().unwrap_or_else(|e| panic!("schedule {schedule}: {e}"));
    }
    assert!(switches > 1_000, "{switches}");
}
