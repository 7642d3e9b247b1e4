//! NICs with two ports: each has its own address, counters and link; a QP may change from one to
//! the other at run time.

mod common;

use common::*;
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_fabric::{Fabric, NicCounters, NicKind, NicPage, Runtime, Shape};
use unbroken_types::{LinkLayer, Mtu, PathAttr, QpState, QpType, SendOpcode, WcStatus};
use unbroken_verbs::{
    Device, DeviceEvent, DeviceQp, PortState, QpModify, RcModify, ResumableQp, SendWr,
};

fn world(link_layer: LinkLayer) -> World {
    let dir = tempfile::tempdir().unwrap();
    let kind = NicKind { link_layer, ports: 2, ..NicKind::default() };
    let shape = Shape { kind, ..Shape::of(0, &["a", "b"], 1) };
    let fabric = Fabric::create(&Runtime::at(dir.path()).unwrap(), &shape).unwrap();
    World { dir, fabric }
}

/// What a port of NIC 0 of host a has counted.
fn counters(world: &World, port: usize) -> NicCounters {
    let addr = world.fabric.port_addr("a", 0, port as u8).unwrap();
    NicPage::open(&Runtime::at(world.dir.path()).unwrap(), addr.into()).unwrap().counters()
}

/// Payload that NIC 0 of host a has sent through a port.
fn sent(world: &World, port: usize) -> u64 {
    counters(world, port).tx_payload_bytes
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
        // A loaded machine makes repetitions, which count.
        let first = sent(&world, 1);
        assert!(first >= 1000 && sent(&world, 2) == 0);
        for (qp, peer) in [(&qa, &b), (&qb, &a)] {
            let path = PathAttr { port: 2, ..PathAttr::new(peer.nic.port(2).unwrap().gids[0].gid) };
            qp.modify(&QpModify { port: Some(2), path: Some(path), ..QpModify::default() })
                .unwrap();
            assert_eq!(qp.query().attrs.port, Some(2));
            assert!(qp.modify(&QpModify { port: Some(3), ..QpModify::default() }).is_err());
        }
        assert_eq!(write(2), WcStatus::Success as u32);
        assert!(sent(&world, 1) == first && sent(&world, 2) >= 1000);
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
    for (port, switch, passes) in
        [(1, "rail0", false), (1, "rail0b", true), (2, "rail0b", false), (2, "rail0", true)]
    {
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

/// A pair of QPs at each port, which wait for a second and longer for answers.
fn pair_at_each_port(a: &Host, b: &Host) -> [[Arc<dyn ResumableQp>; 2]; 2] {
    [1, 2].map(|port| {
        let qps = [a.qp(|_| {}), b.qp(|_| {})];
        for (qp, peer, to) in [(&qps[0], &qps[1], b), (&qps[1], &qps[0], a)] {
            let gid = to.nic.port(port).unwrap().gids[0].gid;
            connect_slowly(&**qp, peer.qpn(), gid, 0x100, Mtu::B4096, 18).unwrap();
            qp.modify(&QpModify { port: Some(port), ..QpModify::default() }).unwrap();
        }
        qps
    })
}

/// A packet that is lost or late at one port changes nothing for those of the other, in the same
/// engine.
#[test]
fn each_port_has_its_own_faults() {
    const ROUNDS: usize = 20;
    let world = world(LinkLayer::Ethernet);
    let (a, b) = (Host::new(&world, "a", 0, 1 << 20), Host::new(&world, "b", 0, 1 << 20));
    let ports = pair_at_each_port(&a, &b);
    let write = |port: usize, wr_id, len| {
        let wr = rdma(wr_id, SendOpcode::Write, &[], b.addr(0), b.mr.rkey);
        ports[port - 1][0].post_send(&SendWr { sges: &[a.sge(0, len)], ..wr }).unwrap();
    };
    // Of a rate: QPs wait for the line that is taken; of the others: packets are held, on their way
    // out or in, or lost and sent again. Each makes 64 KiB take longer than a second, or as long as
    // it lasts.
    let faults = |port, rail| {
        [
            format!("rate a/0/{port} tx 400kbit"),
            format!("delay {rail} 700ms"),
            format!("delay cable b/0/{port} rx 1500ms"),
            format!("loss a/0/{port} rx 100%"),
        ]
    };
    for (bad, good, rail) in [(1, 2, "rail0"), (2, 1, "rail0b")] {
        for fault in faults(bad, rail) {
            world.fault(&fault);
            let drops = [bad, good].map(|port| counters(&world, port).drops);
            let start = Instant::now();
            write(bad, 1, 64 << 10);
            let mut slowest = Duration::ZERO;
            for _ in 0..ROUNDS {
                let posted = Instant::now();
                write(good, 2, 1000);
                assert_ok(&a.poll(1)[0], 2);
                slowest = slowest.max(posted.elapsed());
            }
            assert!(
                slowest < Duration::from_millis(500),
                "{fault}: {slowest:?} at the port that is well"
            );
            let loss = fault.starts_with("loss");
            if loss {
                world.clear();
            }
            assert_ok(&a.poll(1)[0], 1);
            let took = start.elapsed();
            assert!(loss || took > Duration::from_secs(1), "{fault}: only {took:?} at its port");
            let lost =
                [counters(&world, bad).drops > drops[0], counters(&world, good).drops > drops[1]];
            assert_eq!(lost, [loss, false], "{fault}");
            world.clear();
        }
    }
}

/// While a port's line is taken, those of the other go on which have more to send than one drive
/// takes, and nothing comes to them that would drive the engine; and those which owe an ACK that
/// waits for company.
#[test]
fn a_port_whose_line_is_free_does_not_wait_for_the_other() {
    // 512 packets.
    const BYTES: usize = 128 << 10;
    let world = world(LinkLayer::Ethernet);
    let (a, b) = (Host::new(&world, "a", 0, 1 << 20), Host::new(&world, "b", 0, 1 << 20));
    let [slow, good] = pair_at_each_port(&a, &b);
    let (qa, qb) = (
        a.nic.create_qp(&a.init(QpType::Uc)).unwrap(),
        b.nic.create_qp(&b.init(QpType::Uc)).unwrap(),
    );
    for (qp, peer, to) in [(&qa, &qb, &b), (&qb, &qa, &a)] {
        let d = RcModify::default();
        let path = PathAttr { port: 2, ..PathAttr::new(to.nic.port(2).unwrap().gids[0].gid) };
        let rtr = RcModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(peer.qpn()),
            mtu: Some(Mtu::B256),
            ..d
        };
        for (rc, port, path) in [
            (RcModify { state: Some(QpState::Init), access: Some(ALL), ..d }, Some(2), None),
            (RcModify { rq_psn: Some(9), ..rtr }, None, Some(path)),
            (RcModify { state: Some(QpState::Rts), sq_psn: Some(9), ..d }, None, None),
        ] {
            qp.modify(&QpModify { rc, port, path, ..QpModify::default() }).unwrap();
        }
    }
    let write = |qp: &dyn DeviceQp, from: &Host, to: &Host, wr_id, len| {
        let wr = rdma(wr_id, SendOpcode::Write, &[], to.addr(1 << 19), to.mr.rkey);
        qp.post_send(&SendWr { sges: &[from.sge(0, len)], ..wr }).unwrap();
    };
    // Half a second for each packet.
    for (end, from, to) in [(0, &a, &b), (1, &b, &a)] {
        world.fault(&format!("rate {}/0/1 tx 64kbit", ["a", "b"][end]));
        write(&*slow[end], from, to, 1, 16 << 10);
    }
    let quick = |what: &str, act: &dyn Fn()| {
        let start = Instant::now();
        act();
        let took = start.elapsed();
        assert!(took < Duration::from_millis(300), "{what}: {took:?} over the port that is well");
    };
    for _ in 0..20 {
        good[1].post_recv(&recv(2, &[])).unwrap();
        quick("a message and its ACK", &|| {
            good[0].post_send(&send(3, &[])).unwrap();
            assert_ok(&b.poll(1)[0], 2);
            assert_ok(&a.poll(1)[0], 3);
        });
    }
    quick("512 packets", &|| {
        write(&*qa, &a, &b, 4, BYTES);
        assert_ok(&a.poll(1)[0], 4);
    });
    assert_eq!(sent(&world, 2), BYTES as u64);
}
