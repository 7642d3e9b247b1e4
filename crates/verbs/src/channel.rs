//! Completion channels: where a program waits for the events of its completion queues.

use crate::{Error, EventFd, Owner, Result};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A completion channel: a descriptor that is readable while events wait, and the queues that they are of.
pub struct CompChannel {
    pub(crate) fd: EventFd,
    pending: Mutex<VecDeque<u64>>,
    /// Hint: events in `pending`. Written under its lock.
    waiting: AtomicU32,
    pub(crate) owner: Owner,
}

impl CompChannel {
    /// A channel whose descriptor blocks until its owner sets O_NONBLOCK.
    pub fn new() -> Result<Arc<CompChannel>> {
        CompChannel::of_device(Owner::PROCESS)
    }

    /// The same for the CQs of a device.
    pub fn of_device(owner: Owner) -> Result<Arc<CompChannel>> {
        Ok(Arc::new(CompChannel {
            fd: EventFd::new(true, false)?,
            pending: Mutex::default(),
            waiting: AtomicU32::new(0),
            owner,
        }))
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether events wait, as far as can be seen without a lock.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    pub(crate) fn raise(&self, cookie: u64) {
        // At most one event for each arming, so the list is bounded by the number of req_notify calls that were not collected.
        let mut pending = self.pending();
        pending.push_back(cookie);
        self.waiting.store(pending.len() as u32, Ordering::Release);
        // Under the lock, so that a withdrawal finds what it takes back.
        self.fd.signal();
    }

    /// Waits for the next event and gives the cookie of its queue; EAGAIN on a non-blocking descriptor without one, EINTR where a signal
    /// handler ran that does not ask for the wait to go on (SA_RESTART).
    pub fn get_event(&self) -> Result<u64> {
        loop {
            self.fd.take().map_err(|e| Error::os("completion channel", &e))?;
            // An event of a queue that was destroyed meanwhile has been withdrawn: wait for the next.
            let mut pending = self.pending();
            let first = pending.pop_front();
            self.waiting.store(pending.len() as u32, Ordering::Release);
            if let Some(cookie) = first {
                return Ok(cookie);
            }
        }
    }

    /// Takes all events that wait, for an owner that then looks at all its queues.
    pub fn drain(&self) {
        let mut pending = self.pending();
        let waiting = pending.drain(..).count();
        self.waiting.store(0, Ordering::Release);
        drop(pending);
        for _ in 0..waiting {
            // Each waiting event was signalled, or is about to be.
            let _ = self.fd.take();
        }
    }

    /// Withdraws the events of a queue that is destroyed. The descriptor must not stay readable for them: a program that polls it
    /// would then wait for an event that never comes. (A thread that has read the descriptor and not yet the list waits on.)
    pub fn withdraw(&self, cookie: u64) {
        let mut pending = self.pending();
        let before = pending.len();
        pending.retain(|c| *c != cookie);
        self.waiting.store(pending.len() as u32, Ordering::Release);
        for _ in pending.len()..before {
            self.fd.take_back();
        }
    }
}

impl AsFd for CompChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for CompChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
