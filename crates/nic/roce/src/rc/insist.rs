//! Going on with a QP over a path that loses much, as `requester::insist` has it.

use super::RcQp;
use unbroken_types::{QpState, WcStatus};

impl RcQp {
    /// Goes on where it is, at `now_us`, with all its retries: also where the network has stopped
    /// it because they were used up, in the same life, so that the peer knows what comes again.
    /// With `insists` it sends again soon and never gives up, until it is told to go on without.
    /// False: it was stopped for another reason, or sends nothing.
    pub fn go_on(&mut self, now_us: u64, insists: bool) -> bool {
        let may = matches!(self.state, QpState::Rts | QpState::Sqd)
            && !self.quiesced
            && matches!(self.failure, None | Some(WcStatus::RetryExcErr));
        if may {
            self.failure = None;
            self.requester.go_on(now_us, insists);
        }
        may
    }
}
