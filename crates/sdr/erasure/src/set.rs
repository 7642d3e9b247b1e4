//! Sets of chunks of one submessage.

use crate::{MAX_DATA, MAX_PARITY};

const WORDS: usize = (MAX_DATA + MAX_PARITY).div_ceil(64);

/// Some chunks of a submessage: data chunks count from 0, and parity chunks follow. What is beyond
/// [`ChunkSet::CAPACITY`] is in no set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ChunkSet([u64; WORDS]);

impl ChunkSet {
    /// Chunks that a set can hold: those of the largest code.
    pub const CAPACITY: usize = 64 * WORDS;

    /// No chunk.
    pub const fn new() -> ChunkSet {
        ChunkSet([0; WORDS])
    }

    /// Adds a chunk; says whether it was not in the set (and has a place in one).
    pub fn insert(&mut self, chunk: usize) -> bool {
        let new = chunk < Self::CAPACITY && !self.contains(chunk);
        if new {
            self.0[chunk / 64] |= 1 << (chunk % 64);
        }
        new
    }

    /// Whether a chunk is in the set.
    pub fn contains(&self, chunk: usize) -> bool {
        self.0.get(chunk / 64).is_some_and(|word| word >> (chunk % 64) & 1 == 1)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// The chunks, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(n, word)| {
            let mut left = *word;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as usize;
                (left != 0).then(|| {
                    left &= left - 1;
                    64 * n + bit
                })
            })
        })
    }
}

impl FromIterator<usize> for ChunkSet {
    fn from_iter<T: IntoIterator<Item = usize>>(chunks: T) -> ChunkSet {
        let mut set = ChunkSet::new();
        for chunk in chunks {
            set.insert(chunk);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_what_is_put_in() {
        let mut set: ChunkSet = [3, 64, 159, 3].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 64, 159]);
        assert_eq!(
            (set.len(), set.is_empty(), set.contains(64), set.contains(65)),
            (3, false, true, false)
        );
        assert!(
            !set.insert(64)
                && set.insert(0)
                && !set.insert(ChunkSet::CAPACITY)
                && !set.insert(usize::MAX)
        );
        assert!(!set.contains(usize::MAX) && set.contains(0));
        assert!(ChunkSet::new().is_empty() && ChunkSet::new().iter().next().is_none());
    }
}
