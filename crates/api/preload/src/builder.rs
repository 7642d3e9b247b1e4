//! Building work requests by calls (`ibv_wr_*` of an extended QP).
//!
//! `wr_start` takes the QP's lock, each `wr_*` call opens a work request, `wr_set_*` gives it data
//! and address, and `wr_complete` posts them all or `wr_abort` forgets them; both release the lock.
//! Nothing is posted before `wr_complete`. What is built lies in buffers that are kept from batch
//! to batch.
//!
//! A mistake (a setter without a request, too much data) is remembered and makes `wr_complete`
//! fail. Whatever makes it fail, a full queue, too: nothing of the batch is posted then.

use crate::ffi::{deref, failed, guard, stay};
use crate::objects::{AhObj, QpObj};
use crate::post::{KNOWN_FLAGS, MAX_INLINE};
use crate::window::binding_of_wr;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::addr_of_mut;
use unbroken_types::{QpCaps, SendFlags, SendOpcode, Sge};
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, Result, SendBatch, SendWr, UdDest};

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
            "send_ops_flags {:#x}: writes, sends, reads, atomics and what binds and invalidates windows are known",
            ops & !KNOWN_OPS
        )));
    }
    Ok(())
}

/// A request that is being built.
struct Built {
    wr_id: u64,
    opcode: SendOpcode,
    flags: SendFlags,
    imm_data: u32,
    remote_addr: u64,
    rkey: u32,
    compare_add: u64,
    swap: u64,
    sges: Range<usize>,
    /// Bytes of inline data, where the data is given that way.
    inline: Option<Range<usize>>,
    ud: Option<UdDest>,
}

/// The batch between `wr_start` and `wr_complete`; touched under the QP's lock alone.
pub struct Builder {
    caps: QpCaps,
    requests: Vec<Built>,
    sges: Vec<Sge>,
    bytes: Vec<u8>,
    mistake: Option<Error>,
}

impl Builder {
    /// An empty batch of a QP with these queue sizes.
    pub fn new(caps: QpCaps) -> Builder {
        Builder { caps, requests: Vec::new(), sges: Vec::new(), bytes: Vec::new(), mistake: None }
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.bytes.clear();
        self.mistake = None;
    }

    fn wrong(&mut self, e: Error) {
        // the first mistake is the one to tell
        self.mistake.get_or_insert(e);
    }

    fn open(&mut self, wr_id: u64, flags: u32, opcode: SendOpcode) -> &mut Built {
        if self.requests.len() >= self.caps.max_send_wr as usize {
            // Bounded by the queue: the last one is overwritten, and the batch fails.
            self.wrong(Error::no_room(
                "more work requests in a batch than the send queue has entries",
            ));
            self.requests.pop();
        }
        // Inline is not a flag here but a way of giving data.
        if flags & !KNOWN_FLAGS != 0 {
            self.wrong(Error::invalid(format!(
                "wr_flags {flags:#x}: fence, signaled, solicited are known"
            )));
        }
        let flags = SendFlags(flags & !SendFlags::INLINE.0);
        self.requests.push(Built {
            wr_id,
            opcode,
            flags,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            sges: 0..0,
            inline: None,
            ud: None,
        });
        self.requests.last_mut().expect("just pushed")
    }

    fn last(&mut self) -> Option<&mut Built> {
        if self.requests.is_empty() {
            self.wrong(Error::invalid("a wr_set_* call without a work request before it"));
        }
        self.requests.last_mut()
    }

    fn set_sges(&mut self, list: &[Sge]) {
        if list.len() > self.caps.max_send_sge as usize {
            return self.wrong(Error::invalid(format!(
                "{} scatter/gather entries: this QP has max_send_sge {}",
                list.len(),
                self.caps.max_send_sge
            )));
        }
        let start = self.sges.len();
        self.sges.extend_from_slice(list);
        let end = self.sges.len();
        if let Some(wr) = self.last() {
            wr.sges = start..end;
            wr.inline = None;
        }
    }

    fn set_inline<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) {
        let start = self.bytes.len();
        let max = (self.caps.max_inline_data as usize).min(MAX_INLINE);
        for part in parts {
            if part.len() > max - (self.bytes.len() - start) {
                return self.wrong(Error::invalid(format!(
                    "inline data of more than {max} bytes, this QP's most"
                )));
            }
            self.bytes.extend_from_slice(part);
        }
        let end = self.bytes.len();
        if let Some(wr) = self.last() {
            wr.inline = Some(start..end);
        }
    }

    /// Gives the batch to `post`, unless there was a mistake.
    fn post(&mut self, post: impl FnOnce(&dyn SendBatch) -> Result<()>) -> Result<()> {
        match self.mistake.take() {
            Some(e) => Err(e),
            None if self.requests.is_empty() => Ok(()),
            None => post(self),
        }
    }
}

impl SendBatch for Builder {
    fn count(&self) -> usize {
        self.requests.len()
    }

    fn wr(&self, index: usize) -> SendWr<'_> {
        let b = &self.requests[index];
        let inline_data = b.inline.clone().map(|r| &self.bytes[r]);
        let flags = if inline_data.is_some() { b.flags.with(SendFlags::INLINE) } else { b.flags };
        SendWr {
            wr_id: b.wr_id,
            opcode: b.opcode,
            flags,
            imm_data: b.imm_data,
            remote_addr: b.remote_addr,
            rkey: b.rkey,
            compare_add: b.compare_add,
            swap: b.swap,
            sges: &self.sges[b.sges.clone()],
            inline_data,
            ud: b.ud,
        }
    }
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
    crate::races::wrap_qp(ex);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> Builder {
        Builder::new(QpCaps {
            max_send_wr: 2,
            max_send_sge: 1,
            max_inline_data: 8,
            ..QpCaps::default()
        })
    }

    #[test]
    fn a_batch_is_posted_in_order_with_its_data() {
        let mut b = builder();
        b.open(1, SendFlags::SIGNALED.0, SendOpcode::Send);
        b.set_inline([&b"ab"[..], &b"cd"[..]].into_iter());
        b.open(2, 0, SendOpcode::Write).rkey = 9;
        b.set_sges(&[Sge { addr: 1, length: 2, lkey: 3 }]);
        let mut seen = Vec::new();
        b.post(|batch| {
            for wr in (0..batch.count()).map(|i| batch.wr(i)) {
                seen.push((
                    wr.wr_id,
                    wr.rkey,
                    wr.inline_data.map(<[u8]>::to_vec),
                    wr.sges.to_vec(),
                ));
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(seen[0], (1, 0, Some(b"abcd".to_vec()), vec![]));
        assert_eq!(seen[1], (2, 9, None, vec![Sge { addr: 1, length: 2, lkey: 3 }]));
    }

    #[test]
    fn a_mistake_posts_nothing() {
        let mistakes: [fn(&mut Builder); 4] = [
            |b| b.set_sges(&[]),
            |b| {
                b.open(1, 0, SendOpcode::Send);
                b.set_inline(std::iter::once(&[0u8; 9][..]));
            },
            |b| {
                b.open(1, 0, SendOpcode::Send);
                b.set_sges(&[Sge::default(), Sge::default()]);
            },
            |b| {
                for i in 0..3 {
                    b.open(i, 0, SendOpcode::Send);
                }
            },
        ];
        for mistake in mistakes {
            let mut b = builder();
            mistake(&mut b);
            assert!(b.post(|_| panic!("posted")).is_err());
            b.clear();
            assert!(b.post(|_| panic!("posted")).is_ok());
        }
    }
}
