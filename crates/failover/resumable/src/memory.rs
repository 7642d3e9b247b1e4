//! Protection domains and memory regions over NICs that each have their own.
//!
//! [`LogicalMemory`] is the process's. A region is made on one NIC at once, its *default* NIC, and
//! the application is given the keys that it has there; on the other NICs it is registered in the
//! background, or when it is first needed. A NIC's view of it ([`LogicalMemory::of`]) is the
//! [`MemoryDomain`] of the contexts that are open on that NIC: since keys of different NICs may be
//! equal, each view has a key space of its own.
//!
//! While the default NIC lives, a key is the same above and below, and nothing is translated there.
//! A region that was made while its default NIC was dead has the keys of another; one whose default
//! NIC has died and was opened again has other keys there than above: then the space says so
//! ([`LogicalMemory::is_foreign`]).
//!
//! Deregistration takes the keys out of use first, and ends on every NIC before it returns: a
//! peer's key must not outlive the memory.
//!
//! Locks: a space → a region → a domain. A device is called with a region's lock held, so that the
//! background thread never registers what is being deregistered.

mod peers;
mod source;
mod space;
mod view;

use crate::lock;
use crate::prefetcher::Prefetcher;
use crate::Spawn;
use source::MrSource;
use space::Space;
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{
    Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
};
use unbroken_log::{tell, Level, Part};
use unbroken_types::{next_key_set, Access, PdHandle};
use unbroken_verbs::{Error, MemoryDomain, MrChange, MrKeys, Result};
use view::View;

/// Keys that a device may give in a row which the application has already for another region.
const MAX_TAKEN: usize = 64;

/// A protection domain.
struct Pd {
    users: u32,
    /// Its handle on each NIC that has needed it.
    on: Vec<Option<PdHandle>>,
}

/// A region.
pub(crate) struct Mr {
    /// What the application has.
    keys: MrKeys,
    /// Its default NIC.
    default: usize,
    state: Mutex<MrState>,
}

struct MrState {
    pd: PdHandle,
    source: MrSource,
    access: Access,
    on: Vec<Option<There>>,
    /// NICs that have refused it, by their index, since they were opened.
    refused: u64,
    /// A thread is to look at it before others.
    hurried: bool,
    /// It is being deregistered.
    gone: bool,
}

/// A region on one NIC.
#[derive(Clone, Copy)]
struct There {
    keys: MrKeys,
    /// In which opening of the NIC ([`NicKey`]).
    key_set: u16,
}

/// What a NIC that is open has.
#[derive(Clone)]
struct Open {
    domain: Arc<dyn MemoryDomain>,
    key_set: u16,
}

#[derive(Default)]
struct Nic {
    open: RwLock<Option<Open>>,
    /// Of the opening that is, or was the last.
    key_set: AtomicU16,
    /// The regions whose default NIC this is.
    space: RwLock<Space>,
    /// Some key of the space is not the NIC's own.
    foreign: Arc<AtomicBool>,
}

type Hook = Box<dyn Fn() + Send + Sync>;

/// The protection domains and regions of a process, over all its NICs.
pub struct LogicalMemory {
    nics: Vec<Nic>,
    pds: Mutex<HashMap<PdHandle, Pd>>,
    next_pd: AtomicU32,
    /// Grows with every change of what [`LogicalMemory::export`] gives.
    generation: AtomicU64,
    on_change: OnceLock<Hook>,
    /// On which NICs the regions of each are made ready; all while nothing is said.
    prepared: OnceLock<Vec<Vec<usize>>>,
    /// How many QPs whose program has the keys of one NIC are on another: all pairs.
    away: Vec<AtomicU32>,
    /// It was told that a NIC does not take a region.
    told_refused: AtomicBool,
    prefetcher: Prefetcher,
    own: Weak<LogicalMemory>,
}

fn read<T>(l: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    l.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(l: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    l.write().unwrap_or_else(PoisonError::into_inner)
}

impl LogicalMemory {
    /// Over so many NICs, none of which is open yet. Threads are started by `spawn`.
    pub fn new(nics: usize, spawn: Spawn) -> Arc<LogicalMemory> {
        Arc::new_cyclic(|own| LogicalMemory {
            nics: (0..nics).map(|_| Nic::default()).collect(),
            pds: Mutex::default(),
            next_pd: AtomicU32::new(1),
            generation: AtomicU64::new(0),
            on_change: OnceLock::new(),
            prepared: OnceLock::new(),
            away: (0..nics * nics).map(|_| AtomicU32::new(0)).collect(),
            told_refused: AtomicBool::new(false),
            prefetcher: Prefetcher::new(spawn),
            own: own.clone(),
        })
    }

    /// The view of the contexts that are open on a NIC.
    pub fn of(self: &Arc<Self>, nic: usize) -> Arc<dyn MemoryDomain> {
        Arc::new(View { all: self.clone(), nic })
    }

    /// On which other NICs the regions of each NIC's contexts are made ready beforehand, the best
    /// first; all, while this is not said. The first word stays.
    pub fn prepare(&self, on: Vec<Vec<usize>>) {
        let _ = self.prepared.set(on);
    }

    /// Has `hook` called whenever [`Self::export`] has news. The first hook stays. It may queue and
    /// wake, nothing else.
    pub fn set_change_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_change.set(Box::new(hook));
    }

    /// A NIC was opened, or opened again after its death: its handles of an earlier life are void.
    /// Regions come there in the background.
    pub fn attach(&self, nic: usize, domain: Arc<dyn MemoryDomain>) {
        *write(&self.nics[nic].open) = None;
        let next = |last| Some(next_key_set(last));
        let last = self.nics[nic].key_set.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        let key_set = next_key_set(last.unwrap_or_else(|last| last));
        lock(&self.pds).values_mut().for_each(|pd| pd.on[nic] = None);
        for mr in self.all() {
            let mut s = lock(&mr.state);
            s.on[nic] = None;
            s.refused &= !bit(nic);
        }
        *write(&self.nics[nic].open) = Some(Open { domain, key_set });
        self.changed();
        self.all().iter().for_each(|mr| self.fill_later(mr));
    }

    /// A NIC is closed: what it had is gone. Not so if it has been opened again meanwhile.
    pub fn detach(&self, nic: usize, domain: &Arc<dyn MemoryDomain>) {
        let mut there = write(&self.nics[nic].open);
        if there.as_ref().is_some_and(|there| Arc::ptr_eq(&there.domain, domain)) {
            *there = None;
        }
    }

    fn all(&self) -> Vec<Arc<Mr>> {
        self.nics
            .iter()
            .flat_map(|nic| read(&nic.space).by_lkey.values().cloned().collect::<Vec<_>>())
            .collect()
    }

    fn open(&self, nic: usize) -> Result<Open> {
        let open = read(&self.nics[nic].open).clone();
        open.ok_or_else(|| Error::device_gone(format!("NIC {nic} is not open")))
    }

    fn domain(&self, nic: usize) -> Result<Arc<dyn MemoryDomain>> {
        Ok(self.open(nic)?.domain)
    }

    fn changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        if let Some(hook) = self.on_change.get() {
            hook();
        }
    }

    // ---- what the QPs ask ----

    /// Whether local keys of this NIC's space must be translated for the NIC itself.
    #[inline]
    pub fn is_foreign(&self, default: usize) -> bool {
        self.nics[default].foreign.load(Ordering::Acquire)
    }

    /// The same for who asks with every post.
    pub(crate) fn foreign(&self, default: usize) -> Arc<AtomicBool> {
        self.nics[default].foreign.clone()
    }

    /// The local key on NIC `nic` of the region that the contexts of NIC `default` know by `lkey`.
    /// It is registered there now if it is not yet. EINVAL: there is no such region.
    pub fn lkey_on(&self, default: usize, lkey: u32, nic: usize) -> Result<u32> {
        let mr = self.find(default, lkey)?;
        let there = self.there(&lock(&mr.state), nic);
        match there {
            Some(there) => Ok(there.keys.lkey),
            None => self.fill(&mr, nic).map(|keys| keys.lkey),
        }
    }

    /// The handle of a protection domain on a NIC, made now if it has none.
    pub fn pd_on(&self, pd: PdHandle, nic: usize) -> Result<PdHandle> {
        let domain = self.domain(nic)?;
        let mut pds = lock(&self.pds);
        let entry = pds.get_mut(&pd).ok_or_else(|| no_pd(pd))?;
        match entry.on[nic] {
            Some(handle) => Ok(handle),
            None => Ok(*entry.on[nic].insert(domain.alloc_pd()?)),
        }
    }

    // ---- making and ending ----

    fn find(&self, default: usize, lkey: u32) -> Result<Arc<Mr>> {
        let found = read(&self.nics[default].space).by_lkey.get(&lkey).cloned();
        found.ok_or_else(|| Error::invalid(format!("no region has the local key {lkey:#x}")))
    }

    /// A region on a NIC, unless that was in an earlier opening.
    fn there(&self, s: &MrState, nic: usize) -> Option<There> {
        s.on[nic].filter(|there| there.key_set == self.key_set(nic))
    }

    fn fill_later(&self, mr: &Arc<Mr>) {
        self.prefetcher.put(&self.own, mr);
    }

    /// Registers a region on every NIC that is to be ready for it, as far as that goes.
    pub(crate) fn fill_prepared(&self, mr: &Arc<Mr>) {
        for nic in self.wanted_on(mr.default) {
            // A NIC that is dead, or full, is met again when the region is needed there.
            let _ = self.fill(mr, nic);
        }
        lock(&mr.state).hurried = false;
    }

    fn fill(&self, mr: &Arc<Mr>, nic: usize) -> Result<MrKeys> {
        let mut s = lock(&mr.state);
        if let Some(there) = self.there(&s, nic) {
            return Ok(there.keys);
        }
        if s.gone {
            return Err(Error::invalid("the region is being deregistered"));
        }
        // Under the region's lock: what belongs to a device that is being replaced must not be
        // noted after it was forgotten.
        let Open { domain, key_set } = self.open(nic)?;
        let pd = self.pd_on(s.pd, nic)?;
        let keys = match s.source.register(&*domain, pd, s.access) {
            Ok(keys) => keys,
            Err(e) => {
                if e.errno() != libc::EIO {
                    s.refused |= bit(nic);
                    self.tell_refused(nic, s.source.len(), &e);
                }
                return Err(e);
            }
        };
        s.refused &= !bit(nic);
        s.on[nic] = Some(There { keys, key_set });
        if nic == mr.default && keys != mr.keys {
            self.nics[nic].foreign.store(true, Ordering::Release);
        }
        drop(s);
        self.changed();
        Ok(keys)
    }

    /// A backup does not take a region that the program's NIC has taken: told once.
    #[cold]
    fn tell_refused(&self, nic: usize, len: u64, e: &Error) {
        if !self.told_refused.swap(true, Ordering::AcqRel) {
            let what = format_args!(
                "a region of {len} bytes cannot be registered on NIC {nic}, too, so queue pairs that \
                 use it cannot go there: {e}. Each backup pins all memory once more: raise the \
                 memlock limit (`ulimit -l`), or have fewer (UNBROKEN_BACKUPS)"
            );
            tell(Part::Nic, Level::Warn, what);
        }
    }

    fn reg(
        &self,
        default: usize,
        pd: PdHandle,
        source: MrSource,
        access: Access,
    ) -> Result<MrKeys> {
        self.use_pd(pd)?;
        // Where the default NIC is dead, another lends its keys.
        let count = self.nics.len();
        let mut result = Err(Error::device_gone("no NIC works"));
        for nic in (0..count).map(|k| (default + k) % count) {
            result = self.reg_on(nic, default, pd, &source, access);
            if !result.as_ref().is_err_and(|e| e.errno() == libc::EIO) {
                break;
            }
        }
        let mr = result.inspect_err(|_| self.unuse_pd(pd))?;
        self.changed();
        self.fill_later(&mr);
        Ok(mr.keys)
    }

    /// Makes a region on this NIC, with keys that no other region of the default NIC's space has.
    fn reg_on(
        &self,
        nic: usize,
        default: usize,
        pd: PdHandle,
        source: &MrSource,
        access: Access,
    ) -> Result<Arc<Mr>> {
        let Open { domain, key_set } = self.open(nic)?;
        let handle = self.pd_on(pd, nic)?;
        // Kept until another is found, so that a number is not given out again.
        let mut taken = Vec::new();
        let mut make = || loop {
            let keys = source.register(&*domain, handle, access)?;
            let mut space = write(&self.nics[default].space);
            if !space.is_free(keys) {
                taken.push(keys.lkey);
                if taken.len() > MAX_TAKEN {
                    return Err(Error::no_room("every key that the NIC gives is in use"));
                }
                continue;
            }
            let mut on = vec![None; self.nics.len()];
            on[nic] = Some(There { keys, key_set });
            let kept = source.keep().inspect_err(|_| drop(domain.dereg_mr(keys.lkey)))?;
            let state =
                MrState { pd, source: kept, access, on, refused: 0, hurried: false, gone: false };
            let mr = Arc::new(Mr { keys, default, state: Mutex::new(state) });
            space.insert(mr.clone());
            return Ok(mr);
        };
        let made = make();
        taken.into_iter().for_each(|lkey| drop(domain.dereg_mr(lkey)));
        if made.is_ok() && nic != default {
            self.nics[default].foreign.store(true, Ordering::Release);
        }
        made
    }

    fn rereg(&self, default: usize, lkey: u32, change: &MrChange) -> Result<()> {
        let mr = self.find(default, lkey)?;
        if !lock(&mr.state).source.can_change() {
            return Err(Error::invalid("a region of a dma-buf cannot be registered anew"));
        }
        if let Some(pd) = change.pd {
            self.use_pd(pd)?;
        }
        let mut s = lock(&mr.state);
        let done = self.rereg_everywhere(&mr, &mut s, change);
        let (old, new) = (s.pd, change.pd);
        if let (Ok(()), Some((addr, len))) = (&done, change.range) {
            s.source = MrSource::Range { addr, len, iova: addr };
        }
        if let (Ok(()), Some(access)) = (&done, change.access) {
            s.access = access;
        }
        if let (Ok(()), Some(pd)) = (&done, new) {
            s.pd = pd;
        }
        drop(s);
        if let Some(pd) = new {
            self.unuse_pd(if done.is_ok() { old } else { pd });
        }
        self.changed();
        done
    }

    /// First on the NIC that must agree; where another does not, the region is ended there and made
    /// anew later.
    fn rereg_everywhere(&self, mr: &Arc<Mr>, s: &mut MrState, change: &MrChange) -> Result<()> {
        let there: Vec<usize> = (0..self.nics.len()).filter(|nic| s.on[*nic].is_some()).collect();
        let first = there.iter().copied().find(|nic| *nic == mr.default).or(there.first().copied());
        let order =
            first.into_iter().chain(there.iter().copied().filter(|nic| Some(*nic) != first));
        for nic in order {
            let Some(There { keys, .. }) = s.on[nic] else { continue };
            let done = self.domain(nic).and_then(|domain| {
                let pd = change.pd.map(|pd| self.pd_on(pd, nic)).transpose()?;
                domain.rereg_mr(keys.lkey, &MrChange { pd, ..*change })
            });
            match done {
                Err(e) if Some(nic) == first && e.errno() != libc::EIO => return Err(e),
                Err(_) => {
                    s.on[nic] = None;
                    if let Ok(domain) = self.domain(nic) {
                        let _ = domain.dereg_mr(keys.lkey);
                    }
                    self.fill_later(mr);
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn dereg(&self, default: usize, lkey: u32) -> Result<()> {
        let mr = self.find(default, lkey)?;
        let mut s = lock(&mr.state);
        if s.gone {
            return Err(Error::invalid(format!("no region has the local key {lkey:#x}")));
        }
        s.gone = true;
        let order = (0..self.nics.len()).map(|k| (default + k) % self.nics.len());
        let mut ended = false;
        for nic in order {
            let (Some(There { keys, .. }), Ok(domain)) = (s.on[nic], self.domain(nic)) else {
                continue;
            };
            match domain.dereg_mr(keys.lkey) {
                // Something is bound to it: nothing has changed.
                Err(e) if !ended && e.errno() == libc::EBUSY => {
                    s.gone = false;
                    return Err(e);
                }
                // A NIC that is dead touches nothing any more.
                _ => (s.on[nic], ended) = (None, true),
            }
        }
        let pd = s.pd;
        drop(s);
        write(&self.nics[default].space).remove(lkey);
        self.unuse_pd(pd);
        self.changed();
        Ok(())
    }

    fn alloc_pd(&self) -> PdHandle {
        let mut pds = lock(&self.pds);
        loop {
            let pd = PdHandle(self.next_pd.fetch_add(1, Ordering::Relaxed));
            if let Entry::Vacant(free) = pds.entry(pd) {
                free.insert(Pd { users: 0, on: vec![None; self.nics.len()] });
                return pd;
            }
        }
    }

    fn dealloc_pd(&self, pd: PdHandle) -> Result<()> {
        let mut pds = lock(&self.pds);
        let users = pds.get(&pd).ok_or_else(|| no_pd(pd))?.users;
        if users > 0 {
            return Err(Error::new(
                libc::EBUSY,
                format!("the protection domain has {users} users: end these first"),
            ));
        }
        let on = pds.remove(&pd).map(|pd| pd.on).unwrap_or_default();
        drop(pds);
        for (nic, handle) in on.into_iter().enumerate() {
            if let (Some(handle), Ok(domain)) = (handle, self.domain(nic)) {
                let _ = domain.dealloc_pd(handle);
            }
        }
        Ok(())
    }

    pub(crate) fn use_pd(&self, pd: PdHandle) -> Result<()> {
        lock(&self.pds).get_mut(&pd).ok_or_else(|| no_pd(pd))?.users += 1;
        Ok(())
    }

    pub(crate) fn unuse_pd(&self, pd: PdHandle) {
        if let Some(entry) = lock(&self.pds).get_mut(&pd) {
            entry.users = entry.users.saturating_sub(1);
        }
    }
}

/// Of a NIC; none past 63, which a process does not have.
fn bit(nic: usize) -> u64 {
    1u64.checked_shl(nic as u32).unwrap_or(0)
}

fn no_pd(pd: PdHandle) -> Error {
    Error::invalid(format!("there is no protection domain {pd}"))
}
