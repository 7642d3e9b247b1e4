//! Stopping a QP: ERR, a marker behind everything in each queue, and all that comes before the
//! markers.
//!
//! ```text
//!   ToErr ──► Mark(Send), Mark(Recv) ──► Wait ... ──► Done(backlog)
//!                                          │             ▲
//!                                          └─► Destroy ──┘   nothing comes for FLUSH_QUIET_US
//! ```
//!
//! No provider is trusted to flush all that it was given. rxe looks at receives when the QP fails
//! and not again, so that a marker posted afterwards never comes; over a bond, mlx5 was seen to
//! lose work requests; others make the flushes up in their library, in an order of their own. So a
//! marker says only that its queue is through, and nothing of what was before it (see
//! `completion`). A flush that has come to a standstill is not waited for, and neither is a
//! provider that goes on refusing ERR or a marker: its QP is destroyed, which ends its use of
//! memory for certain, and what had not come out by then is outstanding. The peer's counts decide
//! what of that has been executed.
//!
//! A QP with an SRQ has no marker for its receives: it waits for IBV_EVENT_QP_LAST_WQE_REACHED, and
//! until its CQ was found empty after that. What succeeds meanwhile counts and completes. When both
//! queues are through, nothing later changes memory or completes a WR.

use crate::journal::Journal;
use crate::mutants::left_out;
use crate::phase::{Blockers, Phase};
use crate::row::SendRow;
use crate::slot::Queue;
use unbroken_types::{Backlog, Completions, Messages, WcStatus};

/// What is to be done next to stop a QP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Ask the provider for state ERR, then [`Journal::in_error`].
    ToErr,
    /// Post a marker ([`crate::Slot::Marker`]; no data, no address) to that queue, then
    /// [`Journal::marked`].
    Mark(Queue),
    /// Poll the CQs; it takes time.
    Wait,
    /// The flush has come to a standstill. Destroy the provider's QP, handle what its CQs have, and
    /// then [`Journal::provider_gone`].
    Destroy,
    /// It is stopped, and this is what is outstanding.
    Done(Backlog),
    /// It is stopped, and had ended by an error of its own program before: everything has completed
    /// with an error.
    Ended,
    /// The provider said what cannot be, so that nobody knows what has been done. What is
    /// outstanding is still here.
    Strange,
}

/// A flush that brings nothing for this long has come to its end. Hardware flushes thousands of
/// work requests in less.
const FLUSH_QUIET_US: u64 = 20_000;

/// How far that is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct State {
    in_error: bool,
    marked: [bool; 2],
    /// The queue is through.
    out: [bool; 2],
    last_wqe: bool,
    over: bool,
    /// Since when nothing of the flush has come; none before the first step.
    quiet_since_us: Option<u64>,
}

impl State {
    #[inline]
    pub(crate) fn over(&self) -> bool {
        self.over
    }
}

impl<R: SendRow> Journal<R> {
    pub(crate) fn forget_for_good(&mut self) {
        self.stop.over = true;
    }

    /// Stops the QP for ever: says what is to be done next. To be called again after each step.
    pub fn stop(&mut self, now_us: u64, out: &mut (impl Completions + ?Sized)) -> Step {
        if self.stop.over || self.phase() == Phase::Failed {
            self.stop.over = true;
            return Step::Done(Backlog::default());
        }
        self.blockers.set(Blockers::STOPPING, true);
        if left_out!(self.config.mutation, NoMarker) && self.stop.in_error {
            self.stop.out = [true; 2];
        }
        let stands_still = self.stands_still(now_us);
        match self.stop.out {
            [true, true] => self.finish(out),
            _ if stands_still => Step::Destroy,
            _ if !self.stop.in_error => Step::ToErr,
            _ if !self.stop.marked[0] => Step::Mark(Queue::Send),
            _ if !self.stop.marked[1] && !self.config.shared_receives => Step::Mark(Queue::Recv),
            _ => Step::Wait,
        }
    }

    /// Whether nothing of the flush has come for long enough.
    fn stands_still(&mut self, now_us: u64) -> bool {
        let since_us = *self.stop.quiet_since_us.get_or_insert(now_us);
        now_us.saturating_sub(since_us) >= FLUSH_QUIET_US
            && !left_out!(self.config.mutation, FlushAwaited)
    }

    /// Something of the flush has come.
    #[cold]
    pub(crate) fn flush_goes_on(&mut self) {
        self.stop.quiet_since_us = None;
    }

    /// The provider's QP is in ERR.
    pub fn in_error(&mut self) {
        self.stop.in_error = true;
        self.flush_goes_on();
    }

    /// The provider has taken the marker.
    pub fn marked(&mut self, queue: Queue) {
        self.stop.marked[queue as usize] = true;
    }

    /// ... or has refused it after all: it is asked again, as long as it does not stand still.
    pub fn unmarked(&mut self, queue: Queue) {
        self.stop.marked[queue as usize] = false;
    }

    /// With an SRQ: the provider has told that the QP takes no receive any more.
    pub fn handle_last_wqe(&mut self) {
        self.stop.last_wqe = true;
    }

    /// With an SRQ: whether [`Self::recvs_polled`] is waited for.
    pub fn wants_recvs_polled(&self) -> bool {
        self.config.shared_receives && self.stop.last_wqe && !self.stop.out[1]
    }

    /// With an SRQ: the CQ of the receives was found empty, by a poll that began after
    /// [`Self::handle_last_wqe`].
    pub fn recvs_polled(&mut self) {
        self.stop.out[1] |= self.wants_recvs_polled();
    }

    /// The provider does nothing more for the QP, and all that it had to say was handled: the
    /// kernel has taken the device away, the QP was destroyed, or it has not left RESET.
    pub fn provider_gone(&mut self) {
        self.stop.in_error = true;
        self.stop.out = [true; 2];
    }

    /// The marker of a queue has come.
    #[cold]
    pub(crate) fn handle_marker(&mut self, queue: Queue, out: &mut (impl Completions + ?Sized)) {
        if !self.stop.marked[queue as usize] {
            return;
        }
        self.flush_goes_on();
        if queue == Queue::Send {
            self.sends_break_at(self.given_sends, out);
        }
        self.stop.out[queue as usize] = true;
        self.flush_absent(out);
    }

    fn finish(&mut self, out: &mut (impl Completions + ?Sized)) -> Step {
        if let Phase::Ending { by_error } = self.phase() {
            self.flush_all(WcStatus::WrFlushErr, out);
            self.stop.over = true;
            return if by_error { Step::Ended } else { Step::Done(self.counts()) };
        }
        if self.strange {
            return Step::Strange;
        }
        let mut backlog =
            Backlog { sends: self.sends.entries(), recvs: self.recvs.entries(), ..self.counts() };
        if left_out!(self.config.mutation, UnsignaledLost) {
            let signaled = |e: &unbroken_types::SendEntry| {
                e.flags.contains(unbroken_types::SendFlags::SIGNALED)
            };
            backlog.sends.retain(signaled);
        }
        self.reset();
        self.stop.over = true;
        Step::Done(backlog)
    }

    /// What the life that ends has counted.
    fn counts(&self) -> Backlog {
        Backlog {
            executed: Messages { all: self.consumed, receives: self.consumed },
            exact: false,
            completed: self.completed,
            keys_changed: self.keys_changed(),
            ..Backlog::default()
        }
    }
}
