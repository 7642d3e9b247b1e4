//! QPs that the program resets or moves to ERR, or that an error of its own has ended, while NICs
//! die.

use super::*;

/// ERR, or its end, finds a QP between two paths: nothing is left of it, and all that was
/// outstanding is flushed once, in order.
#[test]
fn a_qp_is_ended_in_the_middle_of_its_switch() {
    for no_path in [false, true] {
        let w = World::new();
        // The other end cannot answer: its lock is held. Or there is no path at all.
        let other = (!no_path).then(|| w.to.gate());
        w.plan.dead.iter().take(if no_path { 4 } else { 1 }).for_each(|d| d.store(true, SeqCst));
        (0..3).for_each(|i| w.post_send(i).unwrap());
        assert!(w.from.gate().link.as_ref().is_some_and(|l| l.executor().switching()));
        let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
        assert_eq!(w.from.state(), QpState::Err);
        drop(other);
        w.post_send(3).unwrap();
        let wcs = w.completions(4);
        let flushed =
            |wc: &Wc| wc.status == WcStatus::WrFlushErr as u32 && wc.qp_num == w.from.qpn();
        assert!(
            wcs.iter().all(flushed) && wcs.iter().map(|wc| wc.wr_id).eq(0..4),
            "no path {no_path}: {wcs:?}"
        );
    }
}

/// RESET of a QP that has moved, or whose NIC is dead: it is connected again under the number that
/// it has always had, and carries on.
#[test]
fn a_qp_is_reset_after_it_has_moved() {
    for heals in [false, true] {
        let w = World::new();
        w.exchange(10);
        w.plan.dead[0].store(true, SeqCst);
        w.exchange(20);
        assert_ne!(w.from.gate().nic, 0);
        if heals {
            w.plan.dead[0].store(false, SeqCst);
            w.core.jobs.put(Job::Device(0, DeviceEvent::PortActive(1)));
            w.wait("the NIC is back", || w.core.nics.device(0).is_some());
        }
        let (number, rc) =
            (w.from.qpn(), RcModify { state: Some(QpState::Reset), ..RcModify::default() });
        for qp in [&w.from, &w.to] {
            qp.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
            assert_eq!(qp.state(), QpState::Reset);
        }
        connect(&w.from, &w.to);
        connect(&w.to, &w.from);
        w.exchange(30);
        assert_eq!((w.from.qpn(), heals || w.from.gate().nic != 0), (number, true));
    }
}

/// Without any NIC a RESET is an error, and changes nothing: what was outstanding still leaves by
/// the first NIC that is healed.
#[test]
fn a_reset_without_any_nic_loses_nothing() {
    let w = World::new();
    w.post_recv(1).unwrap();
    w.plan.dead.iter().for_each(|d| d.store(true, SeqCst));
    w.post_send(2).unwrap();
    let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
    assert_eq!(
        w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap_err().errno(),
        libc::EIO
    );
    w.plan.dead[3].store(false, SeqCst);
    w.core.jobs.put(Job::Device(3, DeviceEvent::PortActive(1)));
    w.arrives();
}

/// A QP that an error of the program has ended stays ended when its NIC dies later.
#[test]
fn an_ended_qp_does_not_come_back_to_life() {
    for nobody_noticed in [false, true] {
        let w = World::new();
        // No memory at that key: the program's own error.
        w.post_send_with(1, 0xdead_beef).unwrap();
        assert_eq!(w.completions(1)[0].status, WcStatus::LocProtErr as u32);
        assert_eq!(w.from.state(), QpState::Err);
        w.plan.dead[0].store(true, SeqCst);
        if !nobody_noticed {
            w.core.jobs.put(Job::Device(0, DeviceEvent::Fatal));
            w.wait("the death is noticed", || w.from.gate().failed);
        }
        w.post_send(2).unwrap();
        assert_eq!(w.completions(1)[0].status, WcStatus::WrFlushErr as u32);
        assert_eq!(w.from.state(), QpState::Err);
    }
}

/// A QP that the program has moved to ERR stays ended, too: it is there whenever it is asked to be,
/// and flushes what is posted.
#[test]
fn what_the_program_has_ended_stays_so_without_any_nic() {
    for nobody_noticed in [false, true] {
        let w = World::new();
        let end = || {
            let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
            w.from.modify(&QpModify { rc, ..QpModify::default() })
        };
        end().unwrap();
        w.plan.dead.iter().for_each(|dead| dead.store(true, SeqCst));
        if !nobody_noticed {
            (0..w.plan.dead.len())
                .for_each(|nic| w.core.jobs.put(Job::Device(nic, DeviceEvent::Fatal)));
            w.wait("the deaths are noticed", || {
                (0..w.plan.dead.len()).all(|nic| w.core.nics.device(nic).is_none())
            });
        }
        w.post_send(2).unwrap();
        assert_eq!(w.completions(1)[0].status, WcStatus::WrFlushErr as u32);
        end().unwrap();
        assert_eq!(w.from.state(), QpState::Err);
    }
}

/// The process ends while nothing has moved on the new path yet: the log has the switch.
#[test]
fn the_log_has_a_switch_when_its_process_ends() {
    let w = World::new();
    w.plan.dead[0].store(true, SeqCst);
    // Nothing takes it, so it is not complete.
    w.post_send(1).unwrap();
    let moved = || w.from.status().epoch > 0 && w.from.status().state == "rts";
    w.wait("it is on another path", moved);
    let switches = || {
        let events = unbroken_events::read_events(&w.core.runtime).unwrap();
        let is_switch = |event: &&unbroken_events::Event| matches!(&event.what, unbroken_events::What::Switch(s) if s.qp == w.from.qpn());
        events.iter().filter(is_switch).count()
    };
    w._system.finish();
    assert_eq!(switches(), 1);
    w._system.finish();
    assert_eq!(switches(), 1, "it is told once");
}
