//! Posting to a logical QP: to its physical one, or, where that has failed, to the next.

use super::{Gate, Qp};
use crate::datagram;
use crate::link;
use unbroken_failover_protocol::Reason;
use unbroken_types::{check_datagram, check_send, QpType, WcStatus};
use unbroken_verbs::{
    Cq, Error, ListResult, PostError, RecvWr, Result, ResumableQp, SendBatch, SendWr,
};

impl Qp {
    /// Posts a send.
    pub fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.core.process.check()?;
        let mut g = self.gate();
        self.set_busy(&g);
        if g.holds.get() {
            return self.hold_sends(&mut g, wr);
        }
        match g.phys.post_send(wr) {
            Ok(()) => Ok(()),
            Err(e) => self.sends_failed(&mut g, e, wr),
        }
    }

    /// Posts sends in order up to the first that cannot be posted: how many were before that one,
    /// and its error.
    pub fn post_list(&self, list: &[SendWr<'_>]) -> ListResult {
        self.core.process.check().map_err(|e| (0, e.into()))?;
        let g = self.gate();
        self.set_busy(&g);
        let done = match g.holds.get() {
            true => 0,
            false => match g.phys.post_list(list) {
                Ok(()) => return Ok(()),
                Err((done, _)) => done,
            },
        };
        drop(g);
        // One by one, as posts are that fail.
        for (before, wr) in list.iter().enumerate().skip(done) {
            self.post_send(wr).map_err(|e| (before, e))?;
        }
        Ok(())
    }

    /// Posts several sends: all or none.
    pub fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        self.core.process.check()?;
        let mut g = self.gate();
        self.set_busy(&g);
        if g.holds.get() {
            return self.hold_sends(&mut g, batch);
        }
        match g.phys.post_sends(batch) {
            Ok(()) => Ok(()),
            Err(e) => self.sends_failed(&mut g, e, batch),
        }
    }

    #[cold]
    fn hold_sends(&self, g: &mut Gate, batch: &dyn SendBatch) -> Result<()> {
        self.sends_held(g, batch).unwrap_or_else(|| g.phys.post_sends(batch))
    }

    /// Keeps sends of a QP whose physical one shall not have them now. `None`: it shall.
    fn sends_held(&self, g: &mut Gate, batch: &dyn SendBatch) -> Option<Result<()>> {
        link::hold_sends(self, g, batch)
            .or_else(|| datagram::hold_sends(self, g, batch))
            .or_else(|| self.keep_sends(g, batch))
    }

    #[cold]
    fn sends_failed(&self, g: &mut Gate, error: Error, batch: &dyn SendBatch) -> Result<()> {
        self.post_failed(g, error, &Post::Sends(batch))
    }

    /// See [`Qp::sends_held`].
    #[cold]
    fn recv_held(&self, g: &mut Gate, wr: &RecvWr<'_>) -> Option<Result<()>> {
        link::hold_recv(self, g, wr)
            .or_else(|| datagram::hold_recv(self, g, wr))
            .or_else(|| self.keep_recv(g, wr))
    }

    /// Posts a receive.
    pub fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        self.core.process.check()?;
        if self.init.srq.is_some() {
            return Err(PostError::HasSrq.into());
        }
        let mut g = self.gate();
        if let Some(held) = if g.holds.get() { self.recv_held(&mut g, wr) } else { None } {
            return held;
        }
        match g.phys.post_recv(wr) {
            Ok(()) => Ok(()),
            Err(e) => self.post_failed(&mut g, e, &Post::Recv(wr)),
        }
    }

    /// A post failed. On a dead NIC that is how a failure shows first: switch, and post to the QP
    /// that the switch made, or keep the WR while there is none, or while the peer is not found.
    #[cold]
    fn post_failed(&self, g: &mut Gate, error: Error, post: &Post<'_>) -> Result<()> {
        let mut error = error;
        // The NIC that the switch chose may be dead by now, too; each try leaves one of them.
        let mut tries = self.core.nics.count() + 1;
        while !g.ended() {
            if let Some(result) = post.hold(self, g) {
                return result;
            }
            if error.errno() != libc::EIO || tries == 0 {
                return Err(error);
            }
            tries -= 1;
            match (g.link.is_some(), g.datagram.is_some()) {
                (true, _) => link::suspect(self, g, Reason::PostFailed),
                (_, true) => datagram::leave(self, g, Reason::PostFailed),
                _ if self.leave_dead_nic(g)? || self.keep_from_now_on(g) => {}
                _ => return Err(error),
            }
            if !g.failed {
                match post.hold(self, g).unwrap_or_else(|| post.to(&*g.phys)) {
                    Ok(()) => return Ok(()),
                    Err(e) => error = e,
                }
            }
        }
        self.post_to_ended(g, error, post)
    }

    /// Flushes what is posted to a QP in ERR whose physical QP takes nothing any more. That one may
    /// also have refused what every device refuses in any state: the program is told.
    fn post_to_ended(&self, g: &mut Gate, error: Error, post: &Post<'_>) -> Result<()> {
        post.check(self, g)?;
        if error.errno() == libc::ENOMEM {
            return Err(error);
        }
        if !g.failed {
            // What it had is flushed before what comes now.
            if let Ok(work) = g.phys.quiesce() {
                self.flush_backlog(&work, WcStatus::WrFlushErr);
                g.failed = true;
            }
        }
        post.flush(self);
        Ok(())
    }
}

/// What is posted.
enum Post<'a> {
    Sends(&'a dyn SendBatch),
    Recv(&'a RecvWr<'a>),
}

impl Post<'_> {
    fn to(&self, phys: &dyn ResumableQp) -> Result<()> {
        match self {
            Post::Sends(batch) => phys.post_sends(*batch),
            Post::Recv(wr) => phys.post_recv(wr),
        }
    }

    /// Keeps it where the physical QP shall not have it now. `None`: it shall.
    fn hold(&self, qp: &Qp, g: &mut Gate) -> Option<Result<()>> {
        match self {
            Post::Sends(batch) => qp.sends_held(g, *batch),
            Post::Recv(wr) => qp.recv_held(g, wr),
        }
    }

    /// Whether it fits the QP, whatever its state.
    fn check(&self, qp: &Qp, g: &Gate) -> std::result::Result<(), PostError> {
        let caps = &qp.init.caps;
        let batch = match self {
            Post::Sends(batch) => *batch,
            Post::Recv(wr) => {
                let (have, max) = (wr.sges.len(), caps.max_recv_sge.max(1));
                return match have > max as usize {
                    true => Err(PostError::TooManySges { have, max }),
                    false => Ok(()),
                };
            }
        };
        let mtu = g.datagram.as_ref().map(|d| d.mtu());
        (0..batch.count()).map(|i| batch.wr(i)).try_for_each(|wr| {
            check_send(caps, &wr)?;
            match (qp.init.qp_type, mtu) {
                (QpType::Ud, Some(mtu)) => check_datagram(mtu, &wr).map(drop),
                (QpType::Uc, _) if wr.opcode.awaits_data() && !wr.opcode.is_local() => {
                    Err(PostError::Unsupported(wr.opcode))
                }
                _ => Ok(()),
            }
        })
    }

    fn flush(&self, qp: &Qp) {
        let flush = |cq: &Cq, wr_id| cq.push(qp.flushed(wr_id, WcStatus::WrFlushErr), false);
        match self {
            Post::Sends(batch) => {
                (0..batch.count()).for_each(|i| flush(&qp.init.send_cq, batch.wr(i).wr_id));
            }
            Post::Recv(wr) => flush(&qp.init.recv_cq, wr.wr_id),
        }
    }
}
