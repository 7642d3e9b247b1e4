//! The fence of a planned switch: what was posted before it is to complete on the old path, and
//! nothing else leaves meanwhile.

use super::{Env, Executor, StepError};
use crate::mutants::left_out;
use crate::qp::State;
use crate::slots::SlotPath;
use unbroken_types::{Progress, WcStatus};

/// How often it is looked whether a fence is drained: first, and at most (it doubles).
pub(super) const FENCE_LOOK_US: u64 = 50;
/// See `FENCE_LOOK_US`.
const FENCE_LOOK_MAX_US: u64 = 1_000;
/// After a planned switch that was cancelled the next is not tried before this time, which doubles
/// each time.
const PLAN_PAUSE_US: u64 = 100_000;
/// See `PLAN_PAUSE_US`: at most.
const PLAN_PAUSE_MAX_US: u64 = 10_000_000;

/// The watch over sends that shall complete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fence {
    pub(super) advanced: u64,
    pub(super) outstanding: u32,
    pub(super) look_at_us: u64,
    pub(super) look_us: u64,
    /// When something moved last.
    pub(super) moved_us: u64,
}

/// Sends that complete on a path that loses much may stand still for so long.
const LOSSY_STILL_US: u64 = 500_000;
/// How often a transport that has given up goes on without anything having moved.
const GOES_ON: u32 = 16;

impl Executor {
    /// The transport of the present life has given up on a path that lives. Where the path loses
    /// much, that says nothing of the QP: it goes on in the same life, in which the peer knows what
    /// comes again, so that atomics survive. A QP that is wedged by itself does not move by that.
    pub(super) fn goes_on(&mut self, env: &mut impl Env, path: SlotPath) -> bool {
        if self.gave_up != Some(WcStatus::RetryExcErr)
            || left_out!(self.lqp.mutation(), NeverGoesOn)
        {
            return false;
        }
        if !env.loses(path) {
            return false;
        }
        let advanced = env.progress().advanced;
        let times = if self.went_on.1 == advanced { self.went_on.0 + 1 } else { 1 };
        let insists = self.lqp.state() == State::Fencing;
        if times > GOES_ON || !env.go_on(insists) {
            return false;
        }
        self.insists = insists;
        (self.went_on, self.gave_up) = ((times, advanced), None);
        true
    }

    /// While sends are to complete on a path that loses much, they are sent again soon and without
    /// end; the fence has deadlines.
    pub(super) fn insist(&mut self, env: &mut impl Env, insists: bool) {
        let changes = match insists {
            true => self.lqp.path().is_some_and(|path| env.loses(path)),
            false => self.insists,
        };
        if changes {
            let goes_on = env.go_on(insists);
            self.insists = insists && goes_on;
        }
    }

    /// Looks whether what was posted before the fence is complete, as the QP's progress tells,
    /// which was asked for after the fence was put up.
    pub(super) fn look_at_fence(&mut self, now_us: u64, progress: &Progress) {
        let Some(fence) = &mut self.fence else { return };
        let now = (progress.advanced, progress.outstanding_sends);
        let mut moved = now != (fence.advanced, fence.outstanding);
        if moved {
            fence.moved_us = now_us;
        }
        // What loses much stands still now and then.
        moved |= self.insists && now_us < fence.moved_us + LOSSY_STILL_US;
        (fence.advanced, fence.outstanding) = now;
        fence.look_at_us = now_us + fence.look_us;
        fence.look_us = (2 * fence.look_us).min(FENCE_LOOK_MAX_US);
        let drained = progress.sends() == 0;
        self.lqp.handle_fence(now_us, drained, moved);
        if drained || self.lqp.state() != State::Fencing {
            self.fence = None;
        }
    }

    /// The planned switch is cancelled: what was held goes where the rest is.
    pub(super) fn release(&mut self, env: &mut impl Env) {
        self.fence = None;
        self.insist(env, false);
        let now_us = env.now_us();
        let pause_us = (2 * self.pause.1).clamp(PLAN_PAUSE_US, PLAN_PAUSE_MAX_US);
        self.pause = (now_us + pause_us, pause_us);
        let Some(held) = self.held.take() else { return };
        if env.post(&held.work).is_err() {
            self.held = Some(held);
            self.step(env, Err(StepError));
        }
    }
}
