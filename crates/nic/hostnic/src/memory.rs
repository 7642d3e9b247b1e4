//! Protection domains and regions of a device.

use crate::context::Context;
use crate::inside;
use crate::library::{check, null_error};
use crate::windows::{Verbs, Windows};
use crate::{lock, Object};
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use unbroken_types::{Access, PdHandle};
use unbroken_verbs::abi::{ibv_mr, ibv_pd};
use unbroken_verbs::{Error, IndirectEntry, MemoryDomain, MrChange, MrKeys, Result, WindowType};

/// `enum ibv_rereg_mr_flags`.
const CHANGE_TRANSLATION: c_int = 1;
const CHANGE_PD: c_int = 1 << 1;
const CHANGE_ACCESS: c_int = 1 << 2;

struct Pd {
    raw: Object<ibv_pd>,
    users: u32,
}

#[derive(Clone, Copy)]
struct Mr {
    raw: usize,
    pd: PdHandle,
}

#[derive(Default)]
pub(crate) struct Tables {
    pds: HashMap<PdHandle, Pd>,
    /// By local key, which is the device's own.
    mrs: HashMap<u32, Mr>,
    pub(crate) windows: Windows,
    last_pd: u32,
}

impl Tables {
    /// The provider's region of that local key.
    pub(crate) fn region(&self, lkey: u32) -> Result<usize> {
        self.mrs.get(&lkey).map(|mr| mr.raw).ok_or_else(|| no_key(lkey))
    }
}

/// What a context has of memory.
pub(crate) struct HostMemory {
    context: Arc<Context>,
    pub(crate) tables: Mutex<Tables>,
    /// `None`: windows are hidden, or the device has none.
    pub(crate) windows: Option<Verbs>,
}

fn length(len: u64) -> Result<usize> {
    usize::try_from(len).map_err(|_| Error::invalid(format!("a region of {len} bytes")))
}

fn no_pd(pd: PdHandle) -> Error {
    Error::invalid(format!("there is no protection domain {pd}"))
}

fn no_key(lkey: u32) -> Error {
    Error::invalid(format!("no region has the local key {lkey:#x}"))
}

impl HostMemory {
    /// `bare`: programs may use the device's windows.
    pub(crate) fn new(context: &Arc<Context>, bare: bool) -> Arc<HostMemory> {
        let windows = bare.then(|| Verbs::of(context)).flatten();
        Arc::new(HostMemory { context: context.clone(), tables: Mutex::default(), windows })
    }

    /// A region that `make` has the provider make.
    fn register(
        &self,
        pd: PdHandle,
        verb: &str,
        make: impl FnOnce(*mut ibv_pd) -> *mut ibv_mr,
    ) -> Result<MrKeys> {
        self.use_pd(pd)?;
        let registered = self.raw_pd(pd).and_then(|raw| {
            let mr = make(raw);
            match mr.is_null() {
                true => Err(null_error(verb)),
                // SAFETY: just made.
                false => Ok((mr, unsafe { MrKeys { lkey: (*mr).lkey, rkey: (*mr).rkey } })),
            }
        });
        let (mr, keys) = registered.inspect_err(|_| self.unuse_pd(pd))?;
        lock(&self.tables).mrs.insert(keys.lkey, Mr { raw: mr as usize, pd });
        Ok(keys)
    }

    /// The provider's protection domain.
    pub(crate) fn raw_pd(&self, pd: PdHandle) -> Result<*mut ibv_pd> {
        lock(&self.tables).pds.get(&pd).map(|pd| pd.raw.0).ok_or_else(|| no_pd(pd))
    }
}

impl MemoryDomain for HostMemory {
    fn alloc_pd(&self) -> Result<PdHandle> {
        // SAFETY: an open context.
        let raw = unsafe { self.context.library.alloc_pd(self.context.raw()) };
        if raw.is_null() {
            return Err(null_error("ibv_alloc_pd"));
        }
        let mut tables = lock(&self.tables);
        tables.last_pd += 1;
        let handle = PdHandle(tables.last_pd);
        tables.pds.insert(handle, Pd { raw: Object(raw), users: 0 });
        Ok(handle)
    }

    fn dealloc_pd(&self, pd: PdHandle) -> Result<()> {
        let mut tables = lock(&self.tables);
        let found = tables.pds.get(&pd).ok_or_else(|| no_pd(pd))?;
        if found.users > 0 {
            return Err(Error::new(libc::EBUSY, "the protection domain is in use"));
        }
        // SAFETY: a domain that nothing uses.
        check("ibv_dealloc_pd", unsafe { self.context.library.dealloc_pd(found.raw.0) })?;
        tables.pds.remove(&pd);
        Ok(())
    }

    fn use_pd(&self, pd: PdHandle) -> Result<()> {
        lock(&self.tables).pds.get_mut(&pd).ok_or_else(|| no_pd(pd))?.users += 1;
        Ok(())
    }

    fn unuse_pd(&self, pd: PdHandle) {
        if let Some(pd) = lock(&self.tables).pds.get_mut(&pd) {
            pd.users = pd.users.saturating_sub(1);
        }
    }

    fn reg_mr(
        &self,
        pd: PdHandle,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys> {
        let len = length(len)?;
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        // SAFETY: a domain that is counted as used; the memory is the program's, which promises
        // that it is there.
        self.register(pd, "ibv_reg_mr", |raw| unsafe {
            self.context.library.reg_mr_iova2(raw, addr as *mut c_void, len, iova, access.0)
        })
    }

    fn reg_dmabuf_mr(
        &self,
        pd: PdHandle,
        fd: RawFd,
        offset: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys> {
        let Some(reg_dmabuf_mr) = self.context.library.reg_dmabuf_mr() else {
            return Err(Error::unsupported(
                "the installed libibverbs has no ibv_reg_dmabuf_mr: rdma-core 34 or newer has it",
            ));
        };
        let len = length(len)?;
        self.register(pd, "ibv_reg_dmabuf_mr", |raw| {
            let access = access.0 as c_int;
            // SAFETY: a domain that is counted as used; the kernel looks at the descriptor.
            inside::enter(|| unsafe { reg_dmabuf_mr(raw, offset, len, iova, fd, access) })
        })
    }

    fn rereg_mr(&self, lkey: u32, change: &MrChange) -> Result<()> {
        let mr = *lock(&self.tables).mrs.get(&lkey).ok_or_else(|| no_key(lkey))?;
        let mut flags = 0;
        let (addr, len) = change.range.unwrap_or_default();
        if change.range.is_some() {
            flags |= CHANGE_TRANSLATION;
        }
        let mut pd = std::ptr::null_mut();
        if let Some(new) = change.pd {
            (pd, flags) = (self.raw_pd(new)?, flags | CHANGE_PD);
        }
        let access = change.access.unwrap_or_default().0 as c_int;
        if change.access.is_some() {
            flags |= CHANGE_ACCESS;
        }
        let raw = mr.raw as *mut ibv_mr;
        // SAFETY: a region of ours that the program changes in one thread at a time.
        let (code, keys) = unsafe {
            let (addr, len) = (addr as *mut c_void, len as usize);
            let code = self.context.library.rereg_mr(raw, flags, pd, addr, len, access);
            (code, MrKeys { lkey: (*raw).lkey, rkey: (*raw).rkey })
        };
        if code != 0 {
            return Err(null_error("ibv_rereg_mr"));
        }
        if keys.lkey != lkey {
            return Err(Error::unsupported(format!(
                "{}: the provider gives a changed region another key",
                self.context.name
            )));
        }
        let mut tables = lock(&self.tables);
        if let Some(new) = change.pd {
            if let Some(entry) = tables.mrs.get_mut(&lkey) {
                entry.pd = new;
            }
            drop(tables);
            self.use_pd(new)?;
            self.unuse_pd(mr.pd);
        }
        Ok(())
    }

    fn dereg_mr(&self, lkey: u32) -> Result<()> {
        // Out of the table first: the provider may give the key to another thread's region at once.
        let mr = lock(&self.tables).mrs.remove(&lkey).ok_or_else(|| no_key(lkey))?;
        // SAFETY: a region of ours, taken out of the table by this call alone.
        let ended =
            check("ibv_dereg_mr", unsafe { self.context.library.dereg_mr(mr.raw as *mut ibv_mr) });
        match ended {
            Ok(()) => self.unuse_pd(mr.pd),
            Err(_) => {
                lock(&self.tables).mrs.insert(lkey, mr);
            }
        }
        ended
    }

    fn alloc_null_mr(&self, _pd: PdHandle) -> Result<u32> {
        Err(Error::unsupported("null regions cannot be protected"))
    }

    fn create_indirect(
        &self,
        _pd: PdHandle,
        _iova: u64,
        _entries: &[IndirectEntry],
        _access: Access,
    ) -> Result<MrKeys> {
        Err(Error::unsupported(
            "devices of the machine have no indirect keys that libibverbs knows",
        ))
    }

    fn update_entry(&self, _key: u32, _index: u32, _entry: &IndirectEntry) -> Result<()> {
        Err(Error::unsupported(
            "devices of the machine have no indirect keys that libibverbs knows",
        ))
    }

    fn alloc_window(&self, pd: PdHandle, kind: WindowType) -> Result<u32> {
        self.new_window(pd, kind)
    }

    fn dealloc_window(&self, rkey: u32) -> Result<()> {
        self.end_window(rkey)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // First: a region with a bound window stays.
        self.free_windows();
        let library = self.context.library;
        let tables = self.tables.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for mr in tables.mrs.values() {
            // SAFETY: nobody can name it any more. What fails is the kernel's to clean up.
            let _: c_uint = unsafe { library.dereg_mr(mr.raw as *mut ibv_mr) } as c_uint;
        }
        for pd in tables.pds.values() {
            // SAFETY: as above.
            unsafe { library.dealloc_pd(pd.raw.0) };
        }
    }
}
