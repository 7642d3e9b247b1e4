//! Completion queues.
//!
//! A [`Cq`] is a bounded ring of [`Wc`]s under a short lock. Engines push, the application polls. A poll that finds nothing
//! drives the devices whose QPs complete here (the *inline* progress of softnic), so a busy-polling program needs no other thread.
//!
//! Invariants: WCs of one QP are polled in the order in which they were pushed; a WC is polled at most once; a full ring loses
//! nothing silently: it marks the CQ as overrun, every later poll says so, the owner is told once ([`Cq::with_overrun_hook`]), and the
//! QP whose completion found no room learns it by the answer of [`Cq::offer`].
//!
//! Events are those of the NICs that programs are written for, which the specification allows and does not ask for: a queue that is armed while something
//! waits in it that has come since its last event, and so raised none, raises one at once. A program that polls, then arms, and does not poll again (Open MPI's
//! udcm, which connects by it) would else wait for ever for what came in between. What has raised an event raises no other.
//!
//! Lock order: `drivers` (read) → a device's engine → `ring`. A driver never attaches or detaches drivers.

use crate::{CompChannel, Error, Owner, Result};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use unbroken_types::{Wc, WcStatus};

/// Something that makes progress when it is driven: the engine of a software NIC, or the poller of a real one.
pub trait Driver: Send + Sync {
    /// Does what can be done now without waiting. Called by application threads; must not block.
    fn drive(&self);

    /// The queue of its own that it brings completions from, if it has one. Polls then drive the device behind that queue themselves, and have this
    /// driver [`fetch`](Self::fetch) only where something is in it.
    fn own_queue(&self) -> Option<Arc<Cq>> {
        None
    }

    /// Brings what is in its own queue, unless another thread is at it.
    fn fetch(&self) {}

    /// The application has asked for an event: it will probably wait for it instead of polling. Must not block.
    fn about_to_wait(&self) {}

    /// A driver that brings completions from a queue of its own brings those that are known to be there: the queue is about to be armed,
    /// and they are not what is asked for.
    fn bring(&self) {}

    /// The queue has been armed. A driver that brings completions from a queue of its own arms that one, too, and brings what has come
    /// meanwhile: so while the queue is armed, its own one is, or the next completion is on its way.
    fn arm(&self, _solicited_only: bool) {}
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
    /// The numbers of the last WC, and of the last that a request for solicited ones is for, that came since the last event. 0: none.
    silent: u64,
    silent_solicited: u64,
    overrun: bool,
    /// See [`Cq::nudge`].
    nudged: bool,
}

impl Ring {
    /// What pollers are told of its length: an overrun ring has something to say to them, even where it is empty, as has one that was nudged.
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
        (self.armed, self.silent, self.silent_solicited) = (Armed::No, 0, 0);
    }

    /// Whether the WC of that number waits. Those that wait are the last `len`, see [`Cq::purge`].
    fn waits(&self, number: u64) -> bool {
        number > self.pushed - self.len as u64
    }
}

/// Told the cookie of a queue when it overruns, once. Called with a device's lock held: it may queue and wake, nothing else.
pub type OverrunHook = Box<dyn Fn(u64) + Send + Sync>;

/// A driver of a queue.
struct Attached {
    driver: Arc<dyn Driver>,
    /// QPs that complete here by it.
    qps: u32,
    /// Of one with a queue of its own: what drives that, and the queue.
    behind: Option<(Arc<dyn Driver>, Arc<Cq>)>,
}

impl Attached {
    fn new(driver: &Arc<dyn Driver>) -> Attached {
        let behind = driver.own_queue().and_then(|queue| Some((queue.sole_driver()?, queue)));
        Attached { driver: driver.clone(), qps: 1, behind }
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

/// What polls that find nothing do besides ([`Cq::set_idle_hook`]): they look at a channel of somebody else's, and do what he has for them when
/// there are events, and each time that a byte of counted polls has run over: every 50 to 200 µs of a thread that polls all the time.
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
    ring: Mutex<Ring>,
    /// Hint for pollers: entries in the ring, see [`Ring::hint`]. Written under the ring's lock.
    len: AtomicU32,
    /// Told the cookie when the queue overruns.
    on_overrun: Option<OverrunHook>,
    drivers: RwLock<Vec<Attached>>,
    idle: OnceLock<IdleHook>,
    channel: Option<Arc<CompChannel>>,
    owner: Owner,
    /// Whatever the C layer wants back with an event: the address of its `ibv_cq`.
    cookie: AtomicU64,
}

impl Cq {
    /// A queue of at least `entries` WCs (at least 1).
    pub fn new(entries: u32, channel: Option<Arc<CompChannel>>) -> Arc<Cq> {
        Cq::make(Owner::PROCESS, entries, channel, None)
    }

    /// The same with somebody who is told when it overruns, see [`OverrunHook`].
    pub fn with_overrun_hook(
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: impl Fn(u64) + Send + Sync + 'static,
    ) -> Arc<Cq> {
        Cq::make(Owner::PROCESS, entries, channel, Some(Box::new(on_overrun)))
    }

    /// The same for a device. EINVAL where the channel is another's.
    pub fn of_device(
        owner: Owner,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        if channel.as_ref().is_some_and(|channel| channel.owner != owner) {
            return Err(Error::invalid("the completion channel belongs to another device"));
        }
        Ok(Cq::make(owner, entries, channel, Some(on_overrun)))
    }

    fn make(owner: Owner, entries: u32, channel: Option<Arc<CompChannel>>, on_overrun: Option<OverrunHook>) -> Arc<Cq> {
        let limit = (entries.max(1) as usize).next_power_of_two();
        Arc::new(Cq {
            ring: Mutex::new(Ring {
                slots: vec![Wc::default(); limit].into_boxed_slice(),
                head: 0,
                len: 0,
                limit,
                armed: Armed::No,
                pushed: 0,
                silent: 0,
                silent_solicited: 0,
                overrun: false,
                nudged: false,
            }),
            len: AtomicU32::new(0),
            on_overrun,
            drivers: RwLock::new(Vec::new()),
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

    /// Changes how many entries fit to at least `entries` (at least 1). What waits stays; EINVAL where it would not fit.
    pub fn resize(&self, entries: u32) -> Result<()> {
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

    /// Appends a completion; raises an event where one was asked for. A full queue becomes overrun instead.
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

    /// Takes up to `out.len()` completions that are there; drives nothing.
    pub fn take(&self, out: &mut [Wc]) -> Result<usize> {
        if self.looks_empty() {
            return Ok(0);
        }
        let mut r = self.ring();
        if r.overrun {
            return Err(Error::device_gone("the completion queue overran: make it with more entries"));
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

    /// Takes up to `out.len()` completions; drives the devices behind the queue when there are none.
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize> {
        let n = self.take(out)?;
        if n > 0 || out.is_empty() {
            return Ok(n);
        }
        self.drive();
        if let Some(hook) = self.idle.get() {
            hook.polled();
        }
        self.take(out)
    }

    /// Has every poll that finds nothing tell `hook`, too, after the devices were driven and with no lock held. The first hook stays.
    pub fn set_idle_hook(&self, hook: IdleHook) {
        let _ = self.idle.set(hook);
    }

    /// Drives the devices whose QPs complete here.
    pub fn drive(&self) {
        for attached in self.drivers.read().unwrap_or_else(PoisonError::into_inner).iter() {
            attached.drive();
        }
    }

    /// Whether polls, and [`Cq::looks_empty`], are to take the queue for one that has something: its owner has something to do that is not here.
    pub fn nudge(&self, nudged: bool) {
        let mut r = self.ring();
        r.nudged = nudged;
        self.len.store(r.hint(), Ordering::Release);
    }

    /// Asks for one event at the next completion (`ibv_req_notify_cq`), or at once where one waits that has come since the last event; and tells the devices
    /// that the caller's polling may end.
    pub fn req_notify(&self, solicited_only: bool) {
        for attached in self.drivers.read().unwrap_or_else(PoisonError::into_inner).iter() {
            attached.driver.about_to_wait();
        }
        self.arm(solicited_only);
    }

    /// The same by a thread that never polls for the devices, so that it takes nothing from one that does.
    pub fn arm(&self, solicited_only: bool) {
        let drivers = self.drivers.read().unwrap_or_else(PoisonError::into_inner);
        drivers.iter().for_each(|attached| attached.driver.bring());
        let mut r = self.ring();
        // A request for any completion is not weakened by a later one for solicited ones.
        r.armed = if solicited_only && r.armed != Armed::Any { Armed::Solicited } else { Armed::Any };
        let solicited_only = r.armed == Armed::Solicited;
        if r.waits(if solicited_only { r.silent_solicited } else { r.silent }) {
            r.said();
            drop(r);
            return self.raise();
        }
        drop(r);
        drivers.iter().for_each(|attached| attached.driver.arm(solicited_only));
    }

    /// Raises the event that was asked for, if one was: a driver has been told that there is one, and not for which completion.
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
        let fresh = Attached::new(driver);
        let mut ds = self.drivers.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(attached) = ds.iter_mut().find(|attached| Arc::ptr_eq(&attached.driver, driver)) {
            attached.qps += 1;
            return;
        }
        ds.push(fresh);
        drop(ds);
        // An event that was asked for before comes for its completions, too.
        let armed = self.ring().armed;
        if armed != Armed::No {
            driver.arm(armed == Armed::Solicited);
        }
    }

    /// A QP of `driver` no longer completes here.
    pub fn detach(&self, driver: &Arc<dyn Driver>) {
        let mut ds = self.drivers.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(i) = ds.iter().position(|attached| Arc::ptr_eq(&attached.driver, driver)) {
            ds[i].qps -= 1;
            if ds[i].qps == 0 {
                ds.swap_remove(i);
            }
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
        // Those that wait have new numbers, the last ones: which of them was silent is forgotten, and an event too many harms nobody.
        r.silent = if silent { r.pushed } else { 0 };
        r.silent_solicited = if silent_solicited { r.pushed } else { 0 };
        self.len.store(r.hint(), Ordering::Release);
    }

    /// Whether the queue has overrun.
    pub fn overrun(&self) -> bool {
        self.ring().overrun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_is_resized_keeps_what_waits_in_order() {
        let cq = Cq::new(4, None);
        let push = |wr_id| cq.push(Wc { wr_id, ..Wc::default() }, false);
        let take = |n: usize| {
            let mut out = vec![Wc::default(); n];
            let got = cq.take(&mut out).unwrap();
            out[..got].iter().map(|wc| wc.wr_id).collect::<Vec<_>>()
        };
        (0..3).for_each(push);
        assert_eq!(take(2), [0, 1]);
        (3..6).for_each(push); // around the ring's end
        assert_eq!(cq.resize(3).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(cq.capacity(), 4);
        cq.resize(5).unwrap();
        assert_eq!(cq.capacity(), 8);
        (6..10).for_each(push);
        assert_eq!(take(20), [2, 3, 4, 5, 6, 7, 8, 9]);
        cq.resize(1).unwrap();
        (10..11).for_each(push);
        assert_eq!((cq.capacity(), take(9)), (1, vec![10]));
        (11..13).for_each(push);
        assert!(cq.overrun());
    }

    #[test]
    fn what_has_come_since_the_last_event_raises_one_when_the_queue_is_armed() {
        let channel = CompChannel::new().unwrap();
        let cq = Cq::new(8, Some(channel.clone()));
        let push = |qp_num, solicited| cq.push(Wc { qp_num, ..Wc::default() }, solicited);
        let take = |n: usize| cq.take(&mut vec![Wc::default(); n]).unwrap();
        let armed = |solicited| {
            cq.req_notify(solicited);
            let raised = channel.has_events();
            if raised {
                channel.get_event().unwrap();
            }
            assert!(!channel.has_events());
            raised
        };
        assert!(!armed(false), "nothing is there");
        push(1, false);
        channel.get_event().unwrap();
        assert!(!armed(false), "it has raised its event, polled or not");
        push(1, false);
        channel.get_event().unwrap();
        push(1, false);
        assert_eq!(take(2), 2);
        assert!(armed(false), "the third came after the event");
        push(1, false);
        assert!(!channel.has_events(), "the event disarmed it");
        assert_eq!(take(8), 2);
        assert!(!armed(true), "all are polled");
        push(1, false);
        assert!(!channel.has_events() && !armed(true), "it is not solicited");
        assert!(armed(false), "... but is one of any");
        push(1, true);
        push(2, false);
        cq.purge(1);
        assert!(armed(false), "one waits that came after the event, whatever its number");
        cq.purge(2);
        assert!(!armed(false), "nothing waits");
    }

    /// A driver with a queue of its own, in which something comes when it is armed, and was before if so said.
    struct Arms(Mutex<Vec<bool>>, Arc<Cq>, bool);

    impl Driver for Arms {
        fn drive(&self) {}
        fn bring(&self) {
            if self.2 {
                self.1.push(Wc::default(), true);
            }
        }
        fn arm(&self, solicited_only: bool) {
            self.0.lock().unwrap().push(solicited_only);
            self.1.push(Wc::default(), false);
        }
    }

    #[test]
    fn what_drivers_have_and_what_comes_while_they_are_armed_raises_the_event() {
        for was_there in [false, true] {
            let channel = CompChannel::new().unwrap();
            let cq = Cq::new(4, Some(channel.clone()));
            let arms = Arc::new(Arms(Mutex::default(), cq.clone(), was_there));
            let driver: Arc<dyn Driver> = arms.clone();
            cq.attach(&driver);
            cq.fire();
            cq.req_notify(true);
            let asked = arms.0.lock().unwrap().clone();
            assert_eq!(
                (channel.has_events(), asked.len()),
                (was_there, usize::from(!was_there)),
                "the other is not solicited"
            );
            assert_eq!(cq.take(&mut [Wc::default(); 4]).unwrap(), 1);
            cq.fire();
            cq.fire();
            assert_eq!((channel.get_event().unwrap(), channel.has_events()), (0, false));
            cq.req_notify(false);
            assert_eq!((channel.get_event().unwrap(), channel.has_events()), (0, false), "the one that came since");
        }
    }

    #[test]
    fn a_driver_that_is_attached_to_an_armed_queue_is_armed() {
        let cq = Cq::new(8, Some(CompChannel::new().unwrap()));
        let arms = [(); 3].map(|()| Arc::new(Arms(Mutex::default(), cq.clone(), false)));
        let attach = |n: usize| {
            let driver: Arc<dyn Driver> = arms[n].clone();
            cq.attach(&driver);
            cq.attach(&driver);
            arms[n].0.lock().unwrap().clone()
        };
        assert_eq!(attach(0), []);
        cq.req_notify(true);
        assert_eq!(attach(1), [true]);
        cq.req_notify(false);
        assert_eq!(attach(2), [], "it has fired");
    }

    #[test]
    fn an_overrun_is_told_once_and_said_by_every_poll() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let hook = told.clone();
        let cq = Cq::with_overrun_hook(1, None, move |cookie| hook.lock().unwrap().push(cookie));
        cq.set_cookie(9);
        let push = || cq.offer(Wc { qp_num: 5, ..Wc::default() }, false);
        assert!(push() && told.lock().unwrap().is_empty());
        assert!(!push() && !push());
        assert_eq!(*told.lock().unwrap(), [9]);
        let poll = || cq.poll(&mut [Wc::default()]).unwrap_err().errno();
        assert_eq!(poll(), libc::EIO);
        cq.purge(5);
        assert_eq!((poll(), poll()), (libc::EIO, libc::EIO), "also where nothing is left in it");
    }

    #[test]
    fn a_withdrawn_event_leaves_the_descriptor_quiet() {
        let channel = CompChannel::new().unwrap();
        for cookie in [1, 2, 1] {
            channel.raise(cookie);
        }
        channel.withdraw(1);
        assert_eq!(channel.get_event().unwrap(), 2);
        assert!(!channel.fd.take_back(), "nothing waits, and nothing is readable");
    }

    /// A device, or a driver with a queue of its own; counts what it is asked for.
    #[derive(Default)]
    struct Asked {
        own: Option<Arc<Cq>>,
        drives: AtomicU32,
        fetches: AtomicU32,
    }

    impl Driver for Asked {
        fn drive(&self) {
            self.drives.fetch_add(1, Ordering::Relaxed);
        }

        fn own_queue(&self) -> Option<Arc<Cq>> {
            self.own.clone()
        }

        fn fetch(&self) {
            self.fetches.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_driver_with_a_queue_of_its_own_is_asked_where_something_is_in_it() {
        let (own, app) = (Cq::new(4, None), Cq::new(4, None));
        let device = Arc::new(Asked::default());
        own.attach(&(device.clone() as Arc<dyn Driver>));
        let driver = Arc::new(Asked { own: Some(own.clone()), ..Asked::default() });
        app.attach(&(driver.clone() as Arc<dyn Driver>));
        let mut wcs = [Wc::default(); 1];
        let mut poll = |what: &str, fetches| {
            assert_eq!(app.poll(&mut wcs).unwrap(), 0);
            let count = |n: &AtomicU32| n.swap(0, Ordering::Relaxed);
            let asked = (count(&device.drives), count(&driver.drives), count(&driver.fetches));
            assert_eq!(asked, (1, 0, fetches), "{what}");
        };
        poll("nothing is there", 0);
        own.nudge(true);
        poll("it was nudged", 1);
        own.nudge(false);
        poll("... and no more", 0);
        own.push(Wc::default(), false);
        poll("something is there", 1);
    }
}
