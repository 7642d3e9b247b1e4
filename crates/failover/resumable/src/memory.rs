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
//! NIC has died and was opened again has other keys there than above: as long as such a region lives
//! the space says so ([`LogicalMemory::is_foreign`]).
//!
//! Deregistration takes the keys out of use first, and ends on every NIC that answers before it
//! returns: a peer's key must not outlive the memory. On a NIC that answers no command it ends when
//! the NIC does ([`Commands`]); no QP of ours that a peer is connected to is on it by then. What is
//! being registered meanwhile is ended by whoever does that: nobody knows its key yet.
//!
//! Locks: a space → a region. No device is called with a lock held that another NIC's work needs:
//! whoever registers a region marks that it comes, and others wait for that.

mod nic_pd;
mod openings;
mod peers;
mod source;
mod space;
mod view;

use crate::commands::Commands;
use crate::lock;
use crate::prefetcher::Prefetcher;
use crate::Spawn;
use source::MrSource;
use space::Space;
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{
    mpsc, Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard,
    RwLockWriteGuard, Weak,
};
use std::time::Duration;
use unbroken_log::{tell, Level, Part};
use unbroken_types::{Access, PdHandle, FIRST_KEY_SET};
use unbroken_verbs::{Error, MemoryDomain, MrChange, MrKeys, Result};
use view::View;

pub(crate) use nic_pd::NicPd;

/// Keys that a device may give in a row which the application has already for another region.
const MAX_TAKEN: usize = 64;

/// Of the end of a region on a NIC that the program has not named: longer than any takes that
/// answers.
const DEREG_TIME: Duration = Duration::from_secs(1);

/// A protection domain.
struct Pd {
    users: u32,
    /// The NICs' own, of each that has needed it.
    on: Vec<Option<Arc<NicPd>>>,
}

/// A region.
pub(crate) struct Mr {
    /// What the application has.
    keys: MrKeys,
    /// Its default NIC.
    default: usize,
    /// The opening of that NIC that gave the keys; 0: another NIC gave them.
    key_set: u16,
    state: Mutex<MrState>,
    /// A NIC has been asked to register it, and has answered.
    answered: Condvar,
}

struct MrState {
    pd: PdHandle,
    source: Arc<MrSource>,
    access: Access,
    on: Vec<Option<There>>,
    /// The opening of each NIC that is being asked to register it; 0: none is.
    comes: Vec<u16>,
    /// NICs that have refused it, by their index, since they were opened.
    refused: u64,
    /// A thread is to look at it before others.
    hurried: bool,
    /// It is being deregistered.
    gone: bool,
}

/// A region on one NIC.
#[derive(Clone)]
struct There {
    keys: MrKeys,
    /// In which opening of the NIC ([`NicKey`]).
    key_set: u16,
    /// The domain in which it is.
    pd: Arc<NicPd>,
}

/// What a NIC that is open has.
#[derive(Clone)]
struct Open {
    domain: Arc<dyn MemoryDomain>,
    commands: Arc<Commands>,
    key_set: u16,
}

#[derive(Default)]
struct Nic {
    open: RwLock<Option<Open>>,
    /// Of the opening that is, or was the last.
    key_set: AtomicU16,
    /// The key set of the last opening that ended because the kernel removed the device. Regions
    /// and domains that a thread is still creating for it are dropped, not stored.
    released: AtomicU16,
    /// The regions whose default NIC this is.
    space: RwLock<Space>,
    /// Some key of the space is not the NIC's own. It changes with the space's lock held.
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

    /// A NIC's own protection domain for one of the application's, made now if it has none.
    pub(crate) fn pd_on(&self, pd: PdHandle, nic: usize) -> Result<Arc<NicPd>> {
        let found = lock(&self.pds).get(&pd).ok_or_else(|| no_pd(pd))?.on[nic].clone();
        if let Some(found) = found {
            return Ok(found);
        }
        let Open { domain, commands, key_set } = self.open(nic)?;
        let made = Arc::new(NicPd::new(domain, commands)?);
        let mut pds = lock(&self.pds);
        let entry = pds.get_mut(&pd).ok_or_else(|| no_pd(pd))?;
        if !self.is_kept(nic, key_set) {
            return Err(Error::device_gone(format!("NIC {nic} was closed or opened again")));
        }
        // Another thread may have made one meanwhile; ours ends with no lock held.
        let kept = entry.on[nic].get_or_insert_with(|| made.clone()).clone();
        drop(pds);
        Ok(kept)
    }

    // ---- making and ending ----

    fn find(&self, default: usize, lkey: u32) -> Result<Arc<Mr>> {
        let found = read(&self.nics[default].space).by_lkey.get(&lkey).cloned();
        found.ok_or_else(|| Error::invalid(format!("no region has the local key {lkey:#x}")))
    }

    /// A region on a NIC, unless that was in an earlier opening.
    fn there(&self, s: &MrState, nic: usize) -> Option<There> {
        s.on[nic].clone().filter(|there| there.key_set == self.key_set(nic))
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

    /// The region's state once that opening of a NIC is not being asked to register it.
    fn settled<'a>(mr: &'a Mr, nic: usize, key_set: u16) -> MutexGuard<'a, MrState> {
        let comes = |s: &mut MrState| s.comes[nic] == key_set;
        let settled = mr.answered.wait_while(lock(&mr.state), comes);
        settled.unwrap_or_else(PoisonError::into_inner)
    }

    fn fill(&self, mr: &Arc<Mr>, nic: usize) -> Result<MrKeys> {
        let Open { domain, key_set, .. } = self.open(nic)?;
        let mut s = LogicalMemory::settled(mr, nic, key_set);
        if let Some(there) = self.there(&s, nic) {
            return Ok(there.keys);
        }
        if s.gone {
            return Err(Error::invalid("the region is being deregistered"));
        }
        s.comes[nic] = key_set;
        let (source, pd, access) = (s.source.clone(), s.pd, s.access);
        drop(s);
        let made = self.pd_on(pd, nic).and_then(|pd| {
            let keys = source.register(&*domain, pd.handle(), access)?;
            Ok(There { keys, key_set, pd })
        });
        let mut s = lock(&mr.state);
        if s.comes[nic] == key_set {
            s.comes[nic] = 0;
        }
        let useless = s.gone || !self.is_kept(nic, key_set);
        match &made {
            Err(e) if e.errno() != libc::EIO => {
                s.refused |= bit(nic);
                self.tell_refused(nic, source.len(), e);
            }
            Ok(there) if !useless => {
                s.refused &= !bit(nic);
                s.on[nic] = Some(there.clone());
            }
            _ => {}
        }
        drop(s);
        mr.answered.notify_all();
        let there = made?;
        if useless {
            let _ = domain.dereg_mr(there.keys.lkey);
            return Err(Error::invalid("the region, or its NIC, has ended meanwhile"));
        }
        self.changed();
        Ok(there.keys)
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
        let Open { domain, key_set, .. } = self.open(nic)?;
        let own_pd = self.pd_on(pd, nic)?;
        // Kept until another is found, so that a number is not given out again.
        let mut taken = Vec::new();
        let mut make = || loop {
            let keys = source.register(&*domain, own_pd.handle(), access)?;
            let mut space = write(&self.nics[default].space);
            if !space.is_free(keys) {
                taken.push(keys.lkey);
                if taken.len() > MAX_TAKEN {
                    return Err(Error::no_room("every key that the NIC gives is in use"));
                }
                continue;
            }
            let mut on = vec![None; self.nics.len()];
            let there = There { keys, key_set, pd: own_pd.clone() };
            on[nic] = self.is_kept(nic, key_set).then_some(there);
            let kept = source.keep().inspect_err(|_| drop(domain.dereg_mr(keys.lkey)))?;
            let (source, comes) = (Arc::new(kept), vec![0; self.nics.len()]);
            let (refused, hurried, gone) = (0, false, false);
            let state = MrState { pd, source, access, on, comes, refused, hurried, gone };
            let key_set = if nic == default { key_set } else { self.count_as_opened(default) };
            let (state, answered) = (Mutex::new(state), Condvar::new());
            let mr = Arc::new(Mr { keys, default, key_set, state, answered });
            space.insert(mr.clone());
            if key_set != self.key_set(default) {
                self.nics[default].foreign.store(true, Ordering::Release);
            }
            return Ok(mr);
        };
        let made = make();
        taken.into_iter().for_each(|lkey| drop(domain.dereg_mr(lkey)));
        made
    }

    /// A region of that NIC has another NIC's keys: so its next set is not the first, whose keys
    /// peers take for those that applications have. Gives the set of such keys, which is none.
    fn count_as_opened(&self, nic: usize) -> u16 {
        let (release, acquire) = (Ordering::AcqRel, Ordering::Acquire);
        let _ = self.nics[nic].key_set.compare_exchange(0, FIRST_KEY_SET, release, acquire);
        0
    }

    fn rereg(&self, default: usize, lkey: u32, change: &MrChange) -> Result<()> {
        let mr = self.find(default, lkey)?;
        if !lock(&mr.state).source.can_change() {
            return Err(Error::invalid("a region of a dma-buf cannot be registered anew"));
        }
        if let Some(pd) = change.pd {
            self.use_pd(pd)?;
        }
        // What is on the way somewhere would be what the region was.
        let coming = |s: &mut MrState| s.comes.iter().any(|key_set| *key_set != 0);
        let settled = mr.answered.wait_while(lock(&mr.state), coming);
        let mut s = settled.unwrap_or_else(PoisonError::into_inner);
        let done = self.rereg_everywhere(&mr, &mut s, change);
        let (old, new) = (s.pd, change.pd);
        if let (Ok(()), Some((addr, len))) = (&done, change.range) {
            s.source = Arc::new(MrSource::Range { addr, len, iova: addr });
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
            let Some(There { keys, .. }) = s.on[nic].clone() else { continue };
            let done = self.domain(nic).and_then(|domain| {
                let own = change.pd.map(|pd| self.pd_on(pd, nic)).transpose()?;
                let pd = own.as_ref().map(|pd| pd.handle());
                domain.rereg_mr(keys.lkey, &MrChange { pd, ..*change })?;
                if let (Some(pd), Some(there)) = (own, &mut s.on[nic]) {
                    there.pd = pd;
                }
                Ok(())
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
        let (mut on, pd) = (std::mem::take(&mut s.on), s.pd);
        s.on = vec![None; self.nics.len()];
        drop(s);
        let order = (0..self.nics.len()).map(|k| (default + k) % self.nics.len());
        let mut ended = false;
        for nic in order {
            let (Some(there), Ok(open)) = (on[nic].take(), self.open(nic)) else { continue };
            if nic != default && ended || open.commands.is_stuck() {
                dereg_soon(&open, there);
                ended = true;
                continue;
            }
            let _watch = open.commands.watch();
            match open.domain.dereg_mr(there.keys.lkey) {
                // Something is bound to it: nothing has changed.
                Err(e) if !ended && e.errno() == libc::EBUSY => {
                    on[nic] = Some(there);
                    let mut s = lock(&mr.state);
                    (s.on, s.gone) = (on, false);
                    return Err(e);
                }
                // A NIC that is dead touches nothing any more.
                _ => ended = true,
            }
        }
        {
            let mut space = write(&self.nics[default].space);
            space.remove(lkey);
            if mr.key_set != self.key_set(default) {
                self.look_for_foreign_keys(default, &space);
            }
        }
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
        let ended = pds.remove(&pd);
        // With no lock held.
        drop(pds);
        drop(ended);
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

/// Ends a region on a NIC that the program has not named: it waits for that as long as a NIC that
/// answers takes.
fn dereg_soon(open: &Open, there: There) {
    let (domain, (done, ends)) = (open.domain.clone(), mpsc::channel());
    open.commands.put(Box::new(move || {
        let _ = domain.dereg_mr(there.keys.lkey);
        drop(there);
        let _ = done.send(());
    }));
    let _ = ends.recv_timeout(DEREG_TIME);
}

fn no_pd(pd: PdHandle) -> Error {
    Error::invalid(format!("there is no protection domain {pd}"))
}
