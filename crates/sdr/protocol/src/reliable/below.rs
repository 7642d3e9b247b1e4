//! What is asked of a queue pair by the writes and reads over it.

use crate::control::Control;
use crate::packets::Piece;
use std::sync::atomic::AtomicU64;
use unbroken_erasure::{ChunkSet, Code};

/// Why something below was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Not now.
    Later,
    /// Never.
    Never(String),
}

/// A part of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Area<'a, B> {
    /// The buffer.
    pub buffer: &'a B,
    /// Where it begins.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// What has become of parity that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// It is there.
    Made,
    /// It is being made.
    Aside,
}

/// A queue pair.
pub trait Sdr {
    /// What data lies in.
    type Buffer: Clone;
    /// Posts a receive, and gives its message.
    ///
    /// # Errors
    /// [`Refused`].
    fn recv_post(&mut self, now_us: u64, area: Area<'_, Self::Buffer>) -> Result<u64, Refused>;
    /// Ends a receive: nothing from the network touches its buffer any more, and its bitmap stands
    /// still.
    ///
    /// # Errors
    /// [`Refused`]: the buffer is not safe.
    fn recv_complete(&mut self, now_us: u64, seq: u64) -> Result<(), Refused>;
    /// The chunk bitmap of a receive.
    fn bitmap(&self, seq: u64) -> &[AtomicU64];
    /// Begins a send, and gives its message.
    ///
    /// # Errors
    /// [`Refused`].
    fn send_start(&mut self) -> Result<u64, Refused>;
    /// Whether its receive is posted.
    fn is_clear(&self, seq: u64) -> bool;
    /// Whether chunks are taken at all now: not too many wait.
    fn has_room(&self) -> bool;
    /// Sends a chunk, the piece's bytes of the area.
    fn send(&mut self, seq: u64, area: Area<'_, Self::Buffer>, piece: &Piece) -> bool;
    /// Nothing more of a send is wanted.
    fn send_stop(&mut self, seq: u64);
    /// Whether nothing of it is outstanding. It is forgotten then.
    fn send_idle(&mut self, seq: u64) -> bool;
    /// Says something to the peer.
    fn say(&mut self, message: &Control);
    /// Memory for parity, if there is any left.
    fn scratch(&mut self, bytes: u64) -> Option<Self::Buffer>;
    /// Whether parity is made aside, while chunks are sent. Then it is asked for before the data of
    /// its submessage goes, else after it.
    fn encodes_aside(&self) -> bool;
    /// Makes the parity of a submessage of the write whose data is message `seq`; of a write one at
    /// a time. Aside, both areas are in use until [`Sdr::encoded`] gives the message.
    fn encode(
        &mut self,
        seq: u64,
        code: Code,
        data: Area<'_, Self::Buffer>,
        parity: Area<'_, Self::Buffer>,
    ) -> Encoding;
    /// A message for which parity has been made aside; each once.
    fn encoded(&mut self) -> Option<u64>;
    /// Brings lost data chunks back, in place. False: that is not possible.
    fn recover(
        &mut self,
        code: Code,
        data: Area<'_, Self::Buffer>,
        parity: Area<'_, Self::Buffer>,
        lost: &ChunkSet,
    ) -> bool;
}
