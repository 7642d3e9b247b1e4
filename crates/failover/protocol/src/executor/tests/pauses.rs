//! How long it is before a planned switch is tried again that was cancelled.

use super::*;

/// Plans until the fence is cancelled, since its send does not complete.
fn cancelled(e: &mut Executor, s: &mut Fake) {
    assert!(e.plan(s, Reason::Failback, ahead), "at {} µs", s.now_us);
    while e.holds_sends() {
        s.now_us = e.deadline_us().unwrap();
        e.tick(s);
    }
}

#[test]
fn the_pause_doubles_up_to_ten_seconds_and_a_switch_ends_it() {
    let (mut e, mut s) = (end(1), Fake::new());
    s.sends = vec![write(1)];
    for pause_ms in [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000] {
        cancelled(&mut e, &mut s);
        s.now_us += pause_ms * 1_000 - 1;
        assert!(!e.plan(&mut s, Reason::Failback, ahead), "before {pause_ms} ms are over");
        s.now_us += 1;
    }
    e.suspect(&mut s, Reason::DeviceFatal);
    answer(&mut e, &mut s, 0, true);
    assert_eq!(e.lqp().state(), State::Active);
    s.now_us += 10_000_000;
    cancelled(&mut e, &mut s);
    s.now_us += 100_000;
    cancelled(&mut e, &mut s);
}
