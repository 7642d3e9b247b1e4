//! What verbs, the background thread and the watcher share of an opened NIC.

use crate::engine::{Engine, Identity, Sockets};
use crate::faults::{LinkSource, Status};
use crate::flush::FlushKind;
use crate::gids;
use crate::memory::Domain;
use crate::plain::Plain;
use crate::poller::Poller;
use crate::progress_counters::ProgressCounters;
use crate::reminders::Reminders;
use crate::spec::{Common, Spec};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;
use unbroken_fabric::{now_us, DeviceKind, Fabric, NicPage};
use unbroken_process::ProcessGuard;
use unbroken_types::{Gid, LinkLayer, Mtu, PathAttr};
use unbroken_verbs::{Cq, Driver, Error, EventFd, EventSink, Owner, QpInit, Result};

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
/// What a slow poll takes at least.
const SLOW_POLL: Duration = Duration::from_micros(20);

/// What verbs, the background thread and the watcher share of a NIC.
pub(crate) struct Shared {
    /// The process that opened it.
    pub(crate) process: ProcessGuard,
    engine: Mutex<Engine>,
    /// The engine's.
    pub(crate) progress_counters: Arc<ProgressCounters>,
    /// Threads that wait for the engine: the background thread gives way to them.
    waiting: AtomicU32,
    pub(crate) domain: Arc<Domain>,
    /// That of port 1.
    pub(crate) page: Arc<NicPage>,
    pub(crate) name: String,
    /// Of its ports.
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) slot: u16,
    pub(crate) mtu: Mtu,
    pub(crate) link_layer: LinkLayer,
    pub(crate) device: DeviceKind,
    /// The emulated network, where it is a part of one.
    fabric: Option<Arc<Fabric>>,
    /// Of the CQs, SRQs and channels that its QPs may use.
    pub(crate) owner: Owner,
    pub(crate) cwnd_max_packets: u32,
    /// Wakes the background thread.
    pub(crate) bell: EventFd,
    /// When the background thread wakes by itself; 0 while it is awake.
    pub(crate) wake_at_us: AtomicU64,
    /// It sleeps no longer than this.
    pub(crate) longest_sleep_us: u64,
    pub(crate) reminders: Reminders,
    pub(crate) stop: AtomicBool,
    pub(crate) status: Arc<Status>,
    pub(crate) poller: Poller,
    idle_polls: AtomicU32,
    /// A poll takes its time.
    slow_poll: bool,
}

impl Shared {
    /// Opens the sockets and makes the engine; nobody drives it yet.
    pub(crate) fn open(
        index: usize,
        spec: &Spec,
        link: LinkSource,
        fabric: Option<Arc<Fabric>>,
        common: Common,
        sink: Arc<dyn EventSink>,
    ) -> Result<Shared> {
        let Common { domain, gaps, aliases, seed, flush, longest_sleep_us } = common;
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
                (Owner::device(), Some(Plain::new(index, (seed, flush), gids, domain.clone())))
            }
        };
        let known = fabric.clone();
        let id = Identity { index, ips, link_layer, slot, any_ip_id, fabric, aliases, plain };
        let status = Arc::new(Status::new());
        let engine = Engine::new(id, sockets, link, status.clone(), spec.pages.clone(), gaps, sink);
        Ok(Shared {
            process: ProcessGuard::now(),
            progress_counters: engine.progress_counters.clone(),
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
            slow_poll: spec.device == DeviceKind::Plain && flush == FlushKind::SlowPoll,
        })
    }

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
    pub(crate) fn check_new(&self) -> Result<()> {
        match self.owner == Owner::PROCESS || self.alive() {
            true => Ok(()),
            false => Err(self.dead()),
        }
    }

    /// EINVAL where a QP is to use queues of another device.
    pub(crate) fn check_owners(&self, init: &QpInit) -> Result<()> {
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
    pub(crate) fn drain(&self) {
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
        if self.process.elsewhere() {
            return;
        }
        if self.slow_poll {
            std::thread::sleep(SLOW_POLL);
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
        if !self.process.elsewhere() && self.poller.wait() {
            self.bell.signal();
        }
    }

    fn remind_later(&self, cq: &Weak<Cq>, owed_for: u64) -> bool {
        !self.process.elsewhere() && self.reminders.add(now_us(), cq, owed_for)
    }
}
