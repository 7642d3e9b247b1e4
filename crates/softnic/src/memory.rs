//! Registered memory: the only place that touches the application's bytes.
//!
//! One table serves all NICs of the process, so that a key is valid on each of them and outlives any of them. A key is
//! `index << 8 | generation`: a slot that is used again has another generation, so a stale key fails. Key 0 is never given out.
//!
//! Engines hold the table's read lock for a batch of packets ([`Domain::view`]); [`Domain::dereg_mr`] takes the write lock. So when
//! deregistration returns, no packet touches the memory any more, and none will.
//!
//! The application may read and write the memory while a packet is placed: as on hardware, it must not rely on what it sees there
//! before the completion.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use unbroken_roce::{AtomicOp, MemError, Memory};
use unbroken_types::Access;
use unbroken_verbs::{Error, MemoryDomain, MrKeys, Result};

/// Regions of a process.
pub(crate) const MAX_MRS: u32 = 1 << 20;
/// Protection domains of a process.
pub(crate) const MAX_PDS: u32 = 1 << 16;
/// Bytes of one region.
pub(crate) const MAX_MR_BYTES: u64 = 1 << 40;
/// A freed slot waits until this many others are free, so that its eight bits of generation last long.
const FREE_SLOTS_KEPT: usize = 64;

/// A slot of the table. `key` is 0 while the slot is free.
#[derive(Clone, Copy)]
struct Region {
    key: u32,
    pd: u32,
    start: u64,
    len: u64,
    iova: u64,
    access: Access,
    generation: u8,
}

#[derive(Default)]
struct Table {
    regions: Vec<Region>,
    free: VecDeque<u32>,
    /// Users (regions, QPs, SRQs) of each PD; `None` while the number is free. PD 0 is never given out.
    pds: Vec<Option<u32>>,
}

/// The registered memory of a process.
#[derive(Default)]
pub(crate) struct Domain {
    table: RwLock<Table>,
}

impl Domain {
    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The table for a batch of packets. Deregistration waits until the view is dropped.
    #[inline]
    pub(crate) fn view(&self) -> View<'_> {
        View(self.table.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Table {
    fn pd(&mut self, pd: u32) -> Result<&mut u32> {
        match self.pds.get_mut(pd as usize) {
            Some(Some(users)) => Ok(users),
            _ => Err(Error::invalid(format!("there is no protection domain {pd}"))),
        }
    }

    fn take_slot(&mut self) -> Result<u32> {
        if self.regions.is_empty() {
            // Slot 0 stays unused, so that key 0 is never valid.
            self.regions.push(Region::FREE);
        }
        let full = self.regions.len() as u32 >= MAX_MRS;
        if self.free.len() > FREE_SLOTS_KEPT || full {
            if let Some(i) = self.free.pop_front() {
                return Ok(i);
            }
        }
        if full {
            return Err(Error::no_room(format!("{MAX_MRS} memory regions are registered, which is the limit")));
        }
        self.regions.push(Region::FREE);
        Ok(self.regions.len() as u32 - 1)
    }

    #[inline]
    fn region(&self, key: u32) -> Option<&Region> {
        self.regions.get((key >> 8) as usize).filter(|r| r.key == key && key != 0)
    }
}

impl Region {
    const FREE: Region = Region { key: 0, pd: 0, start: 0, len: 0, iova: 0, access: Access::NONE, generation: 0 };
}

impl MemoryDomain for Domain {
    fn alloc_pd(&self) -> Result<u32> {
        let mut t = self.write();
        if t.pds.is_empty() {
            t.pds.push(None);
        }
        let free = t.pds.iter().skip(1).position(Option::is_none).map(|i| i + 1);
        let pd = match free {
            Some(i) => i,
            None if t.pds.len() < MAX_PDS as usize => {
                t.pds.push(None);
                t.pds.len() - 1
            }
            None => return Err(Error::no_room(format!("{MAX_PDS} protection domains exist, which is the limit"))),
        };
        t.pds[pd] = Some(0);
        Ok(pd as u32)
    }

    fn dealloc_pd(&self, pd: u32) -> Result<()> {
        let mut t = self.write();
        let users = *t.pd(pd)?;
        if users > 0 {
            return Err(Error::new(
                libc::EBUSY,
                format!("protection domain {pd} has {users} regions, QPs or SRQs: end them first"),
            ));
        }
        t.pds[pd as usize] = None;
        Ok(())
    }

    fn use_pd(&self, pd: u32) -> Result<()> {
        *self.write().pd(pd)? += 1;
        Ok(())
    }

    fn unuse_pd(&self, pd: u32) {
        if let Ok(users) = self.write().pd(pd) {
            *users = users.saturating_sub(1);
        }
    }

    fn reg_mr(&self, pd: u32, addr: u64, len: u64, iova: u64, access: Access) -> Result<MrKeys> {
        let remote = access.contains(Access::REMOTE_WRITE) || access.contains(Access::REMOTE_ATOMIC);
        if remote && !access.contains(Access::LOCAL_WRITE) {
            return Err(Error::invalid("a region with remote write or atomic access needs IBV_ACCESS_LOCAL_WRITE too"));
        }
        if len > MAX_MR_BYTES || addr.checked_add(len).is_none() || iova.checked_add(len).is_none() {
            return Err(Error::invalid(format!(
                "a region of {len} bytes at {addr:#x} (iova {iova:#x}) does not fit the address space"
            )));
        }
        populate(addr, len, access.contains(Access::LOCAL_WRITE))?;
        let mut t = self.write();
        t.pd(pd)?;
        let i = t.take_slot()?;
        *t.pd(pd)? += 1;
        let r = &mut t.regions[i as usize];
        r.generation = r.generation.wrapping_add(1);
        let key = i << 8 | u32::from(r.generation);
        *r = Region { key, pd, start: addr, len, iova, access, generation: r.generation };
        Ok(MrKeys { lkey: key, rkey: key })
    }

    fn dereg_mr(&self, lkey: u32) -> Result<()> {
        let mut t = self.write();
        let Some(&Region { pd, .. }) = t.region(lkey) else {
            return Err(Error::invalid(format!("there is no memory region with key {lkey:#x}")));
        };
        t.regions[(lkey >> 8) as usize].key = 0;
        t.free.push_back(lkey >> 8);
        if let Ok(users) = t.pd(pd) {
            *users -= 1;
        }
        Ok(())
    }
}

/// Faults the pages in, as pinning does on hardware: an address that is not mapped fails here and not in the middle of a packet.
fn populate(addr: u64, len: u64, writable: bool) -> Result<()> {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let start = addr & !(page - 1);
    let bytes = addr + len - start;
    if len == 0 {
        return Ok(());
    }
    let advice = if writable { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    // SAFETY: populating changes no content; a range that is not mapped gives an error and nothing else.
    if unsafe { libc::madvise(start as *mut libc::c_void, bytes as usize, advice) } == 0 {
        return Ok(());
    }
    let err = std::io::Error::last_os_error();
    match err.raw_os_error() {
        // Kernels before 5.14 and special mappings cannot populate; the region works all the same.
        Some(libc::EINVAL | libc::EINTR | libc::EAGAIN) => Ok(()),
        _ => Err(Error::new(
            libc::EFAULT,
            format!(
                "memory region of {len} bytes at {addr:#x}: not mapped{}: {err}",
                if writable { " or not writable" } else { "" }
            ),
        )),
    }
}

/// The table while a batch of packets is handled.
pub(crate) struct View<'a>(RwLockReadGuard<'a, Table>);

impl View<'_> {
    /// Where `len` bytes at `va` of the region `key` are. A length of 0 needs no region at all.
    #[inline]
    pub(crate) fn locate(
        &self,
        pd: u32,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> std::result::Result<*mut u8, MemError> {
        if len == 0 {
            return Ok(std::ptr::dangling_mut());
        }
        let r = self.0.region(key).ok_or(MemError::NoSuchKey)?;
        if r.pd != pd {
            return Err(MemError::WrongPd);
        }
        if !r.access.contains(need) {
            return Err(MemError::AccessDenied);
        }
        let off = va.wrapping_sub(r.iova);
        if va < r.iova || off > r.len || len > r.len - off {
            return Err(MemError::OutOfBounds);
        }
        Ok((r.start + off) as *mut u8)
    }
}

impl Memory for View<'_> {
    #[inline]
    fn check(&self, pd: u32, key: u32, va: u64, len: u64, need: Access) -> std::result::Result<(), MemError> {
        self.locate(pd, key, va, len, need).map(|_| ())
    }

    #[inline]
    fn write(&self, pd: u32, key: u32, va: u64, data: &[u8], need: Access) -> std::result::Result<(), MemError> {
        let to = self.locate(pd, key, va, data.len() as u64, need)?;
        // SAFETY: `locate` gave an address with `data.len()` bytes inside a region that the application registered and promised to
        // keep mapped until it is deregistered, which waits for this view. `data` is a packet buffer, never registered memory.
        // The application may race with the copy, as it may with a NIC's DMA.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    #[inline]
    fn read(&self, pd: u32, key: u32, va: u64, out: &mut [u8], need: Access) -> std::result::Result<(), MemError> {
        let from = self.locate(pd, key, va, out.len() as u64, need)?;
        // SAFETY: as in `write`, with the direction turned round.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn atomic(&self, pd: u32, key: u32, va: u64, op: AtomicOp) -> std::result::Result<u64, MemError> {
        let at = self.locate(pd, key, va, 8, Access::REMOTE_ATOMIC)?;
        if at as usize % 8 != 0 {
            return Err(MemError::Misaligned);
        }
        // SAFETY: `locate` gave eight bytes of a region as in `write`, and they are aligned. What else is done to them at the same
        // time by atomic instructions, here or in the application, is ordered by the processor.
        let word = unsafe { AtomicU64::from_ptr(at.cast()) };
        Ok(match op {
            AtomicOp::FetchAdd(add) => word.fetch_add(add, Ordering::AcqRel),
            AtomicOp::CompareSwap { compare, swap } => {
                match word.compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(found) | Err(found) => found,
                }
            }
        })
    }
}
