//! A device that takes faults: what a program asks of it passes here first.
//!
//! What is ended (a QP, a region) is ended at the provider whatever faults there are, so that
//! nothing of the program's memory stays registered.

use crate::device::HostDevice;
use crate::faults::life::Life;
use crate::faults::seam_qp::SeamQp;
use std::os::fd::RawFd;
use std::sync::Arc;
use unbroken_types::{Access, Gid, PathAttr, PdHandle};
use unbroken_verbs::{
    Capabilities, CompChannel, Cq, Device, DeviceCounters, DeviceQp, IndirectEntry, Leftovers,
    LimitHook, MemoryDomain, MrChange, MrKeys, OverrunHook, PortAttr, QpInit, Result, ResumableQp,
    Srq, SrqAttr, WindowType,
};

/// See the module's text.
pub(crate) struct SeamDevice {
    inner: Arc<HostDevice>,
    life: Arc<Life>,
    memory: Arc<SeamMemory>,
}

impl SeamDevice {
    pub(crate) fn new(inner: Arc<HostDevice>, life: Arc<Life>) -> SeamDevice {
        let memory = Arc::new(SeamMemory { inner: inner.memory(), life: life.clone() });
        SeamDevice { inner, life, memory }
    }
}

impl Device for SeamDevice {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn gid(&self) -> Gid {
        self.inner.gid()
    }

    fn gid_index(&self) -> u8 {
        self.inner.gid_index()
    }

    fn check_path(&self, path: &PathAttr) -> Result<()> {
        self.inner.check_path(path)
    }

    fn port(&self, port: u8) -> Result<PortAttr> {
        self.life.check()?;
        self.inner.port(port)
    }

    fn alive(&self) -> bool {
        !self.life.is_dead() && self.inner.alive()
    }

    fn usable(&self) -> bool {
        self.alive() && !self.life.is_down() && self.inner.usable()
    }

    fn drain(&self) {
        self.inner.drain();
    }

    fn memory(&self) -> Arc<dyn MemoryDomain> {
        self.memory.clone()
    }

    fn create_channel(&self) -> Result<Arc<CompChannel>> {
        self.life.check()?;
        self.inner.create_channel()
    }

    fn create_cq(
        &self,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        self.life.check()?;
        self.inner.create_cq(entries, channel, on_overrun)
    }

    fn create_cq_on(
        &self,
        vector: u32,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        self.life.check()?;
        self.inner.create_cq_on(vector, entries, channel, on_overrun)
    }

    fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, on_limit: LimitHook) -> Result<Arc<Srq>> {
        self.life.check()?;
        self.inner.create_srq(pd, sizes, on_limit)
    }

    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>> {
        self.life.check()?;
        let inner = self.inner.create_qp(init)?;
        Ok(SeamQp::new(inner, &self.life, init))
    }

    fn create_holding_qp(&self, init: &QpInit) -> Result<Arc<dyn ResumableQp>> {
        self.inner.create_holding_qp(init)
    }

    fn counters(&self) -> DeviceCounters {
        self.inner.counters()
    }

    fn leftovers(&self) -> Leftovers {
        self.inner.leftovers()
    }
}

/// The regions of such a device.
struct SeamMemory {
    inner: Arc<dyn MemoryDomain>,
    life: Arc<Life>,
}

impl MemoryDomain for SeamMemory {
    fn alloc_pd(&self) -> Result<PdHandle> {
        self.life.check()?;
        self.inner.alloc_pd()
    }

    fn dealloc_pd(&self, pd: PdHandle) -> Result<()> {
        self.inner.dealloc_pd(pd)
    }

    fn use_pd(&self, pd: PdHandle) -> Result<()> {
        self.inner.use_pd(pd)
    }

    fn unuse_pd(&self, pd: PdHandle) {
        self.inner.unuse_pd(pd);
    }

    fn reg_mr(
        &self,
        pd: PdHandle,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys> {
        self.life.check()?;
        self.inner.reg_mr(pd, addr, len, iova, access)
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
        self.life.check()?;
        self.inner.reg_dmabuf_mr(pd, fd, offset, len, iova, access)
    }

    fn rereg_mr(&self, lkey: u32, change: &MrChange) -> Result<()> {
        self.life.check()?;
        self.inner.rereg_mr(lkey, change)
    }

    fn dereg_mr(&self, lkey: u32) -> Result<()> {
        self.inner.dereg_mr(lkey)
    }

    fn alloc_null_mr(&self, pd: PdHandle) -> Result<u32> {
        self.life.check()?;
        self.inner.alloc_null_mr(pd)
    }

    fn create_indirect(
        &self,
        pd: PdHandle,
        iova: u64,
        entries: &[IndirectEntry],
        access: Access,
    ) -> Result<MrKeys> {
        self.life.check()?;
        self.inner.create_indirect(pd, iova, entries, access)
    }

    fn update_entry(&self, key: u32, index: u32, entry: &IndirectEntry) -> Result<()> {
        self.inner.update_entry(key, index, entry)
    }

    fn alloc_window(&self, pd: PdHandle, kind: WindowType) -> Result<u32> {
        self.life.check()?;
        self.inner.alloc_window(pd, kind)
    }

    fn dealloc_window(&self, rkey: u32) -> Result<()> {
        self.inner.dealloc_window(rkey)
    }
}
