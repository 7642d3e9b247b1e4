//! Accesses to registered memory on processors without a list of instructions that may fault (see
//! `traps.rs`): a fault ends the process.

use std::sync::atomic::{AtomicU64, Ordering};

/// The memory is not there, or not to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fault;

/// Copies bytes.
///
/// # Safety
/// As `copy_nonoverlapping`.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Result<(), Fault> {
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    Ok(())
}

/// Adds to a word, and gives what was there.
///
/// # Safety
/// `at` is aligned; what else is done to the word is atomic.
pub(crate) unsafe fn fetch_add(at: *mut u64, add: u64) -> Result<u64, Fault> {
    // SAFETY: promised by the caller.
    Ok(unsafe { AtomicU64::from_ptr(at) }.fetch_add(add, Ordering::AcqRel))
}

/// Replaces a word that is `compare`, and gives what was there.
///
/// # Safety
/// As [`fetch_add`].
pub(crate) unsafe fn compare_swap(at: *mut u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    // SAFETY: promised by the caller.
    let word = unsafe { AtomicU64::from_ptr(at) };
    match word.compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire) {
        Ok(found) | Err(found) => Ok(found),
    }
}

/// Nothing is known of pages that cannot be populated.
pub(crate) fn touch(
    _start: u64,
    _bytes: u64,
    _page_bytes: u64,
    _to_write: bool,
) -> Result<(), Fault> {
    Ok(())
}

/// There is no handler.
pub(crate) fn install() {}

/// There is no handler.
///
/// # Safety
/// Nothing is touched.
pub unsafe fn program_action(
    _: libc::c_int,
    _: *const libc::sigaction,
    _: *mut libc::sigaction,
) -> Option<libc::c_int> {
    None
}
