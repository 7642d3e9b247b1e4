//! Completion channels: where a program waits for the events of its completion queues.

use crate::{Cq, Error, EventFd, Owner, Result};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A completion channel: a descriptor that is readable while events wait, and the queues that they
/// are of.
pub struct CompChannel {
    pub(crate) fd: EventFd,
    pending: Mutex<VecDeque<u64>>,
    /// Hint: events in `pending`. Written under its lock.
    waiting: AtomicU32,
    /// Events that nobody has got yet: those in `pending`, and those on their way there.
    ungot: AtomicU32,
    /// Queues that may owe an event, see [`Cq::remind`]: each once.
    owing: Mutex<Vec<Weak<Cq>>>,
    pub(crate) owner: Owner,
}

impl CompChannel {
    /// A channel whose descriptor blocks until its owner sets O_NONBLOCK.
    pub fn new() -> Result<Arc<CompChannel>> {
        CompChannel::of_device(Owner::PROCESS)
    }

    /// Makes a channel, for the CQs of one device.
    pub fn of_device(owner: Owner) -> Result<Arc<CompChannel>> {
        Ok(Arc::new(CompChannel {
            fd: EventFd::new(true, false)?,
            pending: Mutex::default(),
            waiting: AtomicU32::new(0),
            ungot: AtomicU32::new(0),
            owing: Mutex::default(),
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

    /// Whether there are events that nobody has got yet, also such as are about to be raised.
    pub(crate) fn owes_events(&self) -> bool {
        self.ungot.load(Ordering::Acquire) > 0
    }

    /// An event is about to be raised.
    pub(crate) fn announce(&self) {
        self.ungot.fetch_add(1, Ordering::AcqRel);
    }

    /// So many events were got, or withdrawn.
    fn got(&self, events: usize) {
        self.ungot.fetch_sub(events as u32, Ordering::AcqRel);
    }

    /// Raises an event of a queue of this channel, which was announced: at once, or at the end of
    /// what the thread is about ([`HeldEvents`]).
    pub(crate) fn raise(self: &Arc<Self>, cookie: u64) {
        let held = with_held(|held| {
            if held.holds {
                held.events.push((self.clone(), cookie));
            }
            held.holds
        });
        if held != Some(true) {
            self.raise_now(cookie);
        }
    }

    fn raise_now(&self, cookie: u64) {
        // At most one event for each arming, so the list is bounded by the number of req_notify
        // calls that were not collected.
        let mut pending = self.pending();
        pending.push_back(cookie);
        self.waiting.store(pending.len() as u32, Ordering::Release);
        // Under the lock, so that a withdrawal finds what it takes back.
        self.fd.signal();
    }

    fn owing(&self) -> MutexGuard<'_, Vec<Weak<Cq>>> {
        self.owing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue owes an event: it raises it when somebody waits for one here.
    pub(crate) fn owe(&self, cq: &Weak<Cq>) {
        let mut owing = self.owing();
        if !owing.iter().any(|other| other.ptr_eq(cq)) {
            owing.retain(|other| other.strong_count() > 0);
            owing.push(cq.clone());
        }
    }

    /// Waits for the next event and gives the cookie of its queue; EAGAIN on a non-blocking
    /// descriptor without one, EINTR where a signal handler ran that does not ask for the wait to
    /// go on (SA_RESTART).
    pub fn get_event(&self) -> Result<u64> {
        loop {
            let owing = std::mem::take(&mut *self.owing());
            owing.iter().filter_map(Weak::upgrade).for_each(|cq| cq.remind(None));
            self.fd.take().map_err(|e| Error::os("completion channel", &e))?;
            // An event of a queue that was destroyed meanwhile has been withdrawn: wait for the
            // next.
            let mut pending = self.pending();
            let first = pending.pop_front();
            self.waiting.store(pending.len() as u32, Ordering::Release);
            if let Some(cookie) = first {
                self.got(1);
                return Ok(cookie);
            }
        }
    }

    /// Takes all events that wait, for an owner that then looks at all its queues.
    pub fn drain(&self) {
        let mut pending = self.pending();
        let waiting = pending.drain(..).count();
        self.waiting.store(0, Ordering::Release);
        self.got(waiting);
        drop(pending);
        for _ in 0..waiting {
            // Each waiting event was signalled, or is about to be.
            let _ = self.fd.take();
        }
    }

    /// Withdraws the events of a queue that is destroyed. The descriptor must not stay readable for
    /// them: a program that polls it would then wait for an event that never comes. (A thread that
    /// has read the descriptor and not yet the list waits on.)
    pub fn withdraw(&self, cookie: u64) {
        let mut pending = self.pending();
        let before = pending.len();
        pending.retain(|c| *c != cookie);
        self.waiting.store(pending.len() as u32, Ordering::Release);
        self.got(before - pending.len());
        for _ in pending.len()..before {
            self.fd.take_back();
        }
    }
}

struct Held {
    holds: bool,
    /// At most one for each queue that is armed.
    events: Vec<(Arc<CompChannel>, u64)>,
}

thread_local! {
    static HELD: RefCell<Held> = const { RefCell::new(Held { holds: false, events: Vec::new() }) };
}

/// What the thread holds; `None` at its end, when it can hold nothing any more: a process that ends
/// still sends.
fn with_held<T>(act: impl FnOnce(&mut Held) -> T) -> Option<T> {
    HELD.try_with(|held| act(&mut held.borrow_mut())).ok()
}

/// While it lives, events that this thread raises are held; they are raised when it is dropped. So
/// whoever waits for one finds all that a device has brought at once. It must be dropped while
/// nobody can destroy the queues: with the device's lock held.
pub struct HeldEvents {
    /// Its list is that of the thread that made it.
    _same_thread: PhantomData<*const ()>,
}

impl HeldEvents {
    /// Holds events from now on. (A second one in the same thread changes nothing.)
    #[allow(clippy::new_without_default)]
    pub fn new() -> HeldEvents {
        with_held(|held| held.holds = true);
        HeldEvents { _same_thread: PhantomData }
    }
}

impl Drop for HeldEvents {
    fn drop(&mut self) {
        with_held(|held| {
            held.holds = false;
            held.events.drain(..).for_each(|(channel, cookie)| channel.raise_now(cookie));
        });
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Raises an event when its thread ends, after what the thread held is gone.
    struct AtTheEnd(RefCell<Option<Arc<CompChannel>>>);

    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            let channel = self.0.take().unwrap();
            channel.announce();
            drop(HeldEvents::new());
            channel.raise(7);
        }
    }

    thread_local! {
        static AT_THE_END: AtTheEnd = const { AtTheEnd(RefCell::new(None)) };
    }

    #[test]
    fn a_thread_that_ends_raises_events_still() {
        let channel = CompChannel::new().unwrap();
        let of_thread = channel.clone();
        // Variables of a thread end in the reverse of the order in which they were first used.
        let thread = std::thread::spawn(move || {
            AT_THE_END.with(|end| *end.0.borrow_mut() = Some(of_thread));
            drop(HeldEvents::new());
        });
        thread.join().unwrap();
        assert!(channel.has_events());
    }
}
