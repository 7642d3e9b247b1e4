//! Software NICs whose powers are hidden: real packets, threads and faults under the adapter.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use unbroken_fabric::{now_us, Fabric, Fault, Runtime};
use unbroken_resumable::{EventInterceptor, LogicalMemory, ResumableDevice};
use unbroken_softnic::{Config, Nic, SoftNics};
use unbroken_types::{
    Access, Gid, Messages, Mtu, PathAttr, PdHandle, PeerDone, QpCaps, QpState, QpType, SendFlags,
    SendOpcode, Sge, Wc, WcStatus,
};
use unbroken_verbs::{
    Backlog, Capabilities, CompChannel, Cq, Device, DeviceCounters, DeviceEvent, DeviceQp, Error,
    EventSink, LimitHook, MemoryDomain, OverrunHook, PortAttr, QpInit, QpModify, RcModify, RecvWr,
    RemoteKeys, RemoteNic, Result, ResumableQp, SendWr, Srq, SrqAttr, UdDest,
};

const PATIENCE: Duration = Duration::from_secs(20);
const COUNT: u64 = 3000;
const DEPTH: u64 = 32;

/// A softnic as a plain device.
struct Hidden(Arc<Nic>);

impl Device for Hidden {
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }
    fn name(&self) -> &str {
        self.0.name()
    }
    fn gid(&self) -> Gid {
        self.0.gid()
    }
    fn port(&self, port: u8) -> Result<PortAttr> {
        self.0.port(port)
    }
    fn alive(&self) -> bool {
        self.0.alive()
    }
    fn usable(&self) -> bool {
        self.0.usable()
    }
    fn drain(&self) {
        self.0.drain();
    }
    fn memory(&self) -> Arc<dyn MemoryDomain> {
        self.0.memory()
    }
    fn gid_index(&self) -> u8 {
        self.0.gid_index()
    }
    fn check_path(&self, path: &PathAttr) -> Result<()> {
        self.0.check_path(path)
    }
    fn create_channel(&self) -> Result<Arc<CompChannel>> {
        self.0.create_channel()
    }
    fn create_cq(
        &self,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        self.0.create_cq(entries, channel, on_overrun)
    }
    fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, on_limit: LimitHook) -> Result<Arc<Srq>> {
        self.0.create_srq(pd, sizes, on_limit)
    }
    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        assert!(!init.suspend_on_error && init.wc_qpn.is_none());
        self.0.create_qp(init)
    }
    fn create_holding_qp(&self, _init: &QpInit) -> Result<Arc<dyn ResumableQp>> {
        Err(Error::unsupported("hidden"))
    }
    fn counters(&self) -> DeviceCounters {
        self.0.counters()
    }
}

#[derive(Default)]
struct Events(Mutex<Vec<DeviceEvent>>);

impl EventSink for Events {
    fn event(&self, _: usize, event: DeviceEvent) {
        self.0.lock().unwrap().push(event);
    }
}

fn spawn(name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
}

struct Host {
    nics: Vec<ResumableDevice>,
    memory: Arc<LogicalMemory>,
    pd: PdHandle,
    buffer: &'static [AtomicU64],
    lkey: u32,
    rkey: u32,
    events: Arc<Events>,
    _soft: Arc<SoftNics>,
}

impl Host {
    fn new(runtime: Runtime, name: &str, words: usize) -> Host {
        let soft = SoftNics::new(Config::host(runtime, name)).unwrap();
        let (memory, events) = (LogicalMemory::new(2, spawn), Arc::new(Events::default()));
        let open = |i| {
            let interceptor = EventInterceptor::new(events.clone());
            let device = Arc::new(Hidden(soft.open(i, interceptor.clone()).unwrap()));
            ResumableDevice::new(
                i,
                device,
                &interceptor,
                &memory,
                unbroken_resumable::Host { spawn, now_us },
            )
            .unwrap()
        };
        let nics = (0..2).map(open).collect();
        let view = memory.of(0);
        let pd = view.alloc_pd().unwrap();
        let buffer: &'static [AtomicU64] =
            (0..words).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().leak();
        let addr = buffer.as_ptr() as u64;
        let keys = view.reg_mr(pd, addr, 8 * words as u64, addr, Access(15)).unwrap();
        Host { nics, memory, pd, buffer, lkey: keys.lkey, rkey: keys.rkey, events, _soft: soft }
    }

    fn addr(&self, word: u64) -> u64 {
        self.buffer[word as usize..].as_ptr() as u64
    }

    fn sge(&self, word: u64) -> Sge {
        Sge { addr: self.addr(word), length: 8, lkey: self.lkey }
    }

    fn init(&self, cq: &Arc<Cq>, qp_type: QpType, wc_qpn: Option<u32>) -> QpInit {
        let (wrs, sges) = (DEPTH as u32, 1);
        QpInit {
            qp_type,
            caps: QpCaps {
                max_send_wr: wrs,
                max_recv_wr: wrs,
                max_send_sge: sges,
                max_recv_sge: sges,
                max_inline_data: 0,
            },
            pd: self.pd,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            sq_sig_all: false,
            suspend_on_error: qp_type == QpType::Rc,
            wc_qpn,
            home: None,
            local_keys_of: Some(0),
            control: false,
            standby: false,
            lane: None,
            management: false,
        }
    }
}

fn to(qp: &dyn ResumableQp, rc: RcModify, dest: Option<Gid>, qkey: Option<u32>) {
    qp.modify(&QpModify { rc, path: dest.map(PathAttr::new), qkey, ..QpModify::default() })
        .unwrap();
}

fn ready_to_receive(qp: &dyn ResumableQp, dest_qpn: u32, gid: Gid) {
    let rc = RcModify {
        state: Some(QpState::Rtr),
        dest_qpn: Some(dest_qpn),
        rq_psn: Some(7),
        mtu: Some(Mtu::B1024),
        min_rnr_timer: Some(1),
        max_dest_rd_atomic: Some(4),
        ..RcModify::default()
    };
    to(qp, rc, Some(gid), None);
}

fn ready_to_send(qp: &dyn ResumableQp) {
    let rc = RcModify {
        state: Some(QpState::Rts),
        sq_psn: Some(7),
        timeout: Some(10),
        retry_cnt: Some(3),
        rnr_retry: Some(7),
        max_rd_atomic: Some(4),
        ..RcModify::default()
    };
    to(qp, rc, None, None);
}

fn init_rc(qp: &dyn ResumableQp) {
    to(
        qp,
        RcModify { state: Some(QpState::Init), access: Some(Access(15)), ..RcModify::default() },
        None,
        None,
    );
}

fn wr(wr_id: u64, opcode: SendOpcode, sges: &[Sge]) -> SendWr<'_> {
    SendWr { wr_id, opcode, flags: SendFlags::SIGNALED, sges, ..SendWr::default() }
}

fn poll(cq: &Cq) -> Vec<Wc> {
    let mut wcs = [Wc::default(); 16];
    let n = cq.poll(&mut wcs).unwrap();
    wcs[..n].to_vec()
}

/// The sender: every third message is a WRITE, in front of the SEND that tells of it.
struct Sender {
    posted: u64,
    done: u64,
}

impl Sender {
    fn post(&mut self, a: &Host, b: &Host, qp: &dyn ResumableQp) {
        while self.posted < COUNT && self.posted < self.done + DEPTH {
            let i = self.posted;
            a.buffer[(i % DEPTH) as usize].store(i + 1, Ordering::Relaxed);
            let sges = [a.sge(i % DEPTH)];
            let mut wr = wr(
                i,
                if i.is_multiple_of(3) { SendOpcode::Write } else { SendOpcode::Send },
                &sges,
            );
            (wr.remote_addr, wr.rkey) = (b.addr(DEPTH + i % DEPTH), b.rkey);
            match qp.post_send(&wr) {
                Ok(()) => self.posted += 1,
                Err(e) => return assert_eq!(e.errno(), libc::EIO, "{e}"),
            }
        }
    }

    fn poll(&mut self, cq: &Cq) {
        for wc in poll(cq) {
            assert_eq!((wc.wr_id, wc.status), (self.done, WcStatus::Success as u32), "{wc:?}");
            self.done += 1;
        }
    }
}

struct Receiver {
    posted: u64,
    done: u64,
    next: u64,
}

impl Receiver {
    fn post(&mut self, b: &Host, qp: &dyn ResumableQp) {
        while self.posted < self.done + DEPTH {
            let sges = [b.sge(self.posted % DEPTH)];
            if qp.post_recv(&RecvWr { wr_id: self.posted, sges: &sges }).is_err() {
                return;
            }
            self.posted += 1;
        }
    }

    fn poll(&mut self, b: &Host, cq: &Cq) {
        for wc in poll(cq) {
            assert_eq!((wc.wr_id, wc.status), (self.done, WcStatus::Success as u32), "{wc:?}");
            self.next += u64::from(self.next.is_multiple_of(3));
            let value = b.buffer[(self.done % DEPTH) as usize].load(Ordering::Relaxed);
            assert_eq!(value, self.next + 1, "messages come in order, once");
            (self.done, self.next) = (self.done + 1, self.next + 1);
        }
    }
}

fn quiesce(qp: &dyn ResumableQp) -> Backlog {
    let start = Instant::now();
    loop {
        match qp.quiesce() {
            Ok(backlog) => return backlog,
            Err(e) => assert!(e.errno() == libc::EAGAIN && start.elapsed() < PATIENCE, "{e}"),
        }
        std::thread::yield_now();
    }
}

/// Fresh QPs on NIC 1 take over.
fn switch(
    hosts: [&Host; 2],
    cqs: [&Arc<Cq>; 2],
    qps: &mut [Arc<dyn ResumableQp>; 2],
    numbers: [u32; 2],
) {
    let mut held = [quiesce(&*qps[0]), quiesce(&*qps[1])];
    for i in [0, 1] {
        let fresh = hosts[i].nics[1]
            .create_holding_qp(&hosts[i].init(cqs[i], QpType::Rc, Some(numbers[i])))
            .unwrap();
        qps[i].destroy();
        qps[i] = fresh;
        init_rc(&*qps[i]);
        let recvs = std::mem::take(&mut held[i].recvs);
        qps[i].adopt(Backlog { recvs, ..Backlog::default() }).unwrap();
    }
    let counts: Vec<(Messages, Messages)> =
        held.iter().map(|b| (b.executed, b.completed)).collect();
    for i in [0, 1] {
        held[i].mark_executed(PeerDone::Receives(counts[1 - i].0.receives - counts[i].1.receives));
        // The peer has told its keys.
        let keys = Arc::new(RemoteKeys::default());
        assert_eq!(hosts[1 - i].memory.fill_all(), 0);
        keys.insert(hosts[1 - i].memory.export());
        qps[i].set_remote(&RemoteNic { keys, default: 0, nic: 1 });
        ready_to_receive(&*qps[i], qps[1 - i].qpn(), hosts[1 - i].nics[1].gid());
        qps[i].adopt(std::mem::take(&mut held[i])).unwrap();
        ready_to_send(&*qps[i]);
    }
}

fn stream(fault: &str) {
    let dir = tempfile::tempdir().unwrap();
    let runtime = || Runtime::at(dir.path()).unwrap();
    let fabric = Fabric::open(&runtime()).unwrap();
    let (a, b) =
        (Host::new(runtime(), "a", DEPTH as usize), Host::new(runtime(), "b", 2 * DEPTH as usize));
    let cqs = [Cq::new(256, None), Cq::new(256, None)];
    let make =
        |host: &Host, cq| host.nics[0].create_holding_qp(&host.init(cq, QpType::Rc, None)).unwrap();
    let mut qps = [make(&a, &cqs[0]), make(&b, &cqs[1])];
    let numbers = [qps[0].qpn(), qps[1].qpn()];
    qps.iter().for_each(|qp| init_rc(&**qp));
    ready_to_receive(&*qps[0], numbers[1], b.nics[0].gid());
    ready_to_receive(&*qps[1], numbers[0], a.nics[0].gid());
    qps.iter().for_each(|qp| ready_to_send(&**qp));
    let (mut sender, mut receiver) =
        (Sender { posted: 0, done: 0 }, Receiver { posted: 0, done: 0, next: 0 });
    let (start, mut struck, mut moved) = (Instant::now(), false, false);
    while sender.done < COUNT {
        receiver.post(&b, &*qps[1]);
        sender.post(&a, &b, &*qps[0]);
        sender.poll(&cqs[0]);
        receiver.poll(&b, &cqs[1]);
        if !struck && sender.done > COUNT / 2 {
            struck = true;
            fabric.set(&fault.parse::<Fault>().unwrap(), None).unwrap();
        }
        let told = |e: &DeviceEvent| matches!(e, DeviceEvent::Fatal | DeviceEvent::QpFailed { .. });
        if struck && !moved && a.events.0.lock().unwrap().iter().any(told) {
            moved = true;
            switch([&a, &b], [&cqs[0], &cqs[1]], &mut qps, numbers);
        }
        assert!(start.elapsed() < PATIENCE, "{fault}: {} of {COUNT}, moved {moved}", sender.done);
    }
    assert!(moved, "{fault}: nothing was to be survived");
    assert!(a.nics[1].counters().tx_bytes > 0);
}

#[test]
fn a_stream_goes_on_when_its_nic_dies() {
    stream("nic a/0 dead");
}

#[test]
fn a_stream_goes_on_when_its_transport_gives_up() {
    stream("cable a/0 cut");
}

/// UD passes through: a datagram with its GRH and the number of the sender, and an event for it.
#[test]
fn datagrams_pass_through_and_wake_who_waits() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = || Runtime::at(dir.path()).unwrap();
    let (a, b) = (Host::new(runtime(), "a", 16), Host::new(runtime(), "b", 16));
    let channel = CompChannel::new().unwrap();
    let cqs = [Cq::new(64, None), Cq::new(64, Some(channel.clone()))];
    let make =
        |host: &Host, cq| host.nics[0].create_holding_qp(&host.init(cq, QpType::Ud, None)).unwrap();
    let qps = [make(&a, &cqs[0]), make(&b, &cqs[1])];
    for qp in &qps {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let sq_psn = (state == QpState::Rts).then_some(0);
            let qkey = (state == QpState::Init).then_some(5);
            to(&**qp, RcModify { state: Some(state), sq_psn, ..RcModify::default() }, None, qkey);
        }
    }
    let room = Sge { length: 48, ..b.sge(0) };
    qps[1].post_recv(&RecvWr { wr_id: 8, sges: &[room] }).unwrap();
    cqs[1].set_cookie(6);
    cqs[1].req_notify(false);
    assert!(poll(&cqs[1]).is_empty());
    a.buffer[0].store(77, Ordering::Relaxed);
    let sges = [a.sge(0)];
    let ud = Some(UdDest {
        gid: b.nics[0].gid(),
        qpn: qps[1].qpn(),
        qkey: 5,
        grh: true,
        sgid_index: 0,
        ..UdDest::default()
    });
    qps[0].post_send(&SendWr { ud, ..wr(3, SendOpcode::Send, &sges) }).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(channel.get_event().unwrap()));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(6));
    let wc = poll(&cqs[1])[0];
    assert_eq!((wc.wr_id, wc.status, wc.byte_len), (8, 0, 48));
    assert_eq!((wc.qp_num, wc.src_qp), (qps[1].qpn(), qps[0].qpn()));
    assert_eq!(b.buffer[5].load(Ordering::Relaxed), 77, "behind the GRH");
    assert_eq!(qps[0].quiesce().unwrap_err().errno(), libc::EOPNOTSUPP);
}
