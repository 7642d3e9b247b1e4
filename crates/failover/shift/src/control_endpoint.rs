//! Control endpoints: how processes talk to each other about their logical QPs.
//!
//! One UD QP for each port of each NIC and process, with its own CQ and receives, apart from the
//! application's QPs: a control message needs no receive of the application, no remote-write right,
//! and one endpoint speaks for any number of logical QPs. Messages are datagrams: they may be lost,
//! repeated or reordered; the protocol deals with that.
//!
//! Each datagram carries a seal ([`unbroken_failover_protocol::seal`]): what a stranger sends is
//! dropped and counted, and never answered. The queue of what has not been looked at is the receive
//! ring, which is bounded.
//!
//! A datagram that cannot leave (its interface has lost the address, say) ends a UD QP in ERR, as
//! any of its work that fails: it neither sends nor receives any more, and does not come back with
//! the network. So a completion with an error asks for [`ControlEndpoint::mend`].
//!
//! The rings are memory that the NIC reads and writes while we own it, so they are made of atomics;
//! a datagram is copied out before it is looked at.

use crate::lock::lock;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use unbroken_failover_protocol::seal::{Key, SEAL_BYTES};
use unbroken_types::{
    Access, Gid, Grh, PdHandle, QpCaps, QpState, QpType, SendFlags, SendOpcode, Sge, Wc, WcStatus,
    GRH_BYTES,
};
use unbroken_verbs::{
    CompChannel, Cq, Device, DeviceQp, Error, MemoryDomain, QpInit, QpModify, RcModify, RecvWr,
    Result, SendWr, UdDest,
};

/// Largest datagram, its seal included. Smaller where the path MTU is.
const MAX_DATAGRAM_BYTES: usize = 1024;

/// The key that control datagrams carry; it keeps application datagrams out, nothing more.
const QKEY: u32 = 0x554e_4252;

const RECV_SLOT_BYTES: usize = GRH_BYTES + MAX_DATAGRAM_BYTES + 8;
const RECV_SLOTS: usize = 512;
/// Datagrams that may be on their way out; each leaves its slot as soon as the NIC has sent it.
const SEND_SLOTS: usize = 128;
/// Where the send slots begin.
const SENDS_AT: usize = RECV_SLOT_BYTES * RECV_SLOTS;
/// The `wr_id` of a send is its slot's number plus this.
const SEND_ID: u64 = 1 << 32;

/// A port of one of our NICs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct LocalPort {
    /// The NIC.
    pub(crate) nic: usize,
    /// The port, counted from 0: it forms a pair with the peer's port of this number.
    pub(crate) pair: u8,
}

/// How the network is to treat a datagram: as the data whose path it is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Class {
    /// Service level.
    pub sl: u8,
    /// The class of service that routers see.
    pub traffic_class: u8,
}

/// Where an endpoint can be reached, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControlAddr {
    /// The NIC.
    pub gid: Gid,
    /// The endpoint's QPN.
    pub qpn: u32,
    /// InfiniBand: the LID of its port; else 0.
    pub lid: u16,
    /// As the data to the peer.
    pub class: Class,
}

/// The control endpoint of one port of a NIC.
pub struct ControlEndpoint {
    qp: Arc<dyn DeviceQp>,
    cq: Arc<Cq>,
    gid: Gid,
    /// The LID of the port, which the subnet manager may change.
    lid: AtomicU16,
    /// The port, counted from 1.
    port: u8,
    /// Knows where the GID stands in the port's table: that changes when a link comes back.
    device: Arc<dyn Device>,
    /// The receive slots, then the send slots.
    ring: Box<[AtomicU64]>,
    /// Send slots that are free. Locked while a datagram is posted, so that none is posted while
    /// the QP is mended.
    free: Mutex<Vec<u16>>,
    /// Work has failed since it was mended.
    failed: AtomicBool,
    /// A thread gives the QP a new life.
    mending: AtomicBool,
    lkey: u32,
    /// Bytes of messages that fit into a datagram.
    room: usize,
    memory: Arc<dyn MemoryDomain>,
}

impl ControlEndpoint {
    /// Makes the endpoint of a device's port; its arrivals raise events on `channel`.
    pub fn open(
        device: &Arc<dyn Device>,
        port: u8,
        pd: PdHandle,
        channel: &Arc<CompChannel>,
    ) -> Result<ControlEndpoint> {
        let memory = device.memory();
        let attr = device.port(port)?;
        let mtu = attr.active_mtu.bytes();
        let len = SENDS_AT + SEND_SLOTS * MAX_DATAGRAM_BYTES;
        let ring: Box<[AtomicU64]> = (0..len / 8).map(|_| AtomicU64::new(0)).collect();
        let (base, len) = (ring.as_ptr() as u64, len as u64);
        let keys = memory.reg_mr(pd, base, len, base, Access::LOCAL_WRITE)?;
        let cq = Cq::new(2 * (RECV_SLOTS + SEND_SLOTS) as u32, Some(channel.clone()));
        let gid_index = device.gid_index();
        let gid = attr.gids.get(usize::from(gid_index)).map(|entry| entry.gid);
        let gid =
            gid.ok_or_else(|| Error::invalid(format!("port {port} has no GID {gid_index}")))?;
        let qp = Self::make_qp(device, pd, &cq).inspect_err(|_| {
            // The region was made for this QP alone; without it nothing can use the region.
            let _ = memory.dereg_mr(keys.lkey);
        })?;
        let endpoint = ControlEndpoint {
            gid,
            lid: AtomicU16::new(attr.lid),
            qp,
            cq,
            port,
            device: device.clone(),
            ring,
            free: Mutex::new(send_slots()),
            failed: AtomicBool::new(false),
            mending: AtomicBool::new(false),
            lkey: keys.lkey,
            room: mtu.min(MAX_DATAGRAM_BYTES) - SEAL_BYTES,
            memory,
        };
        endpoint.begin().inspect_err(|_| endpoint.close())?;
        endpoint.cq.arm(false);
        Ok(endpoint)
    }

    /// Takes a QP that is in RESET to where it sends and receives.
    fn begin(&self) -> Result<()> {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let sq_psn = (state == QpState::Rts).then_some(0);
            let rc = RcModify { state: Some(state), sq_psn, ..RcModify::default() };
            let init = state == QpState::Init;
            let (qkey, port) = (init.then_some(QKEY), init.then_some(self.port));
            self.qp.modify(&QpModify { rc, qkey, port, ..QpModify::default() })?;
        }
        (0..RECV_SLOTS).try_for_each(|slot| self.post(slot))
    }

    /// Whether work of its QP has failed, so that it is to be mended. Says so once.
    pub(crate) fn take_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed) && self.failed.swap(false, Ordering::AcqRel)
    }

    /// From now on nobody begins to send or to receive, until [`ControlEndpoint::is_mended`]. False:
    /// another thread mends it already.
    pub(crate) fn begin_to_mend(&self) -> bool {
        !self.mending.swap(true, Ordering::AcqRel)
    }

    /// Messages go and come again. What has come meanwhile raises no event: it is to be received.
    pub(crate) fn is_mended(&self) {
        self.mending.store(false, Ordering::Release);
        self.cq.arm(false);
    }

    /// Gives the QP a new life, with its number. What was on its way is lost, as datagrams may be.
    /// The device may take its time for any of these commands, so a thread of its own calls this,
    /// with no lock held, once nobody sends or receives any more.
    ///
    /// Errors: the device does not take the QP there (it has died, say).
    pub(crate) fn mend(&self) -> Result<()> {
        drop(lock(&self.free)); // whoever was sending has done so
        let reset = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
        self.qp.modify(&QpModify { rc: reset, ..QpModify::default() })?;
        // What had completed is of the life before.
        let mut wcs = [Wc::default(); 16];
        for _ in 0..2 * (RECV_SLOTS + SEND_SLOTS) / wcs.len() {
            self.cq.drive();
            if self.cq.take(&mut wcs)? == 0 {
                break;
            }
        }
        self.failed.store(false, Ordering::Release);
        *lock(&self.free) = send_slots();
        self.begin()
    }

    fn make_qp(device: &Arc<dyn Device>, pd: PdHandle, cq: &Arc<Cq>) -> Result<Arc<dyn DeviceQp>> {
        let caps = QpCaps {
            max_send_wr: SEND_SLOTS as u32,
            max_recv_wr: RECV_SLOTS as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        device.create_qp(&QpInit {
            qp_type: QpType::Ud,
            caps,
            pd,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            sq_sig_all: false,
            suspend_on_error: false,
            wc_qpn: None,
            home: None,
            local_keys_of: None,
            control: true,
            standby: false,
            lane: None,
            management: false,
        })
    }

    /// Where peers reach it.
    pub fn addr(&self) -> ControlAddr {
        let lid = self.lid.load(Ordering::Relaxed);
        ControlAddr { gid: self.gid, qpn: self.qp.qpn(), lid, class: Class::default() }
    }

    /// The subnet manager may have given the port another LID. True: it has.
    pub(crate) fn look_at_lid(&self) -> bool {
        let lid = self.device.port(self.port).map(|attr| attr.lid);
        lid.is_ok_and(|lid| self.lid.swap(lid, Ordering::Relaxed) != lid)
    }

    /// Whether packets from this port can reach that one: two InfiniBand ports must be in one
    /// subnet, since the LID of the router between two is known to their subnet manager alone.
    pub(crate) fn reaches(&self, to: &ControlAddr) -> bool {
        let own = self.addr();
        (own.lid == 0) == (to.lid == 0)
            && (own.lid == 0 || own.gid.subnet_prefix() == to.gid.subnet_prefix())
    }

    /// Bytes of messages that fit into a datagram.
    pub fn room(&self) -> usize {
        self.room
    }

    fn post(&self, slot: usize) -> Result<()> {
        let addr = self.ring[slot * RECV_SLOT_BYTES / 8..].as_ptr() as u64;
        let sge = Sge { addr, length: RECV_SLOT_BYTES as u32, lkey: self.lkey };
        self.qp.post_recv(&RecvWr { wr_id: slot as u64, sges: &[sge] })
    }

    /// Sends a datagram with these messages, at most [`Self::room`] bytes, under the seal of the
    /// key. That it was sent says nothing of its arrival; where no slot is free it is lost.
    pub fn send(&self, to: ControlAddr, messages: &[u8], key: &Key) -> Result<()> {
        let mut datagram = Vec::with_capacity(messages.len() + SEAL_BYTES);
        datagram.extend_from_slice(messages);
        key.seal(&mut datagram);
        let mut free = lock(&self.free);
        if self.mending.load(Ordering::Acquire) {
            return Err(Error::no_room("the control endpoint is being mended"));
        }
        let slot = free
            .pop()
            .ok_or_else(|| Error::no_room("all control datagrams are on their port_path"))?;
        let first = (SENDS_AT + usize::from(slot) * MAX_DATAGRAM_BYTES) / 8;
        let words = &self.ring[first..first + MAX_DATAGRAM_BYTES / 8];
        for (word, bytes) in words.iter().zip(datagram.chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(value), Ordering::Release);
        }
        let sge =
            Sge { addr: words.as_ptr() as u64, length: datagram.len() as u32, lkey: self.lkey };
        let sent = self.qp.post_send(&SendWr {
            wr_id: SEND_ID + u64::from(slot),
            opcode: SendOpcode::Send,
            flags: SendFlags::SIGNALED,
            sges: &[sge],
            ud: Some(self.dest(to)),
            ..SendWr::default()
        });
        if sent.is_err() {
            free.push(slot);
        }
        sent
    }

    /// Datagrams are about to go there.
    pub fn prepare(&self, to: ControlAddr) {
        self.qp.prepare(&self.dest(to));
    }

    fn dest(&self, to: ControlAddr) -> UdDest {
        let sgid_index = self.device.gid_index();
        let Class { sl, traffic_class } = to.class;
        let ControlAddr { gid, qpn, lid: dlid, .. } = to;
        UdDest { gid, qpn, qkey: QKEY, sgid_index, sl, traffic_class, dlid, ..UdDest::default() }
    }

    /// Hands the content of every datagram with a right seal to `each`, with the sender's address,
    /// and asks for the next event. Gives how many came without.
    pub fn receive(&self, key: &Key, mut each: impl FnMut(ControlAddr, &[u8])) -> u64 {
        let mut wcs = [Wc::default(); 16];
        let mut forged = 0;
        if self.mending.load(Ordering::Acquire) {
            return forged;
        }
        self.cq.arm(false);
        // Bounded: what arrives meanwhile raises another event. An error means that the NIC has
        // died: it is opened anew when it is healed.
        for _ in 0..(RECV_SLOTS + SEND_SLOTS) / wcs.len() {
            let Ok(n) = self.cq.take(&mut wcs) else { return forged };
            for wc in &wcs[..n] {
                if wc.status != WcStatus::Success as u32 {
                    self.failed.store(true, Ordering::Release);
                }
                if let Some(slot) = wc.wr_id.checked_sub(SEND_ID) {
                    lock(&self.free).push(slot as u16);
                } else if wc.status == WcStatus::Success as u32 {
                    forged += u64::from(!self.deliver(wc, key, &mut each));
                    if self.post(wc.wr_id as usize).is_err() {
                        return forged;
                    }
                }
            }
            if n == 0 {
                break;
            }
        }
        forged
    }

    /// Lets the NIC work in the caller's thread.
    pub fn drive(&self) {
        self.cq.drive();
    }

    /// False: it carries no seal of ours.
    fn deliver(&self, wc: &Wc, key: &Key, each: &mut impl FnMut(ControlAddr, &[u8])) -> bool {
        let len = wc.byte_len as usize;
        if !(GRH_BYTES..=GRH_BYTES + MAX_DATAGRAM_BYTES).contains(&len) {
            return false;
        }
        let mut copy = [0u8; RECV_SLOT_BYTES];
        let first = wc.wr_id as usize * RECV_SLOT_BYTES / 8;
        for (word, out) in
            self.ring[first..first + len.div_ceil(8)].iter().zip(copy.chunks_exact_mut(8))
        {
            out.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
        }
        let header = copy.first_chunk().and_then(Grh::parse);
        let opened = header.zip(key.open(&copy[GRH_BYTES..len]));
        if let Some((Grh { source, .. }, messages)) = opened {
            let (class, lid) = (Class::default(), wc.slid);
            each(ControlAddr { gid: source, qpn: wc.src_qp, lid, class }, messages);
        }
        opened.is_some()
    }

    /// Its QP ends in ERR, as by a datagram that cannot leave.
    #[cfg(test)]
    pub(crate) fn fail(&self) {
        let err = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        self.qp.modify(&QpModify { rc: err, ..QpModify::default() }).unwrap();
    }

    /// Whether its QP sends and receives.
    #[cfg(test)]
    pub(crate) fn works(&self) -> bool {
        self.qp.state() == QpState::Rts
    }

    /// Ends the endpoint.
    pub fn close(&self) {
        self.qp.destroy();
        // Only fails if the region was ended before, which nobody else can do.
        let _ = self.memory.dereg_mr(self.lkey);
    }
}

fn send_slots() -> Vec<u16> {
    (0..SEND_SLOTS as u16).collect()
}
