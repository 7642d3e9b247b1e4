//! Planned switches: going back to the preferred path, and moving away from a NIC by choice, with
//! nothing lost and nothing replayed.
//!
//! Both ends *fence*: what the application posts is held, and what was posted before completes on
//! the old path. Then nothing is outstanding in either direction, and the switch is one without a
//! backlog: atomics and WRs that must not be replayed survive it.
//!
//! | at `Fencing` of epoch *e*             | next        | actions                          |
//! |---------------------------------------|-------------|----------------------------------|
//! | our sends are complete                | (drained)   | Send Drained(e), again and again |
//! | drained, and Drained(e) of the peer   | `Quiescing` | Quiesce; enters *e*              |
//! | not drained, and nothing moves        | `Active`    | Send Cancel(e), Release          |
//! | Cancel(e) of the peer                 | `Active`    | Release                          |
//! | Propose or Drained of a higher epoch  | `Fencing` of that one |                        |
//! | drained, and Hello of *e*             | `Quiescing` | Quiesce: it has overtaken Drained |
//! | another Hello of *e* or higher, `suspect` | `Quiescing` | Quiesce: a passive switch    |
//!
//! The shell answers `Fence` at once with how the fence is. Who plans says Propose if sends are on
//! their way, and else Drained alone; who is invited says nothing before it is drained, unless that
//! takes long: where hundreds of QPs move, each message that need not be is one that another waits
//! behind.
//!
//! An end that has said Drained does not cancel by itself, for the peer may have left the old path
//! on its word, and what it would send there now could be executed unseen. It waits for the peer's
//! Drained, Hello or Cancel; the peer answers every Drained of an epoch that it has cancelled with
//! Cancel. A cancelled epoch is never entered by plan again, so late copies of its messages do
//! nothing: the next try has another number.

use super::{Chain, LogicalQp, State};
use crate::action::{Action, Reason};
use crate::message::{Body, Planned};
use crate::mutants::left_out;
use crate::slots::{slot_of, Liveness, SlotPath};

/// A planned switch that both ends prepare.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(super) struct Plan {
    epoch: u64,
    reason: Reason,
    since_us: u64,
    /// When our sends moved last.
    moved_us: u64,
    /// Our sends are complete, and the peer has been told.
    ours: bool,
    /// The peer's are.
    theirs: bool,
    /// The peer has been told something of it, or need not be told before our sends are complete.
    told: bool,
}

impl Plan {
    /// How far it is, without its times.
    pub(super) fn progress(&self) -> (u64, bool, bool, bool) {
        (self.epoch, self.ours, self.theirs, self.told)
    }
}

impl LogicalQp {
    /// The epoch of the planned switch that is being prepared.
    pub fn planned_epoch(&self) -> Option<u64> {
        self.plan.map(|p| p.epoch).filter(|_| self.state == State::Fencing)
    }

    /// Prepares a switch to the best path that is `wanted`. Gives whether there is one that is
    /// believed alive, and nothing else goes on.
    pub fn plan(&mut self, now_us: u64, reason: Reason, wanted: impl Fn(SlotPath) -> bool) -> bool {
        if self.state != State::Active || self.peer_closed {
            return false;
        }
        if self.has_settled(now_us) {
            self.switch_is_over();
        }
        let from = self.epoch.max(self.cancelled) + 1;
        let Some(epoch) = self.choose_untried(from, wanted) else { return false };
        self.begin_plan(now_us, epoch, reason);
        true
    }

    fn begin_plan(&mut self, now_us: u64, epoch: u64, reason: Reason) {
        // Who is invited knows that the other is there.
        let told = reason == Reason::Peer;
        self.plan = Some(Plan {
            epoch,
            reason,
            since_us: now_us,
            moved_us: now_us,
            ours: false,
            theirs: false,
            told,
        });
        self.state = State::Fencing;
        self.peer_heard_us = now_us;
        self.silence_us = self.config.peer_silence_us;
        self.resend_interval_us = self.plan_resend_us();
        self.last_via = self.slot();
        self.resend_at_us = now_us + self.resend_interval_us;
        self.actions.push_back(Action::Fence { epoch: self.epoch });
        if left_out!(self.config.mutation, NoFence) {
            self.drained(now_us);
        }
    }

    /// Sets how many QPs of the process are on their way.
    pub fn set_crowd(&mut self, qps: u32) {
        self.switching_qps = qps;
    }

    /// After how long what is said of a planned switch is repeated first.
    pub(super) fn plan_resend_us(&self) -> u64 {
        (self.config.plan_min_us + self.config.plan_crowd_us * u64::from(self.switching_qps))
            .min(self.config.hello_max_us)
    }

    /// Says where we are. Repeated while nothing comes of it.
    fn tell_plan(&mut self, now_us: u64) {
        let Some(plan) = &mut self.plan else { return };
        plan.told = true;
        let (kind, epoch) =
            if plan.ours { (Planned::Drained, plan.epoch) } else { (Planned::Propose, plan.epoch) };
        let via = self.next_via();
        self.send_body(Body::Planned(kind, epoch), via);
        self.resend_at_us = now_us + self.resend_interval_us;
    }

    /// How the fence is: whether all our sends are complete, and whether some have moved since this
    /// was told last.
    pub fn handle_fence(&mut self, now_us: u64, drained: bool, moved: bool) {
        if self.state != State::Fencing {
            return;
        }
        let Some(plan) = self.plan.as_mut().filter(|p| !p.ours) else { return };
        if moved {
            plan.moved_us = now_us;
        }
        let stuck = now_us >= plan.moved_us + self.config.fence_us
            || now_us >= plan.since_us + self.config.fence_total_us;
        if drained {
            self.drained(now_us);
        } else if stuck {
            let epoch = plan.epoch;
            self.cancel(now_us, epoch);
            self.tell_cancel(epoch);
        } else if !plan.told {
            self.tell_plan(now_us);
        }
    }

    fn drained(&mut self, now_us: u64) {
        let Some(plan) = &mut self.plan else { return };
        plan.ours = true;
        plan.theirs |= left_out!(self.config.mutation, FenceNotAwaited);
        self.resend_interval_us = self.plan_resend_us();
        self.tell_plan(now_us);
        self.go_if_ready(now_us);
    }

    /// Both ends have nothing outstanding: leaves the old path.
    fn go_if_ready(&mut self, now_us: u64) {
        let Some(plan) = self.plan.take_if(|p| p.ours && p.theirs) else { return };
        (self.target, self.vain) = (plan.epoch, 0);
        let (from_slot, on_path_since_us) = (self.slot(), self.active_since_us);
        self.chain = Some(Chain {
            since_us: now_us,
            detected_us: plan.since_us,
            from_slot,
            on_path_since_us,
            reason: plan.reason,
            status: plan.reason.status(),
            tries: 0,
            epochs: 0,
            planned: true,
        });
        self.state = State::Quiescing;
        self.step_deadline_us = now_us + self.config.step_us;
        self.actions.push_back(Action::Quiesce { epoch: self.epoch });
    }

    /// Goes on where it was; the epoch is not entered by plan any more.
    pub(super) fn cancel(&mut self, now_us: u64, epoch: u64) {
        self.cancelled = self.cancelled.max(epoch);
        if self.state == State::Fencing {
            self.plan = None;
            self.state = State::Active;
            self.counters.plans_cancelled += 1;
            self.peer_heard_us = now_us;
            self.actions.push_back(Action::Release { epoch: self.epoch });
        }
    }

    fn tell_cancel(&mut self, epoch: u64) {
        let via = self.next_via();
        self.send_body(Body::Planned(Planned::Cancel, epoch), via);
    }

    pub(super) fn handle_planned(&mut self, now_us: u64, kind: Planned, epoch: u64) {
        match self.state {
            State::Failed => return self.refuse(self.refusal),
            State::Closed => {
                let via = self.next_via();
                return self.send_body(Body::Bye, via);
            }
            _ => {}
        }
        if epoch <= self.epoch {
            if kind != Planned::Cancel && epoch > 0 {
                // It has not heard that we are there already.
                self.answer_stale(now_us);
            }
            return;
        }
        if epoch > self.epoch + super::control::MAX_EPOCH_JUMP {
            self.counters.impossible += 1;
            return;
        }
        match (kind, self.state) {
            (Planned::Cancel, State::Fencing) if self.plan.is_some_and(|p| p.epoch == epoch) => {
                self.was_in_vain(epoch);
                self.cancel(now_us, epoch)
            }
            (Planned::Cancel, _) => {}
            (_, State::Active) => self.join(now_us, kind, epoch),
            (_, State::Fencing) => self.agree(now_us, kind, epoch),
            _ => {} // between two epochs: the Hello that follows says more
        }
    }

    /// The peer wants to move.
    fn join(&mut self, now_us: u64, kind: Planned, epoch: u64) {
        if epoch <= self.cancelled || self.liveness(slot_of(epoch)) != Liveness::Alive {
            self.cancelled = self.cancelled.max(epoch);
            return self.tell_cancel(epoch);
        }
        self.begin_plan(now_us, epoch, Reason::Peer);
        self.hear_plan(now_us, kind);
    }

    /// Both want to move, perhaps to different paths: the higher epoch counts.
    fn agree(&mut self, now_us: u64, kind: Planned, epoch: u64) {
        let Some(plan) = &mut self.plan else { return };
        if epoch < plan.epoch {
            return self.tell_plan(now_us);
        }
        if epoch > plan.epoch {
            if epoch <= self.cancelled || self.liveness(slot_of(epoch)) != Liveness::Alive {
                self.cancelled = self.cancelled.max(epoch);
                return self.tell_cancel(epoch);
            }
            let Some(plan) = &mut self.plan else { return };
            (plan.epoch, plan.theirs) = (epoch, false);
            if plan.ours {
                self.tell_plan(now_us);
            }
        }
        self.hear_plan(now_us, kind);
    }

    /// The peer is in that epoch, as its Hello says, which has overtaken its Drained: it has gone
    /// on ours, so that this is the switch that was planned, for its reason.
    pub(super) fn peer_has_gone(&self, epoch: u64) -> bool {
        self.plan.is_some_and(|plan| plan.ours && plan.epoch == epoch)
    }

    pub(super) fn hear_plan(&mut self, now_us: u64, kind: Planned) {
        self.peer_heard_us = now_us;
        let Some(plan) = &mut self.plan else { return };
        match kind {
            Planned::Drained => {
                plan.theirs = true;
                self.go_if_ready(now_us);
            }
            // It has not heard that we are drained.
            Planned::Propose if plan.ours => self.tell_plan(now_us),
            _ => {}
        }
    }

    /// A deadline of the preparation has passed.
    pub(super) fn plan_timeout(&mut self, now_us: u64) {
        if now_us >= self.silence_deadline_us() {
            return self.leave(now_us, Reason::Stall);
        }
        if now_us >= self.resend_at_us {
            self.resend_interval_us = (self.resend_interval_us * 2).min(self.config.hello_max_us);
            self.tell_plan(now_us);
        }
    }
}
