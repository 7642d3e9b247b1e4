//! The memory verbs as C programs call them, and events of a QP's own.

mod common;

use common::*;
use std::mem::zeroed;
use std::ptr::null_mut;
use unbroken_verbs::abi::*;

const MW_BIND: i32 = 1 << 4;

#[test]
fn a_region_is_registered_anew_or_stays_as_it_was() {
    let _turn = turn();
    // SAFETY: C functions, used as their manual pages say; so in all tests here.
    unsafe {
        let p = Pair::new();
        let half = p.memory.as_ptr().cast_mut().add(4096).cast();
        let keys = ((*p.mr).lkey, (*p.mr).rkey);
        let wrong: [(i32, *mut _, usize, i32); 6] = [
            (8, null_mut(), 0, 0),
            (1, null_mut(), 64, 0),
            (1, half, 0, 0),
            (4, null_mut(), 0, 2),
            (2, null_mut(), 0, 0),
            (1, half, 64, 1),
        ];
        for (flags, addr, length, access) in wrong {
            assert_eq!(
                (ibv_rereg_mr(p.mr, flags, null_mut(), addr, length, access), errno()),
                (-1, libc::EINVAL),
                "{flags}"
            );
        }
        p.write(1, 8, 100, keys.1);
        assert_eq!(p.poll().status, 0, "as it was");
        let other = ibv_alloc_pd(p.context);
        assert_eq!(ibv_rereg_mr(p.mr, 1 | 2 | 4, other, half, 4096, 1), 0);
        assert_eq!(((*p.mr).lkey, (*p.mr).rkey), keys);
        assert_eq!(((*p.mr).pd, (*p.mr).addr, (*p.mr).length), (other, half, 4096));
        assert_eq!(ibv_dealloc_pd(other), libc::EBUSY);
        assert_eq!(ibv_rereg_mr(p.mr, 2, p.pd, null_mut(), 0, 0), 0);
        assert_eq!(ibv_dealloc_pd(other), 0);
        p.close();
    }
}

#[test]
fn the_null_region_swallows_a_receive_and_sends_zeros() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let mut p = Pair::new();
        p.memory[..3000].fill(7);
        let null = (*extended(p.context)).alloc_null_mr.unwrap()(p.pd);
        assert!(!null.is_null() && (*null).rkey == 0);
        // Zeros, then data, then zeros; more than is copied for other reasons.
        let mut sges = [ibv_sge { addr: 5, length: 900, lkey: (*null).lkey }, p.sge(0, 1000)];
        p.post_recv(1, 4096, 4096);
        assert_eq!(p.post_send(&mut send_wr(2, &mut sges)).0, 0);
        assert_eq!((p.poll().status, p.poll().status), (0, 0));
        assert!(
            p.memory[4096..4996].iter().all(|b| *b == 0)
                && p.memory[4996..5996].iter().all(|b| *b == 7)
        );
        let mut sge = ibv_sge { addr: 0, length: 1000, lkey: (*null).lkey };
        let mut wr = ibv_recv_wr { wr_id: 3, next: null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = null_mut();
        assert_eq!((*p.context).ops.post_recv.unwrap()(p.qps[1], &mut wr, &mut bad), 0);
        assert_eq!(p.post_send(&mut send_wr(4, &mut [p.sge(0, 1000)])).0, 0);
        let (a, b) = (p.poll(), p.poll());
        assert_eq!((a.status, b.status, a.byte_len.max(b.byte_len)), (0, 0, 1000));
        assert_eq!(ibv_dereg_mr(null), 0);
        p.close();
    }
}

#[test]
fn windows_are_bound_used_and_taken_away() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let mut p = Pair::new();
        p.memory[..64].fill(9);
        let mr = ibv_reg_mr(p.pd, p.memory.as_ptr().cast_mut().cast(), 8192, 1 | MW_BIND);
        let ops = (*p.context).ops;
        assert!(ops.alloc_mw.unwrap()(p.pd, 3).is_null());
        let one = ops.alloc_mw.unwrap()(p.pd, 1);
        let first = (*one).rkey;
        let addr = p.memory.as_ptr() as u64 + 4096;
        let mut bind = ibv_mw_bind {
            wr_id: 1,
            send_flags: 2,
            bind_info: ibv_mw_bind_info { mr, addr, length: 64, mw_access_flags: 1 << 1 },
        };
        assert_eq!(ops.bind_mw.unwrap()(p.qps[1], one, &mut bind), 0);
        assert_eq!((p.poll().status, (*one).rkey), (0, first & !0xff | (first + 1) & 0xff));
        assert_eq!(ibv_dereg_mr(mr), libc::EBUSY);
        assert_eq!((ibv_rereg_mr(mr, 4, null_mut(), null_mut(), 0, 1), errno()), (-1, libc::EBUSY));
        p.write(2, 64, 4096, (*one).rkey);
        assert_eq!((p.poll().status, p.memory[4159], p.memory[4160]), (0, 9, 0));

        let two = ops.alloc_mw.unwrap()(p.pd, 2);
        assert_eq!(ops.bind_mw.unwrap()(p.qps[1], two, &mut bind), libc::EINVAL);
        let rkey = p.bind(two, mr, 5000, 32);
        p.write(3, 32, 5000, rkey);
        assert_eq!((p.poll().status, p.memory[5031], p.memory[5032]), (0, 9, 0));
        // SEND with invalidate takes it away, and says so.
        p.post_recv(4, 6000, 64);
        let mut sges = [p.sge(0, 8)];
        let mut wr = send_wr(5, &mut sges);
        (wr.opcode, wr.imm_data) = (9, rkey);
        assert_eq!(p.post_send(&mut wr).0, 0);
        let mut got = [p.poll(), p.poll()];
        got.sort_by_key(|wc| wc.wr_id);
        assert_eq!(
            (got[0].wr_id, got[0].status, got[0].wc_flags, got[0].imm_data),
            (4, 0, 1 << 3, rkey)
        );
        p.write(6, 8, 5000, rkey);
        assert_eq!(p.poll().status, 10, "IBV_WC_REM_ACCESS_ERR");

        assert_eq!((ops.dealloc_mw.unwrap()(one), ops.dealloc_mw.unwrap()(two)), (0, 0));
        assert_eq!(ibv_dereg_mr(mr), 0);
        // The event of the refused access.
        let mut event: ibv_async_event = zeroed();
        assert_eq!(ibv_get_async_event(p.context, &mut event), 0);
        ibv_ack_async_event(&mut event);
        p.close();
    }
}

#[test]
fn a_drained_send_queue_is_told_to_who_asks() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let p = Pair::new();
        let mut a: ibv_qp_attr = zeroed();
        let mut init: ibv_qp_init_attr = zeroed();
        libc::fcntl((*p.context).async_fd, libc::F_SETFL, libc::O_NONBLOCK);
        let mut event: ibv_async_event = zeroed();
        a.qp_state = 4;
        assert_eq!(ibv_modify_qp(p.qps[0], &mut a, IBV_QP_STATE), 0);
        assert_eq!(ibv_query_qp(p.qps[0], &mut a, IBV_QP_STATE, &mut init), 0);
        assert_eq!((a.qp_state, a.sq_draining, a.en_sqd_async_notify), (4, 0, 0));
        a.qp_state = 3;
        assert_eq!(ibv_modify_qp(p.qps[0], &mut a, IBV_QP_STATE), 0);
        (a.qp_state, a.en_sqd_async_notify) = (4, 1);
        assert_eq!(ibv_modify_qp(p.qps[0], &mut a, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
        let mut ready =
            libc::pollfd { fd: (*p.context).async_fd, events: libc::POLLIN, revents: 0 };
        assert_eq!(libc::poll(&mut ready, 1, 10_000), 1, "one event");
        assert_eq!(ibv_get_async_event(p.context, &mut event), 0);
        assert_eq!((event.event_type, event.element.qp), (5, p.qps[0]), "IBV_EVENT_SQ_DRAINED");
        ibv_ack_async_event(&mut event);
        assert_eq!(
            ibv_get_async_event(p.context, &mut event),
            -1,
            "not for the first time, when nobody asked"
        );
        // What is posted now waits.
        p.write(1, 8, 4096, (*p.mr).rkey);
        a.qp_state = 3;
        assert_eq!(ibv_modify_qp(p.qps[0], &mut a, IBV_QP_STATE), 0);
        assert_eq!(p.poll().status, 0);
        p.close();
    }
}
