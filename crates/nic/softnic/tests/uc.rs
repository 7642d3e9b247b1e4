//! UC: a stream of messages between two NICs, without acknowledgement.

mod common;

use common::*;
use unbroken_types::{Access, Mtu, PathAttr, QpState, QpType, SendOpcode};
use unbroken_verbs::{Cq, Device, DeviceEvent, DeviceQp, QpEvent, QpInit, QpModify, RcModify};

fn ready(qp: &dyn DeviceQp, peer: &dyn DeviceQp, host: &Host) {
    let d = RcModify::default();
    let rtr = RcModify {
        state: Some(QpState::Rtr),
        dest_qpn: Some(peer.qpn()),
        rq_psn: Some(9),
        mtu: Some(Mtu::B1024),
        ..d
    };
    for (rc, dest) in [
        (RcModify { state: Some(QpState::Init), access: Some(Access(15)), ..d }, None),
        (rtr, Some(host.nic.gid())),
        (RcModify { state: Some(QpState::Rts), sq_psn: Some(9), ..d }, None),
    ] {
        qp.modify(&QpModify { rc, path: dest.map(PathAttr::new), ..QpModify::default() }).unwrap();
    }
}

#[test]
fn messages_and_writes() {
    let world = World::new();
    let (mut a, b) = (Host::new(&world, "a", 0, 1 << 16), Host::new(&world, "b", 1, 1 << 16));
    let (qa, qb) = (
        a.nic.create_qp(&a.init(QpType::Uc)).unwrap(),
        b.nic.create_qp(&b.init(QpType::Uc)).unwrap(),
    );
    ready(&*qa, &*qb, &b);
    ready(&*qb, &*qa, &a);
    let data = pattern(10_000, 1);
    a.fill(0, &data);
    let sges = [a.sge(0, 10_000)];
    qb.post_recv(&recv(1, &[b.sge(0, 10_000)])).unwrap();
    qb.post_recv(&recv(2, &[])).unwrap();
    qa.post_send(&send(1, &sges)).unwrap();
    qa.post_send(&rdma(2, SendOpcode::WriteImm, &sges, b.addr(20_000), b.mr.rkey)).unwrap();
    let sent = a.poll(2);
    assert_ok(&sent[0], 1);
    assert_ok(&sent[1], 2);
    let got = b.poll(2);
    assert_ok(&got[0], 1);
    assert_ok(&got[1], 2);
    assert_eq!((got[0].byte_len, got[1].byte_len), (10_000, 10_000));
    assert!(b.bytes(0, 10_000) == data && b.bytes(20_000, 10_000) == data);
    assert!(
        qa.post_send(&rdma(3, SendOpcode::Read, &sges, b.addr(0), b.mr.rkey)).is_err(),
        "READ needs RC"
    );
}

/// UC answers nothing, so nothing else gives the QP a turn.
#[test]
fn a_receiver_whose_completions_find_no_room_ends() {
    let world = World::new();
    let (a, b) = (Host::new(&world, "a", 0, 1 << 16), Host::new(&world, "b", 1, 1 << 16));
    let small = Cq::new(2, None);
    let init = QpInit { recv_cq: small.clone(), ..b.init(QpType::Uc) };
    let (qa, qb) = (a.nic.create_qp(&a.init(QpType::Uc)).unwrap(), b.nic.create_qp(&init).unwrap());
    ready(&*qa, &*qb, &b);
    ready(&*qb, &*qa, &a);
    for i in 0..3 {
        qb.post_recv(&recv(i, &[])).unwrap();
    }
    for i in 0..3 {
        qa.post_send(&send(i, &[])).unwrap();
    }
    b.events.wait(|e| *e == DeviceEvent::Qp { qpn: qb.qpn(), event: QpEvent::Fatal });
    assert_eq!((qb.state(), qa.state()), (QpState::Err, QpState::Rts));
    assert!(small.overrun() && !b.cq.overrun());
}
