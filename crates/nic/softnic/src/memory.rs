//! Registered memory: the only place that touches the application's bytes.
//!
//! One table serves all NICs of the process, so that a key is valid on each of them and outlives
//! any of them. Keys are drawn from the operating system's randomness, all 32 bits, so that nobody
//! can guess one from others: see [`slots`]. A stale key fails.
//!
//! A plain NIC has a table of its own ([`Domain::plain`]). The key that its peers use for a region
//! differs from the local one in bits that are the table's, the highest among them, which no local
//! key has. So neither is good in the other's place. Its numbers of protection domains are no other
//! table's.
//!
//! Null regions, indirect keys and memory windows have slots in the same table; see [`special`]. A
//! window's key changes with each binding, in its lower eight bits, which are therefore 0 at first
//! and no secret. Packets touch memory through a [`View`].
//!
//! Engines hold the table's read lock for a batch of packets ([`Domain::view`]);
//! [`Domain::dereg_mr`] takes the write lock. So when deregistration returns, no packet touches the
//! memory any more, and none will.
//!
//! The application may read and write the memory while a packet is placed: as on hardware, it must
//! not rely on what it sees there before the completion.

mod slots;
mod special;
#[cfg(test)]
mod tests;
mod view;

use crate::traps;
use rustix::io::Errno;
use rustix::mm::{madvise, Advice};
use rustix::rand::{getrandom, GetRandomFlags};
use slots::{Slots, ANY_BITS, PREFIX_BITS};
use special::{Indirect, Special, Window};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};
use unbroken_roce::MemError;
use unbroken_types::{Access, PdHandle};
use unbroken_verbs::{Error, IndirectEntry, MemoryDomain, MrChange, MrKeys, Result, WindowType};
pub(crate) use view::{QpMemory, View};

/// Regions of a process.
pub(crate) const MAX_MRS: u32 = 1 << 20;
/// Protection domains of a process.
pub(crate) const MAX_PDS: u32 = 1 << 16;
/// Entries of one indirect key.
pub(crate) const MAX_INDIRECT_ENTRIES: usize = 1 << 20;
/// Bytes of one region.
pub(crate) const MAX_MR_BYTES: u64 = 1 << 40;
/// In a plain NIC's table: the keys that peers use have this bit, the local ones have not.
const REMOTE_BIT: u32 = 1 << 31;

/// What a slot of the table holds. `key` is 0 while the slot is free or holds something special.
struct Region {
    key: u32,
    /// 0 while the slot is free.
    pd: PdHandle,
    start: u64,
    len: u64,
    iova: u64,
    access: Access,
    /// The upper 24 bits of its key, or of the last one while the slot is free; 0 before the first.
    prefix: u32,
    /// Memory windows that are bound to it.
    windows: AtomicU32,
    special: Option<Box<Special>>,
}

#[derive(Default)]
struct Table {
    slots: Slots,
    /// What the keys that peers use differ in from the local ones, which have their places in
    /// `slots`; 0: in nothing.
    remote: u32,
    /// Users (regions, QPs, SRQs) of each PD, from `first_pd` on; `None` while the number is free.
    /// PD 0 is never given out. Users are counted under the read lock, so that making a QP waits
    /// for no engine, and read under the write lock.
    pds: Vec<Option<AtomicU32>>,
    first_pd: u32,
    /// It is a plain NIC's, which has died: nothing new is made.
    dead: bool,
}

/// The registered memory of a process, or of a plain NIC.
#[derive(Default)]
pub(crate) struct Domain {
    table: RwLock<Table>,
}

impl Domain {
    /// That of a plain NIC.
    pub(crate) fn plain() -> Result<Domain> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mut chance = [0; 4];
        getrandom(&mut chance, GetRandomFlags::empty())
            .map_err(|e| Error::os("getrandom", &e.into()))?;
        // Windows choose the lower eight bits of their keys.
        let remote = u32::from_ne_bytes(chance) & PREFIX_BITS | REMOTE_BIT;
        // All bits of it but the place of a PD; after 65,535 NICs the numbers come again.
        let first_pd = (COUNT.fetch_add(1, Relaxed) % (MAX_PDS - 1) + 1) * MAX_PDS;
        Ok(Domain { table: RwLock::new(Table { remote, first_pd, ..Table::default() }) })
    }

    /// The NIC that it belongs to has died: what there is can be ended, and nothing is made any
    /// more.
    pub(crate) fn die(&self) {
        self.write().dead = true;
    }

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
    fn pd(&self, pd: PdHandle) -> Result<&AtomicU32> {
        match self.pds.get(pd.0.wrapping_sub(self.first_pd) as usize) {
            Some(Some(users)) => Ok(users),
            _ => Err(Error::invalid(format!("there is no protection domain {pd}"))),
        }
    }

    /// Whether it is a plain NIC's.
    fn is_plain(&self) -> bool {
        self.remote != 0
    }

    /// The same key under the name that peers know it by, or the local one where this is the
    /// peers'.
    #[inline]
    fn other_name(&self, key: u32) -> u32 {
        key ^ self.remote
    }

    /// The local name of a key that is used as `need` says.
    #[inline]
    fn local_name(&self, key: u32, need: Access) -> u32 {
        if need.intersects(Access::REMOTE) {
            self.other_name(key)
        } else {
            key
        }
    }

    fn keys(&self, key: u32) -> MrKeys {
        MrKeys { lkey: key, rkey: self.other_name(key) }
    }

    fn check_alive(&self) -> Result<()> {
        match self.dead {
            true => Err(Error::device_gone("the NIC that this would belong to is dead")),
            false => Ok(()),
        }
    }

    /// EOPNOTSUPP on a plain NIC.
    fn check_indirect(&self) -> Result<()> {
        match self.is_plain() {
            true => Err(Error::unsupported("indirect keys: this device has plain verbs only")),
            false => Ok(()),
        }
    }

    /// Puts something new into a free slot and gives its local key, which has only bits of `bits`.
    fn insert(&mut self, pd: PdHandle, bits: u32, make: impl FnOnce(u32) -> Region) -> Result<u32> {
        self.check_alive()?;
        self.pd(pd)?;
        let key = self.slots.draw(if self.is_plain() { bits & !REMOTE_BIT } else { bits })?;
        self.pd(pd)?.fetch_add(1, Relaxed);
        self.slots.put(key, Region { pd, prefix: key >> 8, ..make(key) });
        Ok(key)
    }

    /// Frees the slot of a key.
    fn remove(&mut self, key: u32) {
        let pd = self.slots.take(key).pd;
        if let Ok(users) = self.pd(pd) {
            users.fetch_sub(1, Relaxed);
        }
    }

    #[inline]
    fn region(&self, key: u32) -> Option<&Region> {
        self.slots.home(key).filter(|r| r.key == key && key != 0)
    }

    fn indirect(&self, key: u32) -> Option<(&Region, &Indirect)> {
        let r = self.slots.named(key)?;
        match r.special.as_deref()? {
            Special::Indirect(root) if root.key == key => Some((r, root)),
            _ => None,
        }
    }

    /// The window of any key that it has or had, by its local name.
    fn window(&self, key: u32) -> Option<&Window> {
        match self.slots.named(key)?.special.as_deref()? {
            Special::Window(w) => Some(w),
            _ => None,
        }
    }

    /// Checks an entry of an indirect key: it must name memory of the domain that may be used as
    /// the root's rights say, or null.
    fn check_entry(
        &self,
        pd: PdHandle,
        index: usize,
        e: &IndirectEntry,
        access: Access,
    ) -> Result<()> {
        let need =
            if access.contains(Access::LOCAL_WRITE) { Access::LOCAL_WRITE } else { Access::NONE };
        match self.entry_piece(pd, e.lkey, e.addr, e.len, need) {
            Ok(_) => Ok(()),
            Err(MemError::NotInOnePiece) => Err(Error::invalid(format!(
                "entry {index}: key {:#x} is itself indirect or a window; a plain region or the \
                 null region is possible",
                e.lkey
            ))),
            Err(why) => Err(Error::invalid(format!(
                "entry {index} (key {:#x}, {} bytes): {why}",
                e.lkey, e.len
            ))),
        }
    }
}

impl Region {
    /// A free slot.
    const fn free() -> Region {
        Region {
            key: 0,
            pd: PdHandle::NONE,
            start: 0,
            len: 0,
            iova: 0,
            access: Access::NONE,
            prefix: 0,
            windows: AtomicU32::new(0),
            special: None,
        }
    }

    /// How far in it `len` bytes at `va` begin.
    #[inline]
    fn offset(
        &self,
        pd: PdHandle,
        va: u64,
        len: u64,
        need: Access,
    ) -> std::result::Result<u64, MemError> {
        if self.pd != pd {
            return Err(MemError::WrongPd);
        }
        if !self.access.contains(need) {
            return Err(MemError::AccessDenied);
        }
        let off = va.wrapping_sub(self.iova);
        if va < self.iova || off > self.len || len > self.len - off {
            return Err(MemError::OutOfBounds);
        }
        Ok(off)
    }

    /// EBUSY while memory windows are bound to it.
    fn no_windows(&self) -> Result<()> {
        match self.windows.load(Relaxed) {
            0 => Ok(()),
            n => Err(Error::new(
                libc::EBUSY,
                format!(
                    "{n} memory windows are bound to region {:#x}: unbind or free them first",
                    self.key
                ),
            )),
        }
    }
}

/// Checks the rights of a region or an indirect key.
fn check_access(access: Access) -> Result<()> {
    let remote = access.intersects(Access::REMOTE_WRITE.with(Access::REMOTE_ATOMIC));
    if remote && !access.contains(Access::LOCAL_WRITE) {
        return Err(Error::invalid(
            "a region with remote write or atomic access needs IBV_ACCESS_LOCAL_WRITE too",
        ));
    }
    Ok(())
}

/// Checks where a region lies.
fn check_range(addr: u64, len: u64, iova: u64) -> Result<()> {
    if len > MAX_MR_BYTES || addr.checked_add(len).is_none() || iova.checked_add(len).is_none() {
        return Err(Error::invalid(format!(
            "a region of {len} bytes at {addr:#x} (iova {iova:#x}) does not fit the address space"
        )));
    }
    Ok(())
}

impl MemoryDomain for Domain {
    fn alloc_pd(&self) -> Result<PdHandle> {
        let mut t = self.write();
        t.check_alive()?;
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
            None => {
                return Err(Error::no_room(format!(
                    "{MAX_PDS} protection domains exist, which is the limit"
                )))
            }
        };
        t.pds[pd] = Some(AtomicU32::new(0));
        Ok(PdHandle(t.first_pd + pd as u32))
    }

    fn dealloc_pd(&self, pd: PdHandle) -> Result<()> {
        let mut t = self.write();
        let users = t.pd(pd)?.load(Relaxed);
        if users > 0 {
            return Err(Error::new(
                libc::EBUSY,
                format!(
                    "protection domain {pd} has {users} regions, windows, QPs or SRQs: end them \
                     first"
                ),
            ));
        }
        let place = (pd.0 - t.first_pd) as usize;
        t.pds[place] = None;
        Ok(())
    }

    fn use_pd(&self, pd: PdHandle) -> Result<()> {
        self.view().0.pd(pd)?.fetch_add(1, Relaxed);
        Ok(())
    }

    fn unuse_pd(&self, pd: PdHandle) {
        if let Ok(users) = self.view().0.pd(pd) {
            let _ = users.fetch_update(Relaxed, Relaxed, |users| users.checked_sub(1));
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
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        let access = access.difference(Access::ADVICE);
        check_access(access)?;
        check_range(addr, len, iova)?;
        populate(addr, len, access.contains(Access::LOCAL_WRITE))?;
        let make = |key| Region { key, start: addr, len, iova, access, ..Region::free() };
        let mut t = self.write();
        let key = t.insert(pd, ANY_BITS, make)?;
        Ok(t.keys(key))
    }

    fn rereg_mr(&self, lkey: u32, change: &MrChange) -> Result<()> {
        let no_region = || Error::invalid(format!("there is no memory region with key {lkey:#x}"));
        let (mut start, mut len, mut access) = {
            let t = self.view();
            let r = t.0.region(lkey).ok_or_else(no_region)?;
            (r.start, r.len, r.access)
        };
        access = change.access.unwrap_or(access).difference(Access::ADVICE);
        (start, len) = change.range.unwrap_or((start, len));
        check_access(access)?;
        check_range(start, len, start)?;
        if change.range.is_some() || change.access.is_some() {
            populate(start, len, access.contains(Access::LOCAL_WRITE))?;
        }
        let mut t = self.write();
        t.check_alive()?;
        let old = t.region(lkey).ok_or_else(no_region)?;
        old.no_windows()?;
        let old_pd = old.pd;
        let pd = change.pd.unwrap_or(old_pd);
        t.pd(pd)?.fetch_add(1, Relaxed);
        if let Ok(users) = t.pd(old_pd) {
            users.fetch_sub(1, Relaxed);
        }
        let r = t.slots.home_mut(lkey);
        (r.pd, r.access) = (pd, access);
        if change.range.is_some() {
            (r.start, r.len) = (start, len);
            r.iova = if access.contains(Access::ZERO_BASED) { 0 } else { start };
        }
        Ok(())
    }

    fn dereg_mr(&self, lkey: u32) -> Result<()> {
        let mut t = self.write();
        match t.region(lkey) {
            Some(r) => r.no_windows()?,
            None if t.why_not_plain(lkey) == MemError::NotInOnePiece
                && t.window(lkey).is_none() => {}
            None => {
                return Err(Error::invalid(format!("there is no memory region with key {lkey:#x}")))
            }
        }
        t.remove(lkey);
        Ok(())
    }

    fn alloc_null_mr(&self, pd: PdHandle) -> Result<u32> {
        let null = |key| Some(Box::new(Special::Null { key }));
        self.write().insert(pd, ANY_BITS, |key| Region { special: null(key), ..Region::free() })
    }

    fn create_indirect(
        &self,
        pd: PdHandle,
        iova: u64,
        entries: &[IndirectEntry],
        access: Access,
    ) -> Result<MrKeys> {
        check_access(access)?;
        if entries.is_empty() || entries.len() > MAX_INDIRECT_ENTRIES {
            return Err(Error::invalid(format!(
                "an indirect key with {} entries: 1 to {MAX_INDIRECT_ENTRIES} are possible",
                entries.len()
            )));
        }
        let len =
            entries.iter().try_fold(0u64, |sum, e| sum.checked_add(e.len)).unwrap_or(u64::MAX);
        check_range(0, len, iova)?;
        let mut t = self.write();
        t.check_indirect()?;
        for (i, e) in entries.iter().enumerate() {
            t.check_entry(pd, i, e, access)?;
        }
        let key = t.insert(pd, ANY_BITS, |key| {
            let special = Some(Box::new(Special::Indirect(Indirect::new(key, entries))));
            Region { len, iova, access, special, ..Region::free() }
        })?;
        Ok(t.keys(key))
    }

    fn update_entry(&self, key: u32, index: u32, entry: &IndirectEntry) -> Result<()> {
        let t = self.view();
        t.0.check_indirect()?;
        let (r, root) =
            t.0.indirect(key)
                .ok_or_else(|| Error::invalid(format!("there is no indirect key {key:#x}")))?;
        let place = root.place(index as usize).ok_or_else(|| {
            Error::invalid(format!(
                "entry {index}: indirect key {key:#x} has {} (count from 0)",
                root.ends.len()
            ))
        })?;
        if entry.len > place {
            return Err(Error::invalid(format!(
                "entry {index} of indirect key {key:#x} has room for {place} bytes, not {}",
                entry.len
            )));
        }
        t.0.check_entry(r.pd, index as usize, entry, r.access)?;
        root.set(index as usize, *entry);
        Ok(())
    }

    fn alloc_window(&self, pd: PdHandle, kind: WindowType) -> Result<u32> {
        let mut t = self.write();
        let key = t.insert(pd, PREFIX_BITS, |key| Region {
            special: Some(Box::new(Special::Window(Window::new(kind, key)))),
            ..Region::free()
        })?;
        // Peers alone use it.
        Ok(t.other_name(key))
    }

    fn dealloc_window(&self, rkey: u32) -> Result<()> {
        let mut t = self.write();
        let Some(w) = t.window(t.other_name(rkey)) else {
            return Err(Error::invalid(format!("there is no memory window with key {rkey:#x}")));
        };
        w.unbind(&t);
        let key = w.key();
        t.remove(key);
        Ok(())
    }
}

/// Faults the pages in, as pinning does on hardware: an address that is not mapped fails here and
/// not in the middle of a packet. By a direct system call: see [`unbroken_process::spawn`].
fn populate(addr: u64, len: u64, writable: bool) -> Result<()> {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let start = addr & !(page - 1);
    let bytes = addr + len - start;
    if len == 0 {
        return Ok(());
    }
    let advice = if writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    let refused = |why: &dyn std::fmt::Display| {
        let not =
            if writable { "not mapped, or not writable" } else { "not mapped, or not readable" };
        Error::new(libc::EFAULT, format!("memory region of {len} bytes at {addr:#x}: {not}: {why}"))
    };
    // SAFETY: populating changes no content; a range that is not mapped gives an error and nothing
    // else.
    match unsafe { madvise(start as *mut std::ffi::c_void, bytes as usize, advice) } {
        Ok(()) => {
            traps::install();
            Ok(())
        }
        // Kernels before 5.14 cannot populate, and none can special mappings, nor what must not be
        // read or written so: each page is tried.
        Err(Errno::INVAL | Errno::INTR | Errno::AGAIN) => {
            traps::touch(start, bytes, page, writable)
                .map_err(|_| refused(&"a page cannot be accessed so"))
        }
        Err(err) => Err(refused(&err)),
    }
}
