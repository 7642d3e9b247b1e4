//! A network of NICs that are as plain as devices can be, in memory and without threads: what
//! happens next is the test's to say.
//!
//! A QP that fails is in ERR and flushes; keys, QPNs, CQs and domains are a NIC's own, and the
//! numbers of one NIC mean something else on another; a dying NIC may accept a post, or refuse it
//! with any errno, and flushes late; what was executed may never be acknowledged.

mod queue;
mod verbs;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use unbroken_types::{
    Access, Gid, GidType, LinkLayer, Mtu, PathAttr, PdHandle, QpState, QpType, SendFlags,
    SendOpcode, Sge, SharedReceives, Wc, WcFlags, WcOpcode, WcStatus,
};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceAttr, DeviceCounters, DeviceEvent, DeviceQp,
    Driver, Error, EventSink, GidEntry, IndirectEntry, LimitHook, MemoryDomain, MrChange, MrKeys,
    OverrunHook, PortAttr, PortState, QpEvent, QpInit, QpModify, QpSnapshot, RecvWr, Result,
    ResumableQp, SendBatch, SendWr, Srq, SrqAttr, WindowType,
};

use queue::Queue;
use verbs::MockNic;

/// Names a NIC: the host, and which of its NICs.
pub type NicId = (usize, usize);

pub fn gid(nic: NicId) -> Gid {
    let mut bytes = [0; 16];
    (bytes[0], bytes[14], bytes[15]) = (0xfd, nic.0 as u8, nic.1 as u8);
    Gid(bytes)
}

struct Send {
    wr_id: u64,
    opcode: SendOpcode,
    signaled: bool,
    solicited: bool,
    imm_data: u32,
    remote_addr: u64,
    rkey: u32,
    sges: Vec<Sge>,
    inline: Option<Vec<u8>>,
    executed: bool,
    answer: Vec<u8>,
}

struct Recv {
    wr_id: u64,
    sges: Vec<Sge>,
}

struct Qp {
    init: QpInit,
    state: QpState,
    peer: Option<(Gid, u32)>,
    sends: VecDeque<Send>,
    recvs: VecDeque<Recv>,
    /// Completions that the NIC has not told yet.
    late: Vec<(bool, Wc, bool)>,
    /// Where it completes, if not in rings: sends, receives.
    queues: Option<[Arc<Queue>; 2]>,
    /// That it takes no receive of its SRQ any more is to be told.
    last_wqe: bool,
}

struct Nic {
    id: NicId,
    alive: bool,
    cut: bool,
    /// Posts to the dead NIC are refused with this; accepted where there is none.
    refuses: Option<i32>,
    /// After so many sends more, one is refused with EINVAL.
    takes: Option<usize>,
    sink: Arc<dyn EventSink>,
    qps: HashMap<u32, Qp>,
    regions: HashMap<u32, (PdHandle, u64, u64)>,
    next_qpn: u32,
    next_key: u32,
    next_pd: u32,
    pds: Vec<PdHandle>,
    tells_when_polled: bool,
    /// Shared with whoever has the NIC open.
    handle: Arc<()>,
}

#[derive(Default)]
struct State {
    nics: HashMap<NicId, Nic>,
    /// CQs keep the size that they are made with.
    fixed_cqs: bool,
    /// Registrations on this NIC wait until two are under way; how many are, and were at most.
    meet: Option<(NicId, usize, usize)>,
    /// CQs have queues of a provider behind them; those that there are.
    sources: bool,
    queues: Vec<std::sync::Weak<Queue>>,
    /// Sizes of this NIC's CQs do not change before something comes here; and one waits there.
    resizes: Option<(NicId, Arc<Mutex<std::sync::mpsc::Receiver<()>>>)>,
    resizing: bool,
    /// All that was executed: sender, WR of the program as the sender's NIC knows it.
    executed: u64,
}

/// The network.
#[derive(Clone, Default)]
pub struct Net(Arc<Mutex<State>>);

/// Sizes of SRQs.
pub fn srq_limits() -> DeviceAttr {
    DeviceAttr { max_srq_wr: 1024, max_srq_sge: 4, ..DeviceAttr::default() }
}

/// Bytes of the process, as a NIC sees them.
fn bytes(addr: u64, len: usize) -> impl Iterator<Item = &'static AtomicU8> {
    // SAFETY: tests register buffers of atomics that live until the process ends.
    (0..len as u64).map(move |i| unsafe { AtomicU8::from_ptr((addr + i) as *mut u8) })
}

fn load(addr: u64, len: usize) -> Vec<u8> {
    bytes(addr, len).map(|b| b.load(Ordering::Relaxed)).collect()
}

fn store(addr: u64, data: &[u8]) {
    bytes(addr, data.len()).zip(data).for_each(|(b, v)| b.store(*v, Ordering::Relaxed));
}

impl Nic {
    fn holds(&self, pd: PdHandle, key: u32, addr: u64, len: u64) -> bool {
        self.regions
            .get(&key)
            .is_some_and(|(p, a, l)| *p == pd && *a <= addr && addr + len <= a + l)
    }

    fn local(&self, pd: PdHandle, sges: &[Sge]) -> bool {
        sges.iter().all(|s| self.holds(pd, s.lkey, s.addr, s.length.into()))
    }
}

impl Qp {
    fn complete(&mut self, send: bool, wc: Wc) {
        self.late.push((send, wc, false));
    }

    fn wc(qpn: u32, wr_id: u64, status: WcStatus) -> Wc {
        Wc { wr_id, status: status as u32, qp_num: qpn, ..Wc::default() }
    }

    /// A receive for the next message.
    fn take_recv(&mut self) -> Option<Recv> {
        let Some(srq) = &self.init.srq else { return self.recvs.pop_front() };
        let mut taken = None;
        srq.take(&mut |wr| taken = Some(Recv { wr_id: wr.wr_id, sges: wr.sges.to_vec() }));
        taken
    }

    fn has_recv(&self) -> bool {
        self.init.srq.as_ref().map_or(!self.recvs.is_empty(), |srq| !srq.is_empty())
    }

    /// The oldest send fails with this, the oldest receive with that, all else is flushed.
    fn fail(&mut self, qpn: u32, first: WcStatus, first_recv: WcStatus) {
        if self.state == QpState::Err {
            return;
        }
        if self.init.srq.is_some() {
            // A message had begun to come.
            let begun = self.take_recv();
            self.recvs.extend(begun);
            self.last_wqe = true;
        }
        self.state = QpState::Err;
        let (mut status, mut recv_status) = (first, first_recv);
        let mut wcs = Vec::new();
        for s in self.sends.drain(..) {
            wcs.push((
                true,
                Qp::wc(qpn, s.wr_id, std::mem::replace(&mut status, WcStatus::WrFlushErr)),
                false,
            ));
        }
        for r in self.recvs.drain(..) {
            wcs.push((
                false,
                Qp::wc(qpn, r.wr_id, std::mem::replace(&mut recv_status, WcStatus::WrFlushErr)),
                false,
            ));
        }
        self.late.extend(wcs);
    }

    fn tell(&mut self) {
        for (send, wc, solicited) in self.late.drain(..) {
            if let Some([sends, recvs]) = &self.queues {
                (if send { sends } else { recvs }).push(wc, solicited);
                continue;
            }
            let cq = if send { &self.init.send_cq } else { &self.init.recv_cq };
            assert!(cq.offer(wc, solicited), "the CQ was made too small");
        }
    }
}

/// Scatters data over entries.
fn scatter(sges: &[Sge], mut data: &[u8]) -> bool {
    for sge in sges {
        let (here, rest) = data.split_at(data.len().min(sge.length as usize));
        store(sge.addr, here);
        data = rest;
    }
    data.is_empty()
}

impl Net {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// One whose NICs complete in queues that are polled in place of a ring, as those of the machine
    /// do; or in rings.
    pub fn new(sources: bool) -> Net {
        let net = Net::default();
        net.state().sources = sources;
        net
    }

    /// What a NIC does when it is polled.
    fn drive(&self, id: NicId) {
        let tells = std::mem::take(&mut self.state().nics.get_mut(&id).unwrap().tells_when_polled);
        if tells {
            self.tell(id, false);
        }
    }

    /// Opens a NIC.
    pub fn open(&self, id: NicId, sink: Arc<dyn EventSink>) -> Arc<dyn Device> {
        let nic = Nic {
            id,
            alive: true,
            cut: false,
            refuses: None,
            takes: None,
            sink,
            qps: HashMap::new(),
            regions: HashMap::new(),
            next_qpn: 0x100 + id.1 as u32,
            // The same numbers on each NIC, for other regions.
            next_key: 0x5000 + id.1 as u32,
            next_pd: 1 + id.1 as u32,
            pds: Vec::new(),
            tells_when_polled: false,
            handle: Arc::default(),
        };
        let _handle = nic.handle.clone();
        self.state().nics.insert(id, nic);
        Arc::new(MockNic { net: self.clone(), id, name: format!("{}/{}", id.0, id.1), _handle })
    }

    /// Whether somebody has a NIC open, or its memory.
    pub fn is_open(&self, id: NicId) -> bool {
        Arc::strong_count(&self.state().nics[&id].handle) > 1
    }

    /// The NIC dies. Its flushes come later; posts are refused with an errno, or accepted.
    pub fn kill(&self, id: NicId, refuses: Option<i32>) {
        let mut st = self.state();
        let nic = st.nics.get_mut(&id).unwrap();
        (nic.alive, nic.refuses) = (false, refuses);
        let sink = nic.sink.clone();
        for (qpn, qp) in &mut nic.qps {
            qp.tell(); // what was acknowledged is told
            qp.fail(*qpn, WcStatus::FatalErr, WcStatus::WrFlushErr);
        }
        drop(st);
        sink.event(id.1, DeviceEvent::Fatal);
    }

    /// The NIC, which works, refuses a send with EINVAL after it has taken so many more.
    pub fn refuse_one_after(&self, id: NicId, sends: usize) {
        self.state().nics.get_mut(&id).unwrap().takes = Some(sends);
    }

    /// All CQs of a NIC overrun, and it says so.
    pub fn overrun(&self, id: NicId) {
        let queues = self.state().queues.clone();
        queues.iter().filter_map(std::sync::Weak::upgrade).for_each(|queue| queue.overrun(id));
    }

    /// The NICs cannot change the size of a CQ.
    pub fn fix_cqs(&self) {
        self.state().fixed_cqs = true;
    }

    /// Registrations on the NIC wait for one another, in pairs, for 10 s at most.
    pub fn meet_at_registrations(&self, id: NicId) {
        self.state().meet = Some((id, 0, 0));
    }

    /// They wait no more.
    pub fn let_registrations_go(&self) {
        self.state().meet = None;
    }

    /// How many were under way at most.
    pub fn met(&self) -> usize {
        self.state().meet.map_or(0, |(_, _, most)| most)
    }

    /// A NIC answers no resize of a CQ until the returned sender sends or is dropped.
    pub fn hang_at_resize(&self, id: NicId) -> std::sync::mpsc::Sender<()> {
        let (answer, hangs) = std::sync::mpsc::channel();
        self.state().resizes = Some((id, Arc::new(Mutex::new(hangs))));
        answer
    }

    /// Whether there is such a demand.
    pub fn is_resizing(&self) -> bool {
        self.state().resizing
    }

    /// A NIC is asked for another size of a CQ.
    fn wait_at_resize(&self, id: NicId) {
        let hangs = self.state().resizes.clone().filter(|(at, _)| *at == id);
        if let Some((_, hangs)) = hangs {
            self.state().resizing = true;
            let _answer = hangs.lock().unwrap().recv();
            self.state().resizing = false;
        }
    }

    /// A registration begins on a NIC.
    fn wait_for_another(&self, id: NicId) {
        let deadline = Instant::now() + Duration::from_secs(10);
        let step = |by: isize| match &mut self.state().meet {
            Some((at, now, most)) if *at == id => {
                *now = now.saturating_add_signed(by);
                *most = (*most).max(*now);
                *most >= 2
            }
            _ => true,
        };
        let mut met = step(1);
        while !met && Instant::now() < deadline {
            std::thread::yield_now();
            met = step(0);
        }
        step(-1);
    }

    /// Nothing passes the NIC's cable any more.
    pub fn cut(&self, id: NicId) {
        self.state().nics.get_mut(&id).unwrap().cut = true;
    }

    /// A NIC that works tells what it has not told yet; a dead one, too, if it is `late`.
    pub fn tell(&self, id: NicId, late: bool) {
        let mut st = self.state();
        let nic = st.nics.get_mut(&id).unwrap();
        if nic.alive || late {
            for (qpn, qp) in &mut nic.qps {
                // The event before the last completions: who drains must look at the CQ after it.
                if std::mem::take(&mut qp.last_wqe) {
                    nic.sink
                        .event(id.1, DeviceEvent::Qp { qpn: *qpn, event: QpEvent::LastWqeReached });
                }
                qp.tell();
            }
        }
    }

    /// It tells so when one of its CQs is polled next.
    pub fn tell_when_polled(&self, id: NicId) {
        self.state().nics.get_mut(&id).unwrap().tells_when_polled = true;
    }

    /// The transport of a QP gives up.
    pub fn time_out(&self, id: NicId, qpn: u32) {
        let mut st = self.state();
        if let Some(qp) = st.nics.get_mut(&id).unwrap().qps.get_mut(&qpn) {
            qp.fail(qpn, WcStatus::RetryExcErr, WcStatus::WrFlushErr);
        }
    }

    /// Registered keys of a NIC.
    pub fn regions(&self, id: NicId) -> usize {
        self.state().nics[&id].regions.len()
    }

    /// Where a NIC's region lies.
    pub fn region(&self, id: NicId, key: u32) -> (u64, u64) {
        let (_, addr, len) = self.state().nics[&id].regions[&key];
        (addr, len)
    }

    /// Messages executed by anyone.
    pub fn executed(&self) -> u64 {
        self.state().executed
    }

    /// All QPs there are.
    pub fn qps(&self) -> Vec<(NicId, u32)> {
        let st = self.state();
        let mut all: Vec<_> =
            st.nics.values().flat_map(|n| n.qps.keys().map(|q| (n.id, *q))).collect();
        all.sort_unstable();
        all
    }

    fn find(st: &State, gid: Gid) -> Option<NicId> {
        st.nics.keys().copied().find(|id| self::gid(*id) == gid)
    }

    /// The oldest send of a QP that was not executed reaches the peer, if it can.
    pub fn execute(&self, id: NicId, qpn: u32) {
        let mut st = self.state();
        let st = &mut *st;
        let Some((i, peer, peer_qpn)) = st.ready(id, qpn) else { return };
        let nic = &st.nics[&id];
        let (qp, wr) = (&nic.qps[&qpn], &nic.qps[&qpn].sends[i]);
        let pd = qp.init.pd;
        let gather = |sges: &[Sge]| {
            sges.iter().flat_map(|s| load(s.addr, s.length as usize)).collect::<Vec<_>>()
        };
        if !nic.local(pd, &wr.sges) {
            return st.own_error(id, qpn, WcStatus::LocProtErr);
        }
        let data = wr.inline.clone().unwrap_or_else(|| gather(&wr.sges));
        let (opcode, imm, va, rkey, solicited) =
            (wr.opcode, wr.imm_data, wr.remote_addr, wr.rkey, wr.solicited);
        let their = st.nics.get_mut(&peer).unwrap();
        let their_pd = their.qps[&peer_qpn].init.pd;
        let needs_key =
            matches!(opcode, SendOpcode::Write | SendOpcode::WriteImm | SendOpcode::Read);
        if needs_key && !their.holds(their_pd, rkey, va, data.len() as u64) {
            st.own_error(id, qpn, WcStatus::RemAccessErr);
            return st.responder_error(peer, peer_qpn);
        }
        let mut answer = Vec::new();
        if opcode == SendOpcode::Read {
            answer = load(va, data.len());
        } else if opcode != SendOpcode::Send && opcode != SendOpcode::SendImm {
            store(va, &data);
        }
        if opcode.consumes_receive() {
            let Some(recv) = their.qps.get_mut(&peer_qpn).unwrap().take_recv() else { return };
            let sges = if opcode == SendOpcode::WriteImm { &[][..] } else { &recv.sges };
            assert!(their.local(their_pd, sges), "a receive with keys of another NIC");
            assert!(opcode == SendOpcode::WriteImm || scatter(sges, &data));
            let with_imm = matches!(opcode, SendOpcode::WriteImm | SendOpcode::SendImm);
            let wc = Wc {
                opcode: if opcode == SendOpcode::WriteImm {
                    WcOpcode::RecvRdmaWithImm
                } else {
                    WcOpcode::Recv
                } as u32,
                byte_len: data.len() as u32,
                imm_data: imm,
                wc_flags: if with_imm { WcFlags::WITH_IMM } else { 0 },
                ..Qp::wc(peer_qpn, recv.wr_id, WcStatus::Success)
            };
            their.qps.get_mut(&peer_qpn).unwrap().late.push((false, wc, solicited));
        }
        st.executed += 1;
        let wr = &mut st.nics.get_mut(&id).unwrap().qps.get_mut(&qpn).unwrap().sends[i];
        (wr.executed, wr.answer) = (true, answer);
    }

    /// The oldest send of a QP is acknowledged, if it was executed and the answer can come.
    pub fn acknowledge(&self, id: NicId, qpn: u32) {
        let mut st = self.state();
        let peer_reaches = {
            let Some(qp) = st.nics[&id].qps.get(&qpn) else { return };
            let peer = qp.peer.and_then(|(gid, _)| Net::find(&st, gid));
            peer.is_some_and(|peer| !st.nics[&peer].cut && st.nics[&peer].alive)
        };
        let nic = st.nics.get_mut(&id).unwrap();
        let Some(qp) = nic.qps.get_mut(&qpn).filter(|q| q.state == QpState::Rts) else { return };
        if !nic.alive || nic.cut || !peer_reaches || !qp.sends.front().is_some_and(|s| s.executed) {
            return;
        }
        let wr = qp.sends.pop_front().unwrap();
        if wr.opcode == SendOpcode::Read {
            assert!(scatter(&wr.sges, &wr.answer));
        }
        if wr.signaled || qp.init.sq_sig_all {
            let wc =
                Wc { byte_len: wr.answer.len() as u32, ..Qp::wc(qpn, wr.wr_id, WcStatus::Success) };
            qp.complete(true, wc);
        }
    }
}

impl State {
    /// A QP's next send and where it goes, if it can go.
    fn ready(&self, id: NicId, qpn: u32) -> Option<(usize, NicId, u32)> {
        let nic = &self.nics[&id];
        let qp = nic.qps.get(&qpn).filter(|q| q.state == QpState::Rts && nic.alive && !nic.cut)?;
        let (gid, peer_qpn) = qp.peer?;
        let peer = Net::find(self, gid)?;
        let their = &self.nics[&peer];
        let there = their.qps.get(&peer_qpn).filter(|_| their.alive && !their.cut)?;
        let listens = matches!(there.state, QpState::Rtr | QpState::Rts)
            && there.peer == Some((self::gid(id), qpn));
        let i = qp.sends.iter().position(|s| !s.executed).filter(|_| listens)?;
        let waits = qp.sends[i].opcode.consumes_receive() && !there.has_recv();
        (!waits).then_some((i, peer, peer_qpn))
    }

    fn own_error(&mut self, id: NicId, qpn: u32, status: WcStatus) {
        let qp = self.nics.get_mut(&id).unwrap().qps.get_mut(&qpn).unwrap();
        // What was executed is acknowledged by the error.
        while qp.sends.front().is_some_and(|s| s.executed) {
            let wr = qp.sends.pop_front().unwrap();
            if wr.signaled || qp.init.sq_sig_all {
                qp.complete(true, Qp::wc(qpn, wr.wr_id, WcStatus::Success));
            }
        }
        qp.fail(qpn, status, WcStatus::WrFlushErr);
    }

    fn responder_error(&mut self, id: NicId, qpn: u32) {
        let nic = self.nics.get_mut(&id).unwrap();
        nic.qps.get_mut(&qpn).unwrap().fail(qpn, WcStatus::WrFlushErr, WcStatus::WrFlushErr);
        nic.sink.event(id.1, DeviceEvent::Qp { qpn, event: QpEvent::AccessError });
    }
}

/// Keeps events.
#[derive(Default)]
pub struct Events(Mutex<Vec<DeviceEvent>>);

impl Events {
    pub fn take_all(&self) -> Vec<DeviceEvent> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    /// Without those that say that there is something to look at.
    pub fn take(&self) -> Vec<DeviceEvent> {
        let hint =
            |e: &DeviceEvent| matches!(e, DeviceEvent::QpChanged { .. } | DeviceEvent::CqOverran);
        self.take_all().into_iter().filter(|event| !hint(event)).collect()
    }
}

impl EventSink for Events {
    fn event(&self, _device: usize, event: DeviceEvent) {
        self.0.lock().unwrap().push(event);
    }
}
