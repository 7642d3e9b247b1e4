//! The state machine: what is recorded, and what the provider is given.
//!
//! ```text
//!            first error WC that means the network, or a flush by itself
//!   LIVE ────────────────────────────────────────────────────────────────► HELD
//!     │                                                                     │
//!     │ an error of the application's own, its own modify to ERR            │ ... which explains the flush
//!     ▼                                                                     ▼
//!   ENDING ◄─────────────────────────────────────────────────────────────────
//!   any ──► FAILED (`fail`)         LIVE, HELD, ENDING ──► stopped, see `stop`
//! ```
//!
//! - LIVE: posts go to the provider, completions to the application.
//! - HELD: posts are recorded only; no error reaches the application. What had succeeded before
//!   still completes.
//! - ENDING: the QP is in ERR as on any device; everything that is outstanding, and what is posted
//!   later, completes with an error.
//! - FAILED: everything was completed by the journal itself. What the provider says from now on
//!   counts for nothing.
//!
//! Where an entry is (`first ≤ given ≤ next`, in each queue): `first..given` is with the provider
//! or executed, `given..next` waits until the provider may have it (sends need RTS there) or for
//! the QP to be stopped.

use crate::mutants::{left_out, Mutation};
use crate::phase::{Blockers, Phase};
use crate::row::{PlainRow, SendRow};
use crate::sends::Sends;
use crate::slot::{Queue, Slot};
use crate::stop::State;
use unbroken_types::{
    Backlog, Completions, Messages, PostError, Progress, QpCaps, QpState, RecvRing, RecvWr,
    SendBatch, SendFlags, SendWr, Wc, WcStatus,
};

/// How a journal is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Queue sizes as the application sees them. The provider's queues must have one entry more
    /// each, for the markers.
    pub caps: QpCaps,
    /// The QPN that WCs carry.
    pub wc_qpn: u32,
    /// Every send makes a WC.
    pub sq_sig_all: bool,
    /// Receives come from an SRQ: they are not the journal's, only their number is.
    pub shared_receives: bool,
    /// For tests.
    #[doc(hidden)]
    pub mutation: Mutation,
}

/// What is to be done with a work request that was recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Posted {
    /// Give it to the provider, now and under this `wr_id`; those of a batch have the next ones. If
    /// the provider refuses: [`Journal::refused_sends`], [`Journal::refused_recv`].
    Give(u64),
    /// Nothing.
    Kept,
}

/// The journal of one physical QP. See the module's text.
///
/// - application: [`post_sends`](Self::post_sends), [`post_recv`](Self::post_recv),
///   [`end`](Self::end), [`reset`](Self::reset);
/// - provider: [`open`](Self::open), [`start`](Self::start), [`next_send`](Self::next_send),
///   [`next_recv`](Self::next_recv), [`handle_wc`](Self::handle_wc),
///   [`handle_fatal`](Self::handle_fatal), [`handle_own_error`](Self::handle_own_error);
/// - polls: [`poll_failure`](Self::poll_failure);
/// - switching: [`stop`](Self::stop) and what belongs to it, [`adopt`](Self::adopt),
///   [`fail`](Self::fail).
#[derive(Clone)]
pub struct Journal<R: SendRow = PlainRow> {
    pub(crate) config: Config,
    pub(crate) sends: Sends<R>,
    pub(crate) recvs: RecvRing,
    pub(crate) given_sends: u64,
    pub(crate) given_recvs: u64,
    /// In each queue, everything before this has had its error WC, if it had any.
    pub(crate) spoilt_sends: u64,
    pub(crate) spoilt_recvs: u64,
    /// The first send with an error WC, or the marker's place: what is behind it is in error, too.
    pub(crate) broken_at: Option<u64>,
    phase: Phase,
    pub(crate) blockers: Blockers,
    pub(crate) stop: State,
    /// One past the last send that makes a WC of the provider's.
    pub(crate) announced: u64,
    /// No send from here on had been executed by the peer when it was posted.
    pub(crate) adopted_until: u64,
    /// Of those recorded in this life, the ones that consume a receive.
    pub(crate) consumers: u64,
    /// Completed, and executed for the peer, in this life.
    pub(crate) completed: Messages,
    pub(crate) consumed: u64,
    pub(crate) advanced: u64,
    pub(crate) first_moved_us: Option<u64>,
    keys_changed: bool,
    /// The provider's completions do not fit what it was given.
    pub(crate) strange: bool,
}

impl<R: SendRow> Journal<R> {
    /// A journal with its rings; the provider's QP is in RESET.
    pub fn new(config: Config) -> Journal<R> {
        let Config { caps, wc_qpn, sq_sig_all, .. } = config;
        let (sends, recvs) = (
            Sends::new(&caps, wc_qpn, sq_sig_all),
            RecvRing::new(caps.max_recv_wr, caps.max_recv_sge),
        );
        Journal {
            given_sends: sends.next(),
            given_recvs: recvs.next(),
            spoilt_sends: sends.next(),
            spoilt_recvs: recvs.next(),
            announced: sends.next(),
            adopted_until: sends.next(),
            blockers: Blockers::of(&config),
            config,
            sends,
            recvs,
            broken_at: None,
            phase: Phase::Live,
            stop: State::default(),
            consumers: 0,
            completed: Messages::default(),
            consumed: 0,
            advanced: 0,
            first_moved_us: None,
            keys_changed: false,
            strange: false,
        }
    }

    // ---- getters ----

    #[inline]
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    pub(crate) fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.blockers.set(Blockers::PHASE, phase != Phase::Live);
    }

    /// It is being stopped, or was.
    #[inline]
    pub(crate) fn stopping(&self) -> bool {
        self.blockers.any(Blockers::STOPPING)
    }

    /// The QP is in ERR for the application: by an error of its own, by its own wish, or because it
    /// was given up.
    pub fn ended(&self) -> bool {
        matches!(self.phase, Phase::Ending { .. } | Phase::Failed)
    }

    /// The QPN that WCs carry.
    pub fn wc_qpn(&self) -> u32 {
        self.config.wc_qpn
    }

    /// It was given up ([`Self::fail`]), or stopped: what the provider says of it counts for
    /// nothing.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Failed || self.stop.over()
    }

    /// The network has failed it, with this status.
    pub fn held(&self) -> Option<WcStatus> {
        match self.phase {
            Phase::Held { status, .. } => Some(status),
            _ => None,
        }
    }

    /// How far the QP is; its state is `now`, unless it has ended. Sends that make no WC, and have
    /// none behind them that does, are not among the outstanding ones: when they are done is not
    /// told. Nor is it of those before the first error. Whether the peer has no receive is not told
    /// either, so a QP with a send that needs one may always be waiting.
    pub fn progress(&self, now: QpState) -> Progress {
        let (first, next) = (self.sends.first(), self.sends.next());
        let announced_from = self.broken_at.unwrap_or(0).clamp(first, next);
        let outstanding = self.announced.saturating_sub(announced_from);
        Progress {
            state: if self.ended() { QpState::Err } else { now },
            outstanding_sends: outstanding as u32,
            unannounced_sends: (next - first - outstanding) as u32,
            outstanding_recvs: self.recvs.len(),
            advanced: self.advanced,
            executed: self.consumed,
            completed: self.completed.all,
            answered: self.advanced > 0,
            waiting_rnr: self.consumers > self.completed.receives,
            resting: false,
            keys_changed: self.keys_changed,
            first_moved_us: self.first_moved_us,
        }
    }

    /// From now on the provider tells of every send when it is complete, so that it can be seen
    /// that nothing is outstanding. Of those before, which it has, it tells as before.
    pub fn announce(&mut self) {
        self.blockers.set(Blockers::ANNOUNCES, true);
        if self.given_sends < self.sends.next() {
            self.announced = self.sends.next();
        }
    }

    /// Whether it does: then sends go by [`Self::next_send`] or [`Self::provider_flags`].
    #[inline]
    pub fn announces(&self) -> bool {
        self.blockers.any(Blockers::ANNOUNCES)
    }

    /// The flags that a send has for the provider.
    #[inline]
    pub fn provider_flags(&self, flags: SendFlags) -> SendFlags {
        match self.announces() {
            true => flags.with(SendFlags::SIGNALED),
            false => flags,
        }
    }

    /// Work that the provider has not completed yet, as far as is known.
    pub fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty()
    }

    // ---- application ----

    /// Records a send. The caller has seen that the state of the QP allows it.
    #[inline]
    pub fn post_send(
        &mut self,
        wr: &SendWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<Posted, PostError> {
        let (index, gives) = (self.sends.next(), self.gives_next());
        if !gives {
            self.may_post()?;
        }
        self.sends.push(wr, gives)?;
        self.consumers += u64::from(wr.opcode.consumes_receive());
        self.keys_changed |= wr.opcode.changes_keys();
        if self.config.sq_sig_all || self.announces() || wr.flags.contains(SendFlags::SIGNALED) {
            self.announced = index + 1;
        }
        Ok(self.posted_sends(index, gives, out))
    }

    /// Records several sends: all or none.
    pub fn post_sends(
        &mut self,
        batch: &dyn SendBatch,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<Posted, PostError> {
        let (first, gives) = (self.sends.next(), self.gives_next());
        if !gives {
            self.may_post()?;
        }
        let sig_all = self.config.sq_sig_all || self.announces();
        let (mut consumers, mut keys_changed, mut announced, mut index) = (0, false, 0, first);
        self.sends.push_all(batch, gives, |wr| {
            index += 1;
            consumers += u64::from(wr.opcode.consumes_receive());
            keys_changed |= wr.opcode.changes_keys();
            if sig_all || wr.flags.contains(SendFlags::SIGNALED) {
                announced = index;
            }
        })?;
        self.consumers += consumers;
        self.keys_changed |= keys_changed;
        self.announced = self.announced.max(announced);
        Ok(self.posted_sends(first, gives, out))
    }

    /// Whether the provider may have what is posted now: nothing waits before it.
    fn gives_next(&self) -> bool {
        self.given_sends == self.sends.next() && self.gives_sends()
    }

    /// Sends from `first` on were recorded.
    #[inline]
    fn posted_sends(
        &mut self,
        first: u64,
        gives: bool,
        out: &mut (impl Completions + ?Sized),
    ) -> Posted {
        if gives {
            self.given_sends = self.sends.next();
            return Posted::Give(Slot::Entry(Queue::Send, first).wr_id());
        }
        self.flush_absent(out);
        Posted::Kept
    }

    /// Whether the provider is given sends. One in ERR is, too: it flushes them, which says that
    /// all before them are done; of sends that made no WC nothing else would say so.
    fn gives_sends(&self) -> bool {
        !self.blockers.any(Blockers::NO_SENDS)
            && match self.phase {
                Phase::Live => !self.stopping(),
                Phase::Ending { .. } => !self.stop.over(),
                Phase::Held { .. } | Phase::Failed => false,
            }
    }

    /// The provider refused what [`Posted::Give`] named last: `count` sends are not recorded.
    #[cold]
    pub fn refused_sends(&mut self, count: usize) {
        let next = self.sends.next() - count as u64;
        let consumers = (next..self.sends.next())
            .filter(|index| self.sends.at(*index).opcode.consumes_receive());
        self.consumers -= consumers.count() as u64;
        self.sends.truncate(next);
        self.given_sends = self.given_sends.min(next);
        self.announced = self.announced.min(next);
    }

    /// What [`Posted::Give`] named last was not given, and waits: `count` sends, which
    /// [`Self::next_send`] gives.
    pub fn hold_back_sends(&mut self, count: usize) {
        self.given_sends -= count as u64;
        for index in self.given_sends..self.sends.next() {
            self.sends.set_started(index, false);
        }
    }

    /// Records a receive. The caller has seen that the state of the QP allows it.
    #[inline]
    pub fn post_recv(
        &mut self,
        wr: &RecvWr<'_>,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<Posted, PostError> {
        self.may_post()?;
        if self.config.shared_receives {
            return Err(PostError::HasSrq);
        }
        let index = self.recvs.next();
        self.recvs.push(wr)?;
        if self.given_recvs == index && !self.blockers.any(Blockers::OF_RECVS) {
            self.given_recvs = index + 1;
            return Ok(Posted::Give(Slot::Entry(Queue::Recv, index).wr_id()));
        }
        self.flush_absent(out);
        Ok(Posted::Kept)
    }

    /// The provider refused the receive that [`Posted::Give`] named last: it is not recorded.
    #[cold]
    pub fn refused_recv(&mut self) {
        let next = self.recvs.next() - 1;
        self.recvs.truncate(next);
        self.given_recvs = self.given_recvs.min(next);
    }

    /// What [`Posted::Give`] named last was not given, and waits: a receive, which
    /// [`Self::next_recv`] gives.
    pub fn hold_back_recv(&mut self) {
        self.given_recvs -= 1;
    }

    fn may_post(&self) -> Result<(), PostError> {
        match self.stop.over() && !self.ended() {
            true => Err(PostError::WrongState(QpState::Err)),
            false => Ok(()),
        }
    }

    /// The application is about to move the QP to ERR. What is outstanding flushes as the provider
    /// says so.
    pub fn end(&mut self, out: &mut (impl Completions + ?Sized)) {
        self.enter_ending(false, out);
    }

    /// The QP was reset: all is forgotten, and WCs of what was outstanding count for nothing.
    pub fn reset(&mut self) {
        while !self.sends.is_empty() {
            self.sends.remove_oldest();
        }
        while !self.recvs.is_empty() {
            self.recvs.remove_oldest();
        }
        (self.given_sends, self.spoilt_sends, self.announced) =
            (self.sends.next(), self.sends.next(), self.sends.next());
        self.adopted_until = self.sends.next();
        (self.given_recvs, self.spoilt_recvs) = (self.recvs.next(), self.recvs.next());
        (self.phase, self.stop, self.blockers) =
            (Phase::Live, State::default(), Blockers::of(&self.config));
        (self.consumers, self.completed) = (0, Messages::default());
        (self.consumed, self.advanced, self.first_moved_us) = (0, 0, None);
        (self.broken_at, self.keys_changed, self.strange) = (None, false, false);
    }

    /// The same for good, or until [`Self::reset`]: nothing that the provider still says of the QP
    /// is for anybody.
    pub fn forget(&mut self) {
        self.reset();
        self.forget_for_good();
    }

    // ---- provider ----

    /// The provider's QP takes receives from now on (INIT): give it those of [`Self::next_recv`].
    pub fn open(&mut self) {
        self.blockers.set(Blockers::NO_RECVS, false);
    }

    /// The provider's QP takes sends from now on (RTS): give it those of [`Self::next_send`].
    pub fn start(&mut self) {
        self.blockers.set(Blockers::NO_SENDS, false);
    }

    /// The next send that waits for the provider, under its number; what the peer has executed is
    /// passed over, and completes in its turn. To be called when the provider takes sends, and
    /// where the QP has ended ([`Self::ended`]), for the flushes. To be followed by
    /// [`Self::gave_send`] if the provider took it.
    pub fn next_send(&mut self, out: &mut (impl Completions + ?Sized)) -> Option<SendWr<'_>> {
        if !self.gives_sends() {
            return None;
        }
        while self.given_sends < self.sends.next() && self.passes_over(self.given_sends) {
            self.given_sends += 1;
        }
        if self.phase == Phase::Live {
            self.complete_executed(out);
        }
        let index = self.given_sends;
        if index == self.sends.next() {
            return None;
        }
        // One behind it that never was on this wire completes when it does: so its end must be
        // told.
        let tells = index + 1 < self.sends.next() && self.sends.at(index + 1).executed;
        let wr = self.sends.wr(index);
        let flags =
            if tells { wr.flags.with(SendFlags::SIGNALED) } else { self.provider_flags(wr.flags) };
        Some(SendWr { wr_id: Slot::Entry(Queue::Send, index).wr_id(), flags, ..wr })
    }

    fn passes_over(&self, index: u64) -> bool {
        self.sends.at(index).executed && !left_out!(self.config.mutation, ExecutedAgain)
    }

    /// The provider has taken the send that [`Self::next_send`] gave.
    pub fn gave_send(&mut self) {
        self.sends.set_started(self.given_sends, true);
        self.given_sends += 1;
    }

    /// The next receive that waits for the provider, under its number. To be followed by
    /// [`Self::gave_recv`] if the provider took it.
    pub fn next_recv(&self) -> Option<RecvWr<'_>> {
        let waits = !self.blockers.any(Blockers::OF_RECVS);
        (waits && self.given_recvs < self.recvs.next()).then(|| RecvWr {
            wr_id: Slot::Entry(Queue::Recv, self.given_recvs).wr_id(),
            ..self.recvs.wr(self.given_recvs)
        })
    }

    /// The provider has taken the receive that [`Self::next_recv`] gave.
    pub fn gave_recv(&mut self) {
        self.given_recvs += 1;
    }

    /// The provider has failed, or says so of the QP (a post that was refused, IBV_EVENT_QP_FATAL):
    /// no more posts go there. The owner knows.
    pub fn handle_fatal(&mut self) {
        if self.phase == Phase::Live {
            self.set_phase(Phase::Held { status: WcStatus::FatalErr, told: true });
        }
    }

    /// The QP has ended by a request of the peer that it must not do (IBV_EVENT_QP_ACCESS_ERR,
    /// IBV_EVENT_QP_REQ_ERR): an error of the application's own, of which its WCs show the flushes
    /// only.
    pub fn handle_own_error(&mut self, out: &mut (impl Completions + ?Sized)) {
        self.enter_ending(true, out);
    }

    /// That the network has failed the QP, and with which status; said once. A flush that came by
    /// itself may have its reason in the other queue, so it is not said before the caller has
    /// looked there (`looked`).
    pub fn poll_failure(&mut self, looked: bool) -> Option<WcStatus> {
        match &mut self.phase {
            Phase::Held { status, told }
                if !*told && (looked || *status != WcStatus::WrFlushErr) =>
            {
                *told = true;
                Some(*status)
            }
            _ => None,
        }
    }

    /// Whether [`Self::poll_failure`] waits for a look at the other queue.
    #[inline]
    pub fn is_puzzled(&self) -> bool {
        matches!(self.phase, Phase::Held { status: WcStatus::WrFlushErr, told: false })
    }

    // ---- switching ----

    /// Takes over the work of another QP. Of a fresh one only: nothing is in the queues that get
    /// something. On an error nothing is taken.
    pub fn adopt(
        &mut self,
        backlog: &Backlog,
        out: &mut (impl Completions + ?Sized),
    ) -> Result<(), PostError> {
        let taken = |there: bool, come: bool| !there && come;
        let fresh = self.phase == Phase::Live && !self.stopping();
        if !fresh
            || taken(self.sends.is_empty(), !backlog.sends.is_empty())
            || taken(self.recvs.is_empty(), !backlog.recvs.is_empty())
        {
            return Err(PostError::WrongState(QpState::Err));
        }
        let (first_send, first_recv) = (self.sends.next(), self.recvs.next());
        let result = backlog.sends.iter().try_for_each(|e| self.sends.adopt(e)).and_then(|()| {
            backlog
                .recvs
                .iter()
                .try_for_each(|e| self.recvs.push(&RecvWr { wr_id: e.wr_id, sges: &e.sges }))
        });
        if let Err(e) = result {
            self.sends.truncate(first_send);
            self.recvs.truncate(first_recv);
            return Err(e);
        }
        self.keys_changed |= backlog.keys_changed;
        self.adopted_until = self.sends.next();
        for index in first_send..self.sends.next() {
            let entry = self.sends.at(index);
            self.consumers += u64::from(entry.opcode.consumes_receive());
            if entry.signaled || self.announces() {
                self.announced = index + 1;
            }
            if left_out!(self.config.mutation, ExecutedEarly) && entry.executed && entry.signaled {
                out.send(Wc { wr_id: entry.wr_id, qp_num: self.config.wc_qpn, ..Wc::default() });
            }
        }
        Ok(())
    }

    /// Completes the first send with `status` and flushes the rest, at once.
    pub fn fail(&mut self, status: WcStatus, out: &mut (impl Completions + ?Sized)) {
        if !self.stop.over() && self.phase != Phase::Failed {
            // One that has ended has had its error, or wanted none: what is left is flushed,
            // whoever comes first to do it.
            let status = if self.ended() { WcStatus::WrFlushErr } else { status };
            self.set_phase(Phase::Failed);
            self.flush_all(status, out);
        }
    }

    pub(crate) fn keys_changed(&self) -> bool {
        self.keys_changed
    }
}
