//! How a requester ends: its entries fail, or move to another QP.

use super::Requester;
use crate::backlog::{Backlog, Replay};
use crate::io::Completions;
use unbroken_types::{SendFlags, WcStatus};

impl Requester {
    /// Completes the oldest with `status` and all others as flushed.
    pub(crate) fn flush(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        self.ring.flush(status, out);
        self.clear();
    }

    /// Stops the timers; nothing more is sent or taken.
    pub(crate) fn hold(&mut self) {
        self.ack_deadline = None;
        self.rnr_until = None;
        self.forget_repair();
    }

    /// Empties the queue.
    pub(super) fn clear(&mut self) {
        self.ring.clear();
        self.cur = self.ring.tail;
        self.cur_packet = 0;
        self.assigned = self.ring.tail;
        self.last_read = 0;
        self.reads_in_flight = 0;
        self.gap = None;
        self.unsendable = None;
        self.start(self.frontier);
        self.hold();
    }

    /// Takes the outstanding entries out.
    pub(crate) fn quiesce(&mut self, backlog: &mut Backlog) {
        backlog.sends = self.ring.entries();
        backlog.completed = self.completed;
        self.clear();
    }

    /// Outstanding entries, each with whether it is among the first `peer_done` that await no data.
    fn with_fate(&self, peer_done: u64) -> impl Iterator<Item = (u64, bool)> + '_ {
        let mut counted = 0;
        (self.ring.head..self.ring.tail).map(move |index| {
            let counts = !self.ring.get(index).opcode.awaits_data();
            let done = counts && counted < peer_done;
            counted += counts as u64;
            (index, done)
        })
    }

    pub(crate) fn unsafe_to_replay(&self, peer_done: u64) -> bool {
        self.with_fate(peer_done).any(|(index, done)| {
            let wqe = self.ring.get(index);
            let once = wqe.opcode.is_atomic() || wqe.flags.contains(SendFlags::NO_REPLAY);
            !done && (wqe.opcode.changes_keys() || wqe.started && once)
        })
    }

    pub(crate) fn mark_executed(&mut self, peer_done: u64) -> Replay {
        let mut replay = Replay::default();
        let fates: Vec<(u64, bool)> = self.with_fate(peer_done).collect();
        for (index, done) in fates {
            let wqe = self.ring.get_mut(index);
            wqe.executed = done;
            replay.marked += done as u64;
            replay.replayed += (!done && wqe.started) as u32;
        }
        replay
    }
}
