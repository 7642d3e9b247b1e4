//! Shared receive queues as a C program sees them.

mod common;

use common::*;
use std::mem::zeroed;
use std::ptr::null_mut;
use unbroken_verbs::abi::*;

#[test]
fn a_shared_receive_queue_feeds_its_qps_and_tells_of_its_limit() {
    let _turn = turn();
    // SAFETY: C functions, used as their manual pages say.
    unsafe {
        let p = Pair::new();
        let mut attr: ibv_srq_init_attr = zeroed();
        attr.attr = ibv_srq_attr { max_wr: 4, max_sge: 1, srq_limit: 3 };
        let srq = ibv_create_srq(p.pd, &mut attr);
        let mut init = init_attr(p.cq);
        init.srq = srq;
        let qps = [(); 2].map(|()| ibv_create_qp(p.pd, &mut init));
        assert!(!srq.is_null() && qps.iter().all(|q| !q.is_null() && (**q).srq == srq));
        assert_eq!((init.cap.max_recv_wr, init.cap.max_recv_sge), (0, 0));
        connect(p.context, qps);
        // What the queue holds, and what it refuses.
        let mut now: ibv_srq_attr = zeroed();
        assert_eq!(
            (ibv_query_srq(srq, &mut now), now.max_wr, now.max_sge, now.srq_limit),
            (0, 4, 1, 0)
        );
        let mut sge = p.sge(4096, 64);
        let mut wrs: [ibv_recv_wr; 5] = zeroed();
        for i in (0..5).rev() {
            let next = wrs.get_mut(i + 1).map_or(null_mut(), |next| &raw mut *next);
            wrs[i] = ibv_recv_wr { wr_id: i as u64, next, sg_list: &mut sge, num_sge: 1 };
        }
        let (post_recv, post_srq_recv) =
            ((*p.context).ops.post_recv.unwrap(), (*p.context).ops.post_srq_recv.unwrap());
        let mut bad = null_mut();
        assert_eq!(
            (post_srq_recv(srq, &mut wrs[0], &mut bad), bad),
            (libc::ENOMEM, &raw mut wrs[4])
        );
        assert_eq!(
            (post_recv(qps[1], &mut wrs[4], &mut bad), bad),
            (libc::EINVAL, &raw mut wrs[4])
        );
        let mut change = ibv_srq_attr { max_wr: 2, max_sge: 0, srq_limit: 4 };
        assert_eq!(ibv_modify_srq(srq, &mut change, IBV_SRQ_MAX_WR), libc::EINVAL);
        assert_eq!(ibv_modify_srq(srq, &mut change, 4), libc::EINVAL);
        assert_eq!(ibv_modify_srq(srq, &mut change, IBV_SRQ_LIMIT), 0);
        assert_eq!((ibv_destroy_srq(srq), ibv_dealloc_pd(p.pd)), (libc::EBUSY, libc::EBUSY));

        let (mut sge, mut bad) = ([p.sge(0, 5)], null_mut());
        assert_eq!(
            (*p.context).ops.post_send.unwrap()(qps[0], &mut send_wr(9, &mut sge), &mut bad),
            0
        );
        let mut ids = [p.poll(), p.poll()].map(|wc| (wc.wr_id, wc.status));
        ids.sort_unstable();
        assert_eq!(ids, [(0, 0), (9, 0)]);
        // Three are left, the limit is four; then a QP ends.
        let mut event: ibv_async_event = zeroed();
        assert_eq!(ibv_get_async_event(p.context, &mut event), 0);
        assert_eq!((event.event_type, event.element.srq), (IBV_EVENT_SRQ_LIMIT_REACHED, srq));
        ibv_ack_async_event(&mut event);
        let mut a: ibv_qp_attr = zeroed();
        a.qp_state = 6;
        assert_eq!(ibv_modify_qp(qps[1], &mut a, IBV_QP_STATE), 0);
        assert_eq!(ibv_get_async_event(p.context, &mut event), 0);
        assert_eq!((event.event_type, event.element.qp), (16, qps[1]));
        ibv_ack_async_event(&mut event);
        assert!(qps.iter().all(|q| ibv_destroy_qp(*q) == 0));
        assert_eq!(ibv_destroy_srq(srq), 0);
        p.close();
    }
}

#[test]
fn only_the_basic_kind_exists_and_sizes_are_checked() {
    let _turn = turn();
    // SAFETY: C functions, used as their manual pages say.
    unsafe {
        let context = open();
        let pd = ibv_alloc_pd(context);
        let create = (*extended(context)).create_srq_ex.unwrap();
        let mut attr: ibv_srq_init_attr_ex = zeroed();
        (attr.pd, attr.comp_mask) = (pd, IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE);
        attr.attr = ibv_srq_attr { max_wr: 5, max_sge: 0, srq_limit: 0 };
        let srq = create(context, &mut attr);
        assert!(!srq.is_null());
        assert_eq!((attr.attr.max_wr, attr.attr.max_sge, (*srq).pd), (5, 1, pd));
        assert_eq!(ibv_destroy_srq(srq), 0);
        let mut device: ibv_device_attr = zeroed();
        assert_eq!(ibv_query_device(context, &mut device), 0);
        let (wr, sge) = (device.max_srq_wr as u32, device.max_srq_sge as u32);
        for (srq_type, comp_mask, max_wr, max_sge, errno_wanted) in [
            (1, attr.comp_mask, 5, 1, libc::EOPNOTSUPP),
            (2, attr.comp_mask, 5, 1, libc::EOPNOTSUPP),
            (0, attr.comp_mask | 1 << 3, 5, 1, libc::EOPNOTSUPP),
            (0, IBV_SRQ_INIT_ATTR_TYPE, 5, 1, libc::EINVAL),
            (0, attr.comp_mask, 0, 1, libc::EINVAL),
            (0, attr.comp_mask, wr + 1, 1, libc::EINVAL),
            (0, attr.comp_mask, 5, sge + 1, libc::EINVAL),
        ] {
            let mut attr = ibv_srq_init_attr_ex { srq_type, comp_mask, ..attr };
            attr.attr = ibv_srq_attr { max_wr, max_sge, srq_limit: 0 };
            assert!(create(context, &mut attr).is_null());
            assert_eq!(
                errno(),
                errno_wanted,
                "type {srq_type}, mask {comp_mask:#x}, {max_wr}, {max_sge}"
            );
        }
        assert!((*extended(context)).get_srq_num.is_none(), "only an XRC SRQ has a number");
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}
