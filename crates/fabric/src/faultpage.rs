//! `shm/fabric.page`: the faults, in shared memory.
//!
//! A table of entries under a sequence lock: `generation` is odd while a writer is at work and even otherwise. Writers take a file
//! lock, which the kernel frees when its holder dies; one who died half-way leaves an odd number that the next writer repairs.
//! Readers never wait: on an odd number they go on with what they had.

use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

use crate::map::{Header, Layout};

/// Entries of the table.
pub(crate) const ENTRIES: usize = 256;
/// For readers on a data path: one who meets a writer goes on with what it had, and looks again when asked again.
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
    entries: [Slot; ENTRIES],
}

/// `what` is 0 where the slot is free.
#[repr(C)]
struct Slot {
    what: AtomicU64,
    value: AtomicU64,
    from_us: AtomicU64,
}

// SAFETY: repr(C), the header first, and atomics only.
#[allow(unsafe_code)]
unsafe impl Layout for FaultPage {
    const MAGIC: u64 = u64::from_le_bytes(*b"UNBFAULT");
    const VERSION: u32 = 1;
}

/// The kind of a fault, as a number in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    NicDead = 1,
    NicDown = 2,
    CableCut = 3,
    SwitchDown = 4,
    Loss = 5,
}

/// An entry of the table, read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    /// Host number; 0 for a switch.
    pub(crate) host: u8,
    /// NIC or rail.
    pub(crate) index: u8,
    /// 0: both ways, 1: tx, 2: rx.
    pub(crate) way: u8,
    pub(crate) value: u64,
    pub(crate) from_us: u64,
}

impl Entry {
    /// What tells this fault from others; value and time do not.
    pub(crate) fn what(&self) -> u64 {
        u64::from_le_bytes([self.kind as u8, self.host, self.index, self.way, 0, 0, 0, 0])
    }

    fn read(slot: &Slot) -> Option<Entry> {
        let [kind, host, index, way, ..] = slot.what.load(Ordering::Relaxed).to_le_bytes();
        let kind = match kind {
            1 => Kind::NicDead,
            2 => Kind::NicDown,
            3 => Kind::CableCut,
            4 => Kind::SwitchDown,
            5 => Kind::Loss,
            // Free, or of a newer program: not ours to apply.
            _ => return None,
        };
        let (value, from_us) = (slot.value.load(Ordering::Relaxed), slot.from_us.load(Ordering::Relaxed));
        Some(Entry { kind, host, index, way, value, from_us })
    }
}

impl FaultPage {
    /// Calls `begin`, then `f` for every entry; again from the beginning if a writer came between, at most `tries` times. Returns
    /// the generation that was seen, or `None` if writers were at work all the time: then what `f` saw may be torn.
    pub(crate) fn read(&self, tries: usize, mut begin: impl FnMut(), mut f: impl FnMut(Entry)) -> Option<u32> {
        for _ in 0..tries {
            let generation = self.generation.load(Ordering::Acquire);
            if generation % 2 == 0 {
                begin();
                self.entries.iter().filter_map(Entry::read).for_each(&mut f);
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

/// The table, for the one writer.
pub(crate) struct Table<'a>(&'a [Slot; ENTRIES]);

impl Table<'_> {
    /// Enters a fault, in place of one that is the same but for value and time. False: the table is full.
    pub(crate) fn put(&self, entry: &Entry) -> bool {
        let find = |what| self.0.iter().find(|s| s.what.load(Ordering::Relaxed) == what);
        let Some(slot) = find(entry.what()).or_else(|| find(0)) else { return false };
        slot.value.store(entry.value, Ordering::Relaxed);
        slot.from_us.store(entry.from_us, Ordering::Relaxed);
        slot.what.store(entry.what(), Ordering::Relaxed);
        true
    }

    /// Takes away the faults for which `gone` is true (also ones that this program does not know, for a `gone` of `None`).
    pub(crate) fn remove(&self, mut gone: impl FnMut(Option<Entry>) -> bool) {
        for slot in self.0 {
            if slot.what.load(Ordering::Relaxed) != 0 && gone(Entry::read(slot)) {
                slot.what.store(0, Ordering::Relaxed);
            }
        }
    }
}
