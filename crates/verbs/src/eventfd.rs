//! A counting event descriptor that programs can poll.

use crate::{Error, Result};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// An eventfd. As a semaphore each read takes one event; otherwise a read takes all.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new descriptor, close-on-exec. A reader of a blocking one waits; the owner may set O_NONBLOCK later, as C programs do.
    pub fn new(semaphore: bool, nonblocking: bool) -> Result<EventFd> {
        let mut flags = libc::EFD_CLOEXEC;
        if semaphore {
            flags |= libc::EFD_SEMAPHORE;
        }
        if nonblocking {
            flags |= libc::EFD_NONBLOCK;
        }
        // SAFETY: eventfd takes no pointers; a non-negative result is a fresh descriptor that nobody else owns.
        let fd = unsafe { libc::eventfd(0, flags) };
        if fd < 0 {
            return Err(Error::os("eventfd", &io::Error::last_os_error()));
        }
        // SAFETY: `fd` was just made and is owned by nobody else.
        Ok(EventFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds one event. Never blocks in practice: the counter would have to reach 2^64 - 2.
    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes from a live local.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Takes one event (semaphore) or all; waits unless the descriptor is non-blocking, then gives `WouldBlock`.
    pub fn take(&self) -> io::Result<u64> {
        let mut v = 0u64;
        // SAFETY: reads eight bytes into a live local.
        let n = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut v).cast(), 8) };
        if n == 8 {
            Ok(v)
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
