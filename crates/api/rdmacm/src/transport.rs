//! Datagrams of the CM: one UD queue pair for each NIC.
//!
//! They are queue pairs as any program's, so failover moves them when their NIC dies, and peers go
//! on using the addresses that they know. Datagrams may be lost: the CM sends them again, each time
//! by another NIC.

use rustix::event::epoll;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use unbroken_cm::{Peer, MAD_BYTES};
use unbroken_shift::api::{Context, Qp, QpRequest, System};
use unbroken_types::{
    Access, Gid, GidType, Grh, PdHandle, QpCaps, QpState, QpType, SendFlags, SendOpcode, Sge, Wc,
    WcStatus, GRH_BYTES,
};
use unbroken_verbs::{CompChannel, Cq, Error, QpModify, RcModify, RecvWr, Result, SendWr, UdDest};

/// The key of the QPs that take management datagrams (`IB_QP1_QKEY`).
const QKEY: u32 = 0x8001_0000;
const SLOT_BYTES: usize = (GRH_BYTES + MAD_BYTES).next_multiple_of(8);
const SLOTS: usize = 512;
const SENDS: u32 = 512;
/// The `wr_id` of sends.
const SEND_ID: u64 = u64::MAX;
/// Completions that are taken at a time.
const BATCH: usize = 16;

/// The QP of a NIC.
struct Endpoint {
    context: Arc<Context>,
    qp: Arc<Qp>,
    cq: Arc<Cq>,
    channel: Arc<CompChannel>,
    sgid_index: u8,
    /// Receive slots, which the NIC writes while we own them: so they are atomics.
    ring: Box<[AtomicU64]>,
    lkey: u32,
    pd: PdHandle,
    peer: Peer,
    /// Work has failed: the QP neither sends nor receives any more.
    failed: bool,
}

/// The QPs of a process.
pub(crate) struct Transport {
    /// Readable when the channel of one of them is. A device whose objects are its own has a channel
    /// of its own.
    arrivals: OwnedFd,
    endpoints: Vec<Option<Endpoint>>,
}

/// A datagram that has arrived.
pub(crate) struct Arrived {
    pub(crate) from: Peer,
    pub(crate) via: usize,
    pub(crate) bytes: [u8; MAD_BYTES],
}

impl Transport {
    /// QPs on all NICs; those that cannot be had now are left out.
    pub(crate) fn open(system: &System) -> Result<Transport> {
        let arrivals = epoll::create(epoll::CreateFlags::CLOEXEC);
        let arrivals = arrivals.map_err(|e| Error::os("epoll", &e.into()))?;
        let mut t = Transport { arrivals, endpoints: Vec::new() };
        for device in system.devices() {
            t.endpoints.push(Endpoint::open(system, device.index, &t.arrivals).ok());
        }
        Ok(t)
    }

    /// A descriptor that is readable when datagrams have arrived.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.arrivals.as_fd()
    }

    /// Where peers reach each NIC.
    pub(crate) fn addresses(&self) -> Vec<Option<Peer>> {
        self.endpoints.iter().map(|e| e.as_ref().map(|e| e.peer)).collect()
    }

    /// The opened device of a NIC.
    pub(crate) fn context(&self, nic: usize) -> Option<&Arc<Context>> {
        self.endpoints.get(nic)?.as_ref().map(|e| &e.context)
    }

    /// Makes QPs anew that have failed, and those that could not be had. Whether there are others
    /// now.
    pub(crate) fn mend(&mut self, system: &System) -> bool {
        let mut changed = false;
        for (nic, slot) in self.endpoints.iter_mut().enumerate() {
            if slot.as_ref().is_some_and(|e| !e.failed) {
                continue;
            }
            if let Ok(endpoint) = Endpoint::open(system, nic, &self.arrivals) {
                if let Some(old) = slot.replace(endpoint) {
                    old.close();
                }
                changed = true;
            }
        }
        changed
    }

    /// Whether [`Transport::mend`] has something to do.
    pub(crate) fn is_broken(&self) -> bool {
        self.endpoints.iter().any(|e| e.as_ref().is_none_or(|e| e.failed))
    }

    /// Sends a datagram from NIC `via`, counted on beyond the last; from the next that takes it
    /// where that one does not.
    pub(crate) fn send(&mut self, via: usize, to: Peer, bytes: &[u8; MAD_BYTES]) {
        let count = self.endpoints.len().max(1);
        for step in 0..count {
            let slot = self.endpoints.get_mut(via.wrapping_add(step) % count);
            if let Some(Some(endpoint)) = slot {
                if endpoint.send(to, bytes) {
                    return;
                }
            }
        }
    }

    /// Hands over what has arrived, at most what the rings hold.
    pub(crate) fn receive(&mut self, mut each: impl FnMut(Arrived)) {
        for (via, endpoint) in self.endpoints.iter_mut().enumerate() {
            if let Some(endpoint) = endpoint {
                endpoint.receive(via, &mut each);
            }
        }
    }
}

impl Endpoint {
    fn open(system: &System, nic: usize, arrivals: &OwnedFd) -> Result<Endpoint> {
        let context = system.open(nic)?;
        let port = context.port(1)?;
        let gid = context.gid();
        let leads = |kind| matches!(kind, GidType::Infiniband | GidType::RoceV2);
        let sgid_index =
            port.gids.iter().position(|e| e.gid == gid && leads(e.kind)).unwrap_or(0) as u8;
        let pd = context.alloc_pd()?;
        let ring: Box<[AtomicU64]> =
            (0..SLOTS * SLOT_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let base = ring.as_ptr() as u64;
        let len = (SLOTS * SLOT_BYTES) as u64;
        let lkey = context.reg_mr(pd, base, len, base, Access::LOCAL_WRITE)?.lkey;
        let channel = context.create_channel()?;
        let data = epoll::EventData::new_u64(nic as u64);
        epoll::add(arrivals, channel.as_fd(), data, epoll::EventFlags::IN)
            .map_err(|e| Error::os("epoll", &e.into()))?;
        let cq = context.create_cq(2 * (SLOTS as u32 + SENDS), Some(channel.clone()))?;
        let caps = QpCaps {
            max_send_wr: SENDS,
            max_recv_wr: SLOTS as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: MAD_BYTES as u32,
        };
        let qp = context.create_qp(&QpRequest {
            qp_type: QpType::Ud,
            caps,
            pd,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            sq_sig_all: false,
            cookie: 0,
            plain: false,
            management: true,
        })?;
        let peer = Peer { gid: gid.0, qpn: qp.qpn() };
        let endpoint =
            Endpoint { context, qp, cq, channel, sgid_index, ring, lkey, pd, peer, failed: false };
        endpoint.begin()?;
        Ok(endpoint)
    }

    fn begin(&self) -> Result<()> {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let sq_psn = (state == QpState::Rts).then_some(0);
            let rc = RcModify { state: Some(state), sq_psn, ..RcModify::default() };
            let init = state == QpState::Init;
            let (qkey, port) = (init.then_some(QKEY), init.then_some(1));
            self.qp.modify(&QpModify { rc, qkey, port, ..QpModify::default() })?;
        }
        (0..SLOTS).try_for_each(|slot| self.post(slot))?;
        self.cq.arm(false);
        Ok(())
    }

    fn post(&self, slot: usize) -> Result<()> {
        let addr = self.ring[slot * SLOT_BYTES / 8..].as_ptr() as u64;
        let sge = Sge { addr, length: SLOT_BYTES as u32, lkey: self.lkey };
        self.qp.post_recv(&RecvWr { wr_id: slot as u64, sges: &[sge] })
    }

    fn send(&mut self, to: Peer, bytes: &[u8; MAD_BYTES]) -> bool {
        let dest = UdDest {
            gid: Gid(to.gid),
            qpn: to.qpn,
            qkey: QKEY,
            sgid_index: self.sgid_index,
            ..UdDest::default()
        };
        let sent = self.qp.post_send(&SendWr {
            wr_id: SEND_ID,
            opcode: SendOpcode::Send,
            flags: SendFlags::SIGNALED | SendFlags::INLINE,
            inline_data: Some(bytes),
            ud: Some(dest),
            ..SendWr::default()
        });
        self.failed |= sent.is_err() && self.qp.state() == QpState::Err;
        sent.is_ok()
    }

    fn receive(&mut self, via: usize, each: &mut impl FnMut(Arrived)) {
        self.channel.drain();
        self.cq.arm(false);
        let mut wcs = [Wc::default(); BATCH];
        // Bounded: what arrives meanwhile raises another event.
        for _ in 0..2 * SLOTS / BATCH {
            let Ok(n) = self.cq.take(&mut wcs) else {
                self.failed = true;
                return;
            };
            for wc in &wcs[..n] {
                if wc.status != WcStatus::Success as u32 {
                    self.failed = true;
                } else if wc.wr_id != SEND_ID {
                    if let Some(arrived) = self.copy(wc, via) {
                        each(arrived);
                    }
                    self.failed |= self.post(wc.wr_id as usize).is_err();
                }
            }
            if n == 0 {
                return;
            }
        }
    }

    /// A datagram, copied out of its slot; `None` where it is none of the CM's.
    fn copy(&self, wc: &Wc, via: usize) -> Option<Arrived> {
        let slot = wc.wr_id as usize;
        if wc.byte_len as usize != GRH_BYTES + MAD_BYTES || slot >= SLOTS {
            return None;
        }
        let mut copy = [0u8; SLOT_BYTES];
        let words = &self.ring[slot * SLOT_BYTES / 8..];
        for (word, out) in words.iter().zip(copy.chunks_exact_mut(8)) {
            out.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
        }
        let source = copy.first_chunk().and_then(Grh::parse)?.source;
        let bytes = *copy[GRH_BYTES..].first_chunk()?;
        Some(Arrived { from: Peer { gid: source.0, qpn: wc.src_qp }, via, bytes })
    }

    fn close(self) {
        let _ = self.qp.destroy();
        let _ = self.context.destroy_cq(&self.cq);
        let _ = self.context.dereg_mr(self.lkey);
        let _ = self.context.dealloc_pd(self.pd);
        let _ = self.context.close();
    }
}
