//! Two hosts of an emulated network in one process, each with its own NICs.
#![allow(dead_code)] // each test file uses a part of it

use std::net::UdpSocket;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use unbroken_fabric::{DeviceKind, Fabric, Fault, NicKind, NicName, Runtime, Shape};
use unbroken_softnic::{Config, Nic, SoftNics};
use unbroken_types::{
    Access, Gid, Mtu, PathAttr, PdHandle, QpCaps, QpState, QpType, SendFlags, SendOpcode, Sge, Wc,
    WcStatus,
};
use unbroken_verbs::{
    CompChannel, Cq, Device, DeviceEvent, DeviceQp, EventSink, MrKeys, QpInit, QpModify, RcModify,
    RecvWr, Result, ResumableQp, SendWr,
};
use unbroken_wire::ROCE_PORT;

/// How long anything may take before a test calls it lost.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub const ALL: Access = Access(15);

/// Keeps events and lets tests wait for them.
#[derive(Default)]
pub struct Events {
    list: Mutex<Vec<(usize, DeviceEvent)>>,
    news: Condvar,
}

impl EventSink for Events {
    fn event(&self, device: usize, event: DeviceEvent) {
        self.list.lock().unwrap().push((device, event));
        self.news.notify_all();
    }
}

impl Events {
    pub fn wait(&self, what: impl Fn(&DeviceEvent) -> bool) -> DeviceEvent {
        let guard = self.list.lock().unwrap();
        let (list, timeout) = self
            .news
            .wait_timeout_while(guard, PATIENCE, |l| !l.iter().any(|(_, e)| what(e)))
            .unwrap();
        assert!(!timeout.timed_out(), "the event did not come; there were {:?}", *list);
        let found = list.iter().find(|(_, e)| what(e)).unwrap().1;
        found
    }

    /// Waits until there are `n` such events.
    pub fn wait_count(&self, n: usize, what: impl Fn(&DeviceEvent) -> bool) {
        let guard = self.list.lock().unwrap();
        let few = |l: &mut Vec<(usize, DeviceEvent)>| l.iter().filter(|(_, e)| what(e)).count() < n;
        let (list, timeout) = self.news.wait_timeout_while(guard, PATIENCE, few).unwrap();
        assert!(!timeout.timed_out(), "the event did not come {n} times; there were {:?}", *list);
    }

    pub fn count(&self, what: impl Fn(&DeviceEvent) -> bool) -> usize {
        self.list.lock().unwrap().iter().filter(|(_, e)| what(e)).count()
    }
}

pub struct World {
    pub dir: tempfile::TempDir,
    pub fabric: Fabric,
}

impl World {
    pub fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let fabric = Fabric::open(&Runtime::at(dir.path()).unwrap()).unwrap();
        World { dir, fabric }
    }

    /// Two hosts whose NICs are plain, but for `full`.
    pub fn plain(full: &[NicName]) -> World {
        let dir = tempfile::tempdir().unwrap();
        let kind = NicKind { device: DeviceKind::Plain, ..NicKind::default() };
        let specials = full.iter().map(|nic| (nic.clone(), NicKind::default())).collect();
        let shape = Shape { kind, specials, ..Shape::of(0, &["a", "b"], 4) };
        let fabric = Fabric::create(&Runtime::at(dir.path()).unwrap(), &shape).unwrap();
        World { dir, fabric }
    }

    pub fn nics(&self, host: &str) -> Arc<SoftNics> {
        SoftNics::new(Config::host(Runtime::at(self.dir.path()).unwrap(), host)).unwrap()
    }

    pub fn fault(&self, text: &str) {
        self.fabric.set(&text.parse::<Fault>().unwrap(), None).unwrap();
    }

    pub fn clear(&self) {
        self.fabric.clear(None).unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The buffer goes: nothing may touch it any more.
        let _ = self.nic.memory().dereg_mr(self.mr.lkey);
    }
}

/// A host: one open NIC, a PD, a CQ, and a registered buffer.
pub struct Host {
    pub nics: Arc<SoftNics>,
    pub events: Arc<Events>,
    pub nic: Arc<Nic>,
    pub pd: PdHandle,
    pub cq: Arc<Cq>,
    pub channel: Option<Arc<CompChannel>>,
    pub buf: Box<[u8]>,
    pub mr: MrKeys,
}

impl Host {
    pub fn new(world: &World, name: &str, index: usize, bytes: usize) -> Host {
        Host::with_channel(world.nics(name), index, bytes, None)
    }

    pub fn with_channel(
        nics: Arc<SoftNics>,
        index: usize,
        bytes: usize,
        channel: Option<Arc<CompChannel>>,
    ) -> Host {
        let events = Arc::new(Events::default());
        let nic = nics.open(index, events.clone()).unwrap();
        Host::build(nics, events, nic, bytes, channel)
    }

    /// On a NIC that is open already.
    pub fn on(nics: &Arc<SoftNics>, nic: &Arc<Nic>, bytes: usize) -> Host {
        Host::build(nics.clone(), Arc::default(), nic.clone(), bytes, None)
    }

    pub fn build(
        nics: Arc<SoftNics>,
        events: Arc<Events>,
        nic: Arc<Nic>,
        bytes: usize,
        channel: Option<Arc<CompChannel>>,
    ) -> Host {
        let memory = nic.memory();
        let pd = memory.alloc_pd().unwrap();
        let cq = nic.create_cq(1024, channel.clone(), Box::new(|_| {})).unwrap();
        let buf = vec![0u8; bytes].into_boxed_slice();
        let addr = buf.as_ptr() as u64;
        let mr = memory.reg_mr(pd, addr, bytes as u64, addr, ALL).unwrap();
        Host { nics, events, nic, pd, cq, channel, buf, mr }
    }

    pub fn addr(&self, offset: usize) -> u64 {
        self.buf.as_ptr() as u64 + offset as u64
    }

    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.addr(offset), length: len as u32, lkey: self.mr.lkey }
    }

    /// The buffer as the network left it.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        // SAFETY: within the buffer; volatile reads, since the NIC's thread may have written it.
        (offset..offset + len)
            .map(|i| unsafe { self.buf.as_ptr().add(i).read_volatile() })
            .collect()
    }

    pub fn fill(&mut self, offset: usize, bytes: &[u8]) {
        self.buf[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    pub fn init(&self, qp_type: QpType) -> QpInit {
        QpInit {
            qp_type,
            caps: QpCaps {
                max_send_wr: 128,
                max_recv_wr: 128,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 128,
            },
            pd: self.pd,
            send_cq: self.cq.clone(),
            recv_cq: self.cq.clone(),
            srq: None,
            sq_sig_all: false,
            suspend_on_error: false,
            wc_qpn: None,
            home: None,
            local_keys_of: None,
            control: false,
            standby: false,
            lane: None,
            management: false,
        }
    }

    pub fn qp(&self, change: impl Fn(&mut QpInit)) -> Arc<dyn ResumableQp> {
        let mut init = self.init(QpType::Rc);
        change(&mut init);
        self.nic.create_holding_qp(&init).unwrap()
    }

    /// Polls until `n` completions have come, and no more.
    pub fn poll(&self, n: usize) -> Vec<Wc> {
        let out = self.poll_some(n);
        assert_eq!(out.len(), n);
        out
    }

    /// Polls until `n` completions have come, or more.
    pub fn poll_some(&self, n: usize) -> Vec<Wc> {
        let start = Instant::now();
        let mut out = Vec::new();
        let mut wcs = [Wc::default(); 16];
        while out.len() < n {
            let got = self.cq.poll(&mut wcs).unwrap();
            out.extend_from_slice(&wcs[..got]);
            assert!(
                start.elapsed() < PATIENCE,
                "only {} of {n} completions came: {out:?}",
                out.len()
            );
        }
        out
    }

    /// The completions that are there.
    pub fn poll_now(&self) -> Vec<Wc> {
        let mut wcs = [Wc::default(); 16];
        let got = self.cq.poll(&mut wcs).unwrap();
        wcs[..got].to_vec()
    }

    /// Takes completions without driving the NIC.
    pub fn wait(&self, n: usize) -> Vec<Wc> {
        let channel = self.channel.as_ref().unwrap();
        let mut out = Vec::new();
        let mut wcs = [Wc::default(); 16];
        loop {
            self.cq.req_notify(false);
            loop {
                let got = self.cq.poll(&mut wcs).unwrap();
                out.extend_from_slice(&wcs[..got]);
                if got == 0 {
                    break;
                }
            }
            if out.len() >= n {
                return out;
            }
            channel.get_event().unwrap();
        }
    }
}

/// The cookie of the queue whose event comes next.
pub fn next_event(channel: &CompChannel) -> u64 {
    let start = Instant::now();
    while !channel.has_events() {
        assert!(start.elapsed() < PATIENCE, "no event came");
        std::thread::sleep(Duration::from_micros(200));
    }
    channel.get_event().unwrap()
}

/// Code of the local ACK timeout: 17 ms, then 34 and six times 67, which a busy machine keeps and a
/// test can wait for.
pub const TIMEOUT: u8 = 12;

pub fn connect(qp: &dyn DeviceQp, peer: &dyn DeviceQp, peer_nic: &Nic) -> Result<()> {
    connect_with(qp, peer.qpn(), peer_nic, 0x100)
}

pub fn connect_with(qp: &dyn DeviceQp, peer_qpn: u32, peer_nic: &Nic, psn: u32) -> Result<()> {
    // The NICs of a fabric are of one kind.
    let path = PathAttr { sgid_index: peer_nic.gid_index(), ..PathAttr::new(peer_nic.gid()) };
    connect_by(qp, peer_qpn, path, psn, Mtu::B4096, TIMEOUT)
}

pub fn connect_to(qp: &dyn DeviceQp, peer_qpn: u32, peer: Gid, psn: u32, mtu: Mtu) -> Result<()> {
    connect_slowly(qp, peer_qpn, peer, psn, mtu, TIMEOUT)
}

/// Connects with a timeout that may be longer.
pub fn connect_slowly(
    qp: &dyn DeviceQp,
    peer_qpn: u32,
    peer: Gid,
    psn: u32,
    mtu: Mtu,
    timeout: u8,
) -> Result<()> {
    connect_by(qp, peer_qpn, PathAttr::new(peer), psn, mtu, timeout)
}

/// Connects over that path.
pub fn connect_by(
    qp: &dyn DeviceQp,
    peer_qpn: u32,
    path: PathAttr,
    psn: u32,
    mtu: Mtu,
    timeout: u8,
) -> Result<()> {
    let init = RcModify { state: Some(QpState::Init), access: Some(ALL), ..RcModify::default() };
    qp.modify(&QpModify { rc: init, ..QpModify::default() })?;
    let rtr = RcModify {
        state: Some(QpState::Rtr),
        dest_qpn: Some(peer_qpn),
        rq_psn: Some(psn),
        mtu: Some(mtu),
        max_dest_rd_atomic: Some(16),
        min_rnr_timer: Some(1),
        ..RcModify::default()
    };
    qp.modify(&QpModify { rc: rtr, path: Some(path), ..QpModify::default() })?;
    let rts = RcModify {
        state: Some(QpState::Rts),
        sq_psn: Some(psn),
        timeout: Some(timeout),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(16),
        ..RcModify::default()
    };
    qp.modify(&QpModify { rc: rts, ..QpModify::default() })
}

/// An RC QP such as any device makes.
pub fn plain_qp(host: &Host) -> Arc<dyn DeviceQp> {
    host.nic.create_qp(&host.init(QpType::Rc)).unwrap()
}

/// Two of them, connected.
pub fn plain_pair(a: &Host, b: &Host) -> (Arc<dyn DeviceQp>, Arc<dyn DeviceQp>) {
    let (qa, qb) = (plain_qp(a), plain_qp(b));
    connect(&*qa, &*qb, &b.nic).unwrap();
    connect(&*qb, &*qa, &a.nic).unwrap();
    (qa, qb)
}

/// The errno of what must fail.
#[track_caller]
pub fn errno<T>(result: Result<T>) -> i32 {
    result.map(drop).unwrap_err().errno()
}

/// Two hosts with a connected pair of QPs.
pub struct Pair {
    pub world: World,
    pub a: Host,
    pub b: Host,
    pub qa: Arc<dyn ResumableQp>,
    pub qb: Arc<dyn ResumableQp>,
}

impl Pair {
    pub fn new() -> Pair {
        Pair::with(|_| {})
    }

    pub fn with(change: impl Fn(&mut QpInit)) -> Pair {
        let world = World::new();
        let (a, b) = (Host::new(&world, "a", 0, 4 << 20), Host::new(&world, "b", 0, 4 << 20));
        let (qa, qb) = (a.qp(&change), b.qp(&change));
        connect(&*qa, &*qb, &b.nic).unwrap();
        connect(&*qb, &*qa, &a.nic).unwrap();
        Pair { world, a, b, qa, qb }
    }
}

pub fn send(wr_id: u64, sges: &[Sge]) -> SendWr<'_> {
    SendWr {
        wr_id,
        opcode: SendOpcode::Send,
        flags: SendFlags::SIGNALED,
        sges,
        ..SendWr::default()
    }
}

pub fn rdma<'a>(
    wr_id: u64,
    opcode: SendOpcode,
    sges: &'a [Sge],
    remote_addr: u64,
    rkey: u32,
) -> SendWr<'a> {
    SendWr { opcode, remote_addr, rkey, ..send(wr_id, sges) }
}

pub fn recv(wr_id: u64, sges: &[Sge]) -> RecvWr<'_> {
    RecvWr { wr_id, sges }
}

/// Bytes that tell where they belong.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

#[track_caller]
pub fn assert_ok(wc: &Wc, wr_id: u64) {
    assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::Success as u32), "{wc:?}");
}

/// Waits until the slot of a dead NIC can be had again: a thread that sleeps until something
/// arrives at its socket holds that for a moment longer.
pub fn wait_until_free(nic: &dyn Device) {
    let deadline = Instant::now() + PATIENCE;
    while UdpSocket::bind((nic.gid().to_ip(), ROCE_PORT)).is_err() {
        assert!(Instant::now() < deadline, "the slot of the dead NIC is not free");
        std::thread::yield_now();
    }
}
