//! UD QPs.

use crate::common::*;
use unbroken_roce::*;
use unbroken_types::*;
use unbroken_wire::Packet;

fn qp(qpn: u32, qkey: u32) -> UdQp {
    let mut wcs = Wcs::default();
    let mut qp = UdQp::new(UdConfig {
        qpn,
        wc_qpn: qpn,
        caps: caps(),
        pd: PD,
        sq_sig_all: false,
        mtu: Mtu::B1024,
        suspend_on_error: false,
        moved: false,
    });
    for (state, qkey, sq_psn) in [
        (QpState::Init, Some(qkey), None),
        (QpState::Rtr, None, None),
        (QpState::Rts, None, Some(5)),
    ] {
        qp.modify(&UdModify { state: Some(state), qkey, sq_psn }, &mut wcs).unwrap();
    }
    qp
}

fn memory() -> VecMemory {
    let mem = VecMemory::default();
    mem.add(SRC, Access::NONE, (0..=255).collect());
    mem.add(DST, Access::LOCAL_WRITE, vec![0; 512]);
    mem
}

fn gid(s: &str) -> Gid {
    Gid::from_ip(s.parse().unwrap())
}

fn route(src: &str, dst: &str) -> UdRoute {
    UdRoute { src: gid(src), dst: gid(dst), ..UdRoute::default() }
}

/// Posts one send from QP 3 and gives the packet.
fn sent(from: &mut UdQp, mem: &VecMemory, wcs: &mut Wcs, wr: &SendWr<'_>) -> Vec<u8> {
    from.post_send(wr, wcs).unwrap();
    let mut sink = VecSink { mem, room: 0, packets: vec![] };
    assert!(from.poll_transmit(&mut sink, wcs), "a full sink is asked again");
    sink.room = 1;
    assert!(!from.poll_transmit(&mut sink, wcs));
    let (dest, bytes) = sink.packets.remove(0);
    assert_eq!(Some(dest), wr.ud);
    bytes
}

#[test]
fn over_infiniband_the_sender_decides_about_the_grh() {
    let (mem, mut wcs) = (memory(), Wcs::default());
    let (mut a, mut b) = (qp(3, 77), qp(4, 99));
    let ports = [[127, 77, 1, 0], [127, 77, 2, 0]].map(|ip| Gid::link_local(ip.into()));
    for grh in [false, true] {
        let sges = [sge(SRC, 10, 5)];
        let ud = Some(UdDest {
            gid: ports[1],
            qpn: 4,
            qkey: 99,
            grh,
            sgid_index: 0,
            ..UdDest::default()
        });
        let bytes = sent(&mut a, &mem, &mut wcs, &SendWr { ud, ..wr(1, SendOpcode::Send, &sges) });
        b.post_recv(&RecvWr { wr_id: 7, sges: &[sge(DST, 0, 100)] }, &mut wcs).unwrap();
        let from = UdRoute { src: ports[0], dst: ports[1], slid: 128, ..UdRoute::default() };
        b.handle_packet(&Packet::parse(&bytes).unwrap(), &from, &mem, &mut wcs);
        let (wc, _) = wcs.recvs.pop().unwrap();
        assert_eq!((wc.byte_len, wc.slid, wc.sl), (45, 128, 0));
        assert_eq!(wc.wc_flags & WcFlags::GRH != 0, grh);
        let got = mem.bytes(DST);
        assert_eq!(got[40..45], [10, 11, 12, 13, 14]);
        if grh {
            assert_eq!(
                (got[0] >> 4, got[6], &got[8..24], &got[24..40]),
                (6, 0x1b, &ports[0].0[..], &ports[1].0[..])
            );
        } else {
            assert_eq!(got[..40], [0; 40], "nothing is written there");
        }
    }
}

#[test]
fn a_datagram_lands_behind_its_grh() {
    let (mem, mut wcs) = (memory(), Wcs::default());
    let (mut a, mut b) = (qp(3, 77), qp(4, 99));
    let sges = [sge(SRC, 10, 5), sge(SRC, 100, 4)];
    let dest = UdDest {
        gid: gid("10.0.0.2"),
        qpn: 4,
        qkey: 99,
        grh: false,
        sgid_index: 0,
        ..UdDest::default()
    };
    let send = SendWr {
        flags: SendFlags::SIGNALED.with(SendFlags::SOLICITED),
        imm_data: 0x0a0b0c0d,
        ud: Some(dest),
        ..wr(1, SendOpcode::SendImm, &sges)
    };
    let bytes = sent(&mut a, &mem, &mut wcs, &send);
    assert_eq!(wcs.sends.len(), 1);
    let packet = Packet::parse(&bytes).unwrap();
    let mut take =
        |b: &mut UdQp| b.handle_packet(&packet, &route("10.0.0.1", "10.0.0.2"), &mem, &mut wcs);
    take(&mut b);
    assert_eq!(b.dropped(), 1, "no receive");
    b.post_recv(&RecvWr { wr_id: 8, sges: &[sge(DST, 0, 48)] }, &mut Wcs::default()).unwrap();
    take(&mut b);
    assert_eq!(b.dropped(), 2, "the receive is one byte short");
    let mut b = qp(4, 99);
    b.post_recv(
        &RecvWr { wr_id: 9, sges: &[sge(DST, 0, 41), sge(DST, 60, 300)] },
        &mut Wcs::default(),
    )
    .unwrap();
    take(&mut b);
    let (wc, solicited) = wcs.recvs[0];
    assert_eq!(
        (wc.wr_id, wc.byte_len, wc.src_qp, wc.imm_data, solicited),
        (9, 49, 3, 0x0a0b0c0d, true)
    );
    assert_eq!(wc.wc_flags, WcFlags::GRH | WcFlags::WITH_IMM);
    let got = mem.bytes(DST);
    let udp_len = 8 + 12 + 8 + 4 + 9 + 3 + 4; // UDP, BTH, DETH, immediate, payload, pad, ICRC
    assert_eq!(
        (&got[22..24], usize::from(got[25])),
        (&[0, 20 + udp_len][..], 0),
        "the length counts the immediate"
    );
    assert_eq!((&got[20..22], &got[32..40]), (&[0x45, 0][..], &[10, 0, 0, 1, 10, 0, 0, 2][..]));
    assert_eq!((got[40], &got[60..68]), (10, &[11, 12, 13, 14, 100, 101, 102, 103][..]));
}

#[test]
fn a_wrong_key_is_dropped() {
    let (mem, mut wcs) = (memory(), Wcs::default());
    let (mut a, mut b) = (qp(3, 77), qp(4, 99));
    b.post_recv(&RecvWr { wr_id: 9, sges: &[sge(DST, 0, 300)] }, &mut wcs).unwrap();
    for (qkey, dropped) in [(98, 1), (u32::MAX, 2), (99, 2)] {
        let send = SendWr {
            ud: Some(UdDest {
                gid: gid("::1"),
                qpn: 4,
                qkey,
                grh: false,
                sgid_index: 0,
                ..UdDest::default()
            }),
            ..wr(1, SendOpcode::Send, &[])
        };
        let bytes = sent(&mut a, &mem, &mut wcs, &send);
        let packet = Packet::parse(&bytes).unwrap();
        if qkey == u32::MAX {
            assert_eq!(
                packet.ext.deth().unwrap().qkey,
                77,
                "the highest bit asks for the sender's own key"
            );
        }
        b.handle_packet(&packet, &route("::1", "::1"), &mem, &mut wcs);
        assert_eq!(b.dropped(), dropped);
    }
    assert_eq!(wcs.recvs.len(), 1);
    assert_eq!(mem.bytes(DST)[23], 1, "the source GID");
}

#[test]
fn errors_of_posting_and_memory() {
    let (mem, mut wcs) = (memory(), Wcs::default());
    let mut a = qp(3, 77);
    let ud = Some(UdDest {
        gid: gid("::1"),
        qpn: 4,
        qkey: 1,
        grh: false,
        sgid_index: 0,
        ..UdDest::default()
    });
    let ok = SendWr { ud, ..wr(1, SendOpcode::Send, &[]) };
    assert_eq!(a.post_send(&SendWr { ud: None, ..ok }, &mut wcs), Err(PostError::NoDestination));
    assert_eq!(
        a.post_send(&SendWr { opcode: SendOpcode::Write, ..ok }, &mut wcs),
        Err(PostError::Unsupported(SendOpcode::Write))
    );
    let long = [sge(SRC, 0, 1025)];
    assert_eq!(
        a.post_send(&SendWr { sges: &long, ..ok }, &mut wcs),
        Err(PostError::TooLong { have: 1025, max: 1024 })
    );
    let bad = [sge(SRC, 250, 10)];
    a.post_send(&SendWr { sges: &bad, ..ok }, &mut wcs).unwrap();
    a.post_send(&SendWr { wr_id: 2, ..ok }, &mut wcs).unwrap();
    let mut sink = VecSink { mem: &mem, room: 9, packets: vec![] };
    a.poll_transmit(&mut sink, &mut wcs);
    assert_eq!(a.state(), QpState::Sqe);
    let got: Vec<_> = wcs.sends.iter().map(|w| (w.wr_id, w.status)).collect();
    assert_eq!(got, [(1, WcStatus::LocProtErr as u32), (2, WcStatus::WrFlushErr as u32)]);
    a.modify(&UdModify { state: Some(QpState::Rts), ..UdModify::default() }, &mut wcs).unwrap();
    a.post_send(&ok, &mut wcs).unwrap();
    a.modify(&UdModify { state: Some(QpState::Err), ..UdModify::default() }, &mut wcs).unwrap();
    assert_eq!(wcs.sends.last().unwrap().status, WcStatus::WrFlushErr as u32);
}

/// The QP 3 as it is made to be moved, or as its next life under another number.
fn movable(qpn: u32) -> UdQp {
    let caps = QpCaps { max_send_wr: 4, ..caps() };
    let moved = qpn != 3;
    let config = UdConfig {
        qpn,
        wc_qpn: 3,
        caps,
        pd: PD,
        sq_sig_all: true,
        mtu: Mtu::B1024,
        suspend_on_error: true,
        moved,
    };
    UdQp::new(config)
}

fn bring(qp: &mut UdQp, to: QpState) {
    let states = [
        (QpState::Init, Some(77), None),
        (QpState::Rtr, None, None),
        (QpState::Rts, None, Some(5)),
    ];
    for (state, qkey, sq_psn) in states {
        qp.modify(&UdModify { state: Some(state), qkey, sq_psn }, &mut Wcs::default()).unwrap();
        if state == to {
            return;
        }
    }
}

#[test]
fn what_a_dead_nic_leaves_goes_on_in_another_qp() {
    let (mem, mut wcs) = (memory(), Wcs::default());
    let (mut a, mut b) = (movable(3), qp(4, 99));
    bring(&mut a, QpState::Rts);
    // The second with inline data, and to somebody else.
    let inline = Some(&b"hello"[..]);
    let to = |qpn| {
        Some(UdDest {
            gid: gid("10.0.0.2"),
            qpn,
            qkey: 99,
            grh: false,
            sgid_index: 0,
            ..UdDest::default()
        })
    };
    a.post_send(&SendWr { ud: to(4), ..wr(1, SendOpcode::Send, &[sge(SRC, 10, 5)]) }, &mut wcs)
        .unwrap();
    let second = SendWr {
        ud: to(5),
        flags: SendFlags::INLINE,
        inline_data: inline,
        imm_data: 6,
        ..wr(2, SendOpcode::SendImm, &[])
    };
    a.post_send(&second, &mut wcs).unwrap();
    a.post_recv(&RecvWr { wr_id: 9, sges: &[sge(DST, 0, 300)] }, &mut wcs).unwrap();
    a.network_failure(WcStatus::FatalErr, &mut wcs);
    let mut sink = VecSink { mem: &mem, room: 9, packets: vec![] };
    assert!(!a.poll_transmit(&mut sink, &mut wcs) && sink.packets.is_empty());
    assert_eq!(
        (a.failure(), a.state(), a.outstanding_sends()),
        (Some(WcStatus::FatalErr), QpState::Rts, 2)
    );
    let backlog = a.quiesce();
    assert!(wcs.sends.is_empty() && wcs.recvs.is_empty(), "nothing was flushed");
    assert_eq!((a.state(), a.outstanding_sends(), a.outstanding_recvs()), (QpState::Err, 0, 0));
    assert_eq!(a.post_send(&second, &mut wcs), Err(PostError::WrongState(QpState::Err)));
    a.fail(&mut wcs);
    assert_eq!(a.quiesce(), Backlog::default());

    let mut fresh = movable(0x103);
    bring(&mut fresh, QpState::Rtr);
    fresh.adopt(&backlog).unwrap();
    assert_eq!(
        fresh.adopt(&backlog),
        Err(PostError::WrongState(QpState::Rtr)),
        "it has some already"
    );
    fresh
        .modify(&UdModify { state: Some(QpState::Rts), qkey: None, sq_psn: Some(5) }, &mut wcs)
        .unwrap();
    assert!(!fresh.poll_transmit(&mut sink, &mut wcs));
    let sent: Vec<_> = wcs.sends.iter().map(|wc| (wc.wr_id, wc.qp_num, wc.status)).collect();
    assert_eq!(sent, [(1, 3, 0), (2, 3, 0)], "the number that the program knows");
    assert_eq!(sink.packets.iter().map(|(dest, _)| dest.qpn).collect::<Vec<_>>(), [4, 5]);
    let packet = Packet::parse(&sink.packets[0].1).unwrap();
    let deth = packet.ext.deth().unwrap();
    assert_eq!((deth.src_qpn, deth.moved), (0x103, true));
    // The receiver is told by what name the sender is known.
    b.post_recv(&RecvWr { wr_id: 7, sges: &[sge(DST, 0, 100)] }, &mut wcs).unwrap();
    let known = UdRoute { src_qpn: Some(3), ..route("10.0.0.1", "10.0.0.2") };
    assert!(b.handle_packet(&packet, &known, &mem, &mut wcs));
    assert_eq!(wcs.recvs[0].0.src_qp, 3);
    assert_eq!(fresh.quiesce().recvs, backlog.recvs, "the receive waits on");
}

#[test]
fn only_a_fresh_qp_with_room_adopts() {
    let (mut a, mut wcs) = (movable(3), Wcs::default());
    bring(&mut a, QpState::Rts);
    let ud = Some(UdDest {
        gid: gid("10.0.0.2"),
        qpn: 4,
        qkey: 99,
        grh: false,
        sgid_index: 0,
        ..UdDest::default()
    });
    (0..4).for_each(|i| {
        a.post_send(&SendWr { ud, ..wr(i, SendOpcode::Send, &[]) }, &mut wcs).unwrap()
    });
    let backlog = a.quiesce();
    assert_eq!(a.adopt(&backlog), Err(PostError::WrongState(QpState::Err)));
    let mut long = backlog.clone();
    long.sends.extend(backlog.sends.clone());
    let mut fresh = movable(0x103);
    assert_eq!(fresh.adopt(&long), Err(PostError::QueueFull(4)));
    let nowhere = Backlog {
        sends: vec![SendEntry { ud: None, ..backlog.sends[0].clone() }],
        ..Backlog::default()
    };
    assert_eq!(fresh.adopt(&nowhere), Err(PostError::NoDestination));
    fresh.adopt(&backlog).unwrap();
    assert_eq!(fresh.outstanding_sends(), 4, "nothing of what did not fit is left");
    // A reset makes the old one a fresh one.
    a.modify(&UdModify { state: Some(QpState::Reset), ..UdModify::default() }, &mut wcs).unwrap();
    a.adopt(&backlog).unwrap();
    // One that was not made to be held flushes.
    let mut plain = qp(8, 1);
    plain.post_recv(&RecvWr { wr_id: 9, sges: &[sge(DST, 0, 300)] }, &mut wcs).unwrap();
    plain.network_failure(WcStatus::FatalErr, &mut wcs);
    assert_eq!((plain.state(), wcs.recvs[0].0.status), (QpState::Err, WcStatus::WrFlushErr as u32));
}
