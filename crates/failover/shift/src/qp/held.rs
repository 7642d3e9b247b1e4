//! A QP that seeks its peer on a NIC that is dead: what the program asks of it is kept.
//!
//! From the first verb that the dead NIC refuses, the QP *holds*: each later post goes behind what
//! is kept, whatever the physical QP would say to it, and changes are merged into what the program
//! has set. When the peer is found, all of it goes along to the next NIC, behind what the physical
//! QP gives back. If it is not found in time, or the program ends the QP, it is flushed in that
//! order; RESET and destroy forget it. [`super::seek`] bounds the time, the sizes of the QP bound
//! what is kept.

use super::{Gate, Qp, Seeks};
use crate::worker_queue::Job;
use unbroken_runtime::now_us;
use unbroken_types::{check_send, QpState, WcStatus};
use unbroken_verbs::{Backlog, Error, PostError, RecvWr, Result, SendBatch};

impl Gate {
    /// The QP keeps what the program posts and changes: it seeks its peer on a dead NIC.
    pub(super) fn keeps_all(&self) -> bool {
        self.seeks.as_ref().is_some_and(|seeks| seeks.held.is_some())
    }

    /// The QP seeks no more. What it has kept is in the answer.
    pub(super) fn take_seeks(&mut self) -> Option<Seeks> {
        let seeks = self.seeks.take()?;
        if seeks.held.is_some() {
            self.holds = false;
        }
        Some(seeks)
    }
}

impl Qp {
    /// The NIC has refused a verb as a dead one does. A QP that seeks its peer keeps what it is
    /// asked from now on, and the answer hurries. False: it does not seek.
    pub(super) fn keep_from_now_on(&self, g: &mut Gate) -> bool {
        let Some(seeks) = &mut g.seeks else { return false };
        seeks.held.get_or_insert_with(Backlog::default);
        seeks.failed.get_or_insert((WcStatus::FatalErr, now_us()));
        g.holds = true;
        self.core.jobs.put(Job::Hurry(self.id()));
        true
    }

    /// Keeps sends, all or none. `None`: a QP that is not in that case.
    pub(super) fn keep_sends(&self, g: &mut Gate, batch: &dyn SendBatch) -> Option<Result<()>> {
        let (phys, caps) = (&g.phys, &self.init.caps);
        let held = g.seeks.as_mut()?.held.as_mut()?;
        let kept = match g.app.rc.state {
            Some(QpState::Rts | QpState::Sqd) => {
                held.hold_sends(caps, phys.progress().sends(), batch, |wr| check_send(caps, wr))
            }
            state => Err(PostError::WrongState(state.unwrap_or(QpState::Reset))),
        };
        Some(kept.map_err(Error::from))
    }

    /// Keeps a receive. `None`: a QP that is not in that case.
    pub(super) fn keep_recv(&self, g: &mut Gate, wr: &RecvWr<'_>) -> Option<Result<()>> {
        let phys = &g.phys;
        let held = g.seeks.as_mut()?.held.as_mut()?;
        let kept = held.hold_recv(&self.init.caps, phys.progress().outstanding_recvs, wr);
        Some(kept.map_err(Error::from))
    }

    /// Ends a QP that may have kept work: the first send of all gets this status, everything else
    /// is flushed, also what is posted later.
    pub(super) fn flush_with_kept(&self, g: &mut Gate, kept: Backlog, first: WcStatus) {
        match g.phys.quiesce() {
            Ok(mut work) => {
                work.append(kept);
                self.flush_backlog(&work, first);
            }
            Err(_) => {
                let had = g.phys.progress().sends() > 0;
                g.phys.fail(first);
                self.flush_backlog(&kept, if had { WcStatus::WrFlushErr } else { first });
            }
        }
        g.failed = true;
        self.take_no_more();
    }
}
