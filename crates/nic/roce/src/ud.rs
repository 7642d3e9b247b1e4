//! A UD QP: single packets to anyone, without acknowledgement.
//!
//! A send is complete when its packet has been handed to the sink. A datagram is dropped when its
//! Q_Key is not the QP's, when no receive is posted, or when the receive is too short for it and
//! the 40 bytes of GRH in front. With link layer InfiniBand those are written only if the sender's
//! address handle has a GRH; the completion says so, and has the sender's LID. A send whose memory
//! cannot be read takes the QP to SQE, a receive whose memory cannot be written takes it to ERR;
//! what is outstanding there is flushed.
//!
//! A QP that was made so ([`UdConfig::suspend_on_error`]) stops and keeps its WRs when the NIC
//! fails it; another takes them over ([`UdQp::quiesce`], [`UdQp::adopt`]). What has been handed to
//! the sink is gone, as ever.

use crate::inbound::Refusal;
use crate::io::{Memory, Payload, SinkError, UdSink};
use crate::rq::RecvQueue;
use crate::sq::{Data, SendRing};
use std::sync::Arc;
use unbroken_types::{
    check_datagram, Backlog, Completions, Gid, ModifyError, Mtu, PdHandle, PostError, QpCaps,
    QpState, RecvWr, SendBatch, SendFlags, SendOpcode, SendWr, SharedReceives, UdDest, UdModify,
    WcFlags, WcOpcode, WcStatus, GRH_BYTES, PSN_MASK,
};
use unbroken_wire::{
    pad_of, Bth, Deth, Ext, HeaderBuf, Op, Opcode, Packet, Transport, DEFAULT_PKEY,
};

/// The service level of a received IPv4 datagram. RoCEv2 has no SL, and mlx5 tells the kind of
/// packet there: UCX relies on it to know where in the GRH the addresses are, and drops what does
/// not say so.
const SL_IPV4: u8 = 2;

/// A Q_Key with this bit means the QP's own, when a WR names it.
const OWN_QKEY: u32 = 1 << 31;

/// How a UD QP is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UdConfig {
    /// The QPN.
    pub qpn: u32,
    /// The QPN that WCs carry.
    pub wc_qpn: u32,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Protection domain.
    pub pd: PdHandle,
    /// Every send makes a WC.
    pub sq_sig_all: bool,
    /// The MTU of the port: the largest message.
    pub mtu: Mtu,
    /// Stop and keep the WRs on a failure of the NIC.
    pub suspend_on_error: bool,
    /// Peers know the QP by another address than this one; its packets say so.
    pub moved: bool,
}

/// Where a datagram comes from and went to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UdRoute {
    /// The sender's GID.
    pub src: Gid,
    /// The sender's QPN, where it is another than the packet has: the sender has moved.
    pub src_qpn: Option<u32>,
    /// Our GID.
    pub dst: Gid,
    /// The sender's LID with link layer InfiniBand, else 0.
    pub slid: u16,
    /// The class of service that it came with.
    pub traffic_class: u8,
    /// How many more routers it might have passed.
    pub hop_limit: u8,
}

impl Default for UdRoute {
    /// From nobody to nobody, over no router.
    fn default() -> UdRoute {
        UdRoute {
            src: Gid::default(),
            src_qpn: None,
            dst: Gid::default(),
            slid: 0,
            traffic_class: 0,
            hop_limit: 64,
        }
    }
}

/// The transport of one UD QP.
pub struct UdQp {
    config: UdConfig,
    state: QpState,
    qkey: u32,
    psn: u32,
    sends: SendRing,
    /// The destination of each slot of `sends`.
    dests: Box<[UdDest]>,
    recvs: RecvQueue,
    dropped: u64,
    /// Why it has stopped, while it is held.
    failure: Option<WcStatus>,
    /// What it had was taken out; only a reset changes that.
    quiesced: bool,
}

impl UdQp {
    /// Makes a QP in state RESET.
    pub fn new(config: UdConfig) -> UdQp {
        let slots = config.caps.max_send_wr.max(1).next_power_of_two() as usize;
        UdQp {
            config,
            state: QpState::Reset,
            qkey: 0,
            psn: 0,
            sends: SendRing::new(&config.caps, config.wc_qpn, config.sq_sig_all),
            dests: vec![UdDest::default(); slots].into(),
            recvs: RecvQueue::new(&config.caps, config.pd, config.wc_qpn),
            dropped: 0,
            failure: None,
            quiesced: false,
        }
    }

    /// This QP with an SRQ: its receives come from there. It holds none of them: a message is one
    /// packet.
    pub fn with_srq(mut self, srq: Arc<dyn SharedReceives>) -> UdQp {
        self.recvs.share(srq);
        self
    }

    /// How it was made.
    pub fn config(&self) -> &UdConfig {
        &self.config
    }

    /// The present state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Present attributes.
    pub fn attrs(&self) -> UdModify {
        UdModify { state: Some(self.state), qkey: Some(self.qkey), sq_psn: Some(self.psn) }
    }

    /// Datagrams that came and could not be delivered.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Sends posted and not complete.
    pub fn outstanding_sends(&self) -> u32 {
        self.sends.len()
    }

    /// Receives posted and not complete.
    pub fn outstanding_recvs(&self) -> u32 {
        self.recvs.len()
    }

    /// Whether the QP, which has an SRQ, has ended and will take no receive any more; said once.
    /// Not said where it was reset or quiesced.
    pub fn take_last_wqe(&mut self) -> bool {
        self.recvs.take_last_wqe()
    }

    /// Changes state and attributes, as `ibv_modify_qp` does. An error changes nothing.
    pub fn modify(
        &mut self,
        change: &UdModify,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), ModifyError> {
        let from = self.state;
        let to = change.validate(from)?;
        if self.quiesced && to != QpState::Reset {
            return Err(ModifyError::Transition { from, to });
        }
        self.qkey = change.qkey.unwrap_or(self.qkey);
        self.psn = change.sq_psn.unwrap_or(self.psn) & PSN_MASK;
        self.state = to;
        match to {
            QpState::Reset => {
                self.sends.clear();
                self.recvs.clear();
                (self.failure, self.quiesced) = (None, false);
            }
            QpState::Err => self.fail(out),
            _ => {}
        }
        Ok(())
    }

    /// Posts a send. In states SQE and ERR it completes at once as flushed; in SQD it waits.
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
        if self.quiesced {
            return Err(PostError::WrongState(self.state));
        }
        let UdQp { sends, dests, config, .. } = self;
        sends.post(self.state, batch, out, |wr, slot| {
            dests[slot] = check_datagram(config.mtu, wr)?;
            Ok(())
        })
    }

    /// Posts a receive. In state ERR it completes at once as flushed.
    pub fn post_recv(
        &mut self,
        wr: &RecvWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        if self.quiesced {
            return Err(PostError::WrongState(self.state));
        }
        self.recvs.post(self.state, wr, out)
    }

    /// Whether a packet needs a receive: all do that are for this QP.
    pub fn needs_receive(&self, packet: &Packet<'_>) -> bool {
        self.listens() && packet.ext.deth().is_some_and(|d| d.qkey == self.qkey)
    }

    /// Whether a receive is there.
    pub fn has_receive(&mut self) -> bool {
        self.recvs.has_receive()
    }

    fn listens(&self) -> bool {
        self.failure.is_none()
            && matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Takes a packet that was sent to this QPN. False: it was dropped.
    pub fn handle_packet(
        &mut self,
        packet: &Packet<'_>,
        route: &UdRoute,
        mem: &(impl Memory + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        let deth = packet.ext.deth().filter(|d| self.listens() && d.qkey == self.qkey);
        let (Some(deth), Transport::Ud) = (deth, packet.bth.opcode.transport) else {
            self.dropped += 1;
            return false;
        };
        let with_grh = route.slid == 0 || deth.grh;
        // The immediate lies between the DETH and the payload.
        let imm_len = if packet.ext.imm().is_some() { 4 } else { 0 };
        let header = grh(route, imm_len, packet.payload.len());
        let header: &[u8] = if with_grh { &header } else { &[] };
        // The payload first: so a receive that is too short for both is not touched.
        let filled = self
            .recvs
            .fill(mem, GRH_BYTES as u32, packet.payload)
            .and_then(|()| self.recvs.fill(mem, 0, header));
        match filled {
            Ok(()) => {}
            Err(Refusal::Local) => {
                self.state = QpState::Err;
                self.recvs.flush(WcStatus::LocProtErr, out);
                self.sends.flush(WcStatus::WrFlushErr, out);
                return false;
            }
            Err(_) => {
                self.recvs.give_back();
                self.dropped += 1;
                return false;
            }
        }
        let len = (GRH_BYTES + packet.payload.len()) as u32;
        let Some(mut wc) = self.recvs.complete(WcOpcode::Recv, len, packet.ext.imm()) else {
            return false;
        };
        wc.src_qp = route.src_qpn.unwrap_or(deth.src_qpn);
        wc.slid = route.slid;
        if with_grh {
            wc.wc_flags |= WcFlags::GRH;
        }
        if route.dst.to_ipv4().is_some() {
            wc.sl = SL_IPV4;
        }
        out.recv(wc, packet.bth.solicited);
        true
    }

    /// Sends what is posted. True: the sink was full, there is more to send.
    pub fn poll_transmit(
        &mut self,
        sink: &mut (impl UdSink + ?Sized),
        out: &mut (impl Completions + ?Sized),
    ) -> bool {
        if self.state != QpState::Rts || self.failure.is_some() {
            return false;
        }
        while !self.sends.is_empty() {
            let index = self.sends.head;
            let wqe = *self.sends.get(index);
            let dest = sink.resolve(&self.dests[self.sends.slot(index)]);
            let with_imm = wqe.opcode == SendOpcode::SendImm;
            let bth = Bth {
                opcode: Opcode {
                    transport: Transport::Ud,
                    op: if with_imm { Op::SendOnlyImm } else { Op::SendOnly },
                },
                solicited: wqe.flags.contains(SendFlags::SOLICITED),
                mig_req: false,
                pad: pad_of(wqe.len as usize),
                pkey: DEFAULT_PKEY,
                dest_qpn: dest.qpn,
                ack_req: false,
                psn: self.psn,
            };
            let qkey = if dest.qkey & OWN_QKEY != 0 { self.qkey } else { dest.qkey };
            let deth =
                Deth { qkey, src_qpn: self.config.qpn, grh: dest.grh, moved: self.config.moved };
            let ext = if with_imm { Ext::DethImm(deth, wqe.imm_data) } else { Ext::Deth(deth) };
            let payload = match self.sends.data(index) {
                Data::Inline(bytes) => Payload::Bytes(bytes),
                Data::Sges(_) if wqe.len == 0 => Payload::None,
                Data::Sges(sges) => Payload::Sges { sges, offset: 0, len: wqe.len },
            };
            match sink.push_to(&dest, HeaderBuf::new(&bth, &ext).as_slice(), payload) {
                Ok(()) => {}
                Err(SinkError::Full) => return true,
                Err(SinkError::Memory(_)) => {
                    self.state = QpState::Sqe;
                    self.sends.flush(WcStatus::LocProtErr, out);
                    return false;
                }
            }
            self.psn = (self.psn + 1) & PSN_MASK;
            self.sends.complete(out);
        }
        false
    }

    /// The NIC has failed the QP: holds it if it was made so, else fails it.
    pub fn network_failure(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        if self.config.suspend_on_error && self.state != QpState::Err {
            self.failure.get_or_insert(status);
        } else {
            self.fail(out);
        }
    }

    /// Why it is held, if it is.
    pub fn failure(&self) -> Option<WcStatus> {
        self.failure
    }

    /// Stops the QP until it is reset, and takes out what is outstanding. No later packet changes
    /// memory or completes a WR.
    pub fn quiesce(&mut self) -> Backlog {
        let mut backlog = Backlog {
            sends: self.sends.entries(),
            recvs: self.recvs.entries(),
            ..Backlog::default()
        };
        for (entry, index) in backlog.sends.iter_mut().zip(self.sends.head..) {
            entry.ud = Some(self.dests[self.sends.slot(index)]);
        }
        self.sends.clear();
        self.recvs.clear();
        (self.state, self.failure, self.quiesced) = (QpState::Err, None, true);
        backlog
    }

    /// Puts the WRs of another QP into this fresh one, in front of everything posted later. The
    /// state must be RESET, INIT or RTR and both queues empty. On an error nothing is taken.
    pub fn adopt(&mut self, backlog: &Backlog) -> Result<(), PostError> {
        let fresh =
            matches!(self.state, QpState::Reset | QpState::Init | QpState::Rtr) && !self.quiesced;
        if !fresh || self.sends.len() + self.recvs.len() > 0 {
            return Err(PostError::WrongState(self.state));
        }
        let UdQp { sends, dests, recvs, .. } = self;
        let all = backlog.sends.iter().try_for_each(|e| {
            dests[sends.slot(sends.tail)] = e.ud.ok_or(PostError::NoDestination)?;
            sends.adopt(e)
        });
        let all = all.and_then(|()| {
            backlog
                .recvs
                .iter()
                .try_for_each(|e| recvs.push(&RecvWr { wr_id: e.wr_id, sges: &e.sges }))
        });
        if all.is_err() {
            sends.clear();
            recvs.clear();
        }
        all
    }

    /// Goes to ERR and flushes everything.
    pub fn fail(&mut self, out: &mut (impl Completions + ?Sized)) {
        if self.quiesced {
            return;
        }
        (self.state, self.failure) = (QpState::Err, None);
        self.sends.flush(WcStatus::WrFlushErr, out);
        self.recvs.flush(WcStatus::WrFlushErr, out);
    }
}

/// What stands before a datagram in the receive buffer: a GRH, an IPv6 header, or 20 bytes of
/// nothing and an IPv4 header.
fn grh(route: &UdRoute, imm_len: usize, payload_len: usize) -> [u8; GRH_BYTES] {
    let UdRoute { src, dst, slid, traffic_class, hop_limit, .. } = *route;
    // UDP header, BTH, DETH, immediate, ICRC; what softnic does not see of the packet (the header's
    // checksum) is zero.
    let udp_len = (8 + 12 + 8 + imm_len + payload_len + pad_of(payload_len) as usize + 4) as u16;
    let mut g = [0u8; GRH_BYTES];
    match (src.to_ipv4(), dst.to_ipv4()) {
        (Some(src), Some(dst)) => {
            (g[20], g[21]) = (0x45, traffic_class);
            g[22..24].copy_from_slice(&(udp_len + 20).to_be_bytes());
            g[26] = 0x40;
            g[28] = hop_limit;
            g[29] = 17;
            g[32..36].copy_from_slice(&src.octets());
            g[36..40].copy_from_slice(&dst.octets());
        }
        _ => {
            (g[0], g[1]) = (0x60 | traffic_class >> 4, traffic_class << 4);
            // A GRH is followed by the BTH (next header 0x1b), an IPv6 header by UDP.
            let (len, next) = if slid == 0 { (udp_len, 17) } else { (udp_len - 8, 0x1b) };
            g[4..6].copy_from_slice(&len.to_be_bytes());
            g[6] = next;
            g[7] = hop_limit;
            g[8..24].copy_from_slice(&src.0);
            g[24..40].copy_from_slice(&dst.0);
        }
    }
    g
}
