//! One device context and its queue pairs: the machine behind a lock, and the verbs that it asks
//! for.
//!
//! The lock is held over a verb of one queue pair, so that what the machine is told is what is so,
//! and [`Handle::remove`] returns when nobody is at it any more. Between queue pairs of a list it
//! is free. Callbacks run without it, one at a time.

use crate::error::{Error, Result};
use crate::machine::{Action, Event, Id, Info, Machine, Refusal, Settings, State};
use crate::path::{choose, Address, Path};
use crate::thread::Reading;
use crate::verbs::Verbs;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};
use unbroken_verbs::abi::{ibv_async_event, ibv_context, ibv_qp};
use unbroken_verbs::{Alarm, EventFd};

/// `enum ibv_event_type`
const QP_FATAL: i32 = 1;
const PATH_MIG: i32 = 6;
const PATH_MIG_ERR: i32 = 7;
const PORT_ACTIVE: i32 = 9;
const PORT_ERR: i32 = 10;

/// The first and the longest pause of a thread that waits by query.
const FIRST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The time of the events.
pub(crate) fn now_us() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live structure; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
}

/// What is called for an event of the library's.
pub(crate) type OnEvent = Box<dyn Fn(&Event) + Send + Sync>;
/// What is called for other asynchronous events.
pub(crate) type OnOther = Box<dyn Fn(&ibv_async_event) + Send + Sync>;

/// How a handle is to be.
pub(crate) struct Options {
    pub(crate) settings: Settings,
    pub(crate) no_thread: bool,
    pub(crate) gid_index: u8,
    /// 0: the device has no such event.
    pub(crate) armed_event: i32,
    pub(crate) on_event: Option<OnEvent>,
    pub(crate) on_other: Option<OnOther>,
}

/// Until when is waited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Until {
    Armed,
    Migrated,
}

pub(crate) struct Inner {
    pub(crate) machine: Machine,
    /// To which process queue pairs lead, where the program has said it.
    processes: HashMap<Id, u64>,
    /// As they were when the program asked for them: the peer has these.
    own: Option<Vec<Address>>,
    /// The queue pair and the thread of the callback that runs.
    delivering: Option<(Id, ThreadId)>,
    /// A port may have gone down.
    look_at_ports: bool,
    /// So many threads wait for a change: else nobody need be told, which is a system call.
    waiting: u32,
    /// Until when the thread sleeps; 0: it does not, and sets its alarm before it does.
    pub(crate) sleeps_until_us: u64,
    ready: bool,
}

/// A handle of the C API.
pub(crate) struct Handle {
    pub(crate) verbs: Verbs,
    context: *mut ibv_context,
    pub(crate) options: Options,
    ports: u8,
    inner: Mutex<Inner>,
    changed: Condvar,
    ready: EventFd,
    /// Wakes the thread.
    pub(crate) wake: EventFd,
    /// Wakes it when something falls due; set under the lock.
    pub(crate) alarm: Alarm,
    pub(crate) reading: Reading,
    pub(crate) stop: AtomicBool,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
    pub(crate) thread_id: OnceLock<ThreadId>,
}

// SAFETY: the context is the program's, which keeps it open, and libibverbs' functions may be
// called from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; all else is behind locks.
unsafe impl Sync for Handle {}

impl Handle {
    /// # Safety
    /// A live context, which stays open as long as the handle.
    pub(crate) unsafe fn open(context: *mut ibv_context, options: Options) -> Result<Handle> {
        let verbs = Verbs::of_process()?;
        // SAFETY: as the caller says.
        let (ports, migrates) = unsafe { verbs.device(context) }?;
        if !migrates {
            return Err(Error::new(
                libc::EOPNOTSUPP,
                "the device has no automatic path migration (IBV_DEVICE_AUTO_PATH_MIG); here it \
                 takes NICs with two ports",
            ));
        }
        let eventfd =
            || EventFd::new(false, true).map_err(|e| Error::new(libc::EMFILE, e.to_string()));
        let inner = Inner {
            machine: Machine::new(options.settings),
            processes: HashMap::new(),
            own: None,
            delivering: None,
            look_at_ports: false,
            waiting: 0,
            sleeps_until_us: 0,
            ready: false,
        };
        let handle = Handle {
            verbs,
            context,
            options,
            ports,
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            ready: eventfd()?,
            wake: eventfd()?,
            alarm: Alarm::new().map_err(|e| Error::new(libc::EMFILE, e.to_string()))?,
            // SAFETY: the context is open, as the caller says.
            reading: Reading::new(unsafe { (*context).async_fd })?,
            stop: AtomicBool::new(false),
            thread: Mutex::new(None),
            thread_id: OnceLock::new(),
        };
        handle.look_at_ports(&mut handle.lock());
        Ok(handle)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn context(&self) -> *mut ibv_context {
        self.context
    }

    /// The descriptor that is readable while there are events.
    pub(crate) fn fd(&self) -> RawFd {
        self.ready.as_raw_fd()
    }

    /// The queue pairs of a list, or all.
    pub(crate) fn all(&self, list: Option<Vec<Id>>) -> Vec<Id> {
        list.unwrap_or_else(|| self.lock().machine.ids())
    }

    // Lists of queue pairs

    /// Does something with each, and gives the first error, with the queue pair's name.
    fn each(&self, ids: &[Id], mut run: impl FnMut(&mut Inner, Id) -> Result<()>) -> Result<()> {
        let mut first = Ok(());
        for id in ids {
            let inner = &mut *self.lock();
            // Only what was added is known to be there.
            let name = if inner.machine.has(*id) {
                self.name(*id)
            } else {
                format!("queue pair at {id:#x}")
            };
            if let (Err(error), true) = (run(inner, *id), first.is_ok()) {
                first = Err(error.of(&name));
            }
        }
        self.after(&mut self.lock());
        first
    }

    /// Of one that was added.
    fn name(&self, id: Id) -> String {
        // SAFETY: it is not destroyed before it is removed.
        let number = unsafe { (*qp(id)).qp_num };
        format!("queue pair {number:#x}")
    }

    pub(crate) fn add(&self, ids: &[Id]) -> Result<()> {
        let context = self.context;
        self.each(ids, |inner, id| {
            if inner.machine.has(id) {
                return Err(Refusal::Twice.into());
            }
            // SAFETY: the program adds live queue pairs.
            if unsafe { (*qp(id)).context } != context {
                return Err(Error::invalid(
                    "it belongs to another context than this handle was opened for",
                ));
            }
            // SAFETY: as above.
            let now = unsafe { self.verbs.query(qp(id)) }?;
            if now.broken {
                return Err(Error::invalid(
                    "it is not connected, or in error: in RTS it can be added",
                ));
            }
            Ok(inner.machine.add(id, now, now_us())?)
        })
    }

    /// Returns when no callback is about them but the caller's own.
    pub(crate) fn remove(&self, ids: &[Id]) -> Result<()> {
        let done = self.each(ids, |inner, id| {
            inner.processes.remove(&id);
            Ok(inner.machine.remove(id)?)
        });
        let gone: HashSet<Id> = ids.iter().copied().collect();
        let mut inner = self.lock();
        while inner
            .delivering
            .is_some_and(|(id, who)| gone.contains(&id) && who != std::thread::current().id())
        {
            inner.waiting += 1;
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
            inner.waiting -= 1;
        }
        done
    }

    /// They lead to this process.
    pub(crate) fn set_process(&self, ids: &[Id], process: u64) -> Result<()> {
        self.each(ids, |inner, id| {
            if !inner.machine.has(id) {
                return Err(Refusal::Unknown.into());
            }
            inner.processes.insert(id, process);
            Ok(())
        })
    }

    /// The queue pairs that lead to these processes.
    pub(crate) fn of_processes(&self, processes: &[u64]) -> Result<Vec<Id>> {
        let inner = self.lock();
        let wanted: HashSet<u64> = processes.iter().copied().collect();
        let leads = |id: &Id| wanted.contains(inner.processes.get(id).unwrap_or(&0));
        let found: Vec<Id> = inner.machine.ids().into_iter().filter(leads).collect();
        match found.is_empty() {
            true => Err(Error::new(
                libc::ENOENT,
                "no queue pair leads to one of these processes: unbapm_set_process says which do",
            )),
            false => Ok(found),
        }
    }

    pub(crate) fn specify(&self, ids: &[Id], paths: &[Path]) -> Result<()> {
        for path in paths {
            self.check(path)?;
        }
        self.each(ids, |inner, id| Ok(inner.machine.specify(id, paths)?))
    }

    /// What there is not, which the device would refuse when it is loaded.
    fn check(&self, Path { attr: path, timeout }: &Path) -> Result<()> {
        let ports = self.ports;
        if path.port == 0 || path.port > ports {
            return Err(Error::invalid(format!(
                "ah.port_num is {}: the device has ports 1 to {ports}",
                path.port
            )));
        }
        if *timeout > 31 {
            return Err(Error::invalid(format!("timeout is {timeout}: codes are 0 to 31")));
        }
        // SAFETY: the context is open.
        let own = unsafe { self.verbs.address(self.context, path.port, path.sgid_index) }?;
        if own.ethernet && !path.grh {
            return Err(Error::invalid(format!(
                "port {} is RoCE: ah.is_global with grh.dgid is needed",
                path.port
            )));
        }
        if !own.ethernet && path.dlid == 0 {
            return Err(Error::invalid(format!(
                "port {} is InfiniBand: ah.dlid is needed",
                path.port
            )));
        }
        if u16::from(path.src_path_bits) >= 1 << own.lmc.min(8) {
            let (bits, lmc) = (path.src_path_bits, own.lmc);
            return Err(Error::invalid(format!(
                "ah.src_path_bits is {bits}: port {} has 2^{lmc} LIDs",
                path.port
            )));
        }
        Ok(())
    }

    pub(crate) fn choose(&self, ids: &[Id], peer: &[Address]) -> Result<()> {
        let known = self.lock().own.clone();
        let own = known.map_or_else(|| self.addresses(), Ok)?;
        self.each(ids, |inner, id| {
            let primary = inner.machine.info(id)?.primary;
            Ok(inner.machine.specify(id, &choose(&primary, &own, peer)?)?)
        })
    }

    /// Of all ports that have the GID; kept, since the peer is given them.
    pub(crate) fn addresses(&self) -> Result<Vec<Address>> {
        let index = self.options.gid_index;
        // SAFETY: the context is open.
        let each =
            (1..=self.ports).map(|port| unsafe { self.verbs.address(self.context, port, index) });
        let found = each.collect::<Result<Vec<_>>>()?;
        self.lock().own = Some(found.clone());
        Ok(found)
    }

    pub(crate) fn load(&self, ids: &[Id]) -> Result<()> {
        self.look_at_ports(&mut self.lock());
        self.each(ids, |inner, id| {
            let path = inner.machine.begin_load(id, now_us())?;
            self.give(inner, id, &path)
        })
    }

    fn give(&self, inner: &mut Inner, id: Id, path: &Path) -> Result<()> {
        let as_now = inner.machine.info(id)?.primary.timeout;
        let timeout = if path.timeout == 0 { as_now } else { path.timeout };
        // SAFETY: it was added, and is not destroyed before it is removed, for which the lock is
        // needed.
        let given = unsafe { self.verbs.load(qp(id), path, timeout) };
        match &given {
            Ok(()) => inner.machine.loaded(id, now_us()),
            Err(error) => inner.machine.refused(id, error.errno, now_us()),
        }
        given
    }

    pub(crate) fn migrate(&self, ids: &[Id]) -> Result<()> {
        let ask = |inner: &mut Inner, id| {
            inner.machine.begin_migrate(id, now_us())?;
            // SAFETY: as in `give`.
            let asked = unsafe { self.verbs.migrate(qp(id)) };
            if asked.is_err() {
                inner.machine.migration_refused(id);
            }
            asked
        };
        self.reads_while(ids.len(), || self.each(ids, ask))
    }

    pub(crate) fn info(&self, id: Id) -> Result<Info> {
        self.lock()
            .machine
            .info(id)
            .map_err(|e| Error::from(e).of(&format!("queue pair at {id:#x}")))
    }

    fn query(&self, inner: &mut Inner, id: Id) {
        // SAFETY: as in `give`.
        match unsafe { self.verbs.query(qp(id)) } {
            Ok(it) => inner.machine.observed(id, it, now_us()),
            Err(_) => inner.machine.unanswered(id, now_us()),
        }
    }

    // Waiting

    /// Waits for all of them; `asks`: this thread queries the device.
    pub(crate) fn wait(&self, ids: &[Id], until: Until, asks: bool, limit: Duration) -> Result<()> {
        if self.is_own_thread() {
            return Err(Error::new(
                libc::EDEADLK,
                "unbapm_wait in a callback would wait for itself",
            ));
        }
        let ends = Instant::now() + limit;
        let (mut pause, mut left) = (FIRST_PAUSE, ids);
        loop {
            if asks {
                self.ask(left);
            }
            let mut inner = self.lock();
            left = self.still(&inner, left, until)?;
            if left.is_empty() {
                return Ok(());
            }
            let rest = ends.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                let state = inner.machine.info(left[0])?.state;
                let name = crate::error::state_name(state);
                let text =
                    format!("{} of {} after {limit:?}; the first is {name}", left.len(), ids.len());
                return Err(Error::new(libc::ETIMEDOUT, text).of(&self.name(left[0])));
            }
            if asks {
                drop(inner);
                std::thread::sleep(pause.min(rest));
                pause = (pause * 2).min(LONGEST_PAUSE);
            } else {
                inner.waiting += 1;
                let (mut inner, _) =
                    self.changed.wait_timeout(inner, rest).unwrap_or_else(PoisonError::into_inner);
                inner.waiting -= 1;
            }
        }
    }

    /// Asks the device about each.
    fn ask(&self, ids: &[Id]) {
        for id in ids {
            let inner = &mut *self.lock();
            if inner.machine.has(*id) {
                self.query(inner, *id);
            }
        }
        self.after(&mut self.lock());
        if self.options.no_thread {
            self.progress();
            self.deliver();
        }
    }

    /// Those of a list from the first on that is not there yet.
    fn still<'a>(&self, inner: &Inner, ids: &'a [Id], until: Until) -> Result<&'a [Id]> {
        for (i, id) in ids.iter().enumerate() {
            let info = inner
                .machine
                .info(*id)
                .map_err(|e| Error::from(e).of(&format!("queue pair at {id:#x}")))?;
            if info.state == State::Failed {
                let text = "it has failed: the device refused its path, or it is in error";
                return Err(Error::new(libc::EIO, text).of(&self.name(*id)));
            }
            let there = match until {
                Until::Armed => info.state == State::Armed,
                Until::Migrated => info.state != State::Migrating,
            };
            if !there {
                return Ok(&ids[i..]);
            }
        }
        Ok(&[])
    }

    // Events and time

    /// Takes an asynchronous event of the context in; gives whether it was about migration of queue
    /// pairs that were added.
    ///
    /// # Safety
    /// An event that was not acknowledged.
    pub(crate) unsafe fn take_in(&self, event: &ibv_async_event) -> bool {
        let now = now_us();
        let armed = self.options.armed_event != 0 && event.event_type == self.options.armed_event;
        let inner = &mut *self.lock();
        match event.event_type {
            PORT_ACTIVE | PORT_ERR => {
                // SAFETY: this part is the one of such an event.
                let port = unsafe { event.element.port_num };
                if let Ok(port) = u8::try_from(port) {
                    inner.machine.port(port, event.event_type == PORT_ACTIVE, now);
                }
                return false;
            }
            QP_FATAL | PATH_MIG | PATH_MIG_ERR => {}
            _ if armed => {}
            _ => return false,
        }
        // SAFETY: this part is the one of such an event.
        let id = unsafe { event.element.qp }.expose_provenance();
        if !inner.machine.has(id) {
            return false;
        }
        match event.event_type {
            PATH_MIG => {
                inner.look_at_ports = true;
                inner.machine.migrated(id, now);
            }
            PATH_MIG_ERR => inner.machine.migration_failed(id, now),
            // The query finds a queue pair in error, or one that is ARMED.
            _ => inner.machine.look(id, now),
        }
        event.event_type != QP_FATAL
    }

    /// Does what is due; gives when there is more.
    pub(crate) fn progress(&self) -> Option<u64> {
        let inner = &mut *self.lock();
        if std::mem::take(&mut inner.look_at_ports) {
            self.look_at_ports(inner);
        }
        for action in inner.machine.due(now_us()) {
            match action {
                Action::Query(id) => self.query(inner, id),
                // The machine tells the owner of a refusal.
                Action::Load(id, path) => drop(self.give(inner, id, &path)),
            }
        }
        self.after(inner);
        inner.machine.next_us()
    }

    fn look_at_ports(&self, inner: &mut Inner) {
        for port in 1..=self.ports {
            // SAFETY: the context is open.
            let up = unsafe { self.verbs.is_up(self.context, port) };
            inner.machine.port(port, up, now_us());
        }
    }

    fn notify(&self, inner: &Inner) {
        if inner.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Tells whoever waits that something may have changed.
    pub(crate) fn after(&self, inner: &mut Inner) {
        self.notify(inner);
        let has_events = inner.machine.has_events();
        if has_events
            && self.options.on_event.is_none()
            && !std::mem::replace(&mut inner.ready, true)
        {
            self.ready.signal();
        }
        if self.options.no_thread || self.is_own_thread() {
            return;
        }
        if has_events && self.options.on_event.is_some() {
            inner.sleeps_until_us = 0;
            self.wake.signal();
        } else if inner.machine.next_us().is_some_and(|at_us| at_us < inner.sleeps_until_us) {
            self.set_alarm(inner);
        }
    }

    /// Calls the program for each event.
    pub(crate) fn deliver(&self) {
        let Some(on_event) = &self.options.on_event else { return };
        loop {
            let mut inner = self.lock();
            // Another thread is at it, or this one, further out: it goes on until none is left.
            if inner.delivering.is_some() {
                return;
            }
            inner.machine.take_lost();
            let Some(event) = inner.machine.take_event() else { return };
            inner.delivering = Some((event.id, std::thread::current().id()));
            drop(inner);
            on_event(&event);
            let mut inner = self.lock();
            inner.delivering = None;
            self.notify(&inner);
        }
    }

    /// Events that were not taken, the oldest first; whether some were lost.
    pub(crate) fn take_events(&self, most: usize) -> (Vec<Event>, bool) {
        let inner = &mut *self.lock();
        let taken = (0..most).map_while(|_| inner.machine.take_event()).collect();
        if !inner.machine.has_events() && std::mem::take(&mut inner.ready) {
            // It was signalled, so nobody waits; where another one has read it, there is nothing to
            // take.
            drop(self.ready.take());
        }
        (taken, inner.machine.take_lost())
    }

    pub(crate) fn is_own_thread(&self) -> bool {
        self.thread_id.get() == Some(&std::thread::current().id())
    }
}

/// The queue pair of a name here.
pub(crate) fn qp(id: Id) -> *mut ibv_qp {
    std::ptr::with_exposed_provenance_mut(id)
}
