//! Which end wants back to the first path.

use super::*;

const HOME: SlotPath = SlotPath { local: 0, remote: 0 };

#[test]
fn only_the_end_that_left_wants_back() {
    let (mut e, mut s) = (end(1), Fake::new());
    assert_eq!(e.home(), None);
    e.suspect(&mut s, Reason::Stall);
    answer(&mut e, &mut s, 0, true);
    assert_eq!(e.home(), Some(HOME));
    // The peer has it leave the next path; it is still this end that wants back.
    let message = is_in(&e, e.lqp().epoch() + 3);
    e.message(&mut s, &message);
    let at_home = e.lqp().path() == Some(HOME);
    assert_eq!((e.lqp().state(), at_home), (State::Active, true), "slot 4 is the first path again");
    assert_eq!(e.home(), None);
    let message = is_in(&e, e.lqp().epoch() + 1);
    e.message(&mut s, &message);
    assert_eq!((e.lqp().state(), e.home()), (State::Active, None), "the peer had it leave");
}

/// Over the new path the peer's Hello may come before its Drained over the old one. Whose wish it
/// was stays as it is, and since when.
#[test]
fn a_hello_that_overtakes_drained_does_not_make_a_plan_the_peers() {
    for (sends, planned, home) in [(0, true, Some(HOME)), (1, false, None)] {
        let (mut e, mut s) = (end(1), Fake::new());
        s.sends = (0..sends).map(write).collect();
        assert!(e.plan(&mut s, Reason::Drain, ahead));
        let epoch = e.lqp().planned_epoch().expect("it is prepared");
        s.now_us += 300;
        let message = is_in(&e, epoch);
        e.message(&mut s, &message);
        let done = e
            .pending
            .as_ref()
            .map(|p| p.switched)
            .or(s.done.map(|d| d.switched))
            .expect("it is there");
        let expected =
            if planned { (true, Reason::Drain, 1_000) } else { (false, Reason::Peer, 1_300) };
        assert_eq!(
            (done.planned, done.reason, done.detected_us),
            expected,
            "{sends} on their port_path"
        );
        assert_eq!(
            (e.lqp().state(), e.home()),
            (State::Active, home),
            "{sends} on their port_path"
        );
    }
}
