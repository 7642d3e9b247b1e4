//! Carries out what [`LogicalQp`] decides: one end of a logical QP with its physical QP. The
//! product (`shift`) and the simulator drive this code; what they add is an [`Env`], which has the
//! devices, the network and the directory.
//!
//! A handler fetches the actions of the state machine and does them; answers go back at once, so a
//! whole step of a switch (quiesce, open) happens in one call, in the thread that noticed the
//! failure.
//!
//! Where the outstanding work is, at any time:
//!
//! |             | sends                           | receives              |
//! |-------------|---------------------------------|-----------------------|
//! | `Active`    | in the physical QP              | in the physical QP    |
//! | `Fencing`   | in the physical QP; a post is held | in the physical QP |
//! | `Quiescing` | taken out, into `held`; a post is held | taken out, into `held` |
//! | `Opening`, `Parked` | held; a post is appended | held; a post is appended |
//! | `Waiting`, `Checking`, `Connected` | held; a post is appended | in the fresh physical QP |
//! | `Start`     | marked, given to the physical QP | in it                |
//!
//! So nothing that is posted is refused, order is kept, and what is replayed is decided on a list
//! and not in a device.
//!
//! Rooms: here is what happens to a QP and the actions that follow; `life` is how a life of the
//! physical QP begins and ends, `held` what no physical QP has, `fence` the watch over sends that
//! shall complete before a planned switch, `revival` the lives that a QP is given on a path that
//! lives.
//!
//! Time is the shell's `now_us`; only [`Executor::look`] takes the observer's clock, by which
//! silence is measured.

use crate::action::{Action, Reason, Switched};
use crate::choice::may_go_home;
use crate::health::Verdict;
use crate::message::{Body, Message, RefuseReason};
use crate::mutants::left_out;
use crate::qp::{LogicalQp, State};
use crate::silence::{Look, Silence};
use crate::slots::{slot_of, Liveness, SlotPath};
use fence::{Fence, FENCE_LOOK_US};
use held::Held;
use revival::Revivals;
use unbroken_types::{Progress, QpState, RcModify, Replay, WcStatus};

mod behaviour;
mod env;
mod fence;
mod held;
mod life;
mod revival;
#[cfg(test)]
mod tests;

pub use env::{Asks, Ended, Env, PeerWord, StepError, Switch};

/// Actions that one call may carry out; a switch over every slot needs fewer.
const MAX_ACTIONS: usize = 1024;

/// A switch is reported when something moved on the new path, after this time, or when the QP ends.
/// One for which no send waited is reported when the QP takes sends again: when the next comes is
/// up to the application.
const REPORT_WAIT_US: u64 = 1_000_000;
/// How often that is looked at: first, and at most.
const REPORT_LOOK_US: u64 = 500;
/// See `REPORT_LOOK_US`.
const REPORT_LOOK_MAX_US: u64 = 20_000;

/// A switch that is done, of which nothing has moved yet.
#[derive(Clone, Debug)]
struct Pending {
    switched: Switched,
    replay: Replay,
    /// It is reported: no send waited for it.
    reported: bool,
    /// When to look next, and how long after the last look.
    look_at_us: u64,
    look_us: u64,
}

/// One end of a protected QP. See the module's text.
#[derive(Clone, Debug)]
pub struct Executor {
    lqp: LogicalQp,
    silence: Silence,
    /// The transport of the present life has given up with this status, and the path has been asked
    /// whether it lives.
    gave_up: Option<WcStatus>,
    /// How often the transport went on since something moved, and how far it was then.
    went_on: (u32, u64),
    /// The transport has been told to insist.
    insists: bool,
    revivals: Revivals,
    held: Option<Held>,
    pending: Option<Pending>,
    /// A planned switch waits until the sends are complete.
    fence: Option<Fence>,
    /// Planned switches were cancelled: before this time none is tried, and how long the pause was.
    pause: (u64, u64),
    /// The physical QP is being stopped: when it is asked next, and how long after the last time.
    stopping: Option<(u64, u64)>,
    /// First PSN of our requests in this epoch.
    sq_psn: u32,
    replay: Replay,
    /// The last life began with sends that had waited for it.
    had_waited: bool,
    /// The beliefs have been set from what is known.
    informed: bool,
    /// This end had the QP leave its first path, and not its peer.
    left_home: bool,
}

impl Executor {
    /// The executor of a logical QP whose physical QP the application connects.
    pub fn new(lqp: LogicalQp) -> Executor {
        Executor {
            lqp,
            silence: Silence::default(),
            gave_up: None,
            went_on: (0, 0),
            insists: false,
            revivals: Revivals::default(),
            held: None,
            pending: None,
            fence: None,
            pause: (0, 0),
            stopping: None,
            sq_psn: 0,
            replay: Replay::default(),
            had_waited: false,
            informed: false,
            left_home: false,
        }
    }

    // ---- getters ----

    /// The state machine.
    pub fn lqp(&self) -> &LogicalQp {
        &self.lqp
    }

    /// A second path is believed alive.
    pub fn ready(&self) -> bool {
        self.informed && self.lqp.has_backup()
    }

    /// It is between two paths, or prepares to leave one.
    pub fn on_its_way(&self) -> bool {
        self.switching() || self.lqp.state() == State::Fencing
    }

    /// It is between two paths.
    pub fn switching(&self) -> bool {
        !matches!(self.lqp.state(), State::Active | State::Fencing | State::Failed | State::Closed)
    }

    /// The path that carries the QP now, while it is not between two.
    pub fn active_path(&self) -> Option<SlotPath> {
        self.lqp.path().filter(|_| matches!(self.lqp.state(), State::Active | State::Fencing))
    }

    /// Where to go back to: the first path, if it was this end that had the QP leave it. The other
    /// end may know nothing of what was wrong.
    pub fn home(&self) -> Option<SlotPath> {
        self.lqp.slots().get(0).filter(|home| self.left_home && self.lqp.path() != Some(*home))
    }

    /// Where to go back to ([`Self::home`]), if it is time to go: the path home is `steady`, and
    /// the QP has been away for long enough.
    pub fn may_go_home(&self, now_us: u64, steady: bool) -> Option<SlotPath> {
        let may = may_go_home(self.lqp.policy(), now_us, self.lqp.on_path_since_us(), steady);
        self.home().filter(|_| may)
    }

    /// What is posted is to be held ([`Self::hold_sends`]), whatever the physical QP would say to
    /// it.
    pub fn holds_sends(&self) -> bool {
        self.held.is_some()
    }

    /// First PSN of our requests, once the QP has left its first epoch.
    pub fn moved_sq_psn(&self) -> Option<u32> {
        (self.lqp.epoch() > 0).then_some(self.sq_psn)
    }

    /// With which status the transport of the present life has given up.
    pub fn gave_up_with(&self) -> Option<WcStatus> {
        self.gave_up
    }

    /// How far it had advanced at the last look.
    pub fn advanced(&self) -> u64 {
        self.silence.advanced()
    }

    /// Since when the QP is silent, as of the last look.
    pub fn silent_since_us(&self) -> Option<u64> {
        self.silence.since_us()
    }

    /// When [`Self::tick`] is to be called at the latest; `None` while nothing is under way.
    pub fn deadline_us(&self) -> Option<u64> {
        let report = self.pending.as_ref().map(|p| p.look_at_us);
        let stop = self.stopping.map(|(at_us, _)| at_us);
        let fence = self.fence.map(|f| f.look_at_us);
        let revival = self.revivals.at_us();
        [self.lqp.poll_timeout(), report, stop, fence, revival].into_iter().flatten().min()
    }

    // ---- handlers ----

    /// The physical QP of the present path fails, or its path is dead.
    pub fn suspect(&mut self, env: &mut impl Env, reason: Reason) {
        let wedged = matches!(reason, Reason::Wedged(_)) && self.gave_up.is_none();
        if wedged && self.unanswered(&env.progress()) {
            return; // its own transport says when it is enough
        }
        self.learn(env);
        let now_us = env.now_us();
        if let (Some(path), Reason::PostFailed) = (self.lqp.path(), reason) {
            self.lqp.set_path_liveness(now_us, path, Liveness::NoNic);
        }
        self.lqp.suspect(now_us, self.lqp.epoch(), reason);
        self.run(env);
    }

    /// No request has had an answer since the QP was connected, as far as its device can tell. What
    /// the peer sends says nothing of that: each direction has a PSN of its own.
    ///
    /// The ends may not fit, as with a wrong PSN, which a fresh life would hide: the peer is asked.
    pub(super) fn unanswered(&self, p: &Progress) -> bool {
        if self.lqp.epoch() > 0 || left_out!(self.lqp.mutation(), UnprovenRevived) {
            return false;
        }
        let heard = left_out!(self.lqp.mutation(), HeardIsProof) && p.first_moved_us.is_some();
        (p.advanced, p.completed, p.answered || heard, p.unannounced_sends) == (0, 0, false, 0)
    }

    /// Prepares a planned switch to the best path that is wanted and believed alive. Gives whether
    /// it has begun.
    pub fn plan(
        &mut self,
        env: &mut impl Env,
        reason: Reason,
        wanted: impl Fn(SlotPath) -> bool,
    ) -> bool {
        let now_us = env.now_us();
        let app = env.app().state;
        // An end that only receives may stay in RTR, as perftest's servers do.
        if now_us < self.pause.0 || !matches!(app, Some(QpState::Rtr | QpState::Rts)) {
            return false;
        }
        let progress = env.progress();
        if app != Some(progress.state) {
            return false;
        }
        if progress.unannounced_sends > 0 {
            // What nobody will hear of cannot be waited for: the next time it has something behind
            // it.
            env.announce();
            return false;
        }
        self.learn(env);
        self.lqp.set_crowd(env.switching_qps());
        let begun = self.lqp.plan(now_us, reason, wanted);
        self.run_from(env, Some(progress));
        begun
    }

    /// The transport has given up. That is a question to its path, which the caller asks; the
    /// answer decides ([`Self::verdict`]).
    pub fn gave_up(&mut self, env: &mut impl Env, status: WcStatus) -> Option<SlotPath> {
        let Some(path) = self.active_path() else {
            self.suspect(env, Reason::QpFailed(status));
            return None;
        };
        self.gave_up = Some(status);
        Some(path)
    }

    /// It has been found out whether a path to the peer lives.
    pub fn verdict(&mut self, env: &mut impl Env, path: SlotPath, verdict: Verdict) {
        let on_it = self.lqp.path() == Some(path);
        if on_it && verdict != Verdict::Dead && self.goes_on(env, path) {
            return self.beliefs_changed(env);
        }
        let reason = match (verdict, self.gave_up) {
            (Verdict::Alive, Some(status)) if on_it => return self.revive(env, status),
            (Verdict::Dead, Some(status)) if on_it => Reason::QpFailed(status),
            (Verdict::Dead, None) if on_it => Reason::Stall,
            _ => return self.beliefs_changed(env),
        };
        self.suspect(env, reason);
    }

    /// A control message for the QP has come. What follows only from what the directory says now
    /// waits for that ([`Env::peer_word`]).
    pub fn message(&mut self, env: &mut impl Env, message: &Message) {
        let refused =
            matches!(&message.body, Body::Refuse(r) if r.reason == RefuseReason::WrongConnection);
        let (peer, from) = (self.lqp.peer(), message.from);
        // It was reset after we had looked it up, and before it connected to us; or it belongs to
        // an earlier connection.
        let misnamed =
            (refused || from.connection != peer.connection) && from.incarnation == peer.incarnation;
        // We have answered already.
        let unheard = matches!(&message.body, Body::Hello(h) if h.waiting && !h.heard)
            && self.lqp.state() == State::Connected;
        let invited =
            matches!(message.body, Body::Planned(..)) && self.lqp.state() == State::Active;
        if invited {
            self.learn(env);
            self.lqp.set_crowd(env.switching_qps());
        }
        // The peer wants to go to a NIC that it knows to be well.
        let wonders = matches!(message.body, Body::Planned(_, epoch) if invited && self.lqp.liveness(slot_of(epoch)) != Liveness::Alive);
        if misnamed || unheard || wonders {
            // A NIC of the peer that died and was healed has a new endpoint, and what we know is
            // the old one, or that it has none.
            let asks = if misnamed { Asks::Connection } else { Asks::Endpoints };
            let Some(word) = env.peer_word(message, asks) else { return };
            if let (true, Some(connection)) = (misnamed, word.connection) {
                self.lqp.set_peer_connection(connection);
            }
        }
        if wonders {
            self.learn(env);
        }
        if matches!(&message.body, Body::Hello(h) if h.unproven_psn.is_some()) {
            self.lqp.expect_psn(env.app().rq_psn);
        }
        self.lqp.handle_message(env.now_us(), message);
        self.run(env);
    }

    /// The peer's process has ended: one that was killed says no Bye.
    pub fn peer_gone(&mut self, env: &mut impl Env) {
        self.say_bye_for_peer(env);
        match env.progress().outstanding_sends > 0 {
            true => self.suspect(env, self.gave_up.map_or(Reason::Stall, Reason::QpFailed)),
            false => self.run(env),
        }
    }

    /// What is known of NICs or paths has changed.
    pub fn beliefs_changed(&mut self, env: &mut impl Env) {
        self.learn(env);
        self.run(env);
    }

    /// Something may have moved, or a deadline may have passed: to be called at
    /// [`Self::deadline_us`].
    pub fn tick(&mut self, env: &mut impl Env) {
        let (now_us, progress) = (env.now_us(), env.progress());
        if progress.advanced > 0 || progress.executed > 0 {
            self.lqp.handle_progress(now_us, self.lqp.epoch());
        }
        self.look_for_report(env, now_us, &progress);
        if self.stopping.is_some_and(|(at_us, _)| at_us <= now_us) {
            self.quiesce(env);
        }
        if self.fence.is_some_and(|f| f.look_at_us <= now_us) {
            self.look_at_fence(env.now_us(), &progress);
        }
        if let (true, Some(status)) = (self.revivals.take_due(now_us), self.gave_up) {
            self.suspect(env, self.revivals.reason(status));
        }
        if self.times_out(now_us) {
            if env.peer_has_ended() {
                self.say_bye_for_peer(env);
            }
            // A post that failed may have had another reason than a dead NIC: both ends would
            // refuse the other's path for ever.
            self.learn(env);
            self.lqp.handle_timeout(now_us);
        }
        self.run(env);
    }

    /// Whether the next [`Self::tick`] will find that what is awaited of the peer has not come:
    /// what is known of it is to be read anew before.
    pub fn times_out(&self, now_us: u64) -> bool {
        self.lqp.poll_timeout().is_some_and(|at_us| at_us <= now_us)
    }

    /// Looks at the progress of a QP that nothing is being switched of, by the observer's clock.
    /// Gives its path, too.
    pub fn look(&mut self, clock_us: u64, progress: &Progress) -> Option<(SlotPath, Look)> {
        let path = self.active_path()?;
        // What the application itself holds back (SQD) is not silent.
        let awaited = if progress.resting { 0 } else { progress.outstanding_sends };
        Some((path, self.silence.look(clock_us, awaited, progress.advanced)))
    }

    /// The application ends the connection: tells the peer.
    pub fn close(&mut self, env: &mut impl Env) {
        self.report_now(env);
        self.lqp.close(env.now_us());
        self.run(env);
    }

    // ---- the rest ----

    /// Sets what is believed of every path from what is known of NICs and pairs.
    fn learn(&mut self, env: &impl Env) {
        self.informed = true;
        self.lqp.set_beliefs(env.now_us(), |path| env.liveness(path));
    }

    fn say_bye_for_peer(&mut self, env: &impl Env) {
        let bye = Message { from: self.lqp.peer(), to: self.lqp.me(), body: Body::Bye };
        self.lqp.handle_message(env.now_us(), &bye);
    }

    fn look_for_report(&mut self, env: &mut impl Env, now_us: u64, progress: &Progress) {
        let epoch = self.lqp.epoch();
        let Some(p) = &mut self.pending else { return };
        let moved = progress.first_moved_us.filter(|_| p.switched.epoch == epoch);
        if moved.is_some()
            || now_us > p.switched.started_us + REPORT_WAIT_US
            || p.switched.epoch != epoch
        {
            self.report_pending(env, moved);
        } else if p.look_at_us <= now_us {
            p.look_us = (2 * p.look_us).min(REPORT_LOOK_MAX_US);
            p.look_at_us = now_us + p.look_us;
        }
    }

    /// Reports the switch that is not reported yet, if there is one: the QP, or the process, ends.
    pub fn report_now(&mut self, env: &mut impl Env) {
        if self.pending.as_ref().is_some_and(|p| !p.reported) {
            let moved = env.progress().first_moved_us;
            self.report_pending(env, moved);
        }
    }

    fn report_pending(&mut self, env: &mut impl Env, moved_us: Option<u64>) {
        let Some(Pending { switched, replay, reported, .. }) = self.pending.take() else { return };
        if !reported {
            self.report(env, switched, replay, moved_us.unwrap_or(switched.started_us));
        }
    }

    fn report(&mut self, env: &mut impl Env, switched: Switched, replay: Replay, moved_us: u64) {
        self.pending = None;
        env.switched(&self.lqp, &Switch { switched, replay, moved_us });
    }

    /// Does what the state machine asks until it asks nothing.
    fn run(&mut self, env: &mut impl Env) {
        self.run_from(env, None);
    }

    /// The same where it is known how far the physical QP is, of which all sends are announced.
    fn run_from(&mut self, env: &mut impl Env, mut known: Option<Progress>) {
        for _ in 0..MAX_ACTIONS {
            let Some(action) = self.lqp.poll_action() else { break };
            match action {
                Action::Fence { .. } => {
                    env.announce();
                    self.insist(env, true);
                    self.held.get_or_insert_with(Held::default);
                    let progress = known.take().unwrap_or_else(|| env.progress());
                    let now_us = env.now_us();
                    let (advanced, outstanding) = (progress.advanced, progress.outstanding_sends);
                    self.fence = Some(Fence {
                        advanced,
                        outstanding,
                        look_at_us: now_us,
                        look_us: FENCE_LOOK_US,
                        moved_us: now_us,
                    });
                    self.look_at_fence(now_us, &progress);
                }
                Action::Release { .. } => self.release(env),
                Action::Quiesce { .. } => self.quiesce(env),
                Action::Open { epoch, slot } => self.open(env, epoch, slot),
                Action::Send { message, via } => {
                    // One that cannot leave is a lost message: what matters is repeated, over the
                    // next path.
                    if let Some(path) = self.lqp.slots().get(via) {
                        env.send(&message, path);
                    }
                }
                Action::CheckReplay { epoch, peer_done } => {
                    let breaks =
                        self.held.as_ref().is_some_and(|h| h.work.unsafe_to_replay(peer_done));
                    let safe = !breaks || left_out!(self.lqp.mutation(), NoCheck);
                    self.lqp.handle_check(env.now_us(), epoch, safe);
                }
                Action::Connect { epoch: _, peer_qpn, sq_psn, rq_psn, mtu, peer_done } => {
                    self.replay = self
                        .held
                        .as_mut()
                        .map(|h| h.work.mark_executed(peer_done))
                        .unwrap_or_default();
                    self.sq_psn = sq_psn;
                    let app = env.app();
                    let rtr = RcModify {
                        state: Some(QpState::Rtr),
                        dest_qpn: Some(peer_qpn),
                        rq_psn: Some(rq_psn),
                        mtu: Some(mtu),
                        min_rnr_timer: app.min_rnr_timer,
                        max_dest_rd_atomic: app.max_dest_rd_atomic,
                        ..RcModify::default()
                    };
                    let remote = self.lqp.path().map(|path| path.remote);
                    let done = env.modify(&[rtr], remote);
                    self.step(env, done);
                }
                // A step before it was refused, so that the QP has left the path already.
                Action::Start { .. } | Action::Report(_) if self.lqp.state() != State::Active => {}
                Action::Start { .. } => self.start(env),
                // It has its error already, which came before whatever says so now.
                Action::Fail { .. } if self.has_ended(env.progress().state) => self.end(env),
                Action::Fail { status, cause } => {
                    // The report first: a program that sees its error may be gone before the next
                    // line.
                    env.gives_up(&self.lqp, cause, status);
                    self.fail(env, status);
                }
                Action::Report(switched) => {
                    let (from, to) = (
                        self.lqp.slots().get(switched.from_slot),
                        self.lqp.slots().get(switched.to_slot),
                    );
                    let home = self.lqp.slots().get(0);
                    self.left_home = to != home
                        && (self.left_home || from == home && switched.reason != Reason::Peer);
                    if switched.planned && switched.epochs == 1 && !self.had_waited {
                        self.lqp.switch_is_over();
                        self.report(env, switched, self.replay, switched.started_us);
                        continue;
                    }
                    let (look_at_us, look_us) = (env.now_us() + REPORT_LOOK_US, REPORT_LOOK_US);
                    let progress = env.progress();
                    // What the program holds back, and what nobody will hear of, says nothing of
                    // the path: when the next completion comes is up to the program.
                    let reported = progress.outstanding_sends == 0 || progress.resting;
                    if reported {
                        self.report(env, switched, self.replay, switched.started_us);
                    }
                    let replay = self.replay;
                    self.pending =
                        Some(Pending { switched, replay, reported, look_at_us, look_us });
                }
            }
        }
    }
}
