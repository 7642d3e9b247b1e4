//! Selective retransmission: what it sends, what it costs, and what it brings.

use crate::common::rc::*;
use crate::common::*;
use unbroken_roce::*;
use unbroken_types::*;
use unbroken_wire::{Bth, Ext, Op as WireOp, Packet, Reth};

const OK: u32 = WcStatus::Success as u32;

fn selective_pair() -> Pair {
    let mut p = pair(false);
    p.set_selective([true; 2]);
    p
}

/// A WRITE of one byte at `n`, with the PSN of the same number.
fn byte(p: &Pair, n: u32) -> Vec<u8> {
    let reth = Ext::Reth(Reth { va: va(WRITABLE, n as usize), rkey: WRITABLE, len: 1 });
    request(p, WireOp::WriteOnly, n, reth, &[(0xa0 + n) as u8])
}

/// Hands a packet to end 1 and gives the acknowledgements that it answers: syndrome, PSN from the
/// first on, map.
fn acks(p: &mut Pair, bytes: &[u8]) -> Vec<(u8, u32, Vec<u8>)> {
    let first = p.ends[0].qp.attrs().sq_psn.unwrap();
    let End { qp, mem, wcs, .. } = &mut p.ends[1];
    qp.handle_packet(p.now_us, &Packet::parse(bytes).unwrap(), mem, wcs);
    let mut sink = VecSink { mem, room: 100, packets: vec![] };
    qp.poll_transmit(p.now_us, &mut sink, wcs);
    let each = |(_, b): &(UdDest, Vec<u8>)| {
        let packet = Packet::parse(b).unwrap();
        let psn = packet.bth.psn.wrapping_sub(first) & PSN_MASK;
        (packet.ext.aeth().unwrap().syndrome, psn, packet.payload.to_vec())
    };
    sink.packets.iter().map(each).collect()
}

/// Request packets that end 0 has sent, without acknowledgements.
fn requests(trace: &[(usize, Vec<u8>)]) -> Vec<Bth> {
    let all = trace.iter().filter(|(to, _)| *to == 1).map(|(_, b)| Packet::parse(b).unwrap().bth);
    all.filter(|b| b.opcode.op != WireOp::Acknowledge).collect()
}

#[test]
fn what_comes_early_waits_and_is_executed_in_its_turn() {
    let mut p = selective_pair();
    let before = p.ends[1].mem.bytes(WRITABLE);
    let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|n| byte(&p, n));
    assert_eq!(acks(&mut p, &b), [(0x60, 0, vec![1, 0, 0, 0])]);
    assert_eq!(acks(&mut p, &d), [(0x60, 0, vec![5, 0, 0, 0])]);
    assert_eq!(acks(&mut p, &d), [(0x60, 0, vec![5, 0, 0, 0])], "a repeat asks again");
    assert!(before == p.ends[1].mem.bytes(WRITABLE), "nothing is placed before its turn");
    assert_eq!(p.ends[1].qp.progress().executed, 0);
    let idle = p.ends[0].qp.memory_bytes();
    assert!(p.ends[1].qp.memory_bytes() > idle);
    assert_eq!(acks(&mut p, &a), [(0x60, 2, vec![1, 0, 0, 0])], "the next gap");
    assert_eq!(p.ends[1].qp.progress().executed, 2);
    assert_eq!(acks(&mut p, &b), [(0x60, 2, vec![1, 0, 0, 0])]);
    assert_eq!(acks(&mut p, &c), [(0x1f, 3, vec![])]);
    assert_eq!(acks(&mut p, &e), [(0x1f, 4, vec![])]);
    assert_eq!(p.ends[1].qp.progress().executed, 5);
    assert_eq!(p.ends[1].qp.memory_bytes(), idle, "what was kept is given back");
    assert_eq!(p.ends[1].mem.bytes(WRITABLE)[..5], [0xa0, 0xa1, 0xa2, 0xa3, 0xa4]);
}

#[test]
fn a_map_reaches_as_far_as_packets_are_kept() {
    let mut p = selective_pair();
    let [far, last, beyond] = [200, 255, 256].map(|n| byte(&p, n));
    assert_eq!(acks(&mut p, &far)[0].2.len(), 28);
    assert_eq!(acks(&mut p, &last)[0].2.len(), 32);
    assert_eq!(acks(&mut p, &beyond)[0].2, acks(&mut p, &last)[0].2, "one too far is not kept");
}

#[test]
fn kept_packets_die_with_the_life_of_their_qp() {
    let mut p = pair(true);
    p.set_selective([true; 2]);
    let idle = p.ends[1].qp.memory_bytes();
    p.recv(1, 7, &[sge(DST, 0, 100)]);
    let late = request(&p, WireOp::SendOnly, 1, Ext::None, &[1, 2, 3, 4]);
    acks(&mut p, &late);
    let backlog = p.ends[1].qp.quiesce();
    assert_eq!(
        (backlog.executed.all, backlog.recvs.len()),
        (0, 1),
        "not executed, so it counts nowhere"
    );
    assert_eq!(p.ends[1].qp.memory_bytes(), idle);
    let missing = byte(&p, 0);
    assert!(acks(&mut p, &missing).is_empty());
    assert_eq!(p.ends[1].qp.quiesce().executed.all, 0);
}

#[test]
fn a_kept_send_without_a_receive_is_waited_for() {
    let mut p = selective_pair();
    let send = |p: &Pair, n| request(p, WireOp::SendOnly, n, Ext::None, &[n as u8; 4]);
    let (a, b, c, d) = (byte(&p, 0), send(&p, 1), send(&p, 2), byte(&p, 3));
    p.recv(1, 50, &[sge(DST, 0, 4)]);
    for late in [&b, &c, &d] {
        acks(&mut p, late);
    }
    assert_eq!(
        acks(&mut p, &a),
        [(0x2c, 2, vec![])],
        "RNR for the second SEND, in the middle of what was kept"
    );
    assert_eq!(p.ends[1].qp.progress().executed, 2);
    assert_eq!(acks(&mut p, &d), [(0x2c, 2, vec![])], "asked again: the same");
    p.recv(1, 51, &[sge(DST, 4, 4)]);
    assert_eq!(acks(&mut p, &c), [(0x1f, 3, vec![])]);
    assert_eq!(p.recv_statuses(1), [(50, OK), (51, OK)]);
    assert_eq!(p.ends[1].mem.bytes(DST)[..8], [1, 1, 1, 1, 2, 2, 2, 2]);
}

#[test]
fn an_error_in_what_was_kept_ends_the_qp_in_its_turn() {
    let mut p = selective_pair();
    let reth = Ext::Reth(Reth { va: va(WRITABLE, 0), rkey: 0x999, len: 1 });
    let bad = request(&p, WireOp::WriteOnly, 1, reth, &[1]);
    let (a, c) = (byte(&p, 0), byte(&p, 2));
    acks(&mut p, &bad);
    acks(&mut p, &c);
    assert_eq!(p.ends[1].qp.state(), QpState::Rts, "not yet");
    let before = p.ends[1].mem.bytes(WRITABLE)[2];
    assert_eq!(acks(&mut p, &a), [(0x62, 1, vec![])]);
    assert_eq!(
        (p.ends[1].qp.state(), p.ends[1].qp.take_event()),
        (QpState::Err, Some(RcEvent::AccessError))
    );
    assert_eq!(p.ends[1].mem.bytes(WRITABLE)[2], before, "what is behind it is never executed");
}

/// Loses the packets of end 0 at these places in its flight; gives how many it has sent in the end,
/// and the time that took.
fn flight(p: &mut Pair, lost: &[usize]) -> (usize, u64) {
    p.tracing = true;
    p.room = 100;
    let begin = p.now_us;
    while p.transmit() {}
    let inbox = &mut p.ends[1].inbox;
    for &at in lost.iter().rev() {
        inbox.remove(at);
    }
    p.run();
    (requests(&p.trace).len(), p.now_us - begin)
}

/// Has a round trip measured, so that probes are known.
fn warm(p: &mut Pair) {
    p.post(0, &write(100, 1));
    p.run();
    p.ends[0].wcs.sends.clear();
    p.trace.clear();
}

#[test]
fn only_what_is_lost_is_sent_again() {
    let mut p = selective_pair();
    warm(&mut p);
    (0..3).for_each(|i| p.post(0, &write(i, 8000)));
    let (sent, took_us) = flight(&mut p, &[0, 5, 6, 13]);
    assert_eq!(sent, 24 + 4);
    assert!(took_us < 300, "{took_us} us: no timer was waited for");
    assert_eq!(p.statuses(0), [(0, OK), (1, OK), (2, OK)]);
    assert_eq!(p.ends[0].qp.take_retransmits(), 4);
    assert_eq!(p.ends[0].qp.take_retransmits(), 0);
}

#[test]
fn a_late_packet_is_not_taken_for_lost() {
    let mut p = selective_pair();
    warm(&mut p);
    (0..8).for_each(|i| p.post(0, &write(i, 1)));
    p.tracing = true;
    p.room = 100;
    while p.transmit() {}
    // Three packets change places with their neighbours.
    let inbox = &mut p.ends[1].inbox;
    for (i, j) in [(0, 1), (3, 5), (6, 7)] {
        let (a, b) = (inbox[i].2.clone(), inbox[j].2.clone());
        (inbox[i].2, inbox[j].2) = (b, a);
    }
    p.run();
    assert_eq!(requests(&p.trace).len(), 8, "nothing was sent again");
    assert_eq!(p.statuses(0).len(), 8);
}

#[test]
fn the_end_of_a_flight_is_probed_before_the_timeout() {
    for lost in [vec![7], vec![6, 7], (0..8).collect()] {
        let mut p = selective_pair();
        let End { qp, wcs, .. } = &mut p.ends[0];
        let a = qp.attrs();
        qp.modify(&RcModify { state: Some(QpState::Reset), ..RcModify::default() }, wcs).unwrap();
        qp.modify(&init(), wcs).unwrap();
        qp.modify(&rtr(11, a.rq_psn.unwrap(), Mtu::B1024), wcs).unwrap();
        // 4.3 seconds, and not one retry.
        qp.modify(
            &RcModify { timeout: Some(20), retry_cnt: Some(0), ..rts(a.sq_psn.unwrap()) },
            wcs,
        )
        .unwrap();
        warm(&mut p);
        p.post(0, &write(1, 8000));
        let (sent, took_us) = flight(&mut p, &lost);
        assert!(took_us < 5_000, "{took_us} us for {lost:?}");
        assert!(sent <= 8 + lost.len() + 1, "{sent} packets for {lost:?}");
        assert_eq!(p.statuses(0), [(1, OK)]);
    }
}

#[test]
fn a_silent_peer_is_given_up_after_the_retries() {
    let mut p = selective_pair();
    warm(&mut p);
    p.faults.loss = 1000;
    p.post(0, &write(1, 5000));
    let begin = p.now_us;
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::RetryExcErr as u32)]);
    assert_eq!(p.now_us - begin, 27 * 1048, "probes do not count, and put nothing off");
}

/// A round trip that has become longer than the timers is measured all the same, though what is
/// sent is sent again before it is answered.
#[test]
fn a_round_trip_that_grows_beyond_the_timers_is_learnt() {
    let mut p = selective_pair();
    warm(&mut p);
    p.latency_us = 10_000;
    p.ends[0].qp.take_retransmits();
    let each: Vec<u32> = (0..30)
        .map(|i| {
            p.post(0, &write(i, 1));
            p.run();
            p.ends[0].qp.take_retransmits()
        })
        .collect();
    assert!(p.statuses(0).iter().all(|s| s.1 == OK));
    assert!(each[0] > 0, "the timers were shorter: {each:?}");
    assert_eq!(each[20..].iter().sum::<u32>(), 0, "nothing is sent again any more: {each:?}");
}

/// What is lost, and answered when it has been sent again, says nothing of the round trip: one
/// outage after another, and none lasts longer for it.
#[test]
fn outages_do_not_make_each_other_longer() {
    let mut p = selective_pair();
    warm(&mut p);
    let each_us: Vec<u64> = (0..20)
        .map(|i| {
            let began_us = p.now_us;
            p.faults.loss = 1000;
            p.post(0, &write(i, 1));
            while p.now_us < began_us + 3_000 {
                assert!(p.step());
            }
            p.faults.loss = 0;
            p.run();
            p.now_us - began_us
        })
        .collect();
    assert!(p.statuses(0).iter().all(|s| s.1 == OK));
    assert!(each_us.iter().all(|us| *us <= 2 * each_us[0]), "{each_us:?}");
}

#[test]
fn only_missing_answers_are_asked_for_again() {
    let mut p = selective_pair();
    warm(&mut p);
    p.post(0, &read(1, 8000));
    p.post(0, &read(2, 8000));
    p.tracing = true;
    p.room = 100;
    while p.ends[0].inbox.len() < 16 {
        assert!(p.step());
    }
    for at in [14, 4, 3] {
        p.ends[0].inbox.remove(at);
    }
    let begin = p.now_us;
    p.run();
    assert!(p.now_us - begin < 300, "{} us", p.now_us - begin);
    assert_eq!(p.statuses(0), [(1, OK), (2, OK)]);
    let data = p.trace.iter().filter(|(to, b)| *to == 0 && b.len() > 100).count();
    assert_eq!(data, 16 + 3, "no answer came twice but the lost ones");
    assert!(p.ends[0].mem.bytes(DST)[..8000] == p.ends[1].mem.bytes(READABLE)[..8000]);
    assert_eq!(p.ends[1].qp.take_retransmits(), 3);
}

/// Its answers cannot be asked for again: the peer has ended, and says only that. Each time it is
/// asked counts as a try.
#[test]
fn what_is_missing_of_a_peer_that_has_ended_is_asked_for_in_vain_so_many_times() {
    let mut p = selective_pair();
    p.post(0, &read(1, 2000));
    (2..8).for_each(|k| p.post(0, &write(k, 100)));
    p.post(0, &SendWr { rkey: 0x999, ..write(8, 100) });
    p.tracing = true;
    p.room = 100;
    while p.ends[0].inbox.len() < 2 {
        assert!(p.step());
    }
    p.ends[0].inbox.remove(1); // the last answer
    let begin = p.now_us;
    p.run();
    let mut want = vec![(1, WcStatus::RetryExcErr as u32)];
    want.extend((2..=8).map(|k| (k, WcStatus::WrFlushErr as u32)));
    assert_eq!(p.statuses(0), want);
    let asked = requests(&p.trace).len();
    assert!(
        asked < 40 && p.now_us - begin < 40 * 1048,
        "asked {asked} times in {} us",
        p.now_us - begin
    );
}

#[test]
#[cfg(feature = "mutants")]
fn a_rule_that_is_left_out_is_noticed() {
    use Mutation::{ExecuteTwice, PlaceEarly, ShiftMap};
    let noticed_by: [(Mutation, fn()); 4] = [
        (ExecuteTwice, what_comes_early_waits_and_is_executed_in_its_turn),
        (PlaceEarly, what_comes_early_waits_and_is_executed_in_its_turn),
        (ShiftMap, what_comes_early_waits_and_is_executed_in_its_turn),
        (ShiftMap, only_what_is_lost_is_sent_again),
    ];
    for (left_out, test) in noticed_by {
        assert!(notices(test, left_out), "{left_out:?}");
    }
}

/// Megabits in a second that WRITEs or READs of 64 KiB reach over a line of 25 Gbit/s with a round
/// trip of 200 µs.
fn goodput_mbit(loss_per_mille: u64, selective: bool, opcode: SendOpcode) -> u64 {
    const MESSAGES: u64 = 400;
    let mut p = Pair::new(7, Faults::default(), Mtu::B4096, false);
    for (i, end) in p.ends.iter_mut().enumerate() {
        for key in [SRC, WRITABLE, READABLE, DST] {
            let access = end.mem.regions.borrow()[&key].access;
            end.mem.add(key, access, vec![key as u8; 1 << 16]);
        }
        end.qp = RcQp::new(RcConfig { cwnd_max_packets: 256, ..config(10 + i as u32, false) });
        let psns = [77, 99];
        end.qp.set_selective(selective);
        let End { qp, wcs, .. } = end;
        qp.modify(&init(), wcs).unwrap();
        qp.modify(
            &RcModify {
                max_dest_rd_atomic: Some(16),
                ..rtr(11 - i as u32, psns[1 - i], Mtu::B4096)
            },
            wcs,
        )
        .unwrap();
        qp.modify(&RcModify { max_rd_atomic: Some(16), timeout: Some(14), ..rts(psns[i]) }, wcs)
            .unwrap();
    }
    (p.latency_us, p.line_mbit, p.room) = (100, 25_000, 1000);
    p.faults.loss = loss_per_mille;
    let make = if opcode == SendOpcode::Read { read } else { write };
    let begin = p.now_us;
    let mut posted = 0;
    while p.statuses(0).len() < MESSAGES as usize {
        while posted < MESSAGES && posted - (p.statuses(0).len() as u64) < 16 {
            p.post(0, &make(posted, 1 << 16));
            posted += 1;
        }
        assert!(p.step());
    }
    assert!(p.statuses(0).iter().all(|s| s.1 == OK));
    MESSAGES * (1 << 16) * 8 / (p.now_us - begin)
}

/// Prints the table of docs/internals/softnic.md: `cargo test --release -p unbroken-roce --test all
/// -- --nocapture goodput`.
#[test]
fn goodput_under_loss_is_many_times_that_of_go_back_n() {
    for opcode in [SendOpcode::Write, SendOpcode::Read] {
        for loss in [0, 1, 10, 50] {
            let [back, selective] = [false, true].map(|s| goodput_mbit(loss, s, opcode));
            let ratio = selective as f64 / back as f64;
            println!(
                "{opcode:?} loss {:.1} %: {back} -> {selective} Mbit/s, {ratio:.1} times",
                loss as f64 / 10.0
            );
            match loss {
                0 => assert!(selective * 100 >= back * 99),
                1 => assert!(selective > back),
                _ => assert!(ratio >= 5.0, "{opcode:?} at {loss} of a thousand: {ratio:.1} times"),
            }
        }
    }
}
