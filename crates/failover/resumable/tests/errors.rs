//! What is the application's own error reaches it, and what is the network's does not.

mod common;

use common::mock::Net;
use common::{connect, exchange_keys, send_wr, switch, End, Host};
use unbroken_types::{QpState, SendOpcode, WcStatus};
use unbroken_verbs::{DeviceEvent, QpEvent, QpModify, RcModify, RecvWr};

const FLUSH: u32 = WcStatus::WrFlushErr as u32;

struct Pair {
    net: Net,
    hosts: [Host; 2],
    ends: [End; 2],
}

fn pair(one_cq: bool) -> Pair {
    let net = Net::new(true);
    let hosts = [Host::new(&net, 0, 64, false), Host::new(&net, 1, 64, false)];
    let ends = [End::new(&hosts[0], one_cq, None), End::new(&hosts[1], one_cq, None)];
    connect(&hosts, &ends);
    Pair { net, hosts, ends }
}

impl Pair {
    fn write(&self, wr_id: u64, rkey: u32) {
        let sges = [self.hosts[0].sge(0, 8)];
        let mut wr = send_wr(wr_id, SendOpcode::Write, true, &sges);
        (wr.remote_addr, wr.rkey) = (self.hosts[1].addr(0), rkey);
        self.ends[0].qp.post_send(&wr).unwrap();
    }

    fn recv(&self, end: usize, wr_id: u64) {
        self.ends[end].qp.post_recv(&RecvWr { wr_id, sges: &[] }).unwrap();
    }

    fn work(&self) {
        let end = &self.ends[0];
        self.net.execute(self.hosts[0].id(end.nic), end.qp.qpn());
        self.net.acknowledge(self.hosts[0].id(end.nic), end.qp.qpn());
        self.hosts.iter().for_each(|h| self.net.tell(h.id(end.nic), false));
    }

    /// WCs of an end: (wr_id, status).
    fn wcs(&self, end: usize) -> Vec<(u64, u32)> {
        let e = &self.ends[end];
        // The receives first, so that a flush is seen before its reason.
        [&e.recv_cq, &e.cq]
            .into_iter()
            .flat_map(|cq| e.poll(cq))
            .map(|wc| (wc.wr_id, wc.status))
            .collect()
    }
}

#[test]
fn a_wrong_key_ends_both_ends_as_on_any_device() {
    for one_cq in [true, false] {
        let p = pair(one_cq);
        (1..3).for_each(|i| p.write(i, 9));
        p.recv(0, 8);
        p.recv(1, 7);
        p.work();
        assert!(p.ends[1].qp.state() == QpState::Err, "the device says by an event why it flushes");
        assert_eq!(p.wcs(1), [(7, FLUSH)]);
        let mut ours = p.wcs(0);
        ours.extend(p.wcs(0));
        ours.sort_unstable();
        assert_eq!(ours, [(1, WcStatus::RemAccessErr as u32), (2, FLUSH), (8, FLUSH)]);
        assert_eq!(p.ends[0].qp.state(), QpState::Err);
        assert_eq!(p.hosts[0].events.take(), []);
        let access = DeviceEvent::Qp { qpn: p.ends[1].qp.qpn(), event: QpEvent::AccessError };
        assert_eq!(p.hosts[1].events.take(), [access]);
        assert_eq!(
            p.ends[0].qp.quiesce().unwrap_err().errno(),
            libc::EAGAIN,
            "its markers are awaited"
        );
        p.work();
        assert_eq!(
            p.ends[0].qp.quiesce().unwrap_err().errno(),
            libc::EINVAL,
            "it must not come back to life"
        );
    }
}

/// Sends that make no WC have succeeded, and nobody has said so when the peer's request ends the
/// QP.
#[test]
fn what_is_posted_to_a_qp_that_has_ended_is_flushed() {
    let p = pair(false);
    let sges = [p.hosts[1].sge(0, 8)];
    let mut silent = send_wr(20, SendOpcode::Write, false, &sges);
    (silent.remote_addr, silent.rkey) = (p.hosts[0].addr(0), p.hosts[0].keys.rkey);
    p.ends[1].qp.post_send(&silent).unwrap();
    let there = (p.hosts[1].id(p.ends[1].nic), p.ends[1].qp.qpn());
    p.net.execute(there.0, there.1);
    p.net.acknowledge(there.0, there.1);
    p.write(1, 9);
    p.work();
    assert_eq!((p.ends[1].qp.state(), p.wcs(1)), (QpState::Err, vec![]));
    p.ends[1].qp.post_send(&send_wr(21, SendOpcode::Write, true, &[])).unwrap();
    p.work();
    assert_eq!(p.wcs(1), [(21, FLUSH)]);
}

/// The provider takes a part of a list: the rest is not recorded, and the QP goes on.
#[test]
fn a_list_of_which_the_provider_refuses_one_is_posted_up_to_that_one() {
    let p = pair(true);
    let sges = [p.hosts[0].sge(0, 8)];
    let list = [1, 2, 3, 4].map(|wr_id| {
        let mut wr = send_wr(wr_id, SendOpcode::Write, true, &sges);
        (wr.remote_addr, wr.rkey) = (p.hosts[1].addr(0), p.hosts[1].keys.rkey);
        wr
    });
    for taken in 0..=4 {
        p.net.refuse_one_after(p.hosts[0].id(p.ends[0].nic), taken);
        let posted = p.ends[0].qp.post_list(&list).map_err(|(before, e)| (before, e.errno()));
        let right = if taken < 4 { Err((taken, libc::EINVAL)) } else { Ok(()) };
        assert_eq!(posted, right);
        assert_eq!(p.ends[0].qp.progress().outstanding_sends, taken as u32);
        (0..taken).for_each(|_| p.work());
        let completed: Vec<_> = (1..=taken as u64).map(|wr_id| (wr_id, 0)).collect();
        assert_eq!(p.wcs(0), completed);
    }
}

#[test]
fn a_network_error_is_told_once_and_kept_from_the_application() {
    let p = pair(false);
    p.write(1, p.hosts[1].keys.rkey);
    p.recv(0, 8);
    p.net.time_out(p.hosts[0].id(0), p.ends[0].qp.qpn());
    p.net.tell(p.hosts[0].id(0), false);
    assert_eq!(p.wcs(0), []);
    assert_eq!(p.wcs(0), []);
    let failed = DeviceEvent::QpFailed { qpn: p.ends[0].qp.qpn(), status: WcStatus::RetryExcErr };
    assert_eq!(p.hosts[0].events.take(), [failed]);
    assert_eq!(p.ends[0].qp.state(), QpState::Rts);
    p.write(2, 5); // kept
    p.ends[0].qp.fail(WcStatus::RetryExcErr);
    let mut wcs = p.wcs(0);
    wcs.sort_unstable();
    assert_eq!(wcs, [(1, WcStatus::RetryExcErr as u32), (2, FLUSH), (8, FLUSH)]);
    assert_eq!(p.ends[0].qp.state(), QpState::Err);
}

#[test]
fn a_key_that_the_peer_does_not_have_is_an_error_on_any_nic() {
    let mut p = pair(true);
    let net = p.net.clone();
    let tells = |hosts: &[Host; 2]| hosts.iter().for_each(|h| net.tell(h.id(0), false));
    switch(&p.hosts, &mut p.ends, 1, tells);
    p.write(1, p.hosts[1].keys.rkey);
    p.write(2, 9);
    p.work();
    assert_eq!(p.wcs(0), [], "the peer has not answered yet");
    exchange_keys(&p.hosts, &p.ends);
    p.work();
    assert_eq!(p.wcs(0), [(1, 0)]);
    exchange_keys(&p.hosts, &p.ends);
    p.work();
    assert_eq!(p.wcs(0), [(2, WcStatus::RemAccessErr as u32)]);
}

#[test]
fn an_application_that_goes_to_err_and_resets_begins_anew() {
    let p = pair(true);
    p.write(1, p.hosts[1].keys.rkey);
    let to = |state| {
        let rc = RcModify { state: Some(state), ..RcModify::default() };
        p.ends[0].qp.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    };
    to(QpState::Err);
    p.recv(0, 8);
    p.work();
    let mut wcs = p.wcs(0);
    wcs.sort_unstable();
    assert_eq!(wcs, [(1, FLUSH), (8, FLUSH)]);
    assert_eq!(p.hosts[0].events.take(), []);
    to(QpState::Reset);
    assert_eq!(p.ends[0].qp.state(), QpState::Reset);
    assert!(p.ends[0].qp.post_recv(&RecvWr { wr_id: 1, sges: &[] }).is_err());
    let ends = [End::new(&p.hosts[0], true, None), End::new(&p.hosts[1], true, None)];
    connect(&p.hosts, &ends);
    assert_eq!(ends[0].qp.progress().outstanding_sends, 0);
}

/// A flush waits for a look at the other CQ, which another thread is at. What other QPs complete
/// meanwhile comes all the same.
#[test]
fn a_flush_that_waits_for_its_reason_holds_nothing_back() {
    for sources in [false, true] {
        let net = Net::new(sources);
        let hosts = [Host::new(&net, 0, 64, false), Host::new(&net, 1, 64, false)];
        let failing = [End::new(&hosts[0], false, None), End::new(&hosts[1], true, None)];
        let (cq, recv_cq) = (failing[0].cq.clone(), failing[0].recv_cq.clone());
        let here = End::over(&hosts[0], cq.clone(), recv_cq.clone(), None);
        let others = [here, End::new(&hosts[1], true, None)];
        [&failing, &others].iter().for_each(|ends| connect(&hosts, ends));
        failing[0].qp.post_recv(&RecvWr { wr_id: 1, sges: &[] }).unwrap();
        failing[0].qp.post_send(&send_wr(2, SendOpcode::Send, true, &[])).unwrap();
        net.time_out(hosts[0].id(0), failing[0].qp.qpn());
        net.tell(hosts[0].id(0), false);
        let elsewhere = cq.turn();
        let poll = || others[0].poll(&recv_cq).iter().map(|wc| wc.wr_id).collect::<Vec<_>>();
        assert_eq!(poll(), [], "the flush is kept back");
        assert_eq!(hosts[0].events.take(), [], "its reason is not known");

        others[0].qp.post_recv(&RecvWr { wr_id: 3, sges: &[] }).unwrap();
        others[1].qp.post_send(&send_wr(4, SendOpcode::Send, true, &[])).unwrap();
        net.execute(hosts[1].id(0), others[1].qp.qpn());
        net.tell(hosts[0].id(0), false);
        assert_eq!(poll(), [3], "sources: {sources}");
        drop(elsewhere);
        assert_eq!((poll(), hosts[0].events.take().len()), (vec![], 1), "now it is");
    }
}
