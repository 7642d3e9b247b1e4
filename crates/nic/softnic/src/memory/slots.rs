//! The slots of the table of keys.
//!
//! A key is drawn at random, and its place follows from it: in a table of 2^n slots, bits 8 to 8+n
//! of the key are the slot's number. A key whose slot is taken is drawn again. When three quarters
//! are taken the table doubles: what was in slot `i` is then in `i` or `i + 2^n`, as one more bit
//! of its key says, so that nothing ever collides and a look-up is one load and one comparison.
//!
//! The lower eight bits of a key do not count for its place: a window's key changes them.

use super::{Region, MAX_MRS};
use rustix::rand::{getrandom, GetRandomFlags};
use unbroken_types::PdHandle;
use unbroken_verbs::{Error, Result};

/// A key of any bits.
pub(super) const ANY_BITS: u32 = u32::MAX;
/// A key whose lower eight bits are 0.
pub(super) const PREFIX_BITS: u32 = !0xff;
/// Slots of the first table.
const FIRST_SLOTS: usize = 256;
/// More draws than this do not find all slots taken while a quarter is free.
const MAX_DRAWS: u32 = 1024;

#[derive(Default)]
pub(super) struct Slots {
    /// None, or a power of two.
    slots: Vec<Region>,
    taken: usize,
    chance: Chance,
}

impl Slots {
    /// The number of the slot where a key belongs, if there are any slots.
    #[inline]
    fn index(&self, key: u32) -> usize {
        (key >> 8) as usize & self.slots.len().wrapping_sub(1)
    }

    /// The slot where a key belongs, whatever is there.
    #[inline]
    pub(super) fn home(&self, key: u32) -> Option<&Region> {
        self.slots.get(self.index(key))
    }

    /// What is there under a key of these upper 24 bits.
    pub(super) fn named(&self, key: u32) -> Option<&Region> {
        self.home(key).filter(|r| r.pd != PdHandle::NONE && r.prefix == key >> 8)
    }

    /// The slot of a key that is there.
    pub(super) fn home_mut(&mut self, key: u32) -> &mut Region {
        let i = self.index(key);
        &mut self.slots[i]
    }

    /// Draws a key that nothing has, and that its slot did not have last.
    pub(super) fn draw(&mut self, bits: u32) -> Result<u32> {
        if self.taken >= MAX_MRS as usize {
            return Err(Error::no_room(format!(
                "{MAX_MRS} memory regions are registered, which is the limit"
            )));
        }
        self.make_room();
        for _ in 0..MAX_DRAWS {
            let key = self.chance.draw()? & bits;
            let free = |r: &Region| r.pd == PdHandle::NONE && r.prefix != key >> 8;
            // Key 0 is never given out, nor is any that could become 0.
            if key >> 8 != 0 && self.home(key).is_some_and(free) {
                return Ok(key);
            }
        }
        Err(Error::no_room("no free key was found"))
    }

    /// Puts something into the slot of a key that was just drawn.
    pub(super) fn put(&mut self, key: u32, region: Region) {
        *self.home_mut(key) = region;
        self.taken += 1;
    }

    /// Frees the slot of a key that is there, and gives what was in it.
    pub(super) fn take(&mut self, key: u32) -> Region {
        self.taken -= 1;
        std::mem::replace(self.home_mut(key), Region { prefix: key >> 8, ..Region::free() })
    }

    /// Keeps a quarter of the slots free.
    fn make_room(&mut self) {
        if (self.taken + 1) * 4 <= self.slots.len() * 3 {
            return;
        }
        let count = (2 * self.slots.len()).max(FIRST_SLOTS);
        let mut slots = Vec::with_capacity(count);
        slots.resize_with(count, Region::free);
        for r in std::mem::replace(&mut self.slots, slots).into_iter().filter(|r| r.prefix != 0) {
            let i = r.prefix as usize & (count - 1);
            self.slots[i] = r;
        }
    }
}

/// Numbers from the operating system's randomness, many at a time.
struct Chance {
    bytes: [u8; 256],
    used: usize,
}

impl Default for Chance {
    fn default() -> Chance {
        Chance { bytes: [0; 256], used: 256 }
    }
}

impl Chance {
    fn draw(&mut self) -> Result<u32> {
        if self.used == self.bytes.len() {
            // So few come all at once.
            getrandom(&mut self.bytes, GetRandomFlags::empty())
                .map_err(|e| Error::os("getrandom", &e.into()))?;
            self.used = 0;
        }
        let (word, _) =
            self.bytes[self.used..].split_first_chunk::<4>().expect("a multiple of four is used");
        self.used += 4;
        Ok(u32::from_ne_bytes(*word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn slots_with(count: usize) -> (Slots, Vec<u32>) {
        let mut slots = Slots::default();
        let mut put = || {
            let key = slots.draw(ANY_BITS).unwrap();
            slots.put(key, Region { key, pd: PdHandle(1), prefix: key >> 8, ..Region::free() });
            key
        };
        let keys = (0..count).map(|_| put()).collect();
        (slots, keys)
    }

    #[test]
    fn every_key_is_found_again_however_the_table_grows() {
        let (mut slots, keys) = slots_with(10_000);
        assert!(slots.slots.len() < 4 * keys.len());
        assert!(keys.iter().all(|key| slots.home(*key).is_some_and(|r| r.key == *key)));
        assert!(keys.iter().all(|key| slots.take(*key).key == *key));
        assert_eq!(slots.taken, 0);
        assert!(keys.iter().all(|key| slots.named(*key).is_none()));
    }

    /// Keys of which one follows from another, as those of a counter, would have few distances and
    /// bits that never change.
    #[test]
    fn no_key_follows_from_others() {
        let (_, keys) = slots_with(4096);
        let distances: HashSet<u32> = keys.windows(2).map(|k| k[1].wrapping_sub(k[0])).collect();
        assert!(distances.len() > 4090, "{} distances", distances.len());
        for bit in 0..32 {
            let ones = keys.iter().filter(|key| **key >> bit & 1 != 0).count();
            // Ten standard deviations.
            assert!(
                (2048 - 320..2048 + 320).contains(&ones),
                "bit {bit} is set in {ones} of 4096 keys"
            );
        }
        let (_, others) = slots_with(4096);
        assert_ne!(keys, others, "another process has other keys");
    }

    #[test]
    fn a_slot_that_is_used_again_has_another_key() {
        let mut slots = Slots::default();
        let mut seen = HashSet::new();
        for _ in 0..2000 {
            let key = slots.draw(PREFIX_BITS).unwrap();
            assert_ne!(slots.home(key).unwrap().prefix, key >> 8);
            slots.put(key, Region { key, pd: PdHandle(1), prefix: key >> 8, ..Region::free() });
            assert_eq!(slots.take(key).key, key);
            seen.insert(key);
        }
        assert!(seen.len() > 1990, "{} keys", seen.len());
    }
}
