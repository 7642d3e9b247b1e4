//! What an RC QP does with single packets, and which it sends.

use crate::common::rc::*;
use crate::common::*;
use unbroken_types::*;
use unbroken_wire::{Aeth, Bth, Ext, HeaderBuf, Op as WireOp, Opcode, Packet, Reth};

const OK: u32 = WcStatus::Success as u32;

#[test]
fn a_quiesced_qp_is_dead_to_the_world() {
    let mut p = pair(true);
    p.recv(1, 1, &[sge(DST, 0, 4000)]);
    p.post(0, &send(1, 3000));
    p.post(0, &write(2, 8));
    p.tracing = true;
    p.room = 100;
    while p.transmit() {}
    let packets: Vec<_> = p.trace.drain(..).map(|(_, b)| b).collect();
    assert_eq!(packets.len(), 4);
    inject(&mut p, &packets[0]);
    let backlog = p.ends[1].qp.quiesce();
    assert_eq!((backlog.recvs.len(), backlog.executed.all), (1, 0), "the receive was only begun");
    let before = (p.ends[1].mem.bytes(DST), p.ends[1].mem.bytes(WRITABLE));
    for b in &packets {
        assert!(inject(&mut p, b).is_empty());
    }
    assert!(before == (p.ends[1].mem.bytes(DST), p.ends[1].mem.bytes(WRITABLE)));
    assert!(p.ends[1].wcs.recvs.is_empty());
    let End { qp, wcs, .. } = &mut p.ends[1];
    assert_eq!(
        qp.post_recv(&RecvWr { wr_id: 1, sges: &[] }, wcs),
        Err(PostError::WrongState(QpState::Err))
    );
    let to = |state| RcModify { state: Some(state), ..RcModify::default() };
    assert!(qp.modify(&to(QpState::Err), wcs).is_err());
    // Its owner may use it for another connection.
    qp.modify(&to(QpState::Reset), wcs).unwrap();
    qp.modify(&init(), wcs).unwrap();
    qp.post_recv(&RecvWr { wr_id: 1, sges: &[] }, wcs).unwrap();
    assert_eq!(qp.quiesce().executed.all, 0);
    let backlog = p.ends[0].qp.quiesce();
    assert!(backlog.sends.iter().all(|s| s.started) && backlog.sends.len() == 2);
}

#[test]
fn an_excess_of_reads_is_an_invalid_request() {
    let mut p = pair(false);
    let mut syndromes = vec![];
    for i in 0..5 {
        let reth = Reth { va: va(READABLE, 0), rkey: READABLE, len: 10 };
        let bytes = request(&p, WireOp::ReadRequest, i, Ext::Reth(reth), &[]);
        let End { qp, mem, wcs, .. } = &mut p.ends[1];
        qp.handle_packet(0, &Packet::parse(&bytes).unwrap(), mem, wcs);
    }
    let End { qp, mem, wcs, .. } = &mut p.ends[1];
    let mut sink = VecSink { mem, room: 100, packets: vec![] };
    qp.poll_transmit(0, &mut sink, wcs);
    for (_, b) in &sink.packets {
        syndromes.push(Packet::parse(b).unwrap().ext.aeth().unwrap());
    }
    assert_eq!(syndromes.len(), 5, "four answers, then the NAK");
    assert_eq!(syndromes[4], Aeth { syndrome: 0x61, msn: 4 });
}

#[test]
fn bad_sequences_and_sizes_are_invalid_requests() {
    let reth = |len| Ext::Reth(Reth { va: va(WRITABLE, 0), rkey: WRITABLE, len });
    let cases: Vec<(WireOp, Ext, usize)> = vec![
        (WireOp::WriteMiddle, Ext::None, 1024),
        (WireOp::WriteLast, Ext::None, 10),
        (WireOp::SendMiddle, Ext::None, 1024),
        (WireOp::WriteFirst, reth(4000), 1000),
        (WireOp::WriteFirst, reth(1024), 1024),
        (WireOp::WriteOnly, reth(10), 11),
        (WireOp::WriteOnly, reth(2000), 2000),
        (WireOp::SendFirst, Ext::None, 10),
        (WireOp::SendLastInvalidate, Ext::Ieth(3), 10),
        (WireOp::WriteOnly, reth(u32::MAX), 10),
        (
            WireOp::ReadRequest,
            Ext::Reth(Reth { va: va(READABLE, 0), rkey: READABLE, len: u32::MAX }),
            0,
        ),
    ];
    for (op, ext, len) in cases {
        let mut p = pair(false);
        p.recv(1, 1, &[sge(DST, 0, 8000)]);
        let before = p.ends[1].mem.bytes(WRITABLE);
        let bytes = request(&p, op, 0, ext, &vec![0xee; len]);
        assert_eq!(inject(&mut p, &bytes), [0x61], "{op:?} {len}");
        assert!(before == p.ends[1].mem.bytes(WRITABLE));
        assert_eq!(p.ends[1].qp.state(), QpState::Err);
        assert_eq!(inject(&mut p, &bytes), [0x61], "said again");
    }
}

#[test]
fn a_gap_is_named_once_and_repeats_are_acknowledged() {
    let mut p = pair(false);
    let w = |p: &Pair, n| {
        let reth = Ext::Reth(Reth { va: va(WRITABLE, n as usize), rkey: WRITABLE, len: 1 });
        request(p, WireOp::WriteOnly, n, reth, &[0xab])
    };
    let (a, b, c, d) = (w(&p, 0), w(&p, 1), w(&p, 2), w(&p, 3));
    assert_eq!(inject(&mut p, &b), [0x60]);
    assert!(inject(&mut p, &c).is_empty());
    assert_eq!(inject(&mut p, &a), [0x1f]);
    assert_eq!(inject(&mut p, &a), [0x1f]);
    assert_eq!(inject(&mut p, &c), [0x60], "another gap");
    assert!(inject(&mut p, &d).is_empty());
    assert_eq!(inject(&mut p, &c), [0x60], "begun anew without what is missing: lost again");
    assert_eq!(p.ends[1].qp.progress().executed, 1);
    // A repeat changes nothing, even with other data.
    let reth = Ext::Reth(Reth { va: va(WRITABLE, 0), rkey: WRITABLE, len: 1 });
    let other = request(&p, WireOp::WriteOnly, 0, reth, &[0xcd]);
    inject(&mut p, &other);
    assert_eq!(p.ends[1].mem.bytes(WRITABLE)[0], 0xab);
}

#[test]
fn without_losses_nothing_is_sent_twice() {
    let mut p = pair(false);
    p.tracing = true;
    for i in 0..16 {
        let make = [read, write, read, write][i as usize % 4];
        p.post(0, &make(i, 100 + 500 * i as usize));
        p.post(1, &make(i, 8000 - 500 * i as usize));
        p.step();
    }
    p.run();
    assert_eq!((p.statuses(0).len(), p.statuses(1).len()), (16, 16));
    let mut seen = std::collections::BTreeSet::new();
    for (to, b) in &p.trace {
        let bth = Packet::parse(b).unwrap().bth;
        if bth.opcode.op != WireOp::Acknowledge {
            assert!(seen.insert((*to, bth.opcode.op.is_response(), bth.psn)), "{bth:?} twice");
        }
    }
}

#[test]
fn a_loss_among_many_packets_costs_no_timeout() {
    let mut p = pair(false);
    p.faults.loss = 10;
    let mut timeouts = 0;
    for round in 0..200 {
        for i in 0..4 {
            p.post(0, &[write, read][i as usize % 2](i, 8000));
        }
        p.ends[0].wcs.sends.clear();
        let begin = p.now_us;
        p.run();
        timeouts += (p.now_us - begin) / 1048;
        assert_eq!(p.statuses(0).len(), 4, "round {round}");
    }
    // 32 packets and more a round: some sixty losses, of which those at an end are noticed by the
    // clock only.
    assert!(timeouts < 15, "{timeouts} timeouts");
}

#[test]
fn answers_to_what_was_never_sent_are_ignored() {
    let mut p = pair(false);
    p.post(0, &write(1, 100));
    p.post(0, &read(2, 100));
    let psn = p.ends[0].qp.attrs().sq_psn.unwrap();
    let answer = |p: &mut Pair, op, psn: u32, syndrome, payload: &[u8]| {
        let bth = Bth {
            opcode: Opcode::rc(op),
            solicited: false,
            mig_req: false,
            pad: 0,
            pkey: 0xffff,
            dest_qpn: 10,
            ack_req: false,
            psn: psn & PSN_MASK,
        };
        let mut bytes =
            HeaderBuf::new(&bth, &Ext::Aeth(Aeth { syndrome, msn: 0 })).as_slice().to_vec();
        bytes.extend(payload);
        let End { qp, mem, wcs, .. } = &mut p.ends[0];
        qp.handle_packet(p.now_us, &Packet::parse(&bytes).unwrap(), mem, wcs);
    };
    let before = p.ends[0].mem.bytes(DST);
    let all = |p: &mut Pair, unsent: u32| {
        for ahead in [0, 1, 7, PSN_MASK / 2, PSN_MASK] {
            for syndrome in [0x1f, 0x2c, 0x60, 0x61, 0x62, 0x63, 0x64, 0x7f, 0x40, 0xff] {
                answer(p, WireOp::Acknowledge, unsent + ahead, syndrome, &[]);
            }
            answer(p, WireOp::ReadResponseOnly, unsent + ahead, 0x1f, &[0xee; 100]);
        }
    };
    all(&mut p, psn); // nothing has left
    assert!(!p.ends[0].qp.progress().waiting_rnr);
    p.transmit();
    all(&mut p, psn + 2 + 1); // its PSN_MASK case is the last that was sent, less one
    assert!(p.statuses(0).len() <= 1 && before == p.ends[0].mem.bytes(DST));
    p.run();
    assert_eq!(p.statuses(0), [(1, OK), (2, OK)]);
}

#[test]
fn an_acknowledgement_never_overtakes_an_answer() {
    let mut p = pair(false);
    let reth = |key, len| Ext::Reth(Reth { va: va(key, 0), rkey: key, len });
    let packets = [
        request(&p, WireOp::ReadRequest, 0, reth(READABLE, 2048), &[]),
        request(&p, WireOp::WriteOnly, 2, reth(WRITABLE, 1), &[1]),
    ];
    let End { qp, mem, wcs, .. } = &mut p.ends[1];
    for bytes in &packets {
        qp.handle_packet(0, &Packet::parse(bytes).unwrap(), mem, wcs);
    }
    let mut kinds = vec![];
    for room in [0, 1, 1] {
        assert!(!qp.ack_owed());
        let mut sink = VecSink { mem, room: 9, packets: vec![] };
        qp.poll_transmit_ack(&mut sink);
        sink.room = room;
        qp.poll_transmit_data(0, &mut sink, wcs);
        kinds.extend(sink.packets.iter().map(|(_, b)| Packet::parse(b).unwrap().bth.opcode.op));
    }
    assert_eq!(kinds, [WireOp::ReadResponseFirst, WireOp::ReadResponseLast]);
    assert!(qp.ack_owed());
}

/// What an end sends in turns of two packets each, while it has more to send than fits.
fn turns_of_two(
    p: &mut Pair,
    requests: &[Vec<u8>],
    turns: usize,
    acks: impl Fn(usize) -> bool,
) -> Vec<Vec<WireOp>> {
    (0..8).for_each(|k| p.post(1, &write(k, 3000)));
    let End { qp, mem, wcs, .. } = &mut p.ends[1];
    for bytes in requests {
        qp.handle_packet(0, &Packet::parse(bytes).unwrap(), mem, wcs);
    }
    let turn = |k| {
        let mut sink = VecSink { mem, room: 2, packets: vec![] };
        let more = if acks(k) {
            qp.poll_transmit(0, &mut sink, wcs)
        } else {
            qp.poll_transmit_data(0, &mut sink, wcs)
        };
        assert!(more, "there is more to send");
        sink.packets.iter().map(|(_, b)| Packet::parse(b).unwrap().bth.opcode.op).collect()
    };
    (0..turns).map(turn).collect()
}

/// Else the peer hears nothing before this end's window is full, and stands still meanwhile.
#[test]
fn requests_that_fill_a_turn_leave_room_for_the_acknowledgement() {
    let reth = Ext::Reth(Reth { va: va(WRITABLE, 0), rkey: WRITABLE, len: 1 });
    // The shell may leave out of a turn what would leave alone.
    for left_out in [None, Some(0)] {
        let mut p = pair(false);
        let asks = [request(&p, WireOp::WriteOnly, 0, reth, &[1])];
        let sent = turns_of_two(&mut p, &asks, 3, |turn| Some(turn) != left_out);
        assert_eq!(sent[0], [WireOp::Acknowledge, WireOp::WriteFirst]);
        assert_eq!(sent[1], [WireOp::WriteMiddle, WireOp::WriteLast]);
        assert_eq!(sent[2], [WireOp::WriteFirst, WireOp::WriteMiddle]);
    }
}

#[test]
fn requests_and_read_responses_take_turns() {
    let mut p = pair(false);
    let reth = Ext::Reth(Reth { va: va(READABLE, 0), rkey: READABLE, len: 4096 });
    let asks = [request(&p, WireOp::ReadRequest, 0, reth, &[])];
    let sent = turns_of_two(&mut p, &asks, 5, |_| true);
    let answers: Vec<usize> =
        sent.iter().map(|t| t.iter().filter(|op| op.is_response()).count()).collect();
    assert_eq!(answers, [0, 2, 0, 2, 0], "{sent:?}");
}

#[test]
fn a_repeated_read_may_not_reach_beyond_what_was_executed() {
    let mut p = pair(false);
    let reth = |len| Ext::Reth(Reth { va: va(READABLE, 0), rkey: READABLE, len });
    let first = request(&p, WireOp::ReadRequest, 0, reth(2048), &[]);
    assert_eq!(inject(&mut p, &first), [0x1f; 2], "first and last, no acknowledgement besides");
    let again = request(&p, WireOp::ReadRequest, 1, reth(1024), &[]);
    assert_eq!(inject(&mut p, &again), [0x1f]);
    let beyond = request(&p, WireOp::ReadRequest, 1, reth(1025), &[]);
    assert!(inject(&mut p, &beyond).is_empty());
}
