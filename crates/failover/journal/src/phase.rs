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
pub(crate) struct Blockers(u8);

impl Blockers {
    /// The phase is another than LIVE.
    pub(crate) const PHASE: Blockers = Blockers(1);
    /// The QP is being stopped, or was.
    pub(crate) const STOPPING: Blockers = Blockers(2);
    /// The provider does not take sends yet.
    pub(crate) const NO_SENDS: Blockers = Blockers(4);
    /// The provider does not take receives yet.
    pub(crate) const NO_RECVS: Blockers = Blockers(8);
    /// All sends make a WC of the provider's.
    pub(crate) const ANNOUNCES: Blockers = Blockers(16);
    /// Receives are not the journal's.
    const SHARED: Blockers = Blockers(32);
    pub(crate) const OF_SENDS: Blockers =
        Blockers::PHASE.and(Blockers::STOPPING).and(Blockers::NO_SENDS).and(Blockers::ANNOUNCES);
    /// What makes of a success something else than a completion of the application's.
    pub(crate) const OF_COMPLETIONS: Blockers = Blockers::PHASE.and(Blockers::STOPPING);
    pub(crate) const OF_RECVS: Blockers =
        Blockers::PHASE.and(Blockers::STOPPING).and(Blockers::NO_RECVS).and(Blockers::SHARED);

    /// Those of a QP in RESET.
    pub(crate) fn of(config: &Config) -> Blockers {
        let mut these = Blockers::NO_SENDS.and(Blockers::NO_RECVS);
        these.set(Blockers::SHARED, config.shared_receives);
        these
    }

    const fn and(self, others: Blockers) -> Blockers {
        Blockers(self.0 | others.0)
    }

    #[inline(always)]
    pub(crate) const fn any(self, of: Blockers) -> bool {
        self.0 & of.0 != 0
    }

    #[inline]
    pub(crate) fn set(&mut self, these: Blockers, there: bool) {
        self.0 = if there { self.0 | these.0 } else { self.0 & !these.0 };
    }
}
