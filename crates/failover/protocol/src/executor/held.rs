//! Work that no physical QP holds: posted while the QP is between two paths, or about to leave one.

use super::{Executor, Shell};
use crate::qp::State;
use unbroken_types::{
    check_send, Backlog, PostError, QpCaps, RecvEntry, RecvWr, SendBatch, SendEntry,
};

/// Work that no physical QP holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    /// Its counts say nothing: they were told to the state machine.
    pub(super) work: Backlog,
    /// The receives are here, too; else they are in the physical QP.
    pub(super) recvs: bool,
}

impl Executor {
    /// All that was outstanding when the connection was closed, unless the physical QP holds it
    /// all.
    pub fn take_work(&mut self, shell: &mut impl Shell) -> Option<Backlog> {
        let held = self.held.take()?;
        Some(Self::with_physical(held, shell).unwrap_or_else(|(held, _)| held))
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
        let before = if self.lqp.state() == State::Fencing { in_device() } else { 0 }
            + work.sends.len() as u32;
        if before as usize + batch.count() > caps.max_send_wr as usize {
            return Some(Err(PostError::QueueFull(before)));
        }
        // The QP that adopts the backlog takes all of it or nothing: one that does not fit would
        // end the rest.
        if let Err(e) = (0..batch.count()).try_for_each(|i| check_send(caps, &batch.wr(i))) {
            return Some(Err(e));
        }
        work.keys_changed |= (0..batch.count()).any(|i| batch.wr(i).opcode.changes_keys());
        work.sends.extend((0..batch.count()).map(|i| SendEntry::from(&batch.wr(i))));
        Some(Ok(()))
    }

    /// Keeps a receive that is posted while no physical QP takes it. `None` if one does.
    pub fn hold_recv(&mut self, caps: &QpCaps, wr: &RecvWr<'_>) -> Option<Result<(), PostError>> {
        let recvs = &mut self.held.as_mut().filter(|h| h.recvs)?.work.recvs;
        let (have, max) = (wr.sges.len(), caps.max_recv_sge);
        Some(if recvs.len() >= caps.max_recv_wr as usize {
            Err(PostError::QueueFull(recvs.len() as u32))
        } else if have > max as usize {
            Err(PostError::TooManySges { have, max })
        } else {
            recvs.push(RecvEntry { wr_id: wr.wr_id, sges: wr.sges.to_vec() });
            Ok(())
        })
    }
}
