//! NICs with two ports: each has its own address, counters and link; a QP may change from one to the other at run time.

mod common;

use common::*;
use unbroken_fabric::{Fabric, NicKind, NicPage, Runtime, Shape};
use unbroken_types::{LinkLayer, Mtu, PathAttr, SendOpcode, WcStatus};
use unbroken_verbs::{Device, DeviceEvent, PortState, QpModify};

fn world(link_layer: LinkLayer) -> World {
    let dir = tempfile::tempdir().unwrap();
    let kind = NicKind { link_layer, ports: 2, ..NicKind::default() };
    let shape = Shape { kind, ..Shape::of(0, &["a", "b"], 1) };
    let fabric = Fabric::create(&Runtime::at(dir.path()).unwrap(), &shape).unwrap();
    World { dir, fabric }
}

/// Payload that NIC 0 of host a has sent through a port.
fn sent(world: &World, port: u8) -> u64 {
    let addr = world.fabric.port_addr("a", 0, port).unwrap();
    NicPage::open(&Runtime::at(world.dir.path()).unwrap(), addr.into()).unwrap().counters().tx_payload_bytes
}

#[test]
fn a_qp_changes_its_port_at_run_time() {
    for link_layer in [LinkLayer::Ethernet, LinkLayer::Infiniband] {
        let world = world(link_layer);
        let (a, b) = (Host::new(&world, "a", 0, 4096), Host::new(&world, "b", 0, 4096));
        assert_eq!(a.nics.attr(0).phys_port_cnt, 2);
        assert!(a.nic.port(0).is_err());
        assert!(a.nic.port(3).unwrap_err().to_string().contains("ports 1 to 2"));
        let (qa, qb) = (a.qp(|_| {}), b.qp(|_| {}));
        connect(&*qa, &*qb, &b.nic).unwrap();
        connect(&*qb, &*qa, &a.nic).unwrap();
        let write = |wr_id| {
            let sges = [a.sge(0, 1000)];
            qa.post_send(&rdma(wr_id, SendOpcode::Write, &sges, b.addr(0), b.mr.rkey)).unwrap();
            a.poll(1)[0].status
        };
        assert_eq!(write(1), WcStatus::Success as u32);
        assert_eq!((sent(&world, 1), sent(&world, 2)), (1000, 0));
        for (qp, peer) in [(&qa, &b), (&qb, &a)] {
            let path = PathAttr { port: 2, ..PathAttr::new(peer.nic.port(2).unwrap().gids[0].gid) };
            qp.modify(&QpModify { port: Some(2), path: Some(path), ..QpModify::default() }).unwrap();
            assert_eq!(qp.query().attrs.port, Some(2));
            assert!(qp.modify(&QpModify { port: Some(3), ..QpModify::default() }).is_err());
        }
        assert_eq!(write(2), WcStatus::Success as u32);
        assert_eq!((sent(&world, 1), sent(&world, 2)), (1000, 1000));
    }
}

#[test]
fn each_port_has_its_own_link() {
    let world = world(LinkLayer::Ethernet);
    let (a, b) = (Host::new(&world, "a", 0, 4096), Host::new(&world, "b", 0, 4096));
    let state = |port| a.nic.port(port).unwrap().state;
    world.fault("nic a/0/2 down");
    a.events.wait(|e| *e == DeviceEvent::PortDown(2));
    assert!(a.nic.usable() && (state(1), state(2)) == (PortState::Active, PortState::Down));
    let (qa, qb) = (a.qp(|_| {}), b.qp(|_| {}));
    connect(&*qa, &*qb, &b.nic).unwrap();
    connect(&*qb, &*qa, &a.nic).unwrap();
    qa.post_send(&send(1, &[])).unwrap();
    assert_eq!(b.events.count(|_| true), 0);
    // There was no receive: the answer that says so has come, through port 1.
    qa.modify(&QpModify { port: Some(2), ..QpModify::default() }).unwrap();
    assert_eq!(a.poll(1)[0].status, WcStatus::RetryExcErr as u32);
    world.clear();
    a.events.wait(|e| *e == DeviceEvent::PortActive(2));
    assert_eq!(state(2), PortState::Active);
    // Each hangs on a switch of its own, and a NIC does not know of that.
    for (port, switch, passes) in [(1, "rail0", false), (1, "rail0b", true), (2, "rail0b", false), (2, "rail0", true)] {
        world.fault(&format!("switch {switch} down"));
        let (qa, qb) = (a.qp(|_| {}), b.qp(|_| {}));
        for (qp, peer, to) in [(&qa, &qb, &b), (&qb, &qa, &a)] {
            let gid = to.nic.port(port).unwrap().gids[0].gid;
            connect_slowly(&**qp, peer.qpn(), gid, 0x100, Mtu::B4096, 8).unwrap();
            qp.modify(&QpModify { port: Some(port), ..QpModify::default() }).unwrap();
        }
        qa.post_send(&rdma(1, SendOpcode::Write, &[a.sge(0, 8)], b.addr(0), b.mr.rkey)).unwrap();
        let expected = if passes { WcStatus::Success } else { WcStatus::RetryExcErr };
        assert_eq!(a.poll(1)[0].status, expected as u32, "port {port}, {switch} down");
        assert_eq!((state(1), state(2)), (PortState::Active, PortState::Active));
        world.clear();
    }
    world.fault("nic a/0 down");
    a.events.wait(|e| *e == DeviceEvent::PortDown(1));
    a.events.wait_count(2, |e| *e == DeviceEvent::PortDown(2));
    world.fault("nic a/0 dead");
    a.events.wait(|e| *e == DeviceEvent::Fatal);
    assert_eq!((state(1), state(2)), (PortState::Down, PortState::Down));
}
