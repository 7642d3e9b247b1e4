//! A connection that nobody waits for: what comes is kept until it is whole, what leaves is kept
//! until the network takes it.

use std::io::{ErrorKind, Read, Result, Write};
use std::net::TcpStream;

use rustix::event::{eventfd, EventfdFlags, PollFlags};
use std::os::fd::OwnedFd;

use crate::error::io;

/// Bytes that are read at one time.
const CHUNK: usize = 16384;

pub(crate) struct Conn {
    pub(crate) stream: TcpStream,
    /// What has come and was not taken.
    pub(crate) input: Vec<u8>,
    output: Vec<u8>,
    /// Of the output, what has left.
    left: usize,
}

impl Conn {
    pub(crate) fn new(stream: TcpStream) -> Result<Conn> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Conn { stream, input: Vec::new(), output: Vec::new(), left: 0 })
    }

    /// Reads what is there, as far as the input then has `most` bytes. `false`: the other end has
    /// said all that it will.
    pub(crate) fn read(&mut self, most: usize) -> Result<bool> {
        let mut buffer = [0; CHUNK];
        while self.input.len() < most {
            let room = CHUNK.min(most - self.input.len());
            match self.stream.read(&mut buffer[..room]) {
                Ok(0) => return Ok(false),
                Ok(n) => self.input.extend(&buffer[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    /// Takes so many bytes of the input, if they are there.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Vec<u8>> {
        (self.input.len() >= bytes).then(|| self.input.drain(..bytes).collect())
    }

    /// Where to append what is to leave.
    pub(crate) fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Bytes that have not left.
    pub(crate) fn unsent(&self) -> usize {
        self.output.len() - self.left
    }

    /// Sends what the network takes. Whether it took anything.
    pub(crate) fn flush(&mut self) -> Result<bool> {
        let before = self.left;
        while self.unsent() > 0 {
            match self.stream.write(&self.output[self.left..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => self.left += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let moved = self.left > before;
        if self.unsent() == 0 {
            self.output.clear();
            self.left = 0;
        } else if self.left > self.output.len() / 2 {
            self.output.drain(..self.left);
            self.left = 0;
        }
        Ok(moved)
    }

    /// What to wait for.
    pub(crate) fn interest(&self) -> PollFlags {
        if self.unsent() > 0 {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        }
    }
}

/// Wakes a thread that polls.
pub(crate) struct Waker(pub(crate) OwnedFd);

impl Waker {
    pub(crate) fn new() -> crate::error::Result<Waker> {
        let made = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        made.map(Waker).map_err(|e| io("an event for a thread out of band")(e.into()))
    }

    pub(crate) fn wake(&self) {
        // It is full: the thread is being woken.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        // Empty: nobody has woken it.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}
