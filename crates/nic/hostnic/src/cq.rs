//! A CQ of the provider: the [`Source`] of a [`Cq`].
//!
//! Events: [`Cq::arm`] arms the ring, and then asks the provider for its next event. The thread of
//! the device (crate::device) takes the event and raises the ring's.
//!
//! The provider's queue is ended with the ring, which holds it: programs end the QPs that complete
//! there before.

use crate::context::Context;
use crate::library::{check, null_error};
use crate::{lock, Object};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use unbroken_types::Wc;
use unbroken_verbs::abi::{ibv_comp_channel, ibv_cq, PollCq, ReqNotifyCq};
use unbroken_verbs::{Cq, Error, RawCq, Result, Source};

/// Entries at least where the provider cannot change the size of a queue: enough for most programs.
const FIXED_ENTRIES: u32 = 1024;

/// See the module's text.
pub(crate) struct HostCq {
    context: Arc<Context>,
    pub(crate) raw: Object<ibv_cq>,
    poll: PollCq,
    req_notify: ReqNotifyCq,
    /// Names it in the events of the provider's channel.
    pub(crate) cookie: u64,
    ring: OnceLock<Weak<Cq>>,
    /// Entries that the provider's queue has.
    entries: Mutex<u32>,
    has_channel: bool,
}

impl HostCq {
    /// Makes one with at least that many entries. Events come to `channel`, if there is one, by that
    /// completion vector.
    pub(crate) fn new(
        context: &Arc<Context>,
        entries: u32,
        vector: u32,
        channel: Option<*mut ibv_comp_channel>,
        cookie: u64,
    ) -> Result<Arc<HostCq>> {
        // SAFETY: an open context; the slots never change.
        let ops = unsafe { (*context.raw()).ops };
        let (Some(poll), Some(req_notify)) = (ops.poll_cq, ops.req_notify_cq) else {
            return Err(Error::unsupported(format!("{}: CQs cannot be polled", context.name)));
        };
        // SAFETY: an open context; the field never changes.
        let vectors = unsafe { (*context.raw()).num_comp_vectors }.max(1) as u32;
        let enough = if context.resizes_cqs() { entries } else { entries.max(FIXED_ENTRIES) };
        let wanted = c_int::try_from(enough.max(1)).unwrap_or(c_int::MAX);
        // SAFETY: an open context, and a channel of it or none.
        let raw = unsafe {
            context.library.create_cq(
                context.raw(),
                wanted,
                cookie as *mut c_void,
                channel.unwrap_or_default(),
                (vector % vectors) as c_int,
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
            // SAFETY: just made.
            entries: Mutex::new(unsafe { (*raw).cqe }.max(0) as u32),
            has_channel: channel.is_some(),
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

    /// The provider's event has come. A completion that was polled meanwhile may have been what it
    /// is for: whoever waits for the ring's event looks again, and arms again.
    pub(crate) fn take_event(&self) {
        if let Some(ring) = self.ring() {
            ring.fire();
        }
    }
}

impl Source for HostCq {
    #[inline]
    fn poll(&self, out: &mut [Wc]) -> i32 {
        // SAFETY: a queue of ours, and an array of that many completions. The function is the
        // provider's own and calls nothing of ours.
        unsafe { (self.poll)(self.raw.0, out.len() as c_int, out.as_mut_ptr()) }
    }

    fn raw(&self) -> Option<RawCq> {
        Some(RawCq { cq: self.raw.0, poll: self.poll })
    }

    fn arm(&self, solicited_only: bool) {
        if self.has_channel {
            // SAFETY: a queue of ours.
            unsafe { (self.req_notify)(self.raw.0, solicited_only.into()) };
        }
    }

    /// All that QPs may have outstanding completes there, however late it is polled.
    fn resize(&self, entries: u32) -> Result<()> {
        // One at a time, so that nobody makes it smaller again.
        let mut have = lock(&self.entries);
        if entries <= *have {
            return Ok(());
        }
        // SAFETY: a queue of ours.
        let code = unsafe { self.context.library.resize_cq(self.raw.0, entries as c_int) };
        check(&format!("{}: ibv_resize_cq({entries})", self.context.name), code)?;
        *have = entries;
        Ok(())
    }
}

impl Drop for HostCq {
    fn drop(&mut self) {
        // SAFETY: made by us; nobody polls it any more, and its QPs are gone. Each event of it was
        // acknowledged when it was taken.
        unsafe { self.context.library.destroy_cq(self.raw.0) };
    }
}
