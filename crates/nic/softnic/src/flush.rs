//! How a plain NIC flushes the RC queue pairs of a program: as the books say, or in one of the ways
//! in which providers of real devices do not. For what is built above, which must trust none.

use crate::faults::Dice;
use unbroken_types::{QpCaps, Wc, WcStatus};
use unbroken_verbs::Cq;

/// What becomes of the completions with status IBV_WC_WR_FLUSH_ERR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlushKind {
    /// All come, in order.
    #[default]
    Whole,
    /// One in three never comes.
    Lossy,
    /// Receives that are posted in ERR never complete.
    NoRecvMarker,
    /// Receives of an SRQ are not flushed.
    NoSrqFlush,
    /// A poll takes as long as a system call that sleeps.
    SlowPoll,
    /// They come when the queue pair has been destroyed.
    AtDestroy,
    /// None comes.
    Nothing,
}

impl FlushKind {
    const ALL: [(FlushKind, &'static str); 7] = [
        (FlushKind::Whole, "whole"),
        (FlushKind::Lossy, "lossy"),
        (FlushKind::NoRecvMarker, "no-recv-marker"),
        (FlushKind::NoSrqFlush, "no-srq-flush"),
        (FlushKind::SlowPoll, "slow-poll"),
        (FlushKind::AtDestroy, "at-destroy"),
        (FlushKind::Nothing, "nothing"),
    ];

    /// The one of a name, or what would be right.
    pub(crate) fn parse(name: &str) -> Result<FlushKind, String> {
        let found = Self::ALL.into_iter().find(|(_, of)| *of == name);
        found.map(|(kind, _)| kind).ok_or_else(|| {
            let names = Self::ALL.map(|(_, name)| name).join(", ");
            format!("'{name}' is no way to flush; {names} are right")
        })
    }
}

/// What a QP does with its flushes.
pub(crate) struct Flushes {
    kind: FlushKind,
    dice: Dice,
    srq: bool,
    /// Those that come later: whether of the sends.
    kept: Vec<(bool, Wc)>,
    most_kept: usize,
    /// The receive that is being posted comes to a QP in ERR.
    pub(crate) posted_late: bool,
}

impl Flushes {
    /// `None`: they come as they are.
    pub(crate) fn new(
        kind: FlushKind,
        seed: u64,
        caps: &QpCaps,
        srq: bool,
    ) -> Option<Box<Flushes>> {
        let most_kept = caps.max_send_wr as usize + caps.max_recv_wr as usize;
        let flushes = Flushes {
            kind,
            dice: Dice::new(seed),
            srq,
            kept: Vec::new(),
            most_kept,
            posted_late: false,
        };
        (!matches!(kind, FlushKind::Whole | FlushKind::SlowPoll)).then(|| Box::new(flushes))
    }

    /// Whether a completion does not come now.
    #[cold]
    pub(crate) fn hold(&mut self, is_send: bool, wc: &Wc) -> bool {
        if wc.status != WcStatus::WrFlushErr as u32 {
            return false;
        }
        match self.kind {
            FlushKind::Whole | FlushKind::SlowPoll => false,
            FlushKind::Lossy => self.dice.below(3) == 0,
            FlushKind::NoRecvMarker => !is_send && self.posted_late,
            FlushKind::NoSrqFlush => !is_send && self.srq,
            FlushKind::Nothing => true,
            FlushKind::AtDestroy => {
                if self.kept.len() < self.most_kept {
                    self.kept.push((is_send, *wc));
                }
                true
            }
        }
    }

    /// The QP has been destroyed.
    pub(crate) fn release(&mut self, send_cq: &Cq, recv_cq: &Cq) {
        for (is_send, wc) in self.kept.drain(..) {
            // One that finds no room is lost: nobody is left to be told.
            let _ = if is_send { send_cq } else { recv_cq }.offer(wc, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPS: QpCaps = QpCaps {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };

    fn held(kind: FlushKind, srq: bool, is_send: bool, late: bool, status: WcStatus) -> usize {
        let Some(mut flushes) = Flushes::new(kind, 5, &CAPS, srq) else { return 0 };
        flushes.posted_late = late;
        let wc = Wc { status: status as u32, ..Wc::default() };
        (0..90).filter(|_| flushes.hold(is_send, &wc)).count()
    }

    #[test]
    fn only_flushes_are_held_and_those_that_the_kind_names() {
        use FlushKind::*;
        let flush = WcStatus::WrFlushErr;
        for (kind, name) in FlushKind::ALL {
            assert_eq!(FlushKind::parse(name), Ok(kind));
            for other in [WcStatus::Success, WcStatus::RetryExcErr, WcStatus::FatalErr] {
                assert_eq!(held(kind, true, false, true, other), 0, "{kind:?}");
            }
        }
        assert_eq!([Whole, SlowPoll].map(|k| held(k, true, false, true, flush)), [0, 0]);
        assert_eq!([Nothing, AtDestroy].map(|k| held(k, false, true, false, flush)), [90, 90]);
        assert!((15..45).contains(&held(Lossy, false, true, false, flush)));
        let marker = |is_send, late| held(NoRecvMarker, false, is_send, late, flush);
        assert_eq!((marker(false, true), marker(false, false), marker(true, true)), (90, 0, 0));
        let shared = |srq, is_send| held(NoSrqFlush, srq, is_send, false, flush);
        assert_eq!((shared(true, false), shared(false, false), shared(true, true)), (90, 0, 0));
        assert!(FlushKind::parse("some").unwrap_err().contains("no-recv-marker"));
    }
}
