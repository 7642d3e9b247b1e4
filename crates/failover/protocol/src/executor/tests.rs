//! Two executors over shells that only write down what they are asked to do.

use super::*;
use crate::action::{FailCause, OpenError, Opened, QuiesceError};
use crate::config::Config;
use crate::message::{Endpoint, Hello, Planned, Refuse};
use crate::slots::SlotTable;
use crate::Mutation;
use unbroken_types::{
    Backlog, Gid, Messages, Mtu, PostError, QpCaps, RecvEntry, RecvWr, SendEntry, SendFlags,
    SendOpcode, SendWr,
};

mod home;
mod loss;
mod pauses;
mod planned;
mod report;
mod unproven;

const CAPS: QpCaps =
    QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };

/// A physical QP and its surroundings, as lists.
struct Fake {
    now_us: u64,
    state: QpState,
    sends: Vec<SendEntry>,
    recvs: Vec<RecvEntry>,
    app: RcModify,
    /// NICs that work.
    works: Vec<bool>,
    nic: usize,
    can_quiesce: bool,
    /// A transport that has given up can go on.
    can_go_on: bool,
    /// Its path is known to lose some packets.
    loses: bool,
    /// Its device does not tell when sends are complete.
    mute: bool,
    /// It takes until then to stop.
    stops_at_us: u64,
    /// It has then ended by an error of the program.
    ends_by_program: bool,
    refuses: Option<&'static str>,
    qpn: u32,
    sent: Vec<Message>,
    /// Sends that have left, as all do that a QP has when it comes to RTS and stays there.
    left: Vec<u64>,
    wcs: Vec<(u64, WcStatus)>,
    ended: Option<Ended>,
    /// NIC 1 works, as whoever looks again will find.
    healed: bool,
    /// Reading the directory takes time; what is to be handed in again then.
    slow: bool,
    again: Option<(Message, Asks)>,
    /// When something moved in the present life, and the switch that was reported last.
    moved_us: Option<u64>,
    /// The peer has answered a request.
    answered: bool,
    /// When switches were noticed, and done.
    switches: Vec<(u64, u64)>,
    done: Option<Switch>,
    log: Vec<&'static str>,
}

impl Fake {
    fn new() -> Fake {
        Fake {
            now_us: 1_000,
            state: QpState::Rts,
            sends: Vec::new(),
            recvs: Vec::new(),
            app: RcModify { state: Some(QpState::Rts), ..RcModify::default() },
            works: vec![true; 2],
            nic: 0,
            can_quiesce: true,
            can_go_on: true,
            loses: false,
            mute: false,
            stops_at_us: 0,
            ends_by_program: false,
            refuses: None,
            qpn: 100,
            sent: Vec::new(),
            left: Vec::new(),
            wcs: Vec::new(),
            ended: None,
            healed: false,
            slow: false,
            again: None,
            moved_us: None,
            answered: false,
            switches: Vec::new(),
            done: None,
            log: Vec::new(),
        }
    }

    fn take(&mut self, step: &'static str) -> Result<(), StepError> {
        self.log.push(step);
        match self.refuses.take_if(|refused| *refused == step) {
            Some(_) => Err(StepError),
            None => Ok(()),
        }
    }

    fn ids(&self) -> Vec<u64> {
        self.sends.iter().map(|s| s.wr_id).collect()
    }
}

impl Env for Fake {
    fn now_us(&self) -> u64 {
        self.now_us
    }
    fn progress(&self) -> Progress {
        let (all, none) = (self.sends.len() as u32, 0);
        let (outstanding_sends, unannounced_sends) =
            if self.mute { (none, all) } else { (all, none) };
        let (state, first_moved_us) = (self.state, self.moved_us);
        Progress {
            state,
            outstanding_sends,
            unannounced_sends,
            first_moved_us,
            answered: self.answered,
            ..Progress::default()
        }
    }
    fn announce(&mut self) {}
    fn go_on(&mut self, insists: bool) -> bool {
        self.log.push(if insists { "insist" } else { "go on" });
        self.can_go_on && self.state == QpState::Rts
    }
    fn loses(&self, _: SlotPath) -> bool {
        self.loses
    }
    fn nic_works(&self) -> bool {
        self.works[self.nic]
    }
    fn quiesce(&mut self) -> Result<Option<Backlog>, QuiesceError> {
        if !self.can_quiesce {
            return Err(QuiesceError);
        }
        if self.stops_at_us > self.now_us {
            return Ok(None);
        }
        if self.ends_by_program {
            self.state = QpState::Err;
            return Err(QuiesceError);
        }
        self.log.push("quiesce");
        self.state = QpState::Err;
        let (sends, recvs) = (std::mem::take(&mut self.sends), std::mem::take(&mut self.recvs));
        Ok(Some(Backlog { sends, recvs, exact: true, ..Backlog::default() }))
    }
    fn open(&mut self, path: SlotPath, recvs: &Backlog) -> Result<Opened, OpenError> {
        self.take("open").map_err(|_| OpenError)?;
        assert!(recvs.sends.is_empty() && self.sends.is_empty() && self.recvs.is_empty());
        (self.nic, self.state, self.recvs) =
            (path.local.into(), QpState::Init, recvs.recvs.clone());
        self.qpn += 1;
        Ok(Opened { qpn: self.qpn, psn: 7, mtu: Mtu::B1024, key_set: 0 })
    }
    fn adopt(&mut self, sends: &Backlog) -> Result<(), StepError> {
        self.take("adopt")?;
        assert_eq!(self.state, QpState::Rtr, "before it sends");
        self.sends = sends.sends.clone();
        Ok(())
    }
    fn post(&mut self, sends: &Backlog) -> Result<(), StepError> {
        self.take("post")?;
        assert_eq!(self.state, QpState::Rts);
        self.sends.extend(sends.sends.iter().cloned());
        Ok(())
    }
    fn modify(&mut self, changes: &[RcModify], _remote: Option<u8>) -> Result<(), StepError> {
        for change in changes {
            let state = change.state.expect("a state");
            self.take(match state {
                QpState::Rtr => "rtr",
                QpState::Rts => "rts",
                QpState::Sqd => "sqd",
                _ => "other",
            })?;
            self.state = state;
        }
        if self.state == QpState::Rts {
            self.left.extend(self.sends.iter().map(|s| s.wr_id));
        }
        Ok(())
    }
    fn fail(&mut self, status: WcStatus) {
        let mut status = status;
        for s in std::mem::take(&mut self.sends) {
            self.wcs.push((s.wr_id, std::mem::replace(&mut status, WcStatus::WrFlushErr)));
        }
        self.state = QpState::Err;
    }
    fn app(&self) -> RcModify {
        self.app
    }
    fn complete(&mut self, work: &Backlog, first: WcStatus) {
        let mut status = first;
        let ids = work.sends.iter().map(|s| s.wr_id);
        self.wcs.extend(ids.map(|id| (id, std::mem::replace(&mut status, WcStatus::WrFlushErr))));
        self.wcs.extend(work.recvs.iter().map(|r| (r.wr_id, WcStatus::WrFlushErr)));
    }
    fn ended(&mut self, why: Ended) {
        self.ended = Some(why);
    }
    fn switching_qps(&self) -> u32 {
        0
    }
    fn liveness(&self, path: SlotPath) -> Liveness {
        if self.works[usize::from(path.local)] {
            Liveness::Alive
        } else {
            Liveness::NoNic
        }
    }
    fn send(&mut self, message: &Message, _path: SlotPath) {
        self.sent.push(*message);
    }
    fn peer_word(&mut self, message: &Message, asks: Asks) -> Option<PeerWord> {
        self.log.push("read");
        if self.slow {
            self.again = Some((*message, asks));
            return None;
        }
        self.works[1] |= std::mem::take(&mut self.healed);
        Some(PeerWord::default())
    }
    fn peer_has_ended(&self) -> bool {
        false
    }
    fn gives_up(&mut self, _lqp: &LogicalQp, _cause: FailCause, _status: WcStatus) {
        self.log.push("gives up");
    }
    fn switched(&mut self, _lqp: &LogicalQp, done: &Switch) {
        self.log.push("switched");
        self.switches.push((done.switched.detected_us, done.moved_us));
        self.done = Some(*done);
    }
}

fn endpoint(i: usize) -> Endpoint {
    Endpoint { gid: Gid([i as u8; 16]), qpn: i as u32, incarnation: i as u64, connection: 0 }
}

fn end(i: usize) -> Executor {
    let default = SlotPath { local: 0, remote: 0 };
    let table = SlotTable::new(default, 2, 2, i == 1);
    let (me, them) = (endpoint(i), endpoint(3 - i));
    Executor::new(LogicalQp::new(me, them, table, Config::default(), 0))
}

fn write(wr_id: u64) -> SendEntry {
    let wr = SendWr { wr_id, opcode: SendOpcode::Write, flags: SendFlags::SIGNALED, ..blank() };
    SendEntry::from(&wr)
}

fn blank() -> SendWr<'static> {
    SendWr { wr_id: 0, opcode: SendOpcode::Write, flags: SendFlags::SIGNALED, ..SendWr::default() }
}

/// The peer's Hello of that epoch.
fn hello(executor: &Executor, epoch: u64, executed: Messages, heard: bool) -> Message {
    let path = executor.lqp().slots().get((epoch % 64) as u8).expect("a path").mirrored();
    let hello = Hello {
        epoch,
        path,
        fresh_qpn: 55,
        psn: 9,
        mtu: Mtu::B1024,
        key_set: 0,
        heard,
        waiting: !heard,
        executed,
        exact: true,
        completed: Messages::default(),
        unproven_psn: None,
    };
    Message { from: endpoint(2), to: endpoint(1), body: Body::Hello(hello) }
}

/// The peer is in that epoch, and has heard of this end.
fn is_in(e: &Executor, epoch: u64) -> Message {
    hello(e, epoch, Messages::default(), true)
}

/// The peer says that it is in the epoch of what this end has said, has executed so many, and has
/// heard it.
fn answer(executor: &mut Executor, env: &mut Fake, executed: u64, heard: bool) {
    let message = hello(executor, executor.lqp().epoch(), Messages::writes(executed), heard);
    executor.message(env, &message);
}

#[test]
fn work_is_held_between_two_paths_and_given_in_order_to_the_next() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![write(1), write(2)];
    s.recvs = vec![RecvEntry { wr_id: 10, sges: vec![] }];
    assert!(
        e.hold_sends(&CAPS, || 0, &SendWr { wr_id: 3, ..blank() }).is_none(),
        "the physical QP takes it"
    );
    s.works[0] = false;
    e.suspect(&mut s, Reason::DeviceFatal);
    assert_eq!((s.nic, s.state, s.recvs.len(), s.sends.len()), (1, QpState::Init, 1, 0));
    // Receives go to the fresh QP, sends wait until it is known what the peer has executed.
    assert!(e.hold_recv(&CAPS, || 0, &RecvWr { wr_id: 11, sges: &[] }).is_none());
    assert_eq!(e.hold_sends(&CAPS, || 0, &SendWr { wr_id: 3, ..blank() }), Some(Ok(())));
    answer(&mut e, &mut s, 1, false);
    assert_eq!((s.state, s.sends.len()), (QpState::Rtr, 0));
    assert_eq!(e.hold_sends(&CAPS, || 0, &SendWr { wr_id: 4, ..blank() }), Some(Ok(())));
    assert_eq!(
        e.hold_sends(&CAPS, || 0, &SendWr { wr_id: 5, ..blank() }),
        Some(Err(PostError::QueueFull(4)))
    );
    answer(&mut e, &mut s, 1, true);
    assert_eq!((s.state, s.ids()), (QpState::Rts, vec![1, 2, 3, 4]));
    assert_eq!(s.sends.iter().filter(|w| w.executed).map(|w| w.wr_id).collect::<Vec<_>>(), [1]);
    assert!(e.hold_sends(&CAPS, || 0, &SendWr { wr_id: 6, ..blank() }).is_none());
    assert_eq!(s.log, ["quiesce", "open", "rtr", "adopt", "rts"]);
    assert!(s.wcs.is_empty() && s.ended.is_none());
}

/// The NIC of the new path dies at each step: nothing is lost, and the next path is tried.
#[test]
fn a_step_that_is_refused_leads_to_the_next_path() {
    for step in ["open", "rtr", "adopt", "rts"] {
        let (mut e, mut s) = (end(1), Fake::new());
        s.sends = vec![write(1), write(2)];
        s.refuses = Some(step);
        e.suspect(&mut s, Reason::Stall);
        for _ in 0..3 {
            answer(&mut e, &mut s, 1, true);
        }
        assert!(e.lqp().epoch() > 1, "{step}: the first choice was refused");
        assert_eq!((s.state, s.ids()), (QpState::Rts, vec![1, 2]), "{step}");
        assert!(s.wcs.is_empty() && s.ended.is_none(), "{step}");
    }
}

#[test]
fn what_an_error_of_the_program_has_ended_stays_so() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.state = QpState::Err;
    e.suspect(&mut s, Reason::DeviceFatal);
    assert_eq!((s.ended, e.lqp().state()), (Some(Ended::ByProgram), State::Failed));
    // On the new path, before it sends: what it did not have yet is flushed.
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![write(1)];
    e.suspect(&mut s, Reason::Stall);
    answer(&mut e, &mut s, 0, false);
    s.state = QpState::Err;
    answer(&mut e, &mut s, 0, true);
    assert_eq!((s.ended, s.wcs), (Some(Ended::ByProgram), vec![(1, WcStatus::WrFlushErr)]));
}

/// The peer learns of it when it switches, and refuses: the application has its error already, and
/// gets no other.
#[test]
fn a_refusal_says_nothing_new_to_a_qp_that_has_ended() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.state = QpState::Err;
    let refuse = Refuse { reason: RefuseReason::Failed, epoch: 1, refused: 2 };
    e.message(&mut s, &Message { from: endpoint(2), to: endpoint(1), body: Body::Refuse(refuse) });
    assert_eq!((s.ended, e.lqp().state()), (Some(Ended::ByProgram), State::Failed));
    assert!(s.log.is_empty() && s.wcs.is_empty(), "{:?} {:?}", s.log, s.wcs);
}

/// That an error of the program had ended it shows while it is being stopped.
#[test]
fn what_is_found_to_have_ended_while_it_stops_stays_so() {
    for at_once in [true, false] {
        let (mut e, mut s) = (end(1), Fake::new());
        (s.stops_at_us, s.ends_by_program) = (if at_once { 0 } else { 10_000 }, true);
        // Something is held: a planned switch was being prepared.
        s.sends = vec![write(1)];
        assert!(e.plan(&mut s, Reason::Drain, ahead) || e.plan(&mut s, Reason::Drain, ahead));
        assert_eq!(e.hold_sends(&CAPS, || 1, &SendWr { wr_id: 3, ..blank() }), Some(Ok(())));
        e.suspect(&mut s, Reason::Stall);
        if !at_once {
            assert_eq!((e.lqp().state(), s.ended), (State::Quiescing, None));
            (s.now_us, s.state) = (11_000, QpState::Err);
            e.tick(&mut s);
        }
        assert_eq!((s.ended, e.lqp().state()), (Some(Ended::ByProgram), State::Failed));
        assert_eq!((s.wcs, e.deadline_us()), (vec![(3, WcStatus::WrFlushErr)], None));
        assert!(!s.log.contains(&"gives up"), "{:?}", s.log);
    }
}

#[test]
fn a_qp_that_cannot_be_stopped_fails_and_what_waits_is_flushed_behind() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![write(1), write(2)];
    s.can_quiesce = false;
    e.suspect(&mut s, Reason::QpFailed(WcStatus::RetryExcErr));
    assert_eq!(s.wcs, [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!((s.ended, s.log), (Some(Ended::GivenUp), vec!["gives up"]));
}

/// Also where the device has sends of which nobody hears that they are complete, and the error is
/// theirs.
#[test]
fn what_is_held_is_flushed_behind_sends_of_which_nobody_tells() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![write(1)];
    assert!(e.plan(&mut s, Reason::Drain, ahead) || e.plan(&mut s, Reason::Drain, ahead));
    assert_eq!(e.hold_sends(&CAPS, || 1, &SendWr { wr_id: 3, ..blank() }), Some(Ok(())));
    // As one has it that follows its peer's plan; to stop it takes longer than there is time.
    (s.mute, s.can_quiesce) = (true, false);
    let refuse = Refuse { reason: RefuseReason::Failed, epoch: 0, refused: 2 };
    e.message(&mut s, &Message { from: endpoint(2), to: endpoint(1), body: Body::Refuse(refuse) });
    assert_eq!(s.wcs, [(1, WcStatus::RetryExcErr), (3, WcStatus::WrFlushErr)]);
    assert_eq!(s.ended, Some(Ended::GivenUp));
}

#[test]
fn a_qp_that_takes_its_time_to_stop_is_asked_again() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![write(1)];
    s.stops_at_us = 20_000;
    e.suspect(&mut s, Reason::Stall);
    let mut looks = 0;
    while s.log.is_empty() {
        s.now_us = e.deadline_us().expect("it is asked again");
        e.tick(&mut s);
        looks += 1;
    }
    assert!((20_000..25_000).contains(&s.now_us) && looks < 30, "{} us, {looks} looks", s.now_us);
    answer(&mut e, &mut s, 0, true);
    assert_eq!((s.state, s.ids()), (QpState::Rts, vec![1]));
    // One that never stops fails by the deadline of the step.
    let (mut e, mut s) = (end(1), Fake::new());
    (s.sends, s.stops_at_us) = (vec![write(1)], u64::MAX);
    e.suspect(&mut s, Reason::QpFailed(WcStatus::RetryExcErr));
    while s.ended.is_none() {
        s.now_us = e.deadline_us().expect("there is a deadline");
        e.tick(&mut s);
    }
    assert_eq!(s.wcs, [(1, WcStatus::RetryExcErr)]);
    assert!(s.now_us < 6_000_000);
}

#[test]
fn a_request_that_must_not_be_replayed_ends_the_switch_with_the_original_error() {
    let (mut e, mut s) = (end(1), Fake::new());
    let once = |wr_id| {
        let flags = SendFlags::SIGNALED.with(SendFlags::NO_REPLAY);
        SendEntry { flags, started: true, ..write(wr_id) }
    };
    (s.sends, s.recvs) = (vec![once(1), once(2)], vec![RecvEntry { wr_id: 10, sges: vec![] }]);
    e.suspect(&mut s, Reason::QpFailed(WcStatus::RetryExcErr));
    answer(&mut e, &mut s, 1, false);
    let flush = WcStatus::WrFlushErr;
    assert_eq!(s.wcs, [(1, WcStatus::RetryExcErr), (2, flush), (10, flush)]);
    assert!(s.sent.iter().any(|m| matches!(m.body, Body::Refuse(_))), "the peer is told");
}

#[test]
fn closing_gives_all_that_is_outstanding_wherever_it_is() {
    let (mut e, mut s) = (end(1), Fake::new());
    e.close(&mut s);
    assert!(e.take_work(&mut s).is_none(), "the physical QP has it");
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![write(1)];
    s.recvs = vec![RecvEntry { wr_id: 10, sges: vec![] }];
    e.suspect(&mut s, Reason::Stall);
    s.recvs.push(RecvEntry { wr_id: 11, sges: vec![] });
    e.close(&mut s);
    let work = e.take_work(&mut s).expect("between two paths");
    assert_eq!(
        (work.sends.len(), work.recvs.iter().map(|r| r.wr_id).collect::<Vec<_>>()),
        (1, vec![10, 11])
    );
    assert!(s.sent.iter().any(|m| matches!(m.body, Body::Bye)));
}

/// SQD holds sends back on the new path as on the old; that this takes a way by RTS must not let
/// them out.
#[test]
fn what_a_program_holds_back_in_sqd_stays_there_on_the_next_path() {
    for refuses in [None, Some("rts"), Some("sqd")] {
        let (mut e, mut s) = (end(1), Fake::new());
        (s.sends, s.refuses) = (vec![write(1), write(2)], refuses);
        (s.state, s.app.state) = (QpState::Sqd, Some(QpState::Sqd));
        e.suspect(&mut s, Reason::Stall);
        for _ in 0..3 {
            answer(&mut e, &mut s, 0, true);
        }
        assert_eq!((s.state, s.ids(), s.left), (QpState::Sqd, vec![1, 2], vec![]), "{refuses:?}");
        assert_eq!((e.lqp().state(), s.ended), (State::Active, None));
    }
}

/// What the program itself holds back is no silence of the path; what is on its way is.
#[test]
fn a_qp_that_rests_is_not_silent() {
    let (mut e, mut progress) =
        (end(1), Progress { outstanding_sends: 2, resting: true, ..Progress::default() });
    for _ in 0..2 {
        assert_eq!(e.look(5_000_000, &progress).unwrap().1.silent_since_us, None);
    }
    progress.resting = false;
    assert_eq!(e.look(6_000_000, &progress).unwrap().1.silent_since_us, Some(6_000_000));
}

#[test]
fn a_program_that_has_not_come_to_rts_is_not_overtaken() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.app.state = Some(QpState::Rtr);
    e.suspect(&mut s, Reason::Connect);
    answer(&mut e, &mut s, 0, true);
    assert_eq!((s.state, e.lqp().state()), (QpState::Rtr, State::Active));
    assert!(e.hold_sends(&CAPS, || 0, &blank()).is_none());
}

fn ahead(path: SlotPath) -> bool {
    path.local == 1
}
