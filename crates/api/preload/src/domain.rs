//! Thread domains and parent domains.
//!
//! A thread domain promises that its objects are used by one thread at a time, and a parent domain
//! joins it with a protection domain and with allocators for a driver's buffers. Neither changes
//! anything here: locks are cheap where nobody contends, and no queue lies in memory that a program
//! could want elsewhere. So a parent domain stands for its protection domain: it has the same
//! handle, and its allocators are never called.

use crate::ffi::{code, deref, pointer};
use crate::objects::{free, ContextObj, PdHold, PdObj, TdHold, TdObj};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, Result};

pub unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    pointer("ibv_alloc_td", || {
        // SAFETY: a context of ours and the caller's structure.
        let (owner, attr) = unsafe { (ContextObj::of(context)?, deref(attr, "init_attr")?) };
        if attr.comp_mask != 0 {
            return Err(Error::unsupported(format!(
                "comp_mask {:#x}: nothing is known",
                attr.comp_mask
            )));
        }
        let (api, users) = (owner.api.clone(), AtomicU32::new(0));
        Ok(Box::into_raw(Box::new(TdObj { c: ibv_td { context }, api, users })).cast())
    })
}

pub unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    code("ibv_dealloc_td", || {
        // SAFETY: a thread domain of ours that the program gives up.
        let td = unsafe { TdObj::of(td) }?;
        if td.users.load(Ordering::Acquire) > 0 {
            return Err(Error::new(
                libc::EBUSY,
                "a parent domain has this thread domain: give up that one first",
            ));
        }
        // SAFETY: made by Box in alloc_td.
        unsafe { free(td) };
        Ok(())
    })
}

pub unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    pointer("ibv_alloc_parent_domain", || {
        // SAFETY: the caller's structure and a domain of ours in it.
        let (attr, of) = unsafe { (deref(attr, "attr")?, PdObj::of((*attr).pd)?) };
        let known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
        if attr.comp_mask & !known != 0 {
            return Err(Error::unsupported(format!(
                "comp_mask {:#x}: allocators and pd_context are known",
                attr.comp_mask
            )));
        }
        if attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0
            && (attr.alloc.is_none() || attr.free.is_none())
        {
            return Err(Error::invalid("allocators: alloc and free must both be there"));
        }
        // SAFETY: a thread domain of ours, or NULL.
        let td = if attr.td.is_null() { None } else { Some(unsafe { TdObj::of(attr.td) }?) };
        Ok(Box::into_raw(Box::new(PdObj {
            c: ibv_pd { context, handle: of.c.handle },
            api: of.api.clone(),
            of: Some(PdHold::new(of)),
            _td: td.map(TdHold::new),
            users: AtomicU32::new(0),
        }))
        .cast())
    })
}

/// A domain is about to go. Whether it is one by itself, with a handle to give back, and no parent
/// domain; EBUSY while something lies in it.
pub fn may_go(pd: &PdObj) -> Result<bool> {
    match pd.users.load(Ordering::Acquire) {
        0 => Ok(pd.of.is_none()),
        users => Err(Error::new(
            libc::EBUSY,
            format!(
                "{users} objects lie in this domain (QPs, SRQs, memory regions, windows, parent \
                 domains): give them up first"
            ),
        )),
    }
}
