//! Going back: everything from the oldest packet that is not acknowledged is sent again.

use super::Requester;
use crate::encoding::psn_ahead;
use unbroken_types::WcStatus;

impl Requester {
    /// Sends again from `una` on.
    pub(super) fn go_back_for_loss(&mut self) {
        self.lost += psn_ahead(self.next_psn, self.una);
        self.window.lost(self.frontier);
        self.go_back();
    }

    pub(super) fn go_back(&mut self) {
        self.forget_repair();
        self.reads_in_flight = 0;
        self.resume_at_una();
    }

    /// Forgets what is known of losses, and what is measured of the flight.
    pub(super) fn forget_repair(&mut self) {
        self.repair = None;
        (self.mending, self.resend_last) = (false, false);
        (self.rtt_from, self.probe_at_us, self.armed) = (None, None, false);
    }

    pub(super) fn resume_at_una(&mut self) {
        self.next_psn = self.una;
        self.nothing_in_flight();
        self.cur = self.ring.head;
        self.cur_packet = match self.cur < self.assigned {
            true => psn_ahead(self.una, self.ring.get(self.cur).first_psn),
            false => 0,
        };
    }

    /// Looks at the timers.
    pub(crate) fn on_timeout(&mut self, now_us: u64) -> Result<(), WcStatus> {
        if self.rnr_until.is_some_and(|t| t <= now_us) {
            self.rnr_until = None;
            self.nothing_in_flight();
        }
        if self.probe_at_us.is_some() || self.repair.is_some() {
            self.repair_timeout(now_us);
        }
        if self.ack_deadline.is_some_and(|t| t <= now_us) {
            self.ack_deadline = None;
            self.take_retry()?;
            self.again_us = now_us;
            self.gap = None;
            if self.next_psn != self.una {
                self.lost += psn_ahead(self.next_psn, self.una);
                self.window.silent();
            }
            self.go_back();
            self.ack_deadline = self.timeout_us().map(|t| now_us + t);
        }
        Ok(())
    }
}
