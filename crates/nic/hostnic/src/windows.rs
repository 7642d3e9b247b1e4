//! Memory windows of a device that a program has as it is. (Failover hides them: what a program
//! binds cannot be bound again on another device without its doing.)
//!
//! The provider reads a window's key from its own structure, and leaves it to the caller of a bind
//! to write the new one there. So a bind is posted with the table of windows locked, and the key
//! written before another bind of that window is posted.

use crate::context::Context;
use crate::inside;
use crate::library::{check, null_error};
use crate::lock;
use crate::memory::HostMemory;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Arc;
use unbroken_types::PdHandle;
use unbroken_verbs::abi::{
    ibv_mr, ibv_mw, ibv_mw_bind_info, ibv_wr_bind_mw, AllocMw, DeallocMw,
    IBV_DEVICE_MEM_WINDOW_TYPE_2B,
};
use unbroken_verbs::{Capabilities, Error, Result, SendWr, WindowType};

/// A window, and its domain.
pub(crate) struct Window {
    raw: usize,
    pd: PdHandle,
}

/// Windows by their keys without the lowest eight bits, which change.
pub(crate) type Windows = HashMap<u32, Window>;

fn name_of(key: u32) -> u32 {
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
    /// Those of a device that has windows of type 2 which are the QP's.
    pub(crate) fn of(context: &Arc<Context>) -> Option<Verbs> {
        let flags = context.device_attr().ok()?.device_cap_flags;
        // SAFETY: an open context; the slots never change.
        let ops = unsafe { (*context.raw()).ops };
        let verbs = Verbs { alloc: ops.alloc_mw?, dealloc: ops.dealloc_mw? };
        (flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B != 0).then_some(verbs)
    }
}

/// What a bare device can do. Whether its UC queue pairs invalidate keys is not told: those of rxe
/// do not.
pub(crate) fn capabilities(windows: bool) -> Capabilities {
    Capabilities { windows, frees_windows: windows, ..Capabilities::default() }
}

impl HostMemory {
    /// Whether the device's windows are the program's to use.
    pub(crate) fn has_windows(&self) -> bool {
        self.windows.is_some()
    }

    pub(crate) fn new_window(&self, pd: PdHandle, kind: WindowType) -> Result<u32> {
        use unbroken_verbs::MemoryDomain;
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
        lock(&self.tables).windows.insert(name_of(key), Window { raw: mw as usize, pd });
        Ok(key)
    }

    pub(crate) fn end_window(&self, key: u32) -> Result<()> {
        use unbroken_verbs::MemoryDomain;
        let verbs = self.windows.ok_or_else(hidden)?;
        // Out of the table first: the provider may give the key to another thread's window at once.
        let taken = lock(&self.tables).windows.remove(&name_of(key));
        let window = taken.ok_or_else(|| no_window(key))?;
        // SAFETY: a window of ours, taken out of the table by this call alone.
        let code = inside::enter(|| unsafe { (verbs.dealloc)(window.raw as *mut ibv_mw) });
        let ended = check("ibv_dealloc_mw", code);
        match ended {
            Ok(()) => self.unuse_pd(window.pd),
            Err(_) => {
                lock(&self.tables).windows.insert(name_of(key), window);
            }
        }
        ended
    }

    /// Has `post` post a bind, whose work request has the form of [`unbroken_types::MwBind::wr`].
    pub(crate) fn bind(
        &self,
        wr: &SendWr<'_>,
        post: impl FnOnce(ibv_wr_bind_mw) -> Result<()>,
    ) -> Result<()> {
        let (key, lkey) = (wr.imm_data, (wr.swap >> 32) as u32);
        let tables = lock(&self.tables);
        let window = tables.windows.get(&name_of(key)).ok_or_else(|| no_window(key))?;
        let mw = window.raw as *mut ibv_mw;
        let mr = tables.region(lkey)? as *mut ibv_mr;
        let (addr, length) = (wr.remote_addr, wr.compare_add);
        let info = ibv_mw_bind_info { mr, addr, length, mw_access_flags: wr.swap as u32 };
        post(ibv_wr_bind_mw { mw, rkey: wr.rkey, bind_info: info })?;
        // SAFETY: a window of ours, which is not freed while the table is locked.
        unsafe { (*mw).rkey = wr.rkey };
        Ok(())
    }
}
