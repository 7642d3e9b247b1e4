//! Event channels: what a program has open in place of `/dev/infiniband/rdma_cm`.
//!
//! The program's descriptor is one end of a pair of sockets. Its other end is ours: a byte that lies
//! in the program's end makes it readable while events wait, for `poll`, `select` and `epoll` alike.
//! When the last copy of the program's end is closed, in whatever way, ours is told so. And the
//! program's end has a name of its own, so a copy of it is known by that, in a forked child, too.

use crate::abi::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketAddrUnix};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the names of programs' ends begin with, behind the byte 0 of abstract names.
const NAME: &[u8] = b"unbroken/rdma_cm/";
/// A process's number and a channel's, in hexadecimal digits.
const NUMBER_DIGITS: usize = 32;
/// Events that wait in a channel.
const MAX_EVENTS: usize = 65_536;

/// An event as the program is told it.
#[derive(Clone, Debug)]
pub(crate) struct Queued {
    /// The id that it is of.
    pub(crate) id: u32,
    /// Of a request: the id that listens.
    pub(crate) listener: Option<u32>,
    /// `struct rdma_ucm_event_resp`.
    pub(crate) bytes: Vec<u8>,
}

/// A channel. What is in it is under the lock of the process's state.
pub(crate) struct Channel {
    ours: UnixStream,
    /// The program's end cannot be kept open here: its last copy would never be closed. So events
    /// are put into it from our end, and taken out by a descriptor of the program's.
    pub(crate) events: VecDeque<Queued>,
}

/// The number of this process, drawn once: names of channels begin with it.
fn process_number() -> io::Result<u64> {
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    static OWNER: AtomicU64 = AtomicU64::new(0);
    let pid = u64::from(std::process::id());
    // A forked child draws its own: its parent's channels are not its own.
    if OWNER.load(Ordering::Acquire) != pid {
        let mut bytes = [0; 8];
        unbroken_runtime::fill_random(&mut bytes)?;
        DRAWN.store(u64::from_ne_bytes(bytes) | 1, Ordering::Release);
        OWNER.store(pid, Ordering::Release);
    }
    Ok(DRAWN.load(Ordering::Acquire))
}

/// Whose channel a descriptor is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Identity {
    /// This process's, of that number.
    Own(u64),
    /// Another process's: this one was forked from it.
    Inherited,
}

/// What a descriptor is, if it is a channel.
pub(crate) fn identify(fd: BorrowedFd<'_>) -> Option<Identity> {
    let address = rustix::net::getsockname(fd).ok()?;
    let address = SocketAddrUnix::try_from(address).ok()?;
    let digits = address.abstract_name()?.strip_prefix(NAME)?;
    let digits = std::str::from_utf8(digits).ok().filter(|text| text.len() == NUMBER_DIGITS)?;
    let (process, number) = digits.split_at(NUMBER_DIGITS / 2);
    let number = u64::from_str_radix(number, 16).ok()?;
    let own = process_number().is_ok_and(|own| process == format!("{own:016x}"));
    Some(if own { Identity::Own(number) } else { Identity::Inherited })
}

impl Channel {
    /// Makes a channel; gives the program's end, too.
    pub(crate) fn new(number: u64) -> io::Result<(Channel, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let name = [NAME, format!("{:016x}{number:016x}", process_number()?).as_bytes()].concat();
        rustix::net::bind(&theirs, &SocketAddrUnix::new_abstract_name(&name)?)?;
        Ok((Channel { ours, events: VecDeque::new() }, theirs.into()))
    }

    /// Our end.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.ours.as_fd()
    }

    /// Adds an event. False: the channel is full, so nobody looks at it.
    pub(crate) fn push(&mut self, event: Queued) -> bool {
        if self.events.len() >= MAX_EVENTS {
            return false;
        }
        self.events.push_back(event);
        // Where the socket has no room for one more byte it is readable already.
        let _ = rustix::net::send(&self.ours, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        true
    }

    /// Takes the next event. `theirs` is a descriptor of the program's end.
    pub(crate) fn pop(&mut self, theirs: BorrowedFd<'_>) -> Option<Queued> {
        let event = self.events.pop_front();
        self.settle(Some(theirs));
        event
    }

    /// Events were taken out: nobody is to be woken for nothing. Without a descriptor of the
    /// program's, that is left to its next call.
    pub(crate) fn settle(&self, theirs: Option<BorrowedFd<'_>>) {
        let Some(theirs) = theirs.filter(|_| self.events.is_empty()) else { return };
        let mut bytes = [0u8; 512];
        // Bounded: nothing is sent meanwhile.
        while matches!(
            rustix::net::recv(theirs, &mut bytes, RecvFlags::DONTWAIT),
            Ok((_, n)) if n == bytes.len()
        ) {}
    }
}

/// The error number of an I/O error.
pub(crate) fn errno(e: &io::Error) -> Errno {
    e.raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec};

    fn readable(fd: BorrowedFd<'_>) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    fn event() -> Queued {
        Queued { id: 1, listener: None, bytes: Vec::new() }
    }

    #[test]
    fn a_channel_is_readable_while_events_wait() {
        let (mut channel, theirs) = Channel::new(5).unwrap();
        assert!(!readable(theirs.as_fd()));
        for _ in 0..2000 {
            assert!(channel.push(event()));
        }
        for _ in 0..2000 {
            assert!(readable(theirs.as_fd()));
            assert!(channel.pop(theirs.as_fd()).is_some());
        }
        assert!(!readable(theirs.as_fd()) && channel.pop(theirs.as_fd()).is_none());
    }

    #[test]
    fn a_copy_of_the_programs_end_is_known() {
        let (channel, theirs) = Channel::new(7).unwrap();
        let copy = theirs.try_clone().unwrap();
        assert_eq!(identify(copy.as_fd()), Some(Identity::Own(7)));
        assert_eq!(identify(channel.fd()), None);
        assert_eq!(identify(io::stdin().as_fd()), None);
        drop(theirs);
        assert!(!readable(channel.fd()));
        drop(copy);
        assert!(readable(channel.fd()), "told of the end");
    }
}
