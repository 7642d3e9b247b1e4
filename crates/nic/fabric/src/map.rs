//! Files of atomics, mapped into memory and shared by processes: the only `unsafe` of the crate.
//!
//! A page is made under a name of its own and gets its real name only when it is complete (by
//! `link`, which fails where the name is taken), so nobody sees half a page and no lock is needed.
//! A page never changes its size.
#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{fallocate, FallocateFlags};

use unbroken_process::mapping;
use unbroken_runtime::{fill_random, open_own};

use crate::error::{FabricError, Result};

/// The beginning of every page.
#[repr(C, align(64))]
pub(crate) struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    size_bytes: AtomicU32,
    _reserved: [AtomicU64; 6],
}

/// A type that a page may hold.
///
/// # Safety
/// The type is `repr(C)`, begins with a [`Header`] and consists of atomics only: every bit pattern
/// is a value (other processes may write anything), all changes go through shared references, and
/// zeroes are its initial state. Its alignment is at most 4,096.
pub(crate) unsafe trait Layout: Sync + Sized {
    /// Tells pages of different types apart.
    const MAGIC: u64;
    /// Changes with the layout.
    const VERSION: u32;
}

/// A shared mapping of a page.
pub(crate) struct Mapped<T: Layout> {
    at: NonNull<T>,
}

// SAFETY: the mapping belongs to the value, is not bound to a thread, and `T: Sync` allows shared
// use.
unsafe impl<T: Layout> Send for Mapped<T> {}
// SAFETY: as above; only `&T` is given out.
unsafe impl<T: Layout> Sync for Mapped<T> {}

impl<T: Layout> Mapped<T> {
    /// Maps the page at `path`; makes it (zeroes) if it is missing.
    pub(crate) fn open_or_create(path: &Path) -> Result<Mapped<T>> {
        // It can be removed between the attempts (`fabric down`), hence more than one, and not for
        // ever.
        for _ in 0..8 {
            match open_own(path, OpenOptions::new().read(true).write(true)) {
                Ok(file) => return Mapped::map(path, &file),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(FabricError::io(path, "open it")(e)),
            }
            let fresh = Fresh::make::<T>(path)?;
            match fs::hard_link(&fresh.0, path) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(FabricError::io(path, "make it")(e));
                }
                _ => {}
            }
        }
        Err(FabricError::io(path, "make it")(io::ErrorKind::NotFound.into()))
    }

    /// Maps a new page (zeroes) that takes the place of what was at `path`; whoever mapped the old
    /// one keeps it.
    pub(crate) fn replace(path: &Path) -> Result<Mapped<T>> {
        let fresh = Fresh::make::<T>(path)?;
        fs::rename(&fresh.0, path).map_err(FabricError::io(path, "make it"))?;
        Mapped::open(path)
    }

    /// Maps the page at `path`, which must exist.
    pub(crate) fn open(path: &Path) -> Result<Mapped<T>> {
        let file = open_own(path, OpenOptions::new().read(true).write(true))
            .map_err(FabricError::io(path, "open it"))?;
        Mapped::map(path, &file)
    }

    fn map(path: &Path, file: &File) -> Result<Mapped<T>> {
        let wrong = |what: String| FabricError::Page { path: path.display().to_string(), what };
        let size = size_of::<T>();
        let len = file.metadata().map_err(FabricError::io(path, "look at it"))?.len();
        if len != size as u64 {
            return Err(wrong(format!("has {len} bytes where {size} are right")));
        }
        let at = mapping::map(size, Some(file.as_fd())).map_err(FabricError::io(path, "map it"))?;
        let at = at.cast::<T>();
        let page = Mapped { at };
        // SAFETY: `Layout` says that the page begins with a header, that any bytes are a value, and
        // mappings are page-aligned.
        let header = unsafe { at.cast::<Header>().as_ref() };
        let (magic, version) =
            (header.magic.load(Ordering::Relaxed), header.version.load(Ordering::Relaxed));
        if magic != T::MAGIC {
            return Err(wrong(format!(
                "is not such a page (magic {magic:#x}, {:#x} is right)",
                T::MAGIC
            )));
        }
        if version != T::VERSION {
            return Err(wrong(format!("has version {version} where {} is right", T::VERSION)));
        }
        Ok(page)
    }
}

impl<T: Layout> Deref for Mapped<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the mapping lives as long as `self`, is large enough, aligned, and any bytes are
        // a value of `T`.
        unsafe { self.at.as_ref() }
    }
}

impl<T: Layout> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and no reference outlives `self`.
        unsafe { mapping::unmap(self.at.cast(), size_of::<T>()) };
    }
}

/// A complete page under a temporary name, which goes away with the value.
struct Fresh(std::path::PathBuf);

impl Fresh {
    fn make<T: Layout>(path: &Path) -> Result<Fresh> {
        // Not named by the pid, which another process may have, too, in another PID namespace.
        let mut name = [0; 8];
        fill_random(&mut name).map_err(FabricError::io(path, "name it"))?;
        let fresh = Fresh(path.with_extension(format!("{:016x}.new", u64::from_ne_bytes(name))));
        let write = || -> io::Result<()> {
            let mut file = open_own(&fresh.0, OpenOptions::new().write(true).create_new(true))?;
            let mut header = Vec::with_capacity(16);
            header.extend_from_slice(&T::MAGIC.to_ne_bytes());
            header.extend_from_slice(&T::VERSION.to_ne_bytes());
            header.extend_from_slice(&(size_of::<T>() as u32).to_ne_bytes());
            file.write_all(&header)?;
            // Real memory, not a hole: a full file system is an error here, not a SIGBUS later.
            match fallocate(&file, FallocateFlags::empty(), 0, size_of::<T>() as u64) {
                Err(rustix::io::Errno::OPNOTSUPP) => {
                    file.write_all(&vec![0; size_of::<T>() - header.len()])
                }
                result => result.map_err(io::Error::from),
            }
        };
        write().map_err(FabricError::io(path, "make it"))?;
        Ok(fresh)
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // Gone already where it was renamed.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct Page {
        header: Header,
        value: AtomicU64,
    }

    // SAFETY: repr(C), header first, atomics only.
    unsafe impl Layout for Page {
        const MAGIC: u64 = 0x1234;
        const VERSION: u32 = 3;
    }

    #[test]
    fn two_mappings_share_a_page() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.page");
        let one = Mapped::<Page>::open_or_create(&path).unwrap();
        let two = Mapped::<Page>::open_or_create(&path).unwrap();
        one.value.store(7, Ordering::Relaxed);
        assert_eq!(two.value.load(Ordering::Relaxed), 7);
        let three = Mapped::<Page>::replace(&path).unwrap();
        assert_eq!(three.value.load(Ordering::Relaxed), 0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");
        assert_eq!(one.header.size_bytes.load(Ordering::Relaxed) as usize, size_of::<Page>());
    }

    #[test]
    fn a_wrong_page_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.page");
        fs::write(&path, b"short").unwrap();
        let text = Mapped::<Page>::open_or_create(&path).err().unwrap().to_string();
        assert!(
            text.contains("x.page") && text.contains("has 5 bytes where 128 are right"),
            "{text}"
        );
        fs::write(&path, [0; 128]).unwrap();
        let text = Mapped::<Page>::open_or_create(&path).err().unwrap().to_string();
        assert!(text.contains("0x1234 is right"), "{text}");
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&0x1234u64.to_ne_bytes());
        bytes[8] = 2;
        fs::write(&path, bytes).unwrap();
        let text = Mapped::<Page>::open(&path).err().unwrap().to_string();
        assert!(text.contains("version 2 where 3 is right"), "{text}");
    }

    #[test]
    fn many_who_come_first_share_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.page");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    Mapped::<Page>::open_or_create(&path)
                        .unwrap()
                        .value
                        .fetch_add(1, Ordering::Relaxed)
                });
            }
        });
        assert_eq!(Mapped::<Page>::open(&path).unwrap().value.load(Ordering::Relaxed), 8);
    }
}
