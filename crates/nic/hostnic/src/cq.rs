//! A CQ of the provider behind a [`Cq`].
//!
//! A poll that finds the ring empty polls the provider's queue, one thread at a time, so that order
//! is kept. Never more is fetched than the ring has room for: the rest waits in the provider's.
//!
//! Events: [`Cq::arm`] arms the ring, and then this driver asks the provider for its next event and
//! fetches what has come meanwhile. The thread of the device (crate::device) takes the event,
//! fetches, and raises the ring's if that was not enough: for solicited completions it is not known
//! which one it was.
//!
//! The provider's queue is ended with the ring, which holds it (by its overrun hook): programs end
//! the QPs that complete there before.

use crate::context::Context;
use crate::library::{check, null_error};
use crate::{lock, Object};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use unbroken_types::Wc;
use unbroken_verbs::abi::{ibv_comp_channel, ibv_cq, PollCq, ReqNotifyCq};
use unbroken_verbs::{Cq, Driver, Error, Result};

/// Completions that are fetched at a time.
const BATCH: usize = 32;
/// Entries of the provider's queue at first: enough for most programs where the provider cannot
/// change the size (siw).
const FIRST_ENTRIES: u32 = 1024;
/// Batches that one call fetches, so that it ends.
const MAX_BATCHES: usize = 64;

struct PollState {
    wcs: [Wc; BATCH],
}

/// See the module's text.
pub(crate) struct HostCq {
    context: Arc<Context>,
    pub(crate) raw: Object<ibv_cq>,
    poll: PollCq,
    req_notify: ReqNotifyCq,
    /// Names it in the events of the provider's channel.
    pub(crate) cookie: u64,
    ring: OnceLock<Weak<Cq>>,
    turn: Mutex<PollState>,
    /// Entries that the provider's queue has.
    entries: AtomicU32,
    /// Entries that the ring had when a QP was made last: as many as its QPs need.
    room: AtomicU32,
    has_channel: bool,
    /// It was armed for solicited completions last: which one raises the event is not told.
    solicited: AtomicBool,
}

impl HostCq {
    /// Makes one with at least that many entries. Events come to `channel`, if there is one.
    pub(crate) fn new(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<*mut ibv_comp_channel>,
        cookie: u64,
    ) -> Result<Arc<HostCq>> {
        // SAFETY: an open context; the slots never change.
        let ops = unsafe { (*context.raw()).ops };
        let (Some(poll), Some(req_notify)) = (ops.poll_cq, ops.req_notify_cq) else {
            return Err(Error::unsupported(format!("{}: CQs cannot be polled", context.name)));
        };
        let wanted = c_int::try_from(entries.max(FIRST_ENTRIES)).unwrap_or(c_int::MAX);
        // SAFETY: an open context, and a channel of it or none.
        let raw = unsafe {
            context.library.create_cq(
                context.raw(),
                wanted,
                cookie as *mut c_void,
                channel.unwrap_or_default(),
                0,
            )
        };
        if raw.is_null() {
            return Err(null_error(&format!("{}: ibv_create_cq({entries})", context.name)));
        }
        Ok(Arc::new(HostCq {
            context: context.clone(),
            raw: Object(raw),
            poll,
            req_notify,
            cookie,
            ring: OnceLock::new(),
            turn: Mutex::new(PollState { wcs: [Wc::default(); BATCH] }),
            // SAFETY: just made.
            entries: AtomicU32::new(unsafe { (*raw).cqe }.max(0) as u32),
            room: AtomicU32::new(0),
            has_channel: channel.is_some(),
            solicited: AtomicBool::new(false),
        }))
    }

    /// The ring that it is behind.
    pub(crate) fn set_ring(&self, ring: &Arc<Cq>) {
        let _ = self.ring.set(Arc::downgrade(ring));
    }

    pub(crate) fn ring(&self) -> Option<Arc<Cq>> {
        self.ring.get().and_then(Weak::upgrade)
    }

    /// Whether it is behind that ring.
    pub(crate) fn is_behind(&self, ring: &Arc<Cq>) -> bool {
        self.ring.get().is_some_and(|mine| std::ptr::eq(mine.as_ptr(), Arc::as_ptr(ring)))
    }

    /// The provider's queue has at least as many entries as the ring: all that QPs may have
    /// outstanding completes there, however late it is polled.
    pub(crate) fn fit(&self, ring: &Cq) -> Result<()> {
        // One at a time, so that nobody makes it smaller again, and no poll meanwhile: not every
        // provider can do both at once.
        let _turn = lock(&self.turn);
        let needed = ring.capacity();
        self.room.fetch_max(needed, Ordering::AcqRel);
        if needed <= self.entries.load(Ordering::Acquire) {
            return Ok(());
        }
        // SAFETY: a queue of ours.
        let code = unsafe { self.context.library.resize_cq(self.raw.0, needed as c_int) };
        check(&format!("{}: ibv_resize_cq({needed})", self.context.name), code)?;
        self.entries.store(needed, Ordering::Release);
        Ok(())
    }

    /// The provider's event has come.
    pub(crate) fn take_event(&self) {
        self.fetch_all();
        // Any completion has fired the ring when it was offered. One that came before, for which
        // the event is, must not use up what has been asked for since.
        if let (true, Some(ring)) = (self.solicited.swap(false, Ordering::AcqRel), self.ring()) {
            ring.fire();
        }
    }

    /// Brings what the provider has, waiting for whoever is at it.
    pub(crate) fn fetch_all(&self) {
        if let Some(ring) = self.ring() {
            self.fetch_in_turn(&mut lock(&self.turn), &ring);
        }
    }

    fn fetch_in_turn(&self, turn: &mut PollState, ring: &Cq) {
        for _ in 0..MAX_BATCHES {
            let room = self.room.load(Ordering::Relaxed).saturating_sub(ring.waiting());
            let wanted = BATCH.min(room as usize);
            // SAFETY: a queue of ours, and an array of that many completions. The function is the
            // provider's own and calls nothing of ours.
            let n = unsafe { (self.poll)(self.raw.0, wanted as c_int, turn.wcs.as_mut_ptr()) };
            let Ok(n) = usize::try_from(n) else { return ring.lose() };
            if n == 0 {
                return;
            }
            for wc in &turn.wcs[..n] {
                ring.offer(*wc, false);
            }
            if n < wanted {
                return;
            }
        }
    }
}

impl Driver for HostCq {
    #[inline]
    fn drive(&self) {
        let Ok(mut turn) = self.turn.try_lock() else { return };
        let Some(ring) = self.ring() else { return };
        self.fetch_in_turn(&mut turn, &ring);
    }

    fn bring(&self) {
        self.fetch_all();
    }

    fn arm(&self, solicited_only: bool) {
        if !self.has_channel {
            return;
        }
        self.solicited.store(solicited_only, Ordering::Release);
        // SAFETY: a queue of ours.
        unsafe { (self.req_notify)(self.raw.0, solicited_only.into()) };
        self.fetch_all();
    }
}

impl Drop for HostCq {
    fn drop(&mut self) {
        // SAFETY: made by us; nobody polls it any more, and its QPs are gone. Each event of it was
        // acknowledged when it was taken.
        unsafe { self.context.library.destroy_cq(self.raw.0) };
    }
}
