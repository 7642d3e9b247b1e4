//! Thread domains and parent domains.
//!
//! A thread domain promises that its objects are used by one thread at a time, and a parent domain
//! joins it with a protection domain and with allocators for a driver's buffers. Neither changes
//! anything here: locks are cheap where nobody contends, and no queue lies in memory that a program
//! could want elsewhere. So a parent domain stands for its protection domain: it has the same
//! handle, and its allocators are never called.

use crate::ffi::{code, deref, pointer};
use crate::objects::{free, ContextObj, PdObj, TdObj};
use std::ffi::c_int;
use std::ptr::NonNull;
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
        Ok(Box::into_raw(Box::new(TdObj { c: ibv_td { context }, api: owner.api.clone() })).cast())
    })
}

pub unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    code("ibv_dealloc_td", || {
        // SAFETY: a thread domain of ours that the program gives up, made by Box in alloc_td.
        unsafe { free(TdObj::of(td)?) };
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
        of.parents.fetch_add(1, Ordering::AcqRel);
        Ok(Box::into_raw(Box::new(PdObj {
            c: ibv_pd { context, handle: of.c.handle },
            api: of.api.clone(),
            of: NonNull::new(attr.pd),
            parents: AtomicU32::new(0),
        }))
        .cast())
    })
}

/// A domain is about to go. Whether it is one by itself, with a handle to give back; EBUSY while
/// parent domains stand for it.
pub fn release_parent(pd: &PdObj) -> Result<bool> {
    if pd.parents.load(Ordering::Acquire) > 0 {
        return Err(Error::new(
            libc::EBUSY,
            "a parent domain stands for this protection domain: end that first",
        ));
    }
    let Some(of) = pd.of else { return Ok(true) };
    // SAFETY: the domain of a parent domain lives as long as that, by the check above.
    unsafe { PdObj::of(of.as_ptr()) }?.parents.fetch_sub(1, Ordering::AcqRel);
    Ok(false)
}
