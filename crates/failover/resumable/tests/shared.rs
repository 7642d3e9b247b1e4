//! One SRQ of an application, and QPs that take from it on several NICs.

mod common;

use common::mock::Net;
use common::{connect, send_wr, switch, End, Host};
use std::collections::BTreeSet;
use unbroken_types::{QpState, SendOpcode, WcStatus};
use unbroken_verbs::{Device, DeviceEvent, QpEvent, QpModify, RcModify, RecvWr};

struct World {
    net: Net,
    hosts: [Host; 2],
    /// Two pairs, whose second ends share an SRQ.
    pairs: [[End; 2]; 2],
}

fn world(max_wr: u32) -> World {
    world_on(Net::default(), max_wr)
}

fn world_on(net: Net, max_wr: u32) -> World {
    let hosts = [Host::new(&net, 0, 64, false), Host::new(&net, 1, 64, false)];
    let srq = hosts[1].srq(max_wr);
    let pair = || {
        let ends = [
            End::new(&hosts[0], true, None),
            End::with_srq(&hosts[1], true, None, Some(srq.clone())),
        ];
        connect(&hosts, &ends);
        ends
    };
    let pairs = [pair(), pair()];
    World { net, hosts, pairs }
}

impl World {
    fn post_recvs(&self, ids: std::ops::Range<u64>) {
        let srq = self.pairs[0][1].srq.as_ref().unwrap();
        let sges = [self.hosts[1].sge(0, 8)];
        ids.for_each(|wr_id| srq.post(&RecvWr { wr_id, sges: &sges }).unwrap());
    }

    /// Sends a message over a pair; gives the receives that complete, with their statuses.
    fn message(&self, pair: usize) -> Vec<(u64, u32)> {
        let [from, to] = &self.pairs[pair];
        let sges = [self.hosts[0].sge(0, 8)];
        from.qp.post_send(&send_wr(9, SendOpcode::Send, true, &sges)).unwrap();
        self.net.execute(self.hosts[0].id(from.nic), from.qp.qpn());
        self.net.acknowledge(self.hosts[0].id(from.nic), from.qp.qpn());
        self.hosts.iter().for_each(|h| self.net.tell(h.id(from.nic), false));
        from.poll(&from.cq);
        to.poll(&to.cq).iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }
}

#[test]
fn qps_on_two_nics_take_from_one_queue_and_each_receive_is_used_once() {
    let mut w = world(16);
    w.post_recvs(0..16);
    assert_eq!(w.message(0), [(0, 0)]);
    assert_eq!(w.message(1), [(1, 0)]);
    let (net, srq) = (w.net.clone(), w.pairs[0][1].srq.clone().unwrap());
    switch(&w.hosts, &mut w.pairs[0], 1, |hosts| {
        hosts.iter().for_each(|h| net.tell(h.id(0), false))
    });
    assert_eq!(srq.len(), 14, "what a QP had begun to fill is not lost");
    let mut used = BTreeSet::from([0, 1]);
    for i in 0..14 {
        let mut got = w.message(i % 2);
        if got.is_empty() {
            got = w.message(1 - i % 2); // the other device has the last ones
        }
        for (wr_id, status) in got {
            assert!(status == 0 && used.insert(wr_id), "{wr_id}: {status}");
        }
    }
    // Sends that wait for a receive get those that are posted now, wherever they wait.
    w.post_recvs(16..20);
    for pair in [0, 1, 0, 1, 0, 1] {
        used.extend(w.message(pair).into_iter().map(|(wr_id, _)| wr_id));
    }
    let expected: BTreeSet<u64> = (0..used.len() as u64).collect();
    assert!(used.len() >= 16 && used == expected, "{used:?}");
}

/// A burst that comes while the program does not poll finds receives: half of those posted are with
/// the device, which is the only one.
#[test]
fn a_burst_meets_as_many_receives_as_the_device_may_have() {
    const BURST: u64 = 100;
    let w = world(256);
    w.post_recvs(0..2 * BURST);
    let [from, to] = &w.pairs[0];
    let (sges, id) = ([w.hosts[0].sge(0, 8)], w.hosts[0].id(from.nic));
    for sent in 1..=BURST {
        from.qp.post_send(&send_wr(sent, SendOpcode::Send, true, &sges)).unwrap();
        w.net.execute(id, from.qp.qpn());
        w.net.acknowledge(id, from.qp.qpn());
        w.net.tell(id, false);
        assert_eq!(from.poll(&from.cq).len(), 1, "message {sent} found no receive");
    }
    w.net.tell(w.hosts[1].id(to.nic), false);
    let mut got = to.poll(&to.cq);
    got.extend(to.poll(&to.cq));
    let ids: Vec<u64> = got.iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, (0..BURST).collect::<Vec<_>>());
}

/// The provider cannot make the CQ of 256 entries larger, which half of the receives would need.
#[test]
fn a_device_with_small_cqs_has_as_many_receives_as_these_hold() {
    let net = Net::default();
    net.fix_cqs();
    let w = world_on(net, 1024);
    w.post_recvs(0..1000);
    for wr_id in 0..300 {
        assert_eq!(w.message(wr_id as usize % 2), [(wr_id, 0)]);
    }
}

#[test]
fn the_last_qp_that_leaves_a_device_brings_all_back_in_order() {
    let mut w = world(40);
    w.post_recvs(0..40);
    let net = w.net.clone();
    w.net.kill(w.hosts[1].id(0), Some(libc::EIO));
    w.pairs[1][1].qp.destroy(); // one does not move
    switch(&w.hosts, &mut w.pairs[0], 1, |hosts| {
        hosts.iter().for_each(|h| net.tell(h.id(0), false))
    });
    let got: Vec<u64> = (0..40).flat_map(|_| w.message(0)).map(|(wr_id, _)| wr_id).collect();
    assert_eq!(got, (0..40).collect::<Vec<_>>());
}

#[test]
fn a_message_that_does_not_fit_ends_the_qp_and_the_application_hears_when_it_takes_no_more() {
    let w = world(4);
    w.post_recvs(0..2);
    let end = &w.pairs[0][1];
    let wrong = [w.hosts[0].sge(0, 8)];
    let mut wr = send_wr(1, SendOpcode::Write, true, &wrong);
    (wr.remote_addr, wr.rkey) = (w.hosts[1].addr(0), 9);
    w.pairs[0][0].qp.post_send(&wr).unwrap();
    w.net.execute(w.hosts[0].id(0), w.pairs[0][0].qp.qpn());
    w.hosts.iter().for_each(|h| w.net.tell(h.id(0), false));
    // The receive that had begun to come fails with the QP.
    let wcs: Vec<_> = end.poll(&end.cq).iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(wcs, [(0, WcStatus::WrFlushErr as u32)]);
    let of = |event| DeviceEvent::Qp { qpn: end.qp.qpn(), event };
    assert_eq!(w.hosts[1].events.take(), [of(QpEvent::AccessError), of(QpEvent::LastWqeReached)]);
    assert_eq!(w.message(1), [(1, 0)]);
}

/// A message of a new pair that the program does not poll. Gives the pair.
fn unpolled(w: &World) -> [End; 2] {
    let srq = w.pairs[0][1].srq.clone();
    let ends = [End::new(&w.hosts[0], true, None), End::with_srq(&w.hosts[1], true, None, srq)];
    connect(&w.hosts, &ends);
    let sges = [w.hosts[0].sge(0, 8)];
    ends[0].qp.post_send(&send_wr(9, SendOpcode::Send, true, &sges)).unwrap();
    w.net.execute(w.hosts[0].id(0), ends[0].qp.qpn());
    w.net.tell(w.hosts[1].id(0), false);
    ends
}

#[test]
fn qps_that_are_destroyed_in_flight_cost_the_queue_no_receive() {
    let w = world(40);
    w.post_recvs(0..40);
    for _ in 0..100 {
        unpolled(&w)[1].qp.destroy();
    }
    let mut got: Vec<u64> = (0..40).flat_map(|_| w.message(0)).map(|(wr_id, _)| wr_id).collect();
    got.sort_unstable();
    assert_eq!(got, (0..40).collect::<Vec<_>>());
}

#[test]
fn what_a_device_has_completed_before_a_reset_is_not_of_the_next_life() {
    let w = world(40);
    w.post_recvs(0..40);
    let ends = unpolled(&w);
    let reset = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
    for end in &ends {
        end.qp.modify(&QpModify { rc: reset, ..QpModify::default() }).unwrap();
        end.cq.purge(end.qpn); // as whoever resets a logical QP does
    }
    connect(&w.hosts, &ends);
    assert!(ends[1].poll(&ends[1].cq).is_empty(), "a receive of the life before");
}

/// The device's thread destroys a QP that another replaces, later. No thread is there in this test.
#[test]
fn a_qp_that_is_replaced_completes_nothing_more() {
    let w = world(40);
    w.post_recvs(0..40);
    let ends = unpolled(&w);
    ends[1].qp.retire();
    assert!(ends[1].poll(&ends[1].cq).is_empty(), "it still completes");
}

/// The program waits for the limit of its SRQ, and polls nothing.
#[test]
fn messages_that_nobody_polls_count_for_the_limit_of_an_srq() {
    let w = world(8);
    let srq = w.pairs[0][1].srq.clone().unwrap();
    w.post_recvs(0..4);
    srq.modify(None, Some(4)).unwrap();
    let [from, to] = &w.pairs[0];
    let (sges, id) = ([w.hosts[0].sge(0, 8)], w.hosts[0].id(from.nic));
    from.qp.post_send(&send_wr(9, SendOpcode::Send, true, &sges)).unwrap();
    w.net.execute(id, from.qp.qpn());
    w.net.tell(w.hosts[1].id(to.nic), false);
    assert_eq!((srq.query().limit, srq.len()), (4, 4), "it is not known yet");
    w.hosts[1].nics[0].find_overruns();
    assert_eq!((srq.query().limit, srq.len()), (0, 3), "it was told, once");
    assert_eq!(to.poll(&to.cq).len(), 1);
}
