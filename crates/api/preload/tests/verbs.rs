//! The C functions, called as a C program calls them, on NICs of an emulated network of the test's
//! own. Both ends are in this process: what is tested is the surface (objects, masks, events,
//! errors); the transport has tests of its own.

mod common;

use common::*;
use std::mem::{size_of, zeroed};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::time::{Duration, Instant};
use unbroken_fabric::{Fabric, Fault, Runtime};
use unbroken_types::LinkLayer;
use unbroken_verbs::abi::*;

#[test]
fn what_a_device_says_of_itself() {
    let _turn = turn();
    // SAFETY: C functions, used as their manual pages say; so in all tests here.
    unsafe {
        let context = open();
        let mut device: ibv_device_attr = zeroed();
        assert_eq!(ibv_query_device(context, &mut device), 0);
        assert!(
            device.max_qp > 0
                && device.max_cqe > 0
                && device.max_sge > 0
                && device.phys_port_cnt == 1
        );

        // Through the operation with a size, older and newer than ours; and through the function,
        // which writes 48 bytes.
        let query_port = (*extended(context)).query_port.unwrap();
        let mut room = [0xaau8; 64];
        assert_eq!(query_port(context, 1, room.as_mut_ptr().cast(), 56), 0);
        assert_eq!(room[55..57], [0, 0xaa]);
        let port: ibv_port_attr = room.as_ptr().cast::<ibv_port_attr>().read_unaligned();
        assert_eq!(
            (port.state, port.link_layer, port.pkey_tbl_len),
            (4, LinkLayer::Ethernet as u8, 1)
        );
        room = [0xaa; 64];
        assert_eq!(ibv_query_port(context, 1, room.as_mut_ptr().cast()), 0);
        assert_eq!((room[46], room[48]), (LinkLayer::Ethernet as u8, 0xaa));
        assert_eq!(query_port(context, 2, room.as_mut_ptr().cast(), 52), libc::EINVAL);

        let mut gid: ibv_gid = zeroed();
        assert_eq!(ibv_query_gid(context, 1, 0, &mut gid), 0);
        assert_eq!(gid.raw[..13], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127]);
        assert_eq!(
            (ibv_query_gid(context, 1, port.gid_tbl_len, &mut gid), errno()),
            (-1, libc::EINVAL)
        );
        assert_eq!((ibv_query_gid(context, 1, -1, &mut gid), errno()), (-1, libc::EINVAL));
        let mut entries: [ibv_gid_entry; 4] = zeroed();
        let n =
            _ibv_query_gid_table(context, entries.as_mut_ptr(), 4, 0, size_of::<ibv_gid_entry>());
        assert_eq!(n, 2, "the other {} entries of the table are empty", port.gid_tbl_len - 2);
        assert_eq!(ibv_query_gid(context, 1, 1, &mut gid), 0);
        assert_eq!(gid.raw[..2], [0xfe, 0x80]);
        assert_eq!(ibv_query_gid(context, 1, 2, &mut gid), 0);
        assert_eq!(gid.raw, [0; 16]);
        assert_eq!((entries[0].gid_type, entries[0].port_num), (IBV_GID_TYPE_ROCE_V2, 1));
        let mut pkey = 0;
        assert_eq!((ibv_query_pkey(context, 1, 0, &mut pkey), pkey), (0, 0xffff));
        assert_eq!(ibv_query_pkey(context, 1, 1, &mut pkey), -1);
        assert_eq!(ibv_close_device(context), 0);
    }
}

#[test]
fn a_parent_domain_and_device_memory_hold_what_they_stand_on() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let context = open();
        let v = extended(context);
        let pd = ibv_alloc_pd(context);
        let td = (*v).alloc_td.unwrap()(context, &mut ibv_td_init_attr { comp_mask: 0 });
        assert!(!td.is_null());
        let mut attr: ibv_parent_domain_init_attr = zeroed();
        (attr.pd, attr.td) = (pd, td);
        let parent = (*v).alloc_parent_domain.unwrap()(context, &mut attr);
        assert_eq!((*parent).handle, (*pd).handle);
        assert_eq!(ibv_dealloc_pd(pd), libc::EBUSY);

        let mut attr = ibv_alloc_dm_attr { length: 4096, log_align_req: 0, comp_mask: 0 };
        let dm = (*v).alloc_dm.unwrap()(context, &mut attr);
        assert!(!dm.is_null());
        let mr = (*v).reg_dm_mr.unwrap()(parent, dm, 0, 4096, 1 | 1 << 5);
        assert!(!mr.is_null() && (*mr).addr.is_null());
        assert!((*v).reg_dm_mr.unwrap()(parent, dm, 4, 4096, 1 | 1 << 5).is_null());
        let (from, mut to) = ([7u8; 8], [0u8; 8]);
        assert_eq!((*dm).memcpy_to_dm.unwrap()(dm, 8, from.as_ptr().cast(), 8), 0);
        assert_eq!((*dm).memcpy_from_dm.unwrap()(to.as_mut_ptr().cast(), dm, 8, 8), 0);
        assert_eq!(to, from);
        assert_eq!((*v).free_dm.unwrap()(dm), libc::EBUSY);

        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!((*v).free_dm.unwrap()(dm), 0);
        assert_eq!(ibv_dealloc_pd(parent), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!((*v).dealloc_td.unwrap()(td), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

#[test]
fn null_and_wrong_arguments_are_refused() {
    let _turn = turn();
    // SAFETY: see above; NULL is answered, not followed.
    unsafe {
        assert!(ibv_alloc_pd(null_mut()).is_null());
        assert_eq!(errno(), libc::EINVAL);
        assert_eq!(ibv_destroy_qp(null_mut()), libc::EINVAL);
        let context = open();
        assert!(ibv_create_cq(context, -1, null_mut(), null_mut(), 0).is_null());
        assert!(ibv_create_cq(context, 0, null_mut(), null_mut(), 0).is_null());
        assert!(ibv_create_cq(context, 16, null_mut(), null_mut(), (*context).num_comp_vectors)
            .is_null());
        let pd = ibv_alloc_pd(context);
        let mut byte = 0u8;
        // ON_DEMAND does not exist here; REMOTE_WRITE without LOCAL_WRITE never does.
        assert!(ibv_reg_mr(pd, (&raw mut byte).cast(), 1, 1 << 6).is_null());
        assert!(ibv_reg_mr(pd, (&raw mut byte).cast(), 1, 1 << 1).is_null());
        let cq = ibv_create_cq(context, 16, null_mut(), null_mut(), 0);
        let mut init = init_attr(cq);
        init.qp_type = 10;
        assert!(ibv_create_qp(pd, &mut init).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        init = init_attr(null_mut());
        assert!(ibv_create_qp(pd, &mut init).is_null());
        init = init_attr(cq);
        init.cap.max_send_wr = u32::MAX;
        assert!(ibv_create_qp(pd, &mut init).is_null());
        assert_eq!(ibv_destroy_cq(cq), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

#[test]
fn messages_arrive_and_queries_tell_the_truth() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let mut p = Pair::new();
        p.memory[..5].copy_from_slice(b"hello");
        p.post_recv(1, 4096, 64);
        let mut sges = [p.sge(0, 2), p.sge(2, 3)];
        assert_eq!(p.post_send(&mut send_wr(2, &mut sges)).0, 0);
        let mut got = [p.poll(), p.poll()];
        got.sort_by_key(|wc| wc.wr_id);
        assert_eq!((got[0].wr_id, got[0].opcode, got[0].byte_len, got[0].status), (1, 128, 5, 0));
        assert_eq!((got[1].wr_id, got[1].opcode, got[1].qp_num), (2, 0, (*p.qps[0]).qp_num));
        assert_eq!(&p.memory[4096..4101], b"hello");

        // Inline: no key, and the source may change at once.
        p.post_recv(3, 4096, 64);
        let mut text = *b"inline data";
        let mut sges = [ibv_sge { addr: text.as_ptr() as u64, length: text.len() as u32, lkey: 0 }];
        let mut wr = send_wr(4, &mut sges);
        (wr.opcode, wr.send_flags, wr.imm_data) = (3, 2 | 8, 0x1234);
        assert_eq!(p.post_send(&mut wr).0, 0);
        text.fill(0);
        let mut got = [p.poll(), p.poll()];
        got.sort_by_key(|wc| wc.wr_id);
        assert_eq!((got[0].imm_data, got[0].wc_flags), (0x1234, 2));
        assert_eq!(&p.memory[4096..4107], b"inline data");

        let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = zeroed();
        assert_eq!(ibv_query_qp(p.qps[0], &mut attr, !0, &mut init), 0);
        assert_eq!((attr.qp_state, attr.path_mtu, attr.dest_qp_num), (3, 3, (*p.qps[1]).qp_num));
        assert_eq!(
            (attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer, attr.qp_access_flags),
            (7, 6, 12, RW as u32)
        );
        assert_eq!((attr.sq_psn, attr.ah_attr.is_global), ((*p.qps[0]).qp_num + 100, 1));
        assert_eq!((init.send_cq, init.qp_type), (p.cq, 2));
        assert!(init.cap.max_send_wr >= 8 && init.cap.max_inline_data >= 64);
        p.close();
    }
}

#[test]
fn the_first_wrong_request_of_a_list_is_named() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let p = Pair::new();
        let mut sges = [p.sge(0, 8)];
        p.post_recv(1, 4096, 64);
        let mut third = send_wr(12, &mut sges);
        let mut second = send_wr(11, &mut sges);
        second.opcode = 99;
        second.next = &mut third;
        let mut first = send_wr(10, &mut sges);
        first.next = &mut second;
        let second_at: *mut ibv_send_wr = &mut second;
        assert_eq!(p.post_send(&mut first), (libc::EOPNOTSUPP, second_at));
        // The first was posted, the third was not.
        let mut ids = [p.poll().wr_id, p.poll().wr_id];
        ids.sort_unstable();
        assert_eq!(ids, [1, 10]);

        let mut wr = send_wr(13, &mut sges);
        wr.num_sge = -1;
        assert_eq!(p.post_send(&mut wr).0, libc::EINVAL);
        wr.num_sge = 3;
        assert_eq!(p.post_send(&mut wr).0, libc::EINVAL, "more entries than the QP has");
        wr.num_sge = 1;
        wr.send_flags = 1 << 20;
        assert_eq!(p.post_send(&mut wr).0, libc::EINVAL);
        let mut long = [p.sge(0, 65)];
        let mut wr = send_wr(14, &mut long);
        wr.send_flags = 8;
        assert_eq!(p.post_send(&mut wr).0, libc::EINVAL, "more inline data than the QP takes");
        // A list in a circle ends when the queue is full.
        let mut circle = send_wr(15, &mut sges);
        circle.next = &mut circle;
        assert_eq!(p.post_send(&mut circle).0, libc::ENOMEM);
        p.close();
    }
}

#[test]
fn a_queue_is_destroyed_when_its_events_are_acknowledged() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let p = Pair::new();
        assert_eq!(ibv_destroy_comp_channel(p.channel), libc::EBUSY);
        assert_eq!(ibv_destroy_cq(p.cq), libc::EBUSY);
        assert_eq!((*p.context).ops.req_notify_cq.unwrap()(p.cq, 0), 0);
        p.post_recv(1, 4096, 64);
        let mut sges = [p.sge(0, 8)];
        assert_eq!(p.post_send(&mut send_wr(2, &mut sges)).0, 0);
        let (mut cq, mut cookie) = (null_mut(), null_mut());
        assert_eq!(ibv_get_cq_event(p.channel, &mut cq, &mut cookie), 0);
        assert_eq!((cq, cookie as usize), (p.cq, 77));
        p.poll();
        p.poll();
        for qp in p.qps {
            assert_eq!(ibv_destroy_qp(qp), 0);
        }
        let destroyed = std::sync::atomic::AtomicBool::new(false);
        let at = p.cq as usize;
        std::thread::scope(|s| {
            let flag = &destroyed;
            let waiter = s.spawn(move || {
                assert_eq!(ibv_destroy_cq(with_exposed_provenance_mut(at)), 0);
                flag.store(true, std::sync::atomic::Ordering::SeqCst);
            });
            assert!(
                !destroyed.load(std::sync::atomic::Ordering::SeqCst),
                "destroyed with an event unacknowledged"
            );
            ibv_ack_cq_events(p.cq, 1);
            waiter.join().unwrap();
        });
        // No event waits on a non-blocking channel.
        libc::fcntl((*p.channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
        assert_eq!(
            (ibv_get_cq_event(p.channel, &mut cq, &mut cookie), errno()),
            (-1, libc::EAGAIN)
        );
        let mut event: ibv_async_event = zeroed();
        libc::fcntl((*p.context).async_fd, libc::F_SETFL, libc::O_NONBLOCK);
        assert_eq!((ibv_get_async_event(p.context, &mut event), errno()), (-1, libc::EAGAIN));
        assert_eq!(ibv_destroy_comp_channel(p.channel), 0);
        assert_eq!(ibv_dereg_mr(p.mr), 0);
        assert_eq!(ibv_dealloc_pd(p.pd), 0);
        assert_eq!(ibv_close_device(p.context), 0);
    }
}

#[test]
fn a_qp_is_destroyed_when_its_asynchronous_events_are_acknowledged() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let p = Pair::new();
        let mut sges = [p.sge(0, 8)];
        let mut wr = send_wr(1, &mut sges);
        wr.opcode = 0;
        wr.wr.rdma =
            ibv_wr_rdma { remote_addr: p.memory.as_ptr() as u64, rkey: (*p.mr).rkey ^ 0x5555_0000 };
        assert_eq!(p.post_send(&mut wr).0, 0);
        assert_eq!((p.poll().wr_id, (*p.qps[1]).events_completed), (1, 0));
        let mut event: ibv_async_event = zeroed();
        assert_eq!(ibv_get_async_event(p.context, &mut event), 0);
        assert_eq!((event.event_type, event.element.qp), (3, p.qps[1]), "IBV_EVENT_QP_ACCESS_ERR");
        let at = p.qps[1] as usize;
        std::thread::scope(|s| {
            let destroyer =
                s.spawn(move || assert_eq!(ibv_destroy_qp(with_exposed_provenance_mut(at)), 0));
            assert!(!destroyer.is_finished(), "destroyed with an event unacknowledged");
            ibv_ack_async_event(&mut event);
            destroyer.join().unwrap();
        });
        assert_eq!(ibv_destroy_qp(p.qps[0]), 0);
        assert_eq!(ibv_destroy_cq(p.cq), 0);
        assert_eq!(ibv_destroy_comp_channel(p.channel), 0);
        assert_eq!(ibv_dereg_mr(p.mr), 0);
        assert_eq!(ibv_dealloc_pd(p.pd), 0);
        assert_eq!(ibv_close_device(p.context), 0);
    }
}

#[test]
fn a_port_that_goes_and_comes_back_is_told() {
    let _turn = turn();
    let fabric = Fabric::open(&Runtime::at(folder()).unwrap()).unwrap();
    // SAFETY: see above.
    unsafe {
        let context = open();
        fabric.set(&"nic a/0 down".parse::<Fault>().unwrap(), None).unwrap();
        let mut event: ibv_async_event = zeroed();
        let mut ready = libc::pollfd { fd: (*context).async_fd, events: libc::POLLIN, revents: 0 };
        assert_eq!(libc::poll(&mut ready, 1, 10_000), 1, "the descriptor becomes readable");
        assert_eq!(ibv_get_async_event(context, &mut event), 0);
        assert_eq!(
            (event.event_type, event.element.port_num),
            (10, 1),
            "IBV_EVENT_PORT_ERR of port 1"
        );
        ibv_ack_async_event(&mut event);
        let mut port: ibv_port_attr = zeroed();
        assert_eq!(ibv_query_port(context, 1, &mut port), 0);
        assert_eq!(port.state, 1, "IBV_PORT_DOWN");
        fabric.clear(None).unwrap();
        assert_eq!(ibv_get_async_event(context, &mut event), 0);
        assert_eq!(
            (event.event_type, event.element.port_num),
            (9, 1),
            "IBV_EVENT_PORT_ACTIVE of port 1"
        );
        ibv_ack_async_event(&mut event);
        assert_eq!(ibv_close_device(context), 0);
    }
}

#[test]
fn extended_queues_build_requests_and_read_completions() {
    let _turn = turn();
    // SAFETY: see above.
    unsafe {
        let context = open();
        let v = extended(context);
        let pd = ibv_alloc_pd(context);
        let mut memory = Box::new([0u8; 4096]);
        let mr = ibv_reg_mr(pd, memory.as_mut_ptr().cast(), memory.len(), RW);
        let mut cq_attr: ibv_cq_init_attr_ex = zeroed();
        (cq_attr.cqe, cq_attr.wc_flags) =
            (16, IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
        let cq = (*v).create_cq_ex.unwrap()(context, &mut cq_attr);
        assert!(!cq.is_null());
        let plain = init_attr(cq.cast());
        let mut qp_attr: ibv_qp_init_attr_ex = zeroed();
        (qp_attr.send_cq, qp_attr.recv_cq, qp_attr.cap) = (plain.send_cq, plain.recv_cq, plain.cap);
        (qp_attr.qp_type, qp_attr.pd) = (2, pd);
        qp_attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        qp_attr.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE;
        let qps = [(); 2].map(|()| (*v).create_qp_ex.unwrap()(context, &mut qp_attr));
        connect(context, qps);
        qp_attr.send_ops_flags = 1 << 10;
        assert!((*v).create_qp_ex.unwrap()(context, &mut qp_attr).is_null());

        let ex = ibv_qp_to_qp_ex(qps[0]);
        assert!(!ex.is_null());
        let poll = || {
            let until = Instant::now() + Duration::from_secs(10);
            while (*cq).start_poll.unwrap()(cq, null_mut()) == libc::ENOENT {
                assert!(Instant::now() < until, "no completion");
            }
            ((*cq).wr_id, (*cq).status, (*cq).read_opcode.unwrap()(cq))
        };
        (*ex).wr_start.unwrap()(ex);
        ((*ex).wr_id, (*ex).wr_flags) = (5, 2);
        (*ex).wr_rdma_write.unwrap()(ex, (*mr).rkey, memory.as_ptr() as u64 + 100);
        let text = *b"built";
        (*ex).wr_set_inline_data.unwrap()(ex, text.as_ptr().cast_mut().cast(), 5);
        assert_eq!((*ex).wr_complete.unwrap()(ex), 0);
        assert_eq!(poll(), (5, 0, 1));
        assert!((*cq).read_completion_ts.unwrap()(cq) > 0);
        (*cq).end_poll.unwrap()(cq);
        assert_eq!(&memory[100..105], b"built");

        // What was aborted, and what was built wrongly, is not posted.
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_send.unwrap()(ex);
        (*ex).wr_abort.unwrap()(ex);
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_set_sge.unwrap()(ex, (*mr).lkey, memory.as_ptr() as u64, 1);
        assert_eq!((*ex).wr_complete.unwrap()(ex), libc::EINVAL);
        assert_eq!((*cq).start_poll.unwrap()(cq, null_mut()), libc::ENOENT);
        for qp in qps {
            assert_eq!(ibv_destroy_qp(qp), 0);
        }
        assert_eq!(ibv_destroy_cq(cq.cast()), 0);
        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}
