//! Memory windows: keys of their own for a part of a region, given to a peer and taken away without
//! touching the region.
//!
//! A window of type 1 is bound by `ibv_bind_mw`, which chooses its next key; one of type 2 by a
//! work request, with a key whose lower eight bits the program chooses. What may be bound to what
//! is the transport's to check when its turn in the send queue comes: a wrong binding completes
//! with IBV_WC_MW_BIND_ERR.

use crate::ffi::{code, deref, pointer};
use crate::limits::KNOWN_FLAGS;
use crate::objects::{free, MrObj, MwObj, PdHold, PdObj, QpObj};
use std::cell::UnsafeCell;
use std::ffi::c_int;
use unbroken_types::{Access, SendFlags};
use unbroken_verbs::abi::{ibv_mw, ibv_mw_bind, ibv_mw_bind_info, ibv_pd, ibv_qp};
use unbroken_verbs::{Error, MwBind, Result, WindowType};

/// Rights of a window. To write locally is no right of a peer; programs ask for it all the same.
const RIGHTS: u32 = Access::REMOTE.0 | Access::LOCAL_WRITE.0 | Access::ZERO_BASED.0;

pub unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: c_int) -> *mut ibv_mw {
    pointer("ibv_alloc_mw", || {
        // SAFETY: a protection domain of ours.
        let owner = unsafe { PdObj::of(pd) }?;
        let window = match kind {
            1 => WindowType::One,
            2 => WindowType::Two,
            _ => {
                return Err(Error::invalid(format!(
                    "memory window of type {kind}: types 1 and 2 exist"
                )))
            }
        };
        let rkey = owner.api.alloc_window(owner.handle(), window)?;
        let c = UnsafeCell::new(ibv_mw {
            context: owner.c.context,
            pd,
            rkey,
            handle: rkey >> 8,
            r#type: kind,
        });
        Ok(Box::into_raw(Box::new(MwObj { c, api: owner.api.clone(), _pd: PdHold::new(owner) }))
            .cast())
    })
}

pub unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    code("ibv_dealloc_mw", || {
        // SAFETY: a window of ours that the program gives up.
        let object = unsafe { MwObj::of(mw) }?;
        // SAFETY: a field of the C part.
        object.api.dealloc_window(unsafe { (*object.c.get()).rkey })?;
        // SAFETY: made by Box in alloc_mw.
        unsafe { free(object) };
        Ok(())
    })
}

pub unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    code("ibv_bind_mw", || {
        // SAFETY: objects of ours and the caller's structure.
        let (qp, bind) = unsafe { (QpObj::of(qp)?, deref(bind, "mw_bind")?) };
        if bind.send_flags & !KNOWN_FLAGS != 0 {
            return Err(Error::invalid(format!(
                "send_flags {:#x}: fence and signaled are known",
                bind.send_flags
            )));
        }
        // SAFETY: a window of ours; programs bind it from one thread at a time, as its key depends
        // on the order.
        let c = unsafe { MwObj::of(mw)?.c.get() };
        // SAFETY: fields of the C part.
        let (kind, key) = unsafe { ((*c).r#type, (*c).rkey) };
        if kind != WindowType::One as c_int
            || bind.bind_info.mw_access_flags & Access::ZERO_BASED.0 != 0
        {
            return Err(Error::invalid(
                "ibv_bind_mw is for windows of type 1, which are not zero-based; use \
                 IBV_WR_BIND_MW for type 2",
            ));
        }
        let next = key & !0xff | key.wrapping_add(1) & 0xff;
        // SAFETY: as above.
        let wr = unsafe { binding(mw, next, &bind.bind_info) }?
            .wr(bind.wr_id, SendFlags(bind.send_flags));
        qp.qp.post_send(&wr)?;
        // SAFETY: a field that is ours to write.
        unsafe { (*c).rkey = next };
        Ok(())
    })
}

/// What a program asks for, for the window `mw` to have the key `new_key`.
///
/// # Safety
/// `mw` and the region of `info` are objects of ours or NULL.
pub unsafe fn binding(mw: *mut ibv_mw, new_key: u32, info: &ibv_mw_bind_info) -> Result<MwBind> {
    if info.mw_access_flags & !RIGHTS != 0 {
        return Err(Error::invalid(format!(
            "mw_access_flags {:#x}: remote rights and zero-based are known",
            info.mw_access_flags
        )));
    }
    let lkey = match info.mr.is_null() {
        true if info.length == 0 => 0,
        // SAFETY: promised by the caller.
        _ => unsafe { MrObj::of(info.mr) }?.c.lkey,
    };
    // SAFETY: promised by the caller.
    let window = unsafe { (*MwObj::of(mw)?.c.get()).rkey };
    Ok(MwBind {
        window,
        new_key,
        lkey,
        addr: info.addr,
        length: info.length,
        access: Access(info.mw_access_flags),
    })
}

/// What a program asks for by a work request, for the window `mw` of type 2 to have the key
/// `new_key`.
///
/// # Safety
/// As [`binding`].
pub unsafe fn binding_of_wr(
    mw: *mut ibv_mw,
    new_key: u32,
    info: &ibv_mw_bind_info,
) -> Result<MwBind> {
    // SAFETY: promised by the caller.
    if unsafe { (*MwObj::of(mw)?.c.get()).r#type } != WindowType::Two as c_int {
        return Err(Error::invalid(
            "IBV_WR_BIND_MW is for windows of type 2; use ibv_bind_mw for type 1",
        ));
    }
    // SAFETY: promised by the caller.
    unsafe { binding(mw, new_key, info) }
}
