//! Memory that the library maps for itself, at addresses where the program's memory never was.
//!
//! A software NIC reaches registered memory by its address. If a program unmaps a registered range,
//! the kernel gives its addresses to whoever maps next; were that the library, a peer's WRITE would
//! land in the library's own memory. So all that the library maps lies in a range of addresses
//! that the kernel never chooses by itself.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The range: above executables, heaps and the memory of sanitizers, and below where the kernel
/// puts mappings and stacks. (Open MPI's OpenSHMEM takes whatever lies below an executable for its
/// variables.) At its end it begins again. Where an address cannot be had, the kernel chooses.
#[cfg(target_pointer_width = "64")]
const RANGE: std::ops::Range<usize> = 0x6800_0000_0000..0x7000_0000_0000;
#[cfg(not(target_pointer_width = "64"))]
const RANGE: std::ops::Range<usize> = 0..0;
/// The range begins at a random page of its first part, so that nobody knows the addresses.
const RANDOM_BYTES: usize = 1 << 42;
/// How often another address is tried.
const TRIES: usize = 16;
/// After an address that is taken, the next to try lies so much further: what lies there (a
/// sanitizer's shadow, say) may be large.
const STRIDE_BYTES: usize = 1 << 30;
/// The C library maps allocations of this size rather than take them from its heap.
const LARGE_BYTES: usize = 128 << 10;

/// The next address to use; 0 before the first.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// The range belongs to somebody else: a sanitizer, an emulator.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// The size of a page.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: no pointers.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The bytes of the pages that hold so many; `None` if there are none such.
fn whole_pages(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(page_bytes())
}

fn first_address() -> usize {
    let mut random = [0u8; 8];
    // SAFETY: a live buffer of that length. Without random bytes the range begins at its start.
    unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), libc::GRND_NONBLOCK) };
    RANGE.start + (usize::from_ne_bytes(random) % RANDOM_BYTES) / page_bytes() * page_bytes()
}

/// Takes `bytes` (whole pages) of the range; `None` if there is none for so many.
fn take_address(bytes: usize) -> Option<usize> {
    if RANGE.len() < bytes {
        return None;
    }
    if NEXT.load(Ordering::Relaxed) == 0 {
        // Whoever is second keeps the first one's.
        let _ = NEXT.compare_exchange(0, first_address(), Ordering::Relaxed, Ordering::Relaxed);
    }
    // The end of what is taken, from which its beginning follows.
    let end_of = |at: usize| if at + bytes > RANGE.end { RANGE.start + bytes } else { at + bytes };
    let update = |at| Some(end_of(at));
    let before = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update).ok()?;
    Some(end_of(before) - bytes)
}

/// By a system call, since other libraries replace the C library's `mmap`: see [`crate::spawn`].
fn map_at(address: usize, bytes: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<usize> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // Whole registers: what is narrower may leave anything in the upper half.
    let [rights, flags, fd, offset] = [rights, flags, fd, 0].map(libc::c_long::from);
    // SAFETY: a new mapping that replaces none: the flags never have MAP_FIXED.
    let at = unsafe { libc::syscall(libc::SYS_mmap, address, bytes, rights, flags, fd, offset) };
    if at == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(at as usize)
}

/// Maps memory that can be read and written: of the file from its start, shared, or zeroes of this
/// process alone. [`unmap`] gives it back.
pub fn map(bytes: usize, file: Option<BorrowedFd<'_>>) -> io::Result<NonNull<u8>> {
    let bytes = whole_pages(bytes).ok_or(io::ErrorKind::OutOfMemory)?;
    let (flags, fd) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1),
    };
    let apart = map_in_range(bytes, flags, fd);
    let at = apart.map_or_else(|| map_at(0, bytes, flags, fd), Ok)?;
    NonNull::new(at as *mut u8).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn map_in_range(bytes: usize, flags: libc::c_int, fd: libc::c_int) -> Option<usize> {
    if REFUSED.load(Ordering::Relaxed) {
        return None;
    }
    for _ in 0..TRIES {
        match map_at(take_address(bytes)?, bytes, flags | libc::MAP_FIXED_NOREPLACE, fd) {
            Ok(at) => return Some(at),
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {
                let _ = take_address(STRIDE_BYTES);
            }
            // The address may be the reason, too; where it is not, it says so again.
            Err(_) => return None,
        }
    }
    REFUSED.store(true, Ordering::Relaxed);
    None
}

/// Gives back memory of [`map`].
///
/// # Safety
/// It was mapped by [`map`] with so many bytes, and nothing uses it any more.
pub unsafe fn unmap(at: NonNull<u8>, bytes: usize) {
    let bytes = whole_pages(bytes).unwrap_or(bytes);
    // SAFETY: promised by the caller.
    unsafe { libc::syscall(libc::SYS_munmap, at.as_ptr(), bytes) };
}

/// The allocator of a library in other people's processes: what the C library would map is mapped
/// by [`map`], and the rest comes from the C library's heap.
pub struct Apart;

impl Apart {
    fn is_large(layout: Layout) -> bool {
        layout.size() >= LARGE_BYTES && layout.align() <= 4096
    }
}

// SAFETY: each block is given back to where its size says that it came from; pages are aligned to
// 4,096 at least, and fresh ones are zero.
unsafe impl GlobalAlloc for Apart {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match Apart::is_large(layout) {
            true => map(layout.size(), None).map_or(ptr::null_mut(), NonNull::as_ptr),
            // SAFETY: promised by the caller.
            false => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match Apart::is_large(layout) {
            // SAFETY: promised by the caller.
            true => unsafe { self.alloc(layout) },
            // SAFETY: promised by the caller.
            false => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        match (Apart::is_large(layout), NonNull::new(at)) {
            // SAFETY: promised by the caller.
            (true, Some(at)) => unsafe { unmap(at, layout.size()) },
            // SAFETY: promised by the caller.
            _ => unsafe { System.dealloc(at, layout) },
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the size is valid with this alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !Apart::is_large(layout) && !Apart::is_large(new) {
            // SAFETY: promised by the caller.
            return unsafe { System.realloc(at, layout, size) };
        }
        // SAFETY: the caller promises that the size is not 0.
        let to = unsafe { self.alloc(new) };
        if !to.is_null() {
            // SAFETY: two blocks of at least so many bytes, of which the old one is given back.
            unsafe {
                ptr::copy_nonoverlapping(at, to, size.min(layout.size()));
                self.dealloc(at, layout);
            }
        }
        to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_used_in_turn_and_lie_in_the_range() {
        let mut last = 0;
        for bytes in [1, 4096, 5000, 1 << 20] {
            let at = map(bytes, None).unwrap();
            assert!(RANGE.contains(&(at.as_ptr() as usize)), "{at:?}");
            assert_ne!(at.as_ptr() as usize, last, "not at once again");
            last = at.as_ptr() as usize;
            // SAFETY: mapped with so many bytes, and not used after this.
            unsafe {
                assert_eq!(*at.as_ptr().add(bytes - 1), 0);
                *at.as_ptr().add(bytes - 1) = 1;
                unmap(at, bytes);
            }
        }
    }

    #[test]
    fn a_hole_that_a_program_left_is_not_filled() {
        let bytes = 1 << 20;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a mapping of our own, taken away again.
        let hole = unsafe {
            let at = libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ, flags, -1, 0) as usize;
            libc::munmap(at as *mut libc::c_void, bytes);
            at..at + bytes
        };
        let mut block = Vec::<u8>::new();
        for _ in 0..100 {
            let at = map(bytes, None).unwrap();
            assert!(!hole.contains(&(at.as_ptr() as usize)));
            block.push(0);
        }
    }

    #[test]
    fn an_address_that_is_taken_is_passed_over() {
        let at = map(1, None).unwrap().as_ptr() as usize;
        let next = NEXT.load(Ordering::Relaxed);
        assert!(next > at);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // Somebody maps what comes next; other tests may have been there before.
        let _ = map_at(next, 1 << 20, flags, -1);
        let got = map(1, None).unwrap().as_ptr() as usize;
        assert!(RANGE.contains(&got) && got != next, "{got:#x}");
    }

    #[test]
    fn blocks_keep_their_bytes_across_the_sizes() {
        let layout = |size| Layout::from_size_align(size, 8).unwrap();
        let sizes = [100, LARGE_BYTES, LARGE_BYTES + 1, 3 << 20, LARGE_BYTES - 1, 50];
        // SAFETY: each block is given back with the layout that it has.
        unsafe {
            let mut at = Apart.alloc_zeroed(layout(sizes[0]));
            *at = 7;
            for pair in sizes.windows(2) {
                at = Apart.realloc(at, layout(pair[0]), pair[1]);
                let apart = RANGE.contains(&(at as usize));
                assert_eq!((*at, apart), (7, pair[1] >= LARGE_BYTES), "{} bytes", pair[1]);
            }
            Apart.dealloc(at, layout(50));
            let zeroed = Apart.alloc_zeroed(layout(LARGE_BYTES));
            assert!((0..LARGE_BYTES).all(|i| *zeroed.add(i) == 0));
            Apart.dealloc(zeroed, layout(LARGE_BYTES));
        }
    }
}
