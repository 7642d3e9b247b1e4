//! Tests of [`LogicalQp`]: single rules by hand. All of them together are explored by
//! `tests/model`, and played over real transport state machines by the simulator (crate `sim`).

mod deadline;
mod endings;
mod knowledge;

use super::*;
use crate::action::{Action, FailCause};
use crate::message::{Body, Message};
use crate::slots::slot_of;
use unbroken_types::PeerDone;

fn endpoint(n: u8) -> Endpoint {
    Endpoint {
        gid: unbroken_types::Gid([n; 16]),
        qpn: 0x10 + u32::from(n),
        incarnation: 1_000 + u64::from(n),
        connection: 0,
    }
}

fn qp(n: u8, rails: u8) -> LogicalQp {
    let path = SlotPath { local: 0, remote: 0 };
    let table = SlotTable::new(path, rails, rails, n == 0);
    let mut q = LogicalQp::new(endpoint(n), endpoint(1 - n), table, Config::default(), 0);
    for s in 0..SLOTS as u8 {
        q.set_belief(0, s, Liveness::Alive);
    }
    q
}

/// Answers every question of an end as softnic would, and collects messages and notices.
#[derive(Default)]
struct TestEnv {
    sent: Vec<Message>,
    log: Vec<Action>,
    life: Quiesced,
    safe: bool,
    next_qpn: u32,
}

impl TestEnv {
    fn new() -> TestEnv {
        TestEnv { safe: true, next_qpn: 0x100, ..TestEnv::default() }
    }

    fn drive(&mut self, now: u64, q: &mut LogicalQp) {
        while let Some(a) = q.poll_action() {
            match &a {
                Action::Quiesce { .. } => {
                    q.handle_quiesced(now, Ok(core::mem::take(&mut self.life)))
                }
                Action::Open { epoch, .. } => {
                    self.next_qpn += 1;
                    q.handle_opened(
                        now,
                        *epoch,
                        Ok(Opened {
                            qpn: self.next_qpn,
                            psn: self.next_qpn * 7,
                            mtu: Mtu::B4096,
                            key_set: 0,
                        }),
                    );
                }
                Action::CheckReplay { epoch, .. } => q.handle_check(now, *epoch, self.safe),
                Action::Fence { .. } => q.handle_fence(now, false, false),
                Action::Send { message, .. } => self.sent.push(*message),
                _ => {}
            }
            self.log.push(a);
        }
    }

    fn hello(&self) -> Hello {
        match self.sent.last().expect("something was sent").body {
            Body::Hello(h) => h,
            other => panic!("{other:?}"),
        }
    }

    fn failed(&self) -> Option<(WcStatus, FailCause)> {
        self.log.iter().find_map(|a| match a {
            Action::Fail { status, cause } => Some((*status, *cause)),
            _ => None,
        })
    }

    fn count(&self, f: impl Fn(&Action) -> bool) -> usize {
        self.log.iter().filter(|a| f(a)).count()
    }
}

/// Both ends; delivers everything until nothing is left.
fn settle(now: u64, a: &mut (LogicalQp, TestEnv), b: &mut (LogicalQp, TestEnv)) {
    for _ in 0..100 {
        a.1.drive(now, &mut a.0);
        b.1.drive(now, &mut b.0);
        let (from_a, from_b) = (core::mem::take(&mut a.1.sent), core::mem::take(&mut b.1.sent));
        if from_a.is_empty() && from_b.is_empty() {
            return;
        }
        from_a.iter().for_each(|m| b.0.handle_message(now, m));
        from_b.iter().for_each(|m| a.0.handle_message(now, m));
    }
    panic!("the ends talk for ever");
}

fn pair(rails: u8) -> ((LogicalQp, TestEnv), (LogicalQp, TestEnv)) {
    ((qp(0, rails), TestEnv::new()), (qp(1, rails), TestEnv::new()))
}

#[test]
fn one_end_switches_and_the_other_follows_with_few_messages() {
    let (mut a, mut b) = pair(2);
    a.1.life = Quiesced {
        executed: Messages::writes(3),
        completed: Messages::writes(5),
        outstanding: Messages::writes(4),
        progressed: true,
        idle: false,
        exact: true,
    };
    b.1.life = Quiesced {
        executed: Messages::writes(7),
        completed: Messages::writes(3),
        outstanding: Messages::writes(0),
        progressed: true,
        idle: false,
        exact: true,
    };
    a.0.suspect(100, 0, Reason::DeviceFatal);
    settle(100, &mut a, &mut b);
    assert_eq!(
        (a.0.state(), b.0.state(), a.0.epoch(), b.0.epoch()),
        (State::Active, State::Active, 1, 1)
    );
    assert_eq!(a.0.counters().hellos_sent + b.0.counters().hellos_sent, 3);
    let connect = |s: &TestEnv| match s.log.iter().find(|x| matches!(x, Action::Connect { .. })) {
        Some(Action::Connect { peer_done, sq_psn, rq_psn, .. }) => (*peer_done, *sq_psn, *rq_psn),
        _ => panic!("not connected"),
    };
    let (ca, cb) = (connect(&a.1), connect(&b.1));
    assert_eq!((ca.0, cb.0), (PeerDone::Messages(2), PeerDone::Messages(0)));
    assert_eq!((ca.1, ca.2), (cb.2, cb.1), "each expects the PSN that the other sends");
    let Some(Action::Report(r)) = a.1.log.iter().find(|x| matches!(x, Action::Report(_))) else {
        panic!()
    };
    assert_eq!((r.from_slot, r.to_slot, r.detected_us, r.epochs), (0, 1, 100, 1));
    assert_eq!(r.on_path_since_us, 0, "when it was connected");
    a.1.life = Quiesced {
        completed: Messages::writes(6),
        progressed: true,
        exact: true,
        ..Quiesced::default()
    };
    b.1.life = Quiesced {
        executed: Messages::writes(4),
        progressed: true,
        exact: true,
        ..Quiesced::default()
    };
    a.0.suspect(300, 1, Reason::Stall);
    settle(300, &mut a, &mut b);
    let Some(Action::Report(r)) = a.1.log.iter().rfind(|x| matches!(x, Action::Report(_))) else {
        panic!()
    };
    assert_eq!((r.on_path_since_us, r.detected_us), (100, 300), "when it began to send there");
}

#[test]
fn both_at_once_and_from_different_beliefs() {
    for dead_at_a in 0..3u8 {
        for dead_at_b in 0..3u8 {
            let (mut a, mut b) = pair(3);
            for (q, dead) in [(&mut a.0, dead_at_a), (&mut b.0, dead_at_b)] {
                for s in 0..SLOTS as u8 {
                    if q.slots().get(s).unwrap().local == dead {
                        q.set_belief(0, s, Liveness::NoNic);
                    }
                }
                q.suspect(0, 0, Reason::QpFailed(WcStatus::RetryExcErr));
            }
            settle(0, &mut a, &mut b);
            assert_eq!(
                (a.0.state(), b.0.state()),
                (State::Active, State::Active),
                "{dead_at_a} {dead_at_b}"
            );
            assert_eq!(a.0.epoch(), b.0.epoch());
            assert_ne!(a.0.liveness(a.0.slot()), Liveness::NoNic);
            assert_ne!(b.0.liveness(b.0.slot()), Liveness::NoNic);
        }
    }
}

#[test]
fn sending_waits_until_the_peer_is_ready_and_has_found_it_safe() {
    let (mut a, mut b) = pair(2);
    b.1.safe = false;
    a.1.life = Quiesced { outstanding: Messages::writes(1), exact: true, ..Quiesced::default() };
    a.0.suspect(0, 0, Reason::QpFailed(WcStatus::RetryExcErr));
    settle(0, &mut a, &mut b);
    assert_eq!(a.1.failed().unwrap().0, WcStatus::RetryExcErr);
    assert_eq!(b.1.failed().unwrap().1, FailCause::UnsafeReplay);
    assert_eq!(a.1.count(|x| matches!(x, Action::Start { .. })), 0);
}

#[test]
fn hello_is_repeated_over_all_living_paths_with_back_off_until_heard() {
    let (mut a, mut b) = pair(3);
    a.0.suspect(0, 0, Reason::Stall);
    a.1.drive(0, &mut a.0);
    let (mut now, mut vias, mut times) = (0, Vec::new(), Vec::new());
    while now < 500_000 {
        now = a.0.poll_timeout().unwrap();
        a.0.handle_timeout(now);
        a.1.drive(now, &mut a.0);
        times.push(now);
        let Some(Action::Send { via, .. }) = a.1.log.last() else { panic!() };
        vias.push(a.0.slots().get(*via).unwrap());
    }
    assert_eq!(times[..4], [300, 900, 2_100, 4_500]);
    vias.truncate(9);
    vias.sort();
    vias.dedup();
    assert_eq!(vias.len(), 9, "every pair of three NICs each is tried in turn");
    settle(now, &mut a, &mut b);
    assert_eq!((a.0.state(), a.0.poll_timeout()), (State::Active, None));
}

/// While hundreds of QPs leave a NIC that works, a peer that is asked again every 300 µs answers
/// nothing else.
#[test]
fn a_planned_switch_repeats_what_it_says_without_haste() {
    let (mut a, mut b) = pair(2);
    assert!(a.0.plan(0, Reason::Drain, |to| to.local == 1));
    a.1.drive(0, &mut a.0);
    assert_eq!((core::mem::take(&mut a.1.sent).len(), a.0.poll_timeout()), (1, Some(5_000)));
    a.0.handle_timeout(5_000);
    settle(5_000, &mut a, &mut b);
    for end in [&mut a, &mut b] {
        end.0.handle_fence(6_000, true, true);
        end.1.drive(6_000, &mut end.0);
        assert_eq!(end.0.poll_timeout(), Some(11_000), "Drained is lost, and said again");
    }
    let said = core::mem::take(&mut a.1.sent);
    said.iter().for_each(|m| b.0.handle_message(7_000, m));
    b.1.drive(7_000, &mut b.0);
    assert_eq!(
        (b.0.state(), b.0.poll_timeout()),
        (State::Waiting, Some(12_000)),
        "so is the Hello"
    );
    b.0.suspect(8_000, b.0.epoch(), Reason::Stall);
    b.1.drive(8_000, &mut b.0);
    assert_eq!(b.0.poll_timeout(), Some(8_300), "a path that fails meanwhile is left as ever");
    settle(8_000, &mut a, &mut b);
    assert_eq!((a.0.state(), b.0.state()), (State::Active, State::Active));
    // The more there are, the longer the peer takes.
    for (qps, repeated_us) in [(100, 15_000), (5_000, 50_000)] {
        let (mut a, _) = pair(2);
        a.0.set_crowd(qps);
        assert!(a.0.plan(0, Reason::Drain, |to| to.local == 1));
        assert_eq!(a.0.poll_timeout(), Some(repeated_us));
    }
}

#[test]
fn a_lost_heard_is_repaired_by_repetition_or_by_data() {
    for by_data in [false, true] {
        let (mut a, mut b) = pair(2);
        a.0.suspect(0, 0, Reason::Stall);
        a.1.drive(0, &mut a.0);
        b.0.handle_message(0, &a.1.sent.pop().unwrap());
        b.1.drive(0, &mut b.0);
        a.0.handle_message(0, &b.1.sent.pop().unwrap());
        a.1.drive(0, &mut a.0);
        assert!(a.1.hello().heard && !a.1.hello().waiting);
        a.1.sent.clear(); // lost
        assert_eq!((a.0.state(), b.0.state()), (State::Active, State::Connected));
        if by_data {
            b.0.handle_progress(10, 0);
            assert_eq!(b.0.state(), State::Connected, "of another epoch");
            b.0.handle_progress(10, 1);
        } else {
            let at = b.0.poll_timeout().unwrap();
            b.0.handle_timeout(at);
            settle(at, &mut a, &mut b);
        }
        assert_eq!(b.0.state(), State::Active);
    }
}

/// A peer that counts receives only: what is behind the last of them is not known to have run, and
/// what is before it is.
#[test]
fn a_peer_that_counts_receives_only_is_believed_that_far() {
    let count = |all, receives| Messages { all, receives };
    let (mut a, mut b) = pair(2);
    // Of a's ten messages, four with receives: six with two completed; b has consumed three, and
    // counts nothing else.
    a.1.life = Quiesced {
        completed: count(6, 2),
        outstanding: count(4, 2),
        exact: true,
        ..Quiesced::default()
    };
    b.1.life = Quiesced { executed: count(3, 3), exact: false, ..Quiesced::default() };
    a.0.suspect(0, 0, Reason::Stall);
    settle(0, &mut a, &mut b);
    let done = |s: &TestEnv| {
        s.log.iter().find_map(|x| match x {
            Action::Connect { peer_done, .. } => Some(*peer_done),
            _ => None,
        })
    };
    assert_eq!(
        (done(&a.1), done(&b.1)),
        (Some(PeerDone::Receives(1)), Some(PeerDone::Messages(0)))
    );
    // A receive that a has an acknowledgement for is missing at b.
    let (mut a, mut b) = pair(2);
    a.1.life = Quiesced { completed: count(6, 2), exact: true, ..Quiesced::default() };
    b.1.life = Quiesced { executed: count(1, 1), exact: false, ..Quiesced::default() };
    a.0.suspect(0, 0, Reason::Stall);
    settle(0, &mut a, &mut b);
    let failed = [&a, &b].map(|(q, s)| (q.state(), s.failed().map(|f| f.1)));
    assert!(failed.iter().all(|f| f.0 == State::Failed), "{failed:?}");
    assert!(failed.iter().any(|f| f.1 == Some(FailCause::Inconsistent)), "{failed:?}");
}

#[test]
fn less_executed_than_acknowledged_fails_both_ends() {
    let (mut a, mut b) = pair(2);
    a.1.life = Quiesced { completed: Messages::writes(5), exact: true, ..Quiesced::default() };
    b.1.life = Quiesced { executed: Messages::writes(4), exact: true, ..Quiesced::default() };
    a.0.suspect(0, 0, Reason::PortDown);
    settle(0, &mut a, &mut b);
    assert_eq!(b.1.failed(), Some((WcStatus::RetryExcErr, FailCause::Inconsistent)));
    assert_eq!(a.0.state(), State::Failed);
    assert_eq!(a.1.count(|x| matches!(x, Action::Start { .. })), 0);
}

#[test]
fn impossible_stale_and_foreign_messages_change_nothing() {
    let (mut a, mut b) = pair(2);
    a.0.suspect(0, 0, Reason::Stall);
    a.1.drive(0, &mut a.0);
    let good = a.1.sent[0];
    let Body::Hello(h) = good.body else { panic!() };
    let with = |h: Hello| Message { body: Body::Hello(h), ..good };
    let before = b.0.clone();
    let same = |b: &mut (LogicalQp, TestEnv)| {
        b.1.drive(0, &mut b.0);
        assert_eq!((b.0.state(), b.0.epoch()), (before.state(), before.epoch()));
    };
    for bad in [
        Hello { epoch: 1 << 40, ..h },
        Hello { epoch: 0, ..h },
        Hello { path: SlotPath { local: 0, remote: 1 }, ..h },
    ] {
        b.0.handle_message(0, &with(bad));
        same(&mut b);
    }
    assert_eq!(b.0.counters().impossible, 3);
    let stranger = Endpoint { incarnation: 5, ..good.from };
    b.0.handle_message(0, &Message { from: stranger, ..good });
    same(&mut b);
    assert!(
        matches!(b.1.sent.pop().unwrap().body, Body::Refuse(r) if r.reason == RefuseReason::WrongIncarnation)
    );
    b.0.handle_message(0, &Message { to: Endpoint { qpn: 99, ..good.to }, ..good });
    same(&mut b);
    assert_eq!((b.0.counters().wrong_incarnation, b.0.counters().misaddressed), (1, 1));
    // More executed than was ever outstanding: refused, and not believed.
    b.0.handle_message(0, &with(Hello { executed: Messages::writes(17), exact: true, ..h }));
    b.1.drive(0, &mut b.0);
    assert_eq!((b.0.state(), b.0.counters().impossible), (State::Waiting, 4));
    b.1.sent.clear();
    settle(0, &mut a, &mut b);
}

#[test]
fn a_wedged_qp_gets_a_fresh_life_on_the_same_path_and_moves_if_that_is_in_vain() {
    let (mut a, mut b) = pair(2);
    a.1.life = Quiesced { outstanding: Messages::writes(1), exact: true, ..Quiesced::default() };
    a.0.suspect(0, 0, Reason::Wedged(WcStatus::RetryExcErr));
    settle(0, &mut a, &mut b);
    assert_eq!(
        (a.0.state(), b.0.state(), a.0.epoch(), b.0.epoch()),
        (State::Active, State::Active, 2, 2)
    );
    assert_eq!(a.0.path(), Some(SlotPath { local: 0, remote: 0 }));
    for epoch in [2, 4] {
        assert_eq!(a.0.epoch(), epoch);
        a.1.life =
            Quiesced { outstanding: Messages::writes(1), exact: true, ..Quiesced::default() };
        a.0.suspect(10, epoch, Reason::Wedged(WcStatus::RetryExcErr));
        settle(10, &mut a, &mut b);
    }
    assert_eq!((a.0.epoch(), a.0.path()), (5, Some(SlotPath { local: 1, remote: 1 })));
}

#[test]
fn a_message_of_an_earlier_connection_changes_nothing() {
    let (mut a, mut b) = pair(2);
    let old =
        Message { from: a.0.me(), to: Endpoint { connection: 9, ..b.0.me() }, body: Body::Bye };
    b.0.handle_message(0, &old);
    assert_eq!(b.0.counters().wrong_connection, 1);
    a.0.suspect(0, 0, Reason::Stall);
    settle(0, &mut a, &mut b);
    assert_eq!((a.0.state(), b.0.state()), (State::Active, State::Active), "the Bye was not heard");
    // One that knows an older connection of ours is told so, and goes on when it has looked the new
    // one up.
    a.0.set_peer_connection(9);
    a.0.suspect(1, 1, Reason::Stall);
    a.1.drive(1, &mut a.0);
    b.0.handle_message(1, &a.1.sent.pop().unwrap());
    b.1.drive(1, &mut b.0);
    let Body::Refuse(refuse) = b.1.sent.pop().unwrap().body else { panic!() };
    assert_eq!((refuse.reason, b.0.state()), (RefuseReason::WrongConnection, State::Active));
    a.0.set_peer_connection(0);
    let at = a.0.poll_timeout().unwrap();
    a.0.handle_timeout(at);
    settle(at, &mut a, &mut b);
    assert_eq!((a.0.state(), b.0.state()), (State::Active, State::Active));
}

#[test]
fn a_qp_connected_to_itself_switches() {
    let me = endpoint(0);
    let mut a =
        (LogicalQp::new(me, me, SlotTable::to_itself(0, 2), Config::default(), 0), TestEnv::new());
    (0..SLOTS as u8).for_each(|s| a.0.set_belief(0, s, Liveness::Alive));
    a.1.life = Quiesced {
        executed: Messages::writes(2),
        completed: Messages::writes(1),
        outstanding: Messages::writes(3),
        progressed: true,
        idle: false,
        exact: true,
    };
    a.0.suspect(0, 0, Reason::DeviceFatal);
    for _ in 0..10 {
        a.1.drive(0, &mut a.0);
        let sent = core::mem::take(&mut a.1.sent);
        sent.iter().for_each(|m| a.0.handle_message(0, m));
    }
    assert_eq!((a.0.state(), a.0.path()), (State::Active, Some(SlotPath { local: 1, remote: 1 })));
    let Some(Action::Connect { sq_psn, rq_psn, peer_done, .. }) =
        a.1.log.iter().find(|x| matches!(x, Action::Connect { .. }))
    else {
        panic!("not connected")
    };
    assert_eq!((sq_psn, *peer_done), (rq_psn, PeerDone::Messages(1)));
}

#[test]
fn what_an_error_of_the_program_has_ended_stays_ended() {
    let (mut a, mut b) = pair(2);
    a.0.suspect(0, 0, Reason::DeviceFatal);
    assert!(matches!(a.0.poll_action(), Some(Action::Quiesce { .. })));
    a.0.handle_ended();
    settle(0, &mut a, &mut b);
    assert_eq!((a.0.state(), a.1.failed(), a.0.poll_timeout()), (State::Failed, None, None));
    // The peer, which may not have noticed, gets its error when it asks.
    b.0.suspect(1, 0, Reason::Stall);
    settle(1, &mut a, &mut b);
    assert_eq!(
        b.1.failed(),
        Some((WcStatus::RetryExcErr, FailCause::Refused(RefuseReason::Failed)))
    );
}

/// Two idle ends, each of which takes the NIC of the other's choice for dead, pause between epochs.
#[test]
fn idle_ends_that_do_not_agree_on_a_path_do_not_race() {
    let (mut a, mut b) = pair(2);
    a.0.set_path_liveness(0, SlotPath { local: 1, remote: 1 }, Liveness::NoNic);
    b.0.set_path_liveness(0, SlotPath { local: 0, remote: 0 }, Liveness::NoNic);
    for (local, remote) in [(0, 1), (1, 0)] {
        [&mut a.0, &mut b.0]
            .into_iter()
            .for_each(|q| q.set_path_liveness(0, SlotPath { local, remote }, Liveness::NoNic));
    }
    let idle = Quiesced { idle: true, exact: true, ..Quiesced::default() };
    let mut now = 0;
    a.0.suspect(0, 0, Reason::PostFailed);
    while now < 1_000_000 {
        for _ in 0..50 {
            (a.1.life, b.1.life) = (idle, idle);
            a.1.drive(now, &mut a.0);
            b.1.drive(now, &mut b.0);
            let (to_b, to_a) = (a.1.sent.pop(), b.1.sent.pop());
            to_b.into_iter().for_each(|m| b.0.handle_message(now, &m));
            to_a.into_iter().for_each(|m| a.0.handle_message(now, &m));
        }
        now = a.0.poll_timeout().unwrap().min(b.0.poll_timeout().unwrap_or(u64::MAX));
        a.0.handle_timeout(now);
        b.0.handle_timeout(now);
    }
    assert!(a.0.epoch() < 100, "{} epochs in a second", a.0.epoch());
}

/// An explicit map is kept to, and a peer followed all the same.
#[test]
fn a_map_is_kept_to() {
    let only = SlotPath { local: 3, remote: 2 };
    let (mut a, mut b) = pair(4);
    a.0.set_policy(Arc::new(Policy { map: vec![only], ..Policy::default() }));
    a.0.suspect(0, 0, Reason::Stall);
    settle(0, &mut a, &mut b);
    assert_eq!(
        (a.0.path(), b.0.path(), a.0.state()),
        (Some(only), Some(only.mirrored()), State::Active)
    );
    b.0.suspect(1, b.0.epoch(), Reason::Stall);
    settle(1, &mut a, &mut b);
    assert_eq!((a.0.path().map(SlotPath::mirrored), a.0.state()), (b.0.path(), State::Active));
    assert_ne!(a.0.path(), Some(only));
}
