//! A counting event descriptor that programs can poll.

use crate::{Error, Result};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// An eventfd. As a semaphore each read takes one event; otherwise a read takes all.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new descriptor, close-on-exec. A reader of a blocking one waits; the owner may set
    /// O_NONBLOCK later, as C programs do.
    pub fn new(semaphore: bool, nonblocking: bool) -> Result<EventFd> {
        let mut flags = libc::EFD_CLOEXEC;
        if semaphore {
            flags |= libc::EFD_SEMAPHORE;
        }
        if nonblocking {
            flags |= libc::EFD_NONBLOCK;
        }
        // SAFETY: eventfd takes no pointers; a non-negative result is a fresh descriptor that
        // nobody else owns.
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

    /// Takes one event (semaphore) or all; waits unless the descriptor is non-blocking, then gives
    /// `WouldBlock`.
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

    /// Takes back one event of a semaphore if there is one, without waiting, whatever the owner
    /// made of the descriptor.
    pub fn take_back(&self) -> bool {
        let mut v = 0u64;
        let iov = libc::iovec { iov_base: (&raw mut v).cast(), iov_len: 8 };
        // SAFETY: reads eight bytes into a live local; the offset -1 means a plain read.
        unsafe { libc::preadv2(self.0.as_raw_fd(), &iov, 1, -1, libc::RWF_NOWAIT) == 8 }
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

/// Another descriptor, close-on-exec, of what `fd` is open on.
pub fn duplicate(fd: RawFd) -> Result<OwnedFd> {
    // SAFETY: fcntl with integers; a non-negative result is a fresh descriptor that nobody else
    // owns.
    let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    match own < 0 {
        true => Err(Error::os("the descriptor cannot be kept open", &io::Error::last_os_error())),
        // SAFETY: as above.
        false => Ok(unsafe { OwnedFd::from_raw_fd(own) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_taken_back_without_waiting() {
        let fd = EventFd::new(true, false).unwrap();
        assert!(!fd.take_back(), "nothing is there, and nothing waits");
        fd.signal();
        fd.signal();
        assert!(fd.take_back());
        assert_eq!(fd.take().unwrap(), 1);
        assert!(!fd.take_back());
    }
}
