//! What brings completions to a queue.

use super::Cq;
use crate::CompChannel;
use std::sync::atomic::{AtomicU32, AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use unbroken_types::Wc;

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

    /// Whether polls must not touch its own queue, because a verb that may block is changing that
    /// queue. A driver calls [`Cq::drivers_changed`] each time the answer changes.
    fn is_aside(&self) -> bool {
        false
    }

    /// Brings what is in its own queue, unless another thread is at it.
    fn fetch(&self) {}

    /// Takes completions that came out of the [`Source`] of its own queue, and brings what is
    /// there besides. The caller has the turn of the queue that they are for.
    fn deliver(&self, _wcs: &[Wc]) {}

    /// Turns completions that came out of the [`Source`] of its own queue into the program's, in
    /// place, from the first on, as far as each is what almost every one is. How many; the rest is
    /// for [`deliver`](Self::deliver). The caller has the turn of the queue that they are for.
    fn translate(&self, _wcs: &mut [Wc]) -> usize {
        0
    }

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

    /// The queue has another size.
    fn resized(&self) {}

    /// Has [`Cq::remind`] called with that number by a thread of its own after a moment, long
    /// enough for a program that polls once it has armed. False where there is no such thread:
    /// whoever asks does it himself. Must not block.
    fn remind_later(&self, _cq: &Weak<Cq>, _owed_for: u64) -> bool {
        false
    }
}

/// A driver of a queue.
pub(super) struct Attached {
    pub(super) driver: Arc<dyn Driver>,
    /// QPs that complete here by it. Above 0 it is counted under the read lock, so that neither a
    /// QP that is made nor one that ends waits for whoever polls.
    pub(super) qps: AtomicU32,
    /// Of one with a queue of its own: what drives that, and the queue.
    pub(super) behind: Option<(Arc<dyn Driver>, Arc<Cq>)>,
    /// Of one whose own queue has a source: the queue.
    pub(super) direct: Option<Arc<Cq>>,
}

impl Attached {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Attached {
        let own = driver.own_queue();
        let direct = own.clone().filter(|queue| queue.source.is_some());
        let behind = own.and_then(|queue| Some((queue.sole_driver()?, queue)));
        Attached { driver: driver.clone(), qps: AtomicU32::new(1), behind, direct }
    }

    /// Changes the count of a driver's QPs. False where there is no such driver, or `step` will
    /// not.
    pub(super) fn count(
        ds: &[Attached],
        driver: &Arc<dyn Driver>,
        step: impl Fn(u32) -> Option<u32>,
    ) -> bool {
        let found = ds.iter().find(|attached| Arc::ptr_eq(&attached.driver, driver));
        found.is_some_and(|attached| {
            attached.qps.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).is_ok()
        })
    }

    #[inline(always)]
    pub(super) fn drive(&self) {
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
    pub(super) fn polled(&self) {
        // A count that two threads change at once may lose one: that is harmless, and cheaper.
        let polls = self.polls.load(Ordering::Relaxed).wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
        if polls == 0 || self.channel.has_events() {
            (self.look)();
        }
    }
}
