//! How a life of the physical QP ends, and how the next begins: stopped, opened, started, or given
//! up.

use super::held::Held;
use super::{Ended, Env, Executor, StepError};
use crate::action::{FailCause, OpenError, QuiesceError, Quiesced, Reason};
use crate::mutants::left_out;
use crate::silence::Silence;
use crate::slots::Liveness;
use unbroken_types::{Backlog, QpState, RcModify, SendOpcode, WcStatus};

/// A physical QP that takes its time to stop is asked so often: first, and at most (it doubles).
const STOP_LOOK_US: u64 = 50;
/// See `STOP_LOOK_US`.
const STOP_LOOK_MAX_US: u64 = 2_000;

impl Executor {
    pub(super) fn quiesce(&mut self, env: &mut impl Env) {
        self.fence = None;
        let progress = env.progress();
        if self.has_ended(progress.state) {
            // Its NIC dies later, or its peer moves. It must not come back to life.
            self.lqp.handle_ended();
            return self.end(env);
        }
        let held = self.held.take().unwrap_or_default();
        let stopping = self.stopping.take();
        let answer = match Self::with_physical(held, env) {
            Ok(work) => {
                let (executed, exact, completed) = (work.executed, work.exact, work.completed);
                let idle = work.sends.is_empty();
                if !idle && completed.all == 0 && self.unanswered(&progress) {
                    self.lqp.set_unproven(env.app().sq_psn);
                }
                let progressed = progress.advanced > 0 || executed.all > 0 || completed.all > 0;
                let outstanding = work.messages();
                let reads = work.sends.first().is_some_and(|send| reads(send.opcode));
                self.held = Some(Held { work, recvs: true });
                // The device has no choice, and the next has none either.
                let own = self.gave_up == Some(WcStatus::LocQpOpErr);
                if own && reads && env.app().max_rd_atomic == Some(0) {
                    return self.lqp.handle_mistake(env.now_us(), FailCause::NoReads);
                }
                Ok(Quiesced { executed, exact, completed, outstanding, progressed, idle })
            }
            Err((work, None)) => {
                // From now on, since the physical QP may not be as far as the application.
                self.held = Some(Held { work, recvs: false });
                let wait_us =
                    stopping.map_or(STOP_LOOK_US, |(_, us)| (2 * us).min(STOP_LOOK_MAX_US));
                self.stopping = Some((env.now_us() + wait_us, wait_us));
                return;
            }
            Err((work, Some(e))) => {
                self.held = Held::later(work);
                if self.has_ended(env.progress().state) {
                    // The reason of the flushes was told last.
                    self.lqp.handle_ended();
                    return self.end(env);
                }
                Err(e)
            }
        };
        self.lqp.handle_quiesced(env.now_us(), answer);
    }

    /// What is held and what the physical QP has, which is stopped; its counts are those of the
    /// life that ends. If that cannot be, or not yet (`None`), what was held.
    pub(super) fn with_physical(
        held: Held,
        env: &mut impl Env,
    ) -> Result<Backlog, (Backlog, Option<QuiesceError>)> {
        let work = held.work;
        if held.recvs {
            return Ok(work); // it has been stopped
        }
        match env.quiesce() {
            Ok(Some(mut physical)) => {
                // What is held was posted later.
                physical.append(work);
                Ok(physical)
            }
            Ok(None) => Err((work, None)),
            Err(e) => Err((work, Some(e))),
        }
    }

    pub(super) fn open(&mut self, env: &mut impl Env, epoch: u64, slot: u8) {
        let held = self.held.get_or_insert_with(Held::default);
        let recvs = std::mem::take(&mut held.work.recvs);
        let recvs = Backlog { recvs, ..Backlog::default() };
        let opened = match self.lqp.slots().get(slot) {
            Some(path) => env.open(path, &recvs),
            None => Err(OpenError),
        };
        match opened {
            Ok(_) => {
                held.recvs = false;
                (self.silence, self.gave_up) = (Silence::default(), None);
                (self.went_on, self.insists) = ((0, 0), false);
                self.revivals.begun();
            }
            Err(_) => held.work.recvs = recvs.recvs,
        }
        self.lqp.handle_opened(env.now_us(), epoch, opened);
    }

    /// Lets the new path send, unless the application itself has not come that far.
    pub(super) fn start(&mut self, env: &mut impl Env) {
        let app = env.app();
        self.had_waited = self.held.as_ref().is_some_and(|held| !held.work.sends.is_empty());
        if app.state == Some(QpState::Rtr) {
            self.held = None; // nobody can have posted a send
            return;
        }
        if env.progress().state == QpState::Err && env.nic_works() {
            // The peer has begun already, with a request that ended the connection as it would have
            // on any path.
            return self.end(env);
        }
        let sends = self.held.take().map(|h| h.work).unwrap_or_default();
        if env.adopt(&sends).is_err() {
            self.held = Some(Held { work: sends, recvs: false });
            return self.step(env, Err(StepError));
        }
        let rts = RcModify {
            state: Some(QpState::Rts),
            sq_psn: Some(self.sq_psn),
            timeout: app.timeout,
            retry_cnt: app.retry_cnt,
            rnr_retry: app.rnr_retry,
            max_rd_atomic: app.max_rd_atomic,
            // The application may have changed these since the path was opened.
            min_rnr_timer: app.min_rnr_timer,
            access: app.access,
            ..RcModify::default()
        };
        let sqd = RcModify { state: Some(QpState::Sqd), ..RcModify::default() };
        self.pause.1 = 0;
        let done = match app.state {
            // In one go: what SQD holds back must not leave in between.
            Some(QpState::Sqd) => env.modify(&[rts, sqd], None),
            _ => env.modify(&[rts], None),
        };
        self.step(env, done);
    }

    /// A step on the physical QP was done, or was refused since its NIC just died, too: then the
    /// next path is tried.
    pub(super) fn step(&mut self, env: &mut impl Env, done: Result<(), StepError>) {
        if done.is_err() {
            let now_us = env.now_us();
            if let Some(path) = self.lqp.path() {
                self.lqp.set_path_liveness(now_us, path, Liveness::NoNic);
            }
            self.lqp.suspect(now_us, self.lqp.epoch(), Reason::PostFailed);
        }
    }

    /// Whether an error of the program has ended the physical QP, which is in that state, and not
    /// this executor, which stops a QP to take its work out.
    pub(super) fn has_ended(&self, state: QpState) -> bool {
        let revives = left_out!(self.lqp.mutation(), EndedRevived);
        !revives && state == QpState::Err && !self.held.as_ref().is_some_and(|held| held.recvs)
    }

    /// The physical QP is in ERR by itself: what it did not have yet is flushed, like the rest.
    pub(super) fn end(&mut self, env: &mut impl Env) {
        (self.fence, self.stopping) = (None, None);
        if let Some(held) = self.held.take() {
            env.complete(&held.work, WcStatus::WrFlushErr);
        }
        env.ended(Ended::ByProgram);
    }

    /// Gives the application the original error.
    pub(super) fn fail(&mut self, env: &mut impl Env, status: WcStatus) {
        let held = self.held.take().unwrap_or_default();
        self.stopping = None;
        match Self::with_physical(held, env) {
            Ok(work) => env.complete(&work, status),
            Err((work, _)) => {
                // What the physical QP has is older than what is held.
                let had = env.progress().sends() > 0;
                env.fail(status);
                env.complete(&work, if had { WcStatus::WrFlushErr } else { status });
            }
        }
        env.ended(Ended::GivenUp);
    }
}

/// Whether it counts against `max_rd_atomic`.
fn reads(opcode: SendOpcode) -> bool {
    opcode == SendOpcode::Read || opcode.is_atomic()
}
