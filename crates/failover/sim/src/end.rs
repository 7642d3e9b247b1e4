//! One end of a logical QP in the simulator: the product's executor over real `roce` QPs.

use crate::memory::{NicMemory, PD};
use crate::phys::Phys;
use crate::srq::SharedQueue;
use std::sync::Arc;
use unbroken_failover_protocol::{Executor, LogicalQp};
use unbroken_roce::{PacketSink, Payload, SinkError};
use unbroken_types::{Access, Completions, Mtu, QpCaps, QpState, RcModify, Wc};

/// Entries of a send queue.
pub const SQ_DEPTH: usize = 12;
/// Packets that leave at once; the rest waits for the next turn.
const SINK_PACKETS: usize = 48;

/// One life of a physical QP.
pub struct Life {
    /// Its QPN.
    pub qpn: u32,
    /// Which life of its logical QP it is, from 0.
    pub number: u64,
    /// Our NIC.
    pub nic: usize,
    /// The peer's NIC.
    pub remote: usize,
    /// First PSN that we send.
    pub sq_psn: u32,
    /// The QP.
    pub qp: Phys,
    /// When its timer is set to.
    pub armed_us: u64,
    /// It was stopped.
    pub over: bool,
    /// The PSNs that it sends have wrapped around, and the peer has said so.
    pub wrapped: bool,
    /// That its transport has given up was told.
    pub failure_told: bool,
    /// Packets that it has taken for lost; those and the acknowledged ones as of the last look.
    pub again: u64,
    /// See `again`.
    pub sent: (u64, u64),
}

/// One end.
pub struct End {
    /// The code under test. Away while it works.
    pub executor: Option<Executor>,
    /// All lives; the last is the present one.
    pub lives: Vec<Life>,
    /// Where receives come from, if not from the QP.
    pub srq: Option<Arc<SharedQueue>>,
    /// The epoch that this end suspected last by itself.
    pub suspected: Option<u64>,
    /// The application has got its error.
    pub failed: bool,
    /// The application waits for a WC before it posts more.
    pub app_sleeps: bool,
    /// Timer of the executor.
    pub path_at_us: u64,
    /// When the QP is looked at next.
    pub look_at_us: u64,
    /// In which epoch each message left that must not be replayed.
    pub left_in: Vec<Option<u64>>,
}

impl End {
    /// What it decides.
    pub fn lqp(&self) -> &LogicalQp {
        self.executor().lqp()
    }

    /// What carries it out.
    pub fn executor(&self) -> &Executor {
        self.executor.as_ref().expect("it does not call itself")
    }

    /// The present physical QP.
    pub fn live(&mut self) -> Option<&mut Life> {
        self.lives.last_mut().filter(|l| !l.over)
    }

    /// Receives that no message has used: of a shared queue, or what its QP has begun.
    pub fn unused_shared(&self) -> Option<usize> {
        let begun = self.lives.iter().map(|l| l.qp.begun()).sum::<usize>();
        self.srq.as_ref().map(|srq| srq.len() + begun)
    }
}

/// Sizes of the queues.
pub const CAPS: QpCaps = QpCaps {
    max_send_wr: SQ_DEPTH as u32,
    max_recv_wr: 8,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 32,
};

/// What the application has set.
pub fn app(timeout: u8, retry_cnt: u8, rnr_retry: u8) -> RcModify {
    RcModify {
        state: Some(QpState::Rts),
        access: Some(Access::LOCAL_WRITE.with(Access::REMOTE)),
        min_rnr_timer: Some(1),
        max_dest_rd_atomic: Some(4),
        timeout: Some(timeout),
        retry_cnt: Some(retry_cnt),
        rnr_retry: Some(rnr_retry),
        max_rd_atomic: Some(4),
        ..RcModify::default()
    }
}

/// INIT to RTR, as the application connects.
pub fn ready_to_receive(app: &RcModify, dest_qpn: u32, rq_psn: u32, mtu: Mtu) -> RcModify {
    RcModify {
        state: Some(QpState::Rtr),
        dest_qpn: Some(dest_qpn),
        rq_psn: Some(rq_psn),
        mtu: Some(mtu),
        min_rnr_timer: app.min_rnr_timer,
        max_dest_rd_atomic: app.max_dest_rd_atomic,
        ..RcModify::default()
    }
}

/// RTR to RTS.
pub fn ready_to_send(app: &RcModify, sq_psn: u32) -> RcModify {
    RcModify {
        state: Some(QpState::Rts),
        sq_psn: Some(sq_psn),
        timeout: app.timeout,
        retry_cnt: app.retry_cnt,
        rnr_retry: app.rnr_retry,
        max_rd_atomic: app.max_rd_atomic,
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
    pub memory: NicMemory<'a>,
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
                    self.memory.read(
                        PD,
                        sge.lkey,
                        sge.addr + u64::from(skip),
                        &mut packet[at..],
                        Access::NONE,
                    )?;
                }
            }
        }
        let data = packet.len() - header.len();
        packet.resize(packet.len() + data.wrapping_neg() % 4, 0);
        self.packets.push(packet);
        Ok(())
    }
}
