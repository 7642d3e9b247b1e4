//! Planned switches: both ends stop sending before anybody moves, and replay nothing.

use super::*;

/// What the peer says of a planned switch.
fn planned(executor: &mut Executor, env: &mut Fake, kind: Planned, epoch: u64) {
    let message = Message { from: endpoint(2), to: endpoint(1), body: Body::Planned(kind, epoch) };
    executor.message(env, &message);
}

/// An end that never sends stays in RTR. It, too, leaves a NIC that is drained, and goes home.
#[test]
fn an_end_that_only_receives_can_plan() {
    let (mut e, mut s) = (end(1), Fake::new());
    (s.app.state, s.state, s.recvs) =
        (Some(QpState::Rtr), QpState::Rtr, vec![RecvEntry { wr_id: 5, sges: vec![] }]);
    assert!(e.plan(&mut s, Reason::Drain, ahead));
    planned(&mut e, &mut s, Planned::Drained, 1);
    answer(&mut e, &mut s, 0, true);
    assert_eq!(
        (s.state, e.lqp().state(), s.nic, s.recvs.len()),
        (QpState::Rtr, State::Active, 1, 1)
    );
    (s.app.state, s.state) = (Some(QpState::Init), QpState::Init);
    assert!(!e.plan(&mut s, Reason::Failback, |_| true), "it has no peer yet");
}

#[test]
fn a_planned_switch_waits_for_both_fences_and_replays_nothing() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![SendEntry { opcode: SendOpcode::FetchAdd, started: true, ..write(1) }];
    assert!(e.plan(&mut s, Reason::Drain, ahead));
    assert!(e.holds_sends() && !e.switching());
    assert_eq!(e.hold_sends(&CAPS, || 1, &SendWr { wr_id: 2, ..blank() }), Some(Ok(())));
    planned(&mut e, &mut s, Planned::Drained, 1);
    assert_eq!(s.log, ["refresh"; 0], "an atomic is still on its port_path");
    s.sends.clear();
    s.now_us = e.deadline_us().unwrap();
    e.tick(&mut s);
    assert!(s.sent.iter().any(|m| m.body == Body::Planned(Planned::Drained, 1)));
    answer(&mut e, &mut s, 0, true);
    assert_eq!((s.state, s.nic, s.ids()), (QpState::Rts, 1, vec![2]));
    assert_eq!(s.log, ["quiesce", "open", "rtr", "adopt", "rts"]);
    assert!(!e.holds_sends());
}

#[test]
fn a_fence_that_stands_still_is_cancelled_and_what_was_held_goes_on() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![write(1)];
    assert!(e.plan(&mut s, Reason::Failback, ahead));
    assert_eq!(e.hold_sends(&CAPS, || 1, &SendWr { wr_id: 2, ..blank() }), Some(Ok(())));
    while e.holds_sends() {
        s.now_us = e.deadline_us().unwrap();
        e.tick(&mut s);
    }
    assert!((50_000..60_000).contains(&s.now_us), "{}", s.now_us);
    assert_eq!((s.ids(), e.lqp().state(), e.lqp().epoch()), (vec![1, 2], State::Active, 0));
    assert!(s.sent.iter().any(|m| m.body == Body::Planned(Planned::Cancel, 1)));
    assert!(!e.plan(&mut s, Reason::Failback, ahead), "not at once again");
    // The peer had left on our word? It asks, and is told that nothing comes of this epoch.
    s.sent.clear();
    planned(&mut e, &mut s, Planned::Drained, 1);
    assert_eq!(
        s.sent.iter().map(|m| m.body).collect::<Vec<_>>(),
        [Body::Planned(Planned::Cancel, 1)]
    );
}

#[test]
fn one_that_has_said_drained_goes_on_only_with_the_peers_word() {
    let (mut e, mut s) = (end(1), Fake::new());
    assert!(e.plan(&mut s, Reason::Failback, ahead));
    for _ in 0..20 {
        s.now_us = e.deadline_us().unwrap();
        e.tick(&mut s);
    }
    assert!(e.holds_sends() && s.now_us > 300_000);
    planned(&mut e, &mut s, Planned::Cancel, 1);
    assert_eq!((e.holds_sends(), e.lqp().state()), (false, State::Active));
    // Its path dies instead: a switch like any other.
    s.now_us += 10_000_000;
    assert!(e.plan(&mut s, Reason::Failback, ahead));
    e.hold_sends(&CAPS, || 0, &SendWr { wr_id: 7, ..blank() }).unwrap().unwrap();
    e.suspect(&mut s, Reason::DeviceFatal);
    answer(&mut e, &mut s, 0, true);
    assert_eq!((s.state, s.ids()), (QpState::Rts, vec![7]));
}

/// The peer's NIC died and was healed, and this end has not looked since: it looks before it
/// declines.
#[test]
fn an_invitation_is_not_declined_by_old_news() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.works[1] = false;
    e.beliefs_changed(&mut s);
    s.healed = true;
    planned(&mut e, &mut s, Planned::Propose, 1);
    assert!(e.holds_sends(), "it follows: {:?}", s.sent);
    assert_eq!(s.log, ["read"]);
    // To a path that is believed alive nothing need be read.
    let (mut e, mut s) = (end(1), Fake::new());
    planned(&mut e, &mut s, Planned::Propose, 1);
    assert_eq!((e.holds_sends(), s.log.len()), (true, 0), "{:?}", s.log);
}

/// The same where reading the directory takes time: nothing is said before it was read, and the
/// invitation is followed then.
#[test]
fn an_invitation_waits_for_the_directory() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.works[1] = false;
    e.beliefs_changed(&mut s);
    (s.healed, s.slow) = (true, true);
    planned(&mut e, &mut s, Planned::Propose, 1);
    assert!(!e.holds_sends() && s.sent.is_empty(), "{:?}", s.sent);
    s.slow = false;
    let (message, asks) = s.again.take().expect("it is to be read");
    assert_eq!(asks, Asks::Endpoints);
    e.message(&mut s, &message);
    assert!(e.holds_sends(), "it follows: {:?}", s.sent);
}
