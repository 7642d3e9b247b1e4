//! Extended completion queues: the program looks at one completion after the other through
//! functions.
//!
//! `start_poll` takes the first completion, `next_poll` the next; `status` and `wr_id` are fields,
//! all else is read by functions. There is one completion at hand, so a thread that looks at it
//! keeps the queue's lock from a `start_poll` that found one until `end_poll`; others wait in
//! `start_poll`, unless the program promised to poll from one thread
//! (IBV_CREATE_CQ_ATTR_SINGLE_THREADED). Time stamps are those of the poll, not of the arrival: a
//! software NIC without a clock of its own has no better.

use crate::clock::{monotonic_ns, wallclock_ns};
use crate::current::Current;
use crate::ffi::{failed, guard, stay};
use crate::objects::CqObj;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::addr_of_mut;
use unbroken_types::Wc;
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, Result};

/// Puts the functions into a new queue's structure.
pub fn install(c: &mut ibv_cq_ex) {
    c.start_poll = Some(start_poll);
    c.next_poll = Some(next_poll);
    c.end_poll = Some(end_poll);
    c.read_opcode = Some(read_opcode);
    c.read_vendor_err = Some(read_vendor_err);
    c.read_byte_len = Some(read_byte_len);
    c.read_imm_data = Some(read_imm_data);
    c.read_qp_num = Some(read_qp_num);
    c.read_src_qp = Some(read_src_qp);
    c.read_wc_flags = Some(read_wc_flags);
    c.read_slid = Some(read_slid);
    c.read_sl = Some(read_sl);
    c.read_dlid_path_bits = Some(read_dlid_path_bits);
    c.read_completion_ts = Some(read_completion_ts);
    c.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
    c.read_cvlan = Some(read_cvlan);
    c.read_flow_tag = Some(read_flow_tag);
    c.read_tm_info = Some(read_tm_info);
}

pub unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: NULL or the caller's structure.
    if unsafe { attr.as_ref() }.is_some_and(|a| a.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: a queue of ours.
    if let Err(e) = unsafe { &*cq.cast::<CqObj>() }.process.check() {
        return failed("ibv_start_poll", &e.into());
    }
    // SAFETY: a queue of ours, which this thread does not poll yet.
    unsafe {
        lock(cq);
        // Before the first is taken: what comes meanwhile is not there yet.
        let left = (*cq.cast::<CqObj>()).cq.waiting().saturating_sub(1);
        (*(*cq.cast::<CqObj>()).current.get()).left = left;
        let code = bring_to_hand(cq, |object, out| object.cq.poll(out));
        if code != 0 {
            unlock(cq);
        }
        code
    }
}

/// Makes the completion at hand this thread's own, until [`unlock`].
///
/// # Safety
/// `cq` is a queue of ours, whose lock this thread does not hold.
unsafe fn lock(cq: *mut ibv_cq_ex) {
    // SAFETY: promised by the caller; the flag is never written once the program has the queue, and
    // a mutex of zeros is PTHREAD_MUTEX_INITIALIZER.
    unsafe {
        if !(*(*cq.cast::<CqObj>()).current.get()).single_threaded {
            libc::pthread_mutex_lock(addr_of_mut!((*cq).mutex));
        }
    }
}

/// Lets other threads poll.
///
/// # Safety
/// `cq` is a queue of ours, whose lock this thread holds.
unsafe fn unlock(cq: *mut ibv_cq_ex) {
    // SAFETY: promised by the caller.
    unsafe {
        if !(*(*cq.cast::<CqObj>()).current.get()).single_threaded {
            libc::pthread_mutex_unlock(addr_of_mut!((*cq).mutex));
        }
    }
}

/// It takes what was there when `start_poll` was called, and for which no event waits. A program
/// that took here what came since it armed the queue would find the queue empty at its event
/// (`ibv_rc_pingpong -e -t` ends then): a NIC gives it a microsecond for that, and we as long as it
/// takes to post, or to get a core again between arming and polling.
pub unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: a queue of ours, whose lock this thread holds since start_poll.
    unsafe {
        let left = &mut (*(*cq.cast::<CqObj>()).current.get()).left;
        if *left == 0 {
            return libc::ENOENT;
        }
        *left -= 1;
        bring_to_hand(cq, |object, out| object.cq.take_before_event(&mut out[0]))
    }
}

/// Makes the completion that `take` takes, if any, the one at hand.
///
/// # Safety
/// `cq` is a queue of ours, whose lock this thread holds.
unsafe fn bring_to_hand(
    cq: *mut ibv_cq_ex,
    take: impl FnOnce(&CqObj, &mut [Wc]) -> Result<usize>,
) -> c_int {
    // SAFETY: promised by the caller.
    let (object, current) =
        unsafe { (&*cq.cast::<CqObj>(), &mut *(*cq.cast::<CqObj>()).current.get()) };
    guard(libc::EIO, || {
        match object
            .process
            .check()
            .map_err(Error::from)
            .and_then(|()| take(object, std::slice::from_mut(&mut current.wc)))
        {
            Ok(0) => libc::ENOENT,
            Ok(_) => {
                if current.wants_monotonic {
                    current.monotonic_ns = monotonic_ns();
                }
                if current.wants_wallclock {
                    current.wallclock_ns = wallclock_ns();
                }
                // SAFETY: fields that are ours to write.
                unsafe {
                    (*object.c.get()).status = current.wc.status as c_int;
                    (*object.c.get()).wr_id = current.wc.wr_id;
                }
                0
            }
            Err(e) => failed("ibv_start_poll", &e),
        }
    })
}

pub unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: locked by this thread in start_poll.
    unsafe { unlock(cq) };
    stay();
}

/// The completion at hand.
///
/// # Safety
/// `cq` is a queue of ours between `start_poll` and `end_poll`, in the thread that polls.
unsafe fn current<'a>(cq: *mut ibv_cq_ex) -> &'a Current {
    // SAFETY: promised by the caller.
    unsafe { &*(*cq.cast::<CqObj>()).current.get() }
}

/// Functions that give a field of the completion at hand.
macro_rules! readers {
    ($($name:ident -> $ty:ty = |$c:ident| $value:expr;)*) => { $(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $ty {
            // SAFETY: the program calls this between start_poll and end_poll.
            let $c = unsafe { current(cq) };
            $value
        }
    )* };
}

readers! {
    read_opcode -> c_int = |c| c.wc.opcode as c_int;
    read_vendor_err -> u32 = |c| c.wc.vendor_err;
    read_byte_len -> u32 = |c| c.wc.byte_len;
    read_imm_data -> u32 = |c| c.wc.imm_data;
    read_qp_num -> u32 = |c| c.wc.qp_num;
    read_src_qp -> u32 = |c| c.wc.src_qp;
    read_wc_flags -> c_uint = |c| c.wc.wc_flags;
    read_slid -> u32 = |c| c.wc.slid.into();
    read_sl -> u8 = |c| c.wc.sl;
    read_dlid_path_bits -> u8 = |c| c.wc.dlid_path_bits;
    read_completion_ts -> u64 = |c| c.monotonic_ns;
    read_completion_wallclock_ns -> u64 = |c| c.wallclock_ns;
}

unsafe extern "C" fn read_cvlan(_cq: *mut ibv_cq_ex) -> u16 {
    0
}

unsafe extern "C" fn read_flow_tag(_cq: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_tm_info(_cq: *mut ibv_cq_ex, _info: *mut c_void) {}
