//! Protection domains and memory regions.

use crate::domain;
use crate::ffi::{code, pointer};
use crate::objects::{free, ContextObj, MrObj, PdObj};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::AtomicU32;
use unbroken_types::Access;
use unbroken_verbs::abi::{ibv_context, ibv_mr, ibv_pd};
use unbroken_verbs::{Error, Result};

/// Rights that mean something here.
pub const RIGHTS: u32 =
    Access::LOCAL_WRITE.0 | Access::REMOTE_WRITE.0 | Access::REMOTE_READ.0 | Access::REMOTE_ATOMIC.0;
/// IBV_ACCESS_HUGETLB tells the kernel how to pin, and IBV_ACCESS_OPTIONAL_RANGE (relaxed ordering) is advice by definition.
const IGNORED: u32 = 1 << 7 | 0x3ff0_0000;
/// IBV_ACCESS_MW_BIND: windows cannot be made, so the right to bind one changes nothing.
const MW_BIND: u32 = 1 << 4;

#[no_mangle]
unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pointer("ibv_alloc_pd", || {
        // SAFETY: a context of ours.
        let front = unsafe { ContextObj::of(context) }?.front.clone();
        let handle = front.alloc_pd()?;
        Ok(Box::into_raw(Box::new(PdObj {
            c: ibv_pd { context, handle },
            front,
            of: None,
            parents: AtomicU32::new(0),
        }))
        .cast())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    code("ibv_dealloc_pd", || {
        // SAFETY: a protection domain of ours that the program gives up.
        let pd = unsafe { PdObj::of(pd) }?;
        if domain::release_parent(pd)? {
            pd.front.dealloc_pd(pd.c.handle)?;
        }
        // SAFETY: made by Box in ibv_alloc_pd or alloc_parent_domain.
        unsafe { free(pd) };
        Ok(())
    })
}

/// # Safety
/// `pd` is a protection domain of ours.
unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<*mut ibv_mr> {
    // SAFETY: promised by the caller.
    let owner = unsafe { PdObj::of(pd) }?;
    let unknown = access & !(RIGHTS | IGNORED | MW_BIND);
    if unknown != 0 {
        return Err(Error::unsupported(format!(
            "access flags {unknown:#x}: memory windows, zero-based and on-demand regions are not available"
        )));
    }
    let keys = owner.front.reg_mr(owner.c.handle, addr as u64, length as u64, iova, Access(access & RIGHTS))?;
    let c = ibv_mr { context: owner.c.context, pd, addr, length, handle: keys.lkey, lkey: keys.lkey, rkey: keys.rkey };
    Ok(Box::into_raw(Box::new(MrObj { c, front: owner.front.clone(), device_memory: None })).cast())
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: a protection domain of ours.
    pointer("ibv_reg_mr", || unsafe { register(pd, addr, length, addr as u64, access as c_uint) })
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a protection domain of ours.
    pointer("ibv_reg_mr_iova", || unsafe { register(pd, addr, length, iova, access as c_uint) })
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: a protection domain of ours.
    pointer("ibv_reg_mr_iova2", || unsafe { register(pd, addr, length, iova, access) })
}

#[no_mangle]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    code("ibv_dereg_mr", || {
        // SAFETY: a region of ours that the program gives up.
        let mr = unsafe { MrObj::of(mr) }?;
        mr.front.dereg_mr(mr.c.lkey)?;
        // SAFETY: made by Box in `register`.
        unsafe { free(mr) };
        Ok(())
    })
}
