//! What an engine asks of its surroundings. Nothing in it decides.

use std::sync::Arc;

use unbroken_schedule::{Slice, Work};

use crate::frame::{Header, HEADER_BYTES};
use crate::locate::{Place, Verdict};
use crate::message::Message;
use crate::picture::Picture;
use crate::run::Target;
use crate::Rank;

/// A frame's place: a slot of a stream, at the sender's end or the receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The other end.
    pub peer: Rank,
    /// The stream.
    pub stream: u8,
    /// The frame's number.
    pub seq: u64,
}

/// A part of a message in the operation's buffers, or aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// Where the message begins.
    pub target: Target,
    /// The lane, as the program numbers it.
    pub lane: u32,
    /// The message.
    pub message: u32,
    /// The first byte of the message that is meant.
    pub offset: u64,
    /// How many.
    pub len: u64,
    /// Bytes of the whole message.
    pub total: u64,
}

/// The surroundings of an engine: memory, queue pairs, the connections out of band.
pub trait Env {
    /// Puts a header, and `len` bytes of a slice from an offset on, into a slot that is to be sent.
    fn stage(&mut self, slot: Slot, header: &Header, data: Option<(Slice, u64, u32)>);
    /// The header in a slot that came.
    fn header(&mut self, slot: Slot) -> [u8; HEADER_BYTES];
    /// Takes a part of a message out of a slot that came.
    fn take(&mut self, slot: Slot, to: &Bytes);
    /// Takes what lies aside of a message to where it is wanted now.
    fn fetch(&mut self, to: &Bytes);
    /// Copies, reduces, divides.
    fn compute(&mut self, work: &Work);
    /// Sends a slot's first bytes to the same slot of the peer, with the notice of its frame.
    /// `false`: the path has failed.
    fn post(&mut self, slot: Slot, rail: u8, bytes: u32) -> bool;
    /// Sends a notice alone. `false`: the path has failed.
    fn notify(&mut self, peer: Rank, rail: u8, notice: u32) -> bool;
    /// Reads bytes of a slot that is to be sent.
    fn copy_out(&mut self, slot: Slot, at: u32, len: u32) -> Vec<u8>;
    /// Writes bytes into a slot that receives.
    fn copy_in(&mut self, slot: Slot, at: u32, bytes: &[u8]);
    /// Makes this end of a path, over this NIC of the rank, and gives what the other end must know.
    /// `None`: the NIC cannot. Of the path out of band: makes the slots, and gives nothing; `None`
    /// if no NIC has a link.
    fn open(&mut self, peer: Rank, path: u8, nic: u8) -> Option<Vec<u8>>;
    /// Connects this end to the other. `false`: it cannot be.
    fn connect(&mut self, peer: Rank, rail: u8, address: &[u8]) -> bool;
    /// Sends over a connected path what changes nothing; its completion shows that the path
    /// carries. `false`: the path has failed.
    fn test(&mut self, peer: Rank, rail: u8) -> bool;
    /// Ends this end of a path: when it returns, nothing will come over it into a slot any more.
    /// Notices that had come may still be given to the engine.
    fn close(&mut self, peer: Rank, rail: u8);
    /// Whether this rank's NIC of a rail is alive and its port has a link, as far as the NIC knows.
    fn has_link(&mut self, rail: u8) -> bool;
    /// Makes an end of a probe, a queue pair of its own, and gives what the other end must know.
    /// `None`: the NIC cannot.
    fn open_probe(&mut self, probe: ProbeId, rail: u8) -> Option<Vec<u8>>;
    /// Connects it. `false`: it cannot be.
    fn connect_probe(&mut self, probe: ProbeId, address: &[u8]) -> bool;
    /// Writes no bytes over it; the engine is told what came of it. `false`: the NIC fails it at
    /// once.
    fn send_probe(&mut self, probe: ProbeId) -> bool;
    /// Ends it.
    fn close_probe(&mut self, probe: ProbeId);
    /// Sends a message out of band. Where a rank cannot be reached, the engine is told that it is
    /// lost.
    fn tell(&mut self, peer: Rank, message: &Message);
    /// Something that people want to know of.
    fn note(&mut self, note: &Note);
}

/// A probe: its prober's number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProbeId {
    /// Who probes.
    pub prober: Rank,
    /// The number.
    pub number: u32,
}

/// What becomes of paths and streams, for the log and for counting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A path carries.
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
        /// Whether the other end has said so first.
        told: bool,
    },
    /// A stream goes on elsewhere.
    Moved {
        /// To whom.
        peer: Rank,
        /// The stream.
        stream: u8,
        /// Over which rail.
        rail: u8,
        /// Frames that are sent again.
        again: u64,
    },
    /// A failure was located, by whichever rank.
    Located(Verdict),
    /// A NIC is well again.
    Healed(Place),
    /// Operations are planned with another picture of NICs from this one on.
    Replanned {
        /// The first operation.
        from: u64,
        /// The picture.
        picture: Arc<Picture>,
    },
}
