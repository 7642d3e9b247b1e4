//! Ends that know different things of the paths between them.

use super::*;
use crate::message::{Planned, Refuse};
use crate::Mutation;

/// Two ends of which one sends and finds out which paths carry nothing, while the other is idle and
/// finds out nothing; each knows which of its own NICs are dead. Gives how many paths they tried
/// until they were on one that works.
fn tries_until_they_meet(seed: u64, mutation: Mutation) -> Option<usize> {
    let mut state = seed;
    let mut draw = |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let rails = 2 + draw(3) as u8;
    let (mut a, mut b) = pair(rails);
    // Of each NIC of the end that sends, and of the other: it is well, its cable is cut, or it is
    // dead.
    let nics =
        [0, 1].map(|_| (0..rails).map(|_| [0, 0, 1, 2][draw(4) as usize]).collect::<Vec<_>>());
    let works =
        |path: SlotPath| nics[0][usize::from(path.local)] + nics[1][usize::from(path.remote)] == 0;
    if !a.0.slots().iter().any(|(_, path)| works(path)) {
        return Some(0);
    }
    for (q, own) in [(&mut a.0, &nics[0]), (&mut b.0, &nics[1])] {
        q.config.mutation = mutation;
        q.set_beliefs(0, |path| {
            if own[usize::from(path.local)] == 2 {
                Liveness::NoNic
            } else {
                Liveness::Alive
            }
        });
    }
    let mut now = 0;
    for tries in 1..=3 * usize::from(rails * rails) {
        a.1.life =
            Quiesced { outstanding: Messages::writes(1), exact: true, ..Quiesced::default() };
        b.1.life = Quiesced { idle: true, exact: true, ..Quiesced::default() };
        a.0.suspect(now, a.0.epoch(), Reason::Stall);
        settle(now, &mut a, &mut b);
        while a.0.state() != State::Active || b.0.state() != State::Active {
            now = a.0.poll_timeout().into_iter().chain(b.0.poll_timeout()).min()?; // they have given up
            a.0.handle_timeout(now);
            b.0.handle_timeout(now);
            settle(now, &mut a, &mut b);
        }
        let path = a.0.path().expect("a filled slot");
        if works(path) {
            return Some(tries);
        }
        now += 30_000;
        a.0.set_path_liveness(now, path, Liveness::Silent);
    }
    None
}

#[test]
fn ends_that_know_different_things_meet_on_a_path_that_works_for_both() {
    let tries: Vec<_> =
        (0..3_000).map(|seed| tries_until_they_meet(seed, Mutation::None)).collect();
    let lost: Vec<_> = tries
        .iter()
        .enumerate()
        .filter(|(_, tries)| tries.is_none())
        .map(|(seed, _)| seed)
        .collect();
    assert!(lost.is_empty(), "never: {lost:?}");
    assert!(tries.iter().flatten().any(|tries| *tries > 3), "some need several");
}

/// Without a memory some never meet, and a path that was declined is planned again.
#[test]
fn a_memory_that_is_left_out_is_noticed() {
    let meets = |seed| tries_until_they_meet(seed, Mutation::Forgetful).is_some();
    assert!(!(0..3_000).all(meets));
    let again = SlotPath { local: 0, remote: 0 };
    assert_eq!(second_plan_goes_to(Mutation::Forgetful), Some(again), "nowhere");
}

/// The peer declines the best path, since its NIC there is dead, which we are not told: the next
/// plan is for another.
#[test]
fn a_path_that_the_peer_declines_is_not_planned_again_before_others() {
    assert_eq!(second_plan_goes_to(Mutation::None), Some(SlotPath { local: 2, remote: 2 }));
}

fn second_plan_goes_to(mutation: Mutation) -> Option<SlotPath> {
    let (mut a, mut b) = pair(3);
    (a.0.config.mutation, b.0.config.mutation) = (mutation, mutation);
    b.0.set_beliefs(0, |path| if path.local == 1 { Liveness::NoNic } else { Liveness::Alive });
    let rail = |path: SlotPath| path.local == path.remote && path.local > 0;
    for at_us in [100_000, 200_000] {
        assert!(a.0.plan(at_us, Reason::Drain, rail), "{:?}", a.0.state());
        settle(at_us, &mut a, &mut b);
        for q in [&mut a.0, &mut b.0] {
            q.handle_fence(at_us, true, false);
        }
        settle(at_us, &mut a, &mut b);
        assert_eq!((a.0.state(), b.0.state()), (State::Active, State::Active));
    }
    a.0.path()
}

/// The path that a planned switch leaves is well: it is gone back to where the switch fails on the
/// way.
#[test]
fn what_is_left_by_choice_was_not_tried_in_vain() {
    let (mut a, mut b) = pair(3);
    a.0.suspect(0, 0, Reason::Stall);
    settle(0, &mut a, &mut b);
    for q in [&mut a.0, &mut b.0] {
        q.handle_progress(1, 1);
    }
    let home = SlotPath { local: 0, remote: 0 };
    assert!(a.0.plan(2_000_000, Reason::Failback, |path| path == home));
    settle(2_000_000, &mut a, &mut b);
    a.0.handle_fence(2_000_000, true, false);
    b.0.handle_fence(2_000_000, true, false);
    settle(2_000_000, &mut a, &mut b);
    assert_eq!((a.0.path(), a.0.state()), (Some(home), State::Active));
    a.0.set_path_liveness(2_000_000, home, Liveness::NoNic);
    a.0.suspect(2_000_000, a.0.epoch(), Reason::DeviceFatal);
    settle(2_000_000, &mut a, &mut b);
    assert_eq!((a.0.path(), a.0.state()), (Some(SlotPath { local: 1, remote: 1 }), State::Active));
}

/// Both QPs were reset and connected again. Whatever the earlier connection has said arrives now,
/// late: nothing of it is about this one, be it that our end, the peer's or both were others.
#[test]
fn nothing_that_an_earlier_connection_said_is_about_this_one() {
    let hello = Hello {
        epoch: 1,
        path: SlotPath { local: 1, remote: 1 },
        fresh_qpn: 77,
        psn: 3,
        mtu: Mtu::B1024,
        key_set: 0,
        heard: false,
        waiting: true,
        executed: Messages::default(),
        exact: true,
        completed: Messages::default(),
        unproven_psn: None,
    };
    let refused = endpoint(1).incarnation;
    let refuse = |reason| Body::Refuse(Refuse { reason, epoch: 1, refused });
    use RefuseReason::*;
    let refusals = [
        UnknownQp,
        UnsafeReplay,
        Inconsistent,
        Impossible,
        Failed,
        WrongIncarnation,
        WrongConnection,
    ];
    let planned = [Planned::Propose, Planned::Drained, Planned::Cancel];
    let bodies = refusals
        .map(refuse)
        .into_iter()
        .chain(planned.map(|kind| Body::Planned(kind, 1)))
        .chain([Body::Hello(hello), Body::Bye]);
    for body in bodies {
        for (ours, theirs) in [(3, 0), (0, 3), (3, 3)] {
            let (a, _) = pair(2);
            // Between two paths, where most messages matter.
            for between in [false, true] {
                let mut a = (a.0.clone(), TestEnv::new());
                if between {
                    a.0.suspect(0, 0, Reason::Stall);
                    a.1.drive(0, &mut a.0);
                }
                let before = (a.0.state(), a.0.epoch(), a.0.poll_timeout());
                let from = Endpoint { connection: theirs, ..a.0.peer() };
                let to = Endpoint { connection: ours, ..a.0.me() };
                a.0.handle_message(1, &Message { from, to, body });
                let after = (a.0.state(), a.0.epoch(), a.0.poll_timeout());
                assert_eq!(before, after, "{body:?} of {theirs} to {ours}");
                assert_eq!(a.0.counters().wrong_connection, 1, "{body:?} of {theirs} to {ours}");
            }
        }
    }
}
