//! Work that no physical QP holds: posted while the QP is between two paths, or about to leave one.

use super::{Env, Executor};
use crate::action::Reason;
use crate::qp::State;
use unbroken_types::{check_send, Backlog, PostError, QpCaps, RecvWr, SendBatch, WcStatus};

/// Work that no physical QP holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    /// Its counts say nothing: they were told to the state machine.
    pub(super) work: Backlog,
    /// The receives are here, too; else they are in the physical QP, and what is here of them was
    /// posted later.
    pub(super) recvs: bool,
}

impl Held {
    /// Work that was posted later than what the physical QP has; `None` if there is none.
    pub(super) fn later(work: Backlog) -> Option<Held> {
        (!work.is_empty()).then_some(Held { work, recvs: false })
    }
}

impl Executor {
    /// All that was outstanding when the connection was closed, unless the physical QP holds it
    /// all.
    pub fn take_work(&mut self, env: &mut impl Env) -> Option<Backlog> {
        let held = self.held.take()?;
        Some(Self::with_physical(held, env).unwrap_or_else(|(held, _)| {
            // What the physical QP has is older, and nobody will ask it again.
            env.fail(WcStatus::WrFlushErr);
            held
        }))
    }

    /// Keeps sends that are posted while the QP is between two paths, or about to leave one, all or
    /// none. `None` if it is not. `in_device` says how many the physical QP has.
    pub fn hold_sends(
        &mut self,
        caps: &QpCaps,
        in_device: impl FnOnce() -> u32,
        batch: &dyn SendBatch,
    ) -> Option<Result<(), PostError>> {
        let work = &mut self.held.as_mut()?.work;
        let stays = matches!(self.lqp.state(), State::Fencing | State::Quiescing);
        let before = if stays { in_device() } else { 0 };
        Some(work.hold_sends(caps, before, batch, |wr| check_send(caps, wr)))
    }

    /// Keeps a receive that is posted while no physical QP takes it. `None` if one does.
    /// `in_device` says how many the physical QP has.
    pub fn hold_recv(
        &mut self,
        caps: &QpCaps,
        in_device: impl FnOnce() -> u32,
        wr: &RecvWr<'_>,
    ) -> Option<Result<(), PostError>> {
        let held = self.held.as_mut().filter(|h| h.recvs || !h.work.recvs.is_empty())?;
        let before = if held.recvs { 0 } else { in_device() };
        Some(held.work.hold_recv(caps, before, wr))
    }

    /// As [`Self::suspect`], where the program had posted work before the QP had this executor,
    /// which its physical QP did not take: that goes along, behind what the physical QP has.
    pub fn suspect_with(&mut self, env: &mut impl Env, reason: Reason, later: Backlog) {
        self.held = Held::later(later);
        self.suspect(env, reason);
    }
}
