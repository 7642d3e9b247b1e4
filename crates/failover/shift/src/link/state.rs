//! What a connected QP has for its peer. It is data, below the QP; what is done with it is in the
//! parent module, above.

use crate::peer::Peer;
use std::sync::Arc;
use unbroken_failover_protocol::{Asks, Executor, Message};

/// One end's link to its peer.
pub(crate) struct Link {
    pub(super) executor: Executor,
    pub(super) peer: Arc<Peer>,
    /// When the worker will look at this QP, as far as it has been told.
    pub(super) told_us: Option<u64>,
    /// The last message that waits until the worker has read the directory. One at most: who is not
    /// answered says it again.
    pub(super) unread: Option<(Message, Asks)>,
}

impl Link {
    /// The failover protocol of this QP.
    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
    }

    /// The process at the other end.
    pub(crate) fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }
}
