//! What the worker sees of a QP without asking its device, and when it asks.

use super::*;
use unbroken_types::Progress;

#[test]
fn a_device_is_asked_only_where_a_qp_has_been_silent_for_long_enough() {
    let w = World::unconnected(&[]);
    connect(&w.from, &w.to);
    connect(&w.to, &w.from);
    w.wait("both ends are protected", || w.from.status().protected && w.to.status().protected);
    let pulse = || w.from.gate().phys.pulse().unwrap();
    let advanced = || w.from.gate().phys.progress().advanced;
    assert_eq!((pulse(), advanced()), (0, 0));
    w.exchange(10);
    // The receiver knows before the sender's NIC has the acknowledgement.
    w.wait("it shows that it has moved", || pulse() > 0 && pulse() == advanced());
    let mut g = w.from.gate();
    let now_us = unbroken_runtime::now_us();
    let supposed =
        Progress { outstanding_sends: 1, advanced: advanced_of(&g), ..Progress::default() };
    // A look of the worker may have been here before.
    link::look(&mut g, now_us, &supposed);
    assert!(!link::has_moved(&g));
    assert_eq!(link::progress(&g, now_us, false), supposed, "just now");
    assert_eq!(link::progress(&g, now_us + 100_000, true), supposed, "its path lives");
    for (later_us, lives) in [(21_000, false), (251_000, true)] {
        let found = link::progress(&g, now_us + later_us, lives);
        assert_eq!(
            (found.state, found.outstanding_sends),
            (QpState::Rts, 0),
            "after {later_us} us it is asked"
        );
    }
    drop(g);
    let rc = RcModify { state: Some(QpState::Reset), ..RcModify::default() };
    w.from.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
    assert_eq!(pulse(), 0, "a life that has not moved");
}

fn advanced_of(g: &crate::qp::Gate) -> u64 {
    g.phys.progress().advanced
}

/// What is told of a QP has the state of one that is no RC QP, too, and of one that is gone.
#[test]
fn every_kind_of_qp_has_a_state_in_its_progress() {
    let w = World::unconnected(&[]);
    let pd = w.contexts[0].alloc_pd().unwrap();
    let caps = QpCaps {
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    for qp_type in [QpType::Rc, QpType::Uc] {
        let (send_cq, recv_cq) = (w.cq.clone(), w.cq.clone());
        let request = QpRequest {
            qp_type,
            caps,
            pd,
            send_cq,
            recv_cq,
            srq: None,
            sq_sig_all: true,
            cookie: 0,
            plain: false,
            management: false,
        };
        let qp = w.contexts[0].create_qp(&request).unwrap();
        assert_eq!(qp.status().state, "reset", "{qp_type:?}");
        let rc = RcModify {
            state: Some(QpState::Init),
            access: Some(Access::LOCAL_WRITE),
            ..RcModify::default()
        };
        qp.modify(&QpModify { rc, ..QpModify::default() }).unwrap();
        assert_eq!(qp.status().state, "init", "{qp_type:?}");
        qp.destroy().unwrap();
        let g = qp.gate();
        assert_eq!(
            (g.phys.progress().state, g.phys.state()),
            (QpState::Err, QpState::Err),
            "{qp_type:?}"
        );
    }
}

/// Two pairs have sends that wait for a receive: the worker queries the protected pair only. The
/// owner of plain queue pairs holds their lock most of the time, to post and to poll.
#[test]
fn a_qp_that_wants_no_protection_is_not_looked_at() {
    let w = World::unconnected(&[]);
    let pd = w.contexts[0].alloc_pd().unwrap();
    let pair = |plain| {
        let qp = |context: &Arc<Context>| {
            let request = QpRequest {
                qp_type: QpType::Rc,
                caps: QpCaps {
                    max_send_wr: 1,
                    max_recv_wr: 1,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: 0,
                },
                pd,
                send_cq: w.cq.clone(),
                recv_cq: w.cq.clone(),
                srq: None,
                sq_sig_all: true,
                cookie: 0,
                plain,
                management: false,
            };
            context.create_qp(&request).unwrap()
        };
        let (from, to) = (qp(&w.contexts[0]), qp(&w.contexts[1]));
        connect(&from, &to);
        connect(&to, &from);
        (from, to)
    };
    let [(plain, plain_peer), (protected, peer)] = [true, false].map(pair);
    for qp in [&plain, &protected] {
        let wr = SendWr { opcode: SendOpcode::Send, ..SendWr::default() };
        qp.post_send(&wr).unwrap();
    }
    let looks = AtomicU32::new(0);
    w.wait("the worker looks at the one", || {
        let busy = w.core.qps.take_busy();
        assert!(!busy.contains(&plain.id()), "it looks at the other");
        let found = busy.iter().filter(|id| **id == protected.id()).count() as u32;
        busy.into_iter().for_each(|id| w.core.qps.add_busy(id));
        looks.fetch_add(found, SeqCst) + found >= 20
    });
    assert_eq!(plain.gate().phys.progress().outstanding_sends, 1);
    for qp in [&plain, &protected, &plain_peer, &peer] {
        qp.destroy().unwrap();
    }
}
