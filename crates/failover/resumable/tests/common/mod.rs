//! Two hosts over the mock network, and a switch as the executor makes it, without its messages.
#![allow(dead_code)] // each test file uses a part of it

pub mod mock;

use mock::{gid, Events, Net, NicId};
use std::cell::RefCell;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_resumable::{EventInterceptor, LogicalMemory, ResumableDevice};
use unbroken_types::{
    Access, Messages, Mtu, PathAttr, PdHandle, PeerDone, QpCaps, QpState, QpType, SendFlags,
    SendOpcode, Sge, Wc,
};
use unbroken_verbs::{
    Backlog, CompChannel, Cq, Device, KeyAnswer, MemoryDomain, MrKeys, QpInit, QpModify, RcModify,
    RemoteKeys, RemoteNic, Result, ResumableQp, SendWr, Srq, SrqAttr,
};

/// The longest that a QP takes to stop.
const PATIENCE: Duration = Duration::from_secs(20);
pub const NICS: usize = 3;
pub const CAPS: QpCaps = QpCaps {
    max_send_wr: 8,
    max_recv_wr: 6,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 16,
};

pub struct Rng(pub u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % n
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

fn spawn(name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
}

fn no_threads(_name: &str, _body: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
    Err(std::io::Error::other("this test has no threads"))
}

thread_local! {
    /// Called where a thread that delivers completions asks for the time.
    pub static WHILE_DELIVERING: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
}

fn now_us() -> u64 {
    WHILE_DELIVERING.with_borrow(|hook| hook.iter().for_each(|hook| hook()));
    1
}

/// A host: its NICs, and the memory over them.
pub struct Host {
    pub net: Net,
    pub number: usize,
    pub memory: Arc<LogicalMemory>,
    pub view: Arc<dyn MemoryDomain>,
    pub nics: Vec<ResumableDevice>,
    pub events: Arc<Events>,
    pub pd: PdHandle,
    pub buffer: &'static [AtomicU8],
    pub keys: MrKeys,
    /// Regions that nobody uses, so that the numbers of the NICs drift apart.
    _others: Vec<MrKeys>,
}

impl Host {
    /// With a buffer that is registered on NIC 0; on the others by threads of its own, or when it
    /// is needed.
    pub fn new(net: &Net, number: usize, bytes: usize, threads: bool) -> Host {
        let spawn = if threads { spawn } else { no_threads };
        let memory = LogicalMemory::new(NICS, spawn);
        let events = Arc::new(Events::default());
        let open = |index| {
            let interceptor = EventInterceptor::new(events.clone());
            let device = net.open((number, index), interceptor.clone());
            ResumableDevice::new(
                index,
                device,
                &interceptor,
                &memory,
                unbroken_resumable::Host { spawn, now_us },
            )
            .unwrap()
        };
        let nics: Vec<ResumableDevice> = (0..NICS).map(open).collect();
        let view = memory.of(0);
        let pd = view.alloc_pd().unwrap();
        let buffer: &'static [AtomicU8] =
            (0..bytes).map(|_| AtomicU8::new(0)).collect::<Vec<_>>().leak();
        let reg = |view: &Arc<dyn MemoryDomain>, len: u64| {
            let addr = buffer.as_ptr() as u64;
            view.reg_mr(pd, addr, len, addr, Access(15)).unwrap()
        };
        let others = vec![reg(&view, 1), reg(&memory.of(1), 1)];
        let keys = reg(&view, bytes as u64);
        Host {
            net: net.clone(),
            number,
            memory,
            view,
            nics,
            events,
            pd,
            buffer,
            keys,
            _others: others,
        }
    }

    pub fn id(&self, nic: usize) -> NicId {
        (self.number, nic)
    }

    /// An SRQ of an application.
    pub fn srq(&self, max_wr: u32) -> Arc<Srq> {
        Srq::new(&mock::srq_limits(), self.pd, SrqAttr { max_wr, max_sge: 2, limit: 0 }, || {})
            .unwrap()
    }

    pub fn addr(&self, at: usize) -> u64 {
        self.buffer[at..].as_ptr() as u64
    }

    pub fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.addr(at), length: len as u32, lkey: self.keys.lkey }
    }

    pub fn fill(&self, at: usize, data: &[u8]) {
        self.buffer[at..].iter().zip(data).for_each(|(to, v)| to.store(*v, Ordering::Relaxed));
    }

    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        self.buffer[at..at + len].iter().map(|b| b.load(Ordering::Relaxed)).collect()
    }
}

/// One end of a logical QP whose default NIC is 0.
pub struct End {
    /// Where its receives come from, if not from itself.
    pub srq: Option<Arc<Srq>>,
    pub qp: Arc<dyn ResumableQp>,
    pub qpn: u32,
    pub nic: usize,
    pub cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    pub init: QpInit,
    /// What this host knows of the peer's keys.
    pub keys: Arc<RemoteKeys>,
    completed: Messages,
    executed: Messages,
}

impl End {
    pub fn new(host: &Host, one_cq: bool, channel: Option<Arc<CompChannel>>) -> End {
        End::with_srq(host, one_cq, channel, None)
    }

    pub fn with_srq(
        host: &Host,
        one_cq: bool,
        channel: Option<Arc<CompChannel>>,
        srq: Option<Arc<Srq>>,
    ) -> End {
        let cq = Cq::new(256, channel);
        let recv_cq = if one_cq { cq.clone() } else { Cq::new(256, None) };
        End::over(host, cq, recv_cq, srq)
    }

    pub fn over(host: &Host, cq: Arc<Cq>, recv_cq: Arc<Cq>, srq: Option<Arc<Srq>>) -> End {
        let init = QpInit {
            qp_type: QpType::Rc,
            caps: CAPS,
            pd: host.pd,
            send_cq: cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: srq.clone(),
            sq_sig_all: false,
            suspend_on_error: true,
            wc_qpn: None,
            home: None,
            local_keys_of: Some(0),
            control: false,
            standby: false,
            lane: None,
            management: false,
        };
        let qp = host.nics[0].create_holding_qp(&init).unwrap();
        let qpn = qp.qpn();
        // The later lives of one end are made ahead of their use.
        let standby = srq.is_none() && host.number == 0;
        let init = QpInit { wc_qpn: Some(qpn), standby, ..init };
        let (completed, executed) = Default::default();
        End { srq, qp, qpn, nic: 0, cq, recv_cq, init, keys: Arc::default(), completed, executed }
    }

    fn to(&self, rc: RcModify, dest: Option<NicId>) -> Result<()> {
        self.qp.modify(&QpModify {
            rc,
            path: dest.map(|nic| PathAttr::new(gid(nic))),
            ..QpModify::default()
        })
    }

    pub fn poll(&self, cq: &Cq) -> Vec<Wc> {
        let mut wcs = [Wc::default(); 64];
        let n = cq.poll(&mut wcs).unwrap();
        wcs[..n].to_vec()
    }
}

pub fn init() -> RcModify {
    RcModify { state: Some(QpState::Init), access: Some(Access(15)), ..RcModify::default() }
}

fn rtr(dest_qpn: u32) -> RcModify {
    RcModify {
        state: Some(QpState::Rtr),
        dest_qpn: Some(dest_qpn),
        rq_psn: Some(0),
        mtu: Some(Mtu::B1024),
        min_rnr_timer: Some(1),
        max_dest_rd_atomic: Some(4),
        ..RcModify::default()
    }
}

fn rts() -> RcModify {
    RcModify {
        state: Some(QpState::Rts),
        sq_psn: Some(0),
        timeout: Some(14),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(4),
        ..RcModify::default()
    }
}

/// Connects two fresh ends.
pub fn connect(hosts: &[Host; 2], ends: &[End; 2]) {
    ends.iter().for_each(|end| end.to(init(), None).unwrap());
    for i in [0, 1] {
        ends[i].to(rtr(ends[1 - i].qp.qpn()), Some(hosts[1 - i].id(ends[1 - i].nic))).unwrap();
    }
    ends.iter().for_each(|end| end.to(rts(), None).unwrap());
}

/// What a switch does between the two ends, on the NICs of one rail. `turns` is called while a QP
/// takes its time to stop.
pub fn switch(
    hosts: &[Host; 2],
    ends: &mut [End; 2],
    nic: usize,
    mut turns: impl FnMut(&[Host; 2]),
) {
    let mut held: Vec<Backlog> = Vec::new();
    for end in ends.iter_mut() {
        let start = Instant::now();
        let backlog = loop {
            match end.qp.quiesce() {
                Ok(backlog) => break backlog,
                Err(e) => {
                    let waits = e.errno() == libc::EAGAIN && start.elapsed() < PATIENCE;
                    assert!(waits, "quiesce: {e}");
                }
            }
            // A thread of the device may have its command.
            std::thread::yield_now();
            turns(hosts);
        };
        assert!(!backlog.exact);
        end.completed += backlog.completed;
        end.executed += backlog.executed;
        held.push(backlog);
    }
    for (end, (host, backlog)) in ends.iter_mut().zip(hosts.iter().zip(&mut held)) {
        let fresh = host.nics[nic].create_holding_qp(&end.init).unwrap();
        end.qp.destroy();
        (end.qp, end.nic) = (fresh, nic);
        end.to(init(), None).unwrap();
        let recvs = std::mem::take(&mut backlog.recvs);
        end.qp.adopt(Backlog { recvs, ..Backlog::default() }).unwrap();
    }
    for i in [0, 1] {
        let done = ends[1 - i].executed.receives - ends[i].completed.receives;
        held[i].mark_executed(PeerDone::Receives(done));
        let remote = RemoteNic { keys: ends[i].keys.clone(), default: 0, nic: nic as u8 };
        ends[i].qp.set_remote(&remote);
        ends[i].to(rtr(ends[1 - i].qp.qpn()), Some(hosts[1 - i].id(nic))).unwrap();
        ends[i].qp.adopt(std::mem::take(&mut held[i])).unwrap();
    }
    ends.iter().for_each(|end| end.to(rts(), None).unwrap());
}

/// The two ends answer each other's questions about keys.
pub fn exchange_keys(hosts: &[Host; 2], ends: &[End; 2]) {
    for i in [0, 1] {
        for (default, rkey) in ends[i].keys.take_wanted() {
            match hosts[1 - i].memory.answer(default.into(), rkey) {
                KeyAnswer::Known(row) => ends[i].keys.insert([row]),
                KeyAnswer::Later => ends[i].keys.ask_again(),
                KeyAnswer::NoRegion => ends[i].keys.remove(default, rkey),
            }
        }
    }
}

pub fn send_wr<'a>(wr_id: u64, opcode: SendOpcode, signaled: bool, sges: &'a [Sge]) -> SendWr<'a> {
    SendWr {
        wr_id,
        opcode,
        flags: if signaled { SendFlags::SIGNALED } else { SendFlags::default() },
        sges,
        ..SendWr::default()
    }
}
