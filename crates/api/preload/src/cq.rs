//! Completion queues: create, resize, destroy.

use crate::current::Current;
use crate::ffi::{code, deref, pointer};
use crate::objects::{free, fresh_cookie, Acks, ChannelObj, ContextObj, CqObj, CQS};
use crate::real::pass;
use crate::{cq_ex, races};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::sync::atomic::Ordering;
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, Result};

/// Completion vectors that a queue of a software NIC may name, as a device with several interrupts
/// has them. They change nothing: its packets are seen to by whoever drives it.
pub const COMP_VECTORS: u32 = 8;
/// Fields of the completion that a program may ask for.
const KNOWN_FIELDS: u64 = IBV_WC_STANDARD_FLAGS
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

#[no_mangle]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    pass!(ibv_create_cq(context, cqe, cq_context, channel, comp_vector));
    pointer("ibv_create_cq", || {
        let entries =
            u32::try_from(cqe).map_err(|_| Error::invalid(format!("a CQ of {cqe} entries")))?;
        let vector = u32::try_from(comp_vector).unwrap_or(u32::MAX);
        // SAFETY: objects of ours.
        unsafe { new_cq(context, entries, cq_context, channel, vector) }.map(<*mut CqObj>::cast)
    })
}

pub unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    pointer("ibv_create_cq_ex", || {
        // SAFETY: the caller's structure.
        let attr = unsafe { deref(attr, "cq_attr") }?;
        // A parent domain says where to allocate and who locks: nothing that would change anything
        // here.
        if attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
            return Err(Error::unsupported(format!(
                "comp_mask {:#x}: flags and parent_domain are known",
                attr.comp_mask
            )));
        }
        if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0
            && attr.flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0
        {
            return Err(Error::unsupported(format!(
                "flags {:#x}: only single-threaded is known",
                attr.flags
            )));
        }
        if attr.wc_flags & !KNOWN_FIELDS != 0 {
            return Err(Error::unsupported(format!(
                "wc_flags {:#x}: the standard fields and time stamps are known",
                attr.wc_flags
            )));
        }
        // SAFETY: objects of ours.
        let object =
            unsafe { new_cq(context, attr.cqe, attr.cq_context, attr.channel, attr.comp_vector) }?;
        // SAFETY: just made, nobody else has it.
        let current = unsafe { &mut *(*object).current.get() };
        current.wants_monotonic = attr.wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP != 0;
        current.wants_wallclock =
            attr.wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK != 0;
        let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
        current.single_threaded = flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0;
        Ok(object.cast())
    })
}

/// Makes a queue of either kind: an extended one differs only in that the program knows of its
/// functions.
///
/// # Safety
/// `context` and `channel` are ours, or NULL.
unsafe fn new_cq(
    context: *mut ibv_context,
    entries: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: u32,
) -> Result<*mut CqObj> {
    // SAFETY: promised by the caller.
    let (api, vectors) = unsafe {
        let object = ContextObj::of(context)?;
        (object.api.clone(), (*context).num_comp_vectors)
    };
    if i64::from(comp_vector) >= i64::from(vectors) {
        return Err(Error::invalid(format!(
            "completion vector {comp_vector}: this device has {vectors} (count from 0)"
        )));
    }
    // SAFETY: promised by the caller.
    let owner = if channel.is_null() { None } else { Some(unsafe { ChannelObj::of(channel) }?) };
    let cq = api.create_cq(entries, owner.map(|o| o.channel.clone()))?;
    cq.set_cookie(fresh_cookie());
    cq.set_comp_vector(comp_vector);
    if let Some(owner) = owner {
        owner.users().fetch_add(1, Ordering::AcqRel);
    }
    // SAFETY: an ibv_cq_ex of zeros is valid: integers, null pointers, fresh locks, empty slots.
    let mut c: ibv_cq_ex = unsafe { zeroed() };
    c.context = context;
    c.channel = channel;
    c.cq_context = cq_context;
    c.cqe = cq.capacity() as c_int;
    cq_ex::install(&mut c);
    races::wrap_cq(&mut c);
    let object = Box::into_raw(Box::new(CqObj {
        process: api.process(),
        c: UnsafeCell::new(c),
        api,
        comp_events: Acks::default(),
        async_events: Acks::default(),
        current: UnsafeCell::new(Current::default()),
        cq,
    }));
    // SAFETY: just made.
    CQS.get().insert(unsafe { &*object }.cq.cookie(), object);
    Ok(object)
}

#[no_mangle]
unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    pass!(ibv_resize_cq(cq, cqe));
    code("ibv_resize_cq", || {
        // SAFETY: a queue of ours.
        let object = unsafe { CqObj::of(cq) }?;
        let entries =
            u32::try_from(cqe).map_err(|_| Error::invalid(format!("a CQ of {cqe} entries")))?;
        object.api.resize_cq(&object.cq, entries)?;
        // SAFETY: a field that is ours to write.
        unsafe { (*object.c.get()).cqe = object.cq.capacity() as c_int };
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    pass!(ibv_destroy_cq(cq));
    code("ibv_destroy_cq", || {
        // SAFETY: a queue of ours that the program gives up.
        let object = unsafe { CqObj::of(cq) }?;
        object.api.destroy_cq(&object.cq)?;
        // First nobody finds it any more, then what was found is acknowledged.
        CQS.get().remove(object.cq.cookie());
        if let Some(channel) = object.cq.channel() {
            channel.withdraw(object.cq.cookie());
        }
        object.comp_events.wait();
        object.async_events.wait();
        // SAFETY: the C part is ours; the channel, if any, outlives its queues.
        if let Ok(channel) = unsafe { ChannelObj::of((*object.c.get()).channel) } {
            channel.users().fetch_sub(1, Ordering::AcqRel);
        }
        // SAFETY: made by Box in `new_cq`.
        unsafe { free(object) };
        Ok(())
    })
}
