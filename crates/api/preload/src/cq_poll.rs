//! Completion queues: poll, arm.

use crate::ffi::{failed, guard};
use crate::objects::CqObj;
use std::ffi::c_int;
use unbroken_verbs::abi::{ibv_cq, ibv_wc};
use unbroken_verbs::Error;

/// `ibv_poll_cq` on devices whose provider is asked with nothing in between.
pub unsafe extern "C" fn poll_cq_directly(
    cq: *mut ibv_cq,
    num_entries: c_int,
    wc: *mut ibv_wc,
) -> c_int {
    // SAFETY: a queue of ours.
    let object = unsafe { &*cq.cast::<CqObj>() };
    if num_entries > 0 && !wc.is_null() && !object.process.elsewhere() {
        // SAFETY: the caller's array has `num_entries` of them, integers throughout; they are
        // written, never read.
        let out = unsafe { std::slice::from_raw_parts_mut(wc, num_entries as usize) };
        if let Some(n) = object.cq.poll_direct(out) {
            return n as c_int;
        }
    }
    // SAFETY: as the caller promises.
    unsafe { poll_cq(cq, num_entries, wc) }
}

pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    if num_entries <= 0 || wc.is_null() {
        return if num_entries == 0 { 0 } else { -libc::EINVAL };
    }
    // SAFETY: a queue of ours. The caller's array has `num_entries` of them, integers throughout;
    // they are written, never read.
    let (object, out) =
        unsafe { (&*cq.cast::<CqObj>(), std::slice::from_raw_parts_mut(wc, num_entries as usize)) };
    guard(-libc::EIO, || {
        let checked = object.process.check().map_err(Error::from);
        match checked.and_then(|()| object.cq.poll(out)) {
            Ok(n) => n as c_int,
            Err(e) => -failed("ibv_poll_cq", &e),
        }
    })
}

pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a queue of ours.
    let object = unsafe { &*cq.cast::<CqObj>() };
    guard(libc::EIO, || {
        if let Err(e) = object.process.check() {
            return failed("ibv_req_notify_cq", &e.into());
        }
        object.cq.req_notify(solicited_only != 0);
        0
    })
}
