//! Automatic path migration between NICs with two ports.

mod common;

use common::*;
use std::sync::Arc;
use unbroken_fabric::{Fabric, NicKind, NicPage, Runtime, Shape};
use unbroken_types::{LinkLayer, PathAttr, PathMigState, QpType, SendOpcode, WcStatus};
use unbroken_verbs::{Device, DeviceEvent, DeviceQp, QpEvent, QpModify, RcModify, Result};

struct Ends {
    world: World,
    hosts: [Host; 2],
    qps: [Arc<dyn DeviceQp>; 2],
}

impl Ends {
    fn new(link_layer: LinkLayer) -> Ends {
        let dir = tempfile::tempdir().unwrap();
        let kind = NicKind { link_layer, ports: 2, ..NicKind::default() };
        let shape = Shape { kind, ..Shape::of(0, &["a", "b"], 1) };
        let fabric = Fabric::create(&Runtime::at(dir.path()).unwrap(), &shape).unwrap();
        let world = World { dir, fabric };
        let hosts = ["a", "b"].map(|name| Host::new(&world, name, 0, 1 << 20));
        let (qa, qb) = plain_pair(&hosts[0], &hosts[1]);
        Ends { world, hosts, qps: [qa, qb] }
    }

    /// Both ends armed, with the way from port to port 2.
    fn armed(link_layer: LinkLayer) -> Ends {
        let ends = Ends::new(link_layer);
        (0..2).for_each(|end| ends.rearm(end, 2).unwrap());
        ends.settle(PathMigState::Armed);
        ends
    }

    fn rearm(&self, end: usize, port: u8) -> Result<()> {
        let dest_gid = self.hosts[1 - end].nic.port(port)?.gids[0].gid;
        let alternate = Some(PathAttr { port, sl: 7, ..PathAttr::new(dest_gid) });
        let rc = RcModify {
            alternate: Some(12),
            migration: Some(PathMigState::Rearm),
            ..RcModify::default()
        };
        self.qps[end].modify(&QpModify { rc, alternate, ..QpModify::default() })
    }

    fn migrate(&self, end: usize) -> Result<()> {
        let rc = RcModify { migration: Some(PathMigState::Migrated), ..RcModify::default() };
        self.qps[end].modify(&QpModify { rc, ..QpModify::default() })
    }

    /// Waits until both ends are in a state, without driving them.
    fn settle(&self, state: PathMigState) {
        let start = std::time::Instant::now();
        while !self.qps.iter().all(|qp| qp.query().attrs.rc.migration == Some(state)) {
            assert!(
                start.elapsed() < std::time::Duration::from_secs(20),
                "{state:?} is not reached"
            );
            std::thread::yield_now();
        }
    }

    fn write(&self, end: usize, len: usize) -> u32 {
        let (from, to) = (&self.hosts[end], &self.hosts[1 - end]);
        self.qps[end]
            .post_send(&rdma(1, SendOpcode::Write, &[from.sge(0, len)], to.addr(len), to.mr.rkey))
            .unwrap();
        let status = from.poll(1)[0].status;
        if status == 0 {
            assert_eq!(from.bytes(0, len), to.bytes(len, len));
        }
        status
    }

    fn wait_event(&self, end: usize, event: QpEvent) {
        let event = DeviceEvent::Qp { qpn: self.qps[end].qpn(), event };
        self.hosts[end].events.wait(|e| *e == event);
    }

    /// Asserts that a port, and not the other, carries a message from an end: repetitions count, of
    /// which a loaded machine makes some.
    fn assert_carries(&self, end: usize, port: u8, len: usize) {
        let before = [1, 2].map(|port| self.sent(end, port));
        assert_eq!(self.write(end, len), 0);
        let [first, second] = [1, 2].map(|p| self.sent(end, p) - before[usize::from(p) - 1]);
        let (carried, other) = if port == 1 { (first, second) } else { (second, first) };
        assert!(
            carried >= len as u64 && other == 0,
            "port {port}: {carried} bytes, the other {other}"
        );
    }

    /// Payload that a port has sent, repetitions among it.
    fn sent(&self, end: usize, port: u8) -> u64 {
        let addr = self.world.fabric.port_addr(["a", "b"][end], 0, port).unwrap();
        NicPage::open(&Runtime::at(self.world.dir.path()).unwrap(), addr.into())
            .unwrap()
            .counters()
            .tx_payload_bytes
    }
}

#[test]
fn idle_qps_arm_and_migrate_by_request() {
    for link_layer in [LinkLayer::Ethernet, LinkLayer::Infiniband] {
        let ends = Ends::armed(link_layer);
        let alternate = ends.qps[0].query().attrs;
        assert_eq!(
            (alternate.port, alternate.alternate.unwrap().port, alternate.rc.alternate),
            (Some(1), 2, Some(12))
        );
        ends.migrate(1).unwrap();
        ends.settle(PathMigState::Migrated);
        (0..2).for_each(|end| ends.wait_event(end, QpEvent::PathMigrated));
        for end in 0..2 {
            let attrs = ends.qps[end].query().attrs;
            assert_eq!((attrs.port, attrs.alternate, attrs.rc.alternate), (Some(2), None, None));
            let dest_gid = ends.hosts[1 - end].nic.port(2).unwrap().gids[0].gid;
            assert_eq!(attrs.path, Some(PathAttr { port: 2, sl: 7, ..PathAttr::new(dest_gid) }));
            ends.assert_carries(end, 2, 10_000);
        }
        // And back.
        (0..2).for_each(|end| ends.rearm(end, 1).unwrap());
        ends.settle(PathMigState::Armed);
        ends.migrate(0).unwrap();
        ends.settle(PathMigState::Migrated);
        (0..2).for_each(|end| ends.assert_carries(end, 1, 10_000));
    }
}

#[test]
fn a_port_that_goes_down_is_left_at_once_by_both_ends() {
    let ends = Ends::armed(LinkLayer::Ethernet);
    ends.world.fault("nic a/0/1 down");
    (0..2).for_each(|end| ends.wait_event(end, QpEvent::PathMigrated));
    (0..2).for_each(|end| ends.assert_carries(end, 2, 100_000));
}

#[test]
fn a_silent_path_is_left_when_retries_are_used_up() {
    for cut in ["cable a/0/1 cut", "cable b/0/1 cut"] {
        let ends = Ends::armed(LinkLayer::Ethernet);
        ends.world.fault(cut);
        assert_eq!(ends.write(0, 100_000), 0);
        (0..2).for_each(|end| ends.wait_event(end, QpEvent::PathMigrated));
        assert_eq!(ends.write(1, 100_000), 0);
    }
}

#[test]
fn a_path_that_loses_or_delays_too_much_is_left_for_one_that_is_well() {
    for fault in
        ["loss a/0/1 100%", "loss cable b/0/1 rx 100%", "loss rail0 100%", "delay rail0 2s"]
    {
        let ends = Ends::armed(LinkLayer::Ethernet);
        ends.world.fault(fault);
        assert_eq!(ends.write(0, 100_000), 0, "{fault}");
        (0..2).for_each(|end| ends.wait_event(end, QpEvent::PathMigrated));
        assert_eq!(ends.write(1, 100_000), 0, "{fault}");
        let (to, fro) = (ends.sent(0, 2), ends.sent(1, 2));
        assert!(to >= 100_000 && fro >= 100_000, "{fault}: {to} and {fro} bytes over port 2");
    }
}

#[test]
fn where_the_alternate_path_is_dead_too_the_qp_fails() {
    let ends = Ends::armed(LinkLayer::Ethernet);
    ends.world.fault("cable a/0 cut");
    assert_eq!(ends.write(0, 100), WcStatus::RetryExcErr as u32);
    ends.wait_event(0, QpEvent::PathMigrated);
    let ends = Ends::armed(LinkLayer::Ethernet);
    ends.world.fault("nic a/0 down");
    assert_eq!(ends.write(0, 100), WcStatus::RetryExcErr as u32);
    ends.wait_event(0, QpEvent::PathMigrationFailed);
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let ends = Ends::new(LinkLayer::Ethernet);
    assert_eq!(errno(ends.rearm(0, 3)), libc::EINVAL, "no such port");
    let only_address = PathAttr { port: 2, ..PathAttr::new(ends.hosts[1].nic.gid()) };
    let change = QpModify { alternate: Some(only_address), ..QpModify::default() };
    assert_eq!(errno(ends.qps[0].modify(&change)), libc::EINVAL, "no timeout");
    let index = PathAttr { sgid_index: 9, ..only_address };
    let rc = RcModify { alternate: Some(12), ..RcModify::default() };
    let change = QpModify { rc, alternate: Some(index), ..QpModify::default() };
    assert_eq!(errno(ends.qps[0].modify(&change)), libc::EINVAL, "no such GID");
    assert_eq!(ends.qps[0].query().attrs.rc.alternate, None);
    ends.rearm(0, 2).unwrap();
    assert_eq!(errno(ends.migrate(0)), libc::EINVAL, "the peer is not ready");
    assert_eq!(ends.write(0, 1000), 0);
    let uc = ends.hosts[0].nic.create_qp(&ends.hosts[0].init(QpType::Uc)).unwrap();
    let change = QpModify { rc, alternate: Some(only_address), ..QpModify::default() };
    assert_eq!(errno(uc.modify(&change)), libc::EOPNOTSUPP);
}
