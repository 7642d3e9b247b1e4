//! Memory that processes of a host share: a file of words, mapped.

use crate::{Error, Result};
use std::fs::{File, OpenOptions};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use unbroken_process::mapping;

/// A mapped file of words, atomic since other processes write them.
pub struct SharedWords {
    at: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the mapping belongs to the value and is not bound to a thread; only shared references to
// atomics are given out.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Makes a file of so many zero words, which must not exist, and maps it. Only this user may
    /// open it.
    pub fn create(path: &Path, len: usize) -> Result<SharedWords> {
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|e| Error::os(&format!("make {}", path.display()), &e))?;
        let bytes = len as libc::off_t * 8;
        // Memory that is not there is an error now, and not a signal later.
        // SAFETY: plain call on an open descriptor.
        let errno = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes) };
        if errno != 0 {
            // What cannot be used is not left behind.
            let _ = std::fs::remove_file(path);
            let e = std::io::Error::from_raw_os_error(errno);
            return Err(Error::os(&format!("make {} of {bytes} bytes", path.display()), &e));
        }
        SharedWords::map(&file, len)
    }

    /// Maps a file that must have so many words.
    pub fn open(path: &Path, len: usize) -> Result<SharedWords> {
        let named =
            |what: &str, e: std::io::Error| Error::os(&format!("{what} {}", path.display()), &e);
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path);
        let file = file.map_err(|e| named("open", e))?;
        let there = file.metadata().map_err(|e| named("look at", e))?.len();
        if there != len as u64 * 8 {
            return Err(Error::invalid(format!(
                "{} has {there} bytes where {} are right",
                path.display(),
                len * 8
            )));
        }
        SharedWords::map(&file, len)
    }

    fn map(file: &File, len: usize) -> Result<SharedWords> {
        let at = mapping::map(len * 8, Some(file.as_fd()));
        let at = at.map_err(|e| Error::os("map shared memory", &e))?.cast();
        Ok(SharedWords { at, len })
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping lives as long as the value, has this length, is page-aligned, and any
        // bytes are atomics' values.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; no reference outlives the value.
        unsafe { mapping::unmap(self.at.cast(), self.len * 8) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_of_a_file_are_one_memory() {
        let path = std::env::temp_dir().join(format!("unbroken-shared-{}", std::process::id()));
        let a = SharedWords::create(&path, 100).unwrap();
        assert!(SharedWords::create(&path, 100).is_err(), "it exists");
        assert!(SharedWords::open(&path, 99).is_err(), "another length");
        let b = SharedWords::open(&path, 100).unwrap();
        std::fs::remove_file(&path).unwrap();
        a[99].store(7, Ordering::Relaxed);
        assert_eq!(
            (b[99].load(Ordering::Relaxed), b[0].load(Ordering::Relaxed), b.len()),
            (7, 0, 100)
        );
    }
}
