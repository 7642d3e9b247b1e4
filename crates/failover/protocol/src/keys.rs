//! What control messages say of keys, on devices whose keys are their own.

use unbroken_types::NicKey;

/// A region of the owner of the NICs, by the key that applications have of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct KeyName {
    /// The owner's NIC on which the key was made.
    pub nic: u8,
    /// The key.
    pub rkey: u32,
}

/// NICs that one answer can name.
pub const MAX_KEY_NICS: usize = 16;

/// By which keys a region is known on its owner's NICs; by none: there is no such region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Keys {
    /// Which region.
    pub of: KeyName,
    count: u8,
    on: [NicKey; MAX_KEY_NICS],
}

impl Keys {
    /// The keys of a region on some NICs; those beyond [`MAX_KEY_NICS`] are left out.
    pub fn new(of: KeyName, keys: &[NicKey]) -> Keys {
        let count = keys.len().min(MAX_KEY_NICS);
        let mut on = [NicKey::default(); MAX_KEY_NICS];
        on[..count].copy_from_slice(&keys[..count]);
        Keys { of, count: count as u8, on }
    }

    /// The keys, each with its NIC.
    pub fn on(&self) -> &[NicKey] {
        &self.on[..usize::from(self.count)]
    }
}
