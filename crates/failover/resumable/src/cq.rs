//! A device's own CQ behind the application's ring.
//!
//! All QPs of a device that complete in one application's CQ share one; it has room for everything
//! that they can have outstanding, markers included, since flushes all complete. Whoever polls the
//! ring in vain brings over what is there: one thread at a time, so that order is kept, with the
//! turn of the application's CQ ([`Cq::turn`]). A thread that finds another at it has nothing to
//! do.
//!
//! Events: what is here is brought over before the ring is armed. Then this CQ is armed and polled
//! once more: what came meanwhile raises the application's event, since whoever brings it finds the
//! ring armed. What comes later raises an event of the device's channel; the device's thread
//! ([`crate::waker`]) brings it over, and the ring raises the application's. The order matters:
//! were this CQ armed first, a completion in between would use up its event and not the ring's, and
//! no later one would wake anybody.

use crate::alive::lives;
use crate::commands::{Commands, EndsLater};
use crate::overruns::Overruns;
use crate::waker::Waker;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;
use unbroken_types::Wc;
use unbroken_verbs::{Cq, Device, Driver, Error, Result, BATCH};

/// Entries of a device's CQ at first, at most.
const MOST_AT_FIRST: u32 = 8192;
/// How often who waits for a device that changes a CQ's size asks whether it answers.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Batches that one call brings, so that it ends.
const MAX_BATCHES: usize = 1024;

/// A QP that completes here.
pub(crate) trait Member: Send + Sync {
    /// Takes completions of that CQ, in order. True: it wants [`Member::settle`].
    fn take(&self, from: &ProviderCq, wcs: &[Wc]) -> bool;
    /// Turns completions of that CQ into the program's, in place, from the first on, as far as each
    /// is its own and what almost every one is. The first is its own. How many.
    fn translate(&self, _wcs: &mut [Wc]) -> usize {
        0
    }
    /// This CQ was found empty: it may look at its other one. Called with the turn of this one
    /// held. False: it could not look.
    fn settle(&self, found_empty: &ProviderCq) -> bool;
    /// Completions have been lost: with their device, which has died, or by a CQ that has overrun.
    fn lose(&self, with_device: bool);
}

struct PollState {
    wcs: [Wc; BATCH],
    /// They are to look at their other CQ yet.
    unsettled: Vec<Arc<dyn Member>>,
    /// There are some, so that polls come here.
    nudged: bool,
    /// Whose completion came last, with its QPN.
    last: Option<(u32, Arc<dyn Member>)>,
}

/// A device's CQ.
pub(crate) struct ProviderCq {
    own: Weak<ProviderCq>,
    device: Arc<dyn Device>,
    cq: EndsLater<Cq>,
    app: Weak<Cq>,
    /// Taken with the turn of the application's CQ.
    state: parking_lot::Mutex<PollState>,
    members: RwLock<HashMap<u32, Weak<dyn Member>>>,
    /// Entries that its QPs may need, and how many of them are for markers.
    needed: AtomicU32,
    markers: AtomicU32,
    overruns: Arc<Overruns>,
    /// Those have it.
    watched: AtomicBool,
    /// Held while the device changes the size of the CQ.
    growing: parking_lot::Mutex<()>,
    /// The device is changing the size, so no thread may poll or arm the CQ: the provider may hold
    /// its lock until the device answers.
    set_aside: AtomicBool,
    commands: Arc<Commands>,
    /// How often something was brought over, and by the last look.
    brought: AtomicU32,
    looked_at: AtomicU32,
    /// A poll has failed: whether the device has died was asked.
    lost: AtomicBool,
    waker: Arc<Waker>,
    /// The application is about to wait.
    waits: AtomicBool,
    /// It was armed for solicited completions only: which one raised the event is not told.
    solicited: AtomicBool,
}

impl ProviderCq {
    /// That of a device for an application's CQ, which a QP needs so many entries of.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        app: &Arc<Cq>,
        needed: u32,
        waker: &Arc<Waker>,
        commands: &Arc<Commands>,
        overruns: &Arc<Overruns>,
    ) -> Result<Arc<ProviderCq>> {
        let channel = app.channel().map(|_| waker.channel(&**device)).transpose()?;
        let make = |entries| {
            let told = overruns.clone();
            let on_overrun = Box::new(move |_| told.tell());
            device.create_cq_on(app.comp_vector(), entries, channel.clone(), on_overrun)
        };
        // As many as the program has, since not every provider can change the size later. A device
        // that has smaller CQs than the program's own may do all the same.
        let entries = app.capacity().min(MOST_AT_FIRST);
        let cq = match make(entries.max(needed)) {
            Err(_) if entries > needed => make(needed)?,
            made => made?,
        };
        let this = Arc::new_cyclic(|own| ProviderCq {
            own: own.clone(),
            device: device.clone(),
            cq: EndsLater::new(cq, commands),
            app: Arc::downgrade(app),
            state: parking_lot::Mutex::new(PollState {
                wcs: [Wc::default(); BATCH],
                unsettled: Vec::new(),
                nudged: false,
                last: None,
            }),
            members: RwLock::default(),
            needed: AtomicU32::new(0),
            markers: AtomicU32::new(0),
            overruns: overruns.clone(),
            watched: AtomicBool::new(false),
            growing: parking_lot::Mutex::default(),
            set_aside: AtomicBool::new(false),
            commands: commands.clone(),
            brought: AtomicU32::new(0),
            looked_at: AtomicU32::new(0),
            lost: AtomicBool::new(false),
            waker: waker.clone(),
            waits: AtomicBool::new(false),
            solicited: AtomicBool::new(false),
        });
        waker.add(&this);
        Ok(this)
    }

    /// What the device is told to complete in.
    pub(crate) fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// What a source has is not seen before it is polled.
    fn may_have_some(&self) -> bool {
        self.cq.has_source() || !self.cq.looks_empty()
    }

    pub(crate) fn is_for(&self, app: &Arc<Cq>) -> bool {
        std::ptr::eq(self.app.as_ptr(), Arc::as_ptr(app))
    }

    /// Makes room for a QP's work, and for that many markers.
    fn reserve(&self, app: &Cq, entries: u32, markers: u32) -> Result<()> {
        let all = entries + markers;
        let needed = self.needed.fetch_add(all, Ordering::AcqRel) + all;
        self.markers.fetch_add(markers, Ordering::AcqRel);
        if needed > self.cq.capacity() {
            self.grow(app).inspect_err(|_| self.release(entries, markers))?;
        }
        self.resized();
        Ok(())
    }

    /// Makes the device's CQ as large as its QPs need it. Polls of the application's CQ skip it
    /// meanwhile: the device may take a minute to answer, and other devices complete in the
    /// application's CQ, too.
    fn grow(&self, app: &Cq) -> Result<()> {
        let _one_at_a_time = self.growing.lock();
        let needed = self.needed.load(Ordering::Acquire);
        if needed <= self.cq.capacity() {
            return Ok(());
        }
        if self.commands.is_stuck() {
            let name = self.device.name();
            return Err(Error::device_gone(format!("NIC {name} answers no command")));
        }
        let _watch = self.commands.watch();
        self.set_aside.store(true, Ordering::Release);
        app.drivers_changed();
        // Twice as many, where that is to be had: programs add QPs one by one, and each change
        // copies what there is.
        let more = needed.max(self.cq.capacity().saturating_mul(2));
        let resized = self.cq.resize(more).or_else(|_| self.cq.resize(needed));
        self.set_aside.store(false, Ordering::Release);
        app.drivers_changed();
        self.bring_and_arm();
        resized
    }

    /// Takes back a [`Self::reserve`].
    fn release(&self, entries: u32, markers: u32) {
        self.markers.fetch_sub(markers, Ordering::AcqRel);
        self.needed.fetch_sub(entries + markers, Ordering::AcqRel);
    }

    /// Whether its QPs can have more completions than the application's CQ takes. They lie here
    /// until somebody polls, where a device would have overrun.
    pub(crate) fn can_overrun(&self) -> bool {
        let markers = self.markers.load(Ordering::Acquire);
        let most = self.needed.load(Ordering::Acquire).saturating_sub(markers);
        self.app.upgrade().is_some_and(|app| most > app.capacity())
    }

    /// Whether it can still overrun. If not, it is no longer watched.
    pub(crate) fn stays_watched(&self) -> bool {
        if self.can_overrun() {
            return true;
        }
        self.watched.store(false, Ordering::Release);
        // What has come between the two must not be missed.
        self.can_overrun() && !self.watched.swap(true, Ordering::AcqRel)
    }

    fn add(&self, qpn: u32, member: &Arc<dyn Member>) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.insert(qpn, Arc::downgrade(member));
    }

    /// Not the one that has the number by now, if that is another. Whoever is delivering
    /// completions of the QP has done so when this returns.
    fn remove(&self, app: &Cq, qpn: u32, member: &dyn Member) {
        let own = std::ptr::from_ref(member).cast::<()>();
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        if members.get(&qpn).is_some_and(|there| std::ptr::eq(there.as_ptr().cast(), own)) {
            members.remove(&qpn);
        }
        drop(members);
        let _turn = app.turn();
        let mut state = self.state.lock();
        state.unsettled.retain(|there| !std::ptr::eq(Arc::as_ptr(there).cast(), own));
        let _last = state.last.take();
        drop(state);
    }

    fn member(&self, qpn: u32) -> Option<Arc<dyn Member>> {
        self.members
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&qpn)
            .and_then(Weak::upgrade)
    }

    /// Drains the device's CQ into the application's. Waits for a thread that is draining it, and
    /// for a device that is changing its size, as long as the device answers commands. False: the
    /// CQ was not polled, because the device answers none.
    pub(crate) fn bring_all(&self) -> bool {
        while !self.bring_unless_aside() {
            if self.commands.is_stuck() {
                return false;
            }
            let _answered = self.growing.try_lock_for(LOOK_AGAIN);
        }
        true
    }

    /// As [`Self::bring_all`], but returns false at once while the device changes the size.
    fn bring_unless_aside(&self) -> bool {
        self.cq.bring();
        let app = self.app.upgrade();
        let _turn = app.as_ref().map(|app| app.turn());
        self.bring_in_turn(&[]).is_some()
    }

    /// Drains the device's CQ into the application's unless another thread is doing so. Returns
    /// whether the device's CQ was empty.
    pub(crate) fn try_bring(&self) -> bool {
        let app = self.app.upgrade();
        let turn = app.as_ref().map(|app| app.try_turn());
        match turn {
            Some(None) => false,
            _ => self.bring_in_turn(&[]).unwrap_or(false),
        }
    }

    /// Dispatches `first`, which was polled from the device's CQ, and then drains the CQ. The caller
    /// holds the turn of the application's CQ. Returns whether the CQ was empty; `None` if it was not
    /// polled, because the device is changing its size.
    fn bring_in_turn(&self, first: &[Wc]) -> Option<bool> {
        let PollState { wcs, unsettled, nudged, .. } = &mut *self.state.lock();
        self.dispatch(first, unsettled);
        if self.set_aside.load(Ordering::Acquire) {
            return None;
        }
        let mut empty = false;
        // Fewer than were asked for: those were all.
        let more = first.is_empty() || first.len() == BATCH || !unsettled.is_empty();
        for _ in 0..if more { MAX_BATCHES } else { 0 } {
            let Ok(n) = self.cq.poll(wcs) else {
                self.lose();
                return Some(true);
            };
            self.dispatch(&wcs[..n], unsettled);
            empty = n == 0;
            if n < BATCH && (empty || unsettled.is_empty()) {
                break;
            }
        }
        if empty && !unsettled.is_empty() {
            unsettled.retain(|member| !member.settle(self));
        }
        if *nudged == unsettled.is_empty() {
            *nudged = !*nudged;
            self.cq.nudge(*nudged);
        }
        Some(empty)
    }

    /// Brings over what is there, unless somebody has done so since the last look: whoever polls
    /// finds an overrun without it.
    pub(crate) fn look(&self) {
        let brought = || self.brought.load(Ordering::Relaxed);
        let now = brought();
        if self.looked_at.swap(now, Ordering::Relaxed) == now {
            let _found_empty = self.try_bring();
            self.looked_at.store(brought(), Ordering::Relaxed);
        }
    }

    fn dispatch(&self, wcs: &[Wc], unsettled: &mut Vec<Arc<dyn Member>>) {
        if wcs.is_empty() {
            return;
        }
        // Whoever is here has the turn.
        self.brought.store(self.brought.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        for run in wcs.chunk_by(|a, b| a.qp_num == b.qp_num) {
            // One that was destroyed meanwhile wants its completions no more.
            let Some(member) = self.member(run[0].qp_num) else { continue };
            if member.take(self, run) && !unsettled.iter().any(|m| Arc::ptr_eq(m, &member)) {
                unsettled.push(member);
            }
        }
    }

    /// The device's CQ has lost completions, or cannot be polled. Where the device has died they are
    /// lost with it, and the peer's counts decide. Where it lives nobody else knows what was in
    /// them: the application is told of its own CQ what the device says of this one.
    #[cold]
    fn lose(&self) {
        let asks = !self.lost.swap(true, Ordering::AcqRel);
        let with_device = match asks {
            true => !lives(&*self.device),
            false => !self.device.alive(),
        };
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let all: Vec<_> = members.values().filter_map(Weak::upgrade).collect();
        drop(members);
        // That of QPs that are only made ahead has had nothing to lose.
        if let Some(app) = self.app.upgrade().filter(|_| !with_device && !all.is_empty()) {
            app.lose();
        }
        all.iter().for_each(|member| member.lose(with_device));
    }

    /// Drains the device's CQ, and requests its next event if the application's CQ still waits for
    /// one.
    ///
    /// The drained completions may not concern the application (a flush that is held back, a
    /// marker), or another thread drained them before and requested both events since. Then the
    /// application still waits for an event, the device's CQ will raise none, and no other thread
    /// would request it.
    fn bring_and_arm(&self) {
        self.bring_all();
        let armed = self.app.upgrade().and_then(|app| app.armed());
        let armed = armed.filter(|_| !self.set_aside.load(Ordering::Acquire));
        if let Some(solicited_only) = armed {
            self.cq.arm(solicited_only);
            self.bring_all();
        }
    }

    /// An event says that there is something.
    pub(crate) fn wake(&self) {
        self.bring_and_arm();
        if self.solicited.swap(false, Ordering::AcqRel) {
            if let Some(app) = self.app.upgrade() {
                app.fire();
            }
        }
    }
}

impl Driver for ProviderCq {
    fn drive(&self) {
        self.cq.drive();
        self.fetch();
    }

    fn fetch(&self) {
        if self.may_have_some() {
            self.try_bring();
        }
    }

    fn deliver(&self, wcs: &[Wc]) {
        self.bring_in_turn(wcs);
    }

    fn translate(&self, wcs: &mut [Wc]) -> usize {
        let last = &mut self.state.lock().last;
        let mut done = 0;
        while let Some(first) = wcs.get(done) {
            let qpn = first.qp_num;
            let member = match last {
                Some((of, member)) if *of == qpn => &*member,
                _ => match self.member(qpn) {
                    Some(member) => &last.insert((qpn, member)).1,
                    None => break,
                },
            };
            match member.translate(&mut wcs[done..]) {
                0 => break,
                n => done += n,
            }
        }
        // The caller holds the turn, so nobody else writes it.
        let brought = self.brought.load(Ordering::Relaxed).wrapping_add((done > 0).into());
        self.brought.store(brought, Ordering::Relaxed);
        done
    }

    fn own_queue(&self) -> Option<Arc<Cq>> {
        Some(self.cq.clone())
    }

    fn is_aside(&self) -> bool {
        self.set_aside.load(Ordering::Acquire)
    }

    fn about_to_wait(&self) {
        self.waits.store(true, Ordering::Relaxed);
    }

    fn bring(&self) {
        if self.may_have_some() {
            self.bring_unless_aside();
        }
    }

    fn arm(&self, solicited_only: bool) {
        if self.cq.channel().is_none() {
            return;
        }
        if self.waker.start().is_err() {
            return; // said when the next QP is made
        }
        self.solicited.store(solicited_only, Ordering::Release);
        if self.set_aside.load(Ordering::Acquire) {
            return; // `grow` requests the event once the device has answered
        }
        match self.waits.swap(false, Ordering::Relaxed) {
            true => self.cq.req_notify(solicited_only),
            false => self.cq.arm(solicited_only),
        }
        // Waiting for whoever is at it: what that thread has taken already would raise no event
        // that is for solicited completions.
        self.bring_unless_aside();
    }

    fn resized(&self) {
        if self.can_overrun() && !self.watched.swap(true, Ordering::AcqRel) {
            self.overruns.watch(&self.own);
        }
    }

    fn remind_later(&self, cq: &Weak<Cq>, owed_for: u64) -> bool {
        self.cq.remind_later(cq, owed_for)
    }
}

impl Drop for ProviderCq {
    fn drop(&mut self) {
        self.waker.remove(&self.cq);
    }
}

/// A QP's place at a CQ: room for all that it can have outstanding.
pub(crate) struct CqReservation {
    cq: Arc<ProviderCq>,
    app: Arc<Cq>,
    entries: u32,
    has_marker_room: bool,
}

impl CqReservation {
    /// Room for `entries`, and for a marker where the CQ can be so large.
    pub(crate) fn new(cq: Arc<ProviderCq>, app: &Arc<Cq>, entries: u32) -> Result<CqReservation> {
        let has_marker_room = cq.reserve(app, entries, 1).is_ok();
        if !has_marker_room {
            cq.reserve(app, entries, 0)?;
        }
        Ok(CqReservation { cq, app: app.clone(), entries, has_marker_room })
    }

    /// Whether a marker may be posted: a CQ that overruns would end every QP of it.
    pub(crate) fn has_marker_room(&self) -> bool {
        self.has_marker_room
    }

    /// The device's CQ.
    #[inline]
    pub(crate) fn cq(&self) -> &Arc<ProviderCq> {
        &self.cq
    }

    /// The application's.
    #[inline]
    pub(crate) fn app(&self) -> &Cq {
        &self.app
    }

    /// Whether it is behind that CQ of the application's.
    pub(crate) fn is_of(&self, app: &Arc<Cq>) -> bool {
        Arc::ptr_eq(&self.app, app)
    }

    /// Whether it is at that CQ.
    pub(crate) fn is_at(&self, cq: &ProviderCq) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.cq), cq)
    }

    /// From now on the completions of the device's QP go to `member`, and polls of the
    /// application's CQ bring them.
    pub(crate) fn join(&self, qpn: u32, member: &Arc<dyn Member>) {
        // What is there with this number is of a QP that had it before, and was destroyed.
        let _can_look = self.cq.growing.lock();
        self.cq.bring_all();
        self.cq.add(qpn, member);
        let driver: Arc<dyn Driver> = self.cq.clone();
        self.app.attach(&driver);
    }

    /// ... and no more. Not to be called with the turn of that CQ held.
    pub(crate) fn leave(&self, qpn: u32, member: &dyn Member) {
        self.cq.remove(&self.app, qpn, member);
        let driver: Arc<dyn Driver> = self.cq.clone();
        self.app.detach(&driver);
    }
}

impl Drop for CqReservation {
    fn drop(&mut self) {
        self.cq.release(self.entries, u32::from(self.has_marker_room));
    }
}

/// The error of a device that has no thread for events.
pub(crate) fn no_thread(e: &std::io::Error) -> Error {
    Error::os("a thread for completion events cannot be started", e)
}
