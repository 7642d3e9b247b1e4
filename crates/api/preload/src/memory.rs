//! Protection domains and memory regions.

use crate::domain;
use crate::ffi::{code, minus_one, pointer};
use crate::objects::{free, lock, ContextObj, MrKind, MrObj, PdHold, PdObj};
use crate::real::pass;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;
use std::sync::Mutex;
use unbroken_types::Access;
use unbroken_verbs::abi::{ibv_context, ibv_mr, ibv_pd};
use unbroken_verbs::{Error, MrChange, MrKeys, Result};

/// Rights and properties that mean something here.
pub const RIGHTS: u32 = Access::LOCAL_WRITE.0 | Access::REMOTE.0 | Access::MW_BIND.0;
/// `enum ibv_rereg_mr_flags`.
const CHANGE_TRANSLATION: c_int = 1;
const CHANGE_PD: c_int = 1 << 1;
const CHANGE_ACCESS: c_int = 1 << 2;

#[no_mangle]
unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pass!(ibv_alloc_pd(context));
    pointer("ibv_alloc_pd", || {
        // SAFETY: a context of ours.
        let api = unsafe { ContextObj::of(context) }?.api.clone();
        let handle = api.alloc_pd()?;
        Ok(Box::into_raw(Box::new(PdObj {
            c: ibv_pd { context, handle: handle.0 },
            api,
            of: None,
            _td: None,
            users: AtomicU32::new(0),
        }))
        .cast())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    pass!(ibv_dealloc_pd(pd));
    code("ibv_dealloc_pd", || {
        // SAFETY: a protection domain of ours that the program gives up.
        let pd = unsafe { PdObj::of(pd) }?;
        if domain::may_go(pd)? {
            pd.api.dealloc_pd(pd.handle())?;
        }
        // SAFETY: made by Box in ibv_alloc_pd or alloc_parent_domain.
        unsafe { free(pd) };
        Ok(())
    })
}

/// The rights that a program asks for.
fn rights(access: c_uint) -> Result<Access> {
    let known = RIGHTS | Access::ZERO_BASED.0 | Access::ADVICE.0;
    match access & !known {
        0 => Ok(Access(access)),
        unknown => Err(Error::unsupported(format!(
            "access flags {unknown:#x}: on-demand regions are not available"
        ))),
    }
}

/// Registers memory of the process.
///
/// # Safety
/// `pd` is a protection domain of ours.
pub unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<*mut ibv_mr> {
    // SAFETY: promised by the caller.
    let owner = unsafe { PdObj::of(pd) }?;
    let keys =
        owner.api.reg_mr(owner.handle(), addr as u64, length as u64, iova, rights(access)?)?;
    Ok(object(owner, pd, (addr, length), keys, MrKind::Plain))
}

/// A region as programs have it.
fn object(
    owner: &PdObj,
    pd: *mut ibv_pd,
    (addr, length): (*mut c_void, usize),
    keys: MrKeys,
    kind: MrKind,
) -> *mut ibv_mr {
    let c = ibv_mr {
        context: owner.c.context,
        pd,
        addr,
        length,
        handle: keys.lkey,
        lkey: keys.lkey,
        rkey: keys.rkey,
    };
    Box::into_raw(Box::new(MrObj {
        c,
        api: owner.api.clone(),
        kind,
        pd: Mutex::new(PdHold::new(owner)),
    }))
    .cast()
}

/// Registers memory behind a dma-buf.
///
/// # Safety
/// `pd` is a protection domain of ours.
pub unsafe fn register_dmabuf(
    pd: *mut ibv_pd,
    fd: c_int,
    (offset, length, iova): (u64, usize, u64),
    access: c_uint,
) -> Result<*mut ibv_mr> {
    // SAFETY: promised by the caller.
    let owner = unsafe { PdObj::of(pd) }?;
    let range = (offset, length as u64, iova);
    let keys = owner.api.reg_dmabuf_mr(owner.handle(), fd, range, rights(access)?)?;
    // As libibverbs says of such a region: its address is that of the network.
    Ok(object(owner, pd, (iova as *mut c_void, length), keys, MrKind::Dmabuf))
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    pass!(ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access));
    pointer("ibv_reg_dmabuf_mr", || {
        // SAFETY: a protection domain of ours.
        unsafe { register_dmabuf(pd, fd, (offset, length, iova), access as c_uint) }
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    pass!(ibv_reg_mr(pd, addr, length, access));
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
    pass!(ibv_reg_mr_iova(pd, addr, length, iova, access));
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
    pass!(ibv_reg_mr_iova2(pd, addr, length, iova, access));
    // SAFETY: a protection domain of ours.
    pointer("ibv_reg_mr_iova2", || unsafe { register(pd, addr, length, iova, access) })
}

/// Of the error codes of `enum ibv_rereg_mr_err_code` only IBV_REREG_MR_ERR_INPUT (-1) ever comes:
/// the region is as it was.
#[no_mangle]
unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    pass!(ibv_rereg_mr(mr, flags, pd, addr, length, access));
    minus_one("ibv_rereg_mr", || {
        // SAFETY: a region of ours.
        let object = unsafe { MrObj::of(mr) }?;
        if !matches!(object.kind, MrKind::Plain) {
            return Err(Error::invalid(
                "device memory, dma-bufs and null regions cannot be registered anew",
            ));
        }
        if flags & !(CHANGE_TRANSLATION | CHANGE_PD | CHANGE_ACCESS) != 0 {
            return Err(Error::invalid(format!(
                "flags {flags:#x}: translation (1), pd (2) and access (4) exist"
            )));
        }
        let has = |flag| flags & flag != 0;
        if has(CHANGE_TRANSLATION) && (addr.is_null() || length == 0) {
            return Err(Error::invalid(
                "IBV_REREG_MR_CHANGE_TRANSLATION needs an address and a length",
            ));
        }
        if !has(CHANGE_ACCESS) && access != 0 {
            return Err(Error::invalid("access is given without IBV_REREG_MR_CHANGE_ACCESS"));
        }
        // SAFETY: a protection domain of ours, or NULL, where it counts.
        let domain = if has(CHANGE_PD) { Some(unsafe { PdObj::of(pd) }?) } else { None };
        let change = MrChange {
            range: has(CHANGE_TRANSLATION).then_some((addr as u64, length as u64)),
            pd: domain.map(PdObj::handle),
            access: if has(CHANGE_ACCESS) { Some(rights(access as c_uint)?) } else { None },
        };
        object.api.rereg_mr(object.c.lkey, &change)?;
        if let Some(domain) = domain {
            *lock(&object.pd) = PdHold::new(domain);
        }
        // SAFETY: the C part is ours to write; the program changes a region in one thread at a
        // time.
        unsafe {
            if has(CHANGE_PD) {
                (*mr).pd = pd;
            }
            if has(CHANGE_TRANSLATION) {
                ((*mr).addr, (*mr).length) = (addr, length);
            }
        }
        Ok(())
    })
}

pub unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    pointer("ibv_alloc_null_mr", || {
        // SAFETY: a protection domain of ours.
        let owner = unsafe { PdObj::of(pd) }?;
        let lkey = owner.api.alloc_null_mr(owner.handle())?;
        // As long as memory can be; only the local key is good for anything.
        let c = ibv_mr {
            context: owner.c.context,
            pd,
            addr: null_mut(),
            length: usize::MAX,
            handle: lkey,
            lkey,
            rkey: 0,
        };
        let (api, pd) = (owner.api.clone(), Mutex::new(PdHold::new(owner)));
        Ok(Box::into_raw(Box::new(MrObj { c, api, kind: MrKind::Null, pd })).cast())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    pass!(ibv_dereg_mr(mr));
    code("ibv_dereg_mr", || {
        // SAFETY: a region of ours that the program gives up.
        let mr = unsafe { MrObj::of(mr) }?;
        mr.api.dereg_mr(mr.c.lkey)?;
        // SAFETY: made by Box in `register`.
        unsafe { free(mr) };
        Ok(())
    })
}
