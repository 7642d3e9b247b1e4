//! Leaving an epoch and entering another.

use super::{Chain, LogicalQp, State};
use crate::action::{
    Action, FailCause, OpenError, Opened, QuiesceError, Quiesced, Reason, Switched,
};
use crate::message::{Hello, RefuseReason};
use crate::mutants::left_out;
use crate::slots::{slot_of, Liveness};
use unbroken_types::{Messages, PeerDone, WcStatus};

/// Fresh lives of a wedged QP on the same path, while nothing moves.
const STAYS: u32 = 2;

impl LogicalQp {
    /// Leaves the epoch: first the physical QP is stopped.
    pub(super) fn leave(&mut self, now_us: u64, reason: Reason) {
        if matches!(self.state, State::Active | State::Fencing) {
            let (since_us, tries) = match &self.chain {
                Some(chain) if !self.has_settled(now_us) => (chain.since_us, chain.tries),
                _ => {
                    self.vain = 0;
                    (now_us, 0)
                }
            };
            let from_slot = self.slot();
            let status = reason.status();
            let on_path_since_us = self.active_since_us;
            self.chain = Some(Chain {
                since_us,
                detected_us: now_us,
                from_slot,
                on_path_since_us,
                reason,
                status,
                tries,
                epochs: 0,
                planned: false,
            });
            self.peer_heard_us = now_us;
            self.silence_us = self.config.peer_silence_us;
        }
        (self.state, self.plan) = (State::Quiescing, None);
        if self.peer_closed {
            return self.fail(now_us, FailCause::PeerClosed);
        }
        if self.distinct.count_ones() < 2 && !self.stays() {
            return self.fail(now_us, FailCause::NoBackup);
        }
        self.step_deadline_us = now_us + self.config.step_us;
        self.actions.push_back(Action::Quiesce { epoch: self.epoch });
    }

    pub(super) fn on_quiesced(&mut self, now_us: u64, result: Result<Quiesced, QuiesceError>) {
        let Ok(life) = result else { return self.fail(now_us, FailCause::CannotQuiesce) };
        self.executed += life.executed;
        self.exact &= life.exact;
        self.completed += life.completed;
        self.outstanding = life.outstanding;
        // An idle QP has nothing that could move: a life that was started must not count as one
        // that tried in vain.
        let progressed = life.progressed || life.idle && self.started;
        if let Some(chain) = self.chain.as_mut().filter(|_| progressed) {
            chain.tries = 0;
            chain.since_us = chain.since_us.max(chain.detected_us);
        }
        self.advance(now_us);
    }

    /// There is nothing to be moved: the QP had ended by an error of the program, and stays so. A
    /// peer that asks is told.
    pub(super) fn on_ended(&mut self) {
        self.state = State::Failed;
        self.refusal = RefuseReason::Failed;
        self.refuse(self.refusal);
    }

    /// Enters the next epoch, or parks. The physical QP of the old one is stopped.
    pub(super) fn advance(&mut self, now_us: u64) {
        let config = self.config;
        let resumed = matches!(self.state, State::Parked { until_us: Some(_) });
        let tries = match self.chain.as_mut() {
            Some(chain) => {
                chain.tries += u32::from(!resumed);
                chain.tries
            }
            None => 1,
        };
        if tries > config.max_epochs {
            return self.fail(now_us, FailCause::TooManyEpochs);
        }
        if tries > config.free_epochs && !resumed {
            let pause_us = (config.hello_min_us << (tries - config.free_epochs).min(20))
                .min(config.epoch_pause_max_us);
            self.state = State::Parked { until_us: Some(now_us + pause_us) };
            return;
        }
        // What is left by choice is well.
        if !self.chain.as_ref().is_some_and(|chain| chain.planned && chain.epochs == 0) {
            self.was_in_vain(self.epoch);
        }
        let Some(epoch) = self.next_epoch() else {
            self.state = State::Parked { until_us: None };
            return;
        };
        self.epoch = epoch;
        self.peer_hello = self.hello().filter(|h| h.epoch >= epoch).map(Box::new);
        self.counters.epochs_entered += 1;
        if let Some(chain) = self.chain.as_mut() {
            chain.epochs += 1;
        }
        self.state = State::Opening;
        self.step_deadline_us = now_us + config.step_us;
        self.actions.push_back(Action::Open { epoch, slot: slot_of(epoch) });
    }

    /// The epoch that the peer is in, if it is higher and our NIC for it works; else a higher one
    /// whose path is believed alive, by choice.
    fn next_epoch(&mut self) -> Option<u64> {
        let heard = self.heard_epoch();
        if heard > self.epoch && self.usable(heard) {
            return Some(heard);
        }
        let (from, now) = (heard.max(self.epoch) + 1, self.path());
        let stay = self
            .stays()
            .then(|| self.choose(from, &self.liveness_of_slots, |path| Some(path) == now))
            .flatten();
        stay.or_else(|| self.choose_untried(from, |_| true))
    }

    /// Whether the QP alone is in trouble and not its path, so that it gets a fresh life there. If
    /// that is in vain it moves all the same.
    fn stays(&self) -> bool {
        let stays = |reason| matches!(reason, Reason::Wedged(_) | Reason::Connect);
        self.chain.as_ref().is_some_and(|c| stays(c.reason) && c.tries <= STAYS)
    }

    /// The highest epoch that the peer is known to be in, or to be about to enter.
    fn heard_epoch(&self) -> u64 {
        self.hello().map_or(0, |h| h.epoch).max(self.target)
    }

    /// Whether an epoch could be followed: the slot is filled and our NIC works.
    fn usable(&self, epoch: u64) -> bool {
        self.slots.get(slot_of(epoch)).is_some() && self.liveness(slot_of(epoch)) != Liveness::NoNic
    }

    pub(super) fn on_opened(&mut self, now_us: u64, result: Result<Opened, OpenError>) {
        let Ok(fresh) = result else {
            self.counters.open_errors += 1;
            return self.advance(now_us);
        };
        (self.fresh, self.started) = (fresh, false);
        if self.heard_epoch() > self.epoch || !self.usable(self.epoch) {
            // Overtaken while the QP was being made; it holds what is outstanding, so it is stopped
            // like any other.
            self.state = State::Quiescing;
            self.step_deadline_us = now_us + self.config.step_us;
            self.actions.push_back(Action::Quiesce { epoch: self.epoch });
            return;
        }
        self.state = State::Waiting;
        self.resend_interval_us = self.first_resend_us();
        self.last_via = self.slot();
        if left_out!(self.config.mutation, Early) {
            self.send_hello(now_us, self.slot());
            let (epoch, mtu, psn) = (self.epoch, self.fresh.mtu, self.fresh.psn);
            self.actions.push_back(Action::Connect {
                epoch,
                peer_qpn: 0,
                sq_psn: psn,
                rq_psn: 0,
                mtu,
                peer_done: PeerDone::Messages(0),
            });
            return self.start(now_us);
        }
        match self.hello() {
            Some(_) => self.weigh_hello(now_us), // what follows from it sends our Hello
            None => self.send_hello(now_us, self.slot()),
        }
    }

    /// The peer's Hello of this epoch is here: compare the counts, then ask whether the replay is
    /// safe.
    pub(super) fn weigh_hello(&mut self, now_us: u64) {
        let Some(hello) = self.hello().filter(|h| h.epoch == self.epoch) else { return };
        let counted = !left_out!(self.config.mutation, NoCounts);
        // Each end's executed against the other's completed, by what the one that executed can
        // count.
        let lost = |executed: Messages, exact: bool, completed: Messages| match exact {
            true => executed.all < completed.all,
            false => executed.receives < completed.receives,
        };
        let exact = self.counts_exactly(&hello);
        let inconsistent = lost(hello.executed, exact, self.completed)
            || lost(self.executed, self.exact, hello.completed);
        if counted && inconsistent {
            return self.fail(now_us, FailCause::Inconsistent);
        }
        let mut most = self.completed;
        most += self.outstanding;
        if counted && lost(most, exact, hello.executed) {
            self.counters.impossible += 1;
            self.peer_hello = None;
            self.refuse(RefuseReason::Impossible);
            return;
        }
        self.state = State::Checking;
        self.step_deadline_us = now_us + self.config.step_us;
        let (epoch, peer_done) = (self.epoch, self.peer_done());
        self.actions.push_back(Action::CheckReplay { epoch, peer_done });
    }

    /// Whether the peer has counted all that it has executed.
    fn counts_exactly(&self, hello: &Hello) -> bool {
        hello.exact || left_out!(self.config.mutation, NoCountKind)
    }

    /// What the peer has executed of our outstanding sends.
    fn peer_done(&self) -> PeerDone {
        match self.hello().filter(|_| !left_out!(self.config.mutation, NoCounts)) {
            Some(h) if self.counts_exactly(&h) => {
                PeerDone::Messages(h.executed.all.saturating_sub(self.completed.all))
            }
            Some(h) => {
                PeerDone::Receives(h.executed.receives.saturating_sub(self.completed.receives))
            }
            None => PeerDone::Messages(0),
        }
    }

    pub(super) fn on_checked(&mut self, now_us: u64, safe: bool) {
        if !safe {
            return self.fail(now_us, FailCause::UnsafeReplay);
        }
        let Some(hello) = self.hello() else { return };
        self.connect(hello, self.peer_done());
        self.state = State::Connected;
        self.resend_interval_us = self.first_resend_us();
        if hello.heard {
            self.start(now_us);
        }
        if !hello.heard || hello.waiting {
            self.send_hello(now_us, self.slot());
        }
    }

    fn connect(&mut self, hello: Hello, peer_done: PeerDone) {
        self.actions.push_back(Action::Connect {
            epoch: self.epoch,
            peer_qpn: hello.fresh_qpn,
            sq_psn: self.fresh.psn,
            rq_psn: hello.psn,
            mtu: hello.mtu.min(self.fresh.mtu),
            peer_done,
        });
    }

    /// The peer is ready to receive.
    pub(super) fn start(&mut self, now_us: u64) {
        (self.state, self.started) = (State::Active, true);
        self.active_since_us = now_us;
        self.counters.switches += 1;
        let epoch = self.epoch;
        self.actions.push_back(Action::Start { epoch });
        if let Some(chain) = &self.chain {
            self.actions.push_back(Action::Report(Switched {
                from_slot: chain.from_slot,
                to_slot: slot_of(epoch),
                epoch,
                reason: chain.reason,
                on_path_since_us: chain.on_path_since_us,
                detected_us: chain.detected_us,
                started_us: now_us,
                epochs: chain.epochs,
                planned: chain.planned,
            }));
        }
    }

    /// Gives up: the application gets its error, the peer is told.
    pub(super) fn fail(&mut self, _now_us: u64, cause: FailCause) {
        self.refusal = match cause {
            FailCause::UnsafeReplay => RefuseReason::UnsafeReplay,
            FailCause::Inconsistent => RefuseReason::Inconsistent,
            _ => RefuseReason::Failed,
        };
        if matches!(self.state, State::Active | State::Fencing) {
            self.chain = None; // of a switch that is over
        }
        let status = self.chain.as_ref().map_or(WcStatus::RetryExcErr, |c| c.status);
        self.state = State::Failed;
        self.refuse(self.refusal);
        self.actions.push_back(Action::Fail { status, cause });
    }

    /// The application gets its error although the path lives; the peer is told.
    pub(crate) fn fail_alive(&mut self, status: WcStatus, cause: FailCause) {
        if matches!(self.state, State::Active | State::Fencing) {
            self.chain = None;
            self.refusal = RefuseReason::Failed;
            self.state = State::Failed;
            self.refuse(self.refusal);
            self.actions.push_back(Action::Fail { status, cause });
        }
    }

    // ---- time ----

    /// When [`Self::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<u64> {
        let mut at = match self.state {
            State::Active | State::Failed | State::Closed => return None,
            State::Fencing => return Some(self.resend_at_us.min(self.silence_deadline_us())),
            State::Quiescing | State::Opening | State::Checking => self.step_deadline_us,
            State::Parked { until_us } => {
                until_us.unwrap_or(u64::MAX).min(self.silence_deadline_us())
            }
            State::Waiting | State::Connected => self.resend_at_us.min(self.silence_deadline_us()),
        };
        if let Some(chain) = &self.chain {
            at = at.min(chain.since_us + self.config.total_us);
        }
        Some(at)
    }

    /// After how long a Hello is repeated first: a planned switch's first epoch has nothing that
    /// hurries.
    fn first_resend_us(&self) -> u64 {
        match self.chain.as_ref().is_some_and(|chain| chain.planned && chain.epochs <= 1) {
            true => self.plan_resend_us(),
            false => self.config.hello_min_us,
        }
    }

    pub(super) fn silence_deadline_us(&self) -> u64 {
        self.peer_heard_us + self.silence_us
    }

    /// A deadline has passed.
    pub fn handle_timeout(&mut self, now_us: u64) {
        if matches!(self.state, State::Active | State::Failed | State::Closed) {
            return;
        }
        if self.state == State::Fencing {
            return self.plan_timeout(now_us);
        }
        if self.chain.as_ref().is_some_and(|c| now_us >= c.since_us + self.config.total_us) {
            return self.fail(now_us, FailCause::Deadline);
        }
        match self.state {
            State::Quiescing | State::Opening | State::Checking
                if now_us >= self.step_deadline_us =>
            {
                self.fail(now_us, FailCause::ShellSilent)
            }
            State::Quiescing | State::Opening | State::Checking => {}
            _ if now_us >= self.silence_deadline_us() => self.fail(now_us, FailCause::PeerSilent),
            State::Parked { until_us: Some(until_us) } if now_us >= until_us => {
                self.advance(now_us)
            }
            State::Waiting | State::Connected if now_us >= self.resend_at_us => {
                self.resend_interval_us =
                    (self.resend_interval_us * 2).min(self.config.hello_max_us);
                let via = self.next_via();
                self.send_hello(now_us, via);
            }
            _ => {}
        }
    }
}
