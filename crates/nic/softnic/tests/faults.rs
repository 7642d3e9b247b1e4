//! Faults of the emulated network, as the application's side sees them.

mod common;

use common::*;
use std::net::UdpSocket;
use std::sync::Arc;
use unbroken_types::{PathAttr, PeerDone, QpState, SendEntry, SendOpcode, WcStatus};
use unbroken_verbs::{Device, DeviceEvent, DeviceQp, QpModify, RcModify};

#[test]
fn a_dead_nic_says_so_and_flushes() {
    let p = Pair::new();
    p.qa.post_recv(&recv(5, &[p.a.sge(0, 10)])).unwrap();
    p.world.fault("nic a/0 dead");
    p.a.events.wait(|e| *e == DeviceEvent::Fatal);
    assert!(!p.a.nic.alive() && !p.a.nic.usable());
    assert_eq!(p.qa.post_send(&send(1, &[])).unwrap_err().errno(), libc::EIO);
    assert_eq!(p.qa.post_recv(&recv(1, &[])).unwrap_err().errno(), libc::EIO);
    assert!(p.a.nic.create_qp(&p.a.init(unbroken_types::QpType::Rc)).is_err());
    let wc = p.a.poll(1)[0];
    assert_eq!((wc.wr_id, wc.status), (5, WcStatus::WrFlushErr as u32));
    assert_eq!(p.qa.state(), QpState::Err);
    // The peer hears nothing any more.
    p.qb.post_send(&send(2, &[])).unwrap();
    assert_eq!(p.b.poll(1)[0].status, WcStatus::RetryExcErr as u32);
    assert_eq!(p.b.events.count(|e| matches!(e, DeviceEvent::Fatal | DeviceEvent::PortDown(1))), 0);
    // Regions outlive the NIC.
    p.a.nics.memory().dereg_mr(p.a.mr.lkey).unwrap();
}

#[test]
fn a_qp_that_holds_keeps_everything_when_its_nic_dies() {
    let p = Pair::with(|i| i.suspend_on_error = true);
    // No receive at the peer: the send stays outstanding.
    p.qa.post_send(&send(1, &[p.a.sge(0, 10)])).unwrap();
    p.qa.post_recv(&recv(2, &[p.a.sge(0, 10)])).unwrap();
    p.world.fault("nic a/0 dead");
    let failed = DeviceEvent::QpFailed { qpn: p.qa.qpn(), status: WcStatus::FatalErr };
    p.a.events.wait(|e| *e == failed);
    let backlog = p.qa.quiesce().unwrap();
    assert_eq!((backlog.sends.len(), backlog.recvs.len()), (1, 1));
    assert!(backlog.sends[0].started);
    p.qa.destroy();
    assert_eq!(p.a.cq.poll(&mut [unbroken_types::Wc::default(); 4]).unwrap(), 0);
    assert_eq!(p.a.events.count(|e| *e == failed), 1);
}

#[test]
fn a_dead_nic_can_be_opened_again_when_it_is_well() {
    let p = Pair::new();
    p.world.fault("nic a/0 dead");
    p.a.events.wait(|e| *e == DeviceEvent::Fatal);
    assert_eq!(p.a.nics.open(0, p.a.events.clone()).err().unwrap().errno(), libc::EIO);
    p.world.clear();
    p.a.events.wait(|e| *e == DeviceEvent::PortActive(1));
    // The old handle stays dead.
    assert!(!p.a.nic.alive());
    wait_until_free(&*p.a.nic);
    let nic = p.a.nics.open(0, p.a.events.clone()).unwrap();
    assert_eq!(nic.slot(), 0, "the slot of the dead NIC is free");
    let qa = nic.create_qp(&p.a.init(unbroken_types::QpType::Rc)).unwrap();
    assert_ne!(qa.qpn(), p.qa.qpn());
    let qb = p.b.qp(|_| {});
    connect(&*qa, &*qb, &p.b.nic).unwrap();
    connect(&*qb, &*qa, &nic).unwrap();
    qb.post_recv(&recv(1, &[p.b.sge(0, 10)])).unwrap();
    qa.post_send(&send(2, &[p.a.sge(0, 10)])).unwrap();
    assert_ok(&p.b.poll(1)[0], 1);
    assert_ok(&p.a.poll(1)[0], 2);
    assert_eq!(p.a.nics.open(0, p.a.events.clone()).err().unwrap().errno(), libc::EBUSY);
}

#[test]
fn a_port_that_goes_down_and_up() {
    let p = Pair::new();
    p.world.fault("nic a/0 down");
    p.a.events.wait(|e| *e == DeviceEvent::PortDown(1));
    assert!(p.a.nic.alive() && !p.a.nic.usable());
    p.qa.post_send(&send(1, &[])).unwrap();
    assert_eq!(p.a.poll(1)[0].status, WcStatus::RetryExcErr as u32);
    p.world.clear();
    p.a.events.wait(|e| *e == DeviceEvent::PortActive(1));
    assert!(p.a.nic.usable());
    assert_eq!(p.b.events.count(|_| true), 0);
}

#[test]
fn a_cut_cable_is_silence() {
    for fault in ["cable a/0 cut", "switch rail0 down"] {
        let p = Pair::with(|i| i.suspend_on_error = true);
        p.world.fault(fault);
        p.qa.post_send(&send(1, &[])).unwrap();
        p.qb.post_send(&send(1, &[])).unwrap();
        for (host, qp) in [(&p.a, &p.qa), (&p.b, &p.qb)] {
            let failed = DeviceEvent::QpFailed { qpn: qp.qpn(), status: WcStatus::RetryExcErr };
            host.events.wait(|e| *e == failed);
            assert_eq!(host.events.count(|e| *e != failed), 0, "{fault}");
            assert!(host.nic.usable());
        }
        // Whoever holds the QP may give up as a plain QP would have.
        p.qa.fail(WcStatus::RetryExcErr);
        assert_eq!(p.a.poll(1)[0].status, WcStatus::RetryExcErr as u32);
    }
}

#[test]
fn loss_costs_time_and_nothing_else() {
    let mut p = Pair::new();
    p.world.fault("loss a/0 3%");
    let data = pattern(1 << 20, 5);
    p.a.fill(0, &data);
    for i in 0..4 {
        p.qb.post_recv(&recv(i, &[p.b.sge((i as usize) << 18, 1 << 18)])).unwrap();
        p.qa.post_send(&send(i, &[p.a.sge((i as usize) << 18, 1 << 18)])).unwrap();
    }
    for (i, wc) in p.b.poll(4).iter().enumerate() {
        assert_ok(wc, i as u64);
    }
    assert_eq!(p.b.bytes(0, 1 << 20), data);
    p.a.poll(4);
    p.qa.post_send(&rdma(
        9,
        SendOpcode::Read,
        &[p.a.sge(2 << 20, 1 << 20)],
        p.b.addr(0),
        p.b.mr.rkey,
    ))
    .unwrap();
    assert_ok(&p.a.poll(1)[0], 9);
    assert_eq!(p.a.bytes(2 << 20, 1 << 20), data);
}

/// What shift does: a stream of sends goes on over another NIC, none lost, none twice.
#[test]
fn a_stream_moves_to_another_nic() {
    let p = Pair::with(|i| {
        i.suspend_on_error = true;
        i.wc_qpn = Some(0x77_7777);
    });
    let (a1, b1) = (
        p.a.nics.open(1, p.a.events.clone()).unwrap(),
        p.b.nics.open(1, p.b.events.clone()).unwrap(),
    );
    let fresh = |host: &Host, nic: &Arc<unbroken_softnic::Nic>| {
        let mut init = host.init(unbroken_types::QpType::Rc);
        init.suspend_on_error = true;
        init.wc_qpn = Some(0x77_7777);
        nic.create_holding_qp(&init).unwrap()
    };
    for i in 0..20 {
        p.qb.post_recv(&recv(i, &[p.b.sge(i as usize * 8, 8)])).unwrap();
    }
    let mut a = p.a;
    for i in 0..20usize {
        a.fill(i * 8, &(i as u64).to_le_bytes());
    }
    for i in 0..10 {
        p.qa.post_send(&send(i, &[a.sge(i as usize * 8, 8)])).unwrap();
    }
    a.poll(10);
    // The ACKs of the next ones are lost, then the NIC dies.
    p.world.fault("loss b/0 100% tx");
    for i in 10..15 {
        p.qa.post_send(&send(i, &[a.sge(i as usize * 8, 8)])).unwrap();
    }
    p.b.poll(15);
    p.world.fault("nic a/0 dead");
    a.events.wait(|e| matches!(e, DeviceEvent::QpFailed { .. }));
    let (mut old_a, old_b) = (p.qa.quiesce().unwrap(), p.qb.quiesce().unwrap());
    assert_eq!(
        (old_a.sends.len(), old_a.completed.all, old_b.executed.all, old_b.recvs.len()),
        (5, 10, 15, 5)
    );
    let (qa, qb) = (fresh(&a, &a1), fresh(&p.b, &b1));
    let peer_done = old_b.executed.all - old_a.completed.all;
    assert!(!old_a.unsafe_to_replay(PeerDone::Messages(peer_done)));
    assert_eq!(old_a.mark_executed(PeerDone::Messages(peer_done)).replayed, 0);
    // Posted while there is no QP that could take it.
    for i in 15..20 {
        old_a.sends.push(SendEntry::from(&send(i, &[a.sge(i as usize * 8, 8)])));
    }
    for (qp, backlog) in [(&qa, old_a), (&qb, old_b)] {
        let init =
            RcModify { state: Some(QpState::Init), access: Some(ALL), ..RcModify::default() };
        qp.adopt(backlog).unwrap();
        qp.modify(&QpModify { rc: init, ..QpModify::default() }).unwrap();
    }
    p.qa.destroy();
    p.qb.destroy();
    go_on(&*qa, qb.qpn(), &b1);
    go_on(&*qb, qa.qpn(), &a1);
    let (sent, received) = (a.poll(10), p.b.poll(5));
    for (i, wc) in sent.iter().enumerate() {
        assert_ok(wc, 10 + i as u64);
        assert_eq!(wc.qp_num, 0x77_7777);
    }
    for (i, wc) in received.iter().enumerate() {
        assert_ok(wc, 15 + i as u64);
    }
    for i in 0..20usize {
        assert_eq!(p.b.bytes(i * 8, 8), (i as u64).to_le_bytes());
    }
}

/// Connects a QP that is in INIT.
fn go_on(qp: &dyn DeviceQp, peer: u32, peer_nic: &unbroken_softnic::Nic) {
    let steps = [
        RcModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(peer),
            rq_psn: Some(9),
            mtu: Some(unbroken_types::Mtu::B1024),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(1),
            ..RcModify::default()
        },
        RcModify {
            state: Some(QpState::Rts),
            sq_psn: Some(9),
            timeout: Some(TIMEOUT),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(1),
            ..RcModify::default()
        },
    ];
    for rc in steps {
        let path = (rc.state == Some(QpState::Rtr)).then(|| PathAttr::new(peer_nic.gid()));
        qp.modify(&QpModify { rc, path, ..QpModify::default() }).unwrap();
    }
}

#[test]
fn garbage_and_strangers_are_dropped() {
    let p = Pair::new();
    let to = (p.a.nics.ip(0).unwrap(), 4791 + p.a.nic.slot());
    let stranger = UdpSocket::bind((p.b.nics.ip(1).unwrap(), 0)).unwrap();
    for i in 0..500u64 {
        stranger.send_to(&pattern((i as usize * 37) % 3000, i + 1), to).unwrap();
    }
    // A packet that is right in itself but comes from another address than the peer's.
    let flow = unbroken_wire::IcrcFlow {
        src_ip: stranger.local_addr().unwrap().ip(),
        dst_ip: to.0,
        src_port: stranger.local_addr().unwrap().port(),
        dst_port: to.1,
    };
    let bth = unbroken_wire::Bth {
        opcode: unbroken_wire::Opcode::rc(unbroken_wire::Op::SendOnly),
        solicited: false,
        mig_req: false,
        pad: 0,
        pkey: 0xffff,
        dest_qpn: p.qa.qpn(),
        ack_req: true,
        psn: 0x100,
    };
    let mut packet =
        unbroken_wire::HeaderBuf::new(&bth, &unbroken_wire::Ext::None).as_slice().to_vec();
    packet.extend_from_slice(b"evil");
    packet.extend_from_slice(&unbroken_wire::Icrc::of(&flow, 0, &packet).unwrap());
    stranger.send_to(&packet, to).unwrap();
    p.qa.post_recv(&recv(1, &[p.a.sge(0, 4)])).unwrap();
    p.qb.post_send(&send(2, &[p.b.sge(0, 4)])).unwrap();
    assert_ok(&p.a.poll(1)[0], 1);
    assert_eq!(p.a.bytes(0, 4), [0; 4]);
    let page = unbroken_fabric::NicPage::open(p.world.fabric.runtime(), to.0).unwrap().counters();
    assert!(page.icrc_errors + page.drops >= 400, "{page:?}");
}

/// Two processes (here: two sets of NICs) have the same NIC open.
#[test]
fn processes_share_a_nic() {
    let world = World::new();
    let one = Host::new(&world, "b", 2, 4096);
    let two = Host::new(&world, "b", 2, 4096);
    let a = Host::new(&world, "a", 2, 4096);
    assert_ne!(one.nic.slot(), two.nic.slot());
    for (i, b) in [&one, &two].into_iter().enumerate() {
        let (qa, qb) = (a.qp(|_| {}), b.qp(|_| {}));
        assert_eq!(qb.qpn() >> 16, u32::from(b.nic.slot()));
        connect(&*qa, &*qb, &b.nic).unwrap();
        connect(&*qb, &*qa, &a.nic).unwrap();
        qb.post_recv(&recv(i as u64, &[b.sge(0, 10)])).unwrap();
        qa.post_send(&send(9, &[a.sge(0, 10)])).unwrap();
        assert_ok(&b.poll(1)[0], i as u64);
        assert_ok(&a.poll(1)[0], 9);
    }
}

/// Handles may be dropped in any order, and a NIC ends with the last of them.
#[test]
fn closing() {
    let p = Pair::new();
    let Pair { a, b, qa, qb, world } = p;
    let nics = a.nics.clone();
    drop((a, b));
    qa.post_send(&send(1, &[])).unwrap();
    drop(qb);
    drop(qa);
    let again = Host::with_channel(nics, 0, 16, None);
    assert_eq!(again.nic.slot(), 0);
    drop(world);
}
