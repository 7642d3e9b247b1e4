//! UC: messages arrive whole or not at all, in order, and nobody is told.

use crate::common::*;
use proptest::prelude::*;
use unbroken_roce::*;
use unbroken_types::*;
use unbroken_wire::Packet;

const OK: u32 = WcStatus::Success as u32;
const FLUSH: u32 = WcStatus::WrFlushErr as u32;

struct UcEnd {
    qp: UcQp,
    mem: VecMemory,
    wcs: Wcs,
}

fn end(qpn: u32, peer: u32) -> UcEnd {
    let mem = VecMemory::default();
    let bytes =
        |key: u32| (0..16_384u32).map(|i| (i / 251 + i * 7 + key) as u8).collect::<Vec<_>>();
    mem.add(SRC, Access::NONE, bytes(SRC));
    mem.add(WRITABLE, Access::REMOTE_WRITE.with(Access::LOCAL_WRITE), vec![0; 16_384]);
    mem.add(DST, Access::LOCAL_WRITE, vec![0; 16 * 5000]);
    let mut wcs = Wcs::default();
    let mut qp = UcQp::new(UcConfig { wc_qpn: qpn, caps: caps(), pd: PD, sq_sig_all: false });
    let d = RcModify::default();
    for change in [
        RcModify { state: Some(QpState::Init), access: Some(Access::REMOTE_WRITE), ..d },
        RcModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(peer),
            rq_psn: Some(PSN_MASK - 3),
            mtu: Some(Mtu::B1024),
            ..d
        },
        RcModify { state: Some(QpState::Rts), sq_psn: Some(PSN_MASK - 3), ..d },
    ] {
        qp.modify(&change, &mut wcs).unwrap();
    }
    UcEnd { qp, mem, wcs }
}

fn pair() -> [UcEnd; 2] {
    [end(1, 2), end(2, 1)]
}

/// Sends what end 0 has posted; end 1 gets the packets that `passes` lets through by their number.
fn run(ends: &mut [UcEnd; 2], mut passes: impl FnMut(usize) -> bool) -> usize {
    let [a, b] = ends;
    let mut sink = VecSink { mem: &a.mem, room: 1000, packets: vec![] };
    assert!(!a.qp.poll_transmit(&mut sink, &mut a.wcs));
    for (i, (_, bytes)) in sink.packets.iter().enumerate() {
        let packet = Packet::parse(bytes).unwrap();
        assert!(!packet.bth.ack_req);
        if passes(i) {
            b.qp.handle_packet(&packet, &b.mem, &mut b.wcs);
        }
    }
    sink.packets.len()
}

fn post(ends: &mut [UcEnd; 2], wr: &SendWr<'_>) {
    ends[0].qp.post_send(wr, &mut ends[0].wcs).unwrap();
}

fn recv(ends: &mut [UcEnd; 2], wr_id: u64, len: usize) {
    let sges = [sge(DST, 5000 * wr_id as usize, len)];
    ends[1].qp.post_recv(&RecvWr { wr_id, sges: &sges }, &mut ends[1].wcs).unwrap();
}

fn received(ends: &[UcEnd; 2]) -> Vec<(u64, u32, u32)> {
    ends[1].wcs.recvs.iter().map(|(w, _)| (w.wr_id, w.status, w.byte_len)).collect()
}

#[test]
fn sends_and_writes_arrive_with_their_immediates() {
    let mut e = pair();
    recv(&mut e, 0, 5000);
    recv(&mut e, 5, 0);
    let (a, b, c) = ([sge(SRC, 0, 4000)], [sge(SRC, 100, 1024)], [sge(SRC, 7, 2049)]);
    let to = |offset| SendWr {
        remote_addr: va(WRITABLE, offset),
        rkey: WRITABLE,
        ..wr(0, SendOpcode::Write, &[])
    };
    post(&mut e, &SendWr { imm_data: 77, ..wr(1, SendOpcode::SendImm, &a) });
    post(&mut e, &SendWr { wr_id: 2, sges: &b, ..to(0) });
    post(
        &mut e,
        &SendWr { wr_id: 3, opcode: SendOpcode::WriteImm, imm_data: 78, sges: &c, ..to(5000) },
    );
    post(&mut e, &SendWr { wr_id: 4, ..to(0) });
    assert_eq!(run(&mut e, |_| true), 4 + 1 + 3 + 1);
    let sends: Vec<_> = e[0].wcs.sends.iter().map(|w| (w.wr_id, w.status)).collect();
    assert_eq!(sends, [(1, OK), (2, OK), (3, OK), (4, OK)]);
    assert_eq!(received(&e), [(0, OK, 4000), (5, OK, 2049)]);
    assert_eq!(e[1].wcs.recvs.iter().map(|(w, _)| w.imm_data).collect::<Vec<_>>(), [77, 78]);
    let (from, written, got) = (e[0].mem.bytes(SRC), e[1].mem.bytes(WRITABLE), e[1].mem.bytes(DST));
    assert!(got[..4000] == from[..4000] && written[..1024] == from[100..1124]);
    assert!(written[5000..7049] == from[7..2056] && written[7049..].iter().all(|&b| b == 0));
    assert_eq!(e[1].qp.dropped(), 0);
}

#[test]
fn a_gap_drops_the_message_and_its_receive_waits_for_the_next() {
    for lost in 0..4 {
        let mut e = pair();
        recv(&mut e, 0, 5000);
        let sges = [[sge(SRC, 0, 4000)], [sge(SRC, 4000, 900)]];
        for (i, sges) in sges.iter().enumerate() {
            post(&mut e, &wr(i as u64, SendOpcode::Send, sges));
        }
        run(&mut e, |i| i != lost);
        assert_eq!(received(&e), [(0, OK, 900)]);
        assert!(e[1].mem.bytes(DST)[..900] == e[0].mem.bytes(SRC)[4000..4900]);
        // Only a first packet that is lost with nothing begun goes without a trace.
        assert_eq!(e[1].qp.dropped(), u64::from(lost != 0), "{lost}");
    }
}

#[test]
fn what_may_not_be_is_dropped_in_silence() {
    let write = |rkey, offset, len: usize| {
        let sges: &'static [Sge] = Box::leak(Box::new([sge(SRC, 0, len)]));
        SendWr { remote_addr: va(WRITABLE, offset), rkey, ..wr(0, SendOpcode::Write, sges) }
    };
    let mut e = pair();
    let long = [sge(SRC, 0, 3000)];
    post(&mut e, &write(DST, 0, 10));
    post(&mut e, &write(WRITABLE, 16_000, 3000));
    post(&mut e, &wr(1, SendOpcode::Send, &long));
    run(&mut e, |_| true);
    recv(&mut e, 1, 2500);
    post(&mut e, &wr(2, SendOpcode::Send, &long));
    post(&mut e, &wr(3, SendOpcode::Send, &long[..0]));
    run(&mut e, |_| true);
    assert!(e[1].mem.bytes(WRITABLE).iter().all(|&b| b == 0));
    assert_eq!((e[1].qp.dropped(), e[1].qp.state()), (4, QpState::Rts));
    assert_eq!(received(&e), [(1, OK, 0)]);
    let read = SendWr { rkey: WRITABLE, ..wr(9, SendOpcode::Read, &long) };
    assert_eq!(
        e[0].qp.post_send(&read, &mut e[0].wcs),
        Err(PostError::Unsupported(SendOpcode::Read))
    );
}

/// Windows are bound, and keys invalidated, in the order of the queue; what cannot be done stops
/// the sends and not the receives.
#[test]
fn keys_change_in_the_order_of_the_queue() {
    const WINDOW: u32 = 0x700;
    let bind = MwBind {
        window: 0x901,
        new_key: 0x902,
        lkey: SRC,
        addr: 5,
        length: 1 << 33,
        access: Access(0x2e),
    };
    let data = [sge(SRC, 0, 10)];
    let write = |wr_id| SendWr {
        remote_addr: va(WRITABLE, 0),
        rkey: WRITABLE,
        ..wr(wr_id, SendOpcode::Write, &data)
    };
    let invalidate = |wr_id, key| SendWr { rkey: key, ..wr(wr_id, SendOpcode::LocalInv, &[]) };
    let statuses =
        |e: &[UcEnd; 2]| e[0].wcs.sends.iter().map(|w| (w.wr_id, w.status)).collect::<Vec<_>>();
    let mut e = pair();
    e[0].mem.add(WINDOW, Access::REMOTE_WRITE, vec![0; 64]);
    for wr in [write(1), bind.wr(2, SendFlags::SIGNALED), invalidate(3, WINDOW), write(4)] {
        post(&mut e, &wr);
    }
    assert_eq!(run(&mut e, |_| true), 2, "nothing of it goes on the wire");
    assert_eq!(statuses(&e), [(1, OK), (2, OK), (3, OK), (4, OK)]);
    let opcodes = [WcOpcode::RdmaWrite, WcOpcode::BindMw, WcOpcode::LocalInv, WcOpcode::RdmaWrite];
    assert!(e[0].wcs.sends.iter().map(|w| w.opcode).eq(opcodes.map(|o| o as u32)));
    assert_eq!(*e[0].mem.changes.borrow(), [KeyChange::Bind(bind), KeyChange::Invalidate(WINDOW)]);
    for wr in [invalidate(5, WINDOW), write(6)] {
        post(&mut e, &wr);
    }
    assert_eq!(run(&mut e, |_| true), 0);
    assert_eq!(statuses(&e)[4..], [(5, WcStatus::MwBindErr as u32), (6, FLUSH)]);
    assert_eq!(e[0].qp.state(), QpState::Sqe);
    let with_invalidate = SendWr { rkey: WINDOW, ..wr(7, SendOpcode::SendInv, &data) };
    let refused = Err(PostError::Unsupported(SendOpcode::SendInv));
    assert_eq!(e[1].qp.post_send(&with_invalidate, &mut Wcs::default()), refused);
}

#[test]
fn memory_of_ones_own_that_is_not_there_ends_the_queue() {
    let mut e = pair();
    let bad = [sge(0x999, 0, 10)];
    post(&mut e, &wr(1, SendOpcode::Send, &bad));
    post(&mut e, &wr(2, SendOpcode::Send, &[]));
    run(&mut e, |_| true);
    assert_eq!(e[0].qp.state(), QpState::Sqe);
    let sends: Vec<_> = e[0].wcs.sends.iter().map(|w| (w.wr_id, w.status)).collect();
    assert_eq!(sends, [(1, WcStatus::LocProtErr as u32), (2, FLUSH)]);
    let rts = RcModify { state: Some(QpState::Rts), ..RcModify::default() };
    e[0].qp.modify(&rts, &mut e[0].wcs).unwrap();
    for wr_id in 3..5 {
        e[1].qp.post_recv(&RecvWr { wr_id, sges: &bad }, &mut e[1].wcs).unwrap();
    }
    post(&mut e, &wr(4, SendOpcode::Send, &[sge(SRC, 0, 10)]));
    run(&mut e, |_| true);
    assert_eq!(e[1].qp.state(), QpState::Err);
    assert_eq!(received(&e), [(3, WcStatus::LocProtErr as u32, 0), (4, FLUSH, 0)]);
}

#[test]
fn attributes_of_acknowledgement_do_not_belong_to_it() {
    let mut wcs = Wcs::default();
    let mut qp = UcQp::new(UcConfig { wc_qpn: 1, caps: caps(), pd: PD, sq_sig_all: false });
    qp.modify(&init(), &mut wcs).unwrap();
    let refused = qp.modify(&rtr(2, 0, Mtu::B1024), &mut wcs);
    assert!(
        matches!(refused, Err(ModifyError::NotAllowed { name: "min_rnr_timer", .. })),
        "{refused:?}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever is lost: what is received was sent, whole, in order, each at most once, and what
    /// lost nothing is received.
    #[test]
    fn messages_are_whole_or_missing(seed: u64, lens in proptest::collection::vec(0..5000usize, 1..16), loss in 0..400u64) {
        let mut e = pair();
        let mut rng = Rng(seed);
        for i in 0..lens.len() {
            recv(&mut e, i as u64, 5000);
        }
        let mut of_packet = vec![];
        for (i, &len) in lens.iter().enumerate() {
            let sges = [sge(SRC, i * 100, len)];
            post(&mut e, &SendWr { imm_data: i as u32, ..wr(i as u64, SendOpcode::SendImm, &sges) });
            of_packet.extend(std::iter::repeat_n(i, len.div_ceil(1024).max(1)));
        }
        let mut whole = vec![true; lens.len()];
        run(&mut e, |packet| {
            let lost = rng.chance(loss);
            whole[of_packet[packet]] &= !lost;
            !lost
        });
        let got: Vec<usize> = e[1].wcs.recvs.iter().map(|(w, _)| w.imm_data as usize).collect();
        let want: Vec<usize> = (0..lens.len()).filter(|&i| whole[i]).collect();
        prop_assert_eq!(got, want);
        for (wc, _) in &e[1].wcs.recvs {
            prop_assert_eq!(wc.byte_len as usize, lens[wc.imm_data as usize]);
        }
        if let Some((wc, _)) = e[1].wcs.recvs.last() {
            let (at, from, len) = (5000 * wc.wr_id as usize, 100 * wc.imm_data as usize, wc.byte_len as usize);
            prop_assert!(e[1].mem.bytes(DST)[at..at + len] == e[0].mem.bytes(SRC)[from..from + len]);
        }
    }
}
