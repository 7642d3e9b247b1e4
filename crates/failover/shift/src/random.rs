//! Random numbers that a stranger cannot guess.

use unbroken_verbs::{Error, Result};

/// Fills a buffer, for a key or an identity: an error where the system gives no randomness.
pub(crate) fn fill(bytes: &mut [u8]) -> Result<()> {
    rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty())
        .map(drop)
        .map_err(|e| Error::os("getrandom", &e.into()))
}

/// A first PSN, or the number of a connection.
pub(crate) fn number() -> u32 {
    let mut bytes = [0u8; 4];
    // It fails only where the call does not exist; what then remains is a number that differs from
    // call to call.
    if fill(&mut bytes).is_err() {
        bytes = (unbroken_runtime::now_us() as u32).to_ne_bytes();
    }
    u32::from_ne_bytes(bytes)
}
