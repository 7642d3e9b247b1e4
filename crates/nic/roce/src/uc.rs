//! A UC QP: messages to one peer, in order, without acknowledgement.
//!
//! A send is complete when its last packet has been handed to the sink. The receiver takes a
//! message whole or not at all: a packet that is not the expected one ends the message that it
//! interrupts, and everything up to the beginning of the next is dropped (of a WRITE, what came
//! before the gap has been placed). The receive of an interrupted SEND waits for the next. What the
//! peer may not do (a bad key, a message too long for the receive, no receive) drops the message,
//! too; nobody is told.
//!
//! A WR that binds a memory window or invalidates a key is done when its turn comes, and nothing of
//! it goes on the wire. One that cannot be done takes the QP to SQE, as a send does whose memory
//! cannot be read.
//!
//! A send whose memory cannot be read takes the QP to SQE, a receive whose memory cannot be written
//! takes it to ERR.

use crate::connection::{Connection, Flags};
use crate::inbound::{Receiver, Refusal};
use crate::io::{Memory, PacketSink, SinkError};
use crate::rq::RecvQueue;
use crate::segment::Segment;
use crate::sq::SendRing;
use std::sync::Arc;
use unbroken_types::{
    Completions, ModifyError, PdHandle, PostError, QpCaps, QpState, QpType, RcModify, RecvWr,
    SendBatch, SendFlags, SendWr, SharedReceives, WcStatus, PSN_MASK,
};
use unbroken_wire::{Op, Packet, Transport};

/// How a UC QP is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UcConfig {
    /// The QPN that WCs carry.
    pub wc_qpn: u32,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Protection domain.
    pub pd: PdHandle,
    /// Every send makes a WC.
    pub sq_sig_all: bool,
}

/// The transport of one UC QP.
pub struct UcQp {
    connection: Connection,
    attrs: RcModify,
    state: QpState,
    sends: SendRing,
    /// Packets of the oldest send that have been pushed.
    packet: u32,
    psn: u32,
    receiver: Receiver,
    expected: u32,
    dropped: u64,
}

impl UcQp {
    /// Makes a QP in state RESET.
    pub fn new(config: UcConfig) -> UcQp {
        let UcConfig { wc_qpn, caps, pd, sq_sig_all } = config;
        UcQp {
            connection: Connection::new(Transport::Uc, pd),
            attrs: RcModify::default(),
            state: QpState::Reset,
            sends: SendRing::new(&caps, wc_qpn, sq_sig_all),
            packet: 0,
            psn: 0,
            receiver: Receiver::new(RecvQueue::new(&caps, pd, wc_qpn)),
            expected: 0,
            dropped: 0,
        }
    }

    /// This QP with an SRQ: its receives come from there.
    pub fn with_srq(mut self, srq: Arc<dyn SharedReceives>) -> UcQp {
        self.receiver.queue.share(srq);
        self
    }

    /// The present state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// All attributes that have been set.
    pub fn attrs(&self) -> RcModify {
        RcModify { state: Some(self.state), ..self.attrs }
    }

    /// The peer's QPN.
    pub fn dest_qpn(&self) -> u32 {
        self.connection.dest_qpn
    }

    /// Messages that came and were dropped, or missed some packet.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Sends posted and not complete.
    pub fn outstanding_sends(&self) -> u32 {
        self.sends.len()
    }

    /// Whether the send queue has not come to its rest yet, in state SQD: a message has begun.
    pub fn draining(&self) -> bool {
        self.state == QpState::Sqd && self.packet > 0
    }

    /// Whether the QP, which has an SRQ, has ended and will take no receive any more; said once.
    /// Not said where it was reset or quiesced.
    pub fn take_last_wqe(&mut self) -> bool {
        self.receiver.queue.take_last_wqe()
    }

    /// Changes state and attributes, as `ibv_modify_qp` does. An error changes nothing.
    pub fn modify(
        &mut self,
        change: &RcModify,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), ModifyError> {
        let from = self.state;
        let to = change.validate(QpType::Uc, from)?;
        self.attrs.merge(change);
        self.state = to;
        self.connection.set(&self.attrs);
        match (from, to) {
            (_, QpState::Reset) => {
                self.sends.clear();
                self.receiver.reset();
                self.packet = 0;
            }
            (_, QpState::Err) => self.fail(out),
            (QpState::Init, QpState::Rtr) => self.expected = self.attrs.rq_psn.unwrap_or(0),
            (QpState::Rtr, QpState::Rts) => self.psn = self.attrs.sq_psn.unwrap_or(0),
            _ => {}
        }
        Ok(())
    }

    /// Posts a send. In states SQE and ERR it completes at once as flushed.
    pub fn post_send(
        &mut self,
        wr: &SendWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        self.post_sends(wr, out)
    }

    /// Posts several sends: all or none.
    pub fn post_sends(
        &mut self,
        batch: &dyn SendBatch,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        self.sends.post(self.state, batch, out, |wr, _| match wr.opcode {
            op if op.is_local() => Ok(()),
            op if op.awaits_data() || op.changes_keys() => Err(PostError::Unsupported(op)),
            _ => Ok(()),
        })
    }

    /// Posts a receive. In state ERR it completes at once as flushed.
    pub fn post_recv(
        &mut self,
        wr: &RecvWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        self.receiver.queue.post(self.state, wr, out)
    }

    // Receiving

    /// Whether a packet needs a receive, as far as it can be told without the packets before it.
    pub fn needs_receive(&self, packet: &Packet<'_>) -> bool {
        use Op::{SendFirst, SendOnly, SendOnlyImm, WriteLastImm, WriteOnlyImm};
        let op = packet.bth.opcode.op;
        self.listens()
            && matches!(op, SendFirst | SendOnly | SendOnlyImm | WriteLastImm | WriteOnlyImm)
    }

    /// Whether a receive is there.
    pub fn has_receive(&mut self) -> bool {
        self.receiver.queue.has_receive()
    }

    fn listens(&self) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Takes a packet that was sent to this QPN by the peer's address. False: it was dropped.
    pub fn handle_packet(
        &mut self,
        packet: &Packet<'_>,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        use Op::{SendFirst, SendOnly, SendOnlyImm, WriteFirst, WriteOnly, WriteOnlyImm};
        if !self.listens() || packet.bth.opcode.transport != Transport::Uc {
            return false;
        }
        let op = packet.bth.opcode.op;
        let first = matches!(
            op,
            SendFirst | SendOnly | SendOnlyImm | WriteFirst | WriteOnly | WriteOnlyImm
        );
        let gap = packet.bth.psn != self.expected;
        self.expected = (packet.bth.psn + 1) & PSN_MASK;
        if self.receiver.in_message() && (gap || first) {
            self.receiver.interrupt();
            self.dropped += 1;
        }
        let belongs = first || self.receiver.in_message();
        match self.receiver.execute(packet, &self.connection, mem, out) {
            Ok(_) => return true,
            Err(Refusal::Local) => {
                self.state = QpState::Err;
                self.receiver.queue.flush(WcStatus::LocProtErr, out);
                self.flush_sends(WcStatus::WrFlushErr, out);
            }
            Err(_) => {
                // Counted once: the rest of the message finds nothing that it belongs to.
                self.dropped += u64::from(belongs);
                self.receiver.interrupt();
            }
        }
        false
    }

    // Sending

    /// Sends what is posted. True: the sink was full, there is more to send. A send is complete
    /// when its last packet is pushed, so the sink must not look at its memory later.
    pub fn poll_transmit(
        &mut self,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        // In SQD, a message that has begun is finished.
        while !self.sends.is_empty()
            && (self.state == QpState::Rts || self.state == QpState::Sqd && self.packet > 0)
        {
            let index = self.sends.head;
            let wqe = self.sends.get_mut(index);
            if wqe.opcode.is_local() {
                let wqe = *wqe;
                if sink.change_key(&self.sends.key_change(&wqe)).is_err() {
                    self.state = QpState::Sqe;
                    self.flush_sends(WcStatus::MwBindErr, out);
                    return false;
                }
                self.sends.complete(out);
                continue;
            }
            wqe.packets = wqe.len.div_ceil(self.connection.mtu).max(1);
            let wqe = *wqe;
            let s = Segment::of(&wqe, self.packet, self.connection.mtu);
            let flags = Flags {
                solicited: s.last && wqe.flags.contains(SendFlags::SOLICITED),
                ack_req: false,
            };
            let header = self.connection.header(s.op, self.psn, &s.ext, s.len, flags);
            match sink.push(header.as_slice(), s.payload(&self.sends, index)) {
                Ok(()) => {}
                Err(SinkError::Full) => return true,
                Err(SinkError::Memory(_)) => {
                    self.state = QpState::Sqe;
                    self.flush_sends(WcStatus::LocProtErr, out);
                    return false;
                }
            }
            self.psn = (self.psn + 1) & PSN_MASK;
            self.packet += 1;
            if s.last {
                self.packet = 0;
                self.sends.complete(out);
            }
        }
        false
    }

    // Ending

    /// Goes to ERR and flushes everything.
    pub fn fail(&mut self, out: &mut (impl Completions + ?Sized)) {
        self.state = QpState::Err;
        self.flush_sends(WcStatus::WrFlushErr, out);
        self.receiver.queue.flush(WcStatus::WrFlushErr, out);
    }

    /// The QP is about to be destroyed: a receive of an SRQ goes back there.
    pub fn release(&mut self) {
        self.receiver.queue.give_back();
    }

    fn flush_sends(&mut self, first: WcStatus, out: &mut (impl Completions + ?Sized)) {
        self.sends.flush(first, out);
        self.packet = 0;
    }
}
