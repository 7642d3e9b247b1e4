//! The C API: `include/unbroken/coll.h`.
//!
//! What a program holds are numbers that look like pointers ([`table`]): a handle that is wrong,
//! old or of another kind is not found, and that is an error, never an access. Pointers to what a
//! program fills or reads are checked for NULL and otherwise believed, as in any C API.
//!
//! No panic crosses the boundary: it becomes an error.
#![allow(unsafe_code)]

mod collectives;
mod comm;
mod group;
mod hosts;
mod table;

use std::cell::RefCell;
use std::ffi::{c_char, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};

use crate::error::{Error, Result};

/// `ubcollResult_t`; NCCL's numbers, where NCCL has the like.
pub(super) type Code = i32;
const SUCCESS: Code = 0;
const VERBS_ERROR: Code = 1;
const SYSTEM_ERROR: Code = 2;
const INTERNAL_ERROR: Code = 3;
const INVALID_ARGUMENT: Code = 4;
const INVALID_USAGE: Code = 5;
const REMOTE_ERROR: Code = 6;
const QUEUE_FULL: Code = 100;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// What a panic becomes.
const DEFECT: &str = "a defect of this library: please report it";

fn of(error: &Error) -> Code {
    match error {
        Error::Refused(_) => INVALID_ARGUMENT,
        Error::Bootstrap(_) => INVALID_USAGE,
        Error::Broken(_) => REMOTE_ERROR,
        Error::Full(_) => QUEUE_FULL,
        Error::Verbs(_) => VERBS_ERROR,
        Error::Io { .. } => SYSTEM_ERROR,
    }
}

/// Runs a function of the API; its result as a code, and the remembered error.
fn code(run: impl FnOnce() -> Result<()>) -> Code {
    let (code, text) = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => return SUCCESS,
        Ok(Err(error)) => (of(&error), error.to_string()),
        Err(_) => (INTERNAL_ERROR, DEFECT.to_string()),
    };
    // An error's text has no zero bytes.
    LAST.with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
    code
}

fn refuse<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Refused(what.into()))
}

/// A pointer that must not be NULL.
///
/// # Safety
/// It is NULL, or points to a live value which nobody else changes meanwhile.
unsafe fn given<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: as the caller says.
    unsafe { pointer.as_ref() }.ok_or_else(|| Error::Refused(format!("{name} is NULL")))
}

/// Where a result goes, which must not be NULL.
///
/// # Safety
/// It is NULL, or a value of that type may be written there.
unsafe fn put<T>(pointer: *mut T, name: &str, value: T) -> Result<()> {
    if pointer.is_null() {
        return refuse(format!("{name} is NULL: it is where the result goes"));
    }
    // SAFETY: as the caller says.
    unsafe { pointer.write(value) };
    Ok(())
}

/// A string; `None` for NULL.
///
/// # Safety
/// It is NULL, or points to a string.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: as the caller says.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

#[no_mangle]
extern "C" fn ubcollGetLastError() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

#[no_mangle]
extern "C" fn ubcollGetErrorString(code: Code) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        VERBS_ERROR => c"a NIC or its memory failed",
        SYSTEM_ERROR => c"a call of the system failed",
        INTERNAL_ERROR => c"internal error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"the communicator is broken at all ranks",
        QUEUE_FULL => c"too many operations are under way",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[no_mangle]
extern "C" fn ubcollGetVersion(version: *mut i32) -> Code {
    let part = |text: &str| text.parse::<i32>().unwrap_or(0);
    let number = part(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
        + part(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + part(env!("CARGO_PKG_VERSION_PATCH"));
    // SAFETY: the program gives NULL, or what coll.h says.
    code(|| unsafe { put(version, "version", number) })
}
