//! How far each RC QP of a NIC has advanced, and what it has lost, to be read without the engine's
//! lock.
//!
//! By index and not by QP: a count of its own for each costs as much memory again as an allocation
//! has around it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::OnceLock;

/// QPs of one block.
const BLOCK: usize = 256;

/// Of a QP as of its last turn.
#[derive(Default)]
struct QpProgress {
    /// [`unbroken_types::Progress::advanced`].
    advanced: AtomicU64,
    /// Packets taken for lost.
    lost: AtomicU64,
}

/// That of each QP.
pub(crate) struct ProgressCounters(Box<[OnceLock<Box<[QpProgress]>>]>);

impl ProgressCounters {
    pub(crate) fn new() -> ProgressCounters {
        ProgressCounters((0..=usize::from(u16::MAX) / BLOCK).map(|_| OnceLock::new()).collect())
    }

    /// The QP of that index begins anew.
    pub(crate) fn begin(&self, index: u16) {
        let block = &self.0[usize::from(index) / BLOCK];
        block.get_or_init(|| (0..BLOCK).map(|_| QpProgress::default()).collect());
        self.set(index, 0);
        if let Some(pulse) = self.of(index) {
            pulse.lost.store(0, Relaxed);
        }
    }

    /// The QP of that index has come so far.
    #[inline]
    pub(crate) fn set(&self, index: u16, advanced: u64) {
        if let Some(pulse) = self.of(index) {
            pulse.advanced.store(advanced, Relaxed);
        }
    }

    /// How far it is; 0 for one that never was.
    pub(crate) fn get(&self, index: u16) -> u64 {
        self.of(index).map_or(0, |pulse| pulse.advanced.load(Relaxed))
    }

    /// The QP of that index has so many more packets taken for lost. Only who has the engine adds.
    #[inline]
    pub(crate) fn add_lost(&self, index: u16, packets: u32) {
        if let Some(pulse) = self.of(index) {
            let before = pulse.lost.load(Relaxed);
            pulse.lost.store(before.wrapping_add(packets.into()), Relaxed);
        }
    }

    /// How many it has taken for lost.
    pub(crate) fn lost(&self, index: u16) -> u64 {
        self.of(index).map_or(0, |pulse| pulse.lost.load(Relaxed))
    }

    #[inline]
    fn of(&self, index: u16) -> Option<&QpProgress> {
        self.0[usize::from(index) / BLOCK].get()?.get(usize::from(index) % BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_index_has_its_own_which_begins_at_0() {
        let progress_counters = ProgressCounters::new();
        progress_counters.set(7, 5);
        assert_eq!(progress_counters.get(7), 0, "no such QP");
        for index in [0, 255, 256, u16::MAX] {
            progress_counters.begin(index);
            progress_counters.set(index, u64::from(index) + 1);
        }
        assert_eq!(
            [0, 255, 256, u16::MAX, 1].map(|index| progress_counters.get(index)),
            [1, 256, 257, 65_536, 0]
        );
        progress_counters.add_lost(256, 3);
        progress_counters.add_lost(256, 4);
        assert_eq!((progress_counters.lost(256), progress_counters.lost(255)), (7, 0));
        progress_counters.begin(256);
        assert_eq!(
            (progress_counters.get(256), progress_counters.lost(256), progress_counters.get(255)),
            (0, 0, 256)
        );
    }
}
