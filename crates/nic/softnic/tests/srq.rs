//! Shared receive queues: QPs of two NICs take from one, and what a QP has begun comes back however
//! the QP ends.

mod common;

use common::*;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::Arc;
use std::time::Instant;
use unbroken_types::{PdHandle, QpState, QpType, WcStatus};
use unbroken_verbs::{
    Device, DeviceEvent, DeviceQp, QpEvent, QpInit, QpModify, RcModify, Srq, SrqAttr,
};

const LONG: usize = 1 << 20;

/// A queue whose receives lie in the host's buffer, and how often its limit was told.
fn queue(host: &Host) -> (Arc<Srq>, Arc<AtomicU32>) {
    let told = Arc::new(AtomicU32::new(0));
    let count = told.clone();
    let on_limit = move || {
        count.fetch_add(1, SeqCst);
    };
    let srq = Srq::new(
        &host.nics.attr(0),
        host.pd,
        SrqAttr { max_wr: 16, max_sge: 2, limit: 0 },
        on_limit,
    );
    (srq.unwrap(), told)
}

fn post(srq: &Srq, host: &Host, wr_id: u64, offset: usize, len: usize) {
    srq.post(&recv(wr_id, &[host.sge(offset, len / 2), host.sge(offset + len / 2, len - len / 2)]))
        .unwrap();
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

fn last_wqe(qp: &dyn DeviceQp) -> impl Fn(&DeviceEvent) -> bool + use<> {
    let event = DeviceEvent::Qp { qpn: qp.qpn(), event: QpEvent::LastWqeReached };
    move |e| *e == event
}

#[test]
fn qps_of_two_nics_take_from_one_queue() {
    let world = World::new();
    let mut a = Host::new(&world, "a", 0, 1 << 16);
    let nics = world.nics("b");
    let hosts = [0, 1].map(|i| Host::with_channel(nics.clone(), i, 1 << 16, None));
    let (srq, told) = queue(&hosts[0]);
    let data = pattern(20_000, 7);
    a.fill(0, &data);
    let pairs: Vec<_> = hosts
        .iter()
        .map(|b| {
            let (qa, qb) = (a.qp(|_| {}), b.qp(|i| i.srq = Some(srq.clone())));
            connect(&*qa, &*qb, &b.nic).unwrap();
            connect(&*qb, &*qa, &a.nic).unwrap();
            assert_eq!((qb.query().caps.max_recv_wr, qb.query().caps.max_recv_sge), (0, 0));
            assert_eq!(qb.post_recv(&recv(1, &[])).unwrap_err().errno(), libc::EINVAL);
            (qa, qb)
        })
        .collect();
    for wr_id in 0..4 {
        post(&srq, &hosts[0], wr_id, wr_id as usize * 10_000, 10_000);
    }
    srq.modify(None, Some(2)).unwrap();
    // Three messages to each, for which four receives are there.
    for (i, (qa, _)) in pairs.iter().enumerate() {
        for n in 0..3 {
            let len = 9000 + 100 * i + n;
            qa.post_send(&send(len as u64, &[a.sge(i * 500 + n, len)])).unwrap();
        }
    }
    wait_until("the four receives are taken", || srq.is_empty());
    post(&srq, &hosts[0], 4, 40_000, 10_000);
    post(&srq, &hosts[0], 5, 50_000, 10_000);
    let mut used = vec![];
    for (i, b) in hosts.iter().enumerate() {
        for (n, wc) in b.poll(3).iter().enumerate() {
            let (len, from, at) = (9000 + 100 * i + n, i * 500 + n, wc.wr_id as usize * 10_000);
            assert_eq!((wc.status, wc.byte_len as usize), (WcStatus::Success as u32, len));
            assert!(hosts[0].bytes(at, len) == data[from..from + len], "message {n} of QP {i}");
            used.push(wc.wr_id);
        }
    }
    used.sort_unstable();
    assert_eq!(used, [0, 1, 2, 3, 4, 5]);
    assert_eq!((told.load(SeqCst), srq.len()), (1, 0));
    assert_eq!(a.poll(6).iter().filter(|wc| wc.status != WcStatus::Success as u32).count(), 0);
    // The domain of the receives is not that of the second QP, and stays while the queue needs it:
    // its owner counts it.
    hosts[0].nics.memory().use_pd(srq.pd()).unwrap();
    hosts[0].nics.memory().unuse_pd(srq.pd());
    assert!(hosts[0].nics.memory().use_pd(PdHandle(9999)).is_err());
}

/// A pair in the middle of a long message into a shared receive.
fn in_mid_message(change: impl Fn(&mut QpInit)) -> (Pair, Arc<Srq>) {
    let world = World::new();
    let (a, b) = (Host::new(&world, "a", 0, LONG), Host::new(&world, "b", 0, LONG));
    let (srq, _) = queue(&b);
    post(&srq, &b, 1, 0, LONG);
    post(&srq, &b, 2, 0, LONG);
    let (qa, qb) = (a.qp(|_| {}), b.qp(|i| (i.srq = Some(srq.clone()), change(i)).1));
    connect(&*qa, &*qb, &b.nic).unwrap();
    connect(&*qb, &*qa, &a.nic).unwrap();
    world.fault("rate a/0 20Mbit");
    qa.post_send(&send(1, &[a.sge(0, LONG)])).unwrap();
    wait_until("the message has begun", || srq.len() == 1);
    (Pair { world, a, b, qa, qb }, srq)
}

#[test]
fn what_a_qp_has_begun_goes_back_where_the_qp_does_not_fail() {
    let (p, srq) = in_mid_message(|_| {});
    p.qb.destroy();
    assert_eq!(srq.len(), 2);
    let (p, srq) = in_mid_message(|_| {});
    let reset = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
    p.qb.modify(&QpModify { rc: reset, ..QpModify::default() }).unwrap();
    assert_eq!(srq.len(), 2);
    // On a dead NIC, a QP that holds on failure keeps it until it is moved.
    let (p, srq) = in_mid_message(|i| i.suspend_on_error = true);
    p.world.fault("nic b/0 dead");
    p.b.events.wait(|e| matches!(e, DeviceEvent::QpFailed { .. }));
    assert_eq!(srq.len(), 1);
    let backlog = p.qb.quiesce().unwrap();
    assert_eq!((backlog.recvs.len(), srq.len()), (0, 2));
    assert_eq!(p.b.events.count(last_wqe(&*p.qb)), 0);
    assert_eq!(p.b.cq.take(&mut [unbroken_types::Wc::default()]).unwrap(), 0);
}

#[test]
fn a_qp_that_fails_takes_its_receive_along_and_says_so() {
    let (p, srq) = in_mid_message(|_| {});
    p.world.fault("nic b/0 dead");
    p.b.events.wait(last_wqe(&*p.qb));
    let wc = p.b.poll(1)[0];
    assert_eq!((wc.wr_id, wc.status, srq.len()), (1, WcStatus::WrFlushErr as u32, 1));

    let (p, srq) = in_mid_message(|_| {});
    let err = RcModify { state: Some(QpState::Err), ..RcModify::default() };
    for _ in 0..2 {
        p.qb.modify(&QpModify { rc: err, ..QpModify::default() }).unwrap();
    }
    p.b.events.wait(last_wqe(&*p.qb));
    assert_eq!((p.b.poll(1)[0].wr_id, srq.len(), p.b.events.count(last_wqe(&*p.qb))), (1, 1, 1));

    for qp_type in [QpType::Ud, QpType::Uc] {
        let init = QpInit { srq: Some(srq.clone()), ..p.b.init(qp_type) };
        let qp = p.b.nic.create_qp(&init).unwrap();
        qp.modify(&QpModify { rc: err, ..QpModify::default() }).unwrap();
        p.b.events.wait(last_wqe(&*qp));
    }
}
