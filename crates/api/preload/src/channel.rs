//! Completion channels and their events.

use crate::ffi::{code, guard, minus_one, pointer};
use crate::objects::{free, ChannelObj, ContextObj, CqObj, CQS};
use crate::real::pass;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsRawFd;
use std::ptr::addr_of_mut;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use unbroken_verbs::abi::{ibv_comp_channel, ibv_context, ibv_cq};
use unbroken_verbs::Error;

impl ChannelObj {
    /// Number of queues that use the channel.
    pub fn users(&self) -> &AtomicI32 {
        // SAFETY: the field is aligned, lives as long as the object, and nobody but us writes it.
        unsafe { AtomicI32::from_ptr(addr_of_mut!((*self.c.get()).refcnt)) }
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    pass!(ibv_create_comp_channel(context));
    pointer("ibv_create_comp_channel", || {
        // SAFETY: a context of ours.
        let api = &unsafe { ContextObj::of(context) }?.api;
        let (channel, process) = (api.create_channel()?, api.process());
        let c = UnsafeCell::new(ibv_comp_channel { context, fd: channel.as_raw_fd(), refcnt: 0 });
        Ok(Box::into_raw(Box::new(ChannelObj { c, channel, process })).cast())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    pass!(ibv_destroy_comp_channel(channel));
    code("ibv_destroy_comp_channel", || {
        // SAFETY: a channel of ours that the program gives up.
        let channel = unsafe { ChannelObj::of(channel) }?;
        if channel.users().load(Ordering::Acquire) != 0 {
            return Err(Error::new(
                libc::EBUSY,
                "the channel is in use by a completion queue: destroy that first",
            ));
        }
        // SAFETY: made by Box in ibv_create_comp_channel.
        unsafe { free(channel) };
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    pass!(ibv_get_cq_event(channel, cq, cq_context));
    minus_one("ibv_get_cq_event", || {
        // SAFETY: a channel of ours. Its inner part is kept over the wait.
        let channel = unsafe { ChannelObj::of(channel) }?.channel.clone();
        let found = loop {
            if let Some(found) = CQS.get().deliver(channel.get_event()?, |q: &CqObj| &q.comp_events)
            {
                break found;
            }
        };
        crate::races::after();
        // SAFETY: the caller's variables; the queue lives at least until this event is
        // acknowledged.
        unsafe {
            cq.write(found.cast_mut().cast());
            cq_context.write((*(*found).c.get()).cq_context);
        }
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint) {
    pass!(ibv_ack_cq_events(cq, nevents));
    guard((), || {
        // SAFETY: a queue of ours.
        if let Ok(cq) = unsafe { CqObj::of(cq) } {
            // SAFETY: the field is the program's to look at, ours to write, by several threads.
            let completed =
                unsafe { AtomicU32::from_ptr(addr_of_mut!((*cq.c.get()).comp_events_completed)) };
            completed.fetch_add(nevents, Ordering::Relaxed);
            cq.comp_events.acknowledge(nevents);
        }
    });
}
