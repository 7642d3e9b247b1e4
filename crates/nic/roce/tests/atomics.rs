//! Atomics of an RC QP, one behaviour each. That each runs once over a bad network is `exchange`'s
//! to show.

use crate::common::*;
#[cfg(feature = "mutants")]
use unbroken_roce::Mutation;
use unbroken_types::*;
use unbroken_wire::{Op as WireOp, Packet};

const OK: u32 = WcStatus::Success as u32;

/// A pair with eight counters of 100 and room for eight answers.
fn pair(hold: bool) -> Pair {
    let pair = Pair::new(1, Faults::default(), Mtu::B1024, hold);
    for end in &pair.ends {
        let access = Access::REMOTE_ATOMIC.with(Access::LOCAL_WRITE);
        end.mem.add(COUNTERS, access, 100u64.to_ne_bytes().repeat(8));
        end.mem.add(DST, Access::LOCAL_WRITE, vec![0; 64]);
    }
    pair
}

fn word(pair: &Pair, end: usize, key: u32, index: usize) -> u64 {
    u64::from_ne_bytes(pair.ends[end].mem.bytes(key)[8 * index..8 * index + 8].try_into().unwrap())
}

/// An atomic on the counter at `offset`, whose answer goes to word `wr_id`.
fn atomic(
    wr_id: u64,
    opcode: SendOpcode,
    offset: usize,
    compare_add: u64,
    swap: u64,
) -> SendWr<'static> {
    let sges = Box::leak(Box::new([sge(DST, 8 * wr_id as usize, 8)]));
    SendWr {
        remote_addr: va(COUNTERS, offset),
        rkey: COUNTERS,
        compare_add,
        swap,
        ..wr(wr_id, opcode, sges)
    }
}

fn add(wr_id: u64, offset: usize) -> SendWr<'static> {
    atomic(wr_id, SendOpcode::FetchAdd, offset, 5, 0)
}

#[test]
fn atomics_change_the_peers_memory_and_bring_what_was_there() {
    let mut p = pair(false);
    p.post(0, &add(0, 0));
    p.post(0, &add(1, 0));
    p.post(0, &atomic(2, SendOpcode::CmpSwap, 8, 100, 7));
    p.post(0, &atomic(3, SendOpcode::CmpSwap, 8, 100, 9));
    p.post(0, &atomic(4, SendOpcode::FetchAdd, 16, u64::MAX, 0));
    p.run();
    assert_eq!(p.statuses(0), (0..5).map(|i| (i, OK)).collect::<Vec<_>>());
    let opcodes: Vec<u32> = p.ends[0].wcs.sends.iter().map(|w| w.opcode).collect();
    let (add, swap) = (WcOpcode::FetchAdd as u32, WcOpcode::CompSwap as u32);
    assert_eq!(opcodes, [add, add, swap, swap, add]);
    assert!(p.ends[0].wcs.sends.iter().all(|w| w.byte_len == 8));
    assert_eq!((0..5).map(|i| word(&p, 0, DST, i)).collect::<Vec<_>>(), [100, 105, 100, 7, 100]);
    assert_eq!((0..3).map(|i| word(&p, 1, COUNTERS, i)).collect::<Vec<_>>(), [110, 7, 99]);
    // They do not count as executed: whether the answer came is what counts.
    assert_eq!(p.ends[1].qp.progress().executed, 0);
}

#[test]
fn a_repeat_is_answered_and_not_run() {
    let mut p = pair(false);
    p.tracing = true;
    p.post(0, &add(0, 0));
    p.run();
    let is_atomic = |bytes: &[u8]| Packet::parse(bytes).unwrap().bth.opcode.op == WireOp::FetchAdd;
    let request = p.trace.iter().find(|(to, b)| *to == 1 && is_atomic(b)).unwrap().1.clone();
    p.trace.clear();
    p.send_to(1, request);
    p.run();
    let answer = p.trace.iter().rev().find(|(to, _)| *to == 0).unwrap().1.clone();
    assert!(matches!(Packet::parse(&answer).unwrap().ext, unbroken_wire::Ext::AtomicAck(_, 100)));
    assert_eq!(word(&p, 1, COUNTERS, 0), 105);
}

#[test]
#[cfg(feature = "mutants")]
fn an_answer_that_is_not_kept_is_noticed() {
    assert!(notices(a_repeat_is_answered_and_not_run, Mutation::ForgetAtomics));
}

#[test]
fn what_an_atomic_may_not_touch_ends_the_qp() {
    let cases = [
        (add(0, 4), WcStatus::RemInvReqErr),
        (add(0, 64), WcStatus::RemAccessErr),
        (SendWr { rkey: DST, remote_addr: va(DST, 0), ..add(0, 0) }, WcStatus::RemAccessErr),
    ];
    for (wr, status) in cases {
        let mut p = pair(false);
        p.post(0, &wr);
        p.run();
        assert_eq!(p.statuses(0), [(0, status as u32)]);
        assert_eq!(word(&p, 1, COUNTERS, 0), 100);
        assert_eq!(p.ends[1].qp.state(), QpState::Err);
    }
    // The QP's own right counts, too.
    let mut p = pair(false);
    let End { qp, wcs, .. } = &mut p.ends[1];
    qp.modify(&RcModify { access: Some(Access::REMOTE_WRITE), ..RcModify::default() }, wcs)
        .unwrap();
    p.post(0, &add(0, 0));
    p.run();
    assert_eq!(p.statuses(0), [(0, WcStatus::RemAccessErr as u32)]);
}

#[test]
fn an_atomic_that_may_have_left_is_never_sent_by_another_qp() {
    let mut p = pair(true);
    p.faults.loss = 1000;
    p.post(0, &add(0, 0));
    // More than max_rd_atomic: these have not left.
    for i in 1..8 {
        p.post(0, &add(i, 0));
    }
    p.run();
    let backlog = p.ends[0].qp.quiesce();
    assert_eq!(backlog.sends.iter().filter(|s| s.started).count(), 4);
    assert!(backlog.unsafe_to_replay(PeerDone::Messages(0)));
    // Those that have not left may go.
    let fresh = Backlog { sends: backlog.sends[4..].to_vec(), ..Backlog::default() };
    assert!(!fresh.unsafe_to_replay(PeerDone::Messages(0)));
    assert_eq!((backlog.sends[4].compare_add, backlog.sends[4].remote_addr), (5, va(COUNTERS, 0)));
}

/// On a network that loses most, the transport gives up and goes on in the same life, or insists
/// and never gives up: each atomic runs once, and all have their answers.
#[test]
fn a_transport_that_goes_on_runs_each_atomic_once() {
    for insists in [false, true] {
        let mut p = pair(true);
        let mut gave_up = 0;
        p.faults.loss = 700;
        if insists {
            assert!(p.ends[0].qp.go_on(p.now_us, true));
        }
        (0..8).for_each(|wr_id| p.post(0, &add(wr_id, 0)));
        for _ in 0..500 {
            p.run();
            if p.ends[0].qp.failure().is_none() {
                break;
            }
            gave_up += 1;
            assert!(p.ends[0].qp.go_on(p.now_us, false));
        }
        assert_eq!(gave_up > 0, !insists, "it gave up {gave_up} times");
        assert_eq!(p.statuses(0), (0..8).map(|wr_id| (wr_id, OK)).collect::<Vec<_>>());
        assert_eq!(word(&p, 1, COUNTERS, 0), 100 + 8 * 5);
        assert_eq!([0, 7].map(|i| word(&p, 0, DST, i)), [100, 135], "in order");
    }
}

/// What was stopped for another reason, or has moved, stays stopped.
#[test]
fn only_a_transport_that_gave_up_goes_on() {
    let mut p = pair(true);
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.network_failure(WcStatus::FatalErr, wcs);
    assert!(!qp.go_on(0, false) && qp.failure().is_some());
    let mut p = pair(true);
    let qp = &mut p.ends[0].qp;
    qp.quiesce();
    assert!(!qp.go_on(0, true));
}
