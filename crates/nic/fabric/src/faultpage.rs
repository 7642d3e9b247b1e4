//! `shm/fabric.page`: the faults, in shared memory.
//!
//! A table of entries under a sequence lock: `generation` is odd while a writer is at work and even
//! otherwise. Writers take a file lock, which the kernel frees when its holder dies; one who died
//! half-way leaves an odd number that the next writer repairs. Readers never wait: on an odd number
//! they go on with what they had.

use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

use crate::entry::Entry;
use crate::map::{Header, Layout};

/// Entries of the table.
pub(crate) const ENTRIES: usize = 256;
/// For readers on a data path: one who meets a writer goes on with what it had, and looks again
/// when asked again.
pub(crate) const QUICK_TRIES: usize = 2;
/// For readers who want to know now.
pub(crate) const PATIENT_TRIES: usize = 10_000;

/// The page.
#[repr(C)]
pub(crate) struct FaultPage {
    header: Header,
    /// Even: readable. Also the futex that watchers wait on.
    pub(crate) generation: AtomicU32,
    _unused: AtomicU32,
    /// Hash of the machine's boot: times of an earlier one mean nothing.
    pub(crate) boot: AtomicU64,
    _line: [AtomicU64; 6],
    entries: [RawEntry; ENTRIES],
}

/// `what` is 0 where the slot is free.
#[repr(C)]
struct RawEntry {
    what: AtomicU64,
    value: AtomicU64,
    more: AtomicU64,
    from_us: AtomicU64,
    lasts_us: AtomicU64,
    every_us: AtomicU64,
}

// SAFETY: repr(C), the header first, and atomics only.
#[allow(unsafe_code)]
unsafe impl Layout for FaultPage {
    const MAGIC: u64 = u64::from_le_bytes(*b"UNBFAULT");
    const VERSION: u32 = 2;
}

impl RawEntry {
    fn read(&self) -> Option<Entry> {
        let entry = Entry::from_what(self.what.load(Ordering::Relaxed))?;
        Some(Entry {
            value: self.value.load(Ordering::Relaxed),
            more: self.more.load(Ordering::Relaxed),
            from_us: self.from_us.load(Ordering::Relaxed),
            lasts_us: self.lasts_us.load(Ordering::Relaxed),
            every_us: self.every_us.load(Ordering::Relaxed),
            ..entry
        })
    }

    fn write(&self, entry: &Entry) {
        self.value.store(entry.value, Ordering::Relaxed);
        self.more.store(entry.more, Ordering::Relaxed);
        self.from_us.store(entry.from_us, Ordering::Relaxed);
        self.lasts_us.store(entry.lasts_us, Ordering::Relaxed);
        self.every_us.store(entry.every_us, Ordering::Relaxed);
        self.what.store(entry.what(), Ordering::Relaxed);
    }
}

impl FaultPage {
    /// Calls `begin`, then `f` for every entry; again from the beginning if a writer came between,
    /// at most `tries` times. Returns the generation that was seen, or `None` if writers were at
    /// work all the time: then what `f` saw may be torn.
    pub(crate) fn read(
        &self,
        tries: usize,
        mut begin: impl FnMut(),
        mut f: impl FnMut(Entry),
    ) -> Option<u32> {
        for _ in 0..tries {
            let generation = self.generation.load(Ordering::Acquire);
            if generation.is_multiple_of(2) {
                begin();
                self.entries.iter().filter_map(RawEntry::read).for_each(&mut f);
                fence(Ordering::Acquire);
                if self.generation.load(Ordering::Relaxed) == generation {
                    return Some(generation);
                }
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Lets `f` change the table. The caller holds the writers' lock.
    pub(crate) fn write<R>(&self, f: impl FnOnce(&Table<'_>) -> R) -> R {
        let odd = self.generation.load(Ordering::Relaxed) | 1;
        self.generation.store(odd, Ordering::Relaxed);
        fence(Ordering::Release);
        let result = f(&Table(&self.entries));
        self.generation.store(odd.wrapping_add(1), Ordering::Release);
        result
    }
}

/// The table has no room.
#[derive(Debug)]
pub(crate) struct Full;

/// The table, for the one writer.
pub(crate) struct Table<'a>(&'a [RawEntry; ENTRIES]);

impl Table<'_> {
    /// Enters a fault, in place of one that is the same but for values and times.
    pub(crate) fn put(&self, entry: &Entry) -> Result<(), Full> {
        match self.0.iter().find(|s| s.what.load(Ordering::Relaxed) == entry.what()) {
            Some(slot) => {
                slot.write(entry);
                Ok(())
            }
            None => self.add(std::slice::from_ref(entry)),
        }
    }

    /// Enters faults beside what is there: all or none.
    pub(crate) fn add(&self, entries: &[Entry]) -> Result<(), Full> {
        let mut free = self.0.iter().filter(|s| s.what.load(Ordering::Relaxed) == 0);
        if free.clone().count() < entries.len() {
            return Err(Full);
        }
        entries.iter().zip(&mut free).for_each(|(entry, slot)| slot.write(entry));
        Ok(())
    }

    /// Takes away the faults for which `gone` is true (also ones that this program does not know,
    /// for a `gone` of `None`).
    pub(crate) fn remove(&self, mut gone: impl FnMut(Option<Entry>) -> bool) {
        for slot in self.0 {
            if slot.what.load(Ordering::Relaxed) != 0 && gone(slot.read()) {
                slot.what.store(0, Ordering::Relaxed);
            }
        }
    }
}
