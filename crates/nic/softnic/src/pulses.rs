//! How far each RC QP of a NIC has advanced, to be read without the engine's lock.
//!
//! By index and not by QP: a count of its own for each costs as much memory again as an allocation
//! has around it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::OnceLock;

/// QPs of one block.
const BLOCK: usize = 256;

/// [`unbroken_types::Progress::advanced`] of each QP as of its last turn.
pub(crate) struct Pulses(Box<[OnceLock<Box<[AtomicU64]>>]>);

impl Pulses {
    pub(crate) fn new() -> Pulses {
        Pulses((0..=usize::from(u16::MAX) / BLOCK).map(|_| OnceLock::new()).collect())
    }

    /// The QP of that index begins anew.
    pub(crate) fn begin(&self, index: u16) {
        let block = &self.0[usize::from(index) / BLOCK];
        block.get_or_init(|| (0..BLOCK).map(|_| AtomicU64::new(0)).collect());
        self.set(index, 0);
    }

    /// The QP of that index has come so far.
    #[inline]
    pub(crate) fn set(&self, index: u16, advanced: u64) {
        if let Some(pulse) = self.of(index) {
            pulse.store(advanced, Relaxed);
        }
    }

    /// How far it is; 0 for one that never was.
    pub(crate) fn get(&self, index: u16) -> u64 {
        self.of(index).map_or(0, |pulse| pulse.load(Relaxed))
    }

    #[inline]
    fn of(&self, index: u16) -> Option<&AtomicU64> {
        self.0[usize::from(index) / BLOCK].get()?.get(usize::from(index) % BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_index_has_its_own_which_begins_at_0() {
        let pulses = Pulses::new();
        pulses.set(7, 5);
        assert_eq!(pulses.get(7), 0, "no such QP");
        for index in [0, 255, 256, u16::MAX] {
            pulses.begin(index);
            pulses.set(index, u64::from(index) + 1);
        }
        assert_eq!(
            [0, 255, 256, u16::MAX, 1].map(|index| pulses.get(index)),
            [1, 256, 257, 65_536, 0]
        );
        pulses.begin(256);
        assert_eq!((pulses.get(256), pulses.get(255)), (0, 256));
    }
}
