//! What a program wants of its path (service level, hop limit, …) is wanted of the path of each
//! life.

use super::*;

const WANTED: PathAttr = PathAttr {
    sl: 5,
    flow_label: 0xabcde,
    hop_limit: 9,
    traffic_class: 0x68,
    static_rate: 3,
    ..PathAttr::new(Gid([0; 16]))
};

/// The path of the physical QP.
fn physical(qp: &Qp) -> PathAttr {
    qp.gate().phys.query().attrs.path.unwrap()
}

fn told(qp: &Qp) -> (Option<PathAttr>, Option<u8>) {
    let attrs = qp.query().attrs;
    (attrs.path, attrs.port)
}

/// On each NIC the path leads to where the peer is, and is else as the program wants it; the
/// program is told its own.
#[test]
fn what_is_wanted_of_a_path_is_wanted_on_every_nic() {
    let w = World::unconnected(&[]);
    let path = PathAttr { dest_gid: w.to.gid(), ..WANTED };
    connect_over(&w.from, w.to.qpn(), path);
    connect(&w.to, &w.from);
    w.wait("both ends are protected", || w.from.status().protected && w.to.status().protected);
    w.exchange(1);
    assert_eq!((told(&w.from), physical(&w.from)), ((Some(path), Some(1)), path));
    for nic in [0, 1] {
        // Their own NICs: both ends are elsewhere then.
        w.plan.dead[nic].store(true, SeqCst);
        w.exchange(3);
    }
    w.wait("both have moved", || w.from.status().epoch > 0 && w.to.gate().nic > 1);
    let here = || PathAttr { dest_gid: w.core.nics.gid(w.to.gate().nic), ..WANTED };
    assert_ne!(here().dest_gid, path.dest_gid);
    assert_eq!((told(&w.from), physical(&w.from)), ((Some(path), Some(1)), here()));
    // What is wanted anew is wanted of the path that it has now.
    let state = |state| {
        let rc = RcModify { state: Some(state), ..RcModify::default() };
        w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    };
    state(QpState::Sqd);
    let path = PathAttr { sl: 6, ..path };
    w.from.modify(&QpModify { path: Some(path), ..QpModify::default() }).unwrap();
    state(QpState::Rts);
    assert_eq!(
        (told(&w.from), physical(&w.from)),
        ((Some(path), Some(1)), PathAttr { sl: 6, ..here() })
    );
    let epoch = w.from.status().epoch;
    w.exchange(5);
    assert_eq!(w.from.status().epoch, epoch, "over the same path");
}
