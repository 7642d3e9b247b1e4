//! Control endpoints: how processes talk to each other about their logical QPs.
//!
//! One UD QP for each NIC and process, with its own CQ and receives, apart from the application's QPs: a control message needs no
//! receive of the application, no remote-write right, and one endpoint speaks for any number of logical QPs. Messages are datagrams:
//! they may be lost, repeated or reordered; `path` deals with that.
//!
//! The receive ring is memory that the NIC writes while we own it, so it is made of atomics; a message is copied out before it is
//! looked at.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use unbroken_types::{Access, Gid, QpCaps, QpState, QpType, SendFlags, SendOpcode, Sge, Wc, WcStatus};
use unbroken_verbs::{
    CompChannel, Cq, Device, DeviceQp, MemoryDomain, QpInit, QpModify, RcModify, RecvWr, Result, SendWr, UdDest,
};

/// Largest control message in bytes; sent inline, so it fits every device's inline limit.
pub const MAX_MESSAGE_BYTES: usize = 256;

/// The key that control datagrams carry; it keeps application datagrams out, nothing more.
const QKEY: u32 = 0x554e_4252;

/// A GRH comes before the payload of each received datagram.
const GRH_BYTES: usize = 40;
const SLOT_BYTES: usize = 512;
const RECV_SLOTS: usize = 512;
const SEND_SLOTS: u32 = 512;

/// Where an endpoint can be reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControlAddr {
    /// The NIC.
    pub gid: Gid,
    /// The endpoint's QPN.
    pub qpn: u32,
}

/// The control endpoint of one NIC.
pub struct Endpoint {
    qp: Arc<dyn DeviceQp>,
    cq: Arc<Cq>,
    addr: ControlAddr,
    ring: Box<[AtomicU64]>,
    lkey: u32,
    memory: Arc<dyn MemoryDomain>,
}

impl Endpoint {
    /// Makes the endpoint of a device; its arrivals raise events on `channel`.
    pub fn open(device: &Arc<dyn Device>, pd: u32, channel: &Arc<CompChannel>) -> Result<Endpoint> {
        let memory = device.memory();
        let ring: Box<[AtomicU64]> = (0..SLOT_BYTES * RECV_SLOTS / 8).map(|_| AtomicU64::new(0)).collect();
        let base = ring.as_ptr() as u64;
        let len = (SLOT_BYTES * RECV_SLOTS) as u64;
        let keys = memory.reg_mr(pd, base, len, base, Access::LOCAL_WRITE)?;
        let cq = Cq::new(2 * (RECV_SLOTS as u32 + SEND_SLOTS), Some(channel.clone()));
        let qp = Self::make_qp(device, pd, &cq).inspect_err(|_| {
            // The region was made for this QP alone; without it nothing can use the region.
            let _ = memory.dereg_mr(keys.lkey);
        })?;
        let addr = ControlAddr { gid: device.gid(), qpn: qp.qpn() };
        let endpoint = Endpoint { qp, cq, addr, ring, lkey: keys.lkey, memory };
        for slot in 0..RECV_SLOTS {
            endpoint.post(slot)?;
        }
        endpoint.cq.arm(false);
        Ok(endpoint)
    }

    fn make_qp(device: &Arc<dyn Device>, pd: u32, cq: &Arc<Cq>) -> Result<Arc<dyn DeviceQp>> {
        let caps = QpCaps {
            max_send_wr: SEND_SLOTS,
            max_recv_wr: RECV_SLOTS as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: MAX_MESSAGE_BYTES as u32,
        };
        let qp = device.create_qp(&QpInit {
            qp_type: QpType::Ud,
            caps,
            pd,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            sq_sig_all: false,
            hold_on_failure: false,
            wc_qpn: None,
        })?;
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let sq_psn = (state == QpState::Rts).then_some(0);
            let rc = RcModify { state: Some(state), sq_psn, ..RcModify::default() };
            let qkey = (state == QpState::Init).then_some(QKEY);
            qp.modify(&QpModify { rc, qkey, ..QpModify::default() }).inspect_err(|_| qp.destroy())?;
        }
        Ok(qp)
    }

    /// Where peers reach it.
    pub fn addr(&self) -> ControlAddr {
        self.addr
    }

    fn post(&self, slot: usize) -> Result<()> {
        let addr = self.ring[slot * SLOT_BYTES / 8..].as_ptr() as u64;
        let sge = Sge { addr, length: SLOT_BYTES as u32, lkey: self.lkey };
        self.qp.post_recv(&RecvWr { wr_id: slot as u64, sges: &[sge] })
    }

    /// Sends a message of at most [`MAX_MESSAGE_BYTES`]. That it was sent says nothing of its arrival.
    pub fn send(&self, to: ControlAddr, message: &[u8]) -> Result<()> {
        self.qp.post_send(&SendWr {
            wr_id: 0,
            opcode: SendOpcode::Send,
            flags: SendFlags::INLINE,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            sges: &[],
            inline_data: Some(message),
            ud: Some(UdDest { gid: to.gid, qpn: to.qpn, qkey: QKEY, grh: true }),
        })
    }

    /// Hands every message that has arrived to `each`, with the sender's address, and asks for the next event. Gives `false` when
    /// the endpoint no longer works (its NIC died).
    pub fn receive(&self, mut each: impl FnMut(ControlAddr, &[u8])) -> bool {
        let mut wcs = [Wc::default(); 16];
        self.cq.arm(false);
        // Bounded: what arrives meanwhile raises another event.
        for _ in 0..RECV_SLOTS / wcs.len() {
            let Ok(n) = self.cq.take(&mut wcs) else { return false };
            for wc in &wcs[..n] {
                if wc.status != WcStatus::Success as u32 {
                    return false;
                }
                self.deliver(wc, &mut each);
                if self.post(wc.wr_id as usize).is_err() {
                    return false;
                }
            }
            if n == 0 {
                break;
            }
        }
        true
    }

    /// Lets the NIC work in the caller's thread.
    pub fn drive(&self) {
        self.cq.drive();
    }

    fn deliver(&self, wc: &Wc, each: &mut impl FnMut(ControlAddr, &[u8])) {
        let len = wc.byte_len as usize;
        if !(GRH_BYTES..=GRH_BYTES + MAX_MESSAGE_BYTES).contains(&len) {
            return;
        }
        let mut copy = [0u8; GRH_BYTES + MAX_MESSAGE_BYTES + 8];
        let first = wc.wr_id as usize * SLOT_BYTES / 8;
        for (word, out) in self.ring[first..first + len.div_ceil(8)].iter().zip(copy.chunks_exact_mut(8)) {
            out.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
        }
        if let Some(gid) = source_gid(&copy[..GRH_BYTES]) {
            each(ControlAddr { gid, qpn: wc.src_qp }, &copy[GRH_BYTES..len]);
        }
    }

    /// Ends the endpoint.
    pub fn close(&self) {
        self.qp.destroy();
        // Only fails if the region was ended before, which nobody else can do.
        let _ = self.memory.dereg_mr(self.lkey);
    }
}

/// The sender's GID in a GRH: RoCEv2 over IPv4 puts the IPv4 header into its last 20 bytes, with the source at offset 12 of those.
fn source_gid(grh: &[u8]) -> Option<Gid> {
    if grh[20] >> 4 == 4 {
        let v4: [u8; 4] = grh[32..36].try_into().ok()?;
        return Some(Gid::from_ip(std::net::Ipv4Addr::from(v4).into()));
    }
    if grh[0] >> 4 == 6 {
        return Some(Gid(grh[8..24].try_into().ok()?));
    }
    None
}
