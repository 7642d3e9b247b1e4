//! NICs that die while QPs are being connected: the program goes on, and hears nothing of it.

use super::*;
use crate::async_events::event_type::DEVICE_FATAL;

fn to_init(qp: &Qp) {
    let rc = RcModify {
        state: Some(QpState::Init),
        access: Some(Access::LOCAL_WRITE),
        ..RcModify::default()
    };
    qp.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
}

/// The NIC dies under one of the three verbs that connect a QP, when Unbroken has looked whether it
/// is alive and not changed the QP yet.
#[test]
fn a_nic_dies_under_a_verb_that_connects() {
    for verb in 1..=3 {
        let w = World::unconnected(&[]);
        w.plan.dies_at_modify[1].store(verb, SeqCst);
        connect(&w.to, &w.from);
        connect(&w.from, &w.to);
        w.exchange(10);
        assert_eq!(w.plan.dies_at_modify[1].load(SeqCst), 0, "it has not died at {verb}");
        assert_ne!(w.to.gate().nic, 1, "{verb}");
    }
}

/// The worker hears of the death while a QP is not connected. The program is not told, since the QP
/// will begin on another NIC.
#[test]
fn a_program_that_connects_is_not_told_that_its_nic_has_died() {
    let w = World::unconnected(&[]);
    to_init(&w.from);
    w.plan.dead[0].store(true, SeqCst);
    w.core.jobs.put(Job::Device(0, DeviceEvent::Fatal));
    // The worker takes its jobs in turn.
    w.plan.dead[3].store(true, SeqCst);
    w.core.jobs.put(Job::Device(3, DeviceEvent::Fatal));
    w.wait("the worker has looked", || w.core.nics.endpoint(3).is_none());
    assert_eq!(w.contexts[0].waiting_events(DEVICE_FATAL), 0);
    connect(&w.to, &w.from);
    connect(&w.from, &w.to);
    w.exchange(10);
    assert_ne!(w.from.gate().nic, 0);
}

/// A control endpoint whose QP ends in ERR has another life soon, and a switch finds the peer by
/// it.
#[test]
fn control_endpoints_that_fail_are_mended() {
    let w = World::new();
    w.exchange(1);
    for round in 0..3 {
        let endpoints: Vec<_> =
            (0..w.core.nics.count()).map(|nic| w.core.nics.endpoint(nic).unwrap()).collect();
        endpoints.iter().for_each(|endpoint| endpoint.fail());
        w.wait("all work again", || endpoints.iter().all(|endpoint| endpoint.works()));
        w.exchange(10 + 2 * round);
    }
    w.plan.dead[0].store(true, SeqCst);
    w.exchange(20);
    assert_ne!(w.from.gate().nic, 0);
}

/// The GID at index 1 of a QP's port, which is not its NIC's.
fn other_gid(w: &World, qp: &Qp) -> Gid {
    w.core.nics.port(qp.id().0, 1, true).unwrap().gids[1].gid
}

/// Peers name a QP by whatever GID its program has given them. It is found by that for as long as
/// it is connected so.
#[test]
fn qps_are_found_by_the_gid_that_they_are_connected_by() {
    for told in [true, false] {
        let w = World::unconnected(&[]);
        w.plan.gids_are_apart.store(true, SeqCst);
        w.plan.gids_are_told.store(told, SeqCst);
        let connect = |qp: &Qp, peer: &Qp| {
            let path = PathAttr { sgid_index: 1, ..PathAttr::new(other_gid(&w, peer)) };
            connect_over(qp, peer.qpn(), path);
        };
        connect(&w.from, &w.to);
        connect(&w.to, &w.from);
        w.exchange(10);
        if !told {
            // Without that, nobody finds them.
            w.wait("both are given up", || !w.from.status().pending && !w.to.status().pending);
            assert!(!w.from.status().protected && !w.to.status().protected);
            continue;
        }
        w.wait("both are protected", || w.from.status().protected && w.to.status().protected);
        w.plan.dead[0].store(true, SeqCst);
        w.core.jobs.put(Job::Device(0, DeviceEvent::Fatal));
        w.exchange(20);
        assert_ne!(w.from.gate().nic, 0);
        let (known, directory) = (other_gid(&w, &w.to), w.core.directory.as_ref().unwrap());
        let found = || directory.lookup_qp(known, w.to.qpn()).unwrap();
        assert!(found().is_some());
        let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
        w.to.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
        w.wait("it is connected so no more", || found().is_none());
    }
}
