//! The seal of a datagram of control messages: a code at its end that only those can make who may
//! read the directory.
//!
//! Whoever can send a datagram to a NIC can send one to its control endpoint; one forged `Refuse`,
//! `Bye` or `Hello` would end or move a QP. So nothing is looked at before the seal has been found
//! right, and a stranger gets no answer. The seal is HMAC-SHA256 (RFC 2104), cut to 16 bytes, over
//! the whole datagram. It keeps no one from repeating what was said: messages are idempotent, and
//! name the connection.

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;
/// Bytes of a seal.
pub const SEAL_BYTES: usize = 16;

/// The key that the processes of one directory share.
#[derive(Clone)]
pub struct Key(Hmac<Sha256>);

impl Key {
    /// The key of these bytes.
    pub fn new(bytes: &[u8; KEY_BYTES]) -> Key {
        Key(Hmac::new_from_slice(bytes).expect("HMAC takes keys of any length"))
    }

    /// Appends the seal of what stands in the datagram.
    pub fn seal(&self, datagram: &mut Vec<u8>) {
        let code = self.0.clone().chain_update(&datagram[..]).finalize().into_bytes();
        datagram.extend_from_slice(&code[..SEAL_BYTES]);
    }

    /// What stands in a datagram, if its seal is right.
    pub fn open<'a>(&self, datagram: &'a [u8]) -> Option<&'a [u8]> {
        let (content, code) = datagram.split_at_checked(datagram.len().checked_sub(SEAL_BYTES)?)?;
        self.0.clone().chain_update(content).verify_truncated_left(code).ok().map(|()| content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn only_the_whole_with_its_own_seal_opens(content in prop::collection::vec(any::<u8>(), 0..300), bit in any::<prop::sample::Index>()) {
            let (ours, theirs) = (Key::new(&[7; KEY_BYTES]), Key::new(&[8; KEY_BYTES]));
            let mut datagram = content.clone();
            ours.seal(&mut datagram);
            prop_assert_eq!(ours.open(&datagram), Some(&content[..]));
            prop_assert_eq!(theirs.open(&datagram), None);
            prop_assert_eq!(ours.open(&datagram[..datagram.len() - 1]), None);
            let bit = bit.index(datagram.len() * 8);
            datagram[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(ours.open(&datagram), None);
        }
    }

    #[test]
    fn what_is_too_short_has_no_seal() {
        assert_eq!(Key::new(&[0; KEY_BYTES]).open(&[0; SEAL_BYTES - 1]), None);
    }
}
