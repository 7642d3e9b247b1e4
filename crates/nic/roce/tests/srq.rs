//! Receives that QPs share: what a QP has taken is used once or goes back, however the QP ends.

use crate::common::*;
use proptest::prelude::*;
use std::sync::{Arc, Mutex};
use unbroken_roce::*;
use unbroken_types::PdHandle;
use unbroken_types::*;
use unbroken_wire::Packet;

const OK: u32 = WcStatus::Success as u32;
const FLUSH: u32 = WcStatus::WrFlushErr as u32;
const SLOT: usize = 3000;

struct Queue(Mutex<RecvRing>);

impl Queue {
    fn new(wr_ids: std::ops::Range<u64>) -> Arc<Queue> {
        let queue = Queue(Mutex::new(RecvRing::new(64, 2)));
        for wr_id in wr_ids {
            queue.post(wr_id);
        }
        Arc::new(queue)
    }

    fn post(&self, wr_id: u64) {
        let sges =
            [sge(DST, SLOT * wr_id as usize, 7), sge(DST, SLOT * wr_id as usize + 7, SLOT - 7)];
        self.0.lock().unwrap().push(&RecvWr { wr_id, sges: &sges }).unwrap();
    }

    /// What is posted, oldest first.
    fn ids(&self) -> Vec<u64> {
        let mut ring = self.0.lock().unwrap().clone();
        std::iter::from_fn(|| {
            let wr_id = ring.oldest().map(|wr| wr.wr_id);
            ring.remove_oldest();
            wr_id
        })
        .collect()
    }
}

impl SharedReceives for Queue {
    fn take(&self, to: &mut dyn FnMut(&RecvWr<'_>)) -> bool {
        let mut ring = self.0.lock().unwrap();
        if let Some(wr) = ring.oldest() {
            to(&wr);
        }
        let any = !ring.is_empty();
        ring.remove_oldest();
        any
    }
    fn give_back(&self, wr: &RecvWr<'_>) {
        self.0.lock().unwrap().push_front(wr);
    }
    fn max_sge(&self) -> u32 {
        2
    }
    fn pd(&self) -> PdHandle {
        PD
    }
}

/// A pair whose end 1 takes from the queue.
fn sharing(queue: &Arc<Queue>, seed: u64, faults: Faults) -> Pair {
    let mut p = Pair::new(seed, faults, Mtu::B1024, true);
    let bytes = (0..20_000u32).map(|i| (i / 251 + i * 7 + seed as u32) as u8).collect();
    p.ends[0].mem.add(SRC, Access::NONE, bytes);
    p.ends[1].mem.add(DST, Access::LOCAL_WRITE, vec![0; 64 * SLOT]);
    p.ends[1].mem.add(WRITABLE, Access::REMOTE_WRITE.with(Access::LOCAL_WRITE), vec![0; 64]);
    for i in 0..2 {
        fresh(&mut p, i, 10, queue, None);
    }
    p
}

/// Gives an end another QP, which goes on with `backlog`.
fn fresh(p: &mut Pair, i: usize, qpn: u32, queue: &Arc<Queue>, backlog: Option<(&Backlog, u64)>) {
    let (me, peer) = (qpn + i as u32, qpn + 1 - i as u32);
    let mut qp = RcQp::new(config(me, true));
    if i == 1 {
        qp = qp.with_srq(queue.clone());
    }
    let wcs = &mut p.ends[i].wcs;
    qp.modify(&init(), wcs).unwrap();
    if let Some((backlog, peer_done)) = backlog {
        let mut backlog = backlog.clone();
        assert_eq!(backlog.mark_executed(PeerDone::Messages(peer_done)).marked, peer_done);
        qp.adopt(&backlog).unwrap();
    }
    connect(&mut qp, wcs, peer, 77, 77, Mtu::B1024);
    p.ends[i].qp = qp;
}

fn send(p: &mut Pair, imm_data: u32, len: usize) {
    let sges = [sge(SRC, imm_data as usize * 100, len)];
    p.post(0, &SendWr { imm_data, ..wr(imm_data.into(), SendOpcode::SendImm, &sges) });
}

/// The packets that end 0 has to send.
fn packets(p: &mut Pair) -> Vec<Vec<u8>> {
    let End { qp, mem, wcs, .. } = &mut p.ends[0];
    let mut sink = VecSink { mem, room: 100, packets: vec![] };
    qp.poll_transmit(p.now_us, &mut sink, wcs);
    sink.packets.into_iter().map(|(_, bytes)| bytes).collect()
}

fn deliver(p: &mut Pair, packet: &[u8]) {
    let End { qp, mem, wcs, .. } = &mut p.ends[1];
    qp.handle_packet(p.now_us, &Packet::parse(packet).unwrap(), mem, wcs);
}

/// What end 1 received: receive, status, and which message it was.
fn received(p: &Pair) -> Vec<(u64, u32, u32)> {
    p.ends[1].wcs.recvs.iter().map(|(w, _)| (w.wr_id, w.status, w.imm_data)).collect()
}

/// Checks the bytes of what end 1 received.
fn check_bytes(p: &Pair) {
    let (from, to) = (p.ends[0].mem.bytes(SRC), p.ends[1].mem.bytes(DST));
    for (wc, _) in p.ends[1].wcs.recvs.iter().filter(|(w, _)| w.status == OK) {
        let (at, from_at, len) =
            (SLOT * wc.wr_id as usize, 100 * wc.imm_data as usize, wc.byte_len as usize);
        assert!(to[at..at + len] == from[from_at..from_at + len], "message {}", wc.imm_data);
    }
}

#[test]
fn qps_take_receives_as_they_need_them() {
    let queue = Queue::new(0..2);
    let (mut a, mut b) =
        (sharing(&queue, 1, Faults::default()), sharing(&queue, 2, Faults::default()));
    send(&mut a, 1, 2500);
    send(&mut b, 2, 900);
    let (of_a, of_b) = (packets(&mut a), packets(&mut b));
    deliver(&mut a, &of_a[0]);
    assert_eq!((queue.ids(), a.ends[1].qp.progress().outstanding_recvs), (vec![1], 1));
    deliver(&mut b, &of_b[0]);
    // Nobody has one left: the peer of a message that needs one waits.
    send(&mut b, 3, 10);
    let late = packets(&mut b);
    deliver(&mut b, &late[0]);
    assert_eq!((received(&b), queue.ids().len()), (vec![(1, OK, 2)], 0));
    for packet in &of_a[1..] {
        deliver(&mut a, packet);
    }
    queue.post(5);
    b.run();
    assert_eq!((received(&a), received(&b)), (vec![(0, OK, 1)], vec![(1, OK, 2), (5, OK, 3)]));
    check_bytes(&a);
    check_bytes(&b);
}

#[test]
fn a_receive_that_was_begun_goes_back_in_front() {
    type Stop = fn(&mut RcQp, &mut Wcs);
    let quiesce: Stop = |qp, _| assert!(qp.quiesce().recvs.is_empty());
    let reset: Stop = |qp, wcs| {
        qp.modify(&RcModify { state: Some(QpState::Reset), ..RcModify::default() }, wcs).unwrap()
    };
    let held: Stop = |qp, wcs| {
        qp.network_failure(WcStatus::FatalErr, wcs);
        qp.quiesce();
    };
    for (name, stop) in
        [("quiesce", quiesce), ("reset", reset), ("held", held), ("release", |qp, _| qp.release())]
    {
        let queue = Queue::new(0..3);
        let mut p = sharing(&queue, 1, Faults::default());
        send(&mut p, 1, 2500);
        let packet = packets(&mut p).remove(0);
        deliver(&mut p, &packet);
        assert_eq!(queue.ids(), [1, 2], "{name}");
        let End { qp, wcs, .. } = &mut p.ends[1];
        stop(qp, wcs);
        assert_eq!(queue.ids(), [0, 1, 2], "{name}");
        assert!(!qp.take_last_wqe() && wcs.recvs.is_empty(), "{name}");
        // What comes late takes nothing any more.
        deliver(&mut p, &packet);
        if name != "release" {
            assert_eq!(queue.ids(), [0, 1, 2], "{name}");
        }
    }
}

#[test]
fn a_failed_qp_flushes_what_it_took_and_says_once_that_it_takes_no_more() {
    let queue = Queue::new(0..3);
    let mut p = sharing(&queue, 1, Faults::default());
    send(&mut p, 1, 2500);
    let packet = packets(&mut p).remove(0);
    deliver(&mut p, &packet);
    let err = RcModify { state: Some(QpState::Err), ..RcModify::default() };
    let End { qp, wcs, .. } = &mut p.ends[1];
    qp.modify(&err, wcs).unwrap();
    assert_eq!((qp.take_last_wqe(), qp.take_last_wqe()), (true, false));
    qp.modify(&err, wcs).unwrap();
    qp.fail(WcStatus::FatalErr, wcs);
    assert!(!qp.take_last_wqe());
    assert_eq!(qp.post_recv(&RecvWr { wr_id: 9, sges: &[] }, wcs), Err(PostError::HasSrq));
    let statuses: Vec<_> = p.ends[1].wcs.recvs.iter().map(|(w, _)| (w.wr_id, w.status)).collect();
    assert_eq!((statuses, queue.ids()), (vec![(0, FLUSH)], vec![1, 2]));
    // Up again, it can end again.
    let End { qp, wcs, .. } = &mut p.ends[1];
    qp.modify(&RcModify { state: Some(QpState::Reset), ..RcModify::default() }, wcs).unwrap();
    connect(qp, wcs, 10, 77, 77, Mtu::B1024);
    qp.fail(WcStatus::FatalErr, wcs);
    assert!(qp.take_last_wqe());
    // One without an SRQ has nothing to say.
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.fail(WcStatus::FatalErr, wcs);
    assert!(!qp.take_last_wqe());
}

#[test]
fn a_message_too_long_for_the_receive_fails_it() {
    let queue = Queue::new(0..2);
    let mut p = sharing(&queue, 1, Faults::default());
    send(&mut p, 1, SLOT + 1);
    p.run();
    let statuses: Vec<_> = p.ends[1].wcs.recvs.iter().map(|(w, _)| (w.wr_id, w.status)).collect();
    assert_eq!((statuses, queue.ids()), (vec![(0, WcStatus::LocLenErr as u32)], vec![1]));
    assert_eq!(p.statuses(0), [(1, WcStatus::RemInvReqErr as u32)]);
    assert!(p.ends[1].qp.take_last_wqe());
}

#[test]
fn ud_and_uc_share_too() {
    let queue = Queue::new(0..4);
    let (mem, mut wcs) = (VecMemory::default(), Wcs::default());
    mem.add(SRC, Access::NONE, vec![3; SLOT]);
    mem.add(DST, Access::LOCAL_WRITE, vec![0; 4 * SLOT]);
    let mut ud = [1, 2].map(|qpn| {
        let config = UdConfig {
            qpn,
            wc_qpn: qpn,
            caps: caps(),
            pd: PD,
            sq_sig_all: false,
            mtu: Mtu::B1024,
            suspend_on_error: false,
            moved: false,
        };
        let mut qp = UdQp::new(config);
        if qpn == 2 {
            qp = qp.with_srq(queue.clone());
        }
        for (state, qkey, sq_psn) in [
            (QpState::Init, Some(5), None),
            (QpState::Rtr, None, None),
            (QpState::Rts, None, Some(0)),
        ] {
            qp.modify(&UdModify { state: Some(state), qkey, sq_psn }, &mut wcs).unwrap();
        }
        qp
    });
    let mut uc = [1, 2].map(|qpn| {
        let mut qp = UcQp::new(UcConfig { wc_qpn: qpn, caps: caps(), pd: PD, sq_sig_all: false });
        if qpn == 2 {
            qp = qp.with_srq(queue.clone());
        }
        let d = RcModify::default();
        let rtr = RcModify { dest_qpn: Some(3 - qpn), rq_psn: Some(0), mtu: Some(Mtu::B1024), ..d };
        for change in [
            RcModify { state: Some(QpState::Init), access: Some(Access::NONE), ..d },
            RcModify { state: Some(QpState::Rtr), ..rtr },
            RcModify { state: Some(QpState::Rts), sq_psn: Some(0), ..d },
        ] {
            qp.modify(&change, &mut wcs).unwrap();
        }
        qp
    });
    let mut sink = VecSink { mem: &mem, room: 100, packets: vec![] };
    let dest = UdDest {
        gid: Gid::default(),
        qpn: 2,
        qkey: 5,
        grh: false,
        sgid_index: 0,
        ..UdDest::default()
    };
    let short = [sge(SRC, 0, 100)];
    ud[0]
        .post_send(&SendWr { ud: Some(dest), ..wr(1, SendOpcode::Send, &short) }, &mut wcs)
        .unwrap();
    ud[0].poll_transmit(&mut sink, &mut wcs);
    let long = [sge(SRC, 0, 2500)];
    uc[0].post_send(&wr(1, SendOpcode::Send, &long), &mut wcs).unwrap();
    uc[0].poll_transmit(&mut sink, &mut wcs);
    let packets: Vec<_> =
        sink.packets.iter().map(|(_, bytes)| Packet::parse(bytes).unwrap()).collect();
    assert_eq!(packets.len(), 4);
    uc[1].handle_packet(&packets[1], &mem, &mut wcs);
    let route = UdRoute::default();
    ud[1].handle_packet(&packets[0], &route, &mem, &mut wcs);
    assert_eq!(queue.ids(), [2, 3]);
    uc[1].handle_packet(&packets[2], &mem, &mut wcs);
    uc[1].release();
    assert_eq!(queue.ids(), [0, 2, 3]);
    let got: Vec<_> = wcs.recvs.iter().map(|(w, _)| (w.wr_id, w.status, w.byte_len)).collect();
    assert_eq!(got, [(1, OK, 140)]);
    ud[1].fail(&mut wcs);
    uc[1].fail(&mut wcs);
    assert!(ud[1].take_last_wqe() && uc[1].take_last_wqe());
    assert!(!ud[1].take_last_wqe() && !uc[1].take_last_wqe());
    assert_eq!((queue.ids(), wcs.recvs.len()), (vec![0, 2, 3], 1));
}

/// Both ends are cut from each other and go on with fresh QPs.
fn switch(p: &mut Pair, queue: &Arc<Queue>, counts: &mut (u64, u64)) {
    p.life += 1;
    let backlogs = [0, 1].map(|i| {
        if p.rng.chance(500) {
            let End { qp, wcs, .. } = &mut p.ends[i];
            qp.network_failure(WcStatus::FatalErr, wcs);
        }
        p.ends[i].qp.quiesce()
    });
    assert!(backlogs[1].recvs.is_empty(), "an SRQ's receives are no QP's to carry away");
    counts.0 += backlogs[1].executed.all;
    counts.1 += backlogs[0].completed.all;
    let qpn = 100 * p.life;
    fresh(p, 0, qpn, queue, Some((&backlogs[0], counts.0 - counts.1)));
    fresh(p, 1, qpn, queue, Some((&backlogs[1], 0)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Three QPs take from one queue over a bad network and move in mid-message: each message
    /// arrives once and in order, and each receive was used once or lies in the queue.
    #[test]
    fn no_receive_is_lost_or_used_twice(
        seed: u64,
        loss in 0..60u64,
        lens in proptest::collection::vec(0..SLOT, 1..24),
        cuts in proptest::collection::vec((0..3usize, 1..40u32), 0..12),
    ) {
        let queue = Queue::new(0..4);
        let faults = Faults { loss, duplicate: loss / 2, reorder: loss };
        let mut pairs = [0, 1, 2].map(|i| sharing(&queue, seed % 1000 + i, faults));
        let mut counts = [(0, 0); 3];
        for (i, &len) in lens.iter().enumerate() {
            send(&mut pairs[i % 3], i as u32 / 3, len);
            if i % 4 == 3 {
                queue.post(i as u64 + 1);
            }
        }
        for (who, steps) in cuts {
            for _ in 0..steps {
                pairs.iter_mut().for_each(|p| { p.step(); });
            }
            switch(&mut pairs[who], &queue, &mut counts[who]);
        }
        let mut posted: Vec<u64> = (0..4).chain((0..lens.len() as u64).filter(|i| i % 4 == 3).map(|i| i + 1)).collect();
        for wr_id in 40..63 {
            queue.post(wr_id);
            posted.push(wr_id);
        }
        pairs.iter_mut().for_each(Pair::run);
        let mut used = queue.ids();
        for (i, p) in pairs.iter().enumerate() {
            let messages: Vec<_> = p.ends[1].wcs.recvs.iter().map(|(w, _)| (w.imm_data as usize, w.byte_len as usize)).collect();
            let sent: Vec<_> = lens.iter().skip(i).step_by(3).copied().enumerate().collect();
            prop_assert_eq!(messages, sent);
            prop_assert_eq!(p.statuses(0).len(), lens.iter().skip(i).step_by(3).count());
            check_bytes(p);
            used.extend(p.ends[1].wcs.recvs.iter().map(|(w, _)| w.wr_id));
        }
        used.sort_unstable();
        posted.sort_unstable();
        prop_assert_eq!(used, posted);
    }
}
