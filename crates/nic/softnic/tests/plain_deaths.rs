//! How a plain NIC dies: its QPs flush, some of them late, and posts fail with one errno or
//! another.

mod common;

use common::*;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;
use unbroken_softnic::{Config, SoftNics};
use unbroken_types::{QpState, QpType, SendFlags, SendOpcode, Wc, WcStatus};
use unbroken_verbs::{
    Device, DeviceEvent, DeviceQp, MrChange, QpEvent, QpInit, QpModify, RcModify, SendWr, SrqAttr,
};

/// Ways to die; QPs made one after another have all of them.
const DEATHS: usize = 8;
const FLUSHED: u32 = WcStatus::WrFlushErr as u32;

/// A host with so many connected QPs as there are ways to die, and their peers.
struct Deaths {
    world: World,
    a: Host,
    b: Host,
    qps: Vec<Arc<dyn DeviceQp>>,
    _peers: Vec<Arc<dyn DeviceQp>>,
}

impl Deaths {
    fn new() -> Deaths {
        Deaths::of_seed(0)
    }

    fn of_seed(seed: u64) -> Deaths {
        let world = World::plain(&[]);
        let config = Config { seed, ..Config::host(world.fabric.runtime().clone(), "a") };
        let a = Host::with_channel(SoftNics::new(config).unwrap(), 0, 4096, None);
        let b = Host::new(&world, "b", 0, 4096);
        let (qps, peers) = (0..DEATHS).map(|_| plain_pair(&a, &b)).unzip();
        Deaths { world, a, b, qps, _peers: peers }
    }

    fn kill(&self) {
        self.world.fault("nic a/0 dead");
        self.a.events.wait(|e| *e == DeviceEvent::Fatal);
    }
}

fn unsignaled(wr_id: u64) -> SendWr<'static> {
    SendWr { flags: SendFlags::default(), ..send(wr_id, &[]) }
}

/// What posts to each QP of a dead NIC come to, at once and after it has flushed all.
#[test]
fn posts_are_taken_for_a_while_or_refused_for_one_reason_or_another() {
    let d = Deaths::new();
    let began = Instant::now();
    d.kill();
    // Two for each QP; those that are taken are flushed.
    let mut taken = Vec::new();
    let mut refused = Vec::new();
    for (i, qp) in d.qps.iter().enumerate() {
        match (qp.post_send(&unsignaled(i as u64)), qp.post_recv(&recv(100 + i as u64, &[]))) {
            (Ok(()), Ok(())) => taken.push(i),
            (Err(send), Err(recv)) => {
                assert_eq!(send.errno(), recv.errno());
                refused.push(send.errno());
            }
            // Its time was over between the two.
            (Ok(()), Err(_)) => taken.push(i),
            (Err(_), Ok(())) => panic!("QP {i} came to life again"),
        }
    }
    let late = began.elapsed();
    let wcs = d.a.poll_some(taken.len());
    assert!(
        wcs.iter().all(|wc| wc.status == FLUSHED || wc.status == WcStatus::FatalErr as u32),
        "{wcs:?}"
    );
    // A machine that was busy elsewhere for longer than a NIC takes posts has seen none of them
    // taken.
    assert!(!taken.is_empty() || late.as_millis() >= 2, "after {late:?}");
    let all_flushed = || d.qps.iter().all(|qp| qp.state() == QpState::Err);
    while !all_flushed() {
        assert!(began.elapsed() < PATIENCE, "not all have flushed");
        std::thread::yield_now();
    }
    let errnos: Vec<i32> = d.qps.iter().map(|qp| errno(qp.post_send(&send(9, &[])))).collect();
    let all = HashSet::from([libc::EIO, libc::ENODEV, libc::EINVAL, libc::ENOMEM]);
    assert_eq!(errnos.iter().copied().collect::<HashSet<_>>(), all);
    assert!(refused.iter().all(|errno| all.contains(errno)));
    assert_eq!(
        d.qps.iter().map(|qp| errno(qp.post_recv(&recv(9, &[])))).collect::<Vec<_>>(),
        errnos
    );
    // Which QP has which follows from the seed.
    let again = |seed| {
        let d = Deaths::of_seed(seed);
        d.kill();
        d.qps.iter().for_each(|qp| qp.modify(&to(QpState::Err)).unwrap());
        d.qps.iter().map(|qp| errno(qp.post_send(&send(9, &[])))).collect::<Vec<_>>()
    };
    assert_eq!(again(0), errnos);
    assert_ne!(again(2), errnos);
}

fn to(state: QpState) -> QpModify {
    QpModify { rc: RcModify { state: Some(state), ..RcModify::default() }, ..QpModify::default() }
}

/// Without anybody who polls or posts, so it is the NIC's own thread that flushes.
#[test]
fn all_that_is_outstanding_is_flushed_though_nobody_asks() {
    let d = Deaths::new();
    let channel = d.a.nic.create_channel().unwrap();
    let cq = d.a.nic.create_cq(256, Some(channel.clone()), Box::new(|_| {})).unwrap();
    let init = QpInit { send_cq: cq.clone(), recv_cq: cq.clone(), ..d.a.init(QpType::Rc) };
    let pairs: Vec<_> = (0..DEATHS)
        .map(|_| {
            let (qa, qb) = (d.a.nic.create_qp(&init).unwrap(), plain_qp(&d.b));
            connect(&*qa, &*qb, &d.b.nic).unwrap();
            connect(&*qb, &*qa, &d.a.nic).unwrap();
            (qa, qb)
        })
        .collect();
    d.world.fault("cable a/0 cut");
    for (i, (qa, _)) in pairs.iter().enumerate() {
        let id = 10 * i as u64;
        qa.post_recv(&recv(id, &[])).unwrap();
        (1..4).for_each(|n| qa.post_send(&unsignaled(id + n)).unwrap());
    }
    d.kill();
    let (mut got, mut wcs) = (Vec::new(), [Wc::default(); 16]);
    loop {
        cq.arm(false);
        let n = cq.take(&mut wcs).unwrap();
        got.extend_from_slice(&wcs[..n]);
        if got.len() == 4 * DEATHS {
            break;
        }
        if n == 0 {
            next_event(&channel);
        }
    }
    for i in 0..DEATHS as u64 {
        let of: Vec<(u64, u32)> = got
            .iter()
            .filter(|wc| wc.wr_id / 10 == i)
            .map(|wc| (wc.wr_id % 10, wc.status))
            .collect();
        let sends: Vec<_> = of.iter().filter(|(id, _)| *id > 0).copied().collect();
        assert_eq!(
            sends,
            [(1, WcStatus::FatalErr as u32), (2, FLUSHED), (3, FLUSHED)],
            "in order, unsignaled ones too"
        );
        assert!(of.contains(&(0, FLUSHED)), "{of:?}");
    }
}

/// Messages under way while the NIC dies: whatever completes afterwards completes with an error.
#[test]
fn nothing_succeeds_after_the_death() {
    let d = Deaths::new();
    let mut wcs = [Wc::default(); 64];
    for round in 0..200 {
        if round == 100 {
            // The event comes before any post finds the NIC dead.
            d.kill();
            // What had completed by then.
            while d.a.cq.take(&mut wcs).unwrap() > 0 {}
        }
        for qp in &d.qps {
            let sges = [d.a.sge(0, 512)];
            let _ = qp.post_send(&rdma(1, SendOpcode::Write, &sges, d.b.addr(0), d.b.mr.rkey));
            let n = d.a.cq.poll(&mut wcs).unwrap();
            assert!(round < 100 || wcs[..n].iter().all(|wc| wc.status != 0), "{:?}", &wcs[..n]);
        }
    }
    let began = Instant::now();
    while d.qps.iter().any(|qp| qp.state() != QpState::Err) {
        assert!(began.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    loop {
        let n = d.a.cq.poll(&mut wcs).unwrap();
        assert!(wcs[..n].iter().all(|wc| wc.status != 0), "{:?}", &wcs[..n]);
        if n == 0 {
            break;
        }
    }
}

#[test]
fn to_err_and_to_destroy_are_what_can_be_done() {
    let d = Deaths::new();
    let sizes = SrqAttr { max_wr: 8, max_sge: 1, limit: 0 };
    let srq = d.a.nic.create_srq(d.a.pd, sizes, Box::new(|| {})).unwrap();
    let shared =
        d.a.nic.create_qp(&QpInit { srq: Some(srq.clone()), ..d.a.init(QpType::Rc) }).unwrap();
    connect(&*shared, &*d.qps[0], &d.b.nic).unwrap();
    d.kill();
    for qp in d.qps.iter().chain([&shared]) {
        // What is posted before it is moved there by the NIC itself is flushed by the move.
        let taken = qp.post_send(&send(5, &[])).is_ok();
        let refused = errno(qp.modify(&to(QpState::Reset)));
        assert!([libc::EIO, libc::ENODEV, libc::EINVAL, libc::ENOMEM].contains(&refused));
        qp.modify(&to(QpState::Err)).unwrap();
        assert_eq!(qp.state(), QpState::Err);
        let n = d.a.cq.take(&mut [Wc::default(); 8]).unwrap();
        assert_eq!(n, usize::from(taken), "at once");
        assert_eq!(errno(qp.post_send(&send(6, &[]))), refused);
    }
    let last =
        |e: &DeviceEvent| matches!(e, DeviceEvent::Qp { event: QpEvent::LastWqeReached, .. });
    d.a.events.wait(last);
    // Nothing more is made of it, and all that there is can be ended.
    let (nic, memory) = (&d.a.nic, d.a.nic.memory());
    assert_eq!(errno(nic.create_qp(&d.a.init(QpType::Rc))), libc::EIO);
    assert_eq!(errno(nic.create_cq(8, None, Box::new(|_| {}))), libc::EIO);
    assert_eq!(errno(nic.create_srq(d.a.pd, sizes, Box::new(|| {}))), libc::EIO);
    assert_eq!(errno(memory.alloc_pd()), libc::EIO);
    assert_eq!(errno(memory.reg_mr(d.a.pd, d.a.addr(0), 8, d.a.addr(0), ALL)), libc::EIO);
    assert_eq!(
        errno(memory.rereg_mr(d.a.mr.lkey, &MrChange { access: Some(ALL), ..MrChange::default() })),
        libc::EIO
    );
    assert_eq!(errno(memory.dealloc_pd(d.a.pd)), libc::EBUSY);
    d.qps.iter().for_each(|qp| qp.destroy());
    shared.destroy();
    memory.dereg_mr(d.a.mr.lkey).unwrap();
    memory.dealloc_pd(d.a.pd).unwrap();
}

/// A NIC that is opened again, once it is healed, is another: nothing that was made before is good
/// for it.
#[test]
fn a_healed_nic_is_a_new_one() {
    let d = Deaths::new();
    d.kill();
    d.world.clear();
    d.a.events.wait(|e| *e == DeviceEvent::PortActive(1));
    let again = Host::with_channel(d.a.nics.clone(), 0, 4096, None);
    assert!(again.nic.alive() && !d.a.nic.alive());
    assert_eq!(errno(again.nic.memory().use_pd(d.a.pd)), libc::EINVAL);
    let init = QpInit { send_cq: d.a.cq.clone(), ..again.init(QpType::Rc) };
    assert_eq!(errno(again.nic.create_qp(&init)), libc::EINVAL);
    assert!(d.a.nic.create_qp(&d.a.init(QpType::Rc)).is_err());
    let (qa, _qb) = plain_pair(&again, &d.b);
    let write = |lkey| {
        let sges = [unbroken_types::Sge { lkey, ..again.sge(0, 8) }];
        qa.post_send(&rdma(1, SendOpcode::Write, &sges, d.b.addr(0), d.b.mr.rkey)).unwrap();
        again.poll(1)[0].status
    };
    assert_eq!(write(again.mr.lkey), WcStatus::Success as u32);
    assert_eq!(write(d.a.mr.lkey), WcStatus::LocProtErr as u32);
}
