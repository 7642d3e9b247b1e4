//! When a switch is done, and is said to be.

use super::*;

/// A planned switch without sends that wait for it is done when the QP takes sends again; with
/// such, and where a path has failed, when something moves.
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
        let at_once = planned && held == 0;
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
