//! Two executors, their devices, the network between them, and everything that may happen next.
//!
//! Control messages are unreliable: once said, one may come at any later time, any number of times,
//! in any order, or never. Data of a life travels in order; all that is on its way in a direction
//! that dies is lost. Time is the adversary's: a deadline passes when a step says so.

use crate::case::{Case, Doubt, WorldMutation};
use crate::common::{App, Channel, Common};
use crate::device::{Device, ModelEnv};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use unbroken_failover_protocol::message::RefuseReason;
use unbroken_failover_protocol::{
    Config, Endpoint, Env, Executor, LogicalQp, Reason, SlotPath, SlotTable, State,
};
use unbroken_types::{Gid, PostError, QpCaps, WcStatus};

/// All short timers have fired by then.
const TICK_US: u64 = 1_000_000;
/// After a plan that was cancelled the next is possible by then.
const PAUSE_US: u64 = 20_000_000;
/// A fence is given up after this time.
const FENCE_US: u64 = 3_600_000_000;
/// All other deadlines.
const LONG_US: u64 = 1 << 50;

const CAPS: QpCaps =
    QpCaps { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };

/// Something that may happen next. Ends, rails and messages by number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The program does what comes next.
    Turn(usize),
    /// A send that waits in the queue leaves.
    Leave(usize),
    /// The first request on its way from that life of the end arrives.
    Arrive(usize, u32),
    /// The first answer.
    Answer(usize, u32),
    /// A control message arrives.
    Hear(usize),
    /// Short timers fire.
    Tick(usize),
    /// A fence has stood still for so long that it is given up.
    Impatient(usize),
    /// The end looks again which paths live.
    Learn(usize),
    /// The end suspects its path, which is dead.
    Suspect(usize),
    /// The end's sends get no answer, since its peer has given up.
    Unanswered(usize),
    /// The device has stopped the QP.
    Stopped(usize),
    /// The end learns that its peer's process has ended.
    PeerGone(usize),
    /// All deadlines pass.
    Deadline(usize),
    /// The end leaves a path that lives.
    Doubt(usize, Doubt),
    /// What this end sends over the rail is lost from now on.
    Cut(usize, u8),
    /// Both directions.
    CutBoth(u8),
    /// A NIC dies.
    NicDies(usize, u8),
    /// The end is to go to the rail by choice.
    Plan(usize, u8),
    /// The process ends without a word.
    Crash,
}

impl Step {
    /// It is the adversary's: work must come to its end without it.
    pub fn is_fault(self) -> bool {
        use Step::{Crash, Cut, CutBoth, Doubt, NicDies, Plan};
        matches!(self, Doubt(..) | Cut(..) | CutBoth(_) | NicDies(..) | Plan(..) | Crash)
    }
}

/// One end.
#[derive(Clone, Debug)]
struct End {
    executor: Executor,
    device: Device,
    now_us: u64,
    /// Of all that decides what comes next.
    name: u64,
}

/// A state of the model.
#[derive(Clone, Debug)]
pub struct World {
    ends: [Arc<End>; 2],
    pub common: Common,
    /// Of all that decides what comes next: states with the same name are the same.
    pub name: u64,
}

impl Hash for World {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u64(self.name);
    }
}

impl PartialEq for World {
    fn eq(&self, other: &World) -> bool {
        self.name == other.name
    }
}

fn endpoint(end: usize) -> Endpoint {
    Endpoint { gid: Gid([end as u8; 16]), qpn: 16, incarnation: end as u64, connection: 0 }
}

/// The incarnation of a process that took the address of one that crashed.
const SUCCESSOR: u64 = 9;

impl World {
    pub fn new(case: &Case) -> World {
        let config = Config {
            step_us: LONG_US,
            peer_silence_us: LONG_US,
            total_us: LONG_US,
            free_epochs: 3,
            max_epochs: u32::MAX,
            settle_us: 0,
            fence_us: FENCE_US,
            fence_total_us: FENCE_US,
            mutation: case.mutation,
            ..Config::default()
        };
        let end = |i: usize| {
            let table =
                SlotTable::new(SlotPath { local: 0, remote: 0 }, case.rails, case.rails, i == 0);
            let executor =
                Executor::new(LogicalQp::new(endpoint(i), endpoint(1 - i), table, config, 0));
            let device = Device::new(i, case.programs[i].recvs);
            Arc::new(End { executor, device, now_us: 0, name: 0 })
        };
        let app = |i: usize| App { recvs: case.programs[i].recvs, ..App::default() };
        let common = Common {
            apps: [app(0), app(1)],
            doubts_left: case.doubts,
            cuts_left: case.cuts,
            deaths_left: case.nic_deaths,
            plans_left: case.plans,
            ..Common::default()
        };
        let mut world = World { ends: [end(0), end(1)], common, name: 0 };
        for i in 0..2 {
            world.with(case, i, 0, |executor, env| executor.beliefs_changed(env));
        }
        world.finish(case);
        world
    }

    fn state(&self, end: usize) -> State {
        self.ends[end].executor.lqp().state()
    }

    pub fn executor(&self, end: usize) -> &Executor {
        &self.ends[end].executor
    }

    fn lives(&self, end: usize) -> bool {
        !self.common.crashed(end) && !self.common.apps[end].ended
    }

    /// The rail of an end's epoch.
    fn rail(&self, end: usize) -> u8 {
        self.executor(end).lqp().path().map_or(0, |p| p.local)
    }

    /// All work is done and nothing more goes on; or it has failed at both ends; or the one that
    /// survives a crash has no more to do.
    pub fn settled(&self, case: &Case) -> bool {
        let idle = |i: usize| {
            let app = self.common.apps[i];
            app.done == app.posted
                && self.state(i) == State::Active
                && self.next_turn(case, i).is_none()
        };
        let ended = |i: usize| self.common.apps[i].ended;
        if let Some(crashed) = self.common.crashed {
            return ended(1 - crashed) || idle(1 - crashed);
        }
        let complete = |i: usize| {
            idle(i) && self.common.apps[i].turn == case.programs[i].turns.len() && !ended(i)
        };
        let together = self.executor(0).lqp().epoch() == self.executor(1).lqp().epoch();
        (0..2).all(ended) || (0..2).all(complete) && together
    }

    /// All work is done, without an error.
    pub fn complete(&self, case: &Case) -> bool {
        self.settled(case) && self.common.crashed.is_none() && !self.common.apps[0].ended
    }

    fn next_turn(&self, case: &Case, end: usize) -> Option<crate::case::Turn> {
        let app = self.common.apps[end];
        let turn = case.programs[end].turns.get(app.turn)?;
        let may = turn.done <= app.done && turn.received <= app.received && !app.ended;
        may.then_some(*turn)
    }

    // ---- what may happen ----

    pub fn steps(&self, case: &Case, steps: &mut Vec<Step>) {
        if self.common.wrong.is_some() {
            return;
        }
        for i in (0..2).filter(|&i| self.lives(i)) {
            self.steps_of(case, i, steps);
        }
        for c in &self.common.channels {
            if c.answers {
                steps.push(Step::Answer(c.from, c.life));
            } else if self.may_arrive(case, c) {
                steps.push(Step::Arrive(c.from, c.life));
            }
        }
        let hears = |to: usize| !self.common.crashed(to) || case.successor;
        steps.extend(
            (0..self.common.said.len()).filter(|&n| hears(self.common.said[n].1)).map(Step::Hear),
        );
        self.faults(case, steps);
    }

    fn steps_of(&self, case: &Case, i: usize, steps: &mut Vec<Step>) {
        let (executor, device) = (self.executor(i), &self.ends[i].device);
        let peer_crashed = self.common.crashed(1 - i);
        if self.next_turn(case, i).is_some() {
            steps.push(Step::Turn(i));
        }
        if case.lazy && device.life.sends.len() > device.life.sent {
            steps.push(Step::Leave(i));
        }
        if executor.deadline_us().is_some() {
            steps.push(Step::Tick(i));
        }
        let state = self.state(i);
        if state == State::Fencing && case.world_mutation != WorldMutation::Patience {
            steps.push(Step::Impatient(i));
        }
        if state != State::Active || device.doubted != 0 {
            steps.push(Step::Learn(i));
        }
        let epoch = executor.lqp().epoch();
        let bounded = epoch < 4 * u64::from(case.rails);
        let leaves = self.may_leave(i);
        if leaves && (!self.common.carries_both(self.rail(i)) || peer_crashed && bounded) {
            steps.push(Step::Suspect(i));
        }
        let waits = !device.life.sends.is_empty() && state == State::Active;
        if waits && self.common.apps[1 - i].ended && bounded {
            steps.push(Step::Unanswered(i));
        }
        if device.life.stopping && !device.life.stops {
            steps.push(Step::Stopped(i));
        }
        if peer_crashed {
            steps.extend([Step::PeerGone(i), Step::Deadline(i)]);
        }
    }

    /// A suspicion would not be in vain.
    fn may_leave(&self, i: usize) -> bool {
        let state = self.state(i);
        matches!(
            state,
            State::Active | State::Fencing | State::Waiting | State::Checking | State::Connected
        )
    }

    /// A request that needs a receive waits until there is one.
    fn may_arrive(&self, case: &Case, c: &Channel) -> bool {
        let life = &self.ends[1 - c.from].device.life;
        let takes =
            c.packets.first().is_some_and(|&id| case.op(c.from, id).opcode.consumes_receive());
        !takes || !life.recvs.is_empty() || life.qpn != c.to || life.over
    }

    fn faults(&self, case: &Case, steps: &mut Vec<Step>) {
        let common = &self.common;
        for i in (0..2).filter(|&i| self.lives(i)) {
            if common.doubts_left > 0 && self.may_leave(i) {
                steps.extend(case.doubt_kinds.iter().map(|&kind| Step::Doubt(i, kind)));
            }
            if common.plans_left[i] > 0 && self.state(i) == State::Active {
                let rails = (0..case.rails).filter(|&rail| rail != self.rail(i));
                steps.extend(rails.map(|rail| Step::Plan(i, rail)));
            }
        }
        // One path always lives in both directions: without one there is nothing to promise but an
        // error.
        let alive = (0..case.rails).filter(|&rail| common.carries_both(rail)).count();
        for rail in 0..case.rails {
            if alive == 1 && common.carries_both(rail) {
                continue;
            }
            for from in 0..2 {
                if common.cuts_left > 0 && !case.whole_cuts && common.carries(from, rail) {
                    steps.push(Step::Cut(from, rail));
                }
                if common.deaths_left > 0 && common.dead[from] & 1 << rail == 0 {
                    steps.push(Step::NicDies(from, rail));
                }
            }
            if common.cuts_left > 0 && case.whole_cuts && common.carries_both(rail) {
                steps.push(Step::CutBoth(rail));
            }
        }
        if case.crashes.is_some() && common.crashed.is_none() {
            steps.push(Step::Crash);
        }
    }

    // ---- and what it does ----

    /// What comes of it; `None` if nothing does.
    pub fn after(&self, case: &Case, step: Step) -> Option<World> {
        let mut next = self.clone();
        match step {
            Step::Turn(i) => next.turn(case, i),
            Step::Leave(i) => next.with(case, i, 0, |_, env| env.pump(1)),
            Step::Arrive(from, life) => next.arrive(case, (from, life, false)),
            Step::Answer(from, life) => next.arrive(case, (from, life, true)),
            Step::Hear(n) => next.hear(case, n),
            Step::Tick(i) => next.with(case, i, TICK_US, |executor, env| executor.tick(env)),
            Step::Impatient(i) => next.wait(case, i, FENCE_US),
            Step::Learn(i) => next.with(case, i, 0, |executor, env| {
                env.device.doubted = 0;
                executor.beliefs_changed(env);
            }),
            Step::Suspect(i) => {
                let dead = next.common.nic_dead(i, next.rail(i));
                let reason = if dead { Reason::DeviceFatal } else { Reason::Stall };
                next.with(case, i, 0, |executor, env| executor.suspect(env, reason));
            }
            Step::Unanswered(i) => next.with(case, i, 0, |executor, env| {
                executor.suspect(env, Reason::Wedged(WcStatus::RetryExcErr));
            }),
            Step::Stopped(i) => next.with(case, i, TICK_US, |executor, env| {
                env.device.life.stops = true;
                executor.tick(env);
            }),
            Step::PeerGone(i) => next.with(case, i, 0, |executor, env| executor.peer_gone(env)),
            Step::Deadline(i) => next.wait(case, i, 2 * LONG_US),
            Step::Doubt(i, kind) => next.doubt(case, i, kind),
            Step::Cut(from, rail) => {
                next.common.cuts_left -= 1;
                next.cut(&[from], rail);
            }
            Step::CutBoth(rail) => {
                next.common.cuts_left -= 1;
                next.cut(&[0, 1], rail);
            }
            Step::NicDies(end, rail) => {
                next.common.deaths_left -= 1;
                next.common.dead[end] |= 1 << rail;
                next.common.channels.retain(|c| c.rail != rail);
            }
            Step::Plan(i, rail) => {
                next.common.plans_left[i] -= 1;
                next.with(case, i, PAUSE_US, |executor, env| {
                    executor
                        .plan(env, Reason::Drain, |path| path.local == rail && path.remote == rail);
                });
            }
            Step::Crash => {
                next.common.crashed = case.crashes;
                let end = case.crashes.expect("it may");
                Arc::make_mut(&mut next.ends[end]).device.life.over = true;
            }
        }
        next.finish(case);
        (next.name != self.name).then_some(next)
    }

    /// So much time passes at an end; what moved before is seen by a first look.
    fn wait(&mut self, case: &Case, i: usize, us: u64) {
        for later_us in [TICK_US, us] {
            self.with(case, i, later_us, |executor, env| executor.tick(env));
        }
    }

    /// Lets an end's executor work, so much later.
    fn with<R>(
        &mut self,
        case: &Case,
        me: usize,
        later_us: u64,
        f: impl FnOnce(&mut Executor, &mut ModelEnv<'_>) -> R,
    ) -> R {
        let end = Arc::make_mut(&mut self.ends[me]);
        end.now_us += later_us;
        end.name = 0;
        let mut env = ModelEnv {
            case,
            me,
            now_us: end.now_us,
            device: &mut end.device,
            common: &mut self.common,
        };
        let result = f(&mut end.executor, &mut env);
        env.pump(if case.lazy { 0 } else { usize::MAX });
        result
    }

    /// Forgets packets that nobody will ever take, and names the state.
    fn finish(&mut self, case: &Case) {
        if case.world_mutation != WorldMutation::Ghost {
            let ends = &self.ends;
            self.common.channels.retain(|c| {
                let life = &ends[1 - c.from].device.life;
                life.qpn == c.to && life.hears(c.life)
            });
        }
        for end in &mut self.ends {
            if end.name == 0 {
                let end = Arc::make_mut(end);
                let mut hasher = DefaultHasher::new();
                end.executor.hash_behaviour(case.route, &mut hasher);
                end.device.hash(&mut hasher);
                end.name = hasher.finish();
            }
        }
        let mut hasher = DefaultHasher::new();
        let c = &self.common;
        (self.ends[0].name, self.ends[1].name, &c.apps, &c.channels).hash(&mut hasher);
        c.said.iter().fold(0u64, |sum, s| sum.wrapping_add(s.0)).hash(&mut hasher);
        (c.mute, c.dead, c.crashed, c.doubts_left, c.cuts_left, c.deaths_left, c.plans_left)
            .hash(&mut hasher);
        c.wrong.is_some().hash(&mut hasher);
        self.name = hasher.finish();
    }

    fn turn(&mut self, case: &Case, i: usize) {
        let Some(turn) = self.next_turn(case, i) else { return };
        let app = &mut self.common.apps[i];
        app.turn += 1;
        let held = if turn.op.is_some() {
            let id = app.posted;
            app.posted += 1;
            self.with(case, i, 0, |executor, env| {
                let entry = crate::device::Entry { id, started: false, executed: false };
                let wr = ModelEnv::entry(case, i, entry);
                let held =
                    executor.hold_sends(&CAPS, || env.progress().outstanding_sends, &wr.wr());
                if held.is_none() {
                    env.device.life.sends.push(entry);
                }
                held
            })
        } else {
            let id = app.recvs;
            app.recvs += 1;
            self.with(case, i, 0, |executor, env| {
                let held = executor.hold_recv(
                    &CAPS,
                    || 0,
                    &unbroken_types::RecvWr { wr_id: id.into(), sges: &[] },
                );
                if held.is_none() {
                    env.device.life.recvs.push(id);
                }
                held
            })
        };
        self.check_post(i, held);
    }

    fn check_post(&mut self, i: usize, held: Option<Result<(), PostError>>) {
        if let Some(Err(e)) = held {
            self.common.wrong(format!("end {i}: a post is refused: {e}"));
        }
        if held.is_none() && self.ends[i].device.life.over {
            self.common.wrong(format!("end {i}: a post to a QP that was stopped"));
        }
    }

    fn arrive(&mut self, case: &Case, key: (usize, u32, bool)) {
        let Some((target, id)) = self.common.take(key) else { return };
        let (from, life, answers) = key;
        let to = 1 - from;
        let device = &self.ends[to].device;
        if device.life.qpn == target && device.life.hears(life) {
            self.with(case, to, 0, |_, env| match answers {
                true => env.answered(id),
                false => env.requested(id),
            });
        } else if !answers {
            self.common.execute(case, to, id); // a ghost
        }
    }

    fn hear(&mut self, case: &Case, n: usize) {
        let (_, to, message) = self.common.said[n].clone();
        if !self.common.crashed(to) {
            return self.with(case, to, 0, |executor, env| executor.message(env, &message));
        }
        if let Some(refusal) = message.refusal(SUCCESSOR, RefuseReason::WrongIncarnation) {
            self.common.say(1 - to, &refusal);
        }
    }

    fn doubt(&mut self, case: &Case, i: usize, kind: Doubt) {
        self.common.doubts_left -= 1;
        let rail = self.rail(i);
        let reason = match kind {
            Doubt::Stall | Doubt::Probe => Reason::Stall,
            Doubt::Post => Reason::PostFailed,
            Doubt::Wedged => Reason::Wedged(WcStatus::RetryExcErr),
        };
        self.with(case, i, 0, |executor, env| {
            env.device.doubted |= u8::from(kind == Doubt::Probe) << rail;
            executor.suspect(env, reason);
        });
    }

    fn cut(&mut self, from: &[usize], rail: u8) {
        for &end in from {
            self.common.mute[end] |= 1 << rail;
        }
        self.common.channels.retain(|c| c.rail != rail || !from.contains(&c.from));
    }
}
