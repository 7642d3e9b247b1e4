//! Device memory: memory of the NIC itself, that the program reaches by copying only. A software
//! NIC's is the process's.
//!
//! Invariant: memory that a region lies in cannot be freed.

use crate::device_memory::{DeviceMemory, PAGE};
use crate::ffi::{code, deref, pointer};
use crate::memory::RIGHTS;
use crate::objects::{free, ContextObj, DmObj, MrKind, MrObj, PdHold, PdObj};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use unbroken_types::Access;
use unbroken_verbs::abi::*;
use unbroken_verbs::Error;

/// `IBV_ACCESS_ZERO_BASED`: device memory has no address in the process, so its regions count from
/// 0.
const ZERO_BASED: c_uint = 1 << 5;

pub unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    pointer("ibv_alloc_dm", || {
        // SAFETY: a context of ours and the caller's structure.
        let (_, attr) = unsafe { (ContextObj::of_any(context)?, deref(attr, "attr")?) };
        if attr.comp_mask != 0 {
            return Err(Error::unsupported(format!(
                "comp_mask {:#x}: nothing is known",
                attr.comp_mask
            )));
        }
        if attr.log_align_req > PAGE.trailing_zeros() {
            return Err(Error::unsupported(format!(
                "log_align_req {}: 12 (a page) is the most",
                attr.log_align_req
            )));
        }
        let memory = Arc::new(DeviceMemory::new(attr.length)?);
        let c = ibv_dm {
            context,
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: 0,
            handle: 0,
        };
        Ok(Box::into_raw(Box::new(DmObj { c, memory })).cast())
    })
}

pub unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    code("ibv_free_dm", || {
        // SAFETY: device memory of ours that the program gives up.
        let dm = unsafe { DmObj::of(dm) }?;
        if Arc::strong_count(&dm.memory) > 1 {
            return Err(Error::new(
                libc::EBUSY,
                "a memory region lies in this device memory: deregister it first",
            ));
        }
        // SAFETY: made by Box in alloc_dm.
        unsafe { free(dm) };
        Ok(())
    })
}

unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> c_int {
    code("ibv_memcpy_to_dm", || {
        // SAFETY: device memory of ours; `at` says that `len` bytes are there, and the caller that
        // it has as many.
        unsafe { DmObj::of(dm)?.memory.at(offset, len)?.copy_from(from.cast(), len) };
        Ok(())
    })
}

unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    len: usize,
) -> c_int {
    code("ibv_memcpy_from_dm", || {
        // SAFETY: as in memcpy_to_dm.
        unsafe { DmObj::of(dm)?.memory.at(offset, len)?.copy_to(to.cast(), len) };
        Ok(())
    })
}

pub unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    pointer("ibv_reg_dm_mr", || {
        // SAFETY: objects of ours.
        let (owner, dm) = unsafe { (PdObj::of(pd)?, DmObj::of(dm)?) };
        if access & ZERO_BASED == 0 || access & !(RIGHTS | ZERO_BASED) != 0 {
            return Err(Error::invalid(format!(
                "access flags {access:#x}: IBV_ACCESS_ZERO_BASED is needed, and rights to write, \
                 read and run atomics are known"
            )));
        }
        let addr = dm.memory.within(offset, length)? as u64;
        let keys =
            owner.api.reg_mr(owner.handle(), addr, length as u64, 0, Access(access & RIGHTS))?;
        let c = ibv_mr {
            context: owner.c.context,
            pd,
            addr: null_mut(),
            length,
            handle: keys.lkey,
            lkey: keys.lkey,
            rkey: keys.rkey,
        };
        let kind = MrKind::Device { _memory: dm.memory.clone() };
        Ok(Box::into_raw(Box::new(MrObj {
            c,
            api: owner.api.clone(),
            kind,
            pd: Mutex::new(PdHold::new(owner)),
        }))
        .cast())
    })
}
