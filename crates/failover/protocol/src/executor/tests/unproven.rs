//! QPs through which nothing ever came: the ends may not fit (PSNs, QPNs), which a fresh life would
//! hide, or the path was away when the first requests were sent. The peer knows which.

use super::*;

const PATH: SlotPath = SlotPath { local: 0, remote: 0 };
/// The first PSN of our requests, as the program has it.
const PSN: u32 = 7;

fn unproven(mutation: Mutation) -> (Executor, Fake) {
    let config = Config { mutation, ..Config::default() };
    let table = SlotTable::new(PATH, 2, 2, false);
    let mut s = Fake::new();
    s.app.sq_psn = Some(PSN);
    (Executor::new(LogicalQp::new(endpoint(1), endpoint(2), table, config, 0)), s)
}

/// Its transport gives it up, and the path is asked. What the peer has sent says nothing of this
/// direction.
fn gives_up(mutation: Mutation, answered: bool, verdict: Verdict) -> (Executor, Fake) {
    let (mut e, mut s) = unproven(mutation);
    (s.sends, s.answered, s.moved_us) = (vec![write(1)], answered, Some(7));
    assert_eq!(e.gave_up(&mut s, WcStatus::RetryExcErr), Some(PATH));
    e.verdict(&mut s, PATH, verdict);
    assert!(e.lqp().epoch() > 0 && s.ended.is_none(), "its program sees nothing of it yet");
    (e, s)
}

/// What its Hello asks.
fn asked(s: &Fake) -> Option<u32> {
    let hello = |m: &Message| match m.body {
        Body::Hello(hello) => Some(hello.unproven_psn),
        _ => None,
    };
    s.sent.iter().find_map(hello).expect("the peer hears of the fresh life")
}

/// The peer's refusal, as the ends do not fit.
fn misfit(e: &Executor) -> Message {
    let (reason, refused) = (RefuseReason::Misfit, e.lqp().peer().incarnation);
    let body = Body::Refuse(Refuse { reason, epoch: e.lqp().epoch(), refused });
    Message { from: e.lqp().peer(), to: e.lqp().me(), body }
}

#[test]
fn a_qp_through_which_nothing_ever_came_asks_whether_the_ends_fit() {
    for verdict in [Verdict::Alive, Verdict::Dead] {
        let (mut e, mut s) = gives_up(Mutation::None, false, verdict);
        assert_eq!(asked(&s), Some(PSN));
        e.message(&mut s, &misfit(&e));
        let original = [(1, WcStatus::RetryExcErr)];
        assert_eq!((s.ended, &s.wcs[..]), (Some(Ended::GivenUp), &original[..]));
    }
    let (mut e, mut s) = gives_up(Mutation::None, true, Verdict::Alive);
    assert_eq!(asked(&s), None, "its first request has arrived");
    e.message(&mut s, &misfit(&e));
    assert_eq!(s.ended, None, "nobody has asked");
}

/// Every device says the same of a READ where the program allows none.
#[test]
fn a_read_where_none_is_allowed_is_the_programs_mistake() {
    for (allowed, opcode, ends) in [
        (0, SendOpcode::Read, true),
        (0, SendOpcode::FetchAdd, true),
        (1, SendOpcode::Read, false),
        (0, SendOpcode::Write, false),
    ] {
        let (mut e, mut s) = unproven(Mutation::None);
        s.app.max_rd_atomic = Some(allowed);
        s.sends = vec![SendEntry { opcode, ..write(1) }, write(2)];
        assert_eq!(e.gave_up(&mut s, WcStatus::LocQpOpErr), Some(PATH));
        e.verdict(&mut s, PATH, Verdict::Alive);
        assert_eq!(s.ended.is_some(), ends, "{opcode:?}, {allowed} allowed");
        let original = [(1, WcStatus::LocQpOpErr), (2, WcStatus::WrFlushErr)];
        assert!(!ends || s.wcs == original, "{:?}", s.wcs);
    }
}

#[test]
fn a_qp_that_only_stands_still_is_left_to_its_transport() {
    let (mut e, mut s) = unproven(Mutation::None);
    s.sends = vec![write(1)];
    e.suspect(&mut s, Reason::Wedged(WcStatus::RetryExcErr));
    assert_eq!((e.lqp().epoch(), s.ended, s.sent.len()), (0, None, 0));
}

#[test]
fn the_peer_says_whether_the_ends_fit() {
    for (expected, fits) in [(Some(PSN), true), (Some(PSN | 1 << 24), true), (None, true)]
        .into_iter()
        .chain([(Some(PSN + 1), false)])
    {
        let (mut e, mut s) = unproven(Mutation::None);
        s.app.rq_psn = expected;
        let mut question = hello(&e, 1, Messages::default(), false);
        let Body::Hello(hello) = &mut question.body else { unreachable!() };
        hello.unproven_psn = Some(PSN);
        e.message(&mut s, &question);
        assert_eq!(e.lqp().epoch() > 0, fits, "{expected:?}");
        let says_no = |m: &Message| {
            matches!(m.body, Body::Refuse(Refuse { reason: RefuseReason::Misfit, .. }))
        };
        assert_eq!(s.sent.iter().any(says_no), !fits, "{expected:?}");
        assert_eq!(s.ended, None, "the other end says what follows");
    }
}

#[test]
fn a_qp_that_is_revived_without_proof_is_noticed() {
    for mutation in [Mutation::UnprovenRevived, Mutation::HeardIsProof] {
        let (_, s) = gives_up(mutation, false, Verdict::Alive);
        assert_eq!(asked(&s), None, "{mutation:?}");
    }
}

/// The peer may have receives only: it would wait for ever.
#[test]
fn the_peer_of_a_qp_that_is_given_up_ends_too() {
    let (mut e, mut s) = gives_up(Mutation::None, false, Verdict::Alive);
    e.message(&mut s, &misfit(&e));
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
