//! The asynchronous thread: it reads the context's events, does what is due and calls the program.
//!
//! It owns the context's events. Its descriptor is made O_NONBLOCK for as long: an event may vanish between poll(2) and the read, with the queue pair
//! that it is of.
//!
//! One thread reads at a time ([`Reading`]). A thread of the program that asks queue pairs to migrate is the reader meanwhile ([`Handle::reads_while`]): the
//! device raises their events within the call, so whoever waits for them is not kept until another thread has been woken, which takes longer than the
//! migration; nor do two threads take the lock from each other for each queue pair of a long list. What is not for the library, and all calls of the program,
//! are left to the library's thread.
//!
//! | the library's thread finds | and then |
//! | --- | --- |
//! | nobody reads | reads what is there, then sleeps until there is more |
//! | another reads | says that it wants to, sleeps without looking at the events; the other wakes it when it is done |

use crate::error::{Error, Result};
use crate::handle::{now_us, Handle};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use unbroken_verbs::abi::ibv_async_event;

/// Events that are read before something else is done.
const BATCH: usize = 256;
/// Events for the program that wait for the library's thread; while there are as many, only that reads.
const OTHERS: usize = 256;

/// Who reads the context's events.
#[derive(Default)]
pub(crate) struct Reading {
    /// Held by the reader. Behind it: what another than the library's thread has read and is not for the library.
    others: Mutex<VecDeque<ibv_async_event>>,
    /// The library's thread has found another reading.
    wanted: AtomicBool,
}

impl Reading {
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
    /// There were no more, or a batch of them.
    Done,
    /// Another thread is at it, and wakes this one.
    Elsewhere,
    /// There will never be any more.
    Over,
}

/// Sets or clears O_NONBLOCK; gives whether it was set before.
fn set_nonblocking(fd: RawFd, on: bool) -> Result<bool> {
    let last =
        || Error::call("fcntl of async_fd", std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EBADF));
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
        its.run(fd);
        if !was_nonblocking {
            drop(set_nonblocking(fd, false));
        }
    };
    let spawned = std::thread::Builder::new().name("unbapm".into()).spawn(run);
    let thread = spawned.map_err(|e| Error::new(libc::EAGAIN, format!("the library's thread: {e}")))?;
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
    fn run(&self, async_fd: RawFd) {
        let mut read = Read::Done;
        while !self.stop.load(Relaxed) {
            if read != Read::Over {
                read = self.read_events();
            }
            self.progress();
            self.deliver();
            let next_us = {
                let mut inner = self.lock();
                inner.sleeps_until_us = inner.machine.next_us().unwrap_or(u64::MAX);
                inner.sleeps_until_us
            };
            self.sleep(if read == Read::Done { async_fd } else { -1 }, next_us);
        }
        // A queue pair cannot be destroyed while an event of it is not acknowledged.
        if let Some(mut others) = self.reading.try_begin() {
            others.drain(..).for_each(|event| self.pass_on(event));
        }
    }

    /// Until something happens, or that time. A descriptor below 0 is not looked at.
    fn sleep(&self, async_fd: RawFd, until_us: u64) {
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [poll(async_fd), poll(self.wake.as_raw_fd())];
        let rest_us = until_us.saturating_sub(now_us());
        let rest = libc::timespec { tv_sec: (rest_us / 1_000_000) as _, tv_nsec: (rest_us % 1_000_000 * 1_000) as _ };
        let timeout = if until_us == u64::MAX { std::ptr::null() } else { &raw const rest };
        // SAFETY: live structures. A failure is a wake-up like any other.
        unsafe { libc::ppoll(fds.as_mut_ptr(), 2, timeout, std::ptr::null()) };
        // Nothing there is as good.
        drop(self.wake.take());
    }

    /// Reads what is there.
    fn read_events(&self) -> Read {
        // Before the look, so that a reader that ends after it wakes this thread.
        self.reading.wanted.store(true, SeqCst);
        let Some(mut others) = self.reading.try_begin() else { return Read::Elsewhere };
        self.reading.wanted.store(false, SeqCst);
        others.drain(..).for_each(|event| self.pass_on(event));
        for _ in 0..BATCH {
            // SAFETY: the context is open until the thread has ended.
            let event = match unsafe { self.verbs.next_event(self.context()) } {
                Ok(event) => event,
                Err(error) if matches!(error.errno, libc::EAGAIN | libc::EINTR) => return Read::Done,
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
        let done = run();
        let Some(mut others) = others else { return done };
        for _ in 0..events {
            if others.len() >= OTHERS {
                break;
            }
            // SAFETY: the context is open as long as the handle. The descriptor is O_NONBLOCK while there is a thread.
            let Ok(event) = (unsafe { self.verbs.next_event(self.context()) }) else { break };
            // SAFETY: just read.
            match unsafe { self.take_in(&event) } {
                // SAFETY: read above, and acknowledged once.
                true => unsafe { self.verbs.acknowledge(event) },
                false => others.push_back(event),
            }
        }
        let is_due = !others.is_empty();
        drop(others);
        if self.reading.wanted.swap(false, SeqCst) || is_due {
            self.wake.signal();
        }
        // Who waits looks again.
        self.after(&mut self.lock());
        done
    }
}
