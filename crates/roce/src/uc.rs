//! A UC QP: messages to one peer, in order, without acknowledgement.
//!
//! A send is complete when its last packet has been handed to the sink. The receiver takes a message whole or not at all: a packet
//! that is not the expected one ends the message that it interrupts, and everything up to the beginning of the next is dropped
//! (of a WRITE, what came before the gap has been placed). The receive of an interrupted SEND waits for the next. What the peer may
//! not do (a bad key, a message too long for the receive, no receive) drops the message, too; nobody is told.
//!
//! A send whose memory cannot be read takes the QP to SQE, a receive whose memory cannot be written takes it to ERR.

use crate::attr::{ModifyError, RcModify};
use crate::io::{scatter, Completions, Memory, PacketSink, SharedReceives, SinkError};
use crate::link::{recv_wc, send_wc, Flags, Link};
use crate::requester::wc_opcode;
use crate::rq::RecvQueue;
use crate::segment::Segment;
use crate::sq::SendRing;
use crate::wr::{PostError, RecvWr, SendBatch, SendWr, MAX_MESSAGE_BYTES};
use std::sync::Arc;
use unbroken_types::{Access, Mtu, QpCaps, QpState, QpType, SendFlags, WcOpcode, WcStatus, PSN_MASK};
use unbroken_wire::{Op, Packet, Transport};

/// How a UC QP is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UcConfig {
    /// The QPN.
    pub qpn: u32,
    /// The QPN that WCs carry.
    pub wc_qpn: u32,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Protection domain.
    pub pd: u32,
    /// Every send makes a WC.
    pub sq_sig_all: bool,
}

/// The message that the next packet belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inbound {
    /// None, or one that is dropped: a new one must begin.
    None,
    /// A SEND of which `written` bytes lie in the oldest receive.
    Send { written: u32 },
    /// A WRITE of `total` bytes of which `left` are to come, for `va`.
    Write { va: u64, rkey: u32, left: u32, total: u32 },
}

/// Why a message ends before its last packet.
enum Broken {
    /// It is dropped.
    Dropped,
    /// The memory of the receive cannot be written.
    Local,
}

/// The transport of one UC QP.
pub struct UcQp {
    config: UcConfig,
    link: Link,
    attrs: RcModify,
    state: QpState,
    sends: SendRing,
    /// Packets of the oldest send that have been pushed.
    packet: u32,
    psn: u32,
    recvs: RecvQueue,
    inbound: Inbound,
    expected: u32,
    dropped: u64,
}

impl UcQp {
    /// Makes a QP in state RESET.
    pub fn new(config: UcConfig) -> UcQp {
        UcQp {
            config,
            link: Link {
                wc_qpn: config.wc_qpn,
                dest_qpn: 0,
                pd: config.pd,
                mtu: Mtu::B256.bytes() as u32,
                transport: Transport::Uc,
                access: Access::NONE,
                sq_sig_all: config.sq_sig_all,
                selective: false,
                may_start: false,
            },
            attrs: RcModify { state: Some(QpState::Reset), ..RcModify::default() },
            state: QpState::Reset,
            sends: SendRing::new(&config.caps),
            packet: 0,
            psn: 0,
            recvs: RecvQueue::new(&config.caps, config.pd),
            inbound: Inbound::None,
            expected: 0,
            dropped: 0,
        }
    }

    /// The same with an SRQ.
    pub fn with_srq(mut self, srq: Arc<dyn SharedReceives>) -> UcQp {
        self.recvs.share(srq);
        self
    }

    /// The present state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// All attributes that have been set.
    pub fn attrs(&self) -> RcModify {
        self.attrs
    }

    /// The peer's QPN.
    pub fn dest_qpn(&self) -> u32 {
        self.link.dest_qpn
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

    /// Whether the QP, which has an SRQ, has ended and will take no receive any more; said once. Not said where it was reset or quiesced.
    pub fn take_last_wqe(&mut self) -> bool {
        self.recvs.take_last_wqe()
    }

    /// Changes state and attributes, as `ibv_modify_qp` does. An error changes nothing.
    pub fn modify(&mut self, change: &RcModify, out: &mut (impl Completions + ?Sized)) -> Result<(), ModifyError> {
        let from = self.state;
        let to = change.validate(QpType::Uc, from)?;
        self.attrs.merge(change);
        self.attrs.state = Some(to);
        self.state = to;
        self.link.dest_qpn = self.attrs.dest_qpn.unwrap_or(0);
        self.link.mtu = self.attrs.mtu.unwrap_or(Mtu::B256).bytes() as u32;
        self.link.access = self.attrs.access.unwrap_or(Access::NONE);
        match (from, to) {
            (_, QpState::Reset) => {
                self.sends.clear();
                self.recvs.clear();
                (self.packet, self.inbound) = (0, Inbound::None);
            }
            (_, QpState::Err) => self.fail(out),
            (QpState::Init, QpState::Rtr) => self.expected = self.attrs.rq_psn.unwrap_or(0),
            (QpState::Rtr, QpState::Rts) => self.psn = self.attrs.sq_psn.unwrap_or(0),
            _ => {}
        }
        Ok(())
    }

    /// Posts a send. In states SQE and ERR it completes at once as flushed.
    pub fn post_send(&mut self, wr: &SendWr<'_>, out: &mut (impl Completions + ?Sized)) -> Result<(), PostError> {
        self.post_sends(wr, out)
    }

    /// Posts several sends: all or none.
    pub fn post_sends(
        &mut self,
        batch: &dyn SendBatch,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err) {
            return Err(PostError::WrongState(self.state));
        }
        self.sends.push_all(batch, |wr, _| match wr.opcode {
            op if op.awaits_data() || op.changes_keys() => Err(PostError::Unsupported(op)),
            _ => Ok(()),
        })?;
        if matches!(self.state, QpState::Sqe | QpState::Err) {
            self.flush_sends(WcStatus::WrFlushErr, out);
        }
        Ok(())
    }

    /// Posts a receive. In state ERR it completes at once as flushed.
    pub fn post_recv(&mut self, wr: &RecvWr<'_>, out: &mut (impl Completions + ?Sized)) -> Result<(), PostError> {
        if self.state == QpState::Reset {
            return Err(PostError::WrongState(self.state));
        }
        self.recvs.push(wr)?;
        if self.state == QpState::Err {
            self.flush_recvs(WcStatus::WrFlushErr, out);
        }
        Ok(())
    }

    // Receiving

    /// Whether a packet needs a receive, as far as it can be told without the packets before it.
    pub fn needs_receive(&self, packet: &Packet<'_>) -> bool {
        use Op::{SendFirst, SendOnly, SendOnlyImm, WriteLastImm, WriteOnlyImm};
        let op = packet.bth.opcode.op;
        self.listens() && matches!(op, SendFirst | SendOnly | SendOnlyImm | WriteLastImm | WriteOnlyImm)
    }

    /// Whether a receive is there.
    pub fn has_receive(&mut self) -> bool {
        self.recvs.front().is_some()
    }

    fn listens(&self) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Takes a packet that was sent to this QPN by the peer's address.
    pub fn handle_packet(
        &mut self,
        packet: &Packet<'_>,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) {
        use Op::{SendFirst, SendOnly, SendOnlyImm, WriteFirst, WriteOnly, WriteOnlyImm};
        if !self.listens() || packet.bth.opcode.transport != Transport::Uc {
            return;
        }
        let op = packet.bth.opcode.op;
        let first = matches!(op, SendFirst | SendOnly | SendOnlyImm | WriteFirst | WriteOnly | WriteOnlyImm);
        let gap = packet.bth.psn != self.expected;
        self.expected = (packet.bth.psn + 1) & PSN_MASK;
        if self.inbound != Inbound::None && (gap || first) {
            self.inbound = Inbound::None;
            self.dropped += 1;
        }
        match self.take(packet, first, mem, out) {
            Ok(()) => {}
            Err(Broken::Dropped) => {
                // Counted once: the rest of the message finds nothing that it belongs to.
                self.dropped += u64::from(first || self.inbound != Inbound::None);
                self.inbound = Inbound::None;
            }
            Err(Broken::Local) => {
                self.state = QpState::Err;
                self.attrs.state = Some(QpState::Err);
                self.flush_recvs(WcStatus::LocProtErr, out);
                self.flush_sends(WcStatus::WrFlushErr, out);
            }
        }
    }

    fn take(
        &mut self,
        packet: &Packet<'_>,
        first: bool,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), Broken> {
        use Op::{SendFirst, SendLast, SendLastImm, SendMiddle, SendOnly, SendOnlyImm, WriteFirst, WriteMiddle};
        let op = packet.bth.opcode.op;
        if let Some(reth) = packet.ext.reth() {
            let need = Access::REMOTE_WRITE;
            let allowed = self.link.access.contains(need) && u64::from(reth.len) <= MAX_MESSAGE_BYTES;
            let len = u64::from(reth.len);
            if !allowed || len > 0 && mem.check(self.link.pd, reth.rkey, reth.va, len, need).is_err() {
                return Err(Broken::Dropped);
            }
            self.inbound = Inbound::Write { va: reth.va, rkey: reth.rkey, left: reth.len, total: reth.len };
        } else if first {
            self.inbound = Inbound::Send { written: 0 };
        }
        let last = !matches!(op, SendFirst | SendMiddle | WriteFirst | WriteMiddle);
        let is_send = matches!(op, SendFirst | SendMiddle | SendLast | SendLastImm | SendOnly | SendOnlyImm);
        let len = packet.payload.len() as u32;
        if len > self.link.mtu || !last && len != self.link.mtu {
            return Err(Broken::Dropped);
        }
        match self.inbound {
            Inbound::Send { written } if is_send => self.send_on(packet, written, last, mem, out),
            Inbound::Write { va, rkey, left, total } if !is_send => {
                if len > left || last != (len == left) {
                    return Err(Broken::Dropped);
                }
                if len > 0 {
                    let written = mem.write(self.link.pd, rkey, va, packet.payload, Access::REMOTE_WRITE);
                    written.map_err(|_| Broken::Dropped)?;
                }
                self.inbound = Inbound::Write { va: va.wrapping_add(len.into()), rkey, left: left - len, total };
                match packet.ext.imm() {
                    _ if !last => return Ok(()),
                    None => {}
                    imm => {
                        let (rqe, _) = self.recvs.front().ok_or(Broken::Dropped)?;
                        self.recvs.pop();
                        self.deliver(packet, rqe.wr_id, WcOpcode::RecvRdmaWithImm, total, imm, out);
                    }
                }
                self.inbound = Inbound::None;
                Ok(())
            }
            _ => Err(Broken::Dropped),
        }
    }

    fn send_on(
        &mut self,
        packet: &Packet<'_>,
        written: u32,
        last: bool,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), Broken> {
        let len = packet.payload.len() as u32;
        let pd = self.recvs.pd;
        let (rqe, sges) = self.recvs.front().ok_or(Broken::Dropped)?;
        if u64::from(written) + u64::from(len) > u64::from(rqe.len) {
            return Err(Broken::Dropped);
        }
        scatter(mem, pd, sges, written.into(), packet.payload).map_err(|_| Broken::Local)?;
        if !last {
            self.inbound = Inbound::Send { written: written + len };
            return Ok(());
        }
        self.inbound = Inbound::None;
        self.recvs.pop();
        self.deliver(packet, rqe.wr_id, WcOpcode::Recv, written + len, packet.ext.imm(), out);
        Ok(())
    }

    fn deliver(
        &self,
        packet: &Packet<'_>,
        wr_id: u64,
        opcode: WcOpcode,
        len: u32,
        imm: Option<u32>,
        out: &mut (impl Completions + ?Sized),
    ) {
        out.recv(recv_wc(self.config.wc_qpn, wr_id, WcStatus::Success, opcode, len, imm), packet.bth.solicited);
    }

    // Sending

    /// Sends what is posted. True: the sink was full, there is more to send. A send is complete when its last packet is pushed, so
    /// the sink must not look at its memory later.
    pub fn poll_transmit(
        &mut self,
        sink: &mut (impl PacketSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        // In SQD, a message that has begun is finished.
        while self.sends.len() > 0 && (self.state == QpState::Rts || self.state == QpState::Sqd && self.packet > 0) {
            let index = self.sends.head;
            let wqe = self.sends.get_mut(index);
            wqe.packets = wqe.len.div_ceil(self.link.mtu).max(1);
            let wqe = *wqe;
            let s = Segment::of(&wqe, self.packet, self.link.mtu);
            let flags = Flags { solicited: s.last && wqe.flags.contains(SendFlags::SOLICITED), ack_req: false };
            let header = self.link.header(s.op, self.psn, &s.ext, s.len, flags);
            match sink.push(header.as_slice(), s.payload(&self.sends, index)) {
                Ok(()) => {}
                Err(SinkError::Full) => return true,
                Err(SinkError::Memory(_)) => {
                    self.state = QpState::Sqe;
                    self.attrs.state = Some(QpState::Sqe);
                    self.flush_sends(WcStatus::LocProtErr, out);
                    return false;
                }
            }
            self.psn = (self.psn + 1) & PSN_MASK;
            self.packet += 1;
            if s.last {
                self.packet = 0;
                self.sends.head += 1;
                if self.config.sq_sig_all || wqe.flags.contains(SendFlags::SIGNALED) {
                    let opcode = wc_opcode(wqe.opcode);
                    out.send(send_wc(self.config.wc_qpn, wqe.wr_id, WcStatus::Success, opcode, wqe.len));
                }
            }
        }
        false
    }

    // Ending

    /// Goes to ERR and flushes everything.
    pub fn fail(&mut self, out: &mut (impl Completions + ?Sized)) {
        self.state = QpState::Err;
        self.attrs.state = Some(QpState::Err);
        self.flush_sends(WcStatus::WrFlushErr, out);
        self.flush_recvs(WcStatus::WrFlushErr, out);
    }

    /// The QP is about to be destroyed: a receive of an SRQ goes back there.
    pub fn release(&mut self) {
        self.recvs.give_back();
    }

    fn flush_sends(&mut self, first: WcStatus, out: &mut (impl Completions + ?Sized)) {
        let mut status = first;
        while self.sends.len() > 0 {
            let wqe = *self.sends.get(self.sends.head);
            self.sends.head += 1;
            out.send(send_wc(self.config.wc_qpn, wqe.wr_id, status, wc_opcode(wqe.opcode), 0));
            status = WcStatus::WrFlushErr;
        }
        self.packet = 0;
    }

    fn flush_recvs(&mut self, first: WcStatus, out: &mut (impl Completions + ?Sized)) {
        let mut status = first;
        self.inbound = Inbound::None;
        while let Some(rqe) = self.recvs.pop() {
            out.recv(recv_wc(self.config.wc_qpn, rqe.wr_id, status, WcOpcode::Recv, 0, None), true);
            status = WcStatus::WrFlushErr;
        }
        self.recvs.end();
    }
}
