//! Paths that live and lose much.

use super::*;

const PATH: SlotPath = SlotPath { local: 0, remote: 0 };

/// Its transport has given up, and its path answers.
fn gives_up(e: &mut Executor, s: &mut Fake) {
    assert_eq!(e.gave_up(s, WcStatus::RetryExcErr), Some(PATH));
    e.verdict(s, PATH, Verdict::Alive);
}

fn end_with(mutation: Mutation) -> (Executor, Fake) {
    let (mut e, mut s) = (end(1), Fake::new());
    let config = Config { mutation, ..Config::default() };
    e.lqp = LogicalQp::new(endpoint(1), endpoint(2), SlotTable::new(PATH, 2, 2, false), config, 0);
    (s.sends, s.moved_us, s.answered, s.loses) = (vec![write(1)], Some(7), true, true);
    (e, s)
}

#[test]
fn a_transport_that_gives_up_where_much_is_lost_goes_on_in_the_same_life() {
    let (mut e, mut s) = end_with(Mutation::None);
    gives_up(&mut e, &mut s);
    assert_eq!((e.lqp().epoch(), e.gave_up_with(), &s.log[..]), (0, None, &["go on"][..]));
    // Not for ever, where nothing moves by that.
    for _ in 0..16 {
        gives_up(&mut e, &mut s);
        if e.lqp().epoch() > 0 {
            break;
        }
    }
    assert!(e.lqp().epoch() > 0, "it is wedged by itself");

    let (mut e, mut s) = end_with(Mutation::None);
    s.loses = false;
    gives_up(&mut e, &mut s);
    assert!(e.lqp().epoch() > 0, "on a path that loses nothing it gets a fresh life");

    let (mut e, mut s) = end_with(Mutation::NeverGoesOn);
    gives_up(&mut e, &mut s);
    assert!(e.lqp().epoch() > 0, "the rule that is left out is noticed");
}

/// A fence over a path that loses much: the transport insists, and gives up no more than the fence
/// allows; when the fence is cancelled it is as before.
#[test]
fn a_fence_where_much_is_lost_insists_until_it_ends() {
    let (mut e, mut s) = end_with(Mutation::None);
    assert!(e.plan(&mut s, Reason::Loss, |to| to != PATH));
    assert_eq!((e.lqp().state(), &s.log[..]), (State::Fencing, &["insist"][..]));
    gives_up(&mut e, &mut s);
    assert_eq!((e.lqp().state(), s.log.last()), (State::Fencing, Some(&"insist")));
    let begun_us = s.now_us;
    while e.lqp().state() == State::Fencing {
        s.now_us = e.deadline_us().unwrap().max(s.now_us + 1);
        e.tick(&mut s);
    }
    let took_us = s.now_us - begun_us;
    assert!((500_000..5_000_000).contains(&took_us), "nothing moves: {took_us} us");
    assert_eq!(e.lqp().state(), State::Active);
    assert_eq!(s.log[s.log.len() - 2..], ["go on", "post"]);
    assert_eq!(e.lqp().epoch(), 0, "nothing was moved, so nothing was replayed");
}
