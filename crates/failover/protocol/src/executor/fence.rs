//! The fence of a planned switch: what was posted before it is to complete on the old path, and
//! nothing else leaves meanwhile.

use super::{Executor, Shell, StepError};
use crate::qp::State;
use unbroken_types::Progress;

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
}

impl Executor {
    /// Looks whether what was posted before the fence is complete, as the QP's progress tells,
    /// which was asked for after the fence was put up.
    pub(super) fn look_at_fence(&mut self, now_us: u64, progress: &Progress) {
        let Some(fence) = &mut self.fence else { return };
        let now = (progress.advanced, progress.outstanding_sends);
        let moved = now != (fence.advanced, fence.outstanding);
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
    pub(super) fn release(&mut self, shell: &mut impl Shell) {
        self.fence = None;
        let now_us = shell.now_us();
        let pause_us = (2 * self.pause.1).clamp(PLAN_PAUSE_US, PLAN_PAUSE_MAX_US);
        self.pause = (now_us + pause_us, pause_us);
        let Some(held) = self.held.take() else { return };
        if shell.post(&held.work).is_err() {
            self.held = Some(held);
            self.step(shell, Err(StepError));
        }
    }
}
