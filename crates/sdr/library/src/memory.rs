//! Registered memory.

use crate::{Error, Result};
use std::sync::{Arc, PoisonError, RwLock};
use unbroken::Key;

/// Memory that messages are sent from and received into. The SDK keeps what is in use registered,
/// whoever drops it.
#[derive(Clone)]
pub struct Memory(pub(crate) Arc<Registered>);

pub(crate) struct Registered {
    /// Its keys, one for each NIC of the context that lived when it was registered.
    keys: Vec<Option<Key>>,
    addr: u64,
    bytes: u64,
    /// What it lies in, where it is the SDK's own.
    owned: Option<Box<[std::cell::UnsafeCell<u8>]>>,
    /// Held while the bytes are looked at as Rust's, or changed: see [`Memory::with`].
    access: RwLock<()>,
}

// SAFETY: the cells are read and written by raw copies alone, as the network does; whoever reads
// what another writes gets a mixture of bytes, which the API says.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    pub(crate) fn new(keys: Vec<Option<Key>>, addr: u64, bytes: u64) -> Registered {
        Registered { keys, addr, bytes, owned: None, access: RwLock::new(()) }
    }

    pub(crate) fn holding(self, owned: Box<[std::cell::UnsafeCell<u8>]>) -> Registered {
        Registered { owned: Some(owned), ..self }
    }
}

impl Memory {
    /// The key by which C programs name it: that of the context's first NIC that lived.
    pub fn lkey(&self) -> u32 {
        self.0.keys.iter().flatten().next().map_or(0, Key::lkey)
    }

    /// Its key on a NIC of the context, if that lived.
    pub(crate) fn lkey_on(&self, rail: usize) -> Option<u32> {
        self.0.keys[rail].as_ref().map(Key::lkey)
    }

    /// Where it begins.
    pub fn addr(&self) -> u64 {
        self.0.addr
    }

    /// Its bytes.
    pub fn len(&self) -> u64 {
        self.0.bytes
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// Whether it has these bytes.
    pub(crate) fn has(&self, addr: u64, bytes: u64) -> bool {
        addr >= self.0.addr
            && addr.checked_add(bytes).is_some_and(|end| end <= self.0.addr + self.0.bytes)
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<*mut u8> {
        if self.0.owned.is_none() {
            return Err(Error::wrong(
                "memory that the caller registered is read and written by the caller",
            ));
        }
        let end = offset.checked_add(bytes).filter(|end| *end as u64 <= self.0.bytes);
        match end {
            Some(_) => Ok((self.0.addr as *mut u8).wrapping_add(offset)),
            None => Err(Error::wrong(format!(
                "{bytes} bytes at {offset} of memory that has {}",
                self.0.bytes
            ))),
        }
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// Where they do not fit, or the memory is not the SDK's own.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.check(offset, bytes.len())?;
        let _alone = self.0.access.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: inside of the owned memory, as `check` says; nobody borrows it meanwhile.
        unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out. While the network writes there, they are a mixture.
    ///
    /// # Errors
    /// Where there are not so many, or the memory is not the SDK's own.
    pub fn read(&self, offset: usize, bytes: usize) -> Result<Vec<u8>> {
        let from = self.check(offset, bytes)?;
        let mut out = vec![0; bytes];
        let _others_read = self.0.access.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `write`.
        unsafe { out.as_mut_ptr().copy_from(from, bytes) };
        Ok(out)
    }

    /// Has bytes looked at in place.
    pub(crate) fn with<T>(&self, offset: u64, bytes: u64, look: impl FnOnce(&[u8]) -> T) -> T {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.0.bytes),
            "inside of the memory"
        );
        let _others_read = self.0.access.read().unwrap_or_else(PoisonError::into_inner);
        let begin = (self.0.addr as *const u8).wrapping_add(offset as usize);
        // SAFETY: registered memory, inside of it; nothing of ours writes there meanwhile. That the
        // network does not is for the caller of this (a buffer that is sent from, or whose keys are
        // cleared), that a C program does not for whoever registered it.
        look(unsafe { std::slice::from_raw_parts(begin, bytes as usize) })
    }

    /// Has bytes changed in place.
    pub(crate) fn with_mut<T>(
        &self,
        offset: u64,
        bytes: u64,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> T {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.0.bytes),
            "inside of the memory"
        );
        let _alone = self.0.access.write().unwrap_or_else(PoisonError::into_inner);
        let begin = (self.0.addr as *mut u8).wrapping_add(offset as usize);
        // SAFETY: as in `with`; nobody of ours reads there, either.
        change(unsafe { std::slice::from_raw_parts_mut(begin, bytes as usize) })
    }
}
