//! What all logical QPs of a process share: NICs, control endpoints, the directory, the tables that
//! find a QP.
//!
//! A NIC is opened when a context or a path needs it, and stays open. When it dies its device
//! object is of no more use: it is dropped here (QPs that still hold it keep it until they have
//! moved) and opened anew once the NIC is healed.
//!
//! Lock order: the turn of receiving → a QP's gate → `Core`'s tables → a device's engine. Event
//! sinks run under an engine's lock, so they only put a job into the inbox.

mod opening;

use crate::aliases::Aliases;
use crate::control::{ControlAddr, ControlEndpoint};
use crate::front::{AsyncElement, Context};
use crate::later::Later;
use crate::lookout;
use crate::nic_set::{failover_is_on, NicSet};
use crate::outbox::{Batch, Outbox};
use crate::own_events;
use crate::peer::Peers;
use crate::preference::Preference;
use crate::qp::Qp;
use crate::worker::{Inbox, Job};
use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use unbroken_directory::{Directory, NicRecord, PortRecord, ProcessRecord, MAX_PORTS};
use unbroken_events::{Event, EventLog, What};
use unbroken_failover_protocol::seal::Key;
use unbroken_failover_protocol::Message;
use unbroken_process::Born;
use unbroken_runtime::Runtime;
use unbroken_types::{Gid, PdHandle};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceAttr, DeviceEvent, Error, EventSink, KeyRow,
    MemoryDomain, PortAttr, Result, Srq,
};

/// Longest transport timeout of a protected QP: the application's own. Whether a path lives is
/// found out by asking it, long before a transport gives up; a shorter timeout would only send more
/// again where a peer is slow.
const TIMEOUT_CODE: u8 = 0;

/// Locks a mutex; a panic elsewhere does not make the tables useless.
pub(crate) fn lock<T: ?Sized>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One NIC of the host.
#[derive(Default)]
struct NicSlot {
    /// The open device; `None` before the first use and while the NIC is dead.
    device: Option<Arc<dyn Device>>,
    /// One for each port, or none.
    endpoints: Vec<Arc<ControlEndpoint>>,
    /// It is to be left (`unbroken nic drain`).
    drained: bool,
}

/// Names of a logical QP: (index of the default NIC, logical QPN).
pub(crate) type LogicalId = (usize, u32);

/// Finds QPs by the names that events and messages carry.
#[derive(Default)]
struct QpTable {
    logical: HashMap<LogicalId, Arc<Qp>>,
    /// (NIC, physical QPN) → logical QP.
    physical: HashMap<(usize, u32), LogicalId>,
}

/// The process-wide state.
pub struct Core {
    /// The process that made it: in a forked child of that, every verb answers EIO.
    pub(crate) born: Born,
    nics: Box<dyn NicSet>,
    slots: Vec<Mutex<NicSlot>>,
    /// Whether failover is on (`UNBROKEN_FAILOVER`, on unless it is 0).
    pub(crate) failover: bool,
    /// Whether events that a switch absorbs are shown to the application all the same
    /// (`UNBROKEN_SHOW_EVENTS=1`).
    pub(crate) show_events: bool,
    /// Whether QPs go back to the path that they were connected on (`UNBROKEN_FAILBACK`, on unless
    /// it is 0).
    pub(crate) goes_home: bool,
    /// How many ports of each NIC QPs may use: all, where they go from one to another by themselves
    /// ([`crate::lanes`]; `UNBROKEN_APM=0`: they do not).
    ports: Vec<u8>,
    /// Whether QPs are spread over the lanes of their paths (`UNBROKEN_APM=spread`).
    pub(crate) spreads: bool,
    /// Which NICs QPs go to first.
    pub(crate) preference: Preference,
    /// A QP may be away from that path.
    away: AtomicBool,
    /// Whether troubles are told on stderr (`UNBROKEN_LOG`).
    talks: bool,
    /// Tells this process from every other that had or will have its addresses.
    pub(crate) incarnation: u64,
    pub(crate) runtime: Runtime,
    pub(crate) directory: Option<Arc<dyn Directory>>,
    log: EventLog,
    pub(crate) later: Later,
    channel: Arc<CompChannel>,
    pub(crate) inbox: Arc<Inbox>,
    /// Devices hold it weakly.
    sink: Arc<dyn EventSink>,
    control_pd: PdHandle,
    /// Longest transport timeout of a protected QP; 0 leaves the application's
    /// (`UNBROKEN_TIMEOUT`).
    timeout_code: u8,
    qps: Mutex<QpTable>,
    /// QPs with sends outstanding, as far as is known: those whose idle flag is off. The innermost
    /// lock.
    busy: Mutex<Vec<LogicalId>>,
    contexts: Mutex<Vec<Weak<Context>>>,
    pub(crate) peers: Peers,
    /// Where UD QPs are that have moved.
    pub(crate) aliases: Aliases,
    /// What keeps strangers' control messages out: the directory's, once that has said it.
    key: OnceLock<Key>,
    /// In its place until then: one that nobody else has.
    own_key: Key,
    /// Control datagrams that came without the seal of the directory's key.
    forged: AtomicU64,
    outbox: Outbox,
    /// QPs that are between two paths, or prepare to leave one.
    on_their_way: AtomicU32,
    /// Held while control messages are received and handled. Before any gate.
    pub(crate) receiving: Mutex<()>,
    /// Whether the thread that looks after QPs runs; not set before the first device is opened.
    worker: OnceLock<bool>,
}

struct Sink(Arc<Inbox>);

impl EventSink for Sink {
    fn event(&self, device: usize, event: DeviceEvent) {
        let own = matches!(event, DeviceEvent::Qp { qpn, event } if own_events::keep((self.0.name(), device, qpn), event));
        if !own {
            self.0.put(Job::Device(device, event));
        }
    }
}

impl Core {
    /// The core over these NICs. Opens none yet.
    pub(crate) fn over(nics: Box<dyn NicSet>) -> Result<Arc<Core>> {
        Core::with(nics, |directory| directory)
    }

    /// ... with something before its directory.
    pub(crate) fn with(
        nics: Box<dyn NicSet>,
        wrap: impl FnOnce(Arc<dyn Directory>) -> Arc<dyn Directory>,
    ) -> Result<Arc<Core>> {
        let failover = failover_is_on();
        let runtime =
            Runtime::at(&nics.runtime()).map_err(|e| Error::new(libc::EIO, e.to_string()))?;
        let (mut seed, mut own_key) = ([0u8; 8], [0u8; 32]);
        for bytes in [&mut seed[..], &mut own_key[..]] {
            rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty())
                .map_err(|e| Error::os("getrandom", &e.into()))?;
        }
        let (migrates, spreads) = apm_from_env()?;
        let migrates = migrates && failover;
        let places = (0..nics.count()).map(|i| nics.place(i)).collect();
        let preference = Preference::from_env(nics.count(), places)?;
        let control_pd = nics.memory(0).alloc_pd()?;
        let inbox = Arc::new(Inbox::new()?);
        let directory = match failover {
            true => Some(wrap(lookout::open(&runtime, nics.host(), inbox.clone())?)),
            false => None,
        };
        Ok(Arc::new(Core {
            born: Born::now(),
            slots: (0..nics.count()).map(|_| Mutex::default()).collect(),
            failover,
            show_events: std::env::var("UNBROKEN_SHOW_EVENTS").is_ok_and(|v| v == "1"),
            goes_home: std::env::var("UNBROKEN_FAILBACK").map_or(true, |v| v != "0"),
            ports: (0..nics.count())
                .map(|i| if migrates { port_count(&nics.attr(i)) } else { 1 })
                .collect(),
            spreads,
            preference,
            away: AtomicBool::new(false),
            talks: std::env::var_os("UNBROKEN_LOG").is_some_and(|v| !v.is_empty() && v != "0"),
            incarnation: u64::from_ne_bytes(seed) | 1,
            log: EventLog::open(&runtime),
            later: Later::new()?,
            runtime,
            directory,
            channel: CompChannel::new()?,
            sink: Arc::new(Sink(inbox.clone())),
            inbox,
            control_pd,
            timeout_code: timeout_from_env()?,
            qps: Mutex::default(),
            busy: Mutex::default(),
            contexts: Mutex::default(),
            peers: Peers::default(),
            aliases: Aliases::new(nics.aliases()),
            key: OnceLock::new(),
            own_key: Key::new(&own_key),
            forged: AtomicU64::new(0),
            outbox: Outbox::default(),
            on_their_way: AtomicU32::new(0),
            receiving: Mutex::default(),
            worker: OnceLock::new(),
            nics,
        }))
    }

    /// Nobody looks after the QPs any more.
    pub(crate) fn stop(&self) {
        self.inbox.stop();
    }

    pub(crate) fn nic_count(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn node_guid(&self, i: usize) -> u64 {
        self.nics.node_guid(i)
    }

    pub(crate) fn nic_name(&self, i: usize) -> String {
        self.nics.name(i)
    }

    pub(crate) fn host(&self) -> String {
        self.nics.host()
    }

    /// What NIC `i` can do beyond plain verbs.
    pub(crate) fn capabilities(&self, i: usize) -> Capabilities {
        self.nics.capabilities(i)
    }

    /// Whether the QPs of NIC `i` hold their work when it fails, so that they can move and others
    /// can move there.
    pub(crate) fn holds(&self, i: usize) -> bool {
        self.nics.capabilities(i).holds
    }

    pub(crate) fn gid_of(&self, i: usize) -> Gid {
        self.nics.gid(i)
    }

    pub(crate) fn first_port(&self, gid: Gid) -> Gid {
        self.nics.first_port(gid)
    }

    pub(crate) fn attr_of(&self, i: usize) -> DeviceAttr {
        self.nics.attr(i)
    }

    /// How many ports of NIC `i` QPs may use.
    pub(crate) fn port_count(&self, i: usize) -> u8 {
        self.ports.get(i).copied().unwrap_or(1)
    }

    /// Whether there is a NIC with several.
    pub(crate) fn several_ports(&self) -> bool {
        self.ports.iter().any(|count| *count > 1)
    }

    /// The GID by which peers reach NIC `i` on that lane.
    fn gid_on(&self, i: usize, lane: u8) -> Gid {
        let gids = self.port_of(i, lane + 1, false).map(|port| port.gids).unwrap_or_default();
        let index = self.device(i).map_or(0, |device| device.gid_index());
        gids.get(usize::from(index)).map(|entry| entry.gid).unwrap_or_default()
    }

    pub(crate) fn port_of(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr> {
        self.nics.port(i, port, usable)
    }

    pub(crate) fn gid_of_lid(&self, i: usize, lid: u16) -> Result<Gid> {
        self.nics.gid_of_lid(i, lid)
    }

    /// Protection domains and regions as contexts of NIC `i` see them.
    pub(crate) fn memory(&self, i: usize) -> Arc<dyn MemoryDomain> {
        self.nics.memory(i)
    }

    /// By which keys a region of ours is known on our NICs.
    pub(crate) fn keys(&self, nic: u8, rkey: u32) -> Option<KeyRow> {
        self.nics.keys(nic, rkey)
    }

    /// Which set of keys NIC `i` has; 0 where keys are good on all NICs.
    pub(crate) fn key_set(&self, i: usize) -> u16 {
        self.nics.key_set(i)
    }

    /// Whether UD QPs can be moved.
    pub(crate) fn moves_datagrams(&self) -> bool {
        self.nics.moves_datagrams()
    }

    pub(crate) fn channel(&self) -> &Arc<CompChannel> {
        &self.channel
    }

    /// The transport timeout of a protected QP whose application asked for `app` (0: none).
    pub(crate) fn protected_timeout(&self, app: u8) -> u8 {
        match (app, self.timeout_code) {
            (app, 0) => app,
            (0, code) => code,
            (app, code) => app.min(code),
        }
    }

    pub(crate) fn emit(&self, what: What) {
        // The log is a report: that it cannot be written must not stop traffic.
        let _ = self.log.emit(&Event::at(what, unbroken_runtime::now_us()));
    }

    /// For the log: what happened at that time, from a thread that is not to wait for it, or that
    /// has many.
    pub(crate) fn emit_later(&self, what: What, time_us: u64) {
        self.write(&self.later.put(what, time_us));
    }

    /// Writes what waits.
    pub(crate) fn write_later(&self) {
        self.write(&self.later.take());
    }

    fn write(&self, events: &[Event]) {
        if !events.is_empty() {
            // As above.
            let _ = self.log.emit_all(events);
        }
    }

    /// The key of the control messages.
    pub(crate) fn key(&self) -> &Key {
        let known = || {
            let key = self.directory.as_ref()?.key()?;
            Some(self.key.get_or_init(|| Key::new(&key)))
        };
        self.key.get().or_else(known).unwrap_or(&self.own_key)
    }

    /// Tells the directory where this process can be reached.
    pub(crate) fn publish_process(&self) {
        let Some(directory) = &self.directory else { return };
        let nics = (0..self.nic_count())
            .map(|i| NicRecord {
                index: i as u32,
                gid: self.gid_of(i),
                control_qpn: self.endpoint(i).map_or(0, |e| e.addr().qpn),
                key_set: self.key_set(i),
                name: self.nic_name(i),
                further_ports: (1..self.port_count(i))
                    .map(|lane| self.port_record(i, lane))
                    .collect(),
            })
            .collect();
        let record = ProcessRecord { pid: std::process::id(), nics };
        if let Err(e) = directory.publish_process(self.incarnation, &record) {
            self.complain("the directory does not take this process's addresses", &e);
        }
    }

    // --- which NICs are to be left, and whether QPs are away
    // ---------------------------------------------------------------------

    /// Whether NIC `i` is to be left.
    pub(crate) fn drained(&self, i: usize) -> bool {
        lock(&self.slots[i]).drained
    }

    pub(crate) fn set_drained(&self, i: usize, drained: bool) {
        lock(&self.slots[i]).drained = drained;
    }

    /// Whether any NIC is to be left.
    pub(crate) fn drains_any(&self) -> bool {
        (0..self.nic_count()).any(|i| self.drained(i))
    }

    /// Whether a NIC other than `i` works and is not to be left.
    pub(crate) fn undrained_elsewhere(&self, i: usize) -> bool {
        self.ring(i).skip(1).any(|j| !self.drained(j) && self.usable(j))
    }

    /// How many QPs are between two paths, or prepare to leave one.
    pub(crate) fn crowd(&self) -> u32 {
        self.on_their_way.load(Ordering::Relaxed)
    }

    /// A QP was one of those, and is.
    pub(crate) fn count_on_their_way(&self, was: bool, is: bool) {
        match (was, is) {
            (false, true) => self.on_their_way.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.on_their_way.fetch_sub(1, Ordering::Relaxed),
            _ => return,
        };
    }

    /// A QP has left its path: it may want to go back.
    pub(crate) fn note_away(&self) {
        self.away.store(true, Ordering::Relaxed);
    }

    pub(crate) fn forget_away(&self) {
        self.away.store(false, Ordering::Relaxed);
    }

    pub(crate) fn anybody_away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }

    /// Lets the directory have what this process has entered, before anybody is told of it. In a
    /// thread of the application, without a gate.
    pub(crate) fn settle(&self) {
        if let Some(directory) = &self.directory {
            directory.settle();
        }
    }

    /// Lets the directory find out about a QP that one is to be connected to. In a thread of the
    /// application, without a gate.
    pub(crate) fn fetch_qp(&self, gid: Gid, qpn: u32) {
        if let Some(directory) = &self.directory {
            directory.fetch_qp(gid, qpn);
        }
    }

    /// The process ends by itself: nothing of it shall be found any more.
    pub(crate) fn close_directory(&self) {
        if let Some(directory) = &self.directory {
            directory.close();
        }
    }

    /// Whether somebody looks after the QPs.
    pub(crate) fn watched(&self) -> bool {
        self.worker.get().is_some_and(|runs| *runs)
    }

    /// A trouble that stops nothing but that the user may want to know of: to stderr, where that
    /// was asked for, and if it can be written.
    pub(crate) fn complain(&self, what: &str, error: &dyn std::fmt::Display) {
        if self.talks {
            let _ = writeln!(std::io::stderr(), "unbroken: {what}: {error}");
        }
    }

    fn port_record(&self, i: usize, lane: u8) -> PortRecord {
        let gid = self.endpoint_on(i, lane).map_or_else(|| self.gid_on(i, lane), |e| e.addr().gid);
        PortRecord { gid, control_qpn: self.endpoint_on(i, lane).map_or(0, |e| e.addr().qpn) }
    }

    /// Sends a control message from port 1 of NIC `local` to the peer's endpoint, at once or,
    /// during a [`Batch`], with others; whether it could leave.
    pub(crate) fn send_control(&self, local: usize, to: ControlAddr, message: &Message) -> bool {
        self.send_control_on(local, 0, to, message)
    }

    /// The same on that lane.
    pub(crate) fn send_control_on(
        &self,
        local: usize,
        lane: u8,
        to: ControlAddr,
        message: &Message,
    ) -> bool {
        self.endpoint_on(local, lane).is_some_and(|e| self.outbox.send(e, to, message, self.key()))
    }

    /// What is sent until this is dropped may leave together.
    pub(crate) fn batch(&self) -> Batch<'_> {
        self.outbox.batch(self.key())
    }

    /// Control datagrams that strangers sent.
    pub(crate) fn forged(&self) -> u64 {
        self.forged.load(Ordering::Relaxed)
    }

    pub(crate) fn count_forged(&self, datagrams: u64) {
        if datagrams > 0 {
            self.forged.fetch_add(datagrams, Ordering::Relaxed);
        }
    }

    /// A random number that a stranger cannot guess: a first PSN, the number of a connection.
    pub(crate) fn random(&self) -> u32 {
        let mut bytes = [0u8; 4];
        // It fails only where the call does not exist; what then remains is a number that differs
        // from call to call.
        if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).is_err() {
            bytes = (unbroken_runtime::now_us() as u32).to_ne_bytes();
        }
        u32::from_ne_bytes(bytes)
    }

    /// Lets every NIC that takes control messages work in the caller's thread.
    pub(crate) fn drive_endpoints(&self) {
        for nic in 0..self.nic_count() {
            if let Some(endpoint) = self.endpoint(nic) {
                endpoint.drive();
            }
        }
    }

    /// Takes in what has arrived at every NIC, waiting for threads that have lost their core in the
    /// middle of their work on one.
    pub(crate) fn drain_nics(&self) {
        (0..self.nic_count()).filter_map(|nic| self.device(nic)).for_each(|device| device.drain());
    }

    // --- QPs
    // -----------------------------------------------------------------------------------------------------------------

    pub(crate) fn add_qp(&self, qp: &Arc<Qp>, nic: usize, physical_qpn: u32) {
        let mut t = lock(&self.qps);
        t.logical.insert(qp.id(), qp.clone());
        t.physical.insert((nic, physical_qpn), qp.id());
    }

    pub(crate) fn remove_qp(&self, id: LogicalId) {
        let mut t = lock(&self.qps);
        t.logical.remove(&id);
        t.physical.retain(|_, l| *l != id);
    }

    /// A logical QP has a new physical one; the old name is forgotten.
    pub(crate) fn rename_physical(&self, id: LogicalId, old: (usize, u32), new: (usize, u32)) {
        let mut t = lock(&self.qps);
        t.physical.remove(&old);
        t.physical.insert(new, id);
    }

    pub(crate) fn qp(&self, id: LogicalId) -> Option<Arc<Qp>> {
        lock(&self.qps).logical.get(&id).cloned()
    }

    pub(crate) fn qp_by_physical(&self, nic: usize, qpn: u32) -> Option<Arc<Qp>> {
        let t = lock(&self.qps);
        t.physical.get(&(nic, qpn)).and_then(|id| t.logical.get(id)).cloned()
    }

    pub(crate) fn qp_by_gid(&self, gid: Gid, qpn: u32) -> Option<Arc<Qp>> {
        let nic = (0..self.nic_count()).find(|i| self.gid_of(*i) == gid)?;
        self.qp((nic, qpn))
    }

    /// A QP has sends outstanding from now on. Each is there once at most ([`Qp::set_busy`]).
    pub(crate) fn add_busy(&self, id: LogicalId) {
        lock(&self.busy).push(id);
    }

    /// The QPs that had sends outstanding; those that still have are to be put back.
    pub(crate) fn take_busy(&self) -> Vec<LogicalId> {
        std::mem::take(&mut *lock(&self.busy))
    }

    pub(crate) fn all_qps(&self) -> Vec<Arc<Qp>> {
        lock(&self.qps).logical.values().cloned().collect()
    }

    pub(crate) fn cq_in_use(&self, cq: &Arc<Cq>) -> bool {
        lock(&self.qps).logical.values().any(|q| q.uses_cq(cq))
    }

    pub(crate) fn srq_in_use(&self, srq: &Arc<Srq>) -> bool {
        lock(&self.qps)
            .logical
            .values()
            .any(|q| q.init.srq.as_ref().is_some_and(|s| Arc::ptr_eq(s, srq)))
    }

    // --- contexts
    // ------------------------------------------------------------------------------------------------------------

    pub(crate) fn add_context(&self, c: &Arc<Context>) {
        let mut cs = lock(&self.contexts);
        cs.retain(|w| w.strong_count() > 0);
        cs.push(Arc::downgrade(c));
    }

    pub(crate) fn remove_context(&self, c: &Context) {
        lock(&self.contexts).retain(|w| !std::ptr::eq(w.as_ptr(), c));
    }

    /// Raises a device or port event on every context of NIC `i`.
    pub(crate) fn raise(&self, i: usize, event_type: u32, element: AsyncElement) {
        self.raise_where(i, event_type, element, |_| true);
    }

    /// The same in some of them.
    pub(crate) fn raise_where(
        &self,
        i: usize,
        event_type: u32,
        element: AsyncElement,
        wanted: impl Fn(&Context) -> bool,
    ) {
        let contexts: Vec<_> = lock(&self.contexts).iter().filter_map(Weak::upgrade).collect();
        for c in contexts.iter().filter(|c| c.nic() == i && wanted(c)) {
            c.raise(event_type, element);
        }
    }
}

fn port_count(attr: &DeviceAttr) -> u8 {
    attr.phys_port_cnt.clamp(1, MAX_PORTS as u8)
}

/// Whether QPs go to other ports, and whether they are spread over them.
fn apm_from_env() -> Result<(bool, bool)> {
    match std::env::var("UNBROKEN_APM").as_deref() {
        Err(_) | Ok("" | "1") => Ok((true, false)),
        Ok("0") => Ok((false, false)),
        Ok("spread") => Ok((true, true)),
        Ok(text) => Err(Error::invalid(format!(
            "UNBROKEN_APM={text}: give 0 (off), 1 (on) or spread (over all ports)"
        ))),
    }
}

fn timeout_from_env() -> Result<u8> {
    let Ok(text) = std::env::var("UNBROKEN_TIMEOUT") else { return Ok(TIMEOUT_CODE) };
    text.parse().ok().filter(|c| *c < 32).ok_or_else(|| {
        Error::invalid(format!(
            "UNBROKEN_TIMEOUT={text}: give 0 (the application's own) or a code from 1 to 31 (4.096 µs · 2^code)"
        ))
    })
}
