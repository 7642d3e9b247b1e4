//! Going on over a path that loses much: a requester that has given up begins its retries anew, and
//! one that *insists* sends again soon and without end.
//!
//! Whoever moves a QP away from such a path waits until its sends are complete ([`crate::RcQp`] is
//! stopped with nothing outstanding then, so that nothing need be replayed). With the usual rules
//! that may take for ever: each wait is twice as long as the last, the window is that of a network
//! without room, and in the end the retries are used up. While it insists
//! - no retry is counted, so that it never gives up: whoever set it has a deadline;
//! - it waits as long as a round trip may take, however often that was in vain;
//! - the window is that of a QP that begins, and there is room for it; no loss is told to others.
//!
//! What was sent keeps its PSNs. So the responder knows repeated requests, and an atomic runs once.

use super::Requester;
use unbroken_types::WcStatus;

/// While it insists, no answer is waited for longer than this, or what was measured.
const INSIST_US: u64 = 8_000;
/// The room that there is for it at least, in the units of [`crate::Room`]: a window of the largest
/// packets.
const INSIST_ROOM: u32 = 32 * 4096;

impl Requester {
    /// Goes on where it is, at `now_us`, with all retries.
    pub(crate) fn go_on(&mut self, now_us: u64, insists: bool) {
        self.insists = insists;
        self.window.insist(insists);
        self.restart_retries();
        (self.probes, self.doubt, self.gap) = (0, 0, None);
        if self.una == self.frontier || self.rnr_until.is_some() {
            return;
        }
        if self.ack_deadline.is_none() {
            // It had stopped: what was on its way is lost.
            self.go_back();
        }
        self.ack_deadline = self.timeout_us().map(|t| now_us + t);
        self.probe_at_us = self.next_probe(now_us);
    }

    pub(crate) fn insists(&self) -> bool {
        self.insists
    }

    /// The time for an answer has passed.
    pub(super) fn take_retry(&mut self) -> Result<(), WcStatus> {
        if self.insists {
            return Ok(());
        }
        self.retries_left = self.retries_left.checked_sub(1).ok_or(WcStatus::RetryExcErr)?;
        Ok(())
    }

    /// The room that it has, where the destination gives it so much.
    pub(super) fn insist_room(&self, room: u32) -> u32 {
        match self.insists {
            true => room.max(INSIST_ROOM.saturating_sub(self.flight)),
            false => room,
        }
    }

    /// After how much silence to ask while it insists.
    pub(super) fn insist_probe_us(&self, least_us: u64) -> u64 {
        self.wait_us(0).clamp(least_us, INSIST_US)
    }

    /// How long to wait for an answer while it insists.
    pub(super) fn insist_us(&self, usual_us: u64) -> u64 {
        usual_us.min(self.wait_us(0).max(INSIST_US))
    }
}
