//! The program: what it posts, and what it may expect of each completion.

use super::{InQueue, Out, Outcome, Pair, Sent, World, QPN, WORK};
use unbroken_journal::Posted;
use unbroken_types::{PostError, RecvWr, SendFlags, SendOpcode, SendWr, Sge, Wc, WcStatus};

impl World {
    fn next_wr(&mut self, i: usize, sges: &'static [Sge]) -> SendWr<'static> {
        let opcode = [
            SendOpcode::Write,
            SendOpcode::Write,
            SendOpcode::Send,
            SendOpcode::WriteImm,
            SendOpcode::Read,
        ][self.rng.below(5) as usize];
        // The last one says when all is done, and a queue full of others would never be emptied.
        let signaled = i + 1 == WORK || i % 5 == 4 || self.rng.one_in(2);
        self.sent.push(Sent { opcode, signaled, executed: 0, status: None });
        SendWr {
            wr_id: i as u64,
            opcode,
            flags: if signaled { SendFlags::SIGNALED } else { SendFlags::default() },
            remote_addr: i as u64 * 8,
            rkey: 5,
            sges,
            ..SendWr::default()
        }
    }

    pub(super) fn post_sends(&mut self) -> Outcome {
        const SGES: &[Sge] = &[Sge { addr: 64, length: 8, lkey: 3 }];
        let i = self.sent.len();
        let count = if i + 1 < WORK && self.rng.one_in(3) { 2 } else { 1 };
        if i + count > WORK {
            return Ok(());
        }
        let mut out = Out::default();
        let posted = if count == 2 {
            let pair = Pair([self.next_wr(i, SGES), self.next_wr(i + 1, SGES)]);
            self.journal.post_sends(&pair, &mut out)
        } else {
            let wr = self.next_wr(i, SGES);
            self.journal.post_send(&wr, &mut out)
        };
        match posted {
            Ok(Posted::Give(wr_id)) if self.rng.one_in(20) => {
                let _ = wr_id;
                self.journal.refused_sends(count);
                self.sent.truncate(i);
            }
            Ok(Posted::Give(wr_id)) => {
                (0..count).for_each(|k| self.give_send(wr_id + k as u64, i + k))
            }
            Ok(Posted::Kept) => {}
            Err(PostError::QueueFull(_)) => self.sent.truncate(i),
            Err(e) => return Err(format!("post: {e}")),
        }
        self.deliver(out)
    }

    fn give_send(&mut self, wr_id: u64, sent: usize) {
        if self.provider.in_error {
            return self.provider.send_wc(wr_id, WcStatus::WrFlushErr);
        }
        let signaled = self.makes_wc(sent);
        self.provider.sends.push_back(InQueue { wr_id, signaled, sent, executed: false });
    }

    pub(super) fn post_recv(&mut self) -> Outcome {
        if self.posted_recvs == WORK as u64 {
            return Ok(());
        }
        let mut out = Out::default();
        let sges = [Sge { addr: self.posted_recvs, length: 4, lkey: 1 }];
        match self.journal.post_recv(&RecvWr { wr_id: self.posted_recvs, sges: &sges }, &mut out) {
            Ok(Posted::Give(_)) if self.rng.one_in(20) => self.journal.refused_recv(),
            Ok(posted) => {
                self.posted_recvs += 1;
                if let Posted::Give(wr_id) = posted {
                    self.give_recv(wr_id);
                }
            }
            Err(PostError::QueueFull(_)) => {}
            Err(e) => return Err(format!("post_recv: {e}")),
        }
        self.deliver(out)
    }

    pub(super) fn give_recv(&mut self, wr_id: u64) {
        match self.provider.in_error {
            true => self.provider.recv_wc(wr_id, WcStatus::WrFlushErr, 0),
            false => self.provider.recvs.push_back(wr_id),
        }
    }

    pub(super) fn deliver(&mut self, out: Out) -> Outcome {
        for (is_send, wc) in out.0 {
            ensure!(wc.qp_num == QPN, "a WC of QP {:#x}", wc.qp_num);
            match is_send {
                true => self.on_send_wc(&wc)?,
                false => self.on_recv_wc(&wc)?,
            }
        }
        Ok(())
    }

    fn on_send_wc(&mut self, wc: &Wc) -> Outcome {
        let i = wc.wr_id as usize;
        ensure!(i < self.sent.len(), "a WC for send {i}, which was not posted");
        ensure!(self.sent[i].status.replace(wc.status).is_none(), "a second WC for send {i}");
        let ok = wc.status == WcStatus::Success as u32;
        ensure!(
            ok || self.mistake_made,
            "send {i}: status {} in a program without mistakes",
            wc.status
        );
        for k in 0..i {
            ensure!(!self.makes_wc(k) || self.sent[k].status.is_some(), "send {i} before {k}");
            ensure!(
                !ok || self.sent[k].status.unwrap_or(0) == 0,
                "send {i} succeeds behind {k}, which failed"
            );
            ensure!(
                !ok || self.sent[k].executed > 0,
                "send {i} completes, but {k} was not executed"
            );
        }
        ensure!(!ok || self.makes_wc(i), "send {i} makes a WC that was not asked for");
        ensure!(!ok || self.sent[i].executed > 0, "send {i} completes and was not executed");
        Ok(())
    }

    fn on_recv_wc(&mut self, wc: &Wc) -> Outcome {
        ensure!(
            wc.wr_id == self.done_recvs,
            "receive {} completes, {} is next",
            wc.wr_id,
            self.done_recvs
        );
        self.done_recvs += 1;
        if wc.status != WcStatus::Success as u32 {
            ensure!(self.mistake_made, "a receive fails in a program without mistakes");
            return Ok(());
        }
        ensure!(
            wc.imm_data == self.wanted,
            "message {} comes, {} is next",
            wc.imm_data,
            self.wanted
        );
        self.wanted += 1;
        Ok(())
    }
}
