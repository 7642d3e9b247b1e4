//! Links that damage, delay and lose packets: what RC carries over them stays whole, and what they
//! do is what was asked for.

mod common;

use common::*;
use std::time::{Duration, Instant};
use unbroken_fabric::{NicPage, Schedule};
use unbroken_types::{Mtu, QpState, SendOpcode, Wc, WcStatus};
use unbroken_verbs::{Device, DeviceEvent, DeviceQp};

/// About 67 ms: longer than the delays here.
const PATIENT_TIMEOUT: u8 = 14;

/// A connected pair whose QPs wait long enough for answers over slow links.
fn patient() -> Pair {
    let world = World::new();
    let (a, b) = (Host::new(&world, "a", 0, 4 << 20), Host::new(&world, "b", 0, 4 << 20));
    let (qa, qb) = (a.qp(|_| {}), b.qp(|_| {}));
    join((&a, &*qa), (&b, &*qb));
    Pair { world, a, b, qa, qb }
}

/// Connects two QPs.
fn join(a: (&Host, &dyn DeviceQp), b: (&Host, &dyn DeviceQp)) {
    for ((_, qp), (host, peer)) in [(a, b), (b, a)] {
        connect_slowly(qp, peer.qpn(), host.nic.gid(), 0x100, Mtu::B4096, PATIENT_TIMEOUT).unwrap();
    }
}

fn page(p: &Pair, host: &Host) -> NicPage {
    NicPage::open(p.world.fabric.runtime(), host.nics.ip(0).unwrap()).unwrap()
}

/// Sends, writes and reads over a link must carry every byte to its place, once and in order.
fn carries_all(p: &mut Pair, messages: usize, bytes: usize) {
    let data = pattern(messages * bytes, 5);
    p.a.fill(0, &data);
    for i in 0..messages {
        p.qb.post_recv(&recv(i as u64, &[p.b.sge(i * bytes, bytes)])).unwrap();
        p.qa.post_send(&send(i as u64, &[p.a.sge(i * bytes, bytes)])).unwrap();
    }
    // Of both ends: a sender that has given up says why its receiver gets nothing.
    let start = Instant::now();
    let mut done = [0, 0];
    while done.iter().any(|done| *done < messages) {
        for (host, done) in [&p.a, &p.b].into_iter().zip(&mut done) {
            for wc in host.poll_now() {
                assert_ok(&wc, *done as u64);
                *done += 1;
            }
        }
        assert!(start.elapsed() < PATIENCE, "{done:?} of {messages} sends and receives are done");
    }
    assert_eq!(p.b.bytes(0, data.len()), data);
    let read_to = 2 << 20;
    p.qa.post_send(&rdma(
        9,
        SendOpcode::Read,
        &[p.a.sge(read_to, data.len())],
        p.b.addr(0),
        p.b.mr.rkey,
    ))
    .unwrap();
    assert_ok(&p.a.poll(1)[0], 9);
    assert_eq!(p.a.bytes(read_to, data.len()), data);
    p.qb.post_send(&rdma(
        10,
        SendOpcode::Write,
        &[p.b.sge(0, data.len())],
        p.a.addr(read_to),
        p.a.mr.rkey,
    ))
    .unwrap();
    assert_ok(&p.b.poll(1)[0], 10);
    assert_eq!(p.a.bytes(read_to, data.len()), data);
}

#[test]
fn data_stays_whole_over_every_kind_of_bad_link() {
    for faults in [
        &["loss a/0 2%"][..],
        &["burst-loss cable a/0 2% burst=5"],
        &["corrupt a/0 2%"],
        &["duplicate rail0 20%"],
        &["reorder a/0 5% by=100us"],
        &["jitter a/0 300us"],
        &["delay a/0 2ms", "jitter b/0 1ms"],
        &["rate a/0 500Mbit", "loss b/0 rx 1%"],
        &[
            "loss a/0 1%",
            "corrupt rail0 1%",
            "duplicate b/0 5%",
            "reorder cable b/0 5%",
            "delay a/0 tx 500us",
        ],
    ] {
        let mut p = patient();
        faults.iter().for_each(|f| p.world.fault(f));
        carries_all(&mut p, 8, 100_000);
        p.world.clear();
        carries_all(&mut p, 4, 10_000);
    }
}

#[test]
fn damaged_packets_are_dropped_by_their_receiver() {
    let mut p = patient();
    p.world.fault("corrupt a/0 tx 5%");
    carries_all(&mut p, 16, 65_536);
    assert!(page(&p, &p.b).counters().icrc_errors > 0);
    assert_eq!(page(&p, &p.a).counters().icrc_errors, 0, "of one direction");
    p.world.clear();
    p.world.fault("corrupt a/0 rx 5%");
    let before = page(&p, &p.b).counters().icrc_errors;
    carries_all(&mut p, 16, 65_536);
    assert!(page(&p, &p.a).counters().icrc_errors > 0);
    assert_eq!(page(&p, &p.b).counters().icrc_errors, before);
}

#[test]
fn losses_are_counted_where_they_happen() {
    let mut p = patient();
    p.world.fault("burst-loss a/0 rx 5% burst=3");
    carries_all(&mut p, 16, 65_536);
    assert!(page(&p, &p.a).counters().drops > 0);
    assert_eq!(page(&p, &p.b).counters().drops, 0);
}

/// The least of some round trips of an empty message and its acknowledgement.
fn round_trip(p: &Pair, rounds: u64) -> Duration {
    let once = |i| {
        p.qb.post_recv(&recv(i, &[])).unwrap();
        let start = Instant::now();
        p.qa.post_send(&send(i, &[])).unwrap();
        assert_ok(&p.a.poll(1)[0], i);
        assert_ok(&p.b.poll(1)[0], i);
        start.elapsed()
    };
    (0..rounds).map(once).min().unwrap()
}

#[test]
fn delay_is_added_to_each_way() {
    let p = patient();
    assert!(round_trip(&p, 50) < Duration::from_millis(4));
    for (fault, ms) in [
        ("delay a/0 4ms", 8..16),
        ("delay cable a/0 tx 4ms", 4..8),
        ("delay b/0 rx 4ms", 4..8),
        ("delay rail0 4ms", 8..16),
    ] {
        p.world.fault(fault);
        let least = round_trip(&p, 15);
        let range = Duration::from_millis(ms.start)..Duration::from_millis(ms.end);
        assert!(range.contains(&least), "{fault}: {least:?}");
        p.world.clear();
    }
    assert!(round_trip(&p, 50) < Duration::from_millis(4), "gone with its fault");
}

/// Writes from both processes (here: sets of NICs) of host a for a while; gives the bytes that
/// arrived in each second.
fn throughput(p: &Pair, senders: &[(&Host, &dyn DeviceQp)], time: Duration) -> f64 {
    const BYTES: usize = 64 << 10;
    let post = |host: &Host, qp: &dyn DeviceQp| {
        let wr = rdma(1, SendOpcode::Write, &[], p.b.addr(0), p.b.mr.rkey);
        let sges = [host.sge(0, BYTES)];
        qp.post_send(&unbroken_verbs::SendWr { sges: &sges, ..wr }).unwrap();
    };
    senders.iter().for_each(|(host, qp)| (0..16).for_each(|_| post(host, *qp)));
    let mut wcs = [Wc::default(); 16];
    let mut done = 0;
    let mut poll = |again: bool| {
        let mut polled = 0;
        for (host, qp) in senders {
            let got = host.cq.poll(&mut wcs).unwrap();
            for wc in &wcs[..got] {
                assert_ok(wc, 1);
                if again {
                    post(host, *qp);
                }
            }
            polled += got;
        }
        polled
    };
    // The queues fill first.
    while done < 8 {
        done += poll(true);
    }
    let (start, before) = (Instant::now(), page(p, &p.b).counters().rx_payload_bytes);
    while start.elapsed() < time {
        poll(true);
    }
    let rate =
        (page(p, &p.b).counters().rx_payload_bytes - before) as f64 / start.elapsed().as_secs_f64();
    let mut left = 16 * senders.len();
    while left > 0 {
        left -= poll(false);
    }
    rate
}

#[test]
fn a_rate_is_kept() {
    let p = patient();
    let bytes_per_s = 50e6 / 8.0;
    for fault in ["rate a/0 50Mbit", "rate b/0 rx 50Mbit", "rate rail0 50Mbit"] {
        p.world.fault(fault);
        // A machine that is busy with other things may be slower, never faster.
        let share = (0..3)
            .map(|_| throughput(&p, &[(&p.a, &*p.qa)], Duration::from_secs(1)) / bytes_per_s)
            .inspect(|share| assert!(*share < 1.05, "{fault}: {share}"))
            .find(|share| *share > 0.8);
        assert!(share.is_some(), "{fault}");
        p.world.clear();
    }
}

#[test]
fn a_rate_is_shared_by_the_processes_of_a_nic() {
    let p = patient();
    let other = Host::new(&p.world, "a", 0, 1 << 20);
    let (qc, qd) = (other.qp(|_| {}), p.b.qp(|_| {}));
    join((&other, &*qc), (&p.b, &*qd));
    p.world.fault("rate a/0 tx 50Mbit");
    let both: [(&Host, &dyn DeviceQp); 2] = [(&p.a, &*p.qa), (&other, &*qc)];
    let share = (0..3)
        .map(|_| throughput(&p, &both, Duration::from_secs(1)) / (50e6 / 8.0))
        .inspect(|share| assert!(*share < 1.05, "{share}"))
        .find(|share| *share > 0.8);
    assert!(share.is_some());
}

/// A drive sends a packet or two over a slow line; it must not be the same QP's each time.
#[test]
fn queue_pairs_share_a_slow_line_evenly() {
    const MESSAGES: u64 = 64;
    const BYTES: usize = 16 << 10;
    for count in 2..=5 {
        let p = patient();
        let more: Vec<_> = (1..count).map(|_| (p.a.qp(|_| {}), p.b.qp(|_| {}))).collect();
        more.iter().for_each(|(qa, qb)| join((&p.a, &**qa), (&p.b, &**qb)));
        let mut qps: Vec<&dyn DeviceQp> = vec![&*p.qa];
        more.iter().for_each(|(qa, _)| qps.push(&**qa));
        p.world.fault("rate a/0 tx 20Mbit");
        let post = |which: u64| {
            let wr = rdma(which, SendOpcode::Write, &[], p.b.addr(0), p.b.mr.rkey);
            let sges = [p.a.sge(0, BYTES)];
            qps[which as usize].post_send(&unbroken_verbs::SendWr { sges: &sges, ..wr }).unwrap();
        };
        (0..4).for_each(|_| (0..count).for_each(post));
        let mut done = vec![0; count as usize];
        while done.iter().sum::<u64>() < MESSAGES {
            for wc in p.a.poll_some(1) {
                assert_ok(&wc, wc.wr_id);
                done[wc.wr_id as usize] += 1;
                post(wc.wr_id);
            }
        }
        let fair = MESSAGES / count;
        assert!(done.iter().all(|n| *n >= fair / 2), "{count} queue pairs: {done:?}");
    }
}

#[test]
fn a_flapping_port_tells_each_time_and_carries_in_between() {
    let mut p = patient();
    p.world.fault("flap a/0 down=20ms up=60ms");
    p.a.events.wait_count(3, |e| *e == DeviceEvent::PortDown(1));
    p.a.events.wait_count(3, |e| *e == DeviceEvent::PortActive(1));
    carries_all(&mut p, 8, 100_000);
    p.world.clear();
    p.world.fault("flap cable b/0 down=20ms up=60ms");
    carries_all(&mut p, 8, 100_000);
    assert_eq!(p.b.events.count(|_| true), 0, "silence");
    p.world.clear();
    carries_all(&mut p, 1, 1000);
}

#[test]
fn packets_in_the_air_are_lost_with_the_cable_and_leave_with_a_closed_nic() {
    let p = patient();
    p.world.fault("delay a/0 tx 30ms");
    for i in 0..2 {
        p.qb.post_recv(&recv(i, &[p.b.sge(0, 10)])).unwrap();
    }
    p.qa.post_send(&send(1, &[p.a.sge(0, 10)])).unwrap();
    p.world.fault("cable a/0 cut");
    p.a.events.count(|_| true);
    // The engine sees the cut, and that it is over, before the packet is due.
    while page(&p, &p.a).counters().drops == 0 {
        p.a.cq.poll(&mut [Wc::default(); 1]).unwrap();
    }
    p.world.fabric.clear(Some(&"cable a/0".parse().unwrap())).unwrap();
    assert_ok(&p.a.poll(1)[0], 1);
    assert_ok(&p.b.poll(1)[0], 0);
    // Longer than the test runs, were it not for the closing.
    p.world.clear();
    p.world.fault("delay a/0 tx 10s");
    p.qa.post_send(&send(2, &[p.a.sge(0, 10)])).unwrap();
    let Pair { a, b, qa, .. } = p;
    drop((qa, a));
    assert_ok(&b.poll(1)[0], 1);
}

#[test]
fn a_wqe_error_fails_one_qp_and_keeps_what_it_held() {
    let p = Pair::with(|i| i.suspend_on_error = true);
    let (qc, qd) = (p.a.qp(|_| {}), p.b.qp(|_| {}));
    join((&p.a, &*qc), (&p.b, &*qd));
    p.world.fault("wqe-error a/0");
    p.qb.post_recv(&recv(1, &[])).unwrap();
    qd.post_recv(&recv(2, &[])).unwrap();
    // The verb succeeds; the WR fails. One that holds keeps it.
    p.qa.post_send(&send(1, &[p.a.sge(0, 10)])).unwrap();
    let failed = DeviceEvent::QpFailed { qpn: p.qa.qpn(), status: WcStatus::LocQpOpErr };
    p.a.events.wait(|e| *e == failed);
    let backlog = p.qa.quiesce().unwrap();
    assert_eq!((backlog.sends.len(), backlog.sends[0].wr_id), (1, 1));
    // It has struck.
    qc.post_send(&send(2, &[])).unwrap();
    assert_ok(&p.a.poll(1)[0], 2);
    assert_ok(&p.b.poll(1)[0], 2);
    // Set anew, it strikes anew; a plain QP ends with the error.
    p.world.fault("wqe-error a/0");
    qc.post_send(&send(3, &[])).unwrap();
    let wc = p.a.poll(1)[0];
    assert_eq!((wc.wr_id, wc.status, qc.state()), (3, WcStatus::LocQpOpErr as u32, QpState::Err));
}

#[test]
fn a_wqe_error_may_come_again() {
    let p = Pair::new();
    let every = Some(Duration::from_millis(20));
    p.world
        .fabric
        .schedule(&"wqe-error a/0".parse().unwrap(), &Schedule { every, ..Schedule::default() })
        .unwrap();
    for _ in 0..3 {
        let (qc, qd) = (p.a.qp(|_| {}), p.b.qp(|_| {}));
        join((&p.a, &*qc), (&p.b, &*qd));
        let start = Instant::now();
        let mut status = WcStatus::Success as u32;
        while status == WcStatus::Success as u32 {
            qd.post_recv(&recv(1, &[])).unwrap();
            qc.post_send(&send(1, &[])).unwrap();
            status = p.a.poll(1)[0].status;
            p.b.cq.poll(&mut [Wc::default(); 4]).unwrap();
            assert!(start.elapsed() < PATIENCE);
        }
        assert_eq!(status, WcStatus::LocQpOpErr as u32);
        qc.destroy();
        qd.destroy();
        while p.b.cq.poll(&mut [Wc::default(); 4]).unwrap() > 0 {}
    }
}
