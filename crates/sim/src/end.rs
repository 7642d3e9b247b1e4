//! One end of a logical QP in the simulator: what `shift` is in the product. It carries out what `path` decides, on real `roce` QPs.

use crate::memory::{HostMemory, PD};
use crate::srq::SharedQueue;
use std::sync::Arc;
use unbroken_path::silence::Silence;
use unbroken_path::{LogicalQp, Quiesced};
use unbroken_roce::{Backlog, Completions, PacketSink, Payload, RcConfig, RcModify, RcQp, SinkError};
use unbroken_types::{Access, Mtu, QpCaps, QpState, Wc};

/// Entries of a send queue.
pub const SQ_DEPTH: usize = 12;
/// Packets that leave at once; the rest waits for the next turn.
const SINK_PACKETS: usize = 48;

/// One life of a physical QP.
pub struct Life {
    /// Its QPN.
    pub qpn: u32,
    /// Its epoch.
    pub epoch: u64,
    /// Our NIC.
    pub nic: usize,
    /// The peer's NIC.
    pub remote: usize,
    /// First PSN that we send, until the QP is started.
    pub sq_psn: u32,
    /// The transport.
    pub qp: RcQp,
    /// When its timer is set to.
    pub armed_us: u64,
    /// It was stopped.
    pub over: bool,
    /// The PSNs that it sends have wrapped around, and the peer has said so.
    pub wrapped: bool,
    /// Progress that was last told to `path`.
    pub told: (u64, u64),
}

/// One end.
pub struct End {
    /// The logic under test.
    pub path: LogicalQp,
    /// All lives; the last is the present one, unless `backlog` is there.
    pub lives: Vec<Life>,
    /// What is outstanding while there is no physical QP.
    pub backlog: Option<Backlog>,
    /// Where receives come from, if not from the QP.
    pub srq: Option<Arc<SharedQueue>>,
    /// Watches the present life.
    pub silence: Silence,
    /// The transport of the present life has given up, and the path has been asked whether it lives.
    pub gave_up: Option<unbroken_types::WcStatus>,
    /// The epoch that this end suspected last by itself.
    pub suspected: Option<u64>,
    /// The application has got its error.
    pub failed: bool,
    /// The application waits for a WC before it posts more.
    pub app_sleeps: bool,
    /// Timer of `path`.
    pub path_at_us: u64,
    /// Timer of `silence`.
    pub look_at_us: u64,
    /// In which epoch each message left that must not be replayed.
    pub left_in: Vec<Option<u64>>,
}

impl End {
    /// The present physical QP.
    pub fn live(&mut self) -> Option<&mut Life> {
        self.lives.last_mut().filter(|l| !l.over)
    }

    /// Receives that no message has used: of a shared queue, or what its QP has begun.
    pub fn unused_shared(&self) -> Option<usize> {
        let begun = self.lives.iter().map(|l| l.qp.progress().outstanding_recvs as usize).sum::<usize>();
        self.srq.as_ref().map(|srq| srq.len() + begun)
    }

    /// Stops the present life; `ghost` leaves it running, as a product would that forgets to.
    pub fn quiesce(&mut self, ghost: bool) -> Quiesced {
        let Some(life) = self.lives.last_mut() else { return Quiesced::default() };
        let p = life.qp.progress();
        let backlog = if ghost { life.qp.clone().quiesce() } else { life.qp.quiesce() };
        life.over = true;
        let outstanding = backlog.sends.iter().filter(|s| !s.opcode.awaits_data()).count() as u64;
        let progressed = p.advanced > 0 || p.executed > 0 || p.outstanding_sends == 0;
        let quiesced = Quiesced { executed: backlog.executed, completed: backlog.completed, outstanding, progressed };
        self.backlog = Some(backlog);
        quiesced
    }
}

/// A physical QP in state INIT that holds its work requests when the network fails.
pub fn new_qp(qpn: u32, wc_qpn: u32, srq: Option<&Arc<SharedQueue>>) -> RcQp {
    let caps =
        QpCaps { max_send_wr: SQ_DEPTH as u32, max_recv_wr: 8, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 32 };
    let mut qp = RcQp::new(RcConfig {
        qpn,
        wc_qpn,
        caps,
        pd: PD,
        hold_on_failure: true,
        sq_sig_all: false,
        cwnd_max_packets: 64,
    });
    if let Some(srq) = srq {
        qp = qp.with_srq(srq.clone());
    }
    let access = Access::LOCAL_WRITE.with(Access::REMOTE);
    let init = RcModify { state: Some(QpState::Init), access: Some(access), ..RcModify::default() };
    qp.modify(&init, &mut Wcs::default()).expect("RESET to INIT");
    qp
}

/// INIT to RTR.
pub fn ready_to_receive(dest_qpn: u32, rq_psn: u32, mtu: Mtu) -> RcModify {
    RcModify {
        state: Some(QpState::Rtr),
        dest_qpn: Some(dest_qpn),
        rq_psn: Some(rq_psn),
        mtu: Some(mtu),
        min_rnr_timer: Some(1),
        max_dest_rd_atomic: Some(4),
        ..RcModify::default()
    }
}

/// RTR to RTS.
pub fn ready_to_send(sq_psn: u32, timeout: u8, retry_cnt: u8) -> RcModify {
    RcModify {
        state: Some(QpState::Rts),
        sq_psn: Some(sq_psn),
        timeout: Some(timeout),
        retry_cnt: Some(retry_cnt),
        rnr_retry: Some(7),
        max_rd_atomic: Some(4),
        ..RcModify::default()
    }
}

/// Completions, in order; `true` marks those of the send queue.
#[derive(Default)]
pub struct Wcs(pub Vec<(bool, Wc)>);

impl Completions for Wcs {
    fn send(&mut self, wc: Wc) {
        self.0.push((true, wc));
    }
    fn recv(&mut self, wc: Wc, _solicited: bool) {
        self.0.push((false, wc));
    }
}

/// Packets that leave now.
pub struct Sink<'a> {
    /// The memory that payloads are gathered from.
    pub memory: &'a HostMemory,
    /// The packets, without ICRC.
    pub packets: Vec<Vec<u8>>,
    /// Addresses of the messages that they belong to, where they carry data from memory.
    pub sources: Vec<u64>,
}

impl PacketSink for Sink<'_> {
    fn push(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), SinkError> {
        use unbroken_roce::Memory;
        if self.packets.len() >= SINK_PACKETS {
            return Err(SinkError::Full);
        }
        let mut packet = Vec::with_capacity(header.len() + payload.len() + 4);
        packet.extend_from_slice(header);
        match payload {
            Payload::None => {}
            Payload::Bytes(b) => packet.extend_from_slice(b),
            Payload::Region { key, va, len } => {
                let at = packet.len();
                packet.resize(at + len as usize, 0);
                self.memory.read(PD, key, va, &mut packet[at..], Access::REMOTE_READ)?;
            }
            Payload::Sges { sges, mut offset, mut len } => {
                self.sources.extend(sges.first().map(|s| s.addr));
                for sge in sges {
                    let skip = offset.min(sge.length);
                    let take = (sge.length - skip).min(len);
                    offset -= skip;
                    len -= take;
                    let at = packet.len();
                    packet.resize(at + take as usize, 0);
                    self.memory.read(PD, sge.lkey, sge.addr + u64::from(skip), &mut packet[at..], Access::NONE)?;
                }
            }
        }
        let data = packet.len() - header.len();
        packet.resize(packet.len() + data.wrapping_neg() % 4, 0);
        self.packets.push(packet);
        Ok(())
    }
}
