//! The C functions, called as a C program calls them, on NICs of an emulated network of the test's own. Both ends are in this
//! process: what is tested is the surface (objects, masks, events, errors); the transport has tests of its own.

// The helpers are a C program in Rust's spelling: a block around each line would say nothing.
#![allow(unsafe_op_in_unsafe_fn)]

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::mem::{offset_of, size_of, zeroed};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use unbroken_fabric::{Fabric, Fault, Runtime};
use unbroken_preload as _;
use unbroken_verbs::abi::*;

extern "C" {
    fn ibv_get_device_list(n: *mut c_int) -> *mut *mut ibv_device;
    fn ibv_free_device_list(list: *mut *mut ibv_device);
    fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char;
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    fn ibv_close_device(context: *mut ibv_context) -> c_int;
    fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int;
    fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    fn _ibv_query_gid_table(c: *mut ibv_context, e: *mut ibv_gid_entry, max: usize, flags: u32, size: usize) -> isize;
    fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    fn ibv_create_cq(c: *mut ibv_context, n: c_int, x: *mut c_void, ch: *mut ibv_comp_channel, v: c_int)
        -> *mut ibv_cq;
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    fn ibv_get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, x: *mut *mut c_void) -> c_int;
    fn ibv_ack_cq_events(cq: *mut ibv_cq, n: c_uint);
    fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    fn ibv_query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int;
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
    fn ibv_ack_async_event(event: *mut ibv_async_event);
}

const RW: c_int = 1 | 1 << 1 | 1 << 2;

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// One test at a time, in a runtime folder of this process's own.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    folder();
    turn
}

fn folder() -> &'static std::path::Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let make = || {
        let folder = tempfile::tempdir().unwrap();
        std::env::set_var("UNBROKEN_RUNTIME", folder.path());
        std::env::set_var("UNBROKEN_HOST", "a");
        // Events that a switch absorbs are shown, too.
        std::env::set_var("UNBROKEN_SHOW_EVENTS", "1");
        folder
    };
    FOLDER.get_or_init(make).path()
}

unsafe fn open() -> *mut ibv_context {
    let mut n = 0;
    let list = ibv_get_device_list(&mut n);
    assert!(!list.is_null() && n >= 2, "{n} devices");
    assert!((*list.add(n as usize)).is_null());
    assert_eq!(CStr::from_ptr(ibv_get_device_name(*list)), c"unb0");
    let context = ibv_open_device(*list);
    ibv_free_device_list(list);
    assert!(!context.is_null());
    context
}

/// The extended verbs around a context, found as the header's inline functions do.
unsafe fn extended(context: *mut ibv_context) -> *mut verbs_context {
    assert_eq!((*context).abi_compat as usize, usize::MAX);
    let v = context.cast::<u8>().sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
    assert_eq!((*v).sz, size_of::<verbs_context>());
    v
}

/// Two connected QPs of one device, with one CQ, and memory for both.
struct Pair {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    memory: Box<[u8; 8192]>,
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
    qps: [*mut ibv_qp; 2],
}

unsafe fn init_attr(cq: *mut ibv_cq) -> ibv_qp_init_attr {
    let mut init: ibv_qp_init_attr = zeroed();
    (init.send_cq, init.recv_cq) = (cq, cq);
    init.cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 2, max_recv_sge: 1, max_inline_data: 64 };
    init.qp_type = 2;
    init
}

impl Pair {
    unsafe fn new() -> Pair {
        let context = open();
        let pd = ibv_alloc_pd(context);
        let mut memory = Box::new([0u8; 8192]);
        let mr = ibv_reg_mr(pd, memory.as_mut_ptr().cast(), memory.len(), RW);
        let channel = ibv_create_comp_channel(context);
        let cq = ibv_create_cq(context, 32, 77 as *mut c_void, channel, 0);
        assert!(!pd.is_null() && !mr.is_null() && !channel.is_null() && !cq.is_null());
        let mut init = init_attr(cq);
        let qps = [(); 2].map(|()| ibv_create_qp(pd, &mut init));
        assert!(qps.iter().all(|q| !q.is_null()));
        connect(context, qps);
        Pair { context, pd, mr, memory, channel, cq, qps }
    }

    unsafe fn sge(&self, offset: usize, length: u32) -> ibv_sge {
        ibv_sge { addr: self.memory.as_ptr() as u64 + offset as u64, length, lkey: (*self.mr).lkey }
    }

    unsafe fn post_recv(&self, wr_id: u64, offset: usize, length: u32) {
        let mut sge = self.sge(offset, length);
        let mut wr = ibv_recv_wr { wr_id, next: null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = null_mut();
        assert_eq!((*self.context).ops.post_recv.unwrap()(self.qps[1], &mut wr, &mut bad), 0);
    }

    unsafe fn post_send(&self, wr: &mut ibv_send_wr) -> (c_int, *mut ibv_send_wr) {
        let mut bad = null_mut();
        let code = (*self.context).ops.post_send.unwrap()(self.qps[0], wr, &mut bad);
        (code, bad)
    }

    /// The next completion, within ten seconds.
    unsafe fn poll(&self) -> ibv_wc {
        let until = Instant::now() + Duration::from_secs(10);
        let mut wc = ibv_wc::default();
        loop {
            match (*self.context).ops.poll_cq.unwrap()(self.cq, 1, &mut wc) {
                0 => assert!(Instant::now() < until, "no completion"),
                n => {
                    assert_eq!(n, 1);
                    return wc;
                }
            }
        }
    }

    unsafe fn close(self) {
        for qp in self.qps {
            assert_eq!(ibv_destroy_qp(qp), 0);
        }
        assert_eq!(ibv_destroy_cq(self.cq), 0);
        assert_eq!(ibv_destroy_comp_channel(self.channel), 0);
        assert_eq!(ibv_dereg_mr(self.mr), 0);
        assert_eq!(ibv_dealloc_pd(self.pd), 0);
        assert_eq!(ibv_close_device(self.context), 0);
    }
}

unsafe fn connect(context: *mut ibv_context, qps: [*mut ibv_qp; 2]) {
    let mut gid: ibv_gid = zeroed();
    assert_eq!(ibv_query_gid(context, 1, 0, &mut gid), 0);
    for (qp, peer) in [(qps[0], qps[1]), (qps[1], qps[0])] {
        let mut a: ibv_qp_attr = zeroed();
        (a.qp_state, a.port_num, a.qp_access_flags) = (1, 1, RW as u32);
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(ibv_modify_qp(qp, &mut a, mask), 0);
        (a.qp_state, a.path_mtu, a.dest_qp_num, a.rq_psn) = (2, 3, (*peer).qp_num, (*peer).qp_num + 100);
        (a.max_dest_rd_atomic, a.min_rnr_timer) = (1, 12);
        (a.ah_attr.is_global, a.ah_attr.port_num, a.ah_attr.grh.dgid) = (1, 1, gid);
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        assert_eq!(ibv_modify_qp(qp, &mut a, mask), 0);
        (a.qp_state, a.timeout, a.retry_cnt, a.rnr_retry) = (3, 14, 7, 6);
        (a.sq_psn, a.max_rd_atomic) = ((*qp).qp_num + 100, 1);
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        assert_eq!(ibv_modify_qp(qp, &mut a, mask), 0);
        assert_eq!((*qp).state, 3);
    }
}

unsafe fn send_wr(wr_id: u64, sges: &mut [ibv_sge]) -> ibv_send_wr {
    let mut wr: ibv_send_wr = zeroed();
    wr.wr_id = wr_id;
    wr.sg_list = sges.as_mut_ptr();
    wr.num_sge = sges.len() as c_int;
    wr.opcode = 2;
    wr.send_flags = 2;
    wr
}

#[test]
fn what_a_device_says_of_itself() {
    let _turn = turn();
    // SAFETY: C functions, used as their manual pages say; so in all tests here.
    unsafe {
        let context = open();
        let mut device: ibv_device_attr = zeroed();
        assert_eq!(ibv_query_device(context, &mut device), 0);
        assert!(device.max_qp > 0 && device.max_cqe > 0 && device.max_sge > 0 && device.phys_port_cnt == 1);

        // Through the operation with a size, older and newer than ours; and through the function, which writes 48 bytes.
        let query_port = (*extended(context)).query_port.unwrap();
        let mut room = [0xaau8; 64];
        assert_eq!(query_port(context, 1, room.as_mut_ptr().cast(), 56), 0);
        assert_eq!(room[55..57], [0, 0xaa]);
        let port: ibv_port_attr = room.as_ptr().cast::<ibv_port_attr>().read_unaligned();
        assert_eq!((port.state, port.link_layer, port.pkey_tbl_len), (4, IBV_LINK_LAYER_ETHERNET, 1));
        room = [0xaa; 64];
        assert_eq!(ibv_query_port(context, 1, room.as_mut_ptr().cast()), 0);
        assert_eq!((room[46], room[48]), (IBV_LINK_LAYER_ETHERNET, 0xaa));
        assert_eq!(query_port(context, 2, room.as_mut_ptr().cast(), 52), libc::EINVAL);

        let mut gid: ibv_gid = zeroed();
        assert_eq!(ibv_query_gid(context, 1, 0, &mut gid), 0);
        assert_eq!(gid.raw[..13], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127]);
        assert_eq!((ibv_query_gid(context, 1, port.gid_tbl_len, &mut gid), errno()), (-1, libc::EINVAL));
        assert_eq!((ibv_query_gid(context, 1, -1, &mut gid), errno()), (-1, libc::EINVAL));
        let mut entries: [ibv_gid_entry; 4] = zeroed();
        let n = _ibv_query_gid_table(context, entries.as_mut_ptr(), 4, 0, size_of::<ibv_gid_entry>());
        assert_eq!(n, 1, "the other {} entries of the table are empty", port.gid_tbl_len - 1);
        assert_eq!(ibv_query_gid(context, 1, 1, &mut gid), 0);
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
        assert!(ibv_create_cq(context, 16, null_mut(), null_mut(), 5).is_null());
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
        init = init_attr(cq);
        init.srq = with_exposed_provenance_mut(8);
        assert!(ibv_create_qp(pd, &mut init).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
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
        assert_eq!((attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer, attr.qp_access_flags), (7, 6, 12, RW as u32));
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
            assert!(!destroyed.load(std::sync::atomic::Ordering::SeqCst), "destroyed with an event unacknowledged");
            ibv_ack_cq_events(p.cq, 1);
            waiter.join().unwrap();
        });
        // No event waits on a non-blocking channel.
        libc::fcntl((*p.channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
        assert_eq!((ibv_get_cq_event(p.channel, &mut cq, &mut cookie), errno()), (-1, libc::EAGAIN));
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
        wr.wr.rdma = ibv_wr_rdma { remote_addr: p.memory.as_ptr() as u64, rkey: (*p.mr).rkey ^ 0x5555_0000 };
        assert_eq!(p.post_send(&mut wr).0, 0);
        assert_eq!((p.poll().wr_id, (*p.qps[1]).events_completed), (1, 0));
        let mut event: ibv_async_event = zeroed();
        assert_eq!(ibv_get_async_event(p.context, &mut event), 0);
        assert_eq!((event.event_type, event.element.qp), (3, p.qps[1]), "IBV_EVENT_QP_ACCESS_ERR");
        let at = p.qps[1] as usize;
        std::thread::scope(|s| {
            let destroyer = s.spawn(move || assert_eq!(ibv_destroy_qp(with_exposed_provenance_mut(at)), 0));
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
        assert_eq!((event.event_type, event.element.port_num), (10, 1), "IBV_EVENT_PORT_ERR of port 1");
        ibv_ack_async_event(&mut event);
        let mut port: ibv_port_attr = zeroed();
        assert_eq!(ibv_query_port(context, 1, &mut port), 0);
        assert_eq!(port.state, 1, "IBV_PORT_DOWN");
        fabric.clear(None).unwrap();
        assert_eq!(ibv_get_async_event(context, &mut event), 0);
        assert_eq!((event.event_type, event.element.port_num), (9, 1), "IBV_EVENT_PORT_ACTIVE of port 1");
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
        (cq_attr.cqe, cq_attr.wc_flags) = (16, IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
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
