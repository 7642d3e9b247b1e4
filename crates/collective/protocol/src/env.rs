//! The environment of an engine. It executes requests and makes no decisions.

use std::sync::Arc;

use unbroken_schedule::{Slice, Work};

use crate::frame::{Header, HEADER_BYTES};
use crate::locate::{Place, Verdict};
use crate::message::Message;
use crate::picture::Picture;
use crate::run::Target;
use crate::Rank;

/// The location of a frame: a slot of a stream, at the sender or the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The other end.
    pub peer: Rank,
    /// The stream.
    pub stream: u8,
    /// The frame's number.
    pub seq: u64,
}

/// A part of a message, in the operation's buffers or set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// Where the message begins.
    pub target: Target,
    /// The lane, as the program numbers it.
    pub lane: u32,
    /// The message.
    pub message: u32,
    /// The offset of the part in the message.
    pub offset: u64,
    /// The length of the part in bytes.
    pub len: u64,
    /// The length of the whole message in bytes.
    pub total: u64,
}

/// The environment of an engine: memory, queue pairs, out-of-band connections.
pub trait Env {
    /// Writes a header, and `len` bytes of a slice from an offset on, into a send slot.
    fn stage(&mut self, slot: Slot, header: &Header, data: Option<(Slice, u64, u32)>);
    /// Reads the header of a received slot.
    fn header(&mut self, slot: Slot) -> [u8; HEADER_BYTES];
    /// Copies a part of a message out of a received slot.
    fn take(&mut self, slot: Slot, to: &Bytes);
    /// Copies a part of a message that was set aside to its destination.
    fn fetch(&mut self, to: &Bytes);
    /// Copies, reduces or divides.
    fn compute(&mut self, work: &Work);
    /// Sends the first bytes of a slot to the same slot of the peer, with the frame's notice.
    /// `false`: the path has failed.
    fn post(&mut self, slot: Slot, rail: u8, bytes: u32) -> bool;
    /// Sends only a notice. `false`: the path has failed.
    fn notify(&mut self, peer: Rank, rail: u8, notice: u32) -> bool;
    /// Reads bytes of a send slot.
    fn copy_out(&mut self, slot: Slot, at: u32, len: u32) -> Vec<u8>;
    /// Writes bytes into a receive slot.
    fn copy_in(&mut self, slot: Slot, at: u32, bytes: &[u8]);
    /// Creates this end of a path over a NIC of the rank, and returns the address for the other
    /// end. `None`: the NIC has failed. For the out-of-band path, creates the slots and returns an
    /// empty address; `None` if no NIC has a link.
    fn open(&mut self, peer: Rank, path: u8, nic: u8) -> Option<Vec<u8>>;
    /// Connects this end to the other. `false`: that failed.
    fn connect(&mut self, peer: Rank, rail: u8, address: &[u8]) -> bool;
    /// Sends a test over a connected path, without any effect at the peer. Its completion proves
    /// that the path works. `false`: the path has failed.
    fn test(&mut self, peer: Rank, rail: u8) -> bool;
    /// Destroys this end of a path. After it returns, no slot is written over the path any more.
    /// Notices that arrived earlier may still reach the engine.
    fn close(&mut self, peer: Rank, rail: u8);
    /// Whether this rank's NIC of a rail is alive and its port has a link, as far as the NIC knows.
    fn has_link(&mut self, rail: u8) -> bool;
    /// Creates one end of a probe, a separate queue pair, and returns the address for the other
    /// end. `None`: the NIC has failed.
    fn open_probe(&mut self, probe: ProbeId, rail: u8) -> Option<Vec<u8>>;
    /// Connects it. `false`: that failed.
    fn connect_probe(&mut self, probe: ProbeId, address: &[u8]) -> bool;
    /// Sends a zero-byte WRITE over it. The engine gets the result later. `false`: the NIC failed
    /// it immediately.
    fn send_probe(&mut self, probe: ProbeId) -> bool;
    /// Destroys it.
    fn close_probe(&mut self, probe: ProbeId);
    /// Sends a message out of band. If the rank cannot be reached, the engine is informed that the
    /// rank is lost.
    fn tell(&mut self, peer: Rank, message: &Message);
    /// Reports an event for the log.
    fn note(&mut self, note: &Note);
}

/// The ID of a probe: the prober and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProbeId {
    /// The rank that probes.
    pub prober: Rank,
    /// The number.
    pub number: u32,
}

/// An event of a path or a stream, for the log and for counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A path works.
    Up {
        /// To whom.
        peer: Rank,
        /// Over which rail.
        rail: u8,
        /// Which life.
        life: u32,
    },
    /// A path has failed.
    Down {
        /// To whom.
        peer: Rank,
        /// Over which rail.
        rail: u8,
        /// Which life.
        life: u32,
        /// Whether the other end reported it first.
        told: bool,
    },
    /// A stream continues on another path.
    Moved {
        /// To whom.
        peer: Rank,
        /// The stream.
        stream: u8,
        /// Over which rail.
        rail: u8,
        /// The number of frames that are sent again.
        again: u64,
    },
    /// A rank has located a failure.
    Located(Verdict),
    /// A NIC has recovered.
    Healed(Place),
    /// Operations are planned with another picture from this one on.
    Replanned {
        /// The first operation.
        from: u64,
        /// The picture.
        picture: Arc<Picture>,
    },
}
