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

/// Whether one set of keys of a NIC was begun after another. Numbers wrap; of two that are told at
/// the same time the distance is small.
pub fn is_newer_key_set(new: u16, old: u16) -> bool {
    (new.wrapping_sub(old) as i16) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

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
