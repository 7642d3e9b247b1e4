//! Completion queues.
//!
//! A [`Cq`] is a bounded ring of [`Wc`]s under a short lock. Engines push, the application polls. A
//! poll that finds nothing drives the devices whose QPs complete here (the *inline* progress of
//! softnic), so a busy-polling program needs no other thread.
//!
//! Invariants: WCs of one QP are polled in the order in which they were pushed; a WC is polled at
//! most once; a full ring loses nothing silently: it marks the CQ as overrun, every later poll says
//! so, the owner is told once ([`Cq::with_overrun_hook`]), and the QP whose completion found no
//! room learns it by the answer of [`Cq::offer`].
//!
//! Events are those of the specification: a completion that comes while the queue is armed raises
//! one; what is there already when it is armed raises none, so programs poll after arming. One that
//! does not (Open MPI's udcm, which connects by it, polls, arms and sleeps) would wait for ever for
//! what came in between. So a queue that is armed while something waits in it that has come since
//! its last event *owes* an event, which is raised when the program waits for one
//! ([`CompChannel::get_event`]), or after a moment ([`Driver::remind_later`]), where that is not
//! polled until then. A program that does poll gets no event without a completion (`ibv_rc_pingpong
//! -e -t` ends at one). An event that was raised is never taken back: the program may have seen its
//! descriptor readable.
//!
//! Lock order: `drivers` (read) → the turn ([`Cq::turn`]) → a device's engine → `ring`. A driver
//! never attaches or detaches drivers, nor looks at those of a queue that it brings completions to.

mod direct;

use crate::{CompChannel, Error, Owner, Result};
use direct::Direct;
pub use direct::{Source, Turn, BATCH};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use unbroken_types::{Wc, WcStatus};

/// Something that makes progress when it is driven: the engine of a software NIC, or the poller of
/// a real one.
pub trait Driver: Send + Sync {
    /// Does what can be done now without waiting. Called by application threads; must not block.
    fn drive(&self);

    /// The queue of its own that it brings completions from, if it has one. Polls then drive the
    /// device behind that queue themselves, and have this driver [`fetch`](Self::fetch) only where
    /// something is in it; one with a [`Source`] they poll, and have this driver
    /// [`deliver`](Self::deliver) what they find.
    fn own_queue(&self) -> Option<Arc<Cq>> {
        None
    }

    /// Brings what is in its own queue, unless another thread is at it.
    fn fetch(&self) {}

    /// Takes completions that came out of the [`Source`] of its own queue, and brings what is
    /// there besides. The caller has the turn of the queue that they are for.
    fn deliver(&self, _wcs: &[Wc]) {}

    /// The application has asked for an event: it will probably wait for it instead of polling.
    /// Must not block.
    fn about_to_wait(&self) {}

    /// A driver that brings completions from a queue of its own brings those that are known to be
    /// there: the queue is about to be armed, and they are not what is asked for.
    fn bring(&self) {}

    /// The queue has been armed. A driver that brings completions from a queue of its own arms that
    /// one, too, and brings what has come meanwhile: so while the queue is armed, its own one is,
    /// or the next completion is on its way.
    fn arm(&self, _solicited_only: bool) {}

    /// Has [`Cq::remind`] called with that number by a thread of its own after a moment, long
    /// enough for a program that polls once it has armed. False where there is no such thread:
    /// whoever asks does it himself. Must not block.
    fn remind_later(&self, _cq: &Weak<Cq>, _owed_for: u64) -> bool {
        false
    }
}

/// When the next pushed WC raises an event on the channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Armed {
    No,
    Solicited,
    Any,
}

struct Ring {
    /// Power-of-two storage; `head` and `len` in entries.
    slots: Box<[Wc]>,
    head: usize,
    len: usize,
    /// What the application asked for; at most `slots.len()`.
    limit: usize,
    armed: Armed,
    /// WCs pushed so far, those without room included; the WC pushed last has this number.
    pushed: u64,
    /// The numbers of the last WC, and of the last that a request for solicited ones is for, that
    /// came since the last event. 0: none.
    silent: u64,
    silent_solicited: u64,
    /// The program armed the queue while this WC waited, one of those, and has got no event yet. 0:
    /// none.
    owed_for: u64,
    overrun: bool,
    /// See [`Cq::nudge`].
    nudged: bool,
}

impl Ring {
    /// What pollers are told of its length: an overrun ring has something to say to them, even
    /// where it is empty, as has one that was nudged.
    fn hint(&self) -> u32 {
        (self.len as u32).max(u32::from(self.overrun || self.nudged))
    }

    /// Takes note of a WC that has been pushed; whether it raises the event that was asked for.
    #[inline]
    fn came(&mut self, solicited: bool) -> bool {
        self.pushed += 1;
        let fire = match self.armed {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => solicited,
        };
        if fire {
            self.said();
            return true;
        }
        self.silent = self.pushed;
        if solicited {
            self.silent_solicited = self.pushed;
        }
        false
    }

    /// An event is raised, for all that is there.
    fn said(&mut self) {
        (self.armed, self.silent, self.silent_solicited, self.owed_for) = (Armed::No, 0, 0, 0);
    }

    /// The last WC that waits, that the queue is armed for, and that came since the last event. 0:
    /// none.
    fn waits_in_silence(&self) -> u64 {
        let last = match self.armed {
            Armed::No => 0,
            Armed::Solicited => self.silent_solicited,
            Armed::Any => self.silent,
        };
        if self.waits(last) {
            last
        } else {
            0
        }
    }

    /// Whether the WC of that number waits. Those that wait are the last `len`, see [`Cq::purge`].
    fn waits(&self, number: u64) -> bool {
        number > self.pushed - self.len as u64
    }
}

/// Told the cookie of a queue when it overruns, once. Called with a device's lock held: it may
/// queue and wake, nothing else.
pub type OverrunHook = Box<dyn Fn(u64) + Send + Sync>;

/// A driver of a queue.
struct Attached {
    driver: Arc<dyn Driver>,
    /// QPs that complete here by it. Above 0 it is counted under the read lock, so that neither a
    /// QP that is made nor one that ends waits for whoever polls.
    qps: AtomicU32,
    /// Of one with a queue of its own: what drives that, and the queue.
    behind: Option<(Arc<dyn Driver>, Arc<Cq>)>,
    /// Of one whose own queue has a source: the queue.
    direct: Option<Arc<Cq>>,
}

impl Attached {
    fn new(driver: &Arc<dyn Driver>) -> Attached {
        let own = driver.own_queue();
        let direct = own.clone().filter(|queue| queue.source.is_some());
        let behind = own.and_then(|queue| Some((queue.sole_driver()?, queue)));
        Attached { driver: driver.clone(), qps: AtomicU32::new(1), behind, direct }
    }

    /// Changes the count of a driver's QPs. False where there is no such driver, or `step` will
    /// not.
    fn count(ds: &[Attached], driver: &Arc<dyn Driver>, step: impl Fn(u32) -> Option<u32>) -> bool {
        let found = ds.iter().find(|attached| Arc::ptr_eq(&attached.driver, driver));
        found.is_some_and(|attached| {
            attached.qps.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).is_ok()
        })
    }

    #[inline(always)]
    fn drive(&self) {
        let Some((device, queue)) = &self.behind else { return self.driver.drive() };
        device.drive();
        if !queue.looks_empty() {
            self.driver.fetch();
        }
    }
}

/// What polls that find nothing do besides ([`Cq::set_idle_hook`]): they look at a channel of
/// somebody else's, and do what he has for them when there are events, and each time that a byte of
/// counted polls has run over: every 50 to 200 µs of a thread that polls all the time.
pub struct IdleHook {
    polls: AtomicU8,
    channel: Arc<CompChannel>,
    /// It may do what a driver must not, such as making QPs.
    look: Box<dyn Fn() + Send + Sync>,
}

impl IdleHook {
    /// Looks at that channel, and calls `look`.
    pub fn new(channel: &Arc<CompChannel>, look: impl Fn() + Send + Sync + 'static) -> IdleHook {
        IdleHook { polls: AtomicU8::new(0), channel: channel.clone(), look: Box::new(look) }
    }

    #[inline(always)]
    fn polled(&self) {
        // A count that two threads change at once may lose one: that is harmless, and cheaper.
        let polls = self.polls.load(Ordering::Relaxed).wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
        if polls == 0 || self.channel.has_events() {
            (self.look)();
        }
    }
}

/// A completion queue.
pub struct Cq {
    me: Weak<Cq>,
    ring: Mutex<Ring>,
    /// Hint for pollers: entries in the ring, see [`Ring::hint`]. Written under the ring's lock.
    len: AtomicU32,
    /// Told the cookie when the queue overruns.
    on_overrun: Option<OverrunHook>,
    drivers: RwLock<Vec<Attached>>,
    /// The only driver, where it has a source.
    direct: Direct,
    /// What is polled in place of the ring.
    source: Option<Arc<dyn Source>>,
    idle: OnceLock<IdleHook>,
    channel: Option<Arc<CompChannel>>,
    owner: Owner,
    /// Whatever the C layer wants back with an event: the address of its `ibv_cq`.
    cookie: AtomicU64,
}

impl Cq {
    /// A queue of at least `entries` WCs (at least 1).
    pub fn new(entries: u32, channel: Option<Arc<CompChannel>>) -> Arc<Cq> {
        Cq::make(Owner::PROCESS, entries, channel, None, None)
    }

    /// The same with somebody who is told when it overruns, see [`OverrunHook`].
    pub fn with_overrun_hook(
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: impl Fn(u64) + Send + Sync + 'static,
    ) -> Arc<Cq> {
        Cq::make(Owner::PROCESS, entries, channel, Some(Box::new(on_overrun)), None)
    }

    /// The same for a device. EINVAL where the channel is another's.
    pub fn of_device(
        owner: Owner,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        Cq::check_channel(owner, channel.as_ref())?;
        Ok(Cq::make(owner, entries, channel, Some(on_overrun), None))
    }

    /// The same for a device whose completions are polled from a queue of its provider's.
    pub fn of_source(
        owner: Owner,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
        source: Arc<dyn Source>,
    ) -> Result<Arc<Cq>> {
        Cq::check_channel(owner, channel.as_ref())?;
        Ok(Cq::make(owner, entries, channel, Some(on_overrun), Some(source)))
    }

    fn check_channel(owner: Owner, channel: Option<&Arc<CompChannel>>) -> Result<()> {
        match channel.is_some_and(|channel| channel.owner != owner) {
            true => Err(Error::invalid("the completion channel belongs to another device")),
            false => Ok(()),
        }
    }

    fn make(
        owner: Owner,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: Option<OverrunHook>,
        source: Option<Arc<dyn Source>>,
    ) -> Arc<Cq> {
        let limit = (entries.max(1) as usize).next_power_of_two();
        Arc::new_cyclic(|me| Cq {
            me: me.clone(),
            ring: Mutex::new(Ring {
                slots: vec![Wc::default(); limit].into_boxed_slice(),
                head: 0,
                len: 0,
                limit,
                armed: Armed::No,
                pushed: 0,
                silent: 0,
                silent_solicited: 0,
                owed_for: 0,
                overrun: false,
                nudged: false,
            }),
            len: AtomicU32::new(0),
            on_overrun,
            drivers: RwLock::new(Vec::new()),
            direct: Direct::default(),
            source,
            idle: OnceLock::new(),
            channel,
            owner,
            cookie: AtomicU64::new(0),
        })
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Entries that fit.
    pub fn capacity(&self) -> u32 {
        self.ring().limit as u32
    }

    /// Changes how many entries fit to at least `entries` (at least 1). What waits stays; EINVAL
    /// where it would not fit. A queue with a source must not be polled meanwhile: not every
    /// provider can do both at once.
    pub fn resize(&self, entries: u32) -> Result<()> {
        if let Some(source) = &self.source {
            source.resize(entries)?;
        }
        let limit = (entries.max(1) as usize).next_power_of_two();
        let mut r = self.ring();
        if r.len > entries as usize {
            return Err(Error::invalid(format!(
                "{entries} entries are too few: {} completions wait to be polled",
                r.len
            )));
        }
        if limit != r.limit {
            let mut slots = vec![Wc::default(); limit].into_boxed_slice();
            let mask = r.slots.len() - 1;
            for (i, slot) in slots.iter_mut().enumerate().take(r.len) {
                *slot = r.slots[(r.head + i) & mask];
            }
            (r.slots, r.head, r.limit) = (slots, 0, limit);
        }
        Ok(())
    }

    /// Whose QPs complete here.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// The channel that the queue was made with.
    pub fn channel(&self) -> Option<&Arc<CompChannel>> {
        self.channel.as_ref()
    }

    /// Sets what events of this queue carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.cookie.store(cookie, Ordering::Release);
    }

    /// What events of this queue carry.
    pub fn cookie(&self) -> u64 {
        self.cookie.load(Ordering::Acquire)
    }

    /// Appends a completion; raises an event where one was asked for. A full queue becomes overrun
    /// instead.
    pub fn push(&self, wc: Wc, solicited: bool) {
        self.offer(wc, solicited);
    }

    /// The same for a QP, which must end if it is told false: its completion is lost.
    pub fn offer(&self, wc: Wc, solicited: bool) -> bool {
        let mut r = self.ring();
        let fits = r.len < r.limit;
        let mut news = false;
        if fits {
            let mask = r.slots.len() - 1;
            let at = (r.head + r.len) & mask;
            r.slots[at] = wc;
            r.len += 1;
            self.len.store(r.hint(), Ordering::Release);
        } else {
            news = !std::mem::replace(&mut r.overrun, true);
        }
        let fire = r.came(solicited || wc.status != WcStatus::Success as u32);
        drop(r);
        if fire {
            self.raise();
        }
        if let (true, Some(tell)) = (news, &self.on_overrun) {
            tell(self.cookie());
        }
        fits
    }

    /// Whether [`Self::take`] would find nothing, as far as can be seen without a lock.
    #[inline]
    pub fn looks_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// How many wait, as far as can be seen without a lock; 1 also where polls are to say that it
    /// overran.
    #[inline]
    pub fn waiting(&self) -> u32 {
        self.len.load(Ordering::Acquire)
    }

    /// Takes up to `out.len()` completions that are there; drives nothing.
    #[inline]
    pub fn take(&self, out: &mut [Wc]) -> Result<usize> {
        match self.looks_empty() {
            true => Ok(0),
            false => self.take_some(out),
        }
    }

    #[inline(never)]
    fn take_some(&self, out: &mut [Wc]) -> Result<usize> {
        let mut r = self.ring();
        if r.overrun {
            return Err(Error::device_gone(
                "the completion queue overran: make it with more entries",
            ));
        }
        let n = out.len().min(r.len);
        let mask = r.slots.len() - 1;
        for (i, slot) in out[..n].iter_mut().enumerate() {
            *slot = r.slots[(r.head + i) & mask];
        }
        r.head = (r.head + n) & mask;
        r.len -= n;
        self.len.store(r.hint(), Ordering::Release);
        Ok(n)
    }

    /// Takes up to `out.len()` completions; drives the devices behind the queue when there are
    /// none.
    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize> {
        if self.looks_empty() && !out.is_empty() {
            if !self.direct.bring() {
                if let Some(source) = &self.source {
                    return self.poll_source(&**source, out);
                }
                self.drive();
            }
            if let Some(hook) = self.idle.get() {
                hook.polled();
            }
        }
        self.take(out)
    }

    /// Whether a provider's queue is all that is to be asked, and has nothing: what most polls of a
    /// busy program find. Otherwise [`Self::poll`] says what there is.
    #[inline(always)]
    pub fn finds_nothing(&self) -> bool {
        let nothing = self.looks_empty() && self.direct.finds_nothing();
        if nothing {
            if let Some(hook) = self.idle.get() {
                hook.polled();
            }
        }
        nothing && self.looks_empty()
    }

    fn poll_source(&self, source: &dyn Source, out: &mut [Wc]) -> Result<usize> {
        usize::try_from(source.poll(out)).or_else(|_| {
            self.lose();
            self.take(out)
        })
    }

    /// Whether it has a [`Source`]: what is there is then seen by a poll alone.
    pub fn has_source(&self) -> bool {
        self.source.is_some()
    }

    /// The right to bring completions to this queue from the [`Source`] of another, waiting for
    /// whoever has it.
    pub fn turn(&self) -> Turn<'_> {
        self.direct.turn()
    }

    /// The same unless another thread has it.
    pub fn try_turn(&self) -> Option<Turn<'_>> {
        self.direct.try_turn()
    }

    /// Has every poll that finds nothing tell `hook`, too, after the devices were driven and with
    /// no lock held. The first hook stays.
    pub fn set_idle_hook(&self, hook: IdleHook) {
        let _ = self.idle.set(hook);
    }

    /// Drives the devices whose QPs complete here.
    pub fn drive(&self) {
        for attached in self.drivers.read().unwrap_or_else(PoisonError::into_inner).iter() {
            attached.drive();
        }
    }

    /// Whether polls, and [`Cq::looks_empty`], are to take the queue for one that has something:
    /// its owner has something to do that is not here.
    pub fn nudge(&self, nudged: bool) {
        let mut r = self.ring();
        r.nudged = nudged;
        self.len.store(r.hint(), Ordering::Release);
    }

    /// Asks for one event at the next completion (`ibv_req_notify_cq`), or soon where one waits
    /// that has come since the last event and is not polled now; and tells the devices that the
    /// caller's polling may end.
    pub fn req_notify(&self, solicited_only: bool) {
        for attached in self.drivers.read().unwrap_or_else(PoisonError::into_inner).iter() {
            attached.driver.about_to_wait();
        }
        self.arm(solicited_only);
        let mut r = self.ring();
        // What is owed for one that waits since an earlier call comes in its time: each call would
        // else put it off.
        let known = r.waits(r.owed_for);
        if !known {
            r.owed_for = r.waits_in_silence();
        }
        let owed_for = if known { 0 } else { r.owed_for };
        drop(r);
        if let (true, Some(channel)) = (owed_for != 0, &self.channel) {
            channel.owe(&self.me);
            if !self.remind_later(&self.me, owed_for) {
                self.remind(None);
            }
        }
    }

    /// Asks for one event at the next completion, by a thread that polls after this call, and never
    /// for the devices, so that it takes nothing from one that does.
    pub fn arm(&self, solicited_only: bool) {
        let drivers = self.drivers.read().unwrap_or_else(PoisonError::into_inner);
        drivers.iter().for_each(|attached| attached.driver.bring());
        let mut r = self.ring();
        // A request for any completion is not weakened by a later one for solicited ones.
        r.armed =
            if solicited_only && r.armed != Armed::Any { Armed::Solicited } else { Armed::Any };
        let solicited_only = r.armed == Armed::Solicited;
        drop(r);
        if let Some(source) = &self.source {
            source.arm(solicited_only);
        }
        drivers.iter().for_each(|attached| attached.driver.arm(solicited_only));
    }

    /// Whether an event was asked for that has not come: for solicited completions alone, or for
    /// any.
    pub fn armed(&self) -> Option<bool> {
        match self.ring().armed {
            Armed::No => None,
            armed => Some(armed == Armed::Solicited),
        }
    }

    /// Has drivers with a queue of their own bring all that is there, waiting for whoever is at it:
    /// what another thread has taken out counts as brought only when it is here.
    pub fn bring(&self) {
        let drivers = self.drivers.read().unwrap_or_else(PoisonError::into_inner);
        drivers.iter().for_each(|attached| attached.driver.bring());
    }

    /// The device says that completions of this queue are lost: it counts as overrun.
    #[cold]
    pub fn lose(&self) {
        let mut r = self.ring();
        let news = !std::mem::replace(&mut r.overrun, true);
        self.len.store(r.hint(), Ordering::Release);
        drop(r);
        if let (true, Some(tell)) = (news, &self.on_overrun) {
            tell(self.cookie());
        }
        self.fire();
    }

    /// Has [`Self::remind`] called for `cq`, whose completions come from here, by the thread of a
    /// device behind this queue. False where none will.
    pub fn remind_later(&self, cq: &Weak<Cq>, owed_for: u64) -> bool {
        let drivers = self.drivers.read().unwrap_or_else(PoisonError::into_inner);
        drivers.iter().any(|attached| attached.driver.remind_later(cq, owed_for))
    }

    /// Raises the event that the queue owes, if what it owes it for has not been polled; with a
    /// number only if it is that which the queue owes it for now.
    pub fn remind(&self, owed_for: Option<u64>) {
        let mut r = self.ring();
        if owed_for.is_some_and(|number| number != r.owed_for) {
            return;
        }
        if std::mem::take(&mut r.owed_for) != 0 && r.waits_in_silence() != 0 {
            r.said();
            drop(r);
            self.raise();
        }
    }

    /// Raises the event that was asked for, if one was: a driver has been told that there is one,
    /// and not for which completion.
    pub fn fire(&self) {
        let mut r = self.ring();
        if r.armed != Armed::No {
            r.said();
            drop(r);
            self.raise();
        }
    }

    fn raise(&self) {
        if let Some(channel) = &self.channel {
            channel.raise(self.cookie());
        }
    }

    /// The driver, where there is exactly one.
    pub fn sole_driver(&self) -> Option<Arc<dyn Driver>> {
        match &self.drivers.read().unwrap_or_else(PoisonError::into_inner)[..] {
            [attached] => Some(attached.driver.clone()),
            _ => None,
        }
    }

    /// A QP of `driver` completes here from now on. Counted: one call of [`Cq::detach`] for each.
    pub fn attach(&self, driver: &Arc<dyn Driver>) {
        let another = |ds: &[Attached]| Attached::count(ds, driver, |qps| qps.checked_add(1));
        if another(&self.drivers.read().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        let fresh = Attached::new(driver);
        let mut ds = self.drivers.write().unwrap_or_else(PoisonError::into_inner);
        if another(&ds) {
            return;
        }
        ds.push(fresh);
        self.direct.set(&ds);
        drop(ds);
        // An event that was asked for before comes for its completions, too.
        let armed = self.ring().armed;
        if armed != Armed::No {
            driver.arm(armed == Armed::Solicited);
        }
    }

    /// A QP of `driver` no longer completes here.
    pub fn detach(&self, driver: &Arc<dyn Driver>) {
        let one_less =
            |ds: &[Attached]| Attached::count(ds, driver, |qps| (qps > 1).then(|| qps - 1));
        if one_less(&self.drivers.read().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        let mut ds = self.drivers.write().unwrap_or_else(PoisonError::into_inner);
        if !one_less(&ds) {
            ds.retain(|attached| !Arc::ptr_eq(&attached.driver, driver));
            self.direct.set(&ds);
        }
    }

    /// Drops the completions of a destroyed QP that nobody polled, as `ibv_destroy_qp` promises.
    pub fn purge(&self, qp_num: u32) {
        let mut r = self.ring();
        let mask = r.slots.len() - 1;
        let (silent, silent_solicited) = (r.waits(r.silent), r.waits(r.silent_solicited));
        let mut kept = 0;
        for i in 0..r.len {
            let wc = r.slots[(r.head + i) & mask];
            if wc.qp_num != qp_num {
                let to = (r.head + kept) & mask;
                r.slots[to] = wc;
                kept += 1;
            }
        }
        r.len = kept;
        // Those that wait have new numbers, the last ones: which of them was silent is forgotten,
        // and an event too many harms nobody.
        r.silent = if silent { r.pushed } else { 0 };
        r.silent_solicited = if silent_solicited { r.pushed } else { 0 };
        r.owed_for = if r.owed_for != 0 { r.waits_in_silence() } else { 0 };
        self.len.store(r.hint(), Ordering::Release);
    }

    /// Whether the queue has overrun.
    pub fn overrun(&self) -> bool {
        self.ring().overrun
    }
}

#[cfg(test)]
mod tests;
