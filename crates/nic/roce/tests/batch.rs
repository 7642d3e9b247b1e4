//! Sends that are posted together.

use crate::common::*;
use unbroken_roce::*;
use unbroken_types::*;

struct Batch<'a>(Vec<SendWr<'a>>);

impl SendBatch for Batch<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn wr(&self, index: usize) -> SendWr<'_> {
        self.0[index]
    }
}

fn batch(ids: std::ops::Range<u64>) -> Batch<'static> {
    Batch(ids.map(|id| wr(id, SendOpcode::Send, &[])).collect())
}

#[test]
fn a_batch_is_posted_whole_or_not_at_all() {
    let mut p = Pair::new(5, Faults::default(), Mtu::B1024, false);
    let End { qp, wcs, .. } = &mut p.ends[0];
    let four = [Sge::default(); 4];
    let mut wrong = batch(0..3);
    wrong.0[2].sges = &four;
    assert!(matches!(qp.post_sends(&wrong, wcs), Err(PostError::TooManySges { .. })));
    assert_eq!(qp.progress().outstanding_sends, 0);
    qp.post_sends(&batch(0..10), wcs).unwrap();
    assert!(matches!(qp.post_sends(&batch(10..17), wcs), Err(PostError::QueueFull(_))));
    assert_eq!(qp.progress().outstanding_sends, 10);
    qp.post_sends(&batch(10..16), wcs).unwrap();
    for id in 0..16 {
        p.ends[1].qp.post_recv(&RecvWr { wr_id: id, sges: &[] }, &mut p.ends[1].wcs).unwrap();
    }
    p.run();
    assert_eq!(
        p.ends[0].wcs.sends.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(),
        (0..16).collect::<Vec<_>>()
    );
}

#[test]
fn a_batch_on_a_failed_qp_is_flushed_whole() {
    let mut p = Pair::new(5, Faults::default(), Mtu::B1024, false);
    let End { qp, wcs, .. } = &mut p.ends[0];
    qp.fail(WcStatus::RetryExcErr, wcs);
    let four = [Sge::default(); 4];
    let mut wrong = batch(0..3);
    wrong.0[2].sges = &four;
    assert!(qp.post_sends(&wrong, wcs).is_err());
    assert!(wcs.sends.is_empty(), "none of it");
    qp.post_sends(&batch(0..3), wcs).unwrap();
    assert_eq!(
        p.statuses(0),
        (0..3).map(|id| (id, WcStatus::WrFlushErr as u32)).collect::<Vec<_>>()
    );
}

#[test]
fn a_ud_batch_keeps_the_addresses_of_what_is_outstanding() {
    let caps = QpCaps { max_send_wr: 4, ..caps() };
    let mut qp = UdQp::new(UdConfig {
        qpn: 9,
        wc_qpn: 9,
        caps,
        pd: PD,
        sq_sig_all: false,
        mtu: Mtu::B1024,
        suspend_on_error: false,
        moved: false,
    });
    let mut wcs = Wcs::default();
    for (state, qkey, sq_psn) in
        [(QpState::Init, Some(1), None), (QpState::Rtr, None, None), (QpState::Rts, None, Some(0))]
    {
        qp.modify(&UdModify { state: Some(state), qkey, sq_psn }, &mut wcs).unwrap();
    }
    let to = |qpns: std::ops::Range<u32>| {
        let ud = |qpn| Some(UdDest { qpn, ..UdDest::default() });
        Batch(
            qpns.map(|qpn| SendWr { ud: ud(qpn), ..wr(qpn.into(), SendOpcode::Send, &[]) })
                .collect(),
        )
    };
    qp.post_sends(&to(0..3), &mut wcs).unwrap();
    assert_eq!(qp.post_sends(&to(10..12), &mut wcs), Err(PostError::QueueFull(3)));
    let mut wrong = to(20..21);
    wrong.0[0].ud = None;
    assert_eq!(qp.post_sends(&wrong, &mut wcs), Err(PostError::NoDestination));
    let mem = VecMemory::default();
    let mut sink = VecSink { mem: &mem, room: 10, packets: vec![] };
    qp.poll_transmit(&mut sink, &mut wcs);
    assert_eq!(sink.packets.iter().map(|(dest, _)| dest.qpn).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn a_ud_qp_that_is_drained_sends_nothing_until_it_goes_on() {
    let mut qp = UdQp::new(UdConfig {
        qpn: 9,
        wc_qpn: 9,
        caps: caps(),
        pd: PD,
        sq_sig_all: false,
        mtu: Mtu::B1024,
        suspend_on_error: false,
        moved: false,
    });
    let mut wcs = Wcs::default();
    let to = |qp: &mut UdQp, state, qkey, sq_psn| {
        qp.modify(&UdModify { state: Some(state), qkey, sq_psn }, &mut Wcs::default())
    };
    to(&mut qp, QpState::Init, Some(1), None).unwrap();
    assert!(to(&mut qp, QpState::Sqd, None, None).is_err());
    to(&mut qp, QpState::Rtr, None, None).unwrap();
    to(&mut qp, QpState::Rts, None, Some(0)).unwrap();
    to(&mut qp, QpState::Sqd, None, None).unwrap();
    to(&mut qp, QpState::Sqd, Some(2), None).unwrap();
    qp.post_send(&SendWr { ud: Some(UdDest::default()), ..wr(1, SendOpcode::Send, &[]) }, &mut wcs)
        .unwrap();
    let mem = VecMemory::default();
    let mut sink = VecSink { mem: &mem, room: 10, packets: vec![] };
    qp.poll_transmit(&mut sink, &mut wcs);
    assert!(sink.packets.is_empty());
    to(&mut qp, QpState::Rts, None, None).unwrap();
    qp.poll_transmit(&mut sink, &mut wcs);
    assert_eq!(sink.packets.len(), 1);
}
