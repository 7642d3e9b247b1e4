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
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use unbroken_types::Wc;
use unbroken_verbs::abi::{ibv_comp_channel, ibv_cq, PollCq, ReqNotifyCq};
use unbroken_verbs::{Cq, Error, RawCq, Result, Source};

/// Entries at least where the provider cannot change the size of a queue: enough for most programs.
const FIXED_ENTRIES: u32 = 1024;

/// The completion channel of a device. Each queue holds it: the provider refuses to destroy a channel
/// that a queue uses, and a channel that is never destroyed keeps the device open.
pub(crate) struct Channel {
    context: Arc<Context>,
    raw: Object<ibv_comp_channel>,
}

impl Channel {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Channel>> {
        // SAFETY: an open context.
        let raw = unsafe { context.library.create_comp_channel(context.raw()) };
        if raw.is_null() {
            return Err(null_error(&format!("{}: ibv_create_comp_channel", context.name)));
        }
        Ok(Arc::new(Channel { context: context.clone(), raw: Object(raw) }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        // SAFETY: a channel of ours; the field never changes.
        unsafe { (*self.raw.0).fd }
    }

    /// Takes the next event and acknowledges it. Gives the cookie of its queue; none where there is
    /// no event.
    pub(crate) fn take_event(&self) -> Option<u64> {
        let (mut cq, mut cookie) = (null_mut(), null_mut());
        let library = self.context.library;
        // SAFETY: a channel of ours and live locals; the descriptor does not block.
        if unsafe { library.get_cq_event(self.raw.0, &mut cq, &mut cookie) } != 0 {
            return None;
        }
        // SAFETY: the queue lives until its event is acknowledged.
        unsafe { library.ack_cq_events(cq, 1) };
        Some(cookie as u64)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: made by us; each queue of it holds it, so they are gone.
        unsafe { self.context.library.destroy_comp_channel(self.raw.0) };
    }
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
    /// Entries that the provider's queue has.
    entries: Mutex<u32>,
    channel: Option<Arc<Channel>>,
}

impl HostCq {
    /// Makes one with at least that many entries. Events come to `channel`, if there is one, by that
    /// completion vector.
    pub(crate) fn new(
        context: &Arc<Context>,
        entries: u32,
        vector: u32,
        channel: Option<Arc<Channel>>,
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
                channel.as_ref().map_or(null_mut(), |channel| channel.raw.0),
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
            channel,
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
        if self.channel.is_some() {
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
