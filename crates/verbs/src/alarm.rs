//! A time at which a sleeping thread is to wake, set by another thread without waking it.

use crate::{Error, Result};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// A timerfd of CLOCK_MONOTONIC: readable from its time on until it is set anew.
///
/// To wake a thread takes its caller some microseconds, more than a migration by request does. Who has something to do that may wait for a moment sets the
/// alarm of the thread that does it.
#[derive(Debug)]
pub struct Alarm(OwnedFd);

impl Alarm {
    /// One that is not set. Close-on-exec.
    pub fn new() -> Result<Alarm> {
        // SAFETY: takes no pointers; a non-negative result is a fresh descriptor that nobody else owns.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
        if fd < 0 {
            return Err(Error::os("timerfd_create", &io::Error::last_os_error()));
        }
        // SAFETY: `fd` was just made and is owned by nobody else.
        Ok(Alarm(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Sets it, in place of what it was set to; at once for a time that has passed, never for `u64::MAX`.
    pub fn set(&self, at_us: u64) {
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value = match at_us {
            u64::MAX => never,
            // Zero would be never.
            0 => libc::timespec { tv_sec: 0, tv_nsec: 1 },
            at_us => libc::timespec {
                // The kernel takes no later one than its own end of time, which is centuries away.
                tv_sec: (at_us / 1_000_000) as _,
                tv_nsec: (at_us % 1_000_000 * 1_000) as _,
            },
        };
        let spec = libc::itimerspec { it_interval: never, it_value: value };
        // SAFETY: a live structure; no old value is asked for. It cannot fail: the descriptor is a timer's and the time is a valid one.
        unsafe { libc::timerfd_settime(self.0.as_raw_fd(), libc::TFD_TIMER_ABSTIME, &spec, std::ptr::null_mut()) };
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Alarm {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it is readable within so many milliseconds.
    fn rings(alarm: &Alarm, within_ms: i32) -> bool {
        let mut fd = libc::pollfd { fd: alarm.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one live structure.
        unsafe { libc::poll(&raw mut fd, 1, within_ms) == 1 }
    }

    #[test]
    fn it_rings_from_its_time_on_until_it_is_set_anew() {
        let alarm = Alarm::new().unwrap();
        assert!(!rings(&alarm, 0), "not set");
        for past_us in [0, 1] {
            alarm.set(past_us);
            assert!(rings(&alarm, 10_000) && rings(&alarm, 0), "{past_us}");
        }
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a live structure.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        let now_us = now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000;
        alarm.set(now_us + 3_600_000_000);
        assert!(!rings(&alarm, 0), "in an hour");
        alarm.set(now_us + 1_000);
        assert!(rings(&alarm, 10_000));
        alarm.set(u64::MAX);
        assert!(!rings(&alarm, 0), "never");
        alarm.set(u64::MAX - 1);
        assert!(!rings(&alarm, 0), "in 584,000 years");
    }
}
