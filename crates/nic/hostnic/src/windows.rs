//! Memory windows of a bare device. (Failover hides windows: after a switch it could not bind them
//! on the other device.)
//!
//! The provider reads a window's current key from `ibv_mw`, and the caller of a bind stores the new
//! key there once the bind is posted. Both happen under the lock of the tables, so two binds of one
//! window cannot mix up their keys.

use crate::context::Context;
use crate::inside;
use crate::library::{check, null_error};
use crate::lock;
use crate::memory::HostMemory;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, PoisonError};
use unbroken_types::PdHandle;
use unbroken_verbs::abi::{
    ibv_mr, ibv_mw, ibv_mw_bind_info, ibv_wr_bind_mw, AllocMw, DeallocMw,
    IBV_DEVICE_MEM_WINDOW_TYPE_2B,
};
use unbroken_verbs::{Capabilities, Error, MemoryDomain, Result, SendWr, WindowType};

/// A window and its protection domain.
pub(crate) struct Window {
    raw: usize,
    pd: PdHandle,
}

/// Windows by the index in their keys: a bind changes only the lowest eight bits of a key.
pub(crate) type Windows = HashMap<u32, Window>;

fn index_of(key: u32) -> u32 {
    key >> 8
}

fn no_window(key: u32) -> Error {
    Error::invalid(format!("no window has the key {key:#x}"))
}

fn hidden() -> Error {
    Error::unsupported("memory windows cannot be protected")
}

/// The provider's functions for windows.
#[derive(Clone, Copy)]
pub(crate) struct Verbs {
    alloc: AllocMw,
    dealloc: DeallocMw,
}

impl Verbs {
    /// The functions of a device with windows of type 2B: those that belong to the QP that binds
    /// them. `None`: the device has no such windows.
    pub(crate) fn of(context: &Arc<Context>) -> Option<Verbs> {
        let flags = context.device_attr().ok()?.device_cap_flags;
        // SAFETY: an open context; the slots never change.
        let ops = unsafe { (*context.raw()).ops };
        let verbs = Verbs { alloc: ops.alloc_mw?, dealloc: ops.dealloc_mw? };
        (flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B != 0).then_some(verbs)
    }
}

/// The capabilities of a bare device. libibverbs does not report whether UC queue pairs can
/// invalidate keys, and those of rxe cannot, so windows are always freed.
pub(crate) fn capabilities(windows: bool) -> Capabilities {
    Capabilities { windows, frees_windows: windows, ..Capabilities::default() }
}

impl HostMemory {
    /// Whether programs may use the device's windows.
    pub(crate) fn has_windows(&self) -> bool {
        self.windows.is_some()
    }

    /// Allocates a window, and returns its key.
    pub(crate) fn new_window(&self, pd: PdHandle, kind: WindowType) -> Result<u32> {
        let verbs = self.windows.ok_or_else(hidden)?;
        self.use_pd(pd)?;
        let made = self.raw_pd(pd).and_then(|raw| {
            // SAFETY: a domain that is counted as used, of a device that has this function.
            let mw = inside::enter(|| unsafe { (verbs.alloc)(raw, kind as c_int) });
            match mw.is_null() {
                true => Err(null_error("ibv_alloc_mw")),
                false => Ok(mw),
            }
        });
        let mw = made.inspect_err(|_| self.unuse_pd(pd))?;
        // SAFETY: just made.
        let key = unsafe { (*mw).rkey };
        lock(&self.tables).windows.insert(index_of(key), Window { raw: mw as usize, pd });
        Ok(key)
    }

    /// Frees the window that has this key, or had it before a bind.
    pub(crate) fn end_window(&self, key: u32) -> Result<()> {
        let verbs = self.windows.ok_or_else(hidden)?;
        // Out of the table first: the provider may give the key to another thread's window at once.
        let taken = lock(&self.tables).windows.remove(&index_of(key));
        let window = taken.ok_or_else(|| no_window(key))?;
        // SAFETY: a window of ours, taken out of the table by this call alone.
        let code = inside::enter(|| unsafe { (verbs.dealloc)(window.raw as *mut ibv_mw) });
        let ended = check("ibv_dealloc_mw", code);
        match ended {
            Ok(()) => self.unuse_pd(window.pd),
            Err(_) => {
                lock(&self.tables).windows.insert(index_of(key), window);
            }
        }
        ended
    }

    /// Posts a bind, a work request made by [`unbroken_types::MwBind::wr`]: `post` gives the
    /// provider its form of it.
    pub(crate) fn bind(
        &self,
        wr: &SendWr<'_>,
        post: impl FnOnce(ibv_wr_bind_mw) -> Result<()>,
    ) -> Result<()> {
        let (key, lkey) = (wr.imm_data, (wr.swap >> 32) as u32);
        let tables = lock(&self.tables);
        let window = tables.windows.get(&index_of(key)).ok_or_else(|| no_window(key))?;
        let mw = window.raw as *mut ibv_mw;
        let (addr, length) = (wr.remote_addr, wr.compare_add);
        // A bind of no bytes unbinds, and names no region.
        let mr = if length == 0 { 0 } else { tables.region(lkey)? } as *mut ibv_mr;
        let info = ibv_mw_bind_info { mr, addr, length, mw_access_flags: wr.swap as u32 };
        post(ibv_wr_bind_mw { mw, rkey: wr.rkey, bind_info: info })?;
        // SAFETY: a window of ours, which is not freed while the tables are locked.
        unsafe { (*mw).rkey = wr.rkey };
        Ok(())
    }

    /// Frees all windows: nobody can name one any more.
    pub(crate) fn free_windows(&mut self) {
        let Some(verbs) = self.windows else { return };
        let tables = self.tables.get_mut().unwrap_or_else(PoisonError::into_inner);
        for window in tables.windows.values() {
            // SAFETY: a window of ours. If this fails, the kernel frees it with the device.
            inside::enter(|| unsafe { (verbs.dealloc)(window.raw as *mut ibv_mw) });
        }
    }
}
