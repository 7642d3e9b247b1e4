//! How much a round of the worker does.

use super::*;
use crate::soft;
use crate::tests::emulated;
use std::sync::atomic::Ordering::SeqCst;
use unbroken_types::Gid;

/// Ten thousand QPs wait for something: those under a switch for an answer, those that were just
/// connected for their peers' NICs, others for their peers. While nothing is due, the rounds of a
/// switch, which come every 100 us, touch none of them; else those that are due.
#[test]
fn a_round_touches_the_qps_that_are_due_and_no_other() {
    const QPS: u32 = 10_000;
    let folder = tempfile::tempdir().unwrap();
    let core = Core::over(soft::over(emulated(folder.path())).unwrap()).unwrap();
    let mut worker = Worker::new(&core, None);
    (worker.look_at_us, worker.keys_at_us) = (u64::MAX, u64::MAX);
    let far_us = now_us() + 3_600_000_000;
    for qpn in 0..QPS {
        worker.job(Job::Watch((0, qpn), far_us));
        worker.connecting.set((0, qpn), far_us);
        worker.seekers.seek(&core, (1, qpn), (Gid::default(), qpn), far_us);
    }
    let touched = |worker: &Worker| {
        let due = [&worker.watched, &worker.connecting].map(|due| due.touched);
        (worker.core.qps.touched.load(SeqCst), due)
    };
    let before = touched(&worker);
    for _ in 0..100 {
        worker.work();
        assert_eq!(worker.next_deadline().min(far_us), worker.failback.deadline_us(&core));
    }
    assert_eq!(touched(&worker), before);
    for qpn in [3, 77, 5000] {
        worker.job(Job::Watch((0, qpn), 1));
    }
    worker.work();
    let (qps, [watched, connecting]) = touched(&worker);
    assert_eq!((watched - before.1[0], connecting), (3, before.1[1]));
    assert!(qps - before.0 <= 6, "{} of {QPS}", qps - before.0);
}
