//! Remote keys that are others for the peer, as `requester::peer_keys` has it.

use super::RcQp;
use crate::io::PeerKeys;
use std::sync::Arc;

impl RcQp {
    /// Has requests that begin from now on name the peer's memory by these keys, until RESET; none:
    /// by those that were posted.
    pub fn set_peer_keys(&mut self, keys: Option<Arc<dyn PeerKeys>>) {
        self.requester.set_peer_keys(keys);
    }
}
