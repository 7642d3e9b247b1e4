//! The asynchronous thread: it reads the context's events, does what is due and calls the program.
//!
//! It owns the context's events. Its descriptor is made O_NONBLOCK for as long: an event may vanish between poll(2) and the read, with the queue pair
//! that it is of.

use crate::error::{Error, Result};
use crate::handle::{now_us, Handle};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

/// Events that are read before something else is done.
const BATCH: usize = 256;

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
        let mut reads = true;
        while !self.stop.load(Relaxed) {
            if reads {
                reads = self.read_events();
            }
            self.progress();
            self.deliver();
            let next_us = {
                let mut inner = self.lock();
                inner.sleeps_until_us = inner.machine.next_us().unwrap_or(u64::MAX);
                inner.sleeps_until_us
            };
            self.sleep(if reads { async_fd } else { -1 }, next_us);
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

    /// Reads what is there; false: there will never be any more.
    fn read_events(&self) -> bool {
        for _ in 0..BATCH {
            // SAFETY: the context is open until the thread has ended.
            let event = match unsafe { self.verbs.next_event(self.context()) } {
                Ok(event) => event,
                Err(error) => return matches!(error.errno, libc::EAGAIN | libc::EINTR),
            };
            // SAFETY: just read.
            let taken = unsafe { self.take_in(&event) };
            if let (Some(on_other), false) = (&self.options.on_other, taken) {
                on_other(&event);
            }
            // SAFETY: read above, and acknowledged once.
            unsafe { self.verbs.acknowledge(event) };
        }
        true
    }
}
