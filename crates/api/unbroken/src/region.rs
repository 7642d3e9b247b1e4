//! Registered memory.
//!
//! The network reads and writes it while the program looks on, so its words are atomic: what a
//! program copies out while a peer writes is a mixture, never undefined.

use crate::words::{copy_in, copy_out};
use crate::{Pd, Result};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::Arc;
use unbroken_types::{Access, Sge};
use unbroken_verbs::{Error, MrKeys};

/// Memory that the network may work on. Deregistered when it is dropped: afterwards nothing from
/// the network touches it.
pub struct Region {
    words: Arc<[AtomicU64]>,
    len: usize,
    keys: MrKeys,
    pd: Pd,
}

/// What a peer needs to READ and WRITE a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteRegion {
    /// Address of the region's first byte.
    pub addr: u64,
    /// The remote key.
    pub rkey: u32,
    /// How many bytes the region has.
    pub len: u64,
}

impl Region {
    pub(crate) fn new(pd: &Pd, bytes: usize, access: Access) -> Result<Region> {
        Region::over(pd, (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect(), bytes, access)
    }

    fn over(pd: &Pd, words: Arc<[AtomicU64]>, len: usize, access: Access) -> Result<Region> {
        let addr = words.as_ptr() as u64;
        let keys = pd.0.nic.context().reg_mr(pd.0.handle, addr, len as u64, addr, access)?;
        Ok(Region { words, len, keys, pd: pd.clone() })
    }

    /// Registers the same memory in another protection domain, of the same NIC or another.
    pub fn also(&self, pd: &Pd, access: Access) -> Result<Region> {
        Region::over(pd, self.words.clone(), self.len, access)
    }

    /// How many bytes the region has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What a peer needs to READ and WRITE the region.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion {
            addr: self.words.as_ptr() as u64,
            rkey: self.keys.rkey,
            len: self.len as u64,
        }
    }

    /// A part of the region, for a work request. EINVAL where it ends behind the region.
    pub fn sge(&self, range: Range<usize>) -> Result<Sge> {
        self.check(&range)?;
        Ok(Sge {
            addr: self.words.as_ptr() as u64 + range.start as u64,
            length: range.len() as u32,
            lkey: self.keys.lkey,
        })
    }

    /// Copies bytes in. EINVAL where they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check(&(offset..offset.saturating_add(bytes.len())))?;
        copy_in(&self.words, offset, bytes);
        Ok(())
    }

    /// Copies bytes out. EINVAL where there are not so many.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        self.check(&range)?;
        let mut out = vec![0; range.len()];
        copy_out(&self.words, range.start, &mut out);
        Ok(out)
    }

    /// Copies bytes out into a slice, without allocation. EINVAL where there are not so many.
    pub fn read_into(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(&(offset..offset.saturating_add(out.len())))?;
        copy_out(&self.words, offset, out);
        Ok(())
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::invalid(format!("bytes {range:?} of a region of {}", self.len)));
        }
        Ok(())
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("remote", &self.remote()).finish_non_exhaustive()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // It fails only in a forked child, where the network does not work on it, or where a window
        // is bound to it, which nobody can.
        let _ = self.pd.0.nic.context().dereg_mr(self.keys.lkey);
    }
}
