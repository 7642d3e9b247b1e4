//! Device memory: memory of the NIC itself, that the program reaches by copying only. A software
//! NIC's is the process's.
//!
//! Invariants: what is allocated at any time is bounded by [`MAX_DM_BYTES`]; memory that a region
//! lies in cannot be freed; copies stay within the memory and are aligned as hardware asks, so that
//! a program that runs here runs there.

use crate::ffi::{code, deref, pointer};
use crate::memory::RIGHTS;
use crate::objects::{free, ContextObj, DmObj, MrKind, MrObj, PdObj};
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use unbroken_types::Access;
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, Result};

/// Device memory of a process, in bytes.
pub const MAX_DM_BYTES: usize = 1 << 20;
/// Offsets and lengths of copies are multiples of this.
const ALIGN: u64 = 4;
/// Start of every piece.
const PAGE: usize = 4096;
/// `IBV_ACCESS_ZERO_BASED`: device memory has no address in the process, so its regions count from 0.
const ZERO_BASED: c_uint = 1 << 5;

static USED: AtomicUsize = AtomicUsize::new(0);

/// A piece of device memory.
pub struct DeviceMemory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory at a fixed address; programs and NICs read and write it at the same time, as
// they do any registered memory.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    fn new(len: usize) -> Result<DeviceMemory> {
        if len == 0 || len > MAX_DM_BYTES {
            return Err(Error::invalid(format!(
                "length {len}: 1 to {MAX_DM_BYTES} bytes of device memory are possible"
            )));
        }
        let layout = Layout::from_size_align(len, PAGE)
            .map_err(|e| Error::invalid(format!("length {len}: {e}")))?;
        if USED.fetch_add(len, Ordering::AcqRel) + len > MAX_DM_BYTES {
            USED.fetch_sub(len, Ordering::AcqRel);
            return Err(Error::no_room(format!(
                "less than {len} of {MAX_DM_BYTES} bytes of device memory are free"
            )));
        }
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| {
            USED.fetch_sub(len, Ordering::AcqRel);
            Error::no_room("the process has no memory left")
        })?;
        Ok(DeviceMemory { start, layout })
    }

    /// Where a copy goes to or comes from.
    fn at(&self, offset: u64, len: usize) -> Result<*mut u8> {
        if !offset.is_multiple_of(ALIGN) || !(len as u64).is_multiple_of(ALIGN) {
            return Err(Error::invalid(format!(
                "offset {offset}, length {len}: both must be multiples of {ALIGN}"
            )));
        }
        self.within(offset, len)
    }

    fn within(&self, offset: u64, len: usize) -> Result<*mut u8> {
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > self.layout.size() as u64) {
            return Err(Error::invalid(format!(
                "offset {offset}, length {len}: beyond the {} bytes of this device memory",
                self.layout.size()
            )));
        }
        Ok(self.start.as_ptr().wrapping_add(offset as usize))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no region lies in it any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
        USED.fetch_sub(self.layout.size(), Ordering::AcqRel);
    }
}

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
                "access flags {access:#x}: IBV_ACCESS_ZERO_BASED is needed, and rights to write, read and run atomics are known"
            )));
        }
        let addr = dm.memory.within(offset, length)? as u64;
        let keys =
            owner.front.reg_mr(owner.handle(), addr, length as u64, 0, Access(access & RIGHTS))?;
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
        Ok(Box::into_raw(Box::new(MrObj { c, front: owner.front.clone(), kind })).cast())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_inside_and_aligned_and_the_whole_is_bounded() {
        let m = DeviceMemory::new(64).unwrap();
        assert!(m.at(0, 64).is_ok() && m.at(60, 4).is_ok() && m.at(64, 0).is_ok());
        for (offset, len) in [(60, 8), (1, 4), (0, 3), (u64::MAX - 3, 8), (68, 0)] {
            assert!(m.at(offset, len).is_err(), "{offset} {len}");
        }
        assert!(DeviceMemory::new(0).is_err() && DeviceMemory::new(MAX_DM_BYTES + 1).is_err());
        assert!(DeviceMemory::new(MAX_DM_BYTES).is_err(), "64 bytes are in use");
        drop(m);
        assert!(DeviceMemory::new(MAX_DM_BYTES).is_ok());
    }
}
