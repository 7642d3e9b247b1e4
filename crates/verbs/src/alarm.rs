//! A time at which a sleeping thread is to wake, set by another thread without waking it.

use crate::{Error, Result};
use rustix::time::{
    timerfd_create, timerfd_settime, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags,
    Timespec,
};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// A timerfd of CLOCK_MONOTONIC: readable from its time on until it is set anew.
///
/// To wake a thread takes its caller some microseconds, more than a migration by request does. Who
/// has something to do that may wait for a moment sets the alarm of the thread that does it.
#[derive(Debug)]
pub struct Alarm(OwnedFd);

impl Alarm {
    /// One that is not set. Close-on-exec.
    pub fn new() -> Result<Alarm> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let made = timerfd_create(TimerfdClockId::Monotonic, flags);
        made.map(Alarm).map_err(|e| Error::os("timerfd_create", &e.into()))
    }

    /// Sets it, in place of what it was set to; at once for a time that has passed, never for
    /// `u64::MAX`.
    pub fn set(&self, at_us: u64) {
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = match at_us {
            u64::MAX => never,
            // Zero would be never.
            0 => Timespec { tv_sec: 0, tv_nsec: 1 },
            at_us => Timespec {
                tv_sec: (at_us / 1_000_000) as _,
                tv_nsec: (at_us % 1_000_000 * 1_000) as _,
            },
        };
        // It cannot fail: the descriptor is a timer's, and the time is a valid one.
        let _ = timerfd_settime(
            &self.0,
            TimerfdTimerFlags::ABSTIME,
            &Itimerspec { it_interval: never, it_value },
        );
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
