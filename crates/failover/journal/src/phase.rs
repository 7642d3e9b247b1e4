//! What a journal is at, and what of that keeps a post from going to the provider at once.

use crate::journal::Config;
use unbroken_types::WcStatus;

/// See [`crate::journal`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Live,
    Held {
        status: WcStatus,
        told: bool,
    },
    Ending {
        /// An error of the program did it, and not its own wish.
        by_error: bool,
    },
    Failed,
}

/// What keeps a post from going to the provider at once. Almost always nothing does: so a post asks
/// for all of it in one look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hindrances(u8);

impl Hindrances {
    /// The phase is another than LIVE.
    pub(crate) const PHASE: Hindrances = Hindrances(1);
    /// The QP is being stopped, or was.
    pub(crate) const STOPPING: Hindrances = Hindrances(2);
    /// The provider does not take sends yet.
    pub(crate) const NO_SENDS: Hindrances = Hindrances(4);
    /// The provider does not take receives yet.
    pub(crate) const NO_RECVS: Hindrances = Hindrances(8);
    /// All sends make a WC of the provider's.
    pub(crate) const ANNOUNCES: Hindrances = Hindrances(16);
    /// Receives are not the journal's.
    const SHARED: Hindrances = Hindrances(32);
    pub(crate) const OF_SENDS: Hindrances = Hindrances::PHASE
        .and(Hindrances::STOPPING)
        .and(Hindrances::NO_SENDS)
        .and(Hindrances::ANNOUNCES);
    pub(crate) const OF_RECVS: Hindrances = Hindrances::PHASE
        .and(Hindrances::STOPPING)
        .and(Hindrances::NO_RECVS)
        .and(Hindrances::SHARED);

    /// Those of a QP in RESET.
    pub(crate) fn of(config: &Config) -> Hindrances {
        let mut these = Hindrances::NO_SENDS.and(Hindrances::NO_RECVS);
        these.set(Hindrances::SHARED, config.shared_receives);
        these
    }

    const fn and(self, others: Hindrances) -> Hindrances {
        Hindrances(self.0 | others.0)
    }

    #[inline(always)]
    pub(crate) const fn any(self, of: Hindrances) -> bool {
        self.0 & of.0 != 0
    }

    #[inline]
    pub(crate) fn set(&mut self, these: Hindrances, there: bool) {
        self.0 = if there { self.0 | these.0 } else { self.0 & !these.0 };
    }
}
