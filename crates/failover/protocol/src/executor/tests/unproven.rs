//! QPs through which nothing ever came.

use super::*;

const PATH: SlotPath = SlotPath { local: 0, remote: 0 };
/// How often such a QP is looked at, and how many times.
const LOOK_US: u64 = 30_000;
const LOOKS: u64 = 10;

fn unproven(mutation: Mutation) -> Executor {
    let config = Config { mutation, ..Config::default() };
    let table = SlotTable::new(PATH, 2, 2, false);
    Executor::new(LogicalQp::new(endpoint(1), endpoint(2), table, config, 0))
}

/// It stands still, and is looked at; its path is found alive before these looks. Then its
/// transport gives it up, and the path is asked.
fn stands_still(e: &mut Executor, s: &mut Fake, found_before: &[u64], verdict: Verdict) {
    for n in 0..LOOKS {
        if found_before.contains(&n) {
            e.verdict(s, PATH, Verdict::Alive);
        }
        e.look(n * LOOK_US, &s.progress());
    }
    s.now_us = LOOKS * LOOK_US;
    assert!(e.lqp().epoch() == 0 && s.log.is_empty() && s.ended.is_none());
    assert_eq!(e.gave_up(s, WcStatus::RetryExcErr), Some(PATH));
    e.verdict(s, PATH, verdict);
}

/// Gives what has ended such a QP, and whether it was moved. It is on a device whose QPs stop for
/// good.
fn ends(
    mutation: Mutation,
    answered: bool,
    found_before: &[u64],
    verdict: Verdict,
) -> (Option<Ended>, bool) {
    let (mut e, mut s) = (unproven(mutation), Fake::new());
    (s.sends, s.answered, s.can_go_on) = (vec![write(1)], answered, false);
    // What the peer has sent says nothing of this direction.
    s.moved_us = Some(7);
    if !answered && mutation != Mutation::UnprovenRevived {
        // Its own transport has not given up yet.
        e.suspect(&mut s, Reason::Wedged(WcStatus::RetryExcErr));
    }
    stands_still(&mut e, &mut s, found_before, verdict);
    (s.ended, e.lqp().epoch() > 0)
}

const ALWAYS: &[u64] = &[3, 6, 9];
const AT_LAST: &[u64] = &[8, 9];

/// Wrong PSNs or QPNs are mistakes of the program, which a fresh life would hide.
#[test]
fn a_qp_through_which_nothing_ever_came_is_not_revived() {
    let (given_up, moved) = ((Some(Ended::GivenUp), false), (None, true));
    let ends = |answered, found: &[u64], verdict| ends(Mutation::None, answered, found, verdict);
    assert_eq!(ends(false, ALWAYS, Verdict::Alive), given_up);
    assert_eq!(ends(false, ALWAYS, Verdict::Dead), moved, "a NIC that dies early is survived");
    assert_eq!(ends(false, &[], Verdict::Alive), moved, "its path has just come back");
    assert_eq!(ends(false, AT_LAST, Verdict::Alive), moved, "it came back after the last try");
    assert_eq!(ends(false, &[1, 2, 9], Verdict::Alive), moved, "it was away in between");
    assert_eq!(ends(true, ALWAYS, Verdict::Alive), moved);
}

#[test]
fn a_qp_that_is_revived_without_proof_is_noticed() {
    let revived = ends(Mutation::UnprovenRevived, false, ALWAYS, Verdict::Alive);
    assert_eq!(revived, (None, true));
}

#[test]
fn a_qp_that_is_revived_because_its_peer_was_heard_is_noticed() {
    let (mut e, mut s) = (unproven(Mutation::HeardIsProof), Fake::new());
    (s.sends, s.moved_us, s.can_go_on) = (vec![write(1)], Some(7), false);
    stands_still(&mut e, &mut s, ALWAYS, Verdict::Alive);
    assert_eq!((s.ended, e.lqp().epoch() > 0), (None, true));
}

#[test]
fn a_qp_that_is_given_up_for_a_path_that_came_back_late_is_noticed() {
    let given_up = ends(Mutation::AliveOnce, false, AT_LAST, Verdict::Alive);
    assert_eq!(given_up, (Some(Ended::GivenUp), false));
}

/// A transport without retries has sent all of it before anybody asked for the path.
#[test]
fn a_transport_without_retries_proves_nothing() {
    let (mut e, mut s) = (unproven(Mutation::None), Fake::new());
    (s.sends, s.app.retry_cnt, s.can_go_on) = (vec![write(1)], Some(0), false);
    stands_still(&mut e, &mut s, ALWAYS, Verdict::Alive);
    assert_eq!((s.ended, e.lqp().epoch() > 0), (None, true));
}

/// ... where it cannot go on. Where it can, it sends again, in the same life, on a path that is
/// found alive before and after, until that is proof enough.
#[test]
fn a_transport_that_goes_on_in_vain_proves_it() {
    for found_before in [&[], ALWAYS] {
        let (mut e, mut s) = (unproven(Mutation::None), Fake::new());
        (s.sends, s.app.retry_cnt) = (vec![write(1)], Some(0));
        for n in 0..LOOKS {
            if found_before.contains(&n) {
                e.verdict(&mut s, PATH, Verdict::Alive);
            }
            e.look(n * LOOK_US, &s.progress());
        }
        // However fast it gives up: a peer that is about to switch needs its time to say so.
        for n in 0..10 * u64::from(PROOFS) {
            s.now_us = LOOKS * LOOK_US + n * PROOF_US / (10 * u64::from(PROOFS));
            assert_eq!(e.gave_up(&mut s, WcStatus::RetryExcErr), Some(PATH));
            e.verdict(&mut s, PATH, Verdict::Alive);
            assert_eq!((s.ended, s.log.pop()), (None, Some("go on")));
        }
        s.now_us = LOOKS * LOOK_US + PROOF_US;
        e.gave_up(&mut s, WcStatus::RetryExcErr);
        e.verdict(&mut s, PATH, Verdict::Alive);
        assert_eq!((s.ended, e.lqp().epoch()), (Some(Ended::GivenUp), 0));
    }
    // A path that has just come back has its chance.
    let (mut e, mut s) = (unproven(Mutation::None), Fake::new());
    s.sends = vec![write(1)];
    e.gave_up(&mut s, WcStatus::RetryExcErr);
    e.verdict(&mut s, PATH, Verdict::Alive);
    s.answered = true;
    e.gave_up(&mut s, WcStatus::RetryExcErr);
    e.verdict(&mut s, PATH, Verdict::Alive);
    assert_eq!((s.ended, e.lqp().epoch() > 0), (None, true), "it has worked: it is revived");
}

/// Nobody asks a path that others show to live.
#[test]
fn a_path_that_others_use_is_known_to_live_without_a_question() {
    let (mut e, mut s) = (unproven(Mutation::None), Fake::new());
    s.sends = vec![write(1)];
    for n in 0..LOOKS {
        e.look(n * LOOK_US, &s.progress());
        e.path_lives(PATH);
    }
    s.now_us = LOOKS * LOOK_US;
    assert_eq!(e.gave_up(&mut s, WcStatus::RetryExcErr), Some(PATH));
    e.verdict(&mut s, PATH, Verdict::Alive);
    assert_eq!((s.ended, e.lqp().epoch()), (Some(Ended::GivenUp), 0));
}

/// The peer may have receives only: it would wait for ever.
#[test]
fn the_peer_of_a_qp_that_is_given_up_ends_too() {
    let (mut e, mut s) = (unproven(Mutation::None), Fake::new());
    s.sends = vec![write(1)];
    stands_still(&mut e, &mut s, ALWAYS, Verdict::Alive);
    let refused = |m: &&Message| matches!(m.body, Body::Refuse(_));
    let told = *s.sent.iter().find(refused).expect("the peer is told");
    let table = SlotTable::new(PATH, 2, 2, false);
    let lqp = LogicalQp::new(endpoint(2), endpoint(1), table, Config::default(), 0);
    let (mut peer, mut its) = (Executor::new(lqp), Fake::new());
    its.recvs = vec![RecvEntry { wr_id: 5, sges: vec![] }];
    peer.message(&mut its, &told);
    assert_eq!((its.ended, peer.lqp().state()), (Some(Ended::GivenUp), State::Failed));
    // One of an earlier connection, or of somebody else, says nothing.
    let mut other = told;
    other.from.qpn += 1;
    let mut earlier = told;
    earlier.to.connection += 1;
    for message in [other, earlier] {
        let lqp = peer.lqp();
        let table = SlotTable::new(PATH, 2, 2, false);
        let lqp = LogicalQp::new(lqp.me(), lqp.peer(), table, Config::default(), 0);
        let (mut peer, mut its) = (Executor::new(lqp), Fake::new());
        peer.message(&mut its, &message);
        assert_eq!((its.ended, peer.lqp().state()), (None, State::Active));
    }
}
