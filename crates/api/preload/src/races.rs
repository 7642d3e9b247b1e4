//! What ThreadSanitizer is told of verbs.
//!
//! It knows of an order between threads what it sees: locks of the C library, atomics of code that
//! it has instrumented. Of ours it sees neither, so one thread that posts a buffer and another that
//! polls its completion would be a data race to it. Where its runtime is in the process, the verbs
//! of the fast path are wrapped, by other functions in the objects' tables: what is done before a
//! post, or before the end of a batch, is done before what follows a poll. Nothing of it is there
//! in any other process.
//!
//! Calls that this library makes of the C library are to be ignored by it: `unbroken run` sees to
//! that (`crates/api/cli/src/sanitizer.rs`).

use crate::{builder, cq_ex, cq_poll, post, srq};
use std::ffi::{c_int, c_void, CStr};
use std::sync::OnceLock;
use unbroken_verbs::abi::*;

type Mark = unsafe extern "C" fn(*const u8);

/// The runtime's functions.
struct Marks {
    acquire: Mark,
    release: Mark,
}

/// What the order is of: one for all objects, so that no order which there is can be missed.
static ORDER: u8 = 0;
static MARKS: OnceLock<Option<Marks>> = OnceLock::new();

fn find(name: &CStr) -> Option<Mark> {
    // SAFETY: a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: both functions take an address and give nothing.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Mark>(found) })
}

/// The runtime's functions, where it is in the process.
fn marks() -> Option<&'static Marks> {
    let found =
        || Some(Marks { acquire: find(c"__tsan_acquire")?, release: find(c"__tsan_release")? });
    MARKS.get_or_init(found).as_ref()
}

/// What other threads did before [`before`] is done before what follows.
pub fn after() {
    if let Some(marks) = marks() {
        // SAFETY: the address of a static; it is not read.
        unsafe { (marks.acquire)(&raw const ORDER) };
    }
}

/// What this thread has done is done before what follows an [`after`].
fn before() {
    if let Some(marks) = marks() {
        // SAFETY: as above.
        unsafe { (marks.release)(&raw const ORDER) };
    }
}

/// Wraps the verbs in a context's table.
pub fn wrap_context(ops: &mut ibv_context_ops) {
    if marks().is_some() {
        ops.poll_cq = Some(poll_cq);
        ops.post_send = Some(post_send);
        ops.post_recv = Some(post_recv);
        ops.post_srq_recv = Some(post_srq_recv);
    }
}

/// Wraps those of an extended CQ.
pub fn wrap_cq(cq: &mut ibv_cq_ex) {
    if marks().is_some() {
        cq.start_poll = Some(start_poll);
        cq.next_poll = Some(next_poll);
        cq.end_poll = Some(end_poll);
    }
}

/// Wraps those of an extended QP.
pub fn wrap_qp(qp: &mut ibv_qp_ex) {
    if marks().is_some() {
        qp.wr_start = Some(wr_start);
        qp.wr_complete = Some(wr_complete);
        qp.wr_abort = Some(wr_abort);
    }
}

/// Defines functions that call those of the same name, with a mark on one side.
macro_rules! wrapped {
    (before: $($module:ident::$name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)?;)*) => { $(
        unsafe extern "C" fn $name($($arg: $ty),*) $(-> $out)? {
            before();
            // SAFETY: the caller's promises are those of the function behind.
            unsafe { $module::$name($($arg),*) }
        }
    )* };
    (after: $($module:ident::$name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)?;)*) => { $(
        unsafe extern "C" fn $name($($arg: $ty),*) $(-> $out)? {
            // SAFETY: the caller's promises are those of the function behind.
            let out = unsafe { $module::$name($($arg),*) };
            after();
            out
        }
    )* };
}

wrapped! { before:
    post::post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int;
    post::post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int;
    srq::post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int;
    builder::wr_complete(qp: *mut ibv_qp_ex) -> c_int;
    builder::wr_abort(qp: *mut ibv_qp_ex);
    cq_ex::end_poll(cq: *mut ibv_cq_ex);
}
wrapped! { after:
    cq_poll::poll_cq(cq: *mut ibv_cq, most: c_int, wc: *mut ibv_wc) -> c_int;
    cq_ex::start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int;
    cq_ex::next_poll(cq: *mut ibv_cq_ex) -> c_int;
    builder::wr_start(qp: *mut ibv_qp_ex);
}
