//! UD: datagrams to anyone who has the key.

mod common;

use common::*;
use unbroken_types::{Access, QpState, QpType, WcFlags};
use unbroken_verbs::{Device, DeviceQp, QpModify, RcModify, SendWr, UdDest};

const GRH: usize = 40;

fn ready(qp: &dyn DeviceQp, qkey: u32) {
    for (state, qkey, sq_psn) in [
        (QpState::Init, Some(qkey), None),
        (QpState::Rtr, None, None),
        (QpState::Rts, None, Some(5)),
    ] {
        let rc =
            RcModify { state: Some(state), sq_psn, access: None::<Access>, ..RcModify::default() };
        qp.modify(&QpModify { rc, qkey, ..QpModify::default() }).unwrap();
    }
}

#[test]
fn datagrams() {
    let world = World::new();
    let (mut a, b) = (Host::new(&world, "a", 0, 1 << 16), Host::new(&world, "b", 3, 1 << 16));
    let (qa, qb) = (
        a.nic.create_qp(&a.init(QpType::Ud)).unwrap(),
        b.nic.create_qp(&b.init(QpType::Ud)).unwrap(),
    );
    ready(&*qa, 0x11);
    ready(&*qb, 0x22);
    let data = pattern(4096, 1);
    a.fill(0, &data);
    let sges = [a.sge(0, 4096)];
    let to = |qkey| UdDest {
        gid: b.nic.gid(),
        qpn: qb.qpn(),
        qkey,
        grh: false,
        sgid_index: 0,
        ..UdDest::default()
    };
    qb.post_recv(&recv(1, &[b.sge(0, GRH + 4096)])).unwrap();
    // One with a wrong key, which is dropped, then a right one.
    qa.post_send(&SendWr { ud: Some(to(0x33)), ..send(1, &sges) }).unwrap();
    qa.post_send(&SendWr { ud: Some(to(0x22)), ..send(2, &sges) }).unwrap();
    let sent = a.poll(2);
    assert_ok(&sent[0], 1);
    assert_ok(&sent[1], 2);
    let wc = b.poll(1)[0];
    assert_ok(&wc, 1);
    assert_eq!((wc.src_qp, wc.byte_len as usize), (qa.qpn(), GRH + 4096));
    assert_ne!(wc.wc_flags & WcFlags::GRH, 0);
    assert_eq!(b.bytes(GRH, 4096), data);
    // The GRH tells where an answer goes.
    let from = b.bytes(GRH - 8, 4);
    assert_eq!(from, a.nic.gid().to_ipv4().unwrap().octets());
    assert_eq!(qa.query().attrs.qkey, Some(0x11));
    assert!(qa.post_send(&send(3, &sges)).is_err(), "a send without a destination");
}
