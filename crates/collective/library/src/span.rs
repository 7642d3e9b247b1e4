//! Memory that operations work on while the program goes on: the one place of this crate that
//! trusts an address.
//!
//! An operation that was queued has no borrow of the caller's memory, since it outlives the call.
//! Who queues it promises that the memory stays, and is nobody else's, until the operation is over
//! ([`crate::Communicator::begin_at`]); everything else in this crate keeps such a promise itself.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Bytes at an address.
#[derive(Debug)]
pub(crate) struct Span {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is used like a `&mut [u8]`, which may go to another thread; who makes it promises that
// nobody else uses the bytes.
unsafe impl Send for Span {}

impl Span {
    /// No bytes.
    pub(crate) const EMPTY: Span = Span { at: NonNull::dangling(), bytes: 0 };

    /// Bytes that are read alone. Nothing in this crate writes to an operation's input.
    pub(crate) fn of(bytes: &[u8]) -> Span {
        Span { at: NonNull::from(bytes).cast(), bytes: bytes.len() }
    }

    /// Bytes that are read and written.
    pub(crate) fn of_mut(bytes: &mut [u8]) -> Span {
        Span { at: NonNull::from(&mut *bytes).cast(), bytes: bytes.len() }
    }

    /// Bytes at an address; none at NULL.
    pub(crate) fn at(address: *mut u8, bytes: usize) -> Span {
        NonNull::new(address).map_or(Span::EMPTY, |at| Span { at, bytes })
    }

    /// Where it begins and ends.
    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        let begin = self.at.as_ptr().addr();
        begin..begin + self.bytes
    }
}

impl Deref for Span {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: whoever made it promises that the bytes stay, and are written through it alone,
        // until the operation is over; an operation that is over has no spans.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Span {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; spans of what is only read are never taken as mutable.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}
