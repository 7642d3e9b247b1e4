//! A switch that comes to nothing ends, though the peer goes on talking.

use super::*;

/// The limit of docs/guide/failover.md.
const LONGEST_US: u64 = 30_000_000;

/// The peer's old Hello comes again and again, so it is not silent, and the switch never gets on.
#[test]
fn a_switch_ends_by_its_deadline_whatever_the_peer_says() {
    let (mut a, mut b) = pair(2);
    a.0.suspect(0, 0, Reason::QpFailed(WcStatus::RetryExcErr));
    a.1.drive(0, &mut a.0);
    a.1.sent.iter().for_each(|message| b.0.handle_message(0, message));
    b.1.drive(0, &mut b.0);
    let old = *b.1.sent.last().expect("it follows");
    a.0.suspect(0, a.0.epoch(), Reason::PostFailed);
    a.1.drive(0, &mut a.0);
    let mut now = 0;
    while a.0.state() != State::Failed {
        now = a.0.poll_timeout().expect("a switch has a deadline").max(now + 1);
        assert!(now <= LONGEST_US, "it goes on");
        a.0.handle_message(now, &old);
        a.0.handle_timeout(now);
        a.1.drive(now, &mut a.0);
    }
    assert_eq!(a.1.failed(), Some((WcStatus::RetryExcErr, FailCause::Deadline)));
    assert_eq!(now, LONGEST_US, "and not before");
    assert!(a.0.counters().stale_hellos > 100, "the peer was heard");
}
