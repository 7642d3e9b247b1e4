//! The asynchronous thread: it reads the context's events, does what is due and calls the program.
//!
//! It owns the context's events. Its descriptor is made O_NONBLOCK for as long: an event may vanish
//! between poll(2) and the read, with the queue pair that it is of.
//!
//! One thread reads at a time ([`Reading`]). A thread of the program that asks queue pairs to
//! migrate is the reader meanwhile ([`Handle::reads_while`]): the device raises their events within
//! the call, so whoever waits for them is not kept until another thread has been woken, which takes
//! longer than the migration; nor do two threads take the lock from each other for each queue pair
//! of a long list. What is not for the library, and all calls of the program, are left to the
//! library's thread.
//!
//! No more is that thread woken for nothing: it sleeps over an epoll set with the context's
//! descriptor in it, in which a reader has the interest off, and over an
//! [`Alarm`](unbroken_verbs::Alarm), which others set to what falls due earlier.

use crate::error::{Error, Result};
use crate::handle::{Handle, Inner};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use unbroken_verbs::abi::ibv_async_event;

/// Events that are read before something else is done.
const BATCH: usize = 256;
/// Events for the program that wait for the library's thread; while there are as many, only that
/// reads.
const OTHERS: usize = 256;

/// Who reads the context's events.
pub(crate) struct Reading {
    /// Held by the reader. Behind it: what another than the library's thread has read and is not
    /// for the library.
    others: Mutex<VecDeque<ibv_async_event>>,
    /// The context's descriptor.
    async_fd: RawFd,
    /// An epoll set of that descriptor.
    interest: OwnedFd,
}

impl Reading {
    pub(crate) fn new(async_fd: RawFd) -> Result<Reading> {
        let errno = || std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EBADF);
        // SAFETY: takes no pointers; a non-negative result is a fresh descriptor that nobody else
        // owns.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(Error::call("epoll_create1", errno()));
        }
        // SAFETY: just made, and owned by nobody else.
        let interest = unsafe { OwnedFd::from_raw_fd(fd) };
        let reading = Reading { others: Mutex::default(), async_fd, interest };
        if reading.control(libc::EPOLL_CTL_ADD, true) < 0 {
            return Err(Error::call("epoll_ctl with async_fd", errno()));
        }
        Ok(reading)
    }

    fn control(&self, operation: i32, looks: bool) -> i32 {
        let events = if looks { libc::EPOLLIN as u32 } else { 0 };
        let mut event = libc::epoll_event { events, u64: 0 };
        // SAFETY: a live structure.
        unsafe {
            libc::epoll_ctl(self.interest.as_raw_fd(), operation, self.async_fd, &raw mut event)
        }
    }

    /// Whether the library's thread is to wake for events. To be changed by the reader alone; it
    /// cannot fail for what is in the set.
    fn set_interest(&self, looks: bool) {
        self.control(libc::EPOLL_CTL_MOD, looks);
    }

    /// None: another thread reads, or this one does, further out.
    fn try_begin(&self) -> Option<MutexGuard<'_, VecDeque<ibv_async_event>>> {
        match self.others.try_lock() {
            Ok(others) => Some(others),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// What became of reading events.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    /// There were no more, or a batch of them, or another thread is at it.
    Done,
    /// There will never be any more.
    Over,
}

/// Sets or clears O_NONBLOCK; gives whether it was set before.
fn set_nonblocking(fd: RawFd, on: bool) -> Result<bool> {
    let last = || {
        Error::call(
            "fcntl of async_fd",
            std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EBADF),
        )
    };
    // SAFETY: takes no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(last());
    }
    let wanted = if on { flags | libc::O_NONBLOCK } else { flags & !libc::O_NONBLOCK };
    // SAFETY: takes no pointers.
    if unsafe { libc::fcntl(fd, libc::F_SETFL, wanted) } < 0 {
        return Err(last());
    }
    Ok(flags & libc::O_NONBLOCK != 0)
}

/// Starts it.
pub(crate) fn start(handle: &Arc<Handle>) -> Result<()> {
    // SAFETY: the context is open.
    let fd = unsafe { (*handle.context()).async_fd };
    let was_nonblocking = set_nonblocking(fd, true)?;
    let its = handle.clone();
    let run = move || {
        // Set once: there is one thread.
        its.thread_id.get_or_init(|| std::thread::current().id());
        its.run();
        if !was_nonblocking {
            drop(set_nonblocking(fd, false));
        }
    };
    let spawned = std::thread::Builder::new().name("unbapm".into()).spawn(run);
    let thread =
        spawned.map_err(|e| Error::new(libc::EAGAIN, format!("the library's thread: {e}")))?;
    *handle.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    Ok(())
}

/// Ends it, and waits for that.
pub(crate) fn stop(handle: &Handle) {
    handle.stop.store(true, Relaxed);
    handle.wake.signal();
    let thread = handle.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(thread) = thread {
        // A panic of it has nobody else to tell.
        drop(thread.join());
    }
}

impl Handle {
    fn run(&self) {
        let mut read = Read::Done;
        while !self.stop.load(Relaxed) {
            if read != Read::Over {
                read = self.read_events();
            }
            self.progress();
            self.deliver();
            self.set_alarm(&mut self.lock());
            self.sleep(read != Read::Over);
        }
        // A queue pair cannot be destroyed while an event of it is not acknowledged.
        if let Some(mut others) = self.reading.try_begin() {
            others.drain(..).for_each(|event| self.pass_on(event));
        }
    }

    /// Sets when the thread wakes to what the machine is to be asked for next.
    pub(crate) fn set_alarm(&self, inner: &mut Inner) {
        inner.sleeps_until_us = inner.machine.next_us().unwrap_or(u64::MAX);
        self.alarm.set(inner.sleeps_until_us);
    }

    /// Until something happens, or the alarm rings.
    fn sleep(&self, looks_at_events: bool) {
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let events = if looks_at_events { self.reading.interest.as_raw_fd() } else { -1 };
        let mut fds = [poll(events), poll(self.wake.as_raw_fd()), poll(self.alarm.as_raw_fd())];
        // SAFETY: live structures. A failure is a wake-up like any other.
        unsafe { libc::poll(fds.as_mut_ptr(), 3, -1) };
        // Nothing there is as good.
        drop(self.wake.take());
    }

    /// Reads what is there.
    fn read_events(&self) -> Read {
        // Another that reads has the interest back when it ends.
        let Some(mut others) = self.reading.try_begin() else { return Read::Done };
        others.drain(..).for_each(|event| self.pass_on(event));
        for _ in 0..BATCH {
            // SAFETY: the context is open until the thread has ended.
            let event = match unsafe { self.verbs.next_event(self.context()) } {
                Ok(event) => event,
                Err(error) if matches!(error.errno, libc::EAGAIN | libc::EINTR) => {
                    return Read::Done
                }
                Err(_) => return Read::Over,
            };
            // SAFETY: just read.
            match unsafe { self.take_in(&event) } {
                // SAFETY: read above, and acknowledged once.
                true => unsafe { self.verbs.acknowledge(event) },
                false => self.pass_on(event),
            }
        }
        Read::Done
    }

    /// Gives the program an event that is not for the library.
    fn pass_on(&self, event: ibv_async_event) {
        if let Some(on_other) = &self.options.on_other {
            on_other(&event);
        }
        // SAFETY: read by a reader, and acknowledged once, by whoever has taken it in or by this.
        unsafe { self.verbs.acknowledge(event) };
    }

    /// Does something that raises up to so many events, as their reader, and takes them in.
    pub(crate) fn reads_while<T>(&self, events: usize, run: impl FnOnce() -> T) -> T {
        // Where the program reads by itself, or another thread reads, they come that way.
        let others = if self.options.no_thread { None } else { self.reading.try_begin() };
        let Some(mut others) = others else { return run() };
        self.reading.set_interest(false);
        let done = run();
        for _ in 0..events {
            if others.len() >= OTHERS {
                break;
            }
            // SAFETY: the context is open as long as the handle. The descriptor is O_NONBLOCK while
            // there is a thread.
            let Ok(event) = (unsafe { self.verbs.next_event(self.context()) }) else { break };
            // SAFETY: just read.
            match unsafe { self.take_in(&event) } {
                // SAFETY: read above, and acknowledged once.
                true => unsafe { self.verbs.acknowledge(event) },
                false => others.push_back(event),
            }
        }
        let is_due = !others.is_empty();
        // Before another can begin: that one's is its own.
        self.reading.set_interest(true);
        drop(others);
        if is_due {
            self.wake.signal();
        }
        // Who waits looks again.
        self.after(&mut self.lock());
        done
    }
}
