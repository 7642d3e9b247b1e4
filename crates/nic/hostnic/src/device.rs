//! An open device, and its thread.
//!
//! The thread sleeps on four descriptors: the context's asynchronous events, the completion
//! channel, the kernel's messages about devices that are removed ([`crate::removal`]), and one that
//! ends the thread. It takes all events that are there (a provider's descriptor announces new ones
//! only), acknowledges each before it acts on it, so that no destroyer waits for us, and passes it
//! to the sink.

use crate::ah::{resolver, AhResolver};
use crate::context::Context;
use crate::cq::{Channel, HostCq};
use crate::gids;
use crate::library::check;
use crate::lock;
use crate::memory::HostMemory;
use crate::qp::HostQp;
use crate::removal::Removal;
use crate::revival::Revival;
use crate::srq::HostSrq;
use std::collections::HashMap;
use std::ffi::c_int;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Weak};
use unbroken_types::{Gid, PathAttr, PdHandle};
use unbroken_verbs::abi::*;
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceCounters, DeviceEvent, DeviceQp, Error, EventFd,
    EventSink, Leftovers, LimitHook, MemoryDomain, OverrunHook, Owner, PortAttr, PortEvent,
    PortState, QpEvent, QpInit, Result, ResumableQp, Srq, SrqAttr,
};

/// The only port that QPs use.
const PORT: u8 = 1;
/// `enum ibv_event_type`: a CQ has lost completions.
pub(crate) const CQ_ERR: c_int = 0;
/// Those that are of the device or a port.
pub(crate) const DEVICE_FATAL: c_int = 8;
pub(crate) const PORT_ACTIVE: c_int = 9;
pub(crate) const PORT_ERR: c_int = 10;
/// Events that are taken in a row before the thread looks whether it is to end.
const MAX_EVENTS: usize = 1024;

/// What the thread and the objects of a device share.
pub(crate) struct Shared {
    pub(crate) index: usize,
    pub(crate) context: Arc<Context>,
    sink: Arc<dyn EventSink>,
    alive: AtomicBool,
    /// The kernel has taken it away.
    removed: AtomicBool,
    /// The port as it was when an event last spoke of it, and whether it is active.
    port: Mutex<PortAttr>,
    port_active: AtomicBool,
    /// The GID that stands for the port, which may become another of its own.
    address: Arc<Mutex<Gid>>,
    gid_index: AtomicU8,
    channel: Arc<Channel>,
    cqs: Mutex<HashMap<u64, Weak<HostCq>>>,
    srqs: Mutex<Vec<Weak<HostSrq>>>,
    next_cookie: AtomicU64,
    /// Makes address handles for QPs that must not wait for them.
    pub(crate) resolver: Arc<AhResolver>,
    /// Who looks for the device once it is dead.
    revival: Arc<Revival>,
    end: EventFd,
    /// QPs that the provider refused to destroy.
    pub(crate) undestroyed: AtomicU32,
    /// How the device's traffic is counted.
    counters: crate::counters::CounterFiles,
}

/// An open device of the machine.
pub(crate) struct HostDevice {
    shared: Arc<Shared>,
    memory: Arc<HostMemory>,
    owner: Owner,
    thread: Mutex<Option<unbroken_process::Thread>>,
}

impl Shared {
    pub(crate) fn alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    pub(crate) fn gid(&self) -> Gid {
        *lock(&self.address)
    }

    fn look_at_port(&self) {
        self.look_for_gid();
        let Ok(port) = self.context.port_view(PORT) else { return };
        let active = port.0.state == PortState::Active as c_int;
        lock(&self.port).state = if active { PortState::Active } else { PortState::Down };
        self.port_active.store(active, Ordering::Release);
    }

    /// After a change of the table a GID has another place; one that has gone keeps its old.
    fn look_for_gid(&self) {
        let Ok(mut port) = self.context.port(PORT) else { return };
        if let Some(index) = gids::index_of(&port.gids, self.gid()) {
            self.gid_index.store(index, Ordering::Release);
        }
        let mut known = lock(&self.port);
        port.state = known.state;
        *known = port;
    }

    fn tell(&self, event: DeviceEvent) {
        self.sink.event(self.index, event);
    }

    fn was_removed(&self) {
        self.removed.store(true, Ordering::Release);
        self.died();
    }

    fn died(&self) {
        if self.alive.swap(false, Ordering::AcqRel) {
            self.tell(DeviceEvent::Fatal);
            self.revival.wait_for(self.index, self.sink.clone());
        }
    }

    /// Takes the asynchronous events that wait.
    fn take_async_events(&self) {
        let library = self.context.library;
        for _ in 0..MAX_EVENTS {
            // SAFETY: integers and null pointers.
            let mut event: ibv_async_event = unsafe { zeroed() };
            // SAFETY: an open context and a live local; the descriptor does not block.
            if unsafe { library.get_async_event(self.context.raw(), &mut event) } != 0 {
                return;
            }
            let kind = event.event_type;
            let qp_event = qp_event(kind);
            // SAFETY: the type says which member there is. The QP lives until its event is
            // acknowledged.
            let (qpn, port) = unsafe {
                match qp_event {
                    Some(_) => ((*event.element.qp).qp_num, 0),
                    None => (0, event.element.port_num),
                }
            };
            let lost = match kind {
                // SAFETY: the type says that there is a CQ, which lives as the QP does above.
                CQ_ERR => Some(unsafe { (*event.element.cq).cq_context } as u64),
                _ => None,
            };
            // SAFETY: the event just taken.
            unsafe { library.ack_async_event(&mut event) };
            let lost = lost.and_then(|cookie| lock(&self.cqs).get(&cookie).and_then(Weak::upgrade));
            if let Some(ring) = lost.and_then(|cq| cq.ring()) {
                ring.lose();
            }
            match (kind, qp_event) {
                (_, Some(event)) => self.tell(DeviceEvent::Qp { qpn, event }),
                (DEVICE_FATAL, _) => self.died(),
                (kind, _) if of_port(kind) => match u8::try_from(port) {
                    Ok(PORT) => self.port_changed(kind),
                    Ok(port) => self.tell_of_port(port, kind),
                    Err(_) => {}
                },
                // One of the SRQ behind a program's fails the queue pairs that take from it here,
                // and the program's goes on elsewhere.
                _ => {}
            }
        }
    }

    fn tell_of_port(&self, port: u8, kind: c_int) {
        if let Some(event) = port_event(kind) {
            self.tell(DeviceEvent::PortChanged(port, event));
        }
    }

    fn port_changed(&self, kind: c_int) {
        let (state, event) = match kind {
            PORT_ERR => (PortState::Down, DeviceEvent::PortDown(PORT)),
            PORT_ACTIVE => (PortState::Active, DeviceEvent::PortActive(PORT)),
            _ => {
                self.look_at_port();
                return self.tell_of_port(PORT, kind);
            }
        };
        // What the event says counts, should the port tell another state by now.
        lock(&self.port).state = state;
        self.port_active.store(state == PortState::Active, Ordering::Release);
        self.tell(event);
        // The rest of the port takes time: its GIDs may have other places now.
        self.look_for_gid();
    }

    /// Takes the completion events that wait.
    fn take_completion_events(&self) {
        for _ in 0..MAX_EVENTS {
            let Some(cookie) = self.channel.take_event() else { return };
            let found = lock(&self.cqs).get(&cookie).and_then(Weak::upgrade);
            if let Some(found) = found {
                found.take_event();
            }
        }
    }

    /// The body of the thread.
    fn run(&self) {
        let removal = Removal::of(&self.context);
        let removed = removal.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut fds = [self.end.as_raw_fd(), self.context.async_fd(), self.channel.fd(), removed]
            .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        loop {
            // SAFETY: four live entries; one without a descriptor is left out.
            let n = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as _, -1) };
            if n < 0 {
                continue; // a signal; nothing else can be wrong with open descriptors
            }
            if fds[0].revents != 0 {
                return;
            }
            if fds[1].revents != 0 {
                self.take_async_events();
                if fds[1].revents & (libc::POLLERR | libc::POLLHUP) != 0 {
                    // The kernel has taken the device away.
                    self.was_removed();
                    fds[1].fd = -1;
                }
            }
            if fds[2].revents != 0 {
                self.take_completion_events();
                if fds[2].revents & (libc::POLLERR | libc::POLLHUP) != 0 {
                    fds[2].fd = -1;
                }
            }
            if fds[3].revents != 0 && removal.as_ref().is_some_and(Removal::is_gone) {
                self.was_removed();
                fds[3].fd = -1;
            }
        }
    }

    /// The provider's queue behind a ring.
    pub(crate) fn cq_behind(&self, ring: &Arc<Cq>) -> Result<Arc<HostCq>> {
        let cqs = lock(&self.cqs);
        let found = cqs.values().filter_map(Weak::upgrade).find(|cq| cq.is_behind(ring));
        found.ok_or_else(|| Error::invalid("the CQ belongs to another device"))
    }

    /// The provider's queue behind an SRQ.
    pub(crate) fn srq_behind(&self, app: &Arc<Srq>) -> Result<Arc<HostSrq>> {
        let srqs = lock(&self.srqs);
        let found = srqs.iter().filter_map(Weak::upgrade).find(|srq| srq.is_behind(app));
        found.ok_or_else(|| Error::invalid("the SRQ belongs to another device"))
    }
}

/// Whether events with this number are of a port.
fn of_port(kind: c_int) -> bool {
    port_event(kind).is_some()
}

/// The event of a port that has this number.
fn port_event(kind: c_int) -> Option<PortEvent> {
    Some(match kind {
        PORT_ACTIVE => PortEvent::Active,
        PORT_ERR => PortEvent::Error,
        11 => PortEvent::LidChange,
        12 => PortEvent::PkeyChange,
        13 => PortEvent::SmChange,
        17 => PortEvent::ClientReregister,
        18 => PortEvent::GidChange,
        _ => return None,
    })
}

/// The event of a QP that has this number.
pub(crate) fn qp_event(kind: c_int) -> Option<QpEvent> {
    Some(match kind {
        1 => QpEvent::Fatal,
        2 => QpEvent::RequestError,
        3 => QpEvent::AccessError,
        4 => QpEvent::CommEstablished,
        5 => QpEvent::SqDrained,
        6 => QpEvent::PathMigrated,
        7 => QpEvent::PathMigrationFailed,
        16 => QpEvent::LastWqeReached,
        _ => return None,
    })
}

fn set_nonblocking(fd: RawFd) -> Result<()> {
    // SAFETY: fcntl with integers.
    let done = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    check("fcntl", done.min(0))
}

impl HostDevice {
    /// Opens NIC `index` over that context, reached by the GID of that address.
    pub(crate) fn open(
        index: usize,
        context: Arc<Context>,
        address: Arc<Mutex<Gid>>,
        (counters, revival): (crate::counters::CounterFiles, Arc<Revival>),
        sink: Arc<dyn EventSink>,
        bare: bool,
    ) -> Result<HostDevice> {
        let channel = Channel::new(&context)?;
        let memory = HostMemory::new(&context, bare);
        let port = Mutex::new(context.port(PORT)?);
        let shared = Arc::new(Shared {
            index,
            context,
            sink,
            alive: AtomicBool::new(true),
            removed: AtomicBool::new(false),
            port,
            port_active: AtomicBool::new(false),
            address,
            gid_index: AtomicU8::new(0),
            undestroyed: AtomicU32::new(0),
            channel,
            cqs: Mutex::default(),
            srqs: Mutex::default(),
            next_cookie: AtomicU64::new(1),
            resolver: resolver(),
            revival,
            end: EventFd::new(false, true)?,
            counters,
        });
        set_nonblocking(shared.context.async_fd())?;
        set_nonblocking(shared.channel.fd())?;
        shared.look_at_port();
        let run = shared.clone();
        let name = format!("unb-h-{}", shared.context.name);
        let thread = unbroken_process::spawn(&name, move || run.run())
            .map_err(|e| Error::os("a thread for events cannot be started", &e))?;
        let thread = Mutex::new(Some(thread));
        Ok(HostDevice { shared, memory, owner: Owner::device(), thread })
    }

    /// The port's address is another now.
    pub(crate) fn address_changed(&self) {
        self.shared.look_for_gid();
    }

    /// As if the provider had told that event of the device or its port.
    pub(crate) fn raise(&self, kind: c_int) {
        match kind {
            DEVICE_FATAL => self.shared.died(),
            kind => self.shared.port_changed(kind),
        }
    }
}

impl Device for HostDevice {
    fn capabilities(&self) -> Capabilities {
        crate::windows::capabilities(self.memory.has_windows())
    }

    fn name(&self) -> &str {
        &self.shared.context.name
    }

    fn gid(&self) -> Gid {
        self.shared.gid()
    }

    /// What the kernel tells of the device: completions stay with the provider until they are
    /// polled.
    fn drain(&self) {
        self.shared.take_async_events();
    }

    fn gid_index(&self) -> u8 {
        self.shared.gid_index.load(Ordering::Acquire)
    }

    /// The provider looks at it when the QP is connected.
    fn check_path(&self, path: &PathAttr) -> Result<()> {
        Ok(path.check()?)
    }

    fn port(&self, port: u8) -> Result<PortAttr> {
        match port {
            PORT => Ok(lock(&self.shared.port).clone()),
            port => self.shared.context.port(port),
        }
    }

    fn alive(&self) -> bool {
        self.shared.alive()
    }

    fn removed(&self) -> bool {
        self.shared.removed.load(Ordering::Acquire)
    }

    fn usable(&self) -> bool {
        self.alive() && self.shared.port_active.load(Ordering::Acquire)
    }

    fn memory(&self) -> Arc<dyn MemoryDomain> {
        self.memory.clone()
    }

    fn create_channel(&self) -> Result<Arc<CompChannel>> {
        CompChannel::of_device(self.owner)
    }

    fn create_cq(
        &self,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        self.create_cq_on(0, entries, channel, on_overrun)
    }

    fn create_cq_on(
        &self,
        vector: u32,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        let s = &self.shared;
        let cookie = s.next_cookie.fetch_add(1, Ordering::Relaxed);
        let events = channel.as_ref().map(|_| s.channel.clone());
        let behind = HostCq::new(&s.context, entries, vector, events, cookie)?;
        let ring = Cq::of_source(self.owner, entries, channel, on_overrun, behind.clone())?;
        behind.set_ring(&ring);
        let mut cqs = lock(&s.cqs);
        cqs.retain(|_, cq| cq.strong_count() > 0);
        cqs.insert(behind.cookie, Arc::downgrade(&behind));
        Ok(ring)
    }

    fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, on_limit: LimitHook) -> Result<Arc<Srq>> {
        let s = &self.shared;
        let app = Srq::of_device(self.owner, &s.context.attr()?, pd, sizes, on_limit)?;
        let behind = HostSrq::new(&s.context, self.memory.raw_pd(pd)?, app.query())?;
        behind.attach(&app);
        let mut srqs = lock(&s.srqs);
        srqs.retain(|srq| srq.strong_count() > 0);
        srqs.push(Arc::downgrade(&behind));
        Ok(app)
    }

    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        Ok(Arc::new(HostQp::new(&self.shared, &self.memory, init)?))
    }

    fn create_holding_qp(&self, _init: &QpInit) -> Result<Arc<dyn ResumableQp>> {
        Err(Error::unsupported(
            "a device of the machine has plain verbs: QPs that fail are flushed",
        ))
    }

    fn counters(&self) -> DeviceCounters {
        self.shared.counters.read()
    }

    fn leftovers(&self) -> Leftovers {
        let undestroyed = self.shared.undestroyed.load(Ordering::Relaxed);
        Leftovers { undestroyed, ..Leftovers::default() }
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        self.shared.end.signal();
        let thread = lock(&self.thread).take();
        // The thread itself may drop the last handle, by way of the sink.
        if let Some(thread) = thread.filter(|t| !t.is_current()) {
            thread.join();
        }
    }
}
