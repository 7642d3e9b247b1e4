//! Two RC QPs in virtual time, with a seeded network between them and memory in vectors.
#![allow(dead_code)] // each test uses its part

pub mod rc;
pub mod script;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use unbroken_roce::*;
use unbroken_types::PdHandle;
use unbroken_types::*;
use unbroken_wire::Packet;

pub const PD: PdHandle = PdHandle(7);
/// Regions of each end: sources of sends, what the peer may write, what it may read, where receives
/// and READs go.
pub const SRC: u32 = 0x100;
pub const WRITABLE: u32 = 0x200;
pub const READABLE: u32 = 0x300;
pub const DST: u32 = 0x400;
/// What the peer's atomics work on.
pub const COUNTERS: u32 = 0x500;

/// splitmix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

pub struct Region {
    pub base: u64,
    pub access: Access,
    pub bytes: Vec<u8>,
}

/// Memory of one end: key → region.
#[derive(Default)]
pub struct VecMemory {
    pub regions: RefCell<BTreeMap<u32, Region>>,
    /// What keys were bound and invalidated, in order.
    pub changes: RefCell<Vec<KeyChange>>,
}

impl VecMemory {
    pub fn add(&self, key: u32, access: Access, bytes: Vec<u8>) {
        let base = key as u64 * 0x1000_0000;
        self.regions.borrow_mut().insert(key, Region { base, access, bytes });
    }

    pub fn bytes(&self, key: u32) -> Vec<u8> {
        self.regions.borrow()[&key].bytes.clone()
    }

    /// Invalidating takes a region away; binding needs one.
    fn change(&self, change: &KeyChange) -> Result<(), MemError> {
        let mut regions = self.regions.borrow_mut();
        match change {
            KeyChange::Bind(b) => {
                regions.contains_key(&b.lkey).then_some(()).ok_or(MemError::Bind)?
            }
            KeyChange::Invalidate(key) => drop(regions.remove(key).ok_or(MemError::NoSuchKey)?),
        }
        self.changes.borrow_mut().push(*change);
        Ok(())
    }

    fn with<T>(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
        f: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, MemError> {
        let mut regions = self.regions.borrow_mut();
        let r = regions.get_mut(&key).ok_or(MemError::NoSuchKey)?;
        if pd != PD {
            return Err(MemError::WrongPd);
        }
        if !r.access.contains(need) {
            return Err(MemError::AccessDenied);
        }
        let at = va.checked_sub(r.base).ok_or(MemError::OutOfBounds)?;
        let end = at
            .checked_add(len)
            .filter(|&e| e <= r.bytes.len() as u64)
            .ok_or(MemError::OutOfBounds)?;
        Ok(f(&mut r.bytes[at as usize..end as usize]))
    }
}

pub fn va(key: u32, offset: usize) -> u64 {
    key as u64 * 0x1000_0000 + offset as u64
}

impl Memory for VecMemory {
    fn check(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<(), MemError> {
        self.with(pd, key, va, len, need, |_| ())
    }
    fn write(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        data: &[u8],
        need: Access,
    ) -> Result<(), MemError> {
        self.with(pd, key, va, data.len() as u64, need, |m| m.copy_from_slice(data))
    }
    fn read(
        &self,
        pd: PdHandle,
        key: u32,
        va: u64,
        out: &mut [u8],
        need: Access,
    ) -> Result<(), MemError> {
        self.with(pd, key, va, out.len() as u64, need, |m| out.copy_from_slice(m))
    }
    fn atomic(&self, pd: PdHandle, key: u32, va: u64, op: AtomicOp) -> Result<u64, MemError> {
        self.with(pd, key, va, 8, Access::REMOTE_ATOMIC, |m| {
            let found = u64::from_ne_bytes((&*m).try_into().unwrap());
            m.copy_from_slice(&op.apply(found).to_ne_bytes());
            found
        })
    }
    fn invalidate(&self, _pd: PdHandle, key: u32) -> Result<(), MemError> {
        self.change(&KeyChange::Invalidate(key))
    }
}

#[derive(Default)]
pub struct Wcs {
    pub sends: Vec<Wc>,
    pub recvs: Vec<(Wc, bool)>,
}

impl Completions for Wcs {
    fn send(&mut self, wc: Wc) {
        self.sends.push(wc);
    }
    fn recv(&mut self, wc: Wc, solicited: bool) {
        self.recvs.push((wc, solicited));
    }
}

/// Takes up to `room` packets, as bytes without ICRC.
pub struct VecSink<'a> {
    pub mem: &'a VecMemory,
    pub room: usize,
    pub packets: Vec<(UdDest, Vec<u8>)>,
}

impl VecSink<'_> {
    fn take(&mut self, dest: UdDest, header: &[u8], payload: Payload<'_>) -> Result<(), SinkError> {
        if self.room == 0 {
            return Err(SinkError::Full);
        }
        let mut bytes = header.to_vec();
        let at = bytes.len();
        bytes.resize(at + payload.len(), 0);
        match payload {
            Payload::None => {}
            Payload::Bytes(b) => bytes[at..].copy_from_slice(b),
            Payload::Region { key, va, .. } => {
                self.mem.read(PD, key, va, &mut bytes[at..], Access::REMOTE_READ)?
            }
            Payload::Sges { sges, offset, len } => {
                let (mut skip, mut done) = (offset, 0);
                for s in sges {
                    if skip >= s.length {
                        skip -= s.length;
                        continue;
                    }
                    let here = (s.length - skip).min(len - done) as usize;
                    let to = &mut bytes[at + done as usize..][..here];
                    self.mem.read(PD, s.lkey, s.addr + skip as u64, to, Access::NONE)?;
                    done += here as u32;
                    skip = 0;
                }
                assert_eq!(done, len, "entries shorter than the message");
            }
        }
        bytes.resize(bytes.len() + unbroken_wire::pad_of(payload.len()) as usize, 0);
        Packet::parse(&bytes).expect("a QP emits packets that parse");
        self.packets.push((dest, bytes));
        self.room -= 1;
        Ok(())
    }
}

impl PacketSink for VecSink<'_> {
    fn push(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), SinkError> {
        self.take(UdDest::default(), header, payload)
    }
    fn change_key(&mut self, change: &KeyChange) -> Result<(), MemError> {
        self.mem.change(change)
    }
}

impl UdSink for VecSink<'_> {
    fn push_to(
        &mut self,
        dest: &UdDest,
        header: &[u8],
        payload: Payload<'_>,
    ) -> Result<(), SinkError> {
        self.take(*dest, header, payload)
    }
}

/// What the network does, in thousandths of packets.
#[derive(Clone, Copy, Default, Debug)]
pub struct Faults {
    pub loss: u64,
    pub duplicate: u64,
    pub reorder: u64,
}

thread_local! {
    /// What the QPs of pairs made by this thread leave out.
    static MUTATION: Cell<Mutation> = const { Cell::new(Mutation::None) };
}

/// Whether a test fails where QPs leave a rule out.
#[cfg(feature = "mutants")]
pub fn notices(test: fn(), left_out: Mutation) -> bool {
    MUTATION.set(left_out);
    let failed = std::panic::catch_unwind(test).is_err();
    MUTATION.set(Mutation::None);
    failed
}

pub struct End {
    pub qp: RcQp,
    pub mem: VecMemory,
    pub wcs: Wcs,
    /// Packets to this end: when, which life, bytes.
    pub inbox: VecDeque<(u64, u32, Vec<u8>)>,
}

pub struct Pair {
    pub now_us: u64,
    pub rng: Rng,
    pub faults: Faults,
    pub ends: [End; 2],
    /// Packets of other lives than this are for QPs that are gone.
    pub life: u32,
    /// Packets pushed so far, both ways.
    pub pushed: u64,
    /// `poll_transmit` gets room for up to so many packets at once.
    pub room: u64,
    pub trace: Vec<(usize, Vec<u8>)>,
    pub tracing: bool,
    /// Which ends know selective retransmission.
    pub selective: [bool; 2],
    /// One way.
    pub latency_us: u64,
    /// Bits in a microsecond that a line carries to each end; 0 for any number. What waits for it
    /// waits in a queue without end.
    pub line_mbit: u64,
    /// When the line to each end is free, in nanoseconds.
    pub line_free_ns: [u64; 2],
    /// Changes or drops what goes to an end, before all faults.
    pub between: Option<Between>,
}

/// See [`Pair::between`].
pub type Between = Box<dyn FnMut(usize, Vec<u8>) -> Option<Vec<u8>>>;

pub fn caps() -> QpCaps {
    QpCaps {
        max_send_wr: 16,
        max_recv_wr: 16,
        max_send_sge: 3,
        max_recv_sge: 3,
        max_inline_data: 64,
    }
}

pub fn config(qpn: u32, hold: bool) -> RcConfig {
    RcConfig {
        qpn,
        wc_qpn: qpn,
        caps: caps(),
        pd: PD,
        suspend_on_error: hold,
        sq_sig_all: false,
        cwnd_max_packets: 64,
    }
}

pub fn init() -> RcModify {
    let access = Access::REMOTE_WRITE.with(Access::REMOTE_READ).with(Access::REMOTE_ATOMIC);
    RcModify { state: Some(QpState::Init), access: Some(access), ..RcModify::default() }
}

pub fn rtr(peer: u32, rq_psn: u32, mtu: Mtu) -> RcModify {
    RcModify {
        state: Some(QpState::Rtr),
        dest_qpn: Some(peer),
        rq_psn: Some(rq_psn),
        mtu: Some(mtu),
        max_dest_rd_atomic: Some(4),
        min_rnr_timer: Some(12),
        ..RcModify::default()
    }
}

pub fn rts(sq_psn: u32) -> RcModify {
    RcModify {
        state: Some(QpState::Rts),
        sq_psn: Some(sq_psn),
        timeout: Some(8),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(4),
        ..RcModify::default()
    }
}

pub fn connect(qp: &mut RcQp, wcs: &mut Wcs, peer: u32, sq_psn: u32, rq_psn: u32, mtu: Mtu) {
    if qp.state() == QpState::Reset {
        qp.modify(&init(), wcs).unwrap();
    }
    qp.modify(&rtr(peer, rq_psn, mtu), wcs).unwrap();
    qp.modify(&rts(sq_psn), wcs).unwrap();
}

impl Pair {
    pub fn new(seed: u64, faults: Faults, mtu: Mtu, hold: bool) -> Pair {
        let mut rng = Rng(seed);
        let psn = [rng.next() as u32 & PSN_MASK, PSN_MASK - 20];
        Pair::with_psns(rng, faults, mtu, hold, psn)
    }

    /// A pair whose ends send these PSNs first.
    pub fn with_psns(rng: Rng, faults: Faults, mtu: Mtu, hold: bool, psn: [u32; 2]) -> Pair {
        let ends = [0, 1].map(|i| {
            let mem = VecMemory::default();
            mem.add(SRC, Access::NONE, vec![]);
            mem.add(WRITABLE, Access::REMOTE_WRITE.with(Access::LOCAL_WRITE), vec![]);
            mem.add(READABLE, Access::REMOTE_READ, vec![]);
            mem.add(DST, Access::LOCAL_WRITE, vec![]);
            mem.add(COUNTERS, Access::REMOTE_ATOMIC.with(Access::LOCAL_WRITE), vec![]);
            let mut wcs = Wcs::default();
            let mut qp = RcQp::new(config(10 + i as u32, hold));
            qp.set_mutation(MUTATION.get());
            connect(&mut qp, &mut wcs, 11 - i as u32, psn[i], psn[1 - i], mtu);
            End { qp, mem, wcs, inbox: VecDeque::new() }
        });
        Pair {
            now_us: 1_000,
            rng,
            faults,
            ends,
            life: 0,
            pushed: 0,
            room: 40,
            trace: vec![],
            tracing: false,
            selective: [false; 2],
            latency_us: 10,
            line_mbit: 0,
            line_free_ns: [0; 2],
            between: None,
        }
    }

    /// Sets which ends know selective retransmission.
    pub fn set_selective(&mut self, selective: [bool; 2]) {
        self.selective = selective;
        for (end, s) in self.ends.iter_mut().zip(selective) {
            end.qp.set_selective(s);
        }
    }

    /// Lets both ends send what they have; true if anything left.
    pub fn transmit(&mut self) -> bool {
        let mut any = false;
        for i in 0..2 {
            let room = 1 + self.rng.below(self.room) as usize;
            let End { qp, mem, wcs, .. } = &mut self.ends[i];
            let mut sink = VecSink { mem, room, packets: vec![] };
            if self.rng.chance(500) {
                qp.poll_transmit(self.now_us, &mut sink, wcs);
            } else {
                qp.poll_transmit_data(self.now_us, &mut sink, wcs);
                qp.poll_transmit_ack(&mut sink);
            }
            let packets = sink.packets;
            any |= !packets.is_empty();
            for (_, bytes) in packets {
                self.send_to(1 - i, bytes);
            }
        }
        any
    }

    pub fn send_to(&mut self, to: usize, bytes: Vec<u8>) {
        let bytes = match &mut self.between {
            Some(between) => match between(to, bytes) {
                Some(bytes) => bytes,
                None => return,
            },
            None => bytes,
        };
        self.pushed += 1;
        if self.tracing {
            self.trace.push((to, bytes.clone()));
        }
        if self.rng.chance(self.faults.loss) {
            return;
        }
        let sent_us = match self.line_mbit {
            0 => self.now_us,
            rate => {
                let free_ns = &mut self.line_free_ns[to];
                *free_ns = (*free_ns).max(self.now_us * 1000) + bytes.len() as u64 * 8000 / rate;
                free_ns.div_ceil(1000)
            }
        };
        let copies = 1 + self.rng.chance(self.faults.duplicate) as usize;
        for copy in 0..copies {
            let late = copy > 0 || self.rng.chance(self.faults.reorder);
            let at = sent_us + self.latency_us + if late { self.rng.below(400) } else { 0 };
            let inbox = &mut self.ends[to].inbox;
            let before = inbox.iter().take_while(|p| p.0 <= at).count();
            inbox.insert(before, (at, self.life, bytes.clone()));
        }
    }

    /// Delivers all packets that are due to one end.
    fn deliver(&mut self, to: usize) {
        let End { qp, mem, wcs, inbox } = &mut self.ends[to];
        while let Some((_, life, bytes)) = inbox.front().filter(|p| p.0 <= self.now_us) {
            if *life == self.life {
                qp.handle_packet(self.now_us, &Packet::parse(bytes).unwrap(), mem, wcs);
            }
            inbox.pop_front();
        }
    }

    /// One step: send, or advance the time to the next packet or deadline. False if nothing is left
    /// to happen.
    pub fn step(&mut self) -> bool {
        if self.transmit() {
            return true;
        }
        let inboxes = self.ends.iter().filter_map(|e| e.inbox.front().map(|p| p.0));
        let timers = self.ends.iter().filter_map(|e| e.qp.poll_timeout());
        let Some(next) = inboxes.chain(timers).min() else { return false };
        self.now_us = self.now_us.max(next);
        for i in 0..2 {
            self.deliver(i);
            if self.ends[i].qp.poll_timeout().is_some_and(|t| t <= self.now_us) {
                let End { qp, wcs, .. } = &mut self.ends[i];
                qp.handle_timeout(self.now_us, wcs);
            }
        }
        true
    }

    pub fn run(&mut self) {
        for _ in 0..200_000 {
            if !self.step() {
                return;
            }
        }
        panic!(
            "the pair never comes to rest: {:?} {:?}",
            self.ends[0].qp.progress(),
            self.ends[1].qp.progress()
        );
    }

    pub fn post(&mut self, end: usize, wr: &SendWr<'_>) {
        let End { qp, wcs, .. } = &mut self.ends[end];
        qp.post_send(wr, wcs).unwrap();
    }

    pub fn recv(&mut self, end: usize, wr_id: u64, sges: &[Sge]) {
        let End { qp, wcs, .. } = &mut self.ends[end];
        qp.post_recv(&RecvWr { wr_id, sges }, wcs).unwrap();
    }

    pub fn statuses(&self, end: usize) -> Vec<(u64, u32)> {
        self.ends[end].wcs.sends.iter().map(|w| (w.wr_id, w.status)).collect()
    }

    pub fn recv_statuses(&self, end: usize) -> Vec<(u64, u32)> {
        self.ends[end].wcs.recvs.iter().map(|(w, _)| (w.wr_id, w.status)).collect()
    }
}

pub fn wr<'a>(wr_id: u64, opcode: SendOpcode, sges: &'a [Sge]) -> SendWr<'a> {
    SendWr { wr_id, opcode, flags: SendFlags::SIGNALED, sges, ..SendWr::default() }
}

pub fn sge(key: u32, offset: usize, length: usize) -> Sge {
    Sge { addr: va(key, offset), length: length as u32, lkey: key }
}
