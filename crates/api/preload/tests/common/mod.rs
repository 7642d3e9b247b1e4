//! The C functions, and what a C program around them would have.

// The helpers are a C program in Rust's spelling: a block around each line would say nothing.
#![allow(unsafe_op_in_unsafe_fn)]
#![allow(dead_code)] // each test uses its part

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::mem::{offset_of, size_of, zeroed};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use unbroken_events::{answering_processes, query_status};
use unbroken_preload as _;
use unbroken_runtime::Runtime;
use unbroken_verbs::abi::*;

extern "C" {
    pub fn ibv_get_device_list(n: *mut c_int) -> *mut *mut ibv_device;
    pub fn ibv_free_device_list(list: *mut *mut ibv_device);
    pub fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char;
    pub fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    pub fn ibv_close_device(context: *mut ibv_context) -> c_int;
    pub fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    pub fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int;
    pub fn ibv_query_gid(
        context: *mut ibv_context,
        port: u8,
        index: c_int,
        gid: *mut ibv_gid,
    ) -> c_int;
    pub fn _ibv_query_gid_table(
        c: *mut ibv_context,
        e: *mut ibv_gid_entry,
        max: usize,
        flags: u32,
        size: usize,
    ) -> isize;
    pub fn ibv_query_pkey(
        context: *mut ibv_context,
        port: u8,
        index: c_int,
        pkey: *mut u16,
    ) -> c_int;
    pub fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    pub fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    pub fn ibv_reg_mr(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> *mut ibv_mr;
    pub fn ibv_rereg_mr(
        mr: *mut ibv_mr,
        flags: c_int,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> c_int;
    pub fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
    pub fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    pub fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    pub fn ibv_create_cq(
        c: *mut ibv_context,
        n: c_int,
        x: *mut c_void,
        ch: *mut ibv_comp_channel,
        v: c_int,
    ) -> *mut ibv_cq;
    pub fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        x: *mut *mut c_void,
    ) -> c_int;
    pub fn ibv_ack_cq_events(cq: *mut ibv_cq, n: c_uint);
    pub fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    pub fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    pub fn ibv_query_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        mask: c_int,
        init: *mut ibv_qp_init_attr,
    ) -> c_int;
    pub fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    pub fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    pub fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
    pub fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int;
    pub fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
    pub fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
    pub fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
    pub fn ibv_ack_async_event(event: *mut ibv_async_event);
}

pub const RW: c_int = 1 | 1 << 1 | 1 << 2;

pub fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// One test at a time, in a runtime folder of this process's own.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    folder();
    turn
}

/// The runtime folder of this process. It is removed when the process ends: what is static is never
/// dropped.
pub fn folder() -> &'static std::path::Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    extern "C" fn remove() {
        if let Some(folder) = FOLDER.get() {
            let _ = std::fs::remove_dir_all(folder.path());
        }
    }
    let make = || {
        let folder = tempfile::tempdir().unwrap();
        // SAFETY: a function that lives as long as the process, and does not unwind.
        assert_eq!(unsafe { libc::atexit(remove) }, 0);
        std::env::set_var("UNBROKEN_RUNTIME", folder.path());
        std::env::set_var("UNBROKEN_HOST", "a");
        // Events that a switch absorbs are shown, too.
        std::env::set_var("UNBROKEN_SHOW_EVENTS", "1");
        folder
    };
    FOLDER.get_or_init(make).path()
}

pub unsafe fn open() -> *mut ibv_context {
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
pub unsafe fn extended(context: *mut ibv_context) -> *mut verbs_context {
    assert_eq!((*context).abi_compat as usize, usize::MAX);
    let v = context.cast::<u8>().sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
    assert_eq!((*v).sz, size_of::<verbs_context>());
    v
}

/// Waits until so many QPs of this process are protected, as its status says.
pub fn wait_until_protected(count: usize) {
    let runtime = Runtime::at(folder()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let protected = || {
        let processes = answering_processes(&runtime).unwrap();
        let status = |name| query_status(&runtime, name, Duration::from_secs(1)).ok();
        let qps = processes.into_iter().filter_map(status).flat_map(|process| process.qps);
        qps.filter(|qp| qp.protected).count()
    };
    while protected() < count {
        assert!(Instant::now() < deadline, "{} of {count} QPs are protected", protected());
        std::thread::yield_now();
    }
}

/// Two connected QPs of one device, with one CQ, and memory for both.
pub struct Pair {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub mr: *mut ibv_mr,
    pub memory: Box<[u8; 8192]>,
    pub channel: *mut ibv_comp_channel,
    pub cq: *mut ibv_cq,
    pub qps: [*mut ibv_qp; 2],
}

pub unsafe fn init_attr(cq: *mut ibv_cq) -> ibv_qp_init_attr {
    let mut init: ibv_qp_init_attr = zeroed();
    (init.send_cq, init.recv_cq) = (cq, cq);
    init.cap = ibv_qp_cap {
        max_send_wr: 8,
        max_recv_wr: 8,
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline_data: 64,
    };
    init.qp_type = 2;
    init
}

impl Pair {
    pub unsafe fn new() -> Pair {
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

    pub unsafe fn sge(&self, offset: usize, length: u32) -> ibv_sge {
        ibv_sge { addr: self.memory.as_ptr() as u64 + offset as u64, length, lkey: (*self.mr).lkey }
    }

    pub unsafe fn post_recv(&self, wr_id: u64, offset: usize, length: u32) {
        let mut sge = self.sge(offset, length);
        let mut wr = ibv_recv_wr { wr_id, next: null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = null_mut();
        assert_eq!((*self.context).ops.post_recv.unwrap()(self.qps[1], &mut wr, &mut bad), 0);
    }

    pub unsafe fn post_send(&self, wr: &mut ibv_send_wr) -> (c_int, *mut ibv_send_wr) {
        let mut bad = null_mut();
        let code = (*self.context).ops.post_send.unwrap()(self.qps[0], wr, &mut bad);
        (code, bad)
    }

    /// A WRITE of `length` bytes from the beginning of the memory to `offset` of it, by `rkey`.
    pub unsafe fn write(&self, wr_id: u64, length: u32, offset: usize, rkey: u32) {
        let mut sges = [self.sge(0, length)];
        let mut wr = send_wr(wr_id, &mut sges);
        wr.opcode = 0;
        wr.wr.rdma = ibv_wr_rdma { remote_addr: self.memory.as_ptr() as u64 + offset as u64, rkey };
        assert_eq!(self.post_send(&mut wr).0, 0);
    }

    /// Has `qps[1]` bind a window of type 2 to bytes `from..from + length` of a region of all the
    /// memory, for writing; gives its key.
    pub unsafe fn bind(&self, mw: *mut ibv_mw, mr: *mut ibv_mr, from: usize, length: u64) -> u32 {
        let rkey = (*mw).rkey & !0xff | 0x77;
        let mut wr = send_wr(90, &mut []);
        wr.opcode = 8;
        let addr = self.memory.as_ptr() as u64 + from as u64;
        wr.bind_mw = ibv_wr_bind_mw {
            mw,
            rkey,
            bind_info: ibv_mw_bind_info { mr, addr, length, mw_access_flags: 1 << 1 },
        };
        let mut bad = null_mut();
        assert_eq!((*self.context).ops.post_send.unwrap()(self.qps[1], &mut wr, &mut bad), 0);
        let wc = self.poll();
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (90, 0, 5));
        rkey
    }

    /// The next completion, within ten seconds.
    pub unsafe fn poll(&self) -> ibv_wc {
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

    pub unsafe fn close(self) {
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

pub unsafe fn connect(context: *mut ibv_context, qps: [*mut ibv_qp; 2]) {
    let mut gid: ibv_gid = zeroed();
    assert_eq!(ibv_query_gid(context, 1, 0, &mut gid), 0);
    for (qp, peer) in [(qps[0], qps[1]), (qps[1], qps[0])] {
        let mut a: ibv_qp_attr = zeroed();
        (a.qp_state, a.port_num, a.qp_access_flags) = (1, 1, RW as u32);
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(ibv_modify_qp(qp, &mut a, mask), 0);
        (a.qp_state, a.path_mtu, a.dest_qp_num, a.rq_psn) =
            (2, 3, (*peer).qp_num, (*peer).qp_num + 100);
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

pub unsafe fn send_wr(wr_id: u64, sges: &mut [ibv_sge]) -> ibv_send_wr {
    let mut wr: ibv_send_wr = zeroed();
    wr.wr_id = wr_id;
    wr.sg_list = sges.as_mut_ptr();
    wr.num_sge = sges.len() as c_int;
    wr.opcode = 2;
    wr.send_flags = 2;
    wr
}
