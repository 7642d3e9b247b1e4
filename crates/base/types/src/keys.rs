//! Keys that are good on one NIC only.

/// A key of a region on one NIC of its owner.
///
/// A NIC that died and was opened again knows none of the keys that it gave before, and gives
/// others. So its keys are numbered by *sets*: the first since its process began is 1, and each
/// opening begins the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct NicKey {
    /// The NIC.
    pub nic: u8,
    /// The set.
    pub key_set: u16,
    /// The remote key.
    pub rkey: u32,
}

/// The number of a NIC's first set of keys. 0 means that its keys are good on all NICs of the
/// process.
pub const FIRST_KEY_SET: u16 = 1;

/// The number of the set of keys after this one. Numbers wrap, but 0 and the first number mean
/// something of their own and do not come again.
pub fn next_key_set(last: u16) -> u16 {
    last.checked_add(1).unwrap_or(FIRST_KEY_SET + 1)
}

/// Whether one set of keys of a NIC was begun after another. Numbers wrap; of two that are told at
/// the same time the distance is small.
pub fn is_newer_key_set(new: u16, old: u16) -> bool {
    (new.wrapping_sub(old) as i16) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_means_something_of_its_own_comes_once() {
        let mut set = 0;
        for n in 1..200_000 {
            let next = next_key_set(set);
            assert!(is_newer_key_set(next, set), "{next} after {set}");
            assert!(next > FIRST_KEY_SET || n == 1, "{next} again");
            set = next;
        }
    }

    #[test]
    fn sets_wrap() {
        for (old, new) in [(0, 1), (1, 2), (u16::MAX, 0), (65_000, 10)] {
            assert!(
                is_newer_key_set(new, old)
                    && !is_newer_key_set(old, new)
                    && !is_newer_key_set(new, new)
            );
        }
    }
}
