//! See [`LogicalQp::hash_behaviour`](crate::LogicalQp::hash_behaviour).

use super::Executor;
use core::hash::{Hash, Hasher};

impl Executor {
    /// As [`LogicalQp::hash_behaviour`](crate::LogicalQp::hash_behaviour), with the work that is
    /// held. A send is told by its `wr_id`. What only [`Self::home`], [`Self::ready`] and
    /// [`Self::look`] speak of is left out.
    #[doc(hidden)]
    pub fn hash_behaviour(&self, route: bool, hasher: &mut impl Hasher) {
        self.lqp.hash_behaviour(route, hasher);
        self.gave_up.map(|status| status as u32).hash(hasher);
        (self.fence.is_some(), self.stopping.is_some(), self.sq_psn).hash(hasher);
        self.held.is_some().hash(hasher);
        if let Some(held) = &self.held {
            (held.recvs, held.work.keys_changed, held.work.sends.len(), held.work.recvs.len())
                .hash(hasher);
            held.work.sends.iter().for_each(|s| (s.wr_id, s.started, s.executed).hash(hasher));
            held.work.recvs.iter().for_each(|r| r.wr_id.hash(hasher));
        }
    }
}
