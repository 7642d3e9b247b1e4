//! What a QP has that seeks its peer. What is done with it is in `seek`, above.

use crate::worker_queue::QpAddr;
use unbroken_runtime::now_us;
use unbroken_types::WcStatus;
use unbroken_verbs::Backlog;

/// A QP seeks its peer.
pub(crate) struct Seeks {
    pub(super) addr: QpAddr,
    pub(super) since_us: u64,
    /// The log has that it is not protected.
    pub(super) told: bool,
    /// Nobody was there for so long that nobody is expected.
    pub(super) given_up: bool,
    /// It has failed meanwhile, then.
    pub(super) failed: Option<(WcStatus, u64)>,
    /// What the program has posted since its NIC was found dead; see [`super::held`].
    pub(super) held: Option<Backlog>,
}

impl Seeks {
    pub(super) fn new(addr: QpAddr, told: bool) -> Seeks {
        Seeks { addr, since_us: now_us(), told, given_up: false, failed: None, held: None }
    }

    /// Whether the peer may well be found.
    pub(crate) fn is_pending(&self) -> bool {
        !self.given_up
    }
}
