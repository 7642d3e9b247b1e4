//! How a QP ends: for want of a peer or of paths, and by what the peer says.

use super::*;

#[test]
fn a_restarted_peer_ends_the_qp_at_once_and_an_unknown_one_after_a_while() {
    let (mut a, _) = pair(2);
    a.0.suspect(0, 0, Reason::Stall);
    a.1.drive(0, &mut a.0);
    let hello = a.1.sent[0];
    let mut c = (a.0.clone(), TestEnv::new());
    c.0.handle_message(10, &hello.refusal(77, RefuseReason::WrongIncarnation).unwrap());
    c.1.drive(10, &mut c.0);
    assert_eq!(c.1.failed().unwrap().1, FailCause::PeerClosed);

    let mut now = 0;
    while a.0.state() == State::Waiting {
        now = a.0.poll_timeout().unwrap();
        a.0.handle_timeout(now);
        a.1.drive(now, &mut a.0);
        a.0.handle_message(
            now,
            &hello.refusal(hello.to.incarnation, RefuseReason::UnknownQp).unwrap(),
        );
    }
    assert_eq!(a.1.failed().unwrap().1, FailCause::PeerSilent);
    assert!((1_000_000..1_200_000).contains(&now), "{now}");
}

#[test]
fn a_silent_peer_and_a_lack_of_paths_end_in_the_original_error() {
    for no_path in [false, true] {
        let mut a = (qp(0, 2), TestEnv::new());
        if no_path {
            (0..SLOTS as u8).for_each(|s| a.0.set_belief(0, s, Liveness::NoNic));
        }
        a.0.suspect(0, 0, Reason::QpFailed(WcStatus::RespTimeoutErr));
        a.1.drive(0, &mut a.0);
        let mut now = 0;
        while let Some(at) = a.0.poll_timeout() {
            assert!(at > now);
            now = at;
            a.0.handle_timeout(now);
            a.1.drive(now, &mut a.0);
            assert!(now < 40_000_000);
        }
        assert_eq!(a.1.failed(), Some((WcStatus::RespTimeoutErr, FailCause::PeerSilent)));
    }
}

#[test]
fn a_path_that_comes_up_ends_the_waiting() {
    let (mut a, mut b) = pair(2);
    (0..SLOTS as u8).for_each(|s| a.0.set_belief(0, s, Liveness::NoNic));
    a.0.suspect(0, 0, Reason::PortDown);
    settle(0, &mut a, &mut b);
    assert_eq!(a.0.state(), State::Parked { until_us: None });
    a.0.set_path_liveness(5_000_000, SlotPath { local: 1, remote: 1 }, Liveness::Alive);
    settle(5_000_000, &mut a, &mut b);
    assert_eq!((a.0.state(), slot_of(a.0.epoch())), (State::Active, 1));
}

#[test]
fn without_a_second_path_the_error_comes_at_once() {
    let table = SlotTable::with_default(SlotPath { local: 0, remote: 0 });
    let mut a =
        (LogicalQp::new(endpoint(0), endpoint(1), table, Config::default(), 0), TestEnv::new());
    assert!(!a.0.has_backup());
    a.0.suspect(7, 0, Reason::DeviceFatal);
    a.1.drive(7, &mut a.0);
    assert_eq!(a.1.failed(), Some((WcStatus::FatalErr, FailCause::NoBackup)), "the original one");
    let attempt = a.0.attempt().expect("what is known of the failure");
    assert_eq!((attempt.reason, attempt.detected_us, attempt.epochs), (Reason::DeviceFatal, 7, 0));
}

#[test]
fn paths_that_fail_in_turn_are_tried_more_slowly_and_not_for_ever() {
    let mut a = (qp(0, 2), TestEnv::new());
    let mut now = 0;
    let mut early = 0;
    while a.0.state() != State::Failed {
        a.0.suspect(now, a.0.epoch(), Reason::PostFailed);
        a.1.drive(now, &mut a.0);
        if matches!(a.0.state(), State::Parked { .. }) {
            now = a.0.poll_timeout().unwrap();
            a.0.handle_timeout(now);
            a.1.drive(now, &mut a.0);
        } else {
            early += u32::from(now == 0);
        }
    }
    assert_eq!(early, Config::default().free_epochs);
    assert!(matches!(
        a.1.failed().unwrap().1,
        FailCause::PeerSilent | FailCause::Deadline | FailCause::TooManyEpochs
    ));
    assert!((1_000_000..31_000_000).contains(&now), "{now}");
}

#[test]
fn bye_lets_what_works_finish_and_ends_what_does_not() {
    let (mut a, mut b) = pair(2);
    b.0.close(0);
    settle(0, &mut a, &mut b);
    assert_eq!((a.0.state(), b.0.state()), (State::Active, State::Closed));
    a.0.suspect(1, 0, Reason::QpFailed(WcStatus::RetryExcErr));
    a.1.drive(1, &mut a.0);
    assert_eq!(a.1.failed(), Some((WcStatus::RetryExcErr, FailCause::PeerClosed)));
}

#[test]
fn an_unanswered_question_has_a_deadline() {
    let mut a = qp(0, 2);
    a.suspect(0, 0, Reason::Stall);
    assert_eq!(a.poll_timeout(), Some(Config::default().step_us));
    a.handle_timeout(Config::default().step_us);
    assert_eq!(a.state(), State::Failed);
    let mut b = (qp(0, 2), TestEnv::new());
    b.0.suspect(0, 0, Reason::Stall);
    b.0.handle_quiesced(0, Err(QuiesceError));
    b.1.drive(0, &mut b.0);
    assert_eq!(b.1.failed().unwrap().1, FailCause::CannotQuiesce);
}
