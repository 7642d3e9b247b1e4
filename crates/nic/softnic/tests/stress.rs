//! Many QPs, several threads, and memory that goes away under the network's hands.

mod common;

use common::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use unbroken_types::{SendOpcode, Sge, WcStatus};
use unbroken_verbs::Device;

/// Pages that vanish as soon as deregistration says that nothing touches them any more.
struct Pages(*mut libc::c_void, usize);

impl Pages {
    fn new(bytes: usize) -> Pages {
        let (prot, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping wherever the kernel likes.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Pages(at, bytes)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

/// The process would die of a write to unmapped memory.
#[test]
fn memory_is_untouched_after_deregistration() {
    let p = Pair::new();
    let memory = p.b.nics.memory();
    for round in 0..30 {
        let (qa, qb) = (p.a.qp(|_| {}), p.b.qp(|_| {}));
        connect(&*qa, &*qb, &p.b.nic).unwrap();
        connect(&*qb, &*qa, &p.a.nic).unwrap();
        let pages = Pages::new(1 << 20);
        let addr = pages.0 as u64;
        let mr = memory.reg_mr(p.b.pd, addr, 1 << 20, addr, ALL).unwrap();
        let opcode = if round % 2 == 0 { SendOpcode::Write } else { SendOpcode::Read };
        for i in 0..16 {
            qa.post_send(&rdma(i, opcode, &[p.a.sge(0, 1 << 20)], addr, mr.rkey)).unwrap();
        }
        // Somewhere in the middle.
        let first = p.a.poll_some(1 + round % 4);
        memory.dereg_mr(mr.lkey).unwrap();
        drop(pages);
        let rest = p.a.poll(16 - first.len());
        let all = [first, rest].concat();
        let failed = all.iter().position(|wc| wc.status != 0).unwrap_or(16);
        for (i, wc) in all.iter().enumerate() {
            assert_eq!(wc.wr_id, i as u64);
            let right = match i {
                i if i < failed => WcStatus::Success,
                i if i == failed => WcStatus::RemAccessErr,
                _ => WcStatus::WrFlushErr,
            };
            assert_eq!(wc.status, right as u32, "{all:?}");
        }
    }
}

/// Four threads at each end, each with its own CQ and QPs, on one NIC; QPs come and go meanwhile.
#[test]
fn many_qps_and_threads() {
    const THREADS: usize = 4;
    const QPS: usize = 16;
    const ROUNDS: usize = 12;
    const SIZE: usize = 20_000;
    let world = World::new();
    let (na, nb) = (world.nics("a"), world.nics("b"));
    let (events_a, events_b) = (Arc::new(Events::default()), Arc::new(Events::default()));
    let nics = [na.open(0, events_a).unwrap(), nb.open(0, events_b).unwrap()];
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let churn = s.spawn(|| {
            let (a, b) = (Host::on(&na, &nics[0], 4096), Host::on(&nb, &nics[1], 4096));
            while !done.load(Ordering::Relaxed) {
                let (qa, qb) = (a.qp(|_| {}), b.qp(|_| {}));
                connect(&*qa, &*qb, &b.nic).unwrap();
                connect(&*qb, &*qa, &a.nic).unwrap();
                qb.post_recv(&recv(1, &[b.sge(0, 4096)])).unwrap();
                qa.post_send(&send(2, &[a.sge(0, 4096)])).unwrap();
                // Destroyed in whatever state they are in.
            }
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|t| {
                let (na, nb, nics) = (&na, &nb, &nics);
                s.spawn(move || {
                    let mut a = Host::on(na, &nics[0], QPS * SIZE);
                    let b = Host::on(nb, &nics[1], QPS * SIZE);
                    let pairs: Vec<_> = (0..QPS).map(|_| (a.qp(|_| {}), b.qp(|_| {}))).collect();
                    for (qa, qb) in &pairs {
                        connect(&**qa, &**qb, &b.nic).unwrap();
                        connect(&**qb, &**qa, &a.nic).unwrap();
                    }
                    for round in 0..ROUNDS {
                        let data = pattern(QPS * SIZE, (t * ROUNDS + round) as u64 + 1);
                        a.fill(0, &data);
                        let at = |host: &Host, q: usize| -> [Sge; 1] { [host.sge(q * SIZE, SIZE)] };
                        for (q, (qa, qb)) in pairs.iter().enumerate() {
                            qb.post_recv(&recv(q as u64, &at(&b, q))).unwrap();
                            qa.post_send(&send(q as u64, &at(&a, q))).unwrap();
                        }
                        let (received, sent) = (b.poll(QPS), a.poll(QPS));
                        assert!(
                            received.iter().chain(&sent).all(|wc| wc.status == 0),
                            "{received:?} {sent:?}"
                        );
                        assert_eq!(b.bytes(0, QPS * SIZE), data);
                    }
                })
            })
            .collect();
        for w in workers {
            w.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        churn.join().unwrap();
    });
    assert!(nics[0].alive() && nics[1].alive());
}
