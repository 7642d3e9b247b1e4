//! Pieces of device memory, allocated from the process's.
//!
//! Invariants: what is allocated at any time is bounded by [`MAX_DM_BYTES`]; copies stay within the
//! memory and are aligned as hardware asks, so that a program that runs here runs there.

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use unbroken_verbs::{Error, Result};

/// Device memory of a process, in bytes.
pub const MAX_DM_BYTES: usize = 1 << 20;
/// Offsets and lengths of copies are multiples of this.
const ALIGN: u64 = 4;
/// Start of every piece.
pub const PAGE: usize = 4096;

static USED: AtomicUsize = AtomicUsize::new(0);

/// A piece of device memory.
pub struct DeviceMemory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory at a fixed address; programs and NICs read and write it at the same time, as
// they do any registered memory.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Allocates zeros.
    pub fn new(len: usize) -> Result<DeviceMemory> {
        if len == 0 || len > MAX_DM_BYTES {
            return Err(Error::invalid(format!(
                "length {len}: 1 to {MAX_DM_BYTES} bytes of device memory are possible"
            )));
        }
        let layout = Layout::from_size_align(len, PAGE)
            .map_err(|e| Error::invalid(format!("length {len}: {e}")))?;
        if USED.fetch_add(len, Ordering::AcqRel) + len > MAX_DM_BYTES {
            USED.fetch_sub(len, Ordering::AcqRel);
            return Err(Error::no_room(format!(
                "less than {len} of {MAX_DM_BYTES} bytes of device memory are free"
            )));
        }
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| {
            USED.fetch_sub(len, Ordering::AcqRel);
            Error::no_room("the process has no memory left")
        })?;
        Ok(DeviceMemory { start, layout })
    }

    /// Where a copy goes to or comes from.
    pub fn at(&self, offset: u64, len: usize) -> Result<*mut u8> {
        if !offset.is_multiple_of(ALIGN) || !(len as u64).is_multiple_of(ALIGN) {
            return Err(Error::invalid(format!(
                "offset {offset}, length {len}: both must be multiples of {ALIGN}"
            )));
        }
        self.within(offset, len)
    }

    /// Where a region lies that begins at an offset.
    pub fn within(&self, offset: u64, len: usize) -> Result<*mut u8> {
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > self.layout.size() as u64) {
            return Err(Error::invalid(format!(
                "offset {offset}, length {len}: beyond the {} bytes of this device memory",
                self.layout.size()
            )));
        }
        Ok(self.start.as_ptr().wrapping_add(offset as usize))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no region lies in it any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
        USED.fetch_sub(self.layout.size(), Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_inside_and_aligned_and_the_whole_is_bounded() {
        let m = DeviceMemory::new(64).unwrap();
        assert!(m.at(0, 64).is_ok() && m.at(60, 4).is_ok() && m.at(64, 0).is_ok());
        for (offset, len) in [(60, 8), (1, 4), (0, 3), (u64::MAX - 3, 8), (68, 0)] {
            assert!(m.at(offset, len).is_err(), "{offset} {len}");
        }
        assert!(DeviceMemory::new(0).is_err() && DeviceMemory::new(MAX_DM_BYTES + 1).is_err());
        assert!(DeviceMemory::new(MAX_DM_BYTES).is_err(), "64 bytes are in use");
        drop(m);
        assert!(DeviceMemory::new(MAX_DM_BYTES).is_ok());
    }
}
