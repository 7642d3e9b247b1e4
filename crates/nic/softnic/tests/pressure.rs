//! Back-pressure of UC and UD: nothing is lost while a receiver can take it, and nobody is held for
//! ever by one that cannot.

mod common;

use common::*;
use std::time::{Duration, Instant};
use unbroken_fabric::{NicPage, PATIENCE_US};
use unbroken_types::{PathAttr, QpState, QpType};
use unbroken_verbs::{Device, DeviceEvent, DeviceQp, QpModify, RcModify, SendWr, UdDest};

const BYTES: usize = 4096;
const GRH: usize = 40;
const PATIENCE: Duration = Duration::from_micros(PATIENCE_US);

fn page(world: &World, nic: &str) -> NicPage {
    let addr = world.fabric.nic_addr(nic, 0).unwrap();
    NicPage::open(world.fabric.runtime(), addr.into()).unwrap()
}

/// Waits until all credit for a NIC's receivers has been returned, while the hosts poll.
fn all_is_returned(world: &World, nic: &str, hosts: [&Host; 2]) {
    let page = page(world, nic);
    let on_way = || (0..=u8::MAX).map(|slot| page.credit(slot).on_way()).sum::<u64>();
    let start = Instant::now();
    while on_way() > 0 {
        assert!(
            start.elapsed() < common::PATIENCE,
            "{} of the credit for {nic} is never returned",
            on_way()
        );
        for host in hosts {
            host.cq.poll(&mut [unbroken_types::Wc::default(); 16]).unwrap();
        }
    }
}

fn ready(qp: &dyn DeviceQp) {
    for (state, qkey, sq_psn) in
        [(QpState::Init, Some(7), None), (QpState::Rtr, None, None), (QpState::Rts, None, Some(5))]
    {
        let rc = RcModify { state: Some(state), sq_psn, ..RcModify::default() };
        qp.modify(&QpModify { rc, qkey, ..QpModify::default() }).unwrap();
    }
}

/// A UD QP on each of two hosts.
struct Datagrams {
    a: Host,
    b: Host,
    qa: std::sync::Arc<dyn DeviceQp>,
    qb: std::sync::Arc<dyn DeviceQp>,
    to: UdDest,
    world: World,
}

impl Datagrams {
    fn new() -> Datagrams {
        let world = World::new();
        let (a, b) = (Host::new(&world, "a", 0, 1 << 16), Host::new(&world, "b", 0, 1 << 20));
        let (qa, qb) = (
            a.nic.create_qp(&a.init(QpType::Ud)).unwrap(),
            b.nic.create_qp(&b.init(QpType::Ud)).unwrap(),
        );
        ready(&*qa);
        ready(&*qb);
        let to = UdDest {
            gid: b.nic.gid(),
            qpn: qb.qpn(),
            qkey: 7,
            grh: true,
            sgid_index: 0,
            ..UdDest::default()
        };
        Datagrams { a, b, qa, qb, to, world }
    }

    fn send(&self, wr_id: u64) {
        self.qa
            .post_send(&SendWr { ud: Some(self.to), ..send(wr_id, &[self.a.sge(0, BYTES)]) })
            .unwrap();
    }

    fn recv(&self, wr_id: u64) {
        self.qb.post_recv(&recv(wr_id, &[self.b.sge(0, GRH + BYTES)])).unwrap();
    }

    fn drops(&self, nic: &str) -> u64 {
        page(&self.world, nic).counters().drops
    }
}

/// A program that posts its receives late gets everything, however much was sent: much more than
/// the receiver's room.
#[test]
fn a_receiver_that_is_late_gets_all() {
    let d = Datagrams::new();
    let (mut sent, mut done) = (0, 0);
    const COUNT: u64 = 2_000;
    // Never more than 100 of the sender's 128 entries are in use. It goes on until its receiver has
    // no room, and no receive is there.
    let mut wcs = [unbroken_types::Wc::default(); 64];
    // Each poll sends what there is room for; without room it asks again after some µs.
    let (mut quiet_since, mut quiet_polls) = (Instant::now(), 0);
    while quiet_polls < 1_000 || quiet_since.elapsed() < Duration::from_millis(20) {
        while sent < COUNT && sent - done < 100 {
            d.send(sent);
            sent += 1;
        }
        let n = d.a.cq.poll(&mut wcs).unwrap() as u64;
        quiet_polls += 1;
        if n > 0 {
            done += n;
            (quiet_since, quiet_polls) = (Instant::now(), 0);
        }
    }
    assert!(
        (10..COUNT / 2).contains(&done),
        "{done} of {COUNT} left: some had room, and the rest waited"
    );
    let (mut posted, mut received) = (0, 0);
    let start = Instant::now();
    while received < COUNT {
        assert!(start.elapsed() < common::PATIENCE, "{received} of {COUNT} came, {done} left");
        while posted < COUNT && posted - received < 64 {
            d.recv(posted);
            posted += 1;
        }
        while sent < COUNT && sent - done < 100 {
            d.send(sent);
            sent += 1;
        }
        done += d.a.cq.poll(&mut wcs).unwrap() as u64;
        let n = d.b.cq.poll(&mut wcs).unwrap();
        for wc in &wcs[..n] {
            assert_ok(wc, received);
            received += 1;
        }
    }
    assert_eq!((d.drops("a"), d.drops("b")), (0, 0));
    d.a.poll((COUNT - done) as usize);
    all_is_returned(&d.world, "b", [&d.a, &d.b]);
}

/// Without a receive for long, datagrams are dropped, and later ones at once: the sender is held no
/// more than once.
#[test]
fn a_receiver_that_posts_nothing_holds_its_senders_once() {
    let d = Datagrams::new();
    let start = Instant::now();
    for round in 0..40 {
        (0..100).for_each(|n| d.send(round * 100 + n));
        d.a.poll(100);
    }
    // Otherwise every room's worth of them would wait.
    assert!(start.elapsed() < 4 * PATIENCE, "{:?} for what nobody takes", start.elapsed());
    // Each is counted when it is dropped: nothing is on its way any more. A receive that is posted
    // now is for the next.
    let start = Instant::now();
    while d.drops("b") < 4_000 {
        assert!(start.elapsed() < common::PATIENCE, "only {} of 4000 are dropped", d.drops("b"));
        assert_eq!(d.b.cq.poll(&mut [unbroken_types::Wc::default()]).unwrap(), 0);
    }
    assert_eq!((d.drops("a"), d.drops("b")), (0, 4_000));
    all_is_returned(&d.world, "b", [&d.a, &d.b]);
    d.recv(1);
    d.send(9);
    assert_ok(&d.b.poll(1)[0], 1);
    assert_eq!(d.b.bytes(GRH, BYTES), vec![0; BYTES]);
}

/// The process of the receiver is gone without a word: its account stays open, its socket is
/// closed.
#[test]
fn a_receiver_that_died_holds_its_senders_once() {
    let d = Datagrams::new();
    let page = page(&d.world, "b");
    let to = UdDest { qpn: 77 << 16 | 5, ..d.to };
    page.credit(77).open(100_000);
    let start = Instant::now();
    for round in 0..20 {
        for n in 0..100 {
            d.qa.post_send(&SendWr { ud: Some(to), ..send(round * 100 + n, &[d.a.sge(0, BYTES)]) })
                .unwrap();
        }
        d.a.poll(100);
    }
    let took = start.elapsed();
    assert!(took >= PATIENCE && took < 3 * PATIENCE, "{took:?}");
    // A NIC that was closed tells its senders so.
    drop((d.qb, d.b));
    let start = Instant::now();
    for round in 0..20 {
        for n in 0..100 {
            d.qa.post_send(&SendWr {
                ud: Some(d.to),
                ..send(round * 100 + n, &[d.a.sge(0, BYTES)])
            })
            .unwrap();
        }
        d.a.poll(100);
    }
    assert!(start.elapsed() < PATIENCE, "{:?} for a NIC that is closed", start.elapsed());
}

/// What came in for a QP before it was reset, whether it waited for a receive or in the socket, is
/// not for its next life, though that has the same QPN and Q_Key.
#[test]
fn what_came_before_a_reset_is_gone() {
    const MARK: usize = 100;
    let d = Datagrams::new();
    for round in 0..20 {
        // More than one drive takes from the socket.
        for n in 0..50 {
            d.send(n);
            d.a.poll(1);
        }
        if round % 2 == 0 {
            assert_eq!(
                d.b.cq.poll(&mut [unbroken_types::Wc::default()]).unwrap(),
                0,
                "there is no receive"
            );
        }
        let reset = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
        d.qb.modify(&QpModify { rc: reset, ..QpModify::default() }).unwrap();
        ready(&*d.qb);
        d.recv(round);
        d.qa.post_send(&SendWr { ud: Some(d.to), ..send(0, &[d.a.sge(0, MARK)]) }).unwrap();
        d.a.poll(1);
        let wc = d.b.poll(1)[0];
        assert_ok(&wc, round);
        assert_eq!(wc.byte_len as usize, GRH + MARK, "round {round}: that is from before");
    }
    all_is_returned(&d.world, "b", [&d.a, &d.b]);
}

/// UC between two NICs of a process whose QPs end, by death or by hand, while packets wait and
/// senders are paused.
#[test]
fn qps_end_while_packets_wait() {
    let world = World::new();
    let (a, b) = (Host::new(&world, "a", 0, 1 << 20), Host::new(&world, "b", 0, 1 << 20));
    for round in 0..4 {
        let (qa, qb) = (
            a.nic.create_qp(&a.init(QpType::Uc)).unwrap(),
            b.nic.create_qp(&b.init(QpType::Uc)).unwrap(),
        );
        for (qp, peer, host) in [(&qa, &qb, &b), (&qb, &qa, &a)] {
            let d = RcModify::default();
            let rtr = RcModify {
                state: Some(QpState::Rtr),
                dest_qpn: Some(peer.qpn()),
                rq_psn: Some(9),
                mtu: Some(unbroken_types::Mtu::B4096),
                ..d
            };
            let steps = [
                (RcModify { state: Some(QpState::Init), access: Some(ALL), ..d }, None),
                (rtr, Some(host.nic.gid())),
                (RcModify { state: Some(QpState::Rts), sq_psn: Some(9), ..d }, None),
            ];
            for (rc, dest) in steps {
                qp.modify(&QpModify { rc, path: dest.map(PathAttr::new), ..QpModify::default() })
                    .unwrap();
            }
        }
        // 4 MiB for which there is no receive.
        (0..64).for_each(|n| qa.post_send(&send(n, &[a.sge(0, 1 << 16)])).unwrap());
        assert!(a.poll_some(1).len() < 64, "the rest waits");
        match round {
            0 => qb.destroy(),
            1 => qb
                .modify(&QpModify {
                    rc: RcModify { state: Some(QpState::Err), ..RcModify::default() },
                    ..Default::default()
                })
                .unwrap(),
            2 => qa.destroy(),
            _ => world.fault("nic a/0 dead"),
        }
        if round < 2 {
            a.poll_some(1);
        }
        if round == 3 {
            let start = Instant::now();
            let mut wcs = [unbroken_types::Wc::default(); 16];
            loop {
                let n = a.cq.poll(&mut wcs).unwrap();
                if wcs[..n]
                    .iter()
                    .any(|wc| wc.status == unbroken_types::WcStatus::WrFlushErr as u32)
                {
                    break;
                }
                assert!(start.elapsed() < common::PATIENCE, "a UC QP on a dead NIC must flush");
            }
        }
        all_is_returned(&world, "b", [&a, &b]);
    }
}

/// The last handle of a NIC that has died goes when its NIC has been healed and opened again: in
/// the same slot, whose account stays open.
#[test]
fn the_handle_of_a_dead_nic_leaves_the_next_one_its_account() {
    let world = World::new();
    let dead = Host::new(&world, "b", 0, 4096);
    world.fault("nic b/0 dead");
    dead.events.wait(|e| *e == DeviceEvent::Fatal);
    world.clear();
    dead.events.wait(|e| *e == DeviceEvent::PortActive(1));
    wait_until_free(&*dead.nic);
    let again = Host::with_channel(dead.nics.clone(), 0, 4096, None);
    let slot = again.nic.slot();
    assert_eq!(slot, dead.nic.slot());
    drop(dead);
    // Without an account all would be granted.
    let granted =
        page(&world, "b").credit(slot as u8).reserve(1, u64::MAX, unbroken_fabric::now_us());
    assert!(granted.is_some_and(|bytes| bytes <= 1 << 20), "{granted:?}");
}

/// A UC pair of which both ends have switched back-pressure off, or neither.
fn connect_uc(qp: &dyn DeviceQp, peer: (u32, unbroken_types::Gid), lossy: bool) {
    let d = RcModify::default();
    let mtu = Some(unbroken_types::Mtu::B4096);
    let rtr =
        RcModify { state: Some(QpState::Rtr), dest_qpn: Some(peer.0), rq_psn: Some(9), mtu, ..d };
    for (rc, dest) in [
        (RcModify { state: Some(QpState::Init), access: Some(ALL), ..d }, None),
        (rtr, Some(peer.1)),
        (RcModify { state: Some(QpState::Rts), sq_psn: Some(9), ..d }, None),
    ] {
        qp.modify(&QpModify {
            rc,
            path: dest.map(PathAttr::new),
            lossy: Some(lossy),
            ..QpModify::default()
        })
        .unwrap();
    }
}

/// Sends to a receiver that has no receives, and gives how many sends were complete at once.
fn complete_at_once(lossy: bool) -> (usize, usize) {
    const COUNT: u64 = 1_000;
    let world = World::new();
    let (a, b) = (Host::new(&world, "a", 0, 1 << 16), Host::new(&world, "b", 0, 1 << 16));
    let (qa, qb) = (
        a.nic.create_qp(&a.init(QpType::Uc)).unwrap(),
        b.nic.create_qp(&b.init(QpType::Uc)).unwrap(),
    );
    connect_uc(&*qa, (qb.qpn(), b.nic.gid()), lossy);
    connect_uc(&*qb, (qa.qpn(), a.nic.gid()), lossy);
    let mut wcs = [unbroken_types::Wc::default(); 64];
    let (mut sent, mut done) = (0, 0);
    while sent < COUNT && qa.post_send(&send(sent, &[a.sge(0, BYTES)])).is_ok() {
        sent += 1;
        done += a.cq.poll(&mut wcs).unwrap();
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(20) {
        done += a.cq.poll(&mut wcs).unwrap();
    }
    // What the receiver has taken by now is gone, or waits for it: then it comes with its receive.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(20) {
        b.cq.poll(&mut wcs).unwrap();
    }
    qb.post_recv(&recv(1, &[b.sge(0, BYTES)])).unwrap();
    let mut came = 0;
    while start.elapsed() < Duration::from_millis(40) {
        came += b.cq.poll(&mut wcs).unwrap();
    }
    if lossy {
        let (page, slots) = (page(&world, "b"), 0..=u8::MAX);
        assert_eq!(
            slots.map(|slot| page.credit(slot).on_way()).sum::<u64>(),
            0,
            "nothing was reserved or returned"
        );
    }
    (done, came)
}

#[test]
fn a_lossy_qp_is_never_held_and_what_finds_no_receive_is_lost() {
    assert_eq!(complete_at_once(true), (1_000, 0));
    let (done, came) = complete_at_once(false);
    assert!(done < 1_000 && came == 1, "{done} sends were complete, {came} waited for the receive");
}
