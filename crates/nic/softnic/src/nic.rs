//! An opened NIC: a device of verbs.

use crate::background::Background;
use crate::describe;
use crate::engine::{Engine, Identity, QpEntry, QpKind, Sockets, MAX_QPS};
use crate::faults::{LinkSource, Status};
use crate::gids::{self, gid_of};
use crate::memory::Domain;
use crate::nics::{Common, Spec};
use crate::plain::{self, Plain};
use crate::poller::Poller;
use crate::pulses::Pulses;
use crate::qp::SoftQp;
use crate::reminders::Reminders;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use unbroken_fabric::{now_us, DeviceKind, Fabric, NicPage};
use unbroken_process::Born;
use unbroken_roce::{RcConfig, RcQp, UcConfig, UcQp, UdConfig, UdQp};
use unbroken_types::{Gid, LinkLayer, Mtu, PathAttr, PdHandle, QpCaps, QpType};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceCounters, DeviceQp, Driver, Error, EventFd,
    EventSink, HoldingQp, LimitHook, MemoryDomain, OverrunHook, Owner, PortAttr, QpInit, Result,
    Srq, SrqAttr,
};

/// Entries of a work queue.
pub(crate) const MAX_QP_WR: u32 = 16_384;
/// Shared receive queues of a process.
pub(crate) const MAX_SRQS: u32 = 65_536;
/// Entries of a shared receive queue.
pub(crate) const MAX_SRQ_WR: u32 = 32_768;
/// Scatter/gather entries of a WR.
pub(crate) const MAX_SGE: u32 = 30;
/// Bytes of inline data.
pub(crate) const MAX_INLINE: u32 = 512;
/// Largest congestion window in packets.
const MAX_CWND_PACKETS: usize = 256;
/// After so many polls in a row that found nothing, a polling thread yields its core once.
const IDLE_POLLS: u32 = 32;
/// Drives that take in what a socket holds.
const DRAIN_DRIVES: u32 = 1024;
/// Rounds of waiting for a verb that wants the engine.
const GIVE_WAY_ROUNDS: u32 = 1024;
/// An ACK may wait for the application's answer if the background thread looks again within this
/// time.
const ACK_PATIENCE_US: u64 = 500;

/// What verbs, the background thread and the watcher share of a NIC.
pub(crate) struct Shared {
    /// The process that opened it.
    pub(crate) born: Born,
    engine: Mutex<Engine>,
    /// The engine's.
    pub(crate) pulses: Arc<Pulses>,
    /// Threads that wait for the engine: the background thread gives way to them.
    waiting: AtomicU32,
    pub(crate) domain: Arc<Domain>,
    /// That of port 1.
    page: Arc<NicPage>,
    pub(crate) name: String,
    /// Of its ports.
    ips: Vec<IpAddr>,
    slot: u16,
    pub(crate) mtu: Mtu,
    link_layer: LinkLayer,
    device: DeviceKind,
    /// The emulated network, where it is a part of one.
    fabric: Option<Arc<Fabric>>,
    /// Of the CQs, SRQs and channels that its QPs may use.
    owner: Owner,
    cwnd_max_packets: u32,
    /// Wakes the background thread.
    pub(crate) bell: EventFd,
    /// When the background thread wakes by itself; 0 while it is awake.
    pub(crate) wake_at_us: AtomicU64,
    /// It sleeps no longer than this.
    pub(crate) longest_sleep_us: u64,
    pub(crate) reminders: Reminders,
    pub(crate) stop: AtomicBool,
    status: Arc<Status>,
    pub(crate) poller: Poller,
    idle_polls: AtomicU32,
}

impl Shared {
    /// The engine, for a verb.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Engine> {
        if let Some(e) = self.try_lock() {
            return e;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let e = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        e
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Engine>> {
        match self.engine.try_lock() {
            Ok(e) => Some(e),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The address of a port, counted from 1.
    pub(crate) fn port_ip(&self, port: u8) -> Result<IpAddr> {
        let count = self.ips.len();
        let ip = usize::from(port).checked_sub(1).and_then(|i| self.ips.get(i)).copied();
        ip.ok_or_else(|| {
            let has =
                if count == 1 { "port 1 only".to_owned() } else { format!("ports 1 to {count}") };
            Error::invalid(format!("port {port}: this device has {has}"))
        })
    }

    /// Whether packets reach the peer over that path; EINVAL where there is no such path.
    pub(crate) fn leads(&self, path: &PathAttr) -> Result<bool> {
        let table = gids::table(self.port_ip(path.port)?, self.link_layer, self.device);
        path.check()?;
        self.resolve(path.dest_gid)?;
        match self.device {
            // All of them lead through the same address.
            DeviceKind::Full if usize::from(path.sgid_index) < table.len() => Ok(true),
            _ => gids::leads(&table, path.sgid_index, path.dest_gid),
        }
    }

    /// ETIMEDOUT, as Linux has it where nobody answers for an address, if that GID is the address
    /// of no NIC in the emulated network. (A real one is not asked.)
    fn resolve(&self, gid: Gid) -> Result<()> {
        match (&self.fabric, gid.to_ipv4()) {
            (Some(fabric), Some(ip)) if fabric.locate(ip).is_none() => Err(Error::new(
                libc::ETIMEDOUT,
                format!("no NIC of the emulated network has the GID ::ffff:{ip}"),
            )),
            _ => Ok(()),
        }
    }

    /// The error of what a dead NIC does not do.
    #[cold]
    pub(crate) fn dead(&self) -> Error {
        Error::device_gone(format!("NIC {} is dead", self.name))
    }

    /// Whether something new can belong to this NIC.
    fn check_new(&self) -> Result<()> {
        match self.owner == Owner::PROCESS || self.alive() {
            true => Ok(()),
            false => Err(self.dead()),
        }
    }

    /// EINVAL where a QP is to use queues of another device.
    fn check_owners(&self, init: &QpInit) -> Result<()> {
        let srq = init.srq.as_ref().map(|srq| srq.owner());
        let queues = [
            ("send CQ", Some(init.send_cq.owner())),
            ("receive CQ", Some(init.recv_cq.owner())),
            ("SRQ", srq),
        ];
        match queues.iter().find(|(_, owner)| owner.is_some_and(|owner| owner != self.owner)) {
            Some((what, _)) => Err(Error::invalid(format!(
                "the {what} belongs to another device than {}",
                self.name
            ))),
            None => Ok(()),
        }
    }

    /// Takes in all that has arrived. Bounded: more may go on arriving.
    fn drain(&self) {
        for _ in 0..DRAIN_DRIVES {
            let now_us = now_us();
            let mut e = self.lock();
            let received = e.drive(now_us, &self.domain, true).received;
            self.settle(e, now_us);
            if !received {
                return;
            }
        }
    }

    /// Lets a verb that waits for the engine have it: a thread that takes a lock again at once
    /// would starve it. What it costs where nobody waits is a load.
    #[inline]
    pub(crate) fn give_way(&self) {
        if self.wanted() {
            self.wait_for_verb();
        }
    }

    #[cold]
    fn wait_for_verb(&self) {
        for round in 1..=GIVE_WAY_ROUNDS {
            if !self.wanted() {
                return;
            }
            if round % 64 == 0 {
                // It may be on this core.
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }

    /// Whether a verb waits for the engine.
    fn wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn alive(&self) -> bool {
        self.status.alive()
    }

    /// Looks at the link now; gives whether the NIC works.
    pub(crate) fn look(&self, now_us: u64) -> bool {
        let mut e = self.lock();
        e.look(now_us);
        let turns = e.turns_wait();
        drop(e);
        if turns || !self.alive() {
            // QPs that have left a port say so to their peers; or the background thread has nothing
            // to do any more.
            self.bell.signal();
        }
        self.alive()
    }

    /// Ends the turn of an application thread that had the engine since `since_us`: the background
    /// thread is woken if it would sleep past the next deadline. Work that waits already may wait a
    /// little.
    #[inline]
    pub(crate) fn settle(&self, e: MutexGuard<'_, Engine>, since_us: u64) {
        let now_us = now_us();
        self.poller.busy(since_us, now_us);
        let deadline_us = e.deadline_us();
        let wake_at_us = self.wake_at_us.load(Ordering::Relaxed);
        let patient_us = |at_us: u64| at_us.max(now_us + ACK_PATIENCE_US);
        let patience_us = if deadline_us == 0 { patient_us(0) } else { deadline_us };
        let patience_us = patience_us.min(patient_us(e.waiting_until_us()));
        // A thread that polls all the time sees to what falls due; if it stops, the background
        // thread notices.
        let late = wake_at_us > patience_us && !self.poller.relied_on();
        if late {
            self.wake_at_us.store(0, Ordering::Relaxed);
        }
        drop(e);
        if late {
            self.bell.signal();
        }
    }
}

impl Driver for Shared {
    fn drive(&self) {
        if self.born.elsewhere() {
            return;
        }
        let timed = self.poller.time();
        let now_us = now_us();
        self.poller.enter(now_us);
        self.give_way();
        let Some(mut e) = self.try_lock() else { return self.poller.empty() };
        self.poller.set_inside(true);
        // A thread that is relied on will poll again soon, or the background thread will notice.
        let patient = self.poller.relied_on()
            || self.wake_at_us.load(Ordering::Relaxed) <= now_us + ACK_PATIENCE_US;
        let work = e.drive(now_us, &self.domain, !patient);
        self.poller.set_inside(false);
        if work.busy {
            self.idle_polls.store(0, Ordering::Relaxed);
            return self.settle(e, now_us);
        }
        self.poller.empty();
        drop(e);
        if let Some(since) = timed {
            self.poller.timed(since.elapsed());
        }
        let idle = self.idle_polls.load(Ordering::Relaxed) + 1;
        self.idle_polls.store(idle % IDLE_POLLS, Ordering::Relaxed);
        if idle == IDLE_POLLS {
            std::thread::yield_now();
        }
    }

    fn about_to_wait(&self) {
        if !self.born.elsewhere() && self.poller.wait() {
            self.bell.signal();
        }
    }

    fn remind_later(&self, cq: &Weak<Cq>, owed_for: u64) -> bool {
        !self.born.elsewhere() && self.reminders.add(now_us(), cq, owed_for)
    }
}

/// An opened software NIC.
///
/// Its last handle, QPs included, closes it.
pub struct Nic {
    inner: Arc<Inner>,
}

/// What every handle of a NIC keeps alive. The background thread ends with it.
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    _background: Background,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.shared.born.elsewhere() {
            self.shared.lock().close(&self.shared.domain);
        }
    }
}

impl Nic {
    pub(crate) fn open(
        index: usize,
        spec: &Spec,
        link: LinkSource,
        fabric: Option<Arc<Fabric>>,
        common: Common,
        sink: Arc<dyn EventSink>,
    ) -> Result<Nic> {
        let Common { domain, gaps, aliases, seed, longest_sleep_us } = common;
        let sockets = Sockets::open(&spec.ips).map_err(|e| match e.kind() {
            // It works, so no other stands in for it.
            std::io::ErrorKind::AddrInUse => {
                Error::new(libc::EBUSY, format!("opening NIC {}: {e}", spec.name))
            }
            _ => Error::os(&format!("opening NIC {}", spec.name), &e),
        })?;
        let (slot, rcvbuf) = (sockets.rx[0].slot(), sockets.rx[0].rcvbuf());
        let any_ip_id = matches!(link, LinkSource::Interface(_));
        let (ips, link_layer) = (spec.ips.clone(), spec.link_layer);
        let (owner, plain) = match spec.device {
            DeviceKind::Full => (Owner::PROCESS, None),
            DeviceKind::Plain => {
                let gids = gids::table(ips[0], link_layer, spec.device);
                (Owner::device(), Some(Plain::new(index, seed, gids, domain.clone())))
            }
        };
        let known = fabric.clone();
        let id = Identity { index, ips, link_layer, slot, any_ip_id, fabric, aliases, plain };
        let status = Arc::new(Status::new());
        let engine = Engine::new(id, sockets, link, status.clone(), spec.pages.clone(), gaps, sink);
        let shared = Arc::new(Shared {
            born: Born::now(),
            pulses: engine.pulses.clone(),
            engine: Mutex::new(engine),
            waiting: AtomicU32::new(0),
            domain,
            page: spec.pages[0].clone(),
            name: spec.name.clone(),
            ips: spec.ips.clone(),
            slot,
            mtu: spec.mtu,
            link_layer: spec.link_layer,
            device: spec.device,
            fabric: known,
            owner,
            // The kernel counts about twice the payload for a packet in the buffer; the peer's
            // buffer is taken to be like ours.
            cwnd_max_packets: (rcvbuf / 2 / 4096).clamp(2, MAX_CWND_PACKETS) as u32,
            bell: EventFd::new(false, true)?,
            wake_at_us: AtomicU64::new(0),
            longest_sleep_us,
            reminders: Reminders::new()?,
            stop: AtomicBool::new(false),
            status,
            poller: Poller::default(),
            idle_polls: AtomicU32::new(0),
        });
        shared.look(now_us());
        let background = Background::start(shared.clone())?;
        Ok(Nic { inner: Arc::new(Inner { shared, _background: background }) })
    }

    pub(crate) fn downgrade(&self) -> Weak<Shared> {
        Arc::downgrade(&self.inner.shared)
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    /// The slot of the NIC that this process has: the upper eight bits of its QPNs.
    pub fn slot(&self) -> u16 {
        self.shared().slot
    }
}

/// The queue sizes that a QP gets.
fn check_caps(mut caps: QpCaps, shared_receives: bool) -> Result<QpCaps> {
    if shared_receives {
        (caps.max_recv_wr, caps.max_recv_sge) = (0, 0);
    }
    let limits = [
        ("max_send_wr", caps.max_send_wr, MAX_QP_WR),
        ("max_recv_wr", caps.max_recv_wr, MAX_QP_WR),
        ("max_send_sge", caps.max_send_sge, MAX_SGE),
        ("max_recv_sge", caps.max_recv_sge, MAX_SGE),
        ("max_inline_data", caps.max_inline_data, MAX_INLINE),
    ];
    for (name, value, max) in limits {
        if value > max {
            return Err(Error::invalid(format!("{name} is {value}, at most {max} is possible")));
        }
    }
    caps.max_send_wr = caps.max_send_wr.max(1);
    caps.max_send_sge = caps.max_send_sge.max(1);
    if !shared_receives {
        caps.max_recv_wr = caps.max_recv_wr.max(1);
        caps.max_recv_sge = caps.max_recv_sge.max(1);
    }
    Ok(caps)
}

impl Device for Nic {
    fn capabilities(&self) -> Capabilities {
        describe::capabilities(self.shared().device)
    }

    fn name(&self) -> &str {
        &self.shared().name
    }

    fn gid(&self) -> Gid {
        gid_of(self.shared().ips[0], self.shared().link_layer)
    }

    fn gid_index(&self) -> u8 {
        gids::index_of(self.shared().link_layer, self.shared().device)
    }

    fn check_path(&self, path: &PathAttr) -> Result<()> {
        self.shared().leads(path).map(drop)
    }

    fn port(&self, port: u8) -> Result<PortAttr> {
        let shared = self.shared();
        let ip = shared.port_ip(port)?;
        let usable = !shared.born.elsewhere() && shared.status.usable(port);
        Ok(describe::port(ip, shared.mtu, shared.link_layer, shared.device, usable))
    }

    fn alive(&self) -> bool {
        !self.shared().born.elsewhere() && self.shared().alive()
    }

    fn usable(&self) -> bool {
        !self.shared().born.elsewhere() && self.shared().status.usable(1)
    }

    fn drain(&self) {
        if !self.shared().born.elsewhere() {
            self.shared().drain();
        }
    }

    fn memory(&self) -> Arc<dyn MemoryDomain> {
        self.shared().domain.clone()
    }

    fn create_channel(&self) -> Result<Arc<CompChannel>> {
        CompChannel::of_device(self.shared().owner)
    }

    fn create_cq(
        &self,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        self.shared().check_new()?;
        Cq::of_device(self.shared().owner, entries, channel, on_overrun)
    }

    fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, on_limit: LimitHook) -> Result<Arc<Srq>> {
        let shared = self.shared();
        shared.check_new()?;
        Srq::of_device(
            shared.owner,
            &describe::device(&shared.ips, shared.device),
            pd,
            sizes,
            on_limit,
        )
    }

    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        if self.shared().device == DeviceKind::Plain {
            plain::check(init)?;
        }
        Ok(self.make_qp(init)?)
    }

    fn create_holding_qp(&self, init: &QpInit) -> Result<Arc<dyn HoldingQp>> {
        if self.shared().device == DeviceKind::Plain {
            return Err(Error::unsupported(
                "a QP that holds its work: this device has plain verbs only",
            ));
        }
        Ok(self.make_qp(init)?)
    }

    fn counters(&self) -> DeviceCounters {
        if self.shared().born.elsewhere() {
            return DeviceCounters::default();
        }
        self.shared().lock().totals()
    }
}

impl Nic {
    fn make_qp(&self, init: &QpInit) -> Result<Arc<SoftQp>> {
        let shared = &self.inner.shared;
        shared.born.check()?;
        let caps = check_caps(init.caps, init.srq.is_some())?;
        shared.check_owners(init)?;
        let mut e = shared.lock();
        if !e.look(now_us()) {
            return Err(shared.dead());
        }
        let max_qps = e.id.plain.as_ref().map_or(MAX_QPS, |_| plain::MAX_QPS);
        if e.qps.len() >= max_qps {
            return Err(Error::no_room(format!(
                "{max_qps} QPs exist on NIC {}, which is the limit",
                shared.name
            )));
        }
        let qpn = loop {
            let index =
                e.id.plain
                    .as_ref()
                    .map_or_else(|| shared.page.next_index(), |p| p.next_index(&shared.page));
            let qpn = u32::from(shared.slot) << 16 | index;
            // The table is far from full, so a free index comes soon.
            if e.qps.get(qpn as u16).is_none() {
                break qpn;
            }
        };
        let wc_qpn = init.wc_qpn.unwrap_or(qpn);
        let kind = match init.qp_type {
            QpType::Rc => QpKind::Rc(RcQp::new(RcConfig {
                qpn,
                wc_qpn,
                caps,
                pd: init.pd,
                hold_on_failure: init.hold_on_failure,
                sq_sig_all: init.sq_sig_all,
                cwnd_max_packets: shared.cwnd_max_packets,
            })),
            QpType::Ud => QpKind::Ud(UdQp::new(UdConfig {
                qpn,
                wc_qpn,
                caps,
                pd: init.pd,
                sq_sig_all: init.sq_sig_all,
                mtu: shared.mtu,
                hold_on_failure: init.hold_on_failure,
                moved: init.home.is_some(),
            })),
            QpType::Uc => QpKind::Uc(UcQp::new(UcConfig {
                wc_qpn,
                caps,
                pd: init.pd,
                sq_sig_all: init.sq_sig_all,
            })),
        };
        let kind = match &init.srq {
            Some(srq) => kind.with_srq(srq.clone()),
            None => kind,
        };
        shared.domain.use_pd(init.pd)?;
        let cqs = (init.send_cq.clone(), init.recv_cq.clone());
        let mut entry = QpEntry::new(kind, (qpn, init.pd, init.control), caps, cqs);
        entry.home = init.home;
        entry.death = e.id.plain.as_mut().map(Plain::next_death);
        e.pulses.begin(qpn as u16);
        e.qps.insert(qpn as u16, entry);
        drop(e);
        Ok(Arc::new(SoftQp::new(self.inner.clone(), qpn, init)))
    }
}
