//! What the contexts of one NIC see of the memory over all.

use super::source::{Descriptor, MrSource};
use super::LogicalMemory;
use std::os::fd::RawFd;
use std::sync::Arc;
use unbroken_types::{Access, PdHandle};
use unbroken_verbs::{Error, IndirectEntry, MemoryDomain, MrChange, MrKeys, Result, WindowType};

/// See the module's text.
pub(super) struct View {
    pub(super) all: Arc<LogicalMemory>,
    pub(super) nic: usize,
}

impl MemoryDomain for View {
    fn alloc_pd(&self) -> Result<PdHandle> {
        Ok(self.all.alloc_pd())
    }

    fn dealloc_pd(&self, pd: PdHandle) -> Result<()> {
        self.all.dealloc_pd(pd)
    }

    fn use_pd(&self, pd: PdHandle) -> Result<()> {
        self.all.use_pd(pd)
    }

    fn unuse_pd(&self, pd: PdHandle) {
        self.all.unuse_pd(pd);
    }

    fn reg_mr(
        &self,
        pd: PdHandle,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys> {
        self.all.reg(self.nic, pd, MrSource::Range { addr, len, iova }, access)
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
        let source = MrSource::Dmabuf { fd: Descriptor::Caller(fd), offset, len, iova };
        self.all.reg(self.nic, pd, source, access)
    }

    fn rereg_mr(&self, lkey: u32, change: &MrChange) -> Result<()> {
        self.all.rereg(self.nic, lkey, change)
    }

    fn dereg_mr(&self, lkey: u32) -> Result<()> {
        self.all.dereg(self.nic, lkey)
    }

    fn alloc_null_mr(&self, _pd: PdHandle) -> Result<u32> {
        Err(unsupported("null regions"))
    }

    fn create_indirect(
        &self,
        _: PdHandle,
        _: u64,
        _: &[IndirectEntry],
        _: Access,
    ) -> Result<MrKeys> {
        Err(unsupported("indirect keys"))
    }

    fn update_entry(&self, _key: u32, _index: u32, _entry: &IndirectEntry) -> Result<()> {
        Err(unsupported("indirect keys"))
    }

    fn alloc_window(&self, _pd: PdHandle, _kind: WindowType) -> Result<u32> {
        Err(unsupported("memory windows"))
    }

    fn dealloc_window(&self, _rkey: u32) -> Result<()> {
        Err(unsupported("memory windows"))
    }
}

fn unsupported(what: &str) -> Error {
    Error::unsupported(format!("{what} are not there on devices that have plain verbs only"))
}
