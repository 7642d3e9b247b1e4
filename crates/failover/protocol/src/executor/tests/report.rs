//! When a switch is done, and is said to be.

use super::*;

/// A switch without sends that wait for it is done when the QP takes sends again; with such, when
/// something moves.
#[test]
fn a_switch_is_done_when_what_waited_for_it_moves() {
    for (planned, held) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        let (mut e, mut s) = (end(1), Fake::new());
        match planned {
            true => assert!(e.plan(&mut s, Reason::Drain, ahead)),
            false => e.suspect(&mut s, Reason::Stall),
        }
        for wr_id in 0..held {
            assert_eq!(e.hold_sends(&CAPS, || 0, &SendWr { wr_id, ..blank() }), Some(Ok(())));
        }
        let epoch = e.lqp().planned_epoch().unwrap_or(e.lqp().epoch());
        s.now_us += 300;
        let message = is_in(&e, epoch);
        e.message(&mut s, &message);
        assert_eq!((e.lqp().state(), s.state), (State::Active, QpState::Rts));
        let at_once = held == 0;
        assert_eq!(
            s.done.map(|d| d.moved_us),
            at_once.then_some(1_300),
            "planned: {planned}, {held} held"
        );
        (s.moved_us, s.now_us) = (Some(1_700), 2_000);
        e.tick(&mut s);
        let moved_us = if at_once { 1_300 } else { 1_700 };
        assert_eq!(s.done.map(|d| d.moved_us), Some(moved_us), "planned: {planned}, {held} held");
        assert_eq!(s.log.iter().filter(|step| **step == "switched").count(), 1, "it is said once");
    }
}

/// The switch of a QP with or without work. Gives what was told of it by then.
fn switched_with(sends: Vec<SendEntry>) -> (Executor, Fake) {
    switched_on(sends, false)
}

/// The same on a device that does not tell when sends are complete, if `mute`.
fn switched_on(sends: Vec<SendEntry>, mute: bool) -> (Executor, Fake) {
    let (mut e, mut s) = (end(1), Fake::new());
    (s.sends, s.mute) = (sends, mute);
    s.works[0] = false;
    (s.now_us, s.moved_us) = (1000, None);
    e.suspect(&mut s, Reason::DeviceFatal);
    s.now_us = 1300;
    answer(&mut e, &mut s, 0, false);
    s.now_us = 1400;
    answer(&mut e, &mut s, 0, true);
    assert_eq!(s.state, QpState::Rts);
    (e, s)
}

/// When the program posts next is no part of the switch of an idle QP, and it is reported at once.
/// That of a busy one is over with the first completion, and reported when the QP ends, too.
#[test]
fn a_switch_takes_as_long_as_its_qp_cannot_be_used() {
    let (mut e, mut s) = switched_with(vec![]);
    assert_eq!(s.switches, [(1000, 1400)], "the idle one can be used");
    let (_, mute) = switched_on(vec![write(1)], true);
    assert_eq!(mute.switches, [(1000, 1400)], "nobody will hear of what it has");
    (s.now_us, s.sends, s.moved_us) = (500_000, vec![write(1)], Some(400_000));
    e.tick(&mut s);
    e.close(&mut s);
    assert_eq!(s.switches.len(), 1, "it is told once");
    let (mut e, mut s) = switched_with(vec![write(1)]);
    assert!(s.switches.is_empty());
    (s.now_us, s.moved_us) = (3000, Some(2000));
    e.tick(&mut s);
    assert_eq!(s.switches, [(1000, 2000)]);
    for ends in [Executor::close, Executor::report_now] {
        for (moved_us, done_us) in [(Some(2000), 2000), (None, 1400)] {
            let (mut e, mut s) = switched_with(vec![write(1)]);
            (s.now_us, s.moved_us) = (3000, moved_us);
            ends(&mut e, &mut s);
            ends(&mut e, &mut s);
            assert_eq!(s.switches, [(1000, done_us)]);
        }
    }
}
