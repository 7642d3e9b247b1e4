//! How a requester ends: its entries fail, or move to another QP.

use super::Requester;
use crate::backlog::Backlog;
use crate::io::Completions;
use unbroken_types::WcStatus;

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
}
