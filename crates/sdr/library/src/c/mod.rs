//! The C API: `include/unbroken/sdr.h` and `sdr_ext.h`.
//!
//! What a program holds are numbers that look like pointers ([`unbroken_verbs::handles`]): a handle
//! that is wrong, old or of another kind is not found, and that is an error, never an access.
//! Pointers to what a program fills or reads are checked for NULL and otherwise believed, as in any
//! C API.
//!
//! No panic crosses the boundary: it becomes an error.

mod api;
mod ext;
mod reliable;
mod table;

use crate::{Error, Result};
use std::cell::RefCell;
use std::ffi::CString;
use std::panic::{catch_unwind, AssertUnwindSafe};

const SUCCESS: i32 = 0;
const ERROR: i32 = 1;
const RETRY: i32 = 2;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn remember(error: &Error) {
    // An error's text has no zero bytes.
    LAST.with(|last| *last.borrow_mut() = CString::new(error.to_string()).unwrap_or_default());
}

/// Runs a function of the API; what it gives, or NULL's equivalent and the remembered error.
fn guarded<T>(run: impl FnOnce() -> Result<T>) -> std::result::Result<T, Error> {
    let done = catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|_| Err(Error::wrong("a defect of this library: please report it")));
    done.inspect_err(remember)
}

/// The same, as an `sdr_errcode`.
fn code(run: impl FnOnce() -> Result<()>) -> i32 {
    match guarded(run) {
        Ok(()) => SUCCESS,
        Err(Error::Retry(_)) => RETRY,
        Err(_) => ERROR,
    }
}

/// A pointer that must not be NULL.
///
/// # Safety
/// It is NULL, or points to a live value which nobody else changes meanwhile.
unsafe fn given<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: as the caller says.
    unsafe { pointer.as_ref() }.ok_or_else(|| Error::wrong(format!("{name} is NULL")))
}

/// Where a result goes, which must not be NULL.
///
/// # Safety
/// It is NULL, or a value of that type may be written there.
unsafe fn put<T>(pointer: *mut T, name: &str, value: T) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::wrong(format!("{name} is NULL: it is where the result goes")));
    }
    // SAFETY: as the caller says.
    unsafe { pointer.write(value) };
    Ok(())
}
