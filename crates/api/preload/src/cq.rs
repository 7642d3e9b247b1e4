//! Completion queues: create, destroy, poll, arm.

use crate::cq_ex::{self, Current};
use crate::ffi::{code, failed, guard, pointer};
use crate::objects::{free, fresh_cookie, Acks, ChannelObj, ContextObj, CqObj, CQS};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::sync::atomic::Ordering;
use unbroken_verbs::abi::{ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_wc};
use unbroken_verbs::{Error, Result};

/// Completion vectors that a queue may name, as a device with several interrupts has them. They
/// change nothing: a NIC's packets are seen to by whoever drives it.
pub const COMP_VECTORS: u32 = 8;

#[no_mangle]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    pointer("ibv_create_cq", || {
        let entries =
            u32::try_from(cqe).map_err(|_| Error::invalid(format!("a CQ of {cqe} entries")))?;
        let vector = u32::try_from(comp_vector).unwrap_or(u32::MAX);
        // SAFETY: objects of ours.
        unsafe { new_cq(context, entries, cq_context, channel, vector) }.map(<*mut CqObj>::cast)
    })
}

/// Makes a queue of either kind: an extended one differs only in that the program knows of its
/// functions.
///
/// # Safety
/// `context` and `channel` are ours, or NULL.
pub unsafe fn new_cq(
    context: *mut ibv_context,
    entries: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: u32,
) -> Result<*mut CqObj> {
    // SAFETY: promised by the caller.
    let front = unsafe { ContextObj::of(context) }?.front.clone();
    if comp_vector >= COMP_VECTORS {
        return Err(Error::invalid(format!(
            "completion vector {comp_vector}: this device has {COMP_VECTORS} (count from 0)"
        )));
    }
    // SAFETY: promised by the caller.
    let owner = if channel.is_null() { None } else { Some(unsafe { ChannelObj::of(channel) }?) };
    let cq = front.create_cq(entries, owner.map(|o| o.channel.clone()))?;
    cq.set_cookie(fresh_cookie());
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
    let object = Box::into_raw(Box::new(CqObj {
        born: front.born(),
        c: UnsafeCell::new(c),
        front,
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
    code("ibv_resize_cq", || {
        // SAFETY: a queue of ours.
        let object = unsafe { CqObj::of(cq) }?;
        let entries =
            u32::try_from(cqe).map_err(|_| Error::invalid(format!("a CQ of {cqe} entries")))?;
        object.front.resize_cq(&object.cq, entries)?;
        // SAFETY: a field that is ours to write.
        unsafe { (*object.c.get()).cqe = object.cq.capacity() as c_int };
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    code("ibv_destroy_cq", || {
        // SAFETY: a queue of ours that the program gives up.
        let object = unsafe { CqObj::of(cq) }?;
        object.front.destroy_cq(&object.cq)?;
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

pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    if num_entries <= 0 || wc.is_null() {
        return if num_entries == 0 { 0 } else { -libc::EINVAL };
    }
    // SAFETY: a queue of ours. The caller's array has `num_entries` of them, integers throughout;
    // they are written, never read.
    let (object, out) =
        unsafe { (&*cq.cast::<CqObj>(), std::slice::from_raw_parts_mut(wc, num_entries as usize)) };
    guard(-libc::EIO, || {
        match object.born.check().map_err(Error::from).and_then(|()| object.cq.poll(out)) {
            Ok(n) => n as c_int,
            Err(e) => -failed("ibv_poll_cq", &e),
        }
    })
}

pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a queue of ours.
    let object = unsafe { &*cq.cast::<CqObj>() };
    guard(libc::EIO, || {
        if let Err(e) = object.born.check() {
            return failed("ibv_req_notify_cq", &e.into());
        }
        object.cq.req_notify(solicited_only != 0);
        0
    })
}
