//! Building work requests by calls (`ibv_wr_*` of an extended QP).
//!
//! `wr_start` takes the QP's lock, each `wr_*` call opens a work request, `wr_set_*` gives it data
//! and address, and `wr_complete` posts them all or `wr_abort` forgets them; both release the lock.
//! Nothing is posted before `wr_complete`, and nothing of the batch if that fails.

use crate::batch::{Builder, Built};
use crate::ffi::{deref, failed, guard, stay};
use crate::objects::{AhObj, QpObj};
use crate::window::binding_of_wr;
use std::ffi::{c_int, c_void};
use std::ptr::addr_of_mut;
use unbroken_types::{SendFlags, SendOpcode, Sge};
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, Result, UdDest};

/// Operations that the builders have.
const KNOWN_OPS: u64 = IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW
    | IBV_QP_EX_WITH_SEND_WITH_INV;

/// Refuses operations that do not exist here.
pub fn check_send_ops(ops: u64) -> Result<()> {
    if ops & !KNOWN_OPS != 0 {
        return Err(Error::unsupported(format!(
            "send_ops_flags {:#x}: writes, sends, reads, atomics and what binds and invalidates \
             windows are known",
            ops & !KNOWN_OPS
        )));
    }
    Ok(())
}

/// Puts the builders into a new QP's structure. Kinds that do not exist here stay empty;
/// `check_send_ops` refused them.
pub fn install(ex: &mut ibv_qp_ex) {
    ex.wr_start = Some(wr_start);
    ex.wr_complete = Some(wr_complete);
    ex.wr_abort = Some(wr_abort);
    ex.wr_send = Some(wr_send);
    ex.wr_send_imm = Some(wr_send_imm);
    ex.wr_rdma_write = Some(wr_rdma_write);
    ex.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    ex.wr_rdma_read = Some(wr_rdma_read);
    ex.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    ex.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    ex.wr_send_inv = Some(wr_send_inv);
    ex.wr_local_inv = Some(wr_local_inv);
    ex.wr_bind_mw = Some(wr_bind_mw);
    ex.wr_set_ud_addr = Some(wr_set_ud_addr);
    ex.wr_set_sge = Some(wr_set_sge);
    ex.wr_set_sge_list = Some(wr_set_sge_list);
    ex.wr_set_inline_data = Some(wr_set_inline_data);
    ex.wr_set_inline_data_list = Some(wr_set_inline_data_list);
}

/// The QP and its batch.
///
/// # Safety
/// `qp` is an extended QP of ours, whose lock the calling thread holds.
unsafe fn batch<'a>(qp: *mut ibv_qp_ex) -> (&'a QpObj, &'a mut Builder) {
    // SAFETY: promised by the caller; the lock makes the batch this thread's own.
    let (object, builder) =
        unsafe { (&*qp.cast::<QpObj>(), &mut *(*qp.cast::<QpObj>()).builder.get()) };
    (object, builder.get_or_insert_with(|| Box::new(Builder::new(object.qp.caps()))))
}

/// Opens a request with the program's `wr_id` and `wr_flags`.
///
/// # Safety
/// As [`batch`].
unsafe fn open(qp: *mut ibv_qp_ex, opcode: SendOpcode, fill: impl FnOnce(&mut Built)) {
    guard((), || {
        // SAFETY: promised by the caller; the two fields are the program's to set.
        let (wr_id, flags, (_, batch)) = unsafe { ((*qp).wr_id, (*qp).wr_flags, batch(qp)) };
        fill(batch.open(wr_id, flags, opcode));
    });
}

pub unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: a QP of ours, whose mutex was initialised with zeros as PTHREAD_MUTEX_INITIALIZER is.
    unsafe { libc::pthread_mutex_lock(addr_of_mut!((*qp).qp_base.mutex)) };
    // SAFETY: the lock was just taken.
    unsafe { batch(qp) }.1.clear();
}

pub unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the program holds the lock since wr_start.
    let (object, batch) = unsafe { batch(qp) };
    let code = guard(libc::EIO, || {
        batch
            .post(|batch| object.qp.post_sends(batch))
            .map_or_else(|e| failed("ibv_wr_complete", &e), |()| 0)
    });
    // SAFETY: taken in wr_start by this thread.
    unsafe { libc::pthread_mutex_unlock(addr_of_mut!((*qp).qp_base.mutex)) };
    code
}

pub unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: taken in wr_start by this thread.
    unsafe { libc::pthread_mutex_unlock(addr_of_mut!((*qp).qp_base.mutex)) };
    stay();
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: between wr_start and wr_complete.
    unsafe { open(qp, SendOpcode::Send, |_| ()) };
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm_data: u32) {
    // SAFETY: between wr_start and wr_complete.
    unsafe { open(qp, SendOpcode::SendImm, |b| b.imm_data = imm_data) };
}

/// # Safety
/// As [`batch`].
unsafe fn rdma(qp: *mut ibv_qp_ex, opcode: SendOpcode, rkey: u32, remote_addr: u64, imm_data: u32) {
    // SAFETY: promised by the caller.
    unsafe {
        open(qp, opcode, |b| (b.rkey, b.remote_addr, b.imm_data) = (rkey, remote_addr, imm_data))
    };
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: between wr_start and wr_complete.
    unsafe { rdma(qp, SendOpcode::Write, rkey, remote_addr, 0) };
}

unsafe extern "C" fn wr_rdma_write_imm(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    imm_data: u32,
) {
    // SAFETY: between wr_start and wr_complete.
    unsafe { rdma(qp, SendOpcode::WriteImm, rkey, remote_addr, imm_data) };
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: between wr_start and wr_complete.
    unsafe { rdma(qp, SendOpcode::Read, rkey, remote_addr, 0) };
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    let fill = |b: &mut Built| {
        (b.rkey, b.remote_addr, b.compare_add, b.swap) = (rkey, remote_addr, compare, swap)
    };
    // SAFETY: between wr_start and wr_complete.
    unsafe { open(qp, SendOpcode::CmpSwap, fill) };
}

unsafe extern "C" fn wr_atomic_fetch_add(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    add: u64,
) {
    // SAFETY: between wr_start and wr_complete.
    unsafe {
        open(qp, SendOpcode::FetchAdd, |b| {
            (b.rkey, b.remote_addr, b.compare_add) = (rkey, remote_addr, add)
        })
    };
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    // SAFETY: between wr_start and wr_complete.
    unsafe { open(qp, SendOpcode::SendInv, |b| b.rkey = invalidate_rkey) };
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    // SAFETY: between wr_start and wr_complete.
    unsafe { open(qp, SendOpcode::LocalInv, |b| b.rkey = invalidate_rkey) };
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: a window of ours and the caller's structure.
    let bind = unsafe {
        deref(info.cast_mut(), "bind_info").and_then(|info| binding_of_wr(mw, rkey, info))
    };
    match bind {
        // SAFETY: between wr_start and wr_complete.
        Ok(bind) => unsafe {
            let wr = bind.wr(0, SendFlags::default());
            let fields = (wr.imm_data, wr.remote_addr, wr.rkey, wr.compare_add, wr.swap);
            open(qp, SendOpcode::BindMw, |b| {
                (b.imm_data, b.remote_addr, b.rkey, b.compare_add, b.swap) = fields
            });
        },
        // SAFETY: between wr_start and wr_complete.
        Err(e) => guard((), || unsafe { batch(qp) }.1.wrong(e)),
    }
}

unsafe extern "C" fn wr_set_ud_addr(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    guard((), || {
        // SAFETY: between wr_start and wr_complete.
        let (_, batch) = unsafe { batch(qp) };
        // SAFETY: an address handle of ours.
        match unsafe { AhObj::of(ah) } {
            Err(e) => batch.wrong(e),
            Ok(ah) => {
                if let Some(b) = batch.last() {
                    b.ud = Some(UdDest::over(&ah.path, remote_qpn, remote_qkey));
                }
            }
        }
    });
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: between wr_start and wr_complete.
    guard((), || unsafe { batch(qp) }.1.set_sges(&[Sge { addr, length, lkey }]));
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, sg_list: *const ibv_sge) {
    guard((), || {
        // SAFETY: between wr_start and wr_complete; the caller's list has `num_sge` entries.
        let (batch, list) = unsafe { (batch(qp).1, list(sg_list, num_sge)) };
        batch.set_sges(list);
    });
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    guard((), || {
        // SAFETY: between wr_start and wr_complete; the caller's data has `length` bytes.
        let (batch, data) = unsafe { (batch(qp).1, list(addr.cast::<u8>(), length)) };
        batch.set_inline(std::iter::once(data));
    });
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    num_buf: usize,
    buf_list: *const ibv_data_buf,
) {
    guard((), || {
        // SAFETY: between wr_start and wr_complete; the caller's list has `num_buf` entries.
        let (batch, parts) = unsafe { (batch(qp).1, list(buf_list, num_buf)) };
        // SAFETY: each entry describes readable memory of the caller.
        batch.set_inline(parts.iter().map(|p| unsafe { list(p.addr.cast::<u8>(), p.length) }));
    });
}

/// A C array as a slice; empty where it has no entries.
///
/// # Safety
/// `p` is valid for `n` reads if `n` is not 0.
unsafe fn list<'a, T>(p: *const T, n: usize) -> &'a [T] {
    if n == 0 || p.is_null() {
        return &[];
    }
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts(p, n) }
}
