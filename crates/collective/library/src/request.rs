//! Operations that were begun and are waited for later.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use unbroken_collective_protocol::{Failure, Rank};

use crate::anysource::Found;
use crate::channel::Undone;
use crate::completions::{Completions, Watch};
use crate::error::{Error, Result};
use crate::state::{Idle, Shared, State};

/// How long a sleeper sleeps before it looks for itself.
const LOOKS: Duration = Duration::from_millis(100);

/// Memory that is given to an operation and comes back with it: bytes of elements, in the machine's
/// order.
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

/// What came of an operation.
#[derive(Clone)]
enum Outcome {
    Done,
    /// It was not even begun, or given up by this rank.
    Refused(String),
    /// The communicator broke before it was done, or the other rank of a transfer has left.
    Broken(Failure),
}

impl Outcome {
    fn result(&self) -> Result<()> {
        match self {
            Outcome::Done => Ok(()),
            Outcome::Refused(why) => Err(Error::Refused(why.clone())),
            Outcome::Broken(failure) => Err(failure.clone().into()),
        }
    }
}

/// Where an operation waits.
#[derive(Clone, Copy)]
enum Place {
    Channel {
        channel: usize,
        ticket: u64,
    },
    /// A receive from any rank, by its number.
    Any(u64),
}

/// An operation under way. It goes on whether or not anybody waits, driven by who waits on its
/// communicator, or else by the communicator's thread.
///
/// Any number of threads may look at one, and wait for it: who waits holds nothing that others need
/// in order to begin, look or wait. Dropped, the operation goes on, too: its memory is kept for as
/// long as that takes.
#[must_use = "what came of it is known from `wait` alone"]
pub struct Request {
    shared: Arc<Shared>,
    place: Place,
    memory: Option<Memory>,
    /// Whose it was, of a receive from any rank that is over.
    source: OnceLock<Rank>,
    /// Set once, by the first who finds that it is over.
    outcome: OnceLock<Outcome>,
}

impl Request {
    pub(crate) fn new(
        shared: Arc<Shared>,
        channel: usize,
        ticket: u64,
        memory: Option<Memory>,
    ) -> Request {
        Request::at(shared, Place::Channel { channel, ticket }, memory)
    }

    /// A receive from any rank.
    pub(crate) fn of_any(shared: Arc<Shared>, number: u64, memory: Option<Memory>) -> Request {
        Request::at(shared, Place::Any(number), memory)
    }

    fn at(shared: Arc<Shared>, place: Place, memory: Option<Memory>) -> Request {
        Request { shared, place, memory, source: OnceLock::new(), outcome: OnceLock::new() }
    }

    /// What came of it; `None`: it is under way. An operation that was done before the communicator
    /// broke is well.
    fn look(&self, state: &mut State) -> Option<Result<()>> {
        if self.outcome.get().is_none() {
            let outcome = self.outcome(state)?;
            if let Place::Any(number) = self.place {
                state.any.forget(number);
            }
            // The state is locked: nobody else is here.
            let _ = self.outcome.set(outcome);
        }
        self.outcome.get().map(Outcome::result)
    }

    fn outcome(&self, state: &mut State) -> Option<Outcome> {
        let place = match self.place {
            Place::Channel { channel, ticket } => Some((channel, ticket)),
            Place::Any(number) => match state.any.find(number) {
                Found::Waits => None,
                Found::Ended(why) => return Some(Outcome::Refused(why)),
                Found::Bound { channel, ticket, from } => {
                    let _ = self.source.set(from);
                    Some((channel, ticket))
                }
            },
        };
        match place {
            Some((channel, ticket)) if state.channels[channel].is_over(ticket) => {
                Some(match state.channels[channel].why_undone(ticket) {
                    None => Outcome::Done,
                    Some(Undone::Refused(why)) => Outcome::Refused(why),
                    Some(Undone::Left(failure)) => Outcome::Broken(failure),
                })
            }
            _ => Some(Outcome::Broken(state.failure()?.clone())),
        }
    }

    /// The rank that has sent what a receive from any rank got
    /// ([`crate::Communicator::begin_recv_any`]), once it is over.
    pub fn source(&self) -> Option<Rank> {
        self.outcome.get().and(self.source.get()).copied()
    }

    /// Drives the communicator once and looks. Gives what came of it if it is over, and whether
    /// there was anything to do.
    fn poll(&self) -> (Option<Result<()>>, bool) {
        if let Some(outcome) = self.outcome.get() {
            return (Some(outcome.result()), true);
        }
        let (mut state, busy) = self.shared.drive();
        (self.look(&mut state), busy)
    }

    fn memory(mut self) -> Memory {
        self.memory.take().unwrap_or(Memory::InPlace(Vec::new()))
    }

    /// Whether it is over; drives the communicator once.
    pub fn test(&self) -> Result<bool> {
        self.poll().0.map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    /// Waits until it is over, driving the communicator. Gives the memory back that was given to
    /// it.
    pub fn wait(self) -> Result<Memory> {
        Request::finish(vec![&self])?;
        Ok(self.memory())
    }

    /// Waits until all are over, driving their communicators in turn. Of several errors the first
    /// is given.
    pub fn wait_all(requests: Vec<Request>) -> Result<Vec<Memory>> {
        Request::finish(requests.iter().collect())?;
        Ok(requests.into_iter().map(Request::memory).collect())
    }

    /// Drives the communicator until it is over, or for `most`. Whether it is over; what came of it
    /// is for [`Request::wait`] or [`Request::test`] to say.
    pub fn drive(&self, most: Duration) -> bool {
        let (began, mut idle) = (Instant::now(), Idle::default());
        loop {
            let (outcome, busy) = self.poll();
            if outcome.is_some() || began.elapsed() >= most {
                // Who has driven goes; what is left is the thread's to do.
                self.shared.rouse();
                return outcome.is_some();
            }
            idle.next(busy);
        }
    }

    /// Sleeps until it is over, or for a time; the communicator's thread does the work meanwhile.
    /// Whether it is over.
    pub fn sleep(&self, most: Duration) -> Result<bool> {
        let began = Instant::now();
        loop {
            let mut state = self.shared.lock();
            if let Some(outcome) = self.look(&mut state) {
                return outcome.map(|()| true);
            }
            let Some(left) = most.checked_sub(began.elapsed()).filter(|left| !left.is_zero())
            else {
                return Ok(false);
            };
            self.shared.sleep(state, left.min(LOOKS));
        }
    }

    /// Puts `tag` into a queue once it is over, whatever comes of it: now, if it is over already.
    /// To be asked for once.
    pub fn notify(&self, queue: &Arc<Completions>, tag: u64) {
        let mut state = self.shared.lock();
        match self.look(&mut state) {
            Some(_) => queue.push(tag),
            None => {
                let watch = Watch::new(queue.clone(), tag);
                match (self.place, self.bound(&state)) {
                    (_, Some((channel, ticket))) => state.channels[channel].watch(ticket, watch),
                    (Place::Any(number), None) => state.any.watch(number, watch),
                    (Place::Channel { .. }, None) => {}
                }
            }
        }
    }

    /// The channel and the ticket, if it has them.
    fn bound(&self, state: &State) -> Option<(usize, u64)> {
        match self.place {
            Place::Channel { channel, ticket } => Some((channel, ticket)),
            Place::Any(number) => match state.any.find(number) {
                Found::Bound { channel, ticket, .. } => Some((channel, ticket)),
                Found::Waits | Found::Ended(_) => None,
            },
        }
    }

    /// Drives until all are over.
    pub(crate) fn finish(mut open: Vec<&Request>) -> Result<()> {
        let (mut first, mut idle) = (Ok(()), Idle::default());
        while !open.is_empty() {
            let mut any = false;
            open.retain(|request| {
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

    /// Drives until it is over, with memory that is only lent: whatever happens, nothing touches it
    /// afterwards.
    pub(crate) fn finish_lent(self) -> Result<()> {
        let lent = Lent(self);
        Request::finish(vec![&lent.0])
    }
}

/// A request whose memory is lent for as long as this lives.
struct Lent(Request);

impl Drop for Lent {
    fn drop(&mut self) {
        // It is not over: a panic is under way. All that waits or runs is given up with the
        // communicator.
        if self.0.outcome.get().is_none() {
            let mut state = self.0.shared.lock();
            let rank = state.me;
            state.break_off(Failure::Aborted { rank });
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.outcome.get().is_none() {
            let mut state = self.shared.lock();
            let memory = self.memory.take();
            if let Some((channel, ticket)) = self.bound(&state) {
                state.channels[channel].forget(ticket, memory);
            }
            // One that waits for any rank has begun nothing: nothing comes into its memory any
            // more.
            if let Place::Any(number) = self.place {
                state.any.forget(number);
            }
        }
    }
}
