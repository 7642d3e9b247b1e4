//! How a requester ends: its entries fail, or move to another QP.

use super::Requester;
use crate::window::Window;
use unbroken_types::{Backlog, Completions, WcStatus};

impl Requester {
    /// Completes the oldest with `status` and all others as flushed.
    pub(crate) fn flush(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        self.ring.flush(status, out);
        self.clear();
    }

    /// The path has changed, at `now_us` if that is known. What was on its way may have been lost
    /// with the old one: all of it is sent again if it is known to be `lost`, or if the peer has
    /// been asked for it in vain; else the peer is asked soon.
    pub(crate) fn path_changed(&mut self, now_us: Option<u64>, lost: bool) {
        let lost = lost || self.asks_in_vain();
        self.restart_retries();
        (self.probes, self.gap) = (0, None);
        if lost {
            self.ack_deadline = None;
            self.window = Window::new(self.cwnd_max);
            self.go_back();
        } else if let Some(now_us) =
            now_us.filter(|_| self.una != self.frontier && self.rnr_until.is_none())
        {
            self.rtt_from = None;
            self.probe_at_us = self.next_probe(now_us);
            self.ack_deadline = self.timeout_us().map(|t| now_us + t);
        }
    }

    /// Stops the timers; nothing more is sent or taken.
    pub(crate) fn hold(&mut self) {
        self.ack_deadline = None;
        (self.rnr_until, self.not_ready) = (None, false);
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
