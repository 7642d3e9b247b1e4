//! Plain devices: what a NIC offers, and how it behaves, when it has none of softnic's powers.

mod common;

use common::*;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::Arc;
use unbroken_fabric::NicName;
use unbroken_types::{
    Access, Gid, GidType, Mtu, PathAttr, PdHandle, QpState, QpType, SendFlags, SendOpcode, Sge, Wc,
    WcStatus,
};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceEvent, DeviceQp, IndirectEntry, MwBind, QpInit,
    QpModify, RcModify, SendWr, SrqAttr, UdDest, WindowType,
};

/// Where the only GID is that leads to peers.
const GID_INDEX: u8 = 3;

/// Two hosts on plain NICs with a connected pair of QPs.
struct Ends {
    world: World,
    a: Host,
    b: Host,
    qa: Arc<dyn DeviceQp>,
    qb: Arc<dyn DeviceQp>,
}

impl Ends {
    fn new() -> Ends {
        let world = World::plain(&[]);
        let (a, b) = (Host::new(&world, "a", 0, 1 << 20), Host::new(&world, "b", 0, 1 << 20));
        let (qa, qb) = plain_pair(&a, &b);
        Ends { world, a, b, qa, qb }
    }

    /// The status that a WR of `a` completes with. One that fails is followed by a fresh pair of
    /// QPs.
    fn status(&mut self, wr: &SendWr<'_>) -> u32 {
        self.qa.post_send(wr).unwrap();
        let status = self.a.poll(1)[0].status;
        if status != 0 {
            (self.qa, self.qb) = plain_pair(&self.a, &self.b);
        }
        status
    }
}

#[test]
fn nothing_is_offered_beyond_plain_verbs() {
    let world = World::plain(&[]);
    let a = Host::new(&world, "a", 0, 4096);
    let only_windows = Capabilities { windows: true, ..Capabilities::default() };
    assert_eq!((a.nic.capabilities(), a.nics.capabilities(0)), (only_windows, only_windows));
    assert_eq!(errno(a.nic.create_holding_qp(&a.init(QpType::Rc))), libc::EOPNOTSUPP);
    let asks: [fn(&mut QpInit); 3] =
        [|i| i.suspend_on_error = true, |i| i.wc_qpn = Some(5), |i| i.home = Some(Gid::default())];
    for ask in asks {
        let mut init = a.init(QpType::Ud);
        ask(&mut init);
        assert_eq!(errno(a.nic.create_qp(&init)), libc::EOPNOTSUPP);
    }
    let entry = IndirectEntry { lkey: a.mr.lkey, addr: a.addr(0), len: 8 };
    assert_eq!(errno(a.nic.memory().create_indirect(a.pd, 0, &[entry], ALL)), libc::EOPNOTSUPP);
    assert_eq!(errno(a.nic.memory().update_entry(1, 0, &entry)), libc::EOPNOTSUPP);
}

#[test]
fn protection_domains_belong_to_their_nic() {
    let world = World::plain(&[]);
    let nics = world.nics("a");
    let hosts = [0, 1].map(|i| Host::with_channel(nics.clone(), i, 4096, None));
    let [here, there] = &hosts;
    assert_ne!(here.pd, there.pd);
    let (memory, addr) = (here.nic.memory(), here.addr(0));
    assert_eq!(errno(memory.reg_mr(there.pd, addr, 8, addr, ALL)), libc::EINVAL);
    assert_eq!(errno(memory.dealloc_pd(there.pd)), libc::EINVAL);
    let init = QpInit { pd: there.pd, ..here.init(QpType::Rc) };
    assert_eq!(errno(here.nic.create_qp(&init)), libc::EINVAL);
    // A domain is of one opening, too.
    let pd = here.pd;
    let [here, _there] = hosts;
    drop(here);
    let again = Host::with_channel(nics, 0, 4096, None);
    assert_eq!(errno(again.nic.memory().use_pd(pd)), libc::EINVAL);
}

#[test]
fn keys_are_good_on_their_nic_and_in_their_place() {
    let mut e = Ends::new();
    let (other_a, other_b) = (
        Host::with_channel(e.a.nics.clone(), 1, 4096, None),
        Host::with_channel(e.b.nics.clone(), 1, 4096, None),
    );
    let addr = e.a.addr(0);
    let more = || (0..50).map(|_| e.a.nic.memory().reg_mr(e.a.pd, addr, 8, addr, ALL).unwrap());
    let keys: Vec<u32> = more().flat_map(|keys| [keys.lkey, keys.rkey]).collect();
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), 100, "all differ");
    let (lkey, rkey) = (e.a.mr.lkey, e.b.mr.rkey);
    let (to, remote_lkey) = (e.b.addr(64), e.b.mr.lkey);
    let (foreign_lkey, foreign_rkey, local_rkey) = (other_a.mr.lkey, other_b.mr.rkey, e.a.mr.rkey);
    let ops = [SendOpcode::Write, SendOpcode::Read, SendOpcode::FetchAdd];
    for op in ops {
        let mut with =
            |lkey, rkey| e.status(&rdma(1, op, &[Sge { addr, length: 8, lkey }], to, rkey));
        assert_eq!(with(lkey, rkey), WcStatus::Success as u32, "{op:?}");
        for wrong in [foreign_lkey, local_rkey] {
            assert_eq!(with(wrong, rkey), WcStatus::LocProtErr as u32, "{op:?}");
        }
        for wrong in [foreign_rkey, remote_lkey] {
            assert_eq!(with(lkey, wrong), WcStatus::RemAccessErr as u32, "{op:?}");
        }
    }
    // Of a receive it is the receiver's error, and its sender is told.
    for wrong in [e.b.mr.rkey, other_b.mr.lkey] {
        e.qb.post_recv(&recv(7, &[Sge { addr: to, length: 8, lkey: wrong }])).unwrap();
        e.qa.post_send(&send(1, &[Sge { addr, length: 8, lkey }])).unwrap();
        assert_eq!(e.b.poll(1)[0].status, WcStatus::LocProtErr as u32);
        assert_eq!(e.a.poll(1)[0].status, WcStatus::RemOpErr as u32);
        (e.qa, e.qb) = plain_pair(&e.a, &e.b);
    }
}

#[test]
fn windows_are_there_for_each_nic() {
    let mut e = Ends::new();
    let memory = e.b.nic.memory();
    let (addr, len) = (e.b.addr(0), 4096);
    let mr = memory.reg_mr(e.b.pd, addr, len, addr, ALL.with(Access::MW_BIND)).unwrap();
    for kind in [WindowType::One, WindowType::Two] {
        let window = memory.alloc_window(e.b.pd, kind).unwrap();
        let new_key = window + 5;
        let access = Access::REMOTE_WRITE;
        let bind = MwBind { window, new_key, lkey: mr.lkey, addr, length: 64, access };
        e.qb.post_send(&bind.wr(3, SendFlags::SIGNALED)).unwrap();
        assert_ok(&e.b.poll(1)[0], 3);
        let sges = [e.a.sge(0, 64)];
        assert_eq!(
            e.status(&rdma(1, SendOpcode::Write, &sges, addr, new_key)),
            WcStatus::Success as u32
        );
        assert_eq!(errno(memory.dereg_mr(mr.lkey)), libc::EBUSY);
        memory.dealloc_window(new_key).unwrap();
        assert_eq!(
            e.status(&rdma(1, SendOpcode::Write, &sges, addr, new_key)),
            WcStatus::RemAccessErr as u32
        );
    }
    memory.dereg_mr(mr.lkey).unwrap();
}

#[test]
fn queues_belong_to_their_nic() {
    let world = World::plain(&[]);
    let nics = world.nics("a");
    let [here, there] = [0, 1].map(|i| Host::with_channel(nics.clone(), i, 4096, None));
    let refused = |change: &dyn Fn(&mut QpInit)| {
        let mut init = here.init(QpType::Rc);
        change(&mut init);
        errno(here.nic.create_qp(&init))
    };
    let sizes = SrqAttr { max_wr: 8, max_sge: 1, limit: 0 };
    let srq = |host: &Host| host.nic.create_srq(host.pd, sizes, Box::new(|| {})).unwrap();
    assert_eq!(refused(&|i| i.send_cq = there.cq.clone()), libc::EINVAL);
    assert_eq!(refused(&|i| i.recv_cq = there.cq.clone()), libc::EINVAL);
    assert_eq!(refused(&|i| i.recv_cq = Cq::new(8, None)), libc::EINVAL, "one that no device made");
    assert_eq!(refused(&|i| i.srq = Some(srq(&there))), libc::EINVAL);
    assert!(here.nic.create_qp(&QpInit { srq: Some(srq(&here)), ..here.init(QpType::Rc) }).is_ok());
    let channel = Some(there.nic.create_channel().unwrap());
    assert_eq!(errno(here.nic.create_cq(8, channel.clone(), Box::new(|_| {}))), libc::EINVAL);
    assert_eq!(
        errno(here.nic.create_cq(8, Some(CompChannel::new().unwrap()), Box::new(|_| {}))),
        libc::EINVAL
    );
    assert!(there.nic.create_cq(8, channel, Box::new(|_| {})).is_ok());
}

/// In a fabric where one NIC of a host has all powers and another none, neither uses what is the
/// other's.
#[test]
fn a_plain_nic_and_another_share_nothing() {
    let world = World::plain(&[NicName::new("a", 1)]);
    let nics = world.nics("a");
    let [plain, full] = [0, 1].map(|i| Host::with_channel(nics.clone(), i, 4096, None));
    assert!(full.nic.capabilities().shared_objects && full.nic.gid_index() == 0);
    for (host, other) in [(&plain, &full), (&full, &plain)] {
        let init = QpInit { send_cq: other.cq.clone(), ..host.init(QpType::Rc) };
        assert_eq!(errno(host.nic.create_qp(&init)), libc::EINVAL);
        let init = QpInit { pd: other.pd, ..host.init(QpType::Rc) };
        assert_eq!(errno(host.nic.create_qp(&init)), libc::EINVAL);
    }
    // On the wire they are the same.
    let (qp, qf) = (plain_qp(&plain), plain_qp(&full));
    let connect = |q: &dyn DeviceQp, peer: &dyn DeviceQp, own: &Host, host: &Host| {
        let path = PathAttr { sgid_index: own.nic.gid_index(), ..PathAttr::new(host.nic.gid()) };
        connect_by(q, peer.qpn(), path, 7, Mtu::B4096, TIMEOUT).unwrap();
    };
    connect(&*qp, &*qf, &plain, &full);
    connect(&*qf, &*qp, &full, &plain);
    for (q, host, peer) in [(&qp, &plain, &full), (&qf, &full, &plain)] {
        let sges = [host.sge(0, 3000)];
        q.post_send(&rdma(4, SendOpcode::Write, &sges, peer.addr(0), peer.mr.rkey)).unwrap();
        assert_ok(&host.poll(1)[0], 4);
    }
}

#[test]
fn each_queue_is_armed_by_itself_and_its_device_tells() {
    let world = World::plain(&[]);
    let (a, b) = (Host::new(&world, "a", 0, 4096), Host::new(&world, "b", 0, 4096));
    let channel = b.nic.create_channel().unwrap();
    let queues = [1, 2].map(|cookie| {
        let cq = b.nic.create_cq(8, Some(channel.clone()), Box::new(|_| {})).unwrap();
        cq.set_cookie(cookie);
        cq
    });
    let pairs = queues.clone().map(|recv_cq| {
        let (qa, qb) =
            (plain_qp(&a), b.nic.create_qp(&QpInit { recv_cq, ..b.init(QpType::Rc) }).unwrap());
        connect(&*qa, &*qb, &b.nic).unwrap();
        connect(&*qb, &*qa, &a.nic).unwrap();
        (qa, qb)
    });
    let send_to_both = || {
        for (qa, qb) in &pairs {
            qb.post_recv(&recv(1, &[b.sge(0, 8)])).unwrap();
            qa.post_send(&send(1, &[a.sge(0, 8)])).unwrap();
        }
        // Both have arrived, and nobody has polled at b.
        a.poll(2);
    };
    queues[1].req_notify(false);
    send_to_both();
    assert_eq!(next_event(&channel), 2);
    assert!(!channel.has_events(), "the other one is not armed");
    // What has raised no event does so when its queue is armed.
    queues[0].req_notify(false);
    assert_eq!(next_event(&channel), 1);
    send_to_both();
    assert!(!channel.has_events(), "the events disarmed both");
    let mut wcs = [Wc::default(); 8];
    assert_eq!(queues.map(|cq| cq.poll(&mut wcs).unwrap()), [2, 2]);
}

#[test]
fn a_queue_that_overruns_says_so() {
    let mut e = Ends::new();
    let told = Arc::new(AtomicU64::new(0));
    let hook = told.clone();
    let small =
        e.b.nic.create_cq(1, None, Box::new(move |cookie| hook.store(cookie, SeqCst))).unwrap();
    small.set_cookie(77);
    let qb = e.b.nic.create_qp(&QpInit { recv_cq: small.clone(), ..e.b.init(QpType::Rc) }).unwrap();
    e.qa = plain_qp(&e.a);
    connect(&*e.qa, &*qb, &e.b.nic).unwrap();
    connect(&*qb, &*e.qa, &e.a.nic).unwrap();
    for id in 0..2 {
        qb.post_recv(&recv(id, &[e.b.sge(0, 8)])).unwrap();
        e.qa.post_send(&send(id, &[e.a.sge(0, 8)])).unwrap();
    }
    e.a.poll(2);
    let lost =
        |event: &DeviceEvent| matches!(event, DeviceEvent::Qp { qpn, .. } if *qpn == qb.qpn());
    e.b.events.wait(lost);
    assert_eq!(told.load(SeqCst), 77);
    assert!(small.poll(&mut [Wc::default()]).is_err());
}

#[test]
fn shared_receives_reach_their_limit() {
    let mut e = Ends::new();
    let told = Arc::new(AtomicU64::new(0));
    let hook = told.clone();
    let on_limit = Box::new(move || {
        hook.fetch_add(1, SeqCst);
    });
    let srq =
        e.b.nic.create_srq(e.b.pd, SrqAttr { max_wr: 8, max_sge: 1, limit: 0 }, on_limit).unwrap();
    (0..4).for_each(|id| srq.post(&recv(id, &[e.b.sge(0, 8)])).unwrap());
    srq.modify(None, Some(4)).unwrap();
    let qb = e.b.nic.create_qp(&QpInit { srq: Some(srq.clone()), ..e.b.init(QpType::Rc) }).unwrap();
    e.qa = plain_qp(&e.a);
    connect(&*e.qa, &*qb, &e.b.nic).unwrap();
    connect(&*qb, &*e.qa, &e.a.nic).unwrap();
    for id in 0..4 {
        e.qa.post_send(&send(9, &[e.a.sge(0, 8)])).unwrap();
        assert_ok(&e.b.poll(1)[0], id);
    }
    assert_eq!((told.load(SeqCst), srq.len()), (1, 0));
}

#[test]
fn numbers_differ_from_nic_to_nic() {
    let world = World::plain(&[]);
    let nics = world.nics("a");
    let hosts: Vec<Host> =
        (0..4).map(|i| Host::with_channel(nics.clone(), i, 4096, None)).collect();
    let qps: Vec<_> =
        (0..100).flat_map(|_| hosts.iter().map(plain_qp).collect::<Vec<_>>()).collect();
    assert_eq!(qps.iter().map(|qp| qp.qpn() as u16).collect::<HashSet<_>>().len(), 400);
    let pds: HashSet<PdHandle> = hosts.iter().map(|host| host.pd).collect();
    assert_eq!(pds.len(), 4);
}

#[test]
fn one_gid_leads_to_peers() {
    let world = World::plain(&[]);
    let (mut a, b) = (Host::new(&world, "a", 0, 4096), Host::new(&world, "b", 0, 4096));
    a.fill(8, &[9; 8]);
    let port = a.nic.port(1).unwrap();
    let kinds: Vec<GidType> = port.gids.iter().map(|entry| entry.kind).collect();
    assert_eq!(kinds, [GidType::RoceV1, GidType::RoceV2, GidType::RoceV1, GidType::RoceV2]);
    let gids: HashSet<Gid> = port.gids.iter().map(|entry| entry.gid).collect();
    assert_eq!(gids.len(), 2);
    assert_eq!(
        (a.nic.gid_index(), port.gids[usize::from(GID_INDEX)].gid),
        (GID_INDEX, a.nic.gid())
    );
    let path = |sgid_index, dest| PathAttr { sgid_index, ..PathAttr::new(dest) };
    let to_rts = |path| {
        let (qa, qb) = (plain_qp(&a), plain_qp(&b));
        connect(&*qb, &*qa, &a.nic).unwrap();
        // A short timeout: it is to be waited for.
        let connected = connect_by(&*qa, qb.qpn(), path, 0x100, Mtu::B4096, 5);
        connected.map(|()| (qa, qb))
    };
    let write = |qa: &Arc<dyn DeviceQp>, from| {
        let sges = [a.sge(from, 8)];
        qa.post_send(&rdma(1, SendOpcode::Write, &sges, b.addr(0), b.mr.rkey)).unwrap();
        a.poll(1)[0].status
    };
    let (dest, link_local) = (b.nic.gid(), b.nic.port(1).unwrap().gids[1].gid);
    assert_ne!(dest, link_local);
    // No way from IPv6 to IPv4, as Linux says.
    for (index, dest) in [(0, dest), (1, dest), (4, dest), (3, link_local)] {
        assert_eq!(errno(to_rts(path(index, dest))), libc::EINVAL, "{index}");
        assert_eq!(errno(a.nic.check_path(&path(index, dest))), libc::EINVAL);
    }
    // A way that no packet gets through.
    for (index, dest) in [(2, dest), (0, link_local), (1, link_local), (2, link_local)] {
        a.nic.check_path(&path(index, dest)).unwrap();
        let (qa, _qb) = to_rts(path(index, dest)).unwrap();
        assert_eq!(qa.query().attrs.path, Some(path(index, dest)));
        assert_eq!(write(&qa, 0), WcStatus::RetryExcErr as u32, "{index}");
    }
    let (qa, qb) = to_rts(path(GID_INDEX, dest)).unwrap();
    assert_eq!(write(&qa, 0), WcStatus::Success as u32);
    // Nor does a QP hear its peer that sends from the wrong one itself.
    qb.modify(&QpModify { path: Some(path(2, a.nic.gid())), ..QpModify::default() }).unwrap();
    assert_eq!(write(&qa, 8), WcStatus::RetryExcErr as u32);
    assert_eq!(b.bytes(0, 8), [0; 8]);
}

#[test]
fn datagrams_leave_from_one_gid() {
    let world = World::plain(&[]);
    let (mut a, b) = (Host::new(&world, "a", 0, 4096), Host::new(&world, "b", 0, 4096));
    a.fill(0, &[0, 1, 2, 3]);
    let make = |host: &Host| {
        let qp = host.nic.create_qp(&host.init(QpType::Ud)).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let sq_psn = (state == QpState::Rts).then_some(0);
            let rc = RcModify { state: Some(state), sq_psn, ..RcModify::default() };
            let qkey = (state == QpState::Init).then_some(9);
            qp.modify(&QpModify { rc, qkey, ..QpModify::default() }).unwrap();
        }
        qp
    };
    let (qa, qb) = (make(&a), make(&b));
    qb.post_recv(&recv(5, &[b.sge(0, 48)])).unwrap();
    for sgid_index in [2, 0, 1, GID_INDEX] {
        let to = UdDest {
            gid: b.nic.gid(),
            qpn: qb.qpn(),
            qkey: 9,
            grh: true,
            sgid_index,
            ..UdDest::default()
        };
        let sges = [a.sge(usize::from(sgid_index), 1)];
        qa.post_send(&SendWr { ud: Some(to), ..send(1, &sges) }).unwrap();
        // UD does not say what became of it.
        assert_ok(&a.poll(1)[0], 1);
    }
    assert_ok(&b.poll(1)[0], 5);
    assert_eq!(b.bytes(40, 1), [GID_INDEX], "the first that came");
}

#[test]
fn sends_are_taken_in_rts() {
    let world = World::plain(&[]);
    let (a, b) = (Host::new(&world, "a", 0, 4096), Host::new(&world, "b", 0, 4096));
    let (qa, qb) = (plain_qp(&a), plain_qp(&b));
    let modify = |rc: RcModify, dest: Option<Gid>| {
        let path = dest.map(|dest| PathAttr { sgid_index: GID_INDEX, ..PathAttr::new(dest) });
        qa.modify(&QpModify { rc, path, ..QpModify::default() }).unwrap();
    };
    let to = |state| RcModify { state: Some(state), ..RcModify::default() };
    let post = |wr_id| qa.post_send(&send(wr_id, &[])).map_err(|e| e.errno());
    assert_eq!(
        (post(0), qa.post_recv(&recv(0, &[])).map_err(|e| e.errno())),
        (Err(libc::EINVAL), Err(libc::EINVAL))
    );
    modify(RcModify { access: Some(ALL), ..to(QpState::Init) }, None);
    assert_eq!(post(1), Err(libc::EINVAL));
    qa.post_recv(&recv(7, &[])).unwrap();
    let rtr = RcModify {
        dest_qpn: Some(qb.qpn()),
        rq_psn: Some(1),
        mtu: Some(Mtu::B1024),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(1),
        ..to(QpState::Rtr)
    };
    modify(rtr, Some(b.nic.gid()));
    assert_eq!(post(2), Err(libc::EINVAL));
    let rts = RcModify {
        sq_psn: Some(1),
        timeout: Some(TIMEOUT),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(1),
        ..to(QpState::Rts)
    };
    modify(rts, None);
    modify(to(QpState::Sqd), None);
    assert_eq!(post(3), Ok(()), "it waits");
    modify(to(QpState::Err), None);
    assert_eq!(post(4), Ok(()), "and is flushed");
    let flushed: HashSet<(u64, u32)> = a.poll(3).iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(flushed, HashSet::from([3, 4, 7].map(|wr_id| (wr_id, WcStatus::WrFlushErr as u32))));
}

#[test]
fn a_qp_that_fails_flushes_all_that_it_has() {
    let e = Ends::new();
    e.world.fault("cable b/0 cut");
    (0..3).for_each(|id| e.qa.post_recv(&recv(100 + id, &[e.a.sge(0, 8)])).unwrap());
    let unsignaled = |wr_id| SendWr { flags: SendFlags::default(), ..send(wr_id, &[]) };
    (0..5).for_each(|id| e.qa.post_send(&unsignaled(id)).unwrap());
    let wcs = e.a.poll(8);
    let of = |from, to| wcs.iter().filter(move |wc| (from..to).contains(&wc.wr_id));
    assert_eq!(of(0, 5).map(|wc| wc.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(of(100, 103).map(|wc| wc.wr_id).collect::<Vec<_>>(), [100, 101, 102]);
    assert_eq!((wcs[0].wr_id, wcs[0].status), (0, WcStatus::RetryExcErr as u32));
    assert!(wcs[1..].iter().all(|wc| wc.status == WcStatus::WrFlushErr as u32), "{wcs:?}");
    assert_eq!(
        (e.qa.state(), e.a.events.count(|_| true)),
        (QpState::Err, 0),
        "nobody was asked to move it"
    );
}
