//! One end of one logical QP: the passive switch (SHIFT §4.2, with the changes that `docs/`
//! explains).
//!
//! | state        | event                              | next        | actions                                |
//! |--------------|------------------------------------|-------------|----------------------------------------|
//! | `Active`     | `suspect` of this epoch            | `Quiescing` | Quiesce (Fail: no backup, peer closed) |
//! | `Active`     | Hello of a higher epoch            | `Quiescing` | Quiesce                                |
//! | `Quiescing`  | `handle_quiesced`                  | `Opening`   | Open: the one heard of, or a higher epoch by choice     |
//! | `Quiescing`  | `handle_ended`: the program's error | `Failed`   | Send Refuse                            |
//! | `Quiescing`  | the same, but no path / too fast   | `Parked`    |                                        |
//! | `Parked`     | a path comes up, a Hello, the time | `Opening`   | Open                                   |
//! | `Opening`    | `handle_opened`: error             | `Opening`   | Open of the next epoch                 |
//! | `Opening`    | opened, but overtaken              | `Quiescing` | Quiesce                                |
//! | `Opening`    | opened                             | `Waiting`   | Send Hello, again and again            |
//! | `Waiting`    | Hello of this epoch                | `Checking`  | CheckReplay (Fail: inconsistent)       |
//! | `Checking`   | `handle_check`: safe               | `Connected` | Connect, Send Hello(heard)             |
//! | `Checking`   | unsafe                             | `Failed`    | Send Refuse, Fail                      |
//! | `Connected`  | Hello(heard), or data moves        | `Active`    | Start, Report                          |
//! | `Waiting`, `Checking`, `Connected` | `suspect`, Hello of a higher epoch | `Quiescing` | Quiesce          |
//! | any but `Active` | a deadline, Bye, Refuse        | `Failed`    | Fail                                   |
//! | any          | `close`                            | `Closed`    | Send Bye                               |
//!
//! Planned switches have a table of their own, in `planned`.
//!
//! A stale Hello is answered with the current one; a Hello of this epoch whose sender still waits
//! is answered too.
//!
//! Invariants:
//! - The epoch only grows. A physical QP is never used in two epochs, and is stopped before its
//!   epoch is left.
//! - A QP that is wedged by itself, on a path that lives, enters the next epoch of the same path.
//! - Each end chooses among the paths that it has not yet tried in vain, while there are any. What
//!   the ends know differs (of a NIC that is down its own host is told; that a cable is cut finds
//!   out who has sent something), so the best path by what one end knows may be none for the other,
//!   and the best of that one none for the first: without a memory they would go to and fro between
//!   these for ever, beside a path that works for both.
//! - Nothing is sent in an epoch before both ends have found the replay safe: `Start` needs the
//!   peer's `heard`, which the peer says only after its own check. It is also ready to receive
//!   then, so that no packet is lost to a QP that is not up yet.
//! - `executed` and `completed` are totals over all lives that ended; in one epoch they never
//!   change, so it does not matter which of many repeated Hellos comes through.
//! - The shell has at most one question (Quiesce, Open, CheckReplay) to answer, and each has a
//!   deadline, as has the whole.
//!
//! What fails: a device that cannot be stopped, a request that must not be replayed, counts that
//! contradict each other, a peer that is silent or closed, and deadlines. All end in the
//! application's original error.

mod behaviour;
mod control;
mod planned;
mod switch;
#[cfg(test)]
mod tests;

use crate::action::{
    Action, Attempt, FailCause, OpenError, Opened, QuiesceError, Quiesced, Reason,
};
use crate::choice::{choose, Health, Policy};
use crate::config::{Config, Counters};
use crate::message::{Endpoint, Hello, RefuseReason};
use crate::mutants::left_out;
use crate::slots::{Liveness, SlotPath, SlotTable, SLOTS};
use std::collections::VecDeque;
use std::sync::Arc;
use unbroken_types::{Messages, Mtu, WcStatus, PSN_MASK};

/// Sends that may wait to be fetched; more are dropped, as the network may drop them. Other actions
/// are few: each needs an answer before the next.
const MAX_SENDS_QUEUED: usize = 16;

/// The state of a logical QP; see the table at the head of this module.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum State {
    /// The physical QP of the epoch carries the traffic.
    Active,
    /// It does, and what is posted is held: a switch is planned (see [`LogicalQp::plan`]).
    Fencing,
    /// The old physical QP is being stopped.
    Quiescing,
    /// No path is believed alive, or too many were tried in a row: there is no physical QP. Until a
    /// time, if one is given.
    Parked {
        /// When the next epoch is tried.
        until_us: Option<u64>,
    },
    /// The fresh physical QP is being made.
    Opening,
    /// Hello is sent; the peer's is awaited.
    Waiting,
    /// The peer's Hello is here; the shell checks whether the replay is safe.
    Checking,
    /// Ready to receive; the peer's word that it is, too, is awaited.
    Connected,
    /// The application has its error.
    Failed,
    /// The application has destroyed the QP.
    Closed,
}

/// What is known of a switch, from the first suspicion until something moves on the new path.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
struct Chain {
    /// When work last moved, as far as known: the total deadline counts from here.
    since_us: u64,
    /// When this switch was noticed, where from, since when the QP was there, and why: for the
    /// report.
    detected_us: u64,
    from_slot: u8,
    on_path_since_us: u64,
    reason: Reason,
    /// The error for the application.
    status: WcStatus,
    /// Epochs tried since work last moved.
    tries: u32,
    /// Epochs entered in this switch.
    epochs: u32,
    planned: bool,
}

/// One end of one logical QP.
///
/// *Handlers* (`suspect`, `handle_*`, `set_belief` and its kind, `close`) take what happened;
/// *polls* (`poll_action`, `poll_timeout`) give what is to be done; the others are getters. After
/// each handler, fetch actions until there is none. Actions may be answered (and handlers called)
/// between two polls.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct LogicalQp {
    me: Endpoint,
    peer: Endpoint,
    config: Config,
    slots: SlotTable,
    liveness_of_slots: [Liveness; SLOTS],
    /// One slot for each distinct path, as bits.
    distinct: u64,
    /// `None`: the usual one, which most have.
    policy: Option<Arc<Policy>>,
    /// QPs of the process that are on their way, when this one began to prepare.
    switching_qps: u32,
    state: State,
    epoch: u64,
    /// Totals over the lives that ended.
    executed: Messages,
    /// All lives that ended have counted exactly.
    exact: bool,
    completed: Messages,
    /// Outstanding messages when the last life ended.
    outstanding: Messages,
    fresh: Opened,
    /// The present life has been started: both ends had agreed on its path.
    started: bool,
    /// The newest Hello of the peer, if its epoch is ours or higher. Boxed, as most QPs never
    /// switch.
    peer_hello: Option<Box<Hello>>,
    peer_closed: bool,
    chain: Option<Chain>,
    /// A planned switch that is being prepared.
    plan: Option<planned::Plan>,
    /// The epoch that a planned switch enters, once both ends are drained.
    target: u64,
    /// No epoch up to this one is entered by plan.
    cancelled: u64,
    /// The slots of the paths that were left in this switch, or that the peer has declined since
    /// the last: each is tried again when all have been.
    vain: u64,
    /// When `Active` began.
    active_since_us: u64,
    /// When the switch began or the peer was last heard, and how long it may be silent from there.
    peer_heard_us: u64,
    silence_us: u64,
    /// Deadline of the question that the shell has to answer.
    step_deadline_us: u64,
    resend_at_us: u64,
    resend_interval_us: u64,
    /// The slot that carried the last Hello.
    last_via: u8,
    /// What we tell a peer that asks after we failed.
    refusal: RefuseReason,
    /// The PSN of our first request, if none had an answer in the life that the programs connected.
    unproven_psn: Option<u32>,
    /// The PSN of the peer's first request, as the program has told us.
    expected_psn: Option<u32>,
    actions: VecDeque<Action>,
    sends_queued: usize,
    counters: Counters,
}

impl LogicalQp {
    /// The end `me` of a logical QP whose physical QPs of epoch 0 are connected by the application.
    /// All slots begin without a NIC but slot 0 and its repetitions, which are alive.
    pub fn new(
        me: Endpoint,
        peer: Endpoint,
        slots: SlotTable,
        config: Config,
        now_us: u64,
    ) -> LogicalQp {
        let default = slots.get(0);
        let mut liveness_of_slots = [Liveness::NoNic; SLOTS];
        for (slot, path) in slots.iter() {
            if Some(path) == default {
                liveness_of_slots[usize::from(slot)] = Liveness::Alive;
            }
        }
        let distinct = slots.distinct();
        LogicalQp {
            me,
            peer,
            config,
            slots,
            liveness_of_slots,
            distinct,
            policy: None,
            switching_qps: 0,
            state: State::Active,
            epoch: 0,
            executed: Messages::default(),
            exact: true,
            completed: Messages::default(),
            outstanding: Messages::default(),
            fresh: Opened { qpn: 0, psn: 0, mtu: Mtu::B256, key_set: 0 },
            started: true,
            peer_hello: None,
            peer_closed: false,
            chain: None,
            plan: None,
            target: 0,
            cancelled: 0,
            vain: 0,
            active_since_us: now_us,
            peer_heard_us: now_us,
            silence_us: config.peer_silence_us,
            step_deadline_us: 0,
            resend_at_us: 0,
            resend_interval_us: config.hello_min_us,
            last_via: 0,
            refusal: RefuseReason::Failed,
            unproven_psn: None,
            expected_psn: None,
            actions: VecDeque::new(),
            sends_queued: 0,
            counters: Counters::default(),
        }
    }

    // ---- getters ----

    /// The epoch now.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
    /// The slot of the epoch.
    pub fn slot(&self) -> u8 {
        crate::slots::slot_of(self.epoch)
    }
    /// The path of the epoch, if its slot is filled.
    pub fn path(&self) -> Option<SlotPath> {
        self.slots.get(self.slot())
    }
    /// The state.
    pub fn state(&self) -> State {
        self.state
    }
    /// The slot table.
    pub fn slots(&self) -> &SlotTable {
        &self.slots
    }
    /// What is believed of a slot.
    pub fn liveness(&self, slot: u8) -> Liveness {
        self.liveness_of_slots[usize::from(slot) % SLOTS]
    }
    /// Whether a failure can be survived: a second path was alive when last heard of, and nothing
    /// has failed for good.
    pub fn has_backup(&self) -> bool {
        let now = self.path();
        !matches!(self.state, State::Failed | State::Closed)
            && self.slots.iter().any(|(s, p)| Some(p) != now && self.liveness(s) == Liveness::Alive)
    }
    /// This end.
    pub fn me(&self) -> Endpoint {
        self.me
    }
    /// The other end.
    pub fn peer(&self) -> Endpoint {
        self.peer
    }
    /// Messages that our responder executed in the lives that ended.
    pub fn executed(&self) -> Messages {
        self.executed
    }
    /// Our own messages that completed in the lives that ended.
    pub fn completed(&self) -> Messages {
        self.completed
    }
    /// What this end wishes of paths.
    pub fn policy(&self) -> &Policy {
        self.policy.as_deref().unwrap_or_else(|| Policy::usual())
    }
    /// When the QP came onto its present path.
    pub fn on_path_since_us(&self) -> u64 {
        self.active_since_us
    }
    fn hello(&self) -> Option<Hello> {
        self.peer_hello.as_deref().copied()
    }
    /// The best epoch from `from` on whose path is alive and `wanted`.
    fn choose(
        &self,
        from: u64,
        liveness_of_slots: &[Liveness; SLOTS],
        wanted: impl Fn(SlotPath) -> bool,
    ) -> Option<u64> {
        let in_vain = self.chain.as_ref().is_some_and(|chain| chain.epochs > 0);
        let turn = if in_vain { 0 } else { self.turn() };
        choose(
            &Health { slots: &self.slots, liveness_of_slots, now: self.path(), turn },
            self.policy(),
            from,
            wanted,
        )
    }
    /// The path that a switch would choose if all of the NIC that the QP is on failed now.
    pub fn next_path(&self) -> Option<SlotPath> {
        let now = self.path()?;
        let epoch =
            self.choose(self.epoch + 1, &self.liveness_of_slots, |path| path.local != now.local)?;
        self.slots.get(crate::slots::slot_of(epoch))
    }
    /// The same among those that were not tried in vain; if there are none, all are worth another
    /// try.
    fn choose_untried(&mut self, from: u64, wanted: impl Fn(SlotPath) -> bool) -> Option<u64> {
        let mut untried = self.liveness_of_slots;
        for (slot, liveness) in untried.iter_mut().enumerate() {
            if self.vain & 1 << slot != 0 {
                *liveness = Liveness::Silent;
            }
        }
        self.choose(from, &untried, &wanted).or_else(|| {
            self.vain = 0;
            self.choose(from, &self.liveness_of_slots, &wanted)
        })
    }
    /// The path of an epoch has been tried in vain.
    fn was_in_vain(&mut self, epoch: u64) {
        let path = self.slots.get(crate::slots::slot_of(epoch));
        if !left_out!(self.config.mutation, Forgetful) {
            self.vain |= self
                .slots
                .iter()
                .filter(|(_, p)| Some(*p) == path)
                .fold(0, |bits, (slot, _)| bits | 1 << slot);
        }
    }
    /// The same at both ends. Devices count QPs by one, or by the number of their NICs.
    fn turn(&self) -> u32 {
        let of = |end: &Endpoint| (end.gid, end.qpn);
        let (_, qpn) = of(&self.me).min(of(&self.peer));
        qpn.wrapping_add(qpn >> 2)
    }
    /// The switch that is under way, or that has failed.
    pub fn attempt(&self) -> Option<Attempt> {
        self.chain.as_ref().map(|c| Attempt {
            from_slot: c.from_slot,
            reason: c.reason,
            detected_us: c.detected_us,
            epochs: c.epochs,
            peer_heard_us: self.peer_heard_us,
        })
    }
    /// Counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    // ---- handlers ----

    /// The life of `epoch` has failed, or is suspected to have. Set the belief in its slot first,
    /// so that it is not chosen again.
    pub fn suspect(&mut self, now_us: u64, epoch: u64, reason: Reason) {
        if epoch != self.epoch {
            self.counters.stale_suspicions += 1;
            return;
        }
        if self.distinct.count_ones() < 2 && matches!(reason, Reason::PortDown | Reason::Stall) {
            // There is nowhere to go: its transport waits longer than we would, and the path may
            // come back in time.
            return;
        }
        match self.state {
            State::Active
            | State::Fencing
            | State::Waiting
            | State::Checking
            | State::Connected => self.leave(now_us, reason),
            State::Quiescing
            | State::Opening
            | State::Parked { .. }
            | State::Failed
            | State::Closed => {}
        }
    }

    /// The peer's QP was reset before it was connected to this one: it has this number now.
    pub fn set_peer_connection(&mut self, connection: u32) {
        self.peer.connection = connection;
    }

    /// No request has had an answer in the life that the programs connected; the first had this PSN.
    pub(crate) fn set_unproven(&mut self, psn: Option<u32>) {
        self.unproven_psn = psn.map(|psn| psn & PSN_MASK);
    }

    /// The program expects this PSN in the peer's first request.
    pub(crate) fn expect_psn(&mut self, psn: Option<u32>) {
        self.expected_psn = psn.map(|psn| psn & PSN_MASK);
    }

    /// Answers `Quiesce`.
    pub fn handle_quiesced(&mut self, now_us: u64, result: Result<Quiesced, QuiesceError>) {
        if self.state == State::Quiescing {
            self.on_quiesced(now_us, result);
        }
    }

    /// Answers `Quiesce`: an error of the program had ended the physical QP before, and all its
    /// work requests with it.
    pub fn handle_ended(&mut self) {
        if self.state == State::Quiescing {
            self.on_ended();
        }
    }

    /// Answers `Quiesce`: what the device said of the first work request is true on every path.
    pub(crate) fn handle_mistake(&mut self, now_us: u64, cause: FailCause) {
        if self.state == State::Quiescing {
            self.fail(now_us, cause);
        }
    }

    /// Answers `Open` of that epoch. With an error the shell keeps what is outstanding.
    pub fn handle_opened(&mut self, now_us: u64, epoch: u64, result: Result<Opened, OpenError>) {
        if self.state == State::Opening && epoch == self.epoch {
            self.on_opened(now_us, result);
        }
    }

    /// Answers `CheckReplay` of that epoch.
    pub fn handle_check(&mut self, now_us: u64, epoch: u64, safe: bool) {
        if self.state == State::Checking && epoch == self.epoch {
            self.on_checked(now_us, safe);
        }
    }

    /// Something has moved on the physical QP of `epoch`: an ACK, data of the peer. The peer is up,
    /// then, even if its Hello was lost.
    pub fn handle_progress(&mut self, now_us: u64, epoch: u64) {
        if epoch != self.epoch {
            return;
        }
        match self.state {
            State::Connected => self.start(now_us),
            State::Active | State::Fencing => self.switch_is_over(),
            _ => {}
        }
    }

    /// The switch is over: where it led is a good path, and what comes next is no part of it.
    pub fn switch_is_over(&mut self) {
        if self.chain.take().is_some() {
            self.vain = 0;
        }
    }

    /// Whether the path has carried the QP for long enough to count as good.
    fn has_settled(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.active_since_us) >= self.config.settle_us
    }

    /// Fills an empty slot of the table. False, and nothing changes, where it holds another path
    /// already.
    pub fn fill_slot(&mut self, slot: u8, path: SlotPath) -> bool {
        let ok = self.slots.fill(slot, path);
        self.distinct = self.slots.distinct();
        ok
    }

    /// What this end wishes of paths; to be said before the QP moves.
    pub fn set_policy(&mut self, policy: Arc<Policy>) {
        self.policy = Some(policy);
    }

    /// What the shell believes of a slot's path now. It suspects nothing by itself: call
    /// [`Self::suspect`] for that.
    pub fn set_belief(&mut self, now_us: u64, slot: u8, liveness: Liveness) {
        self.liveness_of_slots[usize::from(slot) % SLOTS] = liveness;
        self.leave_parked(now_us, liveness == Liveness::Alive);
    }

    /// What the shell believes of all paths now, each of which is asked about once. It suspects
    /// nothing by itself, as [`Self::set_belief`].
    pub fn set_beliefs(&mut self, now_us: u64, of: impl Fn(SlotPath) -> Liveness) {
        let mut known: Vec<(SlotPath, Liveness)> =
            Vec::with_capacity(self.distinct.count_ones() as usize);
        for (slot, path) in self.slots.iter() {
            let liveness = match known.iter().find(|(other, _)| *other == path) {
                Some((_, liveness)) => *liveness,
                None => {
                    let liveness = of(path);
                    known.push((path, liveness));
                    liveness
                }
            };
            self.liveness_of_slots[usize::from(slot)] = liveness;
        }
        self.leave_parked(now_us, known.iter().any(|(_, liveness)| *liveness == Liveness::Alive));
    }

    /// A QP that waits for any path goes on where one is alive.
    fn leave_parked(&mut self, now_us: u64, alive: bool) {
        if alive && self.state == (State::Parked { until_us: None }) {
            self.advance(now_us);
        }
    }

    /// What the shell believes of a path now, for every slot that has it. It suspects nothing by
    /// itself, as [`Self::set_belief`].
    pub fn set_path_liveness(&mut self, now_us: u64, path: SlotPath, liveness: Liveness) {
        for slot in 0..SLOTS as u8 {
            if self.slots.get(slot) == Some(path) {
                self.liveness_of_slots[usize::from(slot)] = liveness;
            }
        }
        self.leave_parked(now_us, liveness == Liveness::Alive);
    }

    /// The application destroys the QP: the peer is told once.
    pub fn close(&mut self, now_us: u64) {
        if self.state != State::Closed {
            self.on_close(now_us);
        }
    }

    /// The rule that is left out.
    pub(crate) fn mutation(&self) -> crate::Mutation {
        self.config.mutation
    }

    // ---- polls ----

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.actions.pop_front();
        if matches!(action, Some(Action::Send { .. })) {
            self.sends_queued -= 1;
        }
        action
    }
}
