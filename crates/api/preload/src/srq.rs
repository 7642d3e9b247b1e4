//! Shared receive queues: create, modify, query, destroy, post.

use crate::ffi::{code, deref, failed, guard, pointer};
use crate::objects::{free, fresh_cookie, Acks, PdHold, PdObj, SrqObj, SRQS};
use crate::post::sges;
use crate::real::pass;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::addr_of_mut;
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, RecvWr, Result, SrqAttr};

#[no_mangle]
unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    pass!(ibv_create_srq(pd, attr));
    // SAFETY: objects of ours and the caller's structure.
    pointer("ibv_create_srq", || unsafe { create(pd, attr) })
}

/// Only the basic kind exists: no XRC, no matching of tags.
pub unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    pointer("ibv_create_srq_ex", || {
        // SAFETY: the caller's structure.
        let a = unsafe { deref(attr, "srq_init_attr_ex") }?;
        if a.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 && a.srq_type != IBV_SRQT_BASIC {
            return Err(Error::unsupported(format!(
                "srq_type {}: IBV_SRQT_BASIC (0) exists here",
                a.srq_type
            )));
        }
        if a.comp_mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD) != 0 {
            return Err(Error::unsupported(format!(
                "comp_mask {:#x}: srq_type and pd are known",
                a.comp_mask
            )));
        }
        if a.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 {
            return Err(Error::invalid(
                "comp_mask lacks IBV_SRQ_INIT_ATTR_PD: every SRQ needs a protection domain",
            ));
        }
        // SAFETY: an object of ours; the structure begins with the shorter one.
        unsafe { create(a.pd, attr.cast()) }
    })
}

/// # Safety
/// `pd` is ours or NULL, `attr` the caller's structure or NULL.
unsafe fn create(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> Result<*mut ibv_srq> {
    // SAFETY: promised by the caller.
    let (owner, init) = unsafe { (PdObj::of(pd)?, deref(attr, "srq_init_attr")?) };
    let sizes = SrqAttr { max_wr: init.attr.max_wr, max_sge: init.attr.max_sge, limit: 0 };
    let cookie = fresh_cookie();
    let srq = owner.api.create_srq(owner.handle(), sizes, cookie)?;
    // SAFETY: an ibv_srq of zeros is valid: integers, null pointers, fresh locks.
    let mut c: ibv_srq = unsafe { zeroed() };
    c.context = owner.c.context;
    c.srq_context = init.srq_context;
    c.pd = pd;
    c.handle = cookie as u32;
    // SAFETY: a field of the caller's structure.
    unsafe { addr_of_mut!((*attr).attr).write(to_c(srq.query())) };
    let (api, pd) = (owner.api.clone(), PdHold::new(owner));
    let (c, async_events) = (UnsafeCell::new(c), Acks::default());
    let object = SrqObj { c, srq, api, _pd: pd, cookie, async_events };
    let object = Box::into_raw(Box::new(object));
    SRQS.get().insert(cookie, object);
    Ok(object.cast())
}

fn to_c(a: SrqAttr) -> ibv_srq_attr {
    ibv_srq_attr { max_wr: a.max_wr, max_sge: a.max_sge, srq_limit: a.limit }
}

#[no_mangle]
unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    pass!(ibv_modify_srq(srq, attr, mask));
    code("ibv_modify_srq", || {
        // SAFETY: an SRQ of ours and the caller's structure.
        let (object, attr) = unsafe { (SrqObj::of(srq)?, deref(attr, "srq_attr")?) };
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(Error::invalid(format!(
                "mask {mask:#x}: IBV_SRQ_MAX_WR (1) and IBV_SRQ_LIMIT (2) are known"
            )));
        }
        let set = |bit, value| (mask & bit != 0).then_some(value);
        object.srq.modify(set(IBV_SRQ_MAX_WR, attr.max_wr), set(IBV_SRQ_LIMIT, attr.srq_limit))
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    pass!(ibv_query_srq(srq, attr));
    code("ibv_query_srq", || {
        // SAFETY: an SRQ of ours and the caller's structure.
        unsafe { attr.write(to_c(SrqObj::of(srq)?.srq.query())) };
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    pass!(ibv_destroy_srq(srq));
    code("ibv_destroy_srq", || {
        // SAFETY: an SRQ of ours that the program gives up.
        let object = unsafe { SrqObj::of(srq) }?;
        object.api.destroy_srq(&object.srq, object.cookie)?;
        SRQS.get().remove(object.cookie);
        object.async_events.wait();
        // SAFETY: made by Box in `create`.
        unsafe { free(object) };
        Ok(())
    })
}

/// `ibv_post_srq_recv`.
pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: an SRQ of ours.
    let object = unsafe { &*srq.cast::<SrqObj>() };
    guard(libc::EIO, || {
        let mut next = wr;
        // SAFETY: the caller's list, which it leaves alone during the call. One that runs in a
        // circle ends when the queue is full.
        while let Some(wr) = unsafe { next.as_ref() } {
            let posted = object.api.process().check().map_err(Error::from).and_then(|()| {
                // SAFETY: as above.
                let sges = unsafe { sges(wr.sg_list, wr.num_sge) }?;
                object.srq.post(&RecvWr { wr_id: wr.wr_id, sges })
            });
            if let Err(e) = posted {
                // SAFETY: the caller's variable.
                unsafe { bad_wr.write(next) };
                return failed("ibv_post_srq_recv", &e);
            }
            next = wr.next;
        }
        0
    })
}
