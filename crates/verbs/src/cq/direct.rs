//! Completions of a provider's queue, polled with nothing in between.
//!
//! Most polls of a busy program find nothing. Behind the queue of a program there is one driver as
//! a rule, and behind that one queue of a provider. A poll goes straight there: it takes the
//! *turn* of the program's queue, asks the provider, and is done where nothing is there. What is
//! there is made the program's in place ([`Driver::translate`]), or, where it is anything unusual,
//! goes to the driver, which puts what comes of it into the ring ([`Driver::deliver`]). So does all
//! of it while the ring has something or the program has asked for an event.
//!
//! Invariant: completions come to the program's queue in the order in which they came out of the
//! provider's. So whoever takes some out of a source has the turn until they are delivered.

use super::{Attached, Cq, Driver};
use crate::abi::{ibv_cq, PollCq};
use crate::Result;
use parking_lot::{Mutex, MutexGuard};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use unbroken_types::Wc;

/// Completions that are taken out of a source at a time.
pub const BATCH: usize = 32;

/// A provider's queue, which is polled in place of a ring.
pub trait Source: Send + Sync {
    /// Takes out completions, oldest first: at most `out.len()`. Their number; a negative one where
    /// the queue has lost some, or cannot be polled any more.
    fn poll(&self, out: &mut [Wc]) -> i32;

    /// Asks the provider for one event at the next completion, if it is to have events. Whoever
    /// takes that event calls [`Cq::fire`].
    fn arm(&self, solicited_only: bool);

    /// At least that many entries fit from now on. Nobody polls meanwhile: a provider may keep its
    /// lock until the device has answered.
    fn resize(&self, entries: u32) -> Result<()>;

    /// What [`Self::poll`] asks, where that is all it does.
    fn raw(&self) -> Option<RawCq> {
        None
    }
}

/// A queue of a provider, and its function. Whoever calls it keeps the queue.
#[derive(Clone, Copy)]
pub struct RawCq {
    /// The provider's.
    pub cq: *mut ibv_cq,
    /// Polls it.
    pub poll: PollCq,
}

// SAFETY: a provider's queue is good in every thread, and its function has a lock of its own.
unsafe impl Send for RawCq {}

/// The only driver of a queue, whose own queue has a source.
struct Sole {
    driver: Arc<dyn Driver>,
    queue: Arc<Cq>,
    source: Arc<dyn Source>,
    raw: Option<RawCq>,
    wcs: [Wc; BATCH],
}

/// What a poll of the source has found.
pub(super) enum Found {
    /// Nothing, or another thread is at it, which leaves nothing to do.
    Nothing,
    /// So many completions of the program's.
    Some(usize),
    /// It is for the ring: what came has been delivered there, or there is no source to ask.
    Elsewhere,
}

impl Sole {
    #[inline(always)]
    fn poll(&mut self, out: &mut [Wc]) -> Found {
        if !self.queue.looks_empty() {
            // Something in its ring, or a nudge: for the driver.
            self.driver.deliver(&[]);
            return Found::Elsewhere;
        }
        let n = match &self.raw {
            // SAFETY: the source keeps the queue, and here are so many completions.
            Some(raw) => unsafe { (raw.poll)(raw.cq, out.len() as c_int, out.as_mut_ptr()) },
            None => self.source.poll(out),
        };
        match n {
            0 => Found::Nothing,
            n => self.found(n, out),
        }
    }

    #[inline(never)]
    fn found(&mut self, n: i32, out: &mut [Wc]) -> Found {
        let Ok(n) = usize::try_from(n) else {
            self.queue.lose();
            self.driver.deliver(&[]);
            return Found::Elsewhere;
        };
        let translated = self.driver.translate(&mut out[..n]);
        if translated < n {
            self.driver.deliver(&out[translated..n]);
        }
        match translated {
            0 => Found::Elsewhere,
            n => Found::Some(n),
        }
    }

    #[inline(always)]
    fn finds_nothing(&mut self) -> bool {
        if !self.queue.looks_empty() {
            self.driver.deliver(&[]);
            return false;
        }
        let n = self.source.poll(&mut self.wcs);
        if n != 0 {
            self.deliver(n);
        }
        n == 0
    }

    #[inline(never)]
    fn deliver(&mut self, n: i32) {
        match usize::try_from(n) {
            Ok(n) => self.driver.deliver(&self.wcs[..n]),
            Err(_) => {
                self.queue.lose();
                self.driver.deliver(&[]);
            }
        }
    }
}

impl Cq {
    /// A driver's answer to [`Driver::is_aside`] has changed. When this returns, no thread polls the
    /// queue of a driver that is aside.
    pub fn drivers_changed(&self) {
        let drivers = self.drivers.write().unwrap_or_else(PoisonError::into_inner);
        self.direct.set(&drivers);
    }
}

/// See [`Cq::turn`].
pub struct Turn<'a>(#[allow(dead_code)] MutexGuard<'a, Option<Box<Sole>>>);

/// The turn of a queue, and what polls it directly.
#[derive(Default)]
pub(super) struct Direct {
    sole: Mutex<Option<Box<Sole>>>,
    /// There is one, as far as can be seen without the turn.
    there: AtomicBool,
}

impl Direct {
    /// Polls the source of the only driver for the program, where completions may pass its ring. That
    /// is asked with the turn held: whoever had it before may have put older completions into the
    /// ring, or armed the queue.
    #[inline(always)]
    pub(super) fn poll(&self, out: &mut [Wc], passes_ring: impl Fn() -> bool) -> Found {
        if !self.there.load(Ordering::Relaxed) {
            return Found::Elsewhere;
        }
        match self.sole.try_lock() {
            Some(mut turn) => match &mut *turn {
                Some(sole) if passes_ring() => sole.poll(out),
                _ => Found::Elsewhere,
            },
            None => Found::Nothing,
        }
    }

    /// Asks the source of the only driver. True: it has nothing, or another thread is at it, which
    /// leaves nothing to do. What there is has been delivered.
    fn finds_nothing(&self) -> bool {
        match self.sole.try_lock() {
            Some(mut turn) => turn.as_mut().is_some_and(|sole| sole.finds_nothing()),
            None => true,
        }
    }

    /// Has the only driver bring what is there. False where there is no such driver.
    pub(super) fn bring(&self) -> bool {
        self.there.load(Ordering::Relaxed) && {
            self.finds_nothing();
            true
        }
    }

    /// The drivers are these from now on.
    pub(super) fn set(&self, drivers: &[Attached]) {
        let sole = match drivers {
            [Attached { driver, direct: Some(queue), .. }] if !driver.is_aside() => {
                queue.source.as_ref().map(|source| {
                    let (driver, queue, source) = (driver.clone(), queue.clone(), source.clone());
                    let (raw, wcs) = (source.raw(), [Wc::default(); BATCH]);
                    Box::new(Sole { driver, queue, source, raw, wcs })
                })
            }
            _ => None,
        };
        let mut turn = self.sole.lock();
        self.there.store(sole.is_some(), Ordering::Relaxed);
        let before = std::mem::replace(&mut *turn, sole);
        // What that held may end with it.
        drop(turn);
        drop(before);
    }

    pub(super) fn turn(&self) -> Turn<'_> {
        Turn(self.sole.lock())
    }

    pub(super) fn try_turn(&self) -> Option<Turn<'_>> {
        self.sole.try_lock().map(Turn)
    }
}
