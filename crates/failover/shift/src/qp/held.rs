//! A QP that seeks its peer on a NIC that is dead, or that was: what the program asks of it is kept.
//!
//! From the first verb that the dead NIC refuses, the QP *holds*: each later post goes behind what
//! is kept, whatever the physical QP would say to it, and changes are merged into what the program
//! has set. When the peer is found, all of it goes along to the next NIC, behind what the physical
//! QP gives back. If it is not found in time, or the program ends the QP, it is flushed in that
//! order; RESET and destroy forget it. [`super::seek`] bounds the time, the sizes of the QP bound
//! what is kept.
//!
//! A NIC that was dead and is healed has other keys for regions of before, which the peer must hear
//! before its requests arrive. So a QP there holds from its RTR until its peer is found; if it is
//! not, what is kept goes to the physical QP, which carries it as one without failover would.

use super::{Gate, Qp, Seeks};
use crate::worker_queue::Job;
use unbroken_runtime::now_us;
use unbroken_types::{check_send, QpState, Sends, WcStatus};
use unbroken_verbs::{Backlog, Error, PostError, QpModify, RcModify, RecvWr, Result, SendBatch};

impl Gate {
    /// The QP keeps what the program posts and changes: it seeks its peer on a dead NIC.
    pub(super) fn keeps_all(&self) -> bool {
        self.seeks.as_ref().is_some_and(|seeks| seeks.held.is_some())
    }

    /// The QP seeks no more. What it has kept is in the answer.
    pub(super) fn take_seeks(&mut self) -> Option<Seeks> {
        let seeks = self.seeks.take()?;
        if seeks.held.is_some() {
            self.holds.set(false);
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
        g.holds.set(true);
        self.core.jobs.put(Job::Hurry(self.id()));
        true
    }

    /// The peer is to hear of the NIC's keys before it sends: a QP that seeks it keeps what it is
    /// asked from now on. False: it does not seek.
    pub(super) fn keep_until_found(&self, g: &mut Gate) -> bool {
        let Some(seeks) = &mut g.seeks else { return false };
        seeks.held.get_or_insert_with(Backlog::default);
        g.holds.set(true);
        true
    }

    /// Nobody has been found whom the QP could tell anything: the physical QP gets what was kept.
    pub(super) fn release_kept(&self, g: &mut Gate) {
        let Some(mut kept) = g.seeks.as_mut().and_then(|seeks| seeks.held.take()) else { return };
        g.holds.set(false);
        if self.give_kept(g, &mut kept).is_err() {
            self.flush_with_kept(g, kept, WcStatus::FatalErr);
        }
    }

    /// What it takes is no longer in `kept`.
    fn give_kept(&self, g: &Gate, kept: &mut Backlog) -> Result<()> {
        let QpModify { rc, path, sqd_notify, .. } = &g.app;
        while let Some(recv) = kept.recvs.first() {
            g.phys.post_recv(&RecvWr { wr_id: recv.wr_id, sges: &recv.sges })?;
            kept.recvs.remove(0);
        }
        let rtr = RcModify {
            state: Some(QpState::Rtr),
            dest_qpn: rc.dest_qpn,
            rq_psn: rc.rq_psn,
            mtu: rc.mtu,
            min_rnr_timer: rc.min_rnr_timer,
            max_dest_rd_atomic: rc.max_dest_rd_atomic,
            access: rc.access,
            ..RcModify::default()
        };
        let path = path.map(|path| self.path_from_here(g, path));
        let mut changes = vec![QpModify { rc: rtr, path, ..QpModify::default() }];
        if rc.state != Some(QpState::Rtr) {
            let rts = RcModify {
                state: Some(QpState::Rts),
                sq_psn: rc.sq_psn,
                timeout: rc.timeout,
                retry_cnt: rc.retry_cnt,
                rnr_retry: rc.rnr_retry,
                max_rd_atomic: rc.max_rd_atomic,
                ..RcModify::default()
            };
            changes.push(QpModify { rc: rts, ..QpModify::default() });
        }
        if rc.state == Some(QpState::Sqd) {
            let sqd = RcModify { state: Some(QpState::Sqd), ..RcModify::default() };
            changes.push(QpModify { rc: sqd, sqd_notify: *sqd_notify, ..QpModify::default() });
        }
        g.phys.modify_all(&changes)?;
        match kept.sends.is_empty() {
            true => Ok(()),
            false => g.phys.post_sends(&Sends(&kept.sends)),
        }
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
