//! What a user holds of a message: its receive, or its send.

use crate::memory::Memory;
use crate::qp::Core;
use crate::{Error, Result};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use unbroken_sdr_protocol::packets::{Local, Piece};
use unbroken_sdr_protocol::sends::Status;

/// A receive that is posted. Dropping it completes it.
pub struct Recv {
    pub(crate) core: Arc<Core>,
    pub(crate) seq: u64,
    pub(crate) done: bool,
}

impl Recv {
    /// The number of its message.
    pub fn number(&self) -> u64 {
        self.seq
    }

    /// Chunks that it has, and how many are whole.
    pub fn progress(&self) -> (u32, u32) {
        self.core.board.progress(self.seq)
    }

    /// The chunk bitmap as it is now: bit *c* mod 8 of byte *c* / 8.
    pub fn bitmap(&self) -> Vec<u8> {
        let words = self
            .core
            .board
            .chunks(self.seq)
            .iter()
            .flat_map(|word| word.load(Relaxed).to_le_bytes());
        words.take(self.progress().0.div_ceil(8) as usize).collect()
    }

    /// Whether a chunk is whole.
    pub fn has(&self, chunk: u32) -> bool {
        self.core.board.has(self.seq, chunk)
    }

    /// The packets of a chunk that have come, 64 in each word.
    ///
    /// # Errors
    /// A chunk that there is not.
    pub fn expand(&self, chunk: u32) -> Result<Vec<u64>> {
        let mut words = vec![0; self.core.layout.chunk_packets.div_ceil(64) as usize];
        match self.core.board.expand(self.seq, chunk, &mut words) {
            true => Ok(words),
            false => Err(Error::wrong(format!(
                "chunk {chunk} of a receive that has {}",
                self.progress().0
            ))),
        }
    }

    /// The sender's immediate, once it is here.
    pub fn immediate(&self) -> Option<u32> {
        self.core.board.immediate(self.seq)
    }

    /// Ends the receive, whatever has come: the buffer is the user's again, and no late packet
    /// changes it.
    ///
    /// # Errors
    /// Where the NIC does not take the buffer from under the network: it must not be used again
    /// then.
    pub fn complete(mut self) -> Result<()> {
        self.done = true;
        self.core.recv_complete(self.seq)
    }
}

impl Drop for Recv {
    fn drop(&mut self) {
        if !self.done {
            // Where it fails the memory stays registered, and with it alive, as long as the queue
            // pair.
            let _ = self.core.recv_complete(self.seq);
        }
    }
}

/// A send that may not be finished. Its memory stays registered until it is, whoever drops this.
pub struct Send {
    pub(crate) core: Arc<Core>,
    pub(crate) seq: u64,
}

impl Send {
    /// The number of its message.
    pub fn number(&self) -> u64 {
        self.seq
    }

    /// Adds bytes of registered memory from a chunk of the receive on. `attempt`: how often they
    /// were sent before, for another channel.
    ///
    /// # Errors
    /// Bytes that are not inside, or go beyond the longest message; a send that has been ended.
    pub fn add(
        &self,
        memory: &Memory,
        offset: u64,
        bytes: u64,
        chunk: u32,
        attempt: u32,
    ) -> Result<()> {
        let local = Local { addr: memory.addr().saturating_add(offset), lkey: memory.lkey() };
        self.core.send_add(self.seq, memory, &Piece { chunk, bytes, local, attempt })
    }

    /// Nothing will be added.
    ///
    /// # Errors
    /// A send that has been finished.
    pub fn end(&self) -> Result<()> {
        self.core.send_end(self.seq)
    }

    /// Whether it is finished: its memory is the user's again. That anything has arrived is not
    /// said by this.
    ///
    /// # Errors
    /// It did not fit the receive, or no NIC is left.
    pub fn poll(&self) -> Result<bool> {
        match self.core.send_status(self.seq) {
            Status::Busy => Ok(false),
            Status::Finished => Ok(true),
            Status::Failed if self.core.all_dead() => {
                Err(Error::wrong("every channel of the queue pair has failed"))
            }
            Status::Failed => Err(Error::wrong("the message is longer than the peer's receive")),
        }
    }
}

impl Drop for Send {
    fn drop(&mut self) {
        self.core.send_forget(self.seq);
    }
}
