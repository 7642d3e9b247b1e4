//! A QP whose transport has given up while its path lives is given a fresh life there. Where nothing
//! has moved in a life that the transport gave up, too, the next one waits, each time twice as long
//! as before, and goes to another path; after [`MAX_IN_VAIN`] of them the program has its error.
//!
//! ```text
//! gave up, path lives ── something moved in this life ──────> fresh life, at once
//!    └── nothing moved ── wait, doubled ── fresh life elsewhere
//!                                             └── MAX_IN_VAIN of them: the error
//! ```

use super::{Env, Executor};
use crate::action::{FailCause, Reason};
use unbroken_types::WcStatus;

/// The first pause before a fresh life, where the last one was in vain.
const PAUSE_US: u64 = 500_000;
/// Lives in vain, one after the other, before the QP is given up: half a minute of pauses.
const MAX_IN_VAIN: u32 = 7;

/// Lives that the transport gave up while the path lived, and in which nothing moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Revivals {
    /// So many, one after the other.
    in_vain: u32,
    /// The life that begins next, and the one that is now, are for one of these.
    revives: bool,
    revived: bool,
    at_us: Option<u64>,
}

impl Revivals {
    /// When the next life is to begin.
    pub(super) fn at_us(&self) -> Option<u64> {
        self.at_us
    }

    /// Whether it is time for the next life. It says so once.
    pub(super) fn take_due(&mut self, now_us: u64) -> bool {
        self.at_us.take_if(|at_us| *at_us <= now_us).is_some()
    }

    /// The next life has begun, for whatever reason.
    pub(super) fn begun(&mut self) {
        (self.at_us, self.revived) = (None, std::mem::take(&mut self.revives));
    }

    /// The first one stays on the path; after one in vain the path is not believed any more.
    pub(super) fn reason(&self, status: WcStatus) -> Reason {
        match self.in_vain {
            0 => Reason::Wedged(status),
            _ => Reason::QpFailed(status),
        }
    }

    /// The transport has given up a life, in which something has moved or not. Gives the pause
    /// before the next; none: there have been enough.
    fn next(&mut self, moved: bool) -> Option<u64> {
        self.in_vain = if moved || !self.revived { 0 } else { self.in_vain + 1 };
        self.revives = true;
        match self.in_vain {
            0 => Some(0),
            MAX_IN_VAIN.. => None,
            n => Some(PAUSE_US << (n - 1)),
        }
    }
}

impl Executor {
    /// The transport has given up with that status, on a path that lives.
    pub(super) fn revive(&mut self, env: &mut impl Env, status: WcStatus) {
        if self.revivals.at_us.is_some() {
            return;
        }
        let moved = env.progress().advanced > 0;
        match self.revivals.next(moved) {
            Some(0) => self.suspect(env, self.revivals.reason(status)),
            Some(pause_us) => {
                self.revivals.at_us = Some(env.now_us() + pause_us);
                env.revives_in_vain(self.revivals.in_vain + 1, pause_us);
            }
            None => {
                self.lqp.fail_alive(status, FailCause::NothingMoves);
                self.run(env);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_in_vain_come_ever_later_and_end() {
        let mut revivals = Revivals::default();
        let status = WcStatus::RetryExcErr;
        let first = (revivals.next(false), revivals.reason(status));
        assert_eq!(first, (Some(0), Reason::Wedged(status)));
        let in_vain = |revivals: &mut Revivals| {
            revivals.begun();
            revivals.next(false)
        };
        let pauses: Vec<_> = std::iter::from_fn(|| in_vain(&mut revivals)).collect();
        let doubled: Vec<_> = (0..MAX_IN_VAIN - 1).map(|n| PAUSE_US << n).collect();
        assert_eq!(pauses, doubled);
        assert_eq!(revivals.reason(status), Reason::QpFailed(status));
        assert_eq!(revivals.next(true), Some(0));
        assert_eq!(revivals.reason(status), Reason::Wedged(status));
        // A life that began since its NIC died is none of them.
        revivals.begun();
        revivals.begun();
        assert_eq!(revivals.next(false), Some(0));
    }
}
