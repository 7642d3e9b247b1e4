//! Registered memory.
//!
//! The network reads and writes it while the program looks on, so its bytes are atomic: what a program copies out while a peer writes is a
//! mixture, never undefined.

use crate::{Pd, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use unbroken_types::{Access, Sge};
use unbroken_verbs::{Error, MrKeys};

/// Memory that the network may work on. Deregistered when it is dropped: afterwards nothing from the network touches it.
pub struct Region {
    bytes: Box<[AtomicU8]>,
    keys: MrKeys,
    pd: Pd,
}

/// What a peer needs to READ and WRITE a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteRegion {
    /// Address of its first byte.
    pub addr: u64,
    /// Key.
    pub rkey: u32,
    /// Bytes.
    pub len: u64,
}

impl Region {
    pub(crate) fn new(pd: &Pd, bytes: usize, access: Access) -> Result<Region> {
        let bytes: Box<[AtomicU8]> = (0..bytes).map(|_| AtomicU8::new(0)).collect();
        let addr = bytes.as_ptr() as u64;
        let keys = pd.0.nic.context().reg_mr(pd.0.handle, addr, bytes.len() as u64, addr, access)?;
        Ok(Region { bytes, keys, pd: pd.clone() })
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What a peer needs.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion { addr: self.bytes.as_ptr() as u64, rkey: self.keys.rkey, len: self.bytes.len() as u64 }
    }

    /// A part of it, for a WR. EINVAL where it ends behind the region.
    pub fn sge(&self, range: Range<usize>) -> Result<Sge> {
        self.check(&range)?;
        Ok(Sge { addr: self.bytes[range.start..].as_ptr() as u64, length: range.len() as u32, lkey: self.keys.lkey })
    }

    /// Copies bytes in. EINVAL where they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let range = offset..offset.saturating_add(bytes.len());
        self.check(&range)?;
        self.bytes[range].iter().zip(bytes).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
        Ok(())
    }

    /// Copies bytes out. EINVAL where there are not so many.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        self.check(&range)?;
        Ok(self.bytes[range].iter().map(|byte| byte.load(Ordering::Relaxed)).collect())
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.bytes.len() {
            return Err(Error::invalid(format!("bytes {range:?} of a region of {}", self.bytes.len())));
        }
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // It fails only in a forked child, where the network does not work on it, or where a window is bound to it, which nobody can.
        let _ = self.pd.0.nic.context().dereg_mr(self.keys.lkey);
    }
}
