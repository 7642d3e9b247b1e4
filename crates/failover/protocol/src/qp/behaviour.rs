//! What decides how a logical QP goes on, as a hash: two that have the same behave alike. For model
//! checkers, which visit each state once.

use super::{LogicalQp, State};
use crate::action::Reason;
use crate::slots::{Liveness, SLOTS};
use core::hash::{Hash, Hasher};

impl LogicalQp {
    /// Feeds `hasher` with all that decides what comes next, but for times, counters and what is
    /// only reported. So whoever takes two states for one by it must decide by itself when
    /// deadlines pass. `route`: which path the next control message takes counts, too.
    #[doc(hidden)]
    pub fn hash_behaviour(&self, route: bool, hasher: &mut impl Hasher) {
        core::mem::discriminant(&self.state).hash(hasher);
        matches!(self.state, State::Parked { until_us: Some(_) }).hash(hasher);
        (self.epoch, self.target, self.cancelled, self.refusal, self.peer_closed).hash(hasher);
        // What ends a switch clears what was tried in vain, also what will have been until then.
        (self.vain, self.chain.is_some()).hash(hasher);
        (self.executed, self.exact, self.completed).hash(hasher);
        (self.fresh, self.started, self.peer.connection).hash(hasher);
        let carries = matches!(self.state, State::Active | State::Fencing);
        // Set when a life has ended, for the Hello that follows.
        let between = matches!(
            self.state,
            State::Parked { .. } | State::Opening | State::Waiting | State::Checking
        );
        between.then_some(self.outstanding).hash(hasher);
        // Begun anew when the path is left, if paths settle at once.
        let chain = self.chain.as_ref().filter(|_| !carries || self.config.settle_us > 0);
        let stays = |reason| matches!(reason, Reason::Wedged(_) | Reason::Connect);
        chain.map(|c| (stays(c.reason), c.tries, c.planned && c.epochs == 0)).hash(hasher);
        self.hello().filter(|h| h.epoch >= self.epoch).hash(hasher);
        self.plan.map(|p| p.progress()).hash(hasher);
        self.policy().hash(hasher);
        let with =
            |b| (0..SLOTS as u8).fold(0u64, |bits, s| bits | u64::from(self.liveness(s) == b) << s);
        (with(Liveness::Alive), with(Liveness::NoNic)).hash(hasher);
        route.then_some(self.last_via).hash(hasher);
        self.actions.hash(hasher);
    }
}
