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
//! -e -t` ends at one): a poll that takes several leaves what an event was raised for that nobody
//! has got yet ([`Cq::take_before_event`]). An event that was raised is never taken back: the
//! program may have seen its descriptor readable.
//!
//! Lock order: `drivers` (read) → the turn ([`Cq::turn`]) → a device's engine → `ring`. A driver
//! never attaches or detaches drivers, nor looks at those of a queue that it brings completions to.

mod direct;
mod drivers;
mod ring;

use crate::{CompChannel, Error, Owner, Result};
use direct::{Direct, Found};
pub use direct::{RawCq, Source, Turn, BATCH};
use drivers::Attached;
pub use drivers::{Driver, IdleHook};
use ring::{Armed, Ring};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use unbroken_types::{Wc, WcStatus};

/// Told the cookie of a queue when it overruns, once. Called with a device's lock held: it may
/// queue and wake, nothing else.
pub type OverrunHook = Box<dyn Fn(u64) + Send + Sync>;

/// A completion queue.
pub struct Cq {
    me: Weak<Cq>,
    ring: Mutex<Ring>,
    /// Hint for pollers: entries in the ring, see [`Ring::hint`]. Written under the ring's lock.
    len: AtomicU32,
    /// Whether an event was asked for, or raised, since the queue was made: what comes then goes by
    /// the ring, which counts it. Written under the ring's lock.
    eventful: AtomicBool,
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
    vector: AtomicU32,
}

impl Cq {
    /// A queue of at least `entries` WCs (at least 1).
    pub fn new(entries: u32, channel: Option<Arc<CompChannel>>) -> Arc<Cq> {
        Cq::make(Owner::PROCESS, entries, channel, None, None)
    }

    /// A queue of at least `entries` WCs, with somebody who is told when it overruns, see
    /// [`OverrunHook`].
    pub fn with_overrun_hook(
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: impl Fn(u64) + Send + Sync + 'static,
    ) -> Arc<Cq> {
        Cq::make(Owner::PROCESS, entries, channel, Some(Box::new(on_overrun)), None)
    }

    /// A device's queue of at least `entries` WCs, which its QPs complete in. EINVAL where the
    /// channel is another's.
    pub fn of_device(
        owner: Owner,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        Cq::check_channel(owner, channel.as_ref())?;
        Ok(Cq::make(owner, entries, channel, Some(on_overrun), None))
    }

    /// A device's queue whose completions are polled from a queue of its provider's. EINVAL where
    /// the channel is another device's.
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
        let entries = entries.max(1) as usize;
        // What is polled from a source never lies in the ring.
        let (limit, slots) = match source {
            Some(_) => (entries, 1),
            None => (entries.next_power_of_two(), entries.next_power_of_two()),
        };
        Arc::new_cyclic(|me| Cq {
            me: me.clone(),
            ring: Mutex::new(Ring {
                slots: vec![Wc::default(); slots].into_boxed_slice(),
                head: 0,
                len: 0,
                limit,
                armed: Armed::No,
                pushed: 0,
                silent: 0,
                silent_solicited: 0,
                owed_for: 0,
                told: 0,
                event_for: 0,
                overrun: false,
                nudged: false,
            }),
            len: AtomicU32::new(0),
            eventful: AtomicBool::new(false),
            on_overrun,
            drivers: RwLock::new(Vec::new()),
            direct: Direct::default(),
            source,
            idle: OnceLock::new(),
            channel,
            owner,
            cookie: AtomicU64::new(0),
            vector: AtomicU32::new(0),
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
            self.ring().limit = entries.max(1) as usize;
            return Ok(());
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
        drop(r);
        let drivers = self.drivers.read().unwrap_or_else(PoisonError::into_inner);
        drivers.iter().for_each(|attached| attached.driver.resized());
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

    /// Sets the completion vector that the program wants its events by.
    pub fn set_comp_vector(&self, vector: u32) {
        self.vector.store(vector, Ordering::Relaxed);
    }

    /// The completion vector that the program wants its events by; 0 at first.
    pub fn comp_vector(&self) -> u32 {
        self.vector.load(Ordering::Relaxed)
    }

    /// Appends a completion; raises an event where one was asked for. A full queue becomes overrun
    /// instead.
    pub fn push(&self, wc: Wc, solicited: bool) {
        self.offer(wc, solicited);
    }

    /// Appends a completion of a QP, as [`Self::push`]. False: there was no room, the completion is
    /// lost, and the QP must end.
    pub fn offer(&self, wc: Wc, solicited: bool) -> bool {
        let mut r = self.ring();
        let fits = r.len < r.slots.len();
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
        if r.came(solicited || wc.status != WcStatus::Success as u32) {
            self.raise(r);
        } else {
            drop(r);
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

    /// Takes one completion, unless an event that nobody has got yet was raised for it: a program
    /// that takes it with an earlier one would find nothing when it gets that event.
    pub fn take_before_event(&self, out: &mut Wc) -> Result<usize> {
        let mut r = self.ring();
        let waits = self.channel.as_ref().is_some_and(|channel| channel.owes_events());
        match waits && r.event_is_for_next() {
            true => Ok(0),
            false => self.take_from(&mut r, std::slice::from_mut(out)),
        }
    }

    #[inline(never)]
    fn take_some(&self, out: &mut [Wc]) -> Result<usize> {
        self.take_from(&mut self.ring(), out)
    }

    fn take_from(&self, r: &mut Ring, out: &mut [Wc]) -> Result<usize> {
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
        if let Some(source) = &self.source {
            return self.poll_source(&**source, out);
        }
        if self.looks_empty() && !out.is_empty() {
            if !self.direct.bring() {
                self.drive();
            }
            if let Some(hook) = self.idle.get() {
                hook.polled();
            }
        }
        self.take(out)
    }

    /// What a poll of a busy program mostly is: the queue of a provider is all that is to be asked,
    /// and has nothing, or usual completions. None: [`Self::poll`] says what there is.
    #[inline(always)]
    pub fn poll_direct(&self, out: &mut [Wc]) -> Option<usize> {
        let passes_ring = || self.looks_empty() && !self.eventful.load(Ordering::Relaxed);
        match self.direct.poll(out, passes_ring) {
            Found::Some(n) => Some(n),
            Found::Elsewhere => None,
            Found::Nothing => {
                if let Some(hook) = self.idle.get() {
                    hook.polled();
                }
                self.looks_empty().then_some(0)
            }
        }
    }

    /// What is in the ring comes first. A queue that was nudged is polled all the same: who finds
    /// nothing here takes it for empty.
    fn poll_source(&self, source: &dyn Source, out: &mut [Wc]) -> Result<usize> {
        let taken = self.take(out)?;
        if taken == out.len() {
            return Ok(taken);
        }
        match usize::try_from(source.poll(&mut out[taken..])) {
            Ok(n) => Ok(taken + n),
            Err(_) => {
                self.lose();
                // What was taken is not lost; the next poll says that the rest is.
                if taken > 0 {
                    Ok(taken)
                } else {
                    self.take(out)
                }
            }
        }
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

    /// The right to bring completions to this queue, unless another thread has it.
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
        r.event_for = 0;
        let solicited_only = r.armed == Armed::Solicited;
        self.eventful.store(true, Ordering::Relaxed);
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
            let first = r.first_untold();
            r.said(first);
            self.raise(r);
        }
    }

    /// Raises the event that was asked for, if one was: a driver has been told that there is one,
    /// and not for which completion.
    pub fn fire(&self) {
        let mut r = self.ring();
        if r.armed != Armed::No {
            let first = r.first_untold();
            r.said(first);
            self.raise(r);
        }
    }

    /// Raises an event, which the ring has taken note of: whoever polls next knows that it comes.
    fn raise(&self, ring: MutexGuard<'_, Ring>) {
        let Some(channel) = &self.channel else { return };
        channel.announce();
        drop(ring);
        channel.raise(self.cookie());
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
        r.event_for = 0;
        self.len.store(r.hint(), Ordering::Release);
    }

    /// Whether the queue has overrun.
    pub fn overrun(&self) -> bool {
        self.ring().overrun
    }
}

#[cfg(test)]
mod tests;
