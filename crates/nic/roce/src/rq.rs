//! The receive queue of a QP: a ring ([`RecvRing`]), or a slot for what is taken from a shared
//! receive queue.
//!
//! A QP with an SRQ takes a receive when a message needs one, and holds it until the message is
//! complete. If it ends before that, the receive fails with the QP, as one of its own would; if it
//! is stopped without failing (quiesced, reset, destroyed), the receive goes back to the front of
//! the SRQ.

use crate::connection::recv_wc;
use crate::inbound::Refusal;
use crate::io::{scatter, Memory};
use std::sync::Arc;
use unbroken_types::{
    Completions, PdHandle, PostError, QpCaps, QpState, QueuedRecv, RecvEntry, RecvRing, RecvWr,
    Sge, SharedReceives, Wc, WcOpcode, WcStatus,
};

/// Where a QP's receives come from.
#[derive(Clone)]
pub(crate) struct RecvQueue {
    ring: RecvRing,
    shared: Option<Arc<dyn SharedReceives>>,
    /// It takes nothing from the SRQ any more.
    ended: bool,
    /// ... which is still to be told.
    last_wqe: bool,
    /// The protection domain that the receives' keys are of.
    pd: PdHandle,
    /// The QPN that WCs carry.
    wc_qpn: u32,
}

impl RecvQueue {
    /// The QP's own queue.
    pub(crate) fn new(caps: &QpCaps, pd: PdHandle, wc_qpn: u32) -> RecvQueue {
        RecvQueue {
            ring: RecvRing::new(caps.max_recv_wr, caps.max_recv_sge),
            shared: None,
            ended: false,
            last_wqe: false,
            pd,
            wc_qpn,
        }
    }

    /// Takes from an SRQ from now on. The queue is empty.
    pub(crate) fn share(&mut self, shared: Arc<dyn SharedReceives>) {
        self.ring = RecvRing::new(1, shared.max_sge());
        self.pd = shared.pd();
        self.shared = Some(shared);
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.ring.heap_bytes()
    }

    /// Outstanding receives of the QP itself: with an SRQ, the one that it has taken.
    pub(crate) fn len(&self) -> u32 {
        self.ring.len()
    }

    /// Forgets all; what was taken from an SRQ goes back.
    pub(crate) fn clear(&mut self) {
        self.give_back();
        self.ring.clear();
        (self.ended, self.last_wqe) = (false, false);
    }

    /// The QP is in the error state: the oldest receive fails with `first`, the others are flushed.
    pub(crate) fn flush(&mut self, first: WcStatus, out: &mut (impl Completions + ?Sized)) {
        let mut status = first;
        while let Some((rqe, _)) = self.ring.front() {
            self.ring.remove_oldest();
            out.recv(recv_wc(self.wc_qpn, rqe.wr_id, status, WcOpcode::Recv, 0, None), true);
            status = WcStatus::WrFlushErr;
        }
        self.last_wqe |= self.shared.is_some() && !self.ended;
        self.ended = true;
    }

    /// Whether a QP with an SRQ has ended and will take no receive any more; said once.
    pub(crate) fn take_last_wqe(&mut self) -> bool {
        std::mem::take(&mut self.last_wqe)
    }

    /// Gives back what was taken from an SRQ.
    pub(crate) fn give_back(&mut self) {
        if let (Some(shared), Some(wr)) = (&self.shared, self.ring.oldest()) {
            shared.give_back(&wr);
            self.ring.clear();
        }
    }

    /// Posts to a QP in `state`. In state ERR it completes at once as flushed.
    pub(crate) fn post(
        &mut self,
        state: QpState,
        wr: &RecvWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        if state == QpState::Reset {
            return Err(PostError::WrongState(state));
        }
        self.push(wr)?;
        if state == QpState::Err {
            self.flush(WcStatus::WrFlushErr, out);
        }
        Ok(())
    }

    /// Puts a receive at the end.
    pub(crate) fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if self.shared.is_some() {
            return Err(PostError::HasSrq);
        }
        self.ring.push(wr)
    }

    /// Whether there is a receive for the next message.
    #[inline]
    pub(crate) fn has_receive(&mut self) -> bool {
        self.front().is_some()
    }

    /// Puts `data` at `offset` of the receive that the next message fills.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        mem: &(impl Memory + ?Sized),
        offset: u32,
        data: &[u8],
    ) -> Result<(), Refusal> {
        let pd = self.pd;
        let (rqe, sges) = self.front().ok_or(Refusal::NotReady)?;
        if u64::from(offset) + data.len() as u64 > u64::from(rqe.len) {
            return Err(Refusal::TooLong);
        }
        scatter(mem, pd, sges, offset.into(), data).map_err(|_| Refusal::Local)
    }

    /// The message that fills the oldest receive is complete: takes the receive out and gives its
    /// WC.
    #[inline]
    pub(crate) fn complete(&mut self, opcode: WcOpcode, len: u32, imm: Option<u32>) -> Option<Wc> {
        let (rqe, _) = self.ring.front()?;
        self.ring.remove_oldest();
        Some(recv_wc(self.wc_qpn, rqe.wr_id, WcStatus::Success, opcode, len, imm))
    }

    /// The receive that the next message fills.
    #[inline]
    fn front(&mut self) -> Option<(QueuedRecv, &[Sge])> {
        if let (Some(shared), true) = (&self.shared, self.ring.is_empty()) {
            let ring = &mut self.ring;
            shared.take(&mut |wr| ring.push(wr).expect("one receive fits"));
        }
        self.ring.front()
    }

    /// All that are outstanding, oldest first; none where they go back to an SRQ.
    pub(crate) fn entries(&self) -> Vec<RecvEntry> {
        if self.shared.is_some() {
            return Vec::new();
        }
        self.ring.entries()
    }
}
