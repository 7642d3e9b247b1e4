//! Operations that were begun and are waited for later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use unbroken_comm::Failure;

use crate::error::{Error, Result};
use crate::state::{Idle, Shared, State};

/// How long a sleeper sleeps before it looks for itself.
const LOOKS: Duration = Duration::from_millis(100);

/// Memory that is given to an operation and comes back with it: bytes of elements, in the machine's order.
#[derive(Debug, PartialEq, Eq)]
pub enum Memory {
    /// Input and output apart; either may be empty where a rank has none.
    Apart {
        /// What the operation is given.
        input: Vec<u8>,
        /// What it gives.
        output: Vec<u8>,
    },
    /// One buffer, as [`unbroken_schedule::Operation`] says for each.
    InPlace(Vec<u8>),
}

impl Memory {
    /// The result.
    pub fn into_output(self) -> Vec<u8> {
        match self {
            Memory::Apart { output, .. } | Memory::InPlace(output) => output,
        }
    }
}

/// An operation under way. It goes on whether or not anybody waits, driven by who waits on its communicator, or else by the communicator's thread.
///
/// Dropped, it goes on, too: its memory is kept for as long as that takes.
#[must_use = "what came of it is known from `wait` alone"]
pub struct Request {
    shared: Arc<Shared>,
    channel: usize,
    ticket: u64,
    memory: Option<Memory>,
    /// It is over, as far as this one has looked.
    over: bool,
    /// Why it was not even begun.
    refused: Option<String>,
}

impl Request {
    pub(crate) fn new(shared: Arc<Shared>, channel: usize, ticket: u64, memory: Option<Memory>) -> Request {
        Request { shared, channel, ticket, memory, over: false, refused: None }
    }

    /// What came of it; `None`: it is under way. An operation that was done before the communicator broke is well.
    fn look(&mut self, state: &mut State) -> Option<Result<()>> {
        if let Some(why) = &self.refused {
            return Some(Err(Error::Refused(why.clone())));
        }
        let channel = &mut state.channels[self.channel];
        if !channel.is_over(self.ticket) {
            let failure = state.failure()?.clone();
            self.over = true;
            return Some(Err(failure.into()));
        }
        self.over = true;
        self.refused = channel.refusal(self.ticket);
        Some(self.refused.clone().map_or(Ok(()), |why| Err(Error::Refused(why))))
    }

    /// Drives the communicator once and looks. Gives what came of it if it is over, and whether there was anything to do.
    fn poll(&mut self) -> (Option<Result<()>>, bool) {
        let shared = self.shared.clone();
        let (mut state, busy) = shared.drive();
        (self.look(&mut state), busy)
    }

    fn memory(mut self) -> Memory {
        self.memory.take().unwrap_or(Memory::InPlace(Vec::new()))
    }

    /// Whether it is over; drives the communicator once.
    pub fn test(&mut self) -> Result<bool> {
        self.poll().0.map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    /// Waits until it is over, driving the communicator. Gives the memory back that was given to it.
    pub fn wait(mut self) -> Result<Memory> {
        Request::finish(vec![&mut self])?;
        Ok(self.memory())
    }

    /// Waits until all are over, driving their communicators in turn. Of several errors the first is given.
    pub fn wait_all(mut requests: Vec<Request>) -> Result<Vec<Memory>> {
        Request::finish(requests.iter_mut().collect())?;
        Ok(requests.into_iter().map(Request::memory).collect())
    }

    /// Sleeps until it is over, or for a time; the communicator's thread does the work meanwhile. Whether it is over.
    pub fn sleep(&mut self, most: Duration) -> Result<bool> {
        let (shared, began) = (self.shared.clone(), Instant::now());
        loop {
            let mut state = shared.lock();
            if let Some(outcome) = self.look(&mut state) {
                return outcome.map(|()| true);
            }
            let Some(left) = most.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) else { return Ok(false) };
            shared.sleep(state, left.min(LOOKS));
        }
    }

    /// Drives until all are over.
    pub(crate) fn finish(mut open: Vec<&mut Request>) -> Result<()> {
        let (mut first, mut idle) = (Ok(()), Idle::default());
        while !open.is_empty() {
            let mut any = false;
            open.retain_mut(|request| {
                let (outcome, busy) = request.poll();
                any |= busy;
                let Some(outcome) = outcome else { return true };
                if first.is_ok() {
                    first = outcome;
                }
                // Who has driven goes; what is left is the thread's to do.
                request.shared.rouse();
                false
            });
            idle.next(any);
        }
        first
    }

    /// Drives until it is over, with memory that is only lent: whatever happens, nothing touches it afterwards.
    pub(crate) fn finish_lent(self) -> Result<()> {
        let mut lent = Lent(self);
        Request::finish(vec![&mut lent.0])
    }
}

/// A request whose memory is lent for as long as this lives.
struct Lent(Request);

impl Drop for Lent {
    fn drop(&mut self) {
        // It is not over: a panic is under way. All that waits or runs is given up with the communicator.
        if !self.0.over {
            let mut state = self.0.shared.lock();
            let rank = state.me;
            state.break_off(Failure::Aborted { rank });
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.over {
            self.shared.lock().channels[self.channel].forget(self.ticket, self.memory.take());
        }
    }
}
