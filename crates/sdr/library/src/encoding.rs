//! Parity that is made aside, without the lock of the engine that wants it.
//!
//! The engine hands a [`Job`] to the context's workers and goes on. The job holds the memory that
//! it reads and writes, so that stays registered. The engine sends the parity when it hears that it
//! is there, and does not end the write before: so nobody else writes into the parity meanwhile,
//! and nobody changes the data whose write has not ended. Where it is the SDK's own memory, its
//! lock is held, too ([`Memory::with`]).
//!
//! Every job is done once: where nobody takes it, by the engine, and where somebody drops it, by
//! its drop. What has been done is told under a lock of its own; then the worker is woken. With its
//! engine a job ends: what has not begun never does, and what has is waited for.

use crate::context::ChannelState;
use crate::lock;
use crate::memory::Memory;
use crate::worker::Workers;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use unbroken_erasure::{Code, Kernel};
use unbroken_sdr_protocol::reliable::{Area, Encoding};

/// Bytes of a buffer.
pub(crate) struct Part {
    memory: Memory,
    offset: u64,
    bytes: u64,
}

impl From<Area<'_, Memory>> for Part {
    fn from(area: Area<'_, Memory>) -> Part {
        Part { memory: area.buffer.clone(), offset: area.offset, bytes: area.bytes }
    }
}

/// Parity of a submessage that is to be made.
pub(crate) struct Job {
    pub(crate) code: Code,
    pub(crate) backend: Kernel,
    pub(crate) chunk_bytes: usize,
    pub(crate) data: Part,
    pub(crate) parity: Part,
}

impl Job {
    /// Makes it.
    pub(crate) fn encode(&self) {
        let Job { code, backend, chunk_bytes, data, parity } = self;
        let encoded = data.memory.with(data.offset, data.bytes, |data| {
            parity.memory.with_mut(parity.offset, parity.bytes, |parity| {
                code.encode_region(backend, data, parity, *chunk_bytes)
            })
        });
        debug_assert_eq!(encoded, Ok(()));
    }
}

/// A job, until it has been done or taken back. Locked while it is done.
type Slot = Arc<Mutex<Option<Job>>>;

/// What is encoded aside for an engine. A write has one job at a time, so there are no more than
/// writes.
pub(crate) struct Encoded {
    /// What has been done, and it has not heard of.
    messages: Mutex<VecDeque<u64>>,
    /// What has not been done, by its message.
    slots: Mutex<HashMap<u64, Slot>>,
    /// Whose worker hears of it.
    work: Arc<ChannelState>,
}

/// A job on its way.
struct Aside {
    slot: Slot,
    seq: u64,
    to: Arc<Encoded>,
}

impl Drop for Aside {
    fn drop(&mut self) {
        let mut slot = lock(&self.slot);
        if let Some(job) = slot.take() {
            job.encode();
            // What it holds is given back here, before the message may end.
        }
        drop(slot);
        lock(&self.to.slots).remove(&self.seq);
        lock(&self.to.messages).push_back(self.seq);
        self.to.work.kick.kick();
    }
}

impl Encoded {
    /// Nothing, for the worker of a channel.
    pub(crate) fn new(work: Arc<ChannelState>) -> Encoded {
        Encoded { messages: Mutex::default(), slots: Mutex::default(), work }
    }

    /// Has a job of a message done aside, or does it.
    pub(crate) fn have_done(
        self: &Arc<Encoded>,
        seq: u64,
        job: Job,
        workers: &dyn Workers,
    ) -> Encoding {
        let slot: Slot = Arc::new(Mutex::new(Some(job)));
        lock(&self.slots).insert(seq, slot.clone());
        let aside = Aside { slot, seq, to: self.clone() };
        let Err(job) = workers.aside(Box::new(move || drop(aside))) else {
            return Encoding::Aside;
        };
        job();
        lock(&self.messages).retain(|message| *message != seq);
        Encoding::Made
    }

    /// Takes all jobs back. One that is being done is waited for: that is short.
    pub(crate) fn take_back(&self) {
        let slots: Vec<Slot> = lock(&self.slots).drain().map(|(_, slot)| slot).collect();
        slots.iter().for_each(|slot| drop(lock(slot).take()));
    }

    /// A message whose parity is there; each once.
    pub(crate) fn next(&self) -> Option<u64> {
        lock(&self.messages).pop_front()
    }
}
