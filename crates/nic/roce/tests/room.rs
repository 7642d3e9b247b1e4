//! What a QP has on its way, how much it may, and how long it waits for answers.

use crate::common::rc::*;
use crate::common::*;
use unbroken_roce::*;
use unbroken_types::*;
use unbroken_wire::{Op as WireOp, Packet};

const OK: u32 = WcStatus::Success as u32;
/// What a packet costs among others of its message, at an MTU of 1024.
const IN_RUN: u32 = 1024 + 512;
/// What a message of up to 88 bytes costs.
const SMALL: u32 = 256 + 512;

/// The requests that end 0 pushes now, if its sink takes so many: whether each asks for an
/// acknowledgement.
fn push(p: &mut Pair, room: Room, sink_room: usize) -> Vec<bool> {
    let End { qp, mem, wcs, .. } = &mut p.ends[0];
    let mut sink = VecSink { mem, room: sink_room, packets: vec![] };
    qp.give_room(room);
    qp.poll_transmit(p.now_us, &mut sink, wcs);
    let packets = sink.packets;
    let asks = packets.iter().map(|(_, bytes)| Packet::parse(bytes).unwrap().bth.ack_req).collect();
    packets.into_iter().for_each(|(_, bytes)| p.send_to(1, bytes));
    asks
}

fn room(cost: u32) -> Room {
    Room { cost, wait_us: 0 }
}

#[test]
fn no_more_leaves_than_there_is_room_for_and_the_last_asks() {
    let mut p = pair(false);
    p.post(0, &write(1, 8000));
    assert_eq!(push(&mut p, room(IN_RUN - 1), 100), []);
    assert_eq!(p.ends[0].qp.wanted_room(), Some(IN_RUN));
    assert_eq!(push(&mut p, room(3 * IN_RUN + 5), 100), [false, false, true]);
    assert_eq!((p.ends[0].qp.flight(), p.ends[0].qp.wanted_room()), (3 * IN_RUN, Some(IN_RUN)));
    p.ends[0].qp.give_room(Room::UNLIMITED);
    p.run();
    assert_eq!((p.statuses(0), p.ends[0].qp.flight()), (vec![(1, OK)], 0));
    p.post(0, &write(2, 80));
    assert_eq!(push(&mut p, room(SMALL), 100), [true]);
    assert_eq!(p.ends[0].qp.flight(), SMALL);
}

#[test]
fn where_room_has_gone_one_packet_more_asks() {
    let mut p = pair(false);
    p.post(0, &write(1, 8000));
    assert_eq!(push(&mut p, Room::UNLIMITED, 4), [false; 4], "the sink was full");
    assert_eq!(push(&mut p, room(0), 100), [true], "nobody would hear of the others");
    assert_eq!(push(&mut p, room(0), 100), []);
    assert_eq!(p.ends[0].qp.take_retransmits(), 0);
}

#[test]
fn a_read_counts_with_its_answers_and_an_atomic_with_its_one() {
    let mut p = pair(false);
    p.post(0, &read(1, 8000));
    assert_eq!(push(&mut p, room(8 * IN_RUN - 1), 100), []);
    assert_eq!(p.ends[0].qp.wanted_room(), Some(8 * IN_RUN));
    assert_eq!(push(&mut p, room(8 * IN_RUN), 100).len(), 1);
    assert_eq!(p.ends[0].qp.flight(), 8 * IN_RUN);
    while p.ends[0].qp.flight() > 3 * IN_RUN {
        assert!(p.step());
    }
    p.run();
    assert_eq!((p.statuses(0), p.ends[0].qp.flight()), (vec![(1, OK)], 0));
    let sges = [sge(DST, 0, 8)];
    let atomic = SendWr {
        remote_addr: va(COUNTERS, 0),
        rkey: COUNTERS,
        ..wr(2, SendOpcode::FetchAdd, &sges)
    };
    p.ends[1].mem.add(COUNTERS, Access::REMOTE_ATOMIC, vec![0; 8]);
    p.post(0, &atomic);
    assert_eq!(push(&mut p, room(SMALL), 100).len(), 1);
    assert_eq!(p.ends[0].qp.flight(), SMALL);
}

/// Whatever is lost, repeated or late: no more is counted than may be, and in the end nothing.
#[test]
fn what_is_in_flight_comes_to_nothing() {
    for seed in 0..200 {
        let faults = Faults { loss: 50, duplicate: 30, reorder: 100 };
        let mut p = Pair::new(seed, faults, Mtu::B1024, false);
        let filled = pair(false);
        for (end, from) in p.ends.iter().zip(&filled.ends) {
            for (key, region) in from.mem.regions.borrow().iter() {
                end.mem.add(*key, region.access, region.bytes.clone());
            }
        }
        p.set_selective([seed % 2 == 0; 2]);
        for i in 0..16 {
            let len = p.rng.below(8000) as usize;
            let wr = if p.rng.chance(300) { read(i, len) } else { write(i, len) };
            p.post(0, &wr);
        }
        while p.ends[0].qp.progress().outstanding_sends > 0 {
            // A packet more than there is room for, where one must ask.
            let before = p.ends[0].qp.flight();
            let most = before.max(12 * IN_RUN) + IN_RUN.max(256 + 2048);
            p.ends[0].qp.give_room(room((12 * IN_RUN).saturating_sub(before)));
            assert!(p.step(), "seed {seed}");
            assert!(p.ends[0].qp.flight() <= most, "seed {seed}");
        }
        assert_eq!(p.ends[0].qp.flight(), 0, "seed {seed}");
        assert!(p.statuses(0).iter().all(|s| s.1 == OK), "seed {seed}");
    }
}

#[test]
fn timers_wait_for_the_measured_round_trip() {
    for selective in [false, true] {
        let mut p = pair(false);
        p.set_selective([selective; 2]);
        p.latency_us = 500;
        p.post(0, &write(1, 10));
        p.run();
        assert!((1000..1010).contains(&p.ends[0].qp.take_news().rtt_us.unwrap()));
        // More than the coded timeout, 1,048 µs, and less than 1,000 and four times the variation.
        p.latency_us = 1300;
        p.post(0, &write(2, 10));
        p.run();
        assert_eq!((p.statuses(0), p.ends[0].qp.take_retransmits()), (vec![(1, OK), (2, OK)], 0));
    }
}

#[test]
fn timers_wait_for_what_others_have_measured() {
    for (wait_us, again) in [(0, true), (10_000, false)] {
        let mut p = pair(false);
        p.latency_us = 4000;
        p.ends[0].qp.give_room(Room { wait_us, ..Room::UNLIMITED });
        p.post(0, &write(1, 10));
        p.run();
        assert_eq!(p.statuses(0), [(1, OK)]);
        assert_eq!(p.ends[0].qp.take_retransmits() > 0, again);
    }
}

/// A QP without room knows of its peer's silence what others tell.
#[test]
fn who_waits_for_room_is_given_up_with_a_silent_destination_only() {
    for heard in [false, true] {
        let mut p = pair(false);
        p.post(0, &write(1, 10));
        let begin = p.now_us;
        let mut sent = 0;
        for _ in 0..100 {
            sent += push(&mut p, room(0), 100).len();
            let Some(at_us) = p.ends[0].qp.poll_timeout() else { break };
            p.now_us = at_us;
            let End { qp, wcs, .. } = &mut p.ends[0];
            if heard {
                qp.waits_for_room(p.now_us - 10);
            }
            qp.handle_timeout(p.now_us, wcs);
        }
        assert_eq!(sent, 0);
        if heard {
            assert!(p.statuses(0).is_empty());
            p.ends[0].qp.give_room(Room::UNLIMITED);
            p.run();
            assert_eq!(p.statuses(0), [(1, OK)]);
        } else {
            assert_eq!(p.statuses(0), [(1, WcStatus::RetryExcErr as u32)]);
            assert_eq!(p.now_us - begin, 27 * 1048);
        }
    }
}

/// After silence what was sent may still be there, behind a peer that is kept from its core.
#[test]
fn after_silence_it_begins_anew_with_two_packets() {
    let mut p = pair(false);
    p.faults.loss = 1000;
    p.post(0, &write(1, 8000));
    assert_eq!(push(&mut p, Room::UNLIMITED, 100).len(), 8);
    p.now_us = p.ends[0].qp.poll_timeout().unwrap();
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.handle_timeout(p.now_us, wcs);
    assert_eq!((qp.flight(), qp.take_news().lost), (0, 8));
    assert_eq!(push(&mut p, Room::UNLIMITED, 100).len(), 2);
    p.faults.loss = 0;
    p.run();
    assert_eq!(p.statuses(0), [(1, OK)]);
}

/// A receiver that is not ready is asked again by one message, and not by all that wait.
#[test]
fn after_rnr_one_message_is_tried() {
    for selective in [false, true] {
        let mut p = pair(false);
        p.set_selective([selective; 2]);
        (0..16).for_each(|i| p.post(0, &send(i, 100)));
        let sends = |p: &Pair| {
            let of_peer = p.trace.iter().filter(|(to, _)| *to == 1);
            of_peer
                .filter(|(_, b)| Packet::parse(b).unwrap().bth.opcode.op == WireOp::SendOnly)
                .count()
        };
        p.room = 100;
        while !p.ends[0].qp.waits_for_receiver() {
            assert!(p.step());
        }
        assert!(
            p.ends[0].qp.flight() >= 15 * (256 + 1024),
            "some of it may not have been read yet"
        );
        p.now_us = p.ends[0].qp.poll_timeout().unwrap();
        let End { qp, wcs, .. } = &mut p.ends[0];
        qp.handle_timeout(p.now_us, wcs);
        assert_eq!(qp.flight(), 0);
        p.tracing = true;
        while p.now_us < 1_000 + 11 * 660 {
            assert!(p.step());
        }
        let tried = sends(&p);
        assert!((8..=10).contains(&tried), "{tried} messages in ten waits");
        (0..16).for_each(|i| p.recv(1, i, &[sge(DST, 0, 100)]));
        p.run();
        assert_eq!(p.statuses(0).len(), 16);
        assert!(sends(&p) <= tried + 17);
    }
}
