//! QPs that are made ahead: where they are, that they are used, and that nothing is left of them.

use super::*;

/// A connection whose devices' control verbs are slow, and take that long.
fn slow(control_us: u32) -> World {
    let plan = Arc::new(Plan::default());
    plan.slow_control.store(true, SeqCst);
    plan.control_us.store(control_us, SeqCst);
    World::planned(plan, &[])
}

fn connect_both(w: &World) {
    connect(&w.from, &w.to);
    connect(&w.to, &w.from);
}

/// The NIC on which a QP has its backup, and the number that it has there.
fn backup(qp: &Qp) -> Option<(usize, u32)> {
    qp.gate().backup.as_ref().map(|backup| (backup.nic, backup.phys.qpn()))
}

fn both_have_one(w: &World) {
    w.wait("both have a backup", || backup(&w.from).is_some() && backup(&w.to).is_some());
}

fn dies(w: &World, nic: usize) {
    w.plan.dead[nic].store(true, SeqCst);
    w.core.jobs.put(Job::Device(nic, DeviceEvent::Fatal));
    w.wait("the death is noticed", || w.core.nics.device(nic).is_none());
}

/// QPs of all kinds on the devices.
fn made(w: &World) -> u32 {
    w.plan.made.load(SeqCst)
}

#[test]
fn a_switch_takes_the_backup_and_there_is_another_then() {
    let w = slow(0);
    let before = made(&w);
    connect_both(&w);
    both_have_one(&w);
    assert_eq!(made(&w), before + 2);
    assert_ne!(backup(&w.from).unwrap().0, w.from.gate().nic);
    w.exchange(10);
    let expected = backup(&w.from).unwrap();
    dies(&w, 0);
    w.wait("it has moved", || w.from.status().epoch > 0);
    w.exchange(20);
    assert_eq!(
        {
            let g = w.from.gate();
            (g.nic, g.phys.qpn())
        },
        expected
    );
    both_have_one(&w);
    w.wait("what was left is gone", || made(&w) == before + 2);
    let status = w.core.backups.status(Default::default());
    assert!(status.made >= 3 && status.failures == 0, "{status:?}");
}

#[test]
fn a_backup_leaves_the_nic_that_has_died() {
    let w = slow(0);
    let before = made(&w);
    connect_both(&w);
    both_have_one(&w);
    let first = backup(&w.from).unwrap().0;
    // The QPs are on NICs 0 and 1.
    if first < 2 {
        return dies_under_both(&w, first);
    }
    dies(&w, first);
    w.wait("it is elsewhere", || backup(&w.from).is_some_and(|(nic, _)| nic != first));
    w.wait("one each", || made(&w) == before + 2);
    w.exchange(10);
    dies(&w, 0);
    w.exchange(20);
}

/// The NIC of one QP's backup is the one that the other QP is on.
fn dies_under_both(w: &World, nic: usize) {
    dies(w, nic);
    w.wait("it is elsewhere", || backup(&w.from).is_some_and(|(at, _)| at != nic));
    w.exchange(10);
}

/// The program has its own way while a backup is made, and nothing is left when it is back.
#[test]
fn destroying_a_qp_leaves_nothing_of_it() {
    for phase in ["nothing is made yet", "one is being made", "both are ready"] {
        let w = slow(0);
        let before = made(&w);
        connect_both(&w);
        w.plan.control_us.store(10_000, SeqCst);
        match phase {
            "one is being made" => w.wait(phase, || made(&w) > before),
            "both are ready" => both_have_one(&w),
            _ => {}
        }
        w.from.destroy().unwrap();
        w.to.destroy().unwrap();
        assert_eq!(made(&w), before - 2, "{phase}");
    }
}

#[test]
fn a_qp_that_is_connected_again_has_a_backup_again() {
    let w = slow(0);
    let before = made(&w);
    for round in 0..3 {
        connect_both(&w);
        both_have_one(&w);
        w.exchange(10 * round);
        for qp in [&w.from, &w.to] {
            let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
            qp.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
        }
    }
    assert!(made(&w) <= before + 2);
}

/// A backup may have the number of another logical QP: devices that number alike give it nearly
/// always. No second one is made for that.
#[test]
fn a_backup_has_any_number() {
    let w = slow(0);
    w.plan.standby_qpn.store(w.from.qpn(), SeqCst);
    connect_both(&w);
    both_have_one(&w);
    assert_eq!(backup(&w.from).unwrap().1, w.from.qpn());
    assert_eq!(w.plan.standbys.load(SeqCst), 2);
}

#[test]
fn fast_devices_have_no_backups() {
    let w = World::new();
    w.exchange(10);
    assert_eq!(backup(&w.from), None);
    assert_eq!(
        w.core.backups.status(Default::default()),
        unbroken_events::BackupsStatus::default()
    );
}
