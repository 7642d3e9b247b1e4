//! Single behaviours of an RC QP, one test each.

use crate::common::rc::*;
use crate::common::*;
use unbroken_roce::*;
use unbroken_types::*;
use unbroken_wire::{Ext, Op as WireOp, Packet};

const OK: u32 = WcStatus::Success as u32;
const FLUSH: u32 = WcStatus::WrFlushErr as u32;

#[test]
fn silence_ends_in_retry_exceeded_after_the_retries() {
    let mut p = pair(false);
    p.faults.loss = 1000;
    p.post(0, &write(1, 5000));
    p.post(0, &write(2, 5));
    p.recv(0, 9, &[]);
    let begin = p.now_us;
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::RetryExcErr as u32), (2, FLUSH)]);
    assert_eq!(p.recv_statuses(0), [(9, FLUSH)]);
    assert_eq!(p.ends[0].qp.state(), QpState::Err);
    // Timeout code 8 is 1,048 µs; the first try, one that waits twice as long, and six more that
    // wait four times as long.
    assert_eq!(p.now_us - begin, (1 + 2 + 6 * 4) * 1048);
}

#[test]
fn timeout_zero_waits_for_ever() {
    let mut p = pair(false);
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.modify(&RcModify { state: Some(QpState::Reset), ..RcModify::default() }, wcs).unwrap();
    qp.modify(&init(), wcs).unwrap();
    qp.modify(&rtr(11, 0, Mtu::B1024), wcs).unwrap();
    qp.modify(&RcModify { timeout: Some(0), ..rts(0) }, wcs).unwrap();
    p.faults.loss = 1000;
    p.post(0, &write(1, 5));
    p.run();
    assert_eq!(p.ends[0].qp.poll_timeout(), None);
    assert_eq!(p.ends[0].qp.progress().outstanding_sends, 1);
}

#[test]
fn a_held_qp_keeps_its_work_and_says_nothing() {
    let mut p = pair(true);
    p.faults.loss = 1000;
    p.post(0, &write(1, 5000));
    p.recv(0, 9, &[sge(DST, 0, 10)]);
    p.run();
    let qp = &mut p.ends[0].qp;
    assert_eq!(qp.failure(), Some(WcStatus::RetryExcErr));
    assert_eq!((qp.state(), qp.poll_timeout()), (QpState::Rts, None));
    assert!(p.ends[0].wcs.sends.is_empty() && p.ends[0].wcs.recvs.is_empty());
    // It may still be posted to; it sends nothing and takes nothing.
    p.post(0, &write(2, 5));
    p.faults.loss = 0;
    assert!(!p.transmit());
    p.recv(1, 1, &[sge(DST, 0, 10)]);
    p.post(1, &send(3, 5));
    for _ in 0..10 {
        p.step();
    }
    assert!(p.ends[0].wcs.recvs.is_empty());
    // Given up, it fails like any other.
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.fail(WcStatus::RetryExcErr, wcs);
    assert_eq!(p.statuses(0), [(1, WcStatus::RetryExcErr as u32), (2, FLUSH)]);
    assert_eq!(p.recv_statuses(0), [(9, FLUSH)]);
}

#[test]
fn no_replay_is_refused_once_it_may_have_left() {
    let mut p = pair(true);
    let marked = SendWr { flags: SendFlags::SIGNALED.with(SendFlags::NO_REPLAY), ..write(2, 8) };
    p.post(0, &read(1, 8));
    p.post(0, &marked);
    assert!(
        !p.ends[0].qp.clone().quiesce().unsafe_to_replay(PeerDone::Messages(0)),
        "nothing has left"
    );
    p.transmit();
    let mut backlog = p.ends[0].qp.quiesce();
    assert!(backlog.unsafe_to_replay(PeerDone::Messages(0)));
    assert!(
        !backlog.unsafe_to_replay(PeerDone::Messages(1)),
        "the READ does not count, the WRITE is executed"
    );
    assert_eq!(backlog.mark_executed(PeerDone::Messages(5)), Replay { marked: 1, replayed: 1 });
    // The marks outlive the QP.
    let mut fresh = RcQp::new(config(20, true));
    fresh.adopt(&backlog).unwrap();
    let mut again = fresh.quiesce();
    assert_eq!(again.sends, backlog.sends);
    assert!(!again.unsafe_to_replay(PeerDone::Messages(0)), "it is known to have run");
    assert_eq!(again.mark_executed(PeerDone::Messages(0)), Replay { marked: 1, replayed: 1 });
}

#[test]
fn adopting_needs_a_fresh_qp_with_room() {
    let mut p = pair(true);
    for i in 0..3 {
        p.post(0, &write(i, 1));
    }
    let backlog = p.ends[0].qp.quiesce();
    let mut small =
        RcQp::new(RcConfig { caps: QpCaps { max_send_wr: 2, ..caps() }, ..config(20, true) });
    assert_eq!(small.adopt(&backlog), Err(PostError::QueueFull(2)));
    assert_eq!(small.progress().outstanding_sends, 0);
    let mut fresh = RcQp::new(config(21, true));
    fresh.adopt(&backlog).unwrap();
    assert_eq!(fresh.adopt(&backlog), Err(PostError::WrongState(QpState::Reset)));
}

#[test]
fn sends_are_posted_in_rts_and_adopted_before() {
    let mut p = pair(true);
    let mut wcs = Wcs::default();
    let mut qp = RcQp::new(config(10, true));
    let refused = |qp: &mut RcQp, state| {
        assert_eq!(
            qp.post_send(&write(0, 1), &mut Wcs::default()),
            Err(PostError::WrongState(state))
        );
    };
    refused(&mut qp, QpState::Reset);
    qp.modify(&init(), &mut wcs).unwrap();
    refused(&mut qp, QpState::Init);
    // Receives first, and sends when it is known where to.
    let recvs = Backlog {
        recvs: vec![RecvEntry { wr_id: 3, sges: vec![sge(DST, 0, 10)] }],
        ..Backlog::default()
    };
    qp.adopt(&recvs).unwrap();
    assert_eq!(qp.adopt(&recvs), Err(PostError::WrongState(QpState::Init)));
    let a = p.ends[0].qp.attrs();
    qp.modify(&rtr(11, a.rq_psn.unwrap(), Mtu::B1024), &mut wcs).unwrap();
    refused(&mut qp, QpState::Rtr);
    let sends = Backlog { sends: vec![SendEntry::from(&write(1, 100))], ..Backlog::default() };
    qp.adopt(&sends).unwrap();
    assert_eq!((qp.progress().outstanding_sends, qp.progress().outstanding_recvs), (1, 1));
    p.ends[0].qp = qp;
    assert!(!p.transmit());
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.modify(&rts(a.sq_psn.unwrap()), wcs).unwrap();
    p.run();
    assert_eq!(p.statuses(0), [(1, OK)]);
}

#[test]
fn a_missing_receive_is_waited_for() {
    let mut p = pair(false);
    p.post(0, &send(1, 2000));
    let begin = p.now_us;
    while !p.ends[0].qp.progress().waiting_rnr {
        assert!(p.step());
    }
    // Code 12 is 640 µs.
    assert_eq!(p.ends[0].qp.poll_timeout(), Some(p.now_us + 640));
    while p.now_us < begin + 20_000 {
        p.step();
        // Between two NAKs, too: whoever looks then must not take it for a path that is broken.
        assert!(p.ends[0].qp.progress().waiting_rnr);
    }
    assert!(p.statuses(0).is_empty(), "rnr_retry 7 is for ever");
    p.recv(1, 5, &[sge(DST, 0, 2000)]);
    p.run();
    assert_eq!((p.statuses(0), p.recv_statuses(1)), (vec![(1, OK)], vec![(5, OK)]));
    assert!(!p.ends[0].qp.progress().waiting_rnr);
}

#[test]
fn rnr_retries_end_and_are_never_held() {
    let mut p = pair(true);
    let End { qp, wcs, .. } = &mut p.ends[0];
    let a = qp.attrs();
    qp.modify(&RcModify { state: Some(QpState::Reset), ..RcModify::default() }, wcs).unwrap();
    qp.modify(&init(), wcs).unwrap();
    qp.modify(&rtr(11, a.rq_psn.unwrap(), Mtu::B1024), wcs).unwrap();
    qp.modify(&RcModify { rnr_retry: Some(2), ..rts(a.sq_psn.unwrap()) }, wcs).unwrap();
    p.post(0, &SendWr { imm_data: 1, opcode: SendOpcode::WriteImm, ..write(1, 10) });
    let begin = p.now_us;
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::RnrRetryExcErr as u32)]);
    assert_eq!(p.now_us - begin, 2 * 640 + 3 * 20, "two waits, three round trips");
}

#[test]
fn a_wrong_key_or_range_ends_both_ends_in_order() {
    type Spoil = fn(SendWr<'static>) -> SendWr<'static>;
    type Make = fn(u64, usize) -> SendWr<'static>;
    let bad: [(Spoil, Make); 5] = [
        (|w| SendWr { rkey: 0x999, ..w }, write),
        (|w| SendWr { rkey: READABLE, remote_addr: va(READABLE, 0), ..w }, write),
        (|w| SendWr { remote_addr: va(WRITABLE, 8192 - 99), ..w }, write),
        (|w| SendWr { remote_addr: u64::MAX - 3, ..w }, write),
        (|w| SendWr { rkey: WRITABLE, remote_addr: va(WRITABLE, 0), ..w }, read),
    ];
    for (n, (spoil, make)) in bad.into_iter().enumerate() {
        // A lost NAK is given again.
        for loss in [0, 200] {
            let mut p = pair(true);
            p.rng.0 = 77 + n as u64;
            p.faults.loss = loss;
            p.recv(1, 50, &[]);
            // (What a READ asked of an end that is gone cannot be asked again.)
            p.post(0, &if loss == 0 { read(1, 4000) } else { write(1, 4000) });
            p.post(0, &write(2, 100));
            p.post(0, &spoil(make(3, 100)));
            p.post(0, &write(4, 100));
            let before = p.ends[1].mem.bytes(READABLE);
            p.run();
            let want = [(1, OK), (2, OK), (3, WcStatus::RemAccessErr as u32), (4, FLUSH)];
            assert_eq!(p.statuses(0), want, "case {n}, loss {loss}");
            assert_eq!(p.recv_statuses(1), [(50, FLUSH)]);
            assert_eq!(p.ends[1].qp.take_event(), Some(RcEvent::AccessError));
            assert_eq!(p.ends[1].qp.take_event(), None);
            assert_eq!((p.ends[0].qp.state(), p.ends[1].qp.state()), (QpState::Err, QpState::Err));
            assert!(before == p.ends[1].mem.bytes(READABLE));
        }
    }
}

#[test]
fn a_short_receive_fails_both_ends() {
    let mut p = pair(false);
    p.recv(1, 5, &[sge(DST, 0, 1500)]);
    p.recv(1, 6, &[]);
    p.post(0, &send(1, 1501));
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::RemInvReqErr as u32)]);
    assert_eq!(p.recv_statuses(1), [(5, WcStatus::LocLenErr as u32), (6, FLUSH)]);
    assert_eq!(p.ends[1].qp.take_event(), Some(RcEvent::RequestError));
}

#[test]
fn a_bad_receive_is_a_remote_operation_error() {
    let mut p = pair(false);
    p.recv(1, 5, &[sge(SRC, 0, 100)]);
    p.post(0, &send(1, 100));
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::RemOpErr as u32)]);
    assert_eq!(p.recv_statuses(1), [(5, WcStatus::LocProtErr as u32)]);
}

#[test]
fn local_protection_errors_come_in_their_turn() {
    let mut p = pair(false);
    p.post(0, &write(1, 3000));
    p.post(0, &SendWr { sges: &[sge(0x777, 0, 9)], ..write(2, 0) });
    p.post(0, &write(3, 3000));
    p.run();
    assert_eq!(p.statuses(0), [(1, OK), (2, WcStatus::LocProtErr as u32), (3, FLUSH)]);
    let mut p = pair(false);
    p.post(0, &SendWr { sges: &[sge(SRC, 0, 9)], ..read(1, 0) });
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::LocProtErr as u32)]);
}

#[test]
fn a_region_that_goes_in_mid_read_is_an_access_error() {
    let mut p = pair(false);
    p.room = 2;
    p.post(0, &read(1, 8000));
    while p.pushed < 2 {
        p.step(); // until the first answers are on their way
    }
    p.ends[1].mem.regions.borrow_mut().remove(&READABLE);
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::RemAccessErr as u32)]);
}

#[test]
fn empty_messages_pass() {
    let mut p = pair(false);
    p.recv(1, 5, &[]);
    p.recv(1, 6, &[]);
    p.post(0, &wr(1, SendOpcode::Send, &[]));
    p.post(0, &wr(2, SendOpcode::Write, &[]));
    p.post(0, &wr(3, SendOpcode::Read, &[]));
    p.post(0, &SendWr { imm_data: 0x01020304, ..wr(4, SendOpcode::WriteImm, &[]) });
    p.run();
    assert_eq!(p.statuses(0), [(1, OK), (2, OK), (3, OK), (4, OK)]);
    let (wc, _) = p.ends[1].wcs.recvs[1];
    assert_eq!(
        (wc.imm_data, wc.opcode, wc.byte_len),
        (0x01020304, WcOpcode::RecvRdmaWithImm as u32, 0)
    );
}

#[test]
fn fence_and_read_limit_hold_back() {
    let mut p = pair(false);
    p.room = 100;
    p.tracing = true;
    for i in 0..6 {
        p.post(0, &read(i, 10));
    }
    p.post(0, &SendWr { flags: SendFlags::FENCE.with(SendFlags::SIGNALED), ..write(6, 10) });
    while p.transmit() {}
    assert_eq!(p.trace.len(), 4, "max_rd_atomic is 4");
    p.run();
    assert_eq!(p.statuses(0).len(), 7);
    let op = |b: &[u8]| Packet::parse(b).unwrap().bth.opcode.op;
    let fenced = p.trace.iter().position(|(_, b)| op(b) == WireOp::WriteOnly).unwrap();
    let answers =
        p.trace[..fenced].iter().filter(|(_, b)| op(b) == WireOp::ReadResponseOnly).count();
    assert_eq!(answers, 6);
}

/// In each kind of turn, with room for all, and with room for one packet at a time.
#[test]
fn an_acknowledgement_leaves_before_the_answer() {
    for (with_acks, room) in [(true, 100), (false, 100), (true, 1), (false, 1)] {
        let mut p = pair(false);
        p.recv(1, 1, &[sge(DST, 0, 10)]);
        let message = request(&p, WireOp::SendOnly, 0, Ext::None, &[7; 10]);
        let End { qp, mem, wcs, .. } = &mut p.ends[1];
        qp.handle_packet(p.now_us, &Packet::parse(&message).unwrap(), mem, wcs);
        assert!(qp.ack_owed());
        p.post(1, &send(2, 2000));
        let End { qp, mem, wcs, .. } = &mut p.ends[1];
        let mut ops = Vec::new();
        for _ in 0..3 {
            let mut sink = VecSink { mem, room, packets: vec![] };
            match with_acks {
                true => qp.poll_transmit(p.now_us, &mut sink, wcs),
                false => qp.poll_transmit_data(p.now_us, &mut sink, wcs),
            };
            let op = |(_, bytes): &(_, Vec<u8>)| Packet::parse(bytes).unwrap().bth.opcode.op;
            ops.extend(sink.packets.iter().map(op));
        }
        assert_eq!(ops, [WireOp::Acknowledge, WireOp::SendFirst, WireOp::SendLast]);
    }
}

/// ... but not before messages that leave together with it.
#[test]
fn an_acknowledgement_rides_behind_messages_of_one_length() {
    use WireOp::{Acknowledge as Ack, SendOnly as Send};
    let cases = [
        (vec![100, 100], vec![Send, Send, Ack]),
        (vec![100, 90, 90], vec![Send, Ack, Send, Send]),
        (vec![0, 0], vec![Ack, Send, Send]),
    ];
    for (lens, expected) in cases {
        let mut p = pair(false);
        p.recv(1, 1, &[sge(DST, 0, 10)]);
        let message = request(&p, WireOp::SendOnly, 0, Ext::None, &[7; 10]);
        let End { qp, mem, wcs, .. } = &mut p.ends[1];
        qp.handle_packet(p.now_us, &Packet::parse(&message).unwrap(), mem, wcs);
        lens.iter().for_each(|len| p.post(1, &send(2, *len)));
        let End { qp, mem, wcs, .. } = &mut p.ends[1];
        let mut sink = VecSink { mem, room: 100, packets: vec![] };
        qp.poll_transmit(p.now_us, &mut sink, wcs);
        let op = |(_, bytes): &(_, Vec<u8>)| Packet::parse(bytes).unwrap().bth.opcode.op;
        assert_eq!(sink.packets.iter().map(op).collect::<Vec<_>>(), expected);
    }
}

#[test]
#[cfg(feature = "mutants")]
fn a_late_acknowledgement_is_noticed() {
    assert!(notices(an_acknowledgement_leaves_before_the_answer, Mutation::AckLate));
}

#[test]
fn errors_flush_what_is_there_and_what_comes() {
    let mut p = pair(false);
    p.recv(0, 5, &[]);
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.modify(&RcModify { state: Some(QpState::Err), ..RcModify::default() }, wcs).unwrap();
    p.post(0, &write(1, 1));
    p.recv(0, 6, &[]);
    assert_eq!(p.statuses(0), [(1, FLUSH)]);
    assert_eq!(p.recv_statuses(0), [(5, FLUSH), (6, FLUSH)]);
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.modify(&RcModify { state: Some(QpState::Reset), ..RcModify::default() }, wcs).unwrap();
    assert_eq!(qp.state(), QpState::Reset);
}

#[test]
fn a_drained_send_queue_says_so() {
    let mut p = pair(false);
    p.room = 1;
    p.post(0, &write(1, 3000));
    p.transmit();
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.modify(&RcModify { state: Some(QpState::Sqd), ..RcModify::default() }, wcs).unwrap();
    p.post(0, &write(2, 10));
    p.run();
    assert_eq!(p.statuses(0), [(1, OK)]);
    assert_eq!(p.ends[0].qp.take_event(), Some(RcEvent::SqDrained));
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.modify(&RcModify { state: Some(QpState::Rts), ..RcModify::default() }, wcs).unwrap();
    p.run();
    assert_eq!(p.statuses(0), [(1, OK), (2, OK)]);
}

/// The QP that takes over the work of one in SQD finishes what that had started, and nothing else;
/// that its send queue is drained is told then, and not before.
#[test]
fn what_an_earlier_life_has_started_is_finished_in_sqd() {
    let begun =
        |wr: SendWr<'_>, executed| SendEntry { started: true, executed, ..SendEntry::from(&wr) };
    let waits = SendEntry::from(&write(3, 10));
    let cases = [
        vec![begun(write(1, 3000), false), begun(read(2, 100), false), waits.clone()],
        vec![begun(write(1, 3000), true), begun(read(2, 100), false), waits.clone()],
        vec![begun(write(1, 3000), true), begun(write(2, 10), true), waits.clone()],
        vec![begun(write(1, 3000), true), waits.clone()],
        vec![waits],
    ];
    for sends in cases {
        let mut p = pair(true);
        let (a, mut wcs) = (p.ends[0].qp.attrs(), Wcs::default());
        let (started, mut qp) = (sends.len() - 1, RcQp::new(config(10, true)));
        qp.modify(&init(), &mut wcs).unwrap();
        qp.modify(&rtr(11, a.rq_psn.unwrap(), Mtu::B1024), &mut wcs).unwrap();
        qp.adopt(&Backlog { sends, ..Backlog::default() }).unwrap();
        qp.modify(&rts(a.sq_psn.unwrap()), &mut wcs).unwrap();
        qp.modify(&RcModify { state: Some(QpState::Sqd), ..RcModify::default() }, &mut wcs)
            .unwrap();
        assert_eq!((qp.take_event().is_none(), qp.draining()), (started > 0, started > 0));
        p.ends[0].qp = qp;
        p.run();
        assert_eq!(p.statuses(0), [(1, OK), (2, OK)][..started]);
        let End { qp, wcs, .. } = &mut p.ends[0];
        assert_eq!(qp.take_event().is_some(), started > 0);
        assert!(!qp.draining() && qp.progress().resting, "what is left waits for the program");
        qp.modify(&RcModify { state: Some(QpState::Rts), ..RcModify::default() }, wcs).unwrap();
        p.run();
        assert_eq!((p.statuses(0).len(), p.ends[0].qp.progress().resting), (started + 1, false));
    }
}

#[test]
fn transitions_name_what_is_wrong() {
    let mut wcs = Wcs::default();
    let mut qp = RcQp::new(config(10, false));
    use QpState::*;
    assert_eq!(
        qp.modify(&rts(0), &mut wcs),
        Result::Err(ModifyError::Transition { from: Reset, to: Rts })
    );
    let missing = ModifyError::Missing { name: "qp_access_flags", from: Reset, to: Init };
    assert_eq!(qp.modify(&RcModify { access: None, ..init() }, &mut wcs), Result::Err(missing));
    qp.modify(&init(), &mut wcs).unwrap();
    let extra = RcModify { timeout: Some(3), ..rtr(11, 0, Mtu::B256) };
    assert_eq!(
        qp.modify(&extra, &mut wcs).unwrap_err().to_string(),
        "Init to Rtr does not take timeout",
        "an attribute too many"
    );
    let bad = RcModify { min_rnr_timer: Some(32), ..rtr(11, 0, Mtu::B256) };
    let value = ModifyError::Value { name: "min_rnr_timer", value: 32, max: 31 };
    assert_eq!(qp.modify(&bad, &mut wcs), Result::Err(value));
    assert_eq!(qp.attrs().dest_qpn, None, "an error changes nothing");
    qp.modify(&rtr(11, 0x1ff_ffff, Mtu::B256), &mut wcs).unwrap();
    assert_eq!((qp.attrs().rq_psn, qp.state()), (Some(PSN_MASK), Rtr));
    qp.modify(&rts(0), &mut wcs).unwrap();
    qp.modify(&RcModify { access: Some(Access::NONE), ..RcModify::default() }, &mut wcs).unwrap();
    assert_eq!(qp.attrs().access, Some(Access::NONE));
}

#[test]
fn posts_that_do_not_fit_are_refused() {
    let mut p = pair(false);
    let End { qp, wcs, .. } = &mut p.ends[0];
    let four = [Sge::default(); 4];
    assert_eq!(
        qp.post_send(&SendWr { sges: &four, ..write(1, 0) }, wcs),
        Err(PostError::TooManySges { have: 4, max: 3 })
    );
    let inline = SendWr { flags: SendFlags::INLINE, inline_data: Some(&[0; 65]), ..write(1, 0) };
    assert_eq!(qp.post_send(&inline, wcs), Err(PostError::InlineTooLong { have: 65, max: 64 }));
    assert_eq!(
        qp.post_send(&SendWr { opcode: SendOpcode::FetchAdd, ..write(1, 7) }, wcs),
        Err(PostError::AtomicRoom(7))
    );
    let long = [Sge { addr: 0, length: 1 << 31, lkey: SRC }, Sge { addr: 0, length: 1, lkey: SRC }];
    assert_eq!(
        qp.post_send(&SendWr { sges: &long, ..write(1, 0) }, wcs),
        Err(PostError::TooLong { have: (1 << 31) + 1, max: 1 << 31 })
    );
    for i in 0..16 {
        qp.post_send(&write(i, 1), wcs).unwrap();
    }
    assert_eq!(qp.post_send(&write(1, 1), wcs), Err(PostError::QueueFull(16)));
    assert_eq!(
        qp.post_recv(&RecvWr { wr_id: 0, sges: &four }, wcs),
        Err(PostError::TooManySges { have: 4, max: 3 })
    );
}

#[test]
fn an_idle_qp_stays_within_16_kib() {
    // Entries as the rings hold them; checked against the allocator in softnic.
    let caps = QpCaps {
        max_send_wr: 128,
        max_recv_wr: 128,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let qp = RcQp::new(RcConfig { caps, ..config(1, false) });
    assert!(qp.memory_bytes() <= 16 * 1024, "{} bytes", qp.memory_bytes());
}
