//! What is outstanding on a QP, in a form that another QP can take over.

use crate::wr::{SendWr, UdDest};
use unbroken_types::{SendFlags, SendOpcode, Sge};

/// An outstanding send.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SendEntry {
    /// The application's id.
    pub wr_id: u64,
    /// What to do.
    pub opcode: SendOpcode,
    /// How.
    pub flags: SendFlags,
    /// Immediate data as it goes on the wire.
    pub imm_data: u32,
    /// The peer's address.
    pub remote_addr: u64,
    /// The peer's key.
    pub rkey: u32,
    /// Atomics: the value to compare with, or to add.
    pub compare_add: u64,
    /// Atomics: the value to swap in.
    pub swap: u64,
    /// Where the data lies or goes; empty with inline data.
    pub sges: Vec<Sge>,
    /// Inline data.
    pub inline_data: Option<Vec<u8>>,
    /// Some packet of it may have left, in this life of the QP or an earlier one.
    pub started: bool,
    /// The peer has executed it: it completes in its turn, without the wire.
    pub executed: bool,
    /// UD: to whom.
    pub ud: Option<UdDest>,
}

impl From<&SendWr<'_>> for SendEntry {
    /// A WR that has not been started.
    fn from(wr: &SendWr<'_>) -> SendEntry {
        SendEntry {
            wr_id: wr.wr_id,
            opcode: wr.opcode,
            flags: wr.flags,
            imm_data: wr.imm_data,
            remote_addr: wr.remote_addr,
            rkey: wr.rkey,
            compare_add: wr.compare_add,
            swap: wr.swap,
            sges: if wr.inline_data.is_some() { Vec::new() } else { wr.sges.to_vec() },
            inline_data: wr.inline_data.map(<[u8]>::to_vec),
            started: false,
            executed: false,
            ud: wr.ud,
        }
    }
}

/// An outstanding receive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecvEntry {
    /// The application's id.
    pub wr_id: u64,
    /// Where the data goes.
    pub sges: Vec<Sge>,
}

/// What [`crate::RcQp::quiesce`] and [`crate::UdQp::quiesce`] take out of a QP, and their `adopt` puts into another.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Backlog {
    /// Outstanding sends, oldest first.
    pub sends: Vec<SendEntry>,
    /// Outstanding receives, oldest first; one that was partly filled is among them.
    pub recvs: Vec<RecvEntry>,
    /// Messages not awaiting data (SEND, WRITE) that the responder executed in this life.
    pub executed: u64,
    /// Sends not awaiting data that completed in this life.
    pub completed: u64,
    /// See [`crate::RcQp::changed_keys`].
    pub keys_changed: bool,
}

impl Backlog {
    /// Outstanding sends that await no data.
    pub fn messages(&self) -> u64 {
        self.sends.iter().filter(|s| !s.opcode.awaits_data()).count() as u64
    }

    /// Whether sending again what the peer has not executed would break a promise: an atomic, or a WR marked NO_REPLAY, may have left
    /// already, or keys were changed ([`crate::RcQp::changed_keys`]). The first `peer_done` sends that await no data have been executed.
    pub fn unsafe_to_replay(&self, peer_done: u64) -> bool {
        let mut left = peer_done;
        let breaks = |e: &SendEntry| {
            let done = !e.opcode.awaits_data() && left > 0;
            left -= u64::from(done);
            let once = e.opcode.is_atomic() || e.flags.contains(SendFlags::NO_REPLAY);
            !done && (e.opcode.changes_keys() || e.started && once)
        };
        self.keys_changed || self.sends.iter().any(breaks)
    }

    /// Marks the first `peer_done` sends that await no data as executed, and no others: they complete in their order, without the wire.
    pub fn mark_executed(&mut self, peer_done: u64) -> Replay {
        let mut replay = Replay::default();
        for e in &mut self.sends {
            e.executed = !e.opcode.awaits_data() && replay.marked < peer_done;
            replay.marked += u64::from(e.executed);
            replay.replayed += u32::from(!e.executed && e.started);
        }
        replay
    }
}

/// What [`Backlog::mark_executed`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Replay {
    /// Sends that the peer has executed and that complete without the wire. Fewer than the peer claims if fewer are outstanding.
    pub marked: u64,
    /// Sends that may have left before and will be sent again.
    pub replayed: u32,
}

/// How far a QP is. All counts are of this life of the QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// Sends posted and not complete.
    pub outstanding_sends: u32,
    /// Receives posted and not complete.
    pub outstanding_recvs: u32,
    /// Grows with every packet acknowledged and every READ response taken.
    pub advanced: u64,
    /// Messages not awaiting data that the responder has executed.
    pub executed: u64,
    /// Sends not awaiting data that have completed.
    pub completed: u64,
    /// Waiting because the peer had no receive: silence, but not a failure.
    pub waiting_rnr: bool,
    /// See [`crate::RcQp::changed_keys`].
    pub keys_changed: bool,
    /// When the first acknowledgement came or the first message of the peer was executed.
    pub first_moved_us: Option<u64>,
}
