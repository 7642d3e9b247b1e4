//! The border to C: errors become errno, and panics end here.

use std::ffi::{c_char, c_int};
use std::panic::{catch_unwind, AssertUnwindSafe};
use unbroken_log::{tell, Level, Part};
use unbroken_verbs::{Error, Result};

/// Sets errno.
pub fn set_errno(errno: c_int) {
    // SAFETY: the location is this thread's own and always valid.
    unsafe { *libc::__errno_location() = errno };
}

/// Runs `f`; a panic, which would be a defect of ours, becomes `on_panic` with errno EIO.
#[inline]
pub fn guard<T>(on_panic: T, f: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| {
        set_errno(libc::EIO);
        on_panic
    })
}

/// For verbs that return 0 or an errno. Sets errno, too, as libibverbs does for most.
pub fn code(verb: &str, f: impl FnOnce() -> Result<()>) -> c_int {
    guard(libc::EIO, || match f() {
        Ok(()) => 0,
        Err(e) => failed(verb, &e),
    })
}

/// For verbs that return 0 or -1 with errno.
pub fn minus_one(verb: &str, f: impl FnOnce() -> Result<()>) -> c_int {
    guard(-1, || match f() {
        Ok(()) => 0,
        Err(e) => {
            failed(verb, &e);
            -1
        }
    })
}

/// For verbs that return an object or NULL with errno.
pub fn pointer<T>(verb: &str, f: impl FnOnce() -> Result<*mut T>) -> *mut T {
    guard(std::ptr::null_mut(), || {
        f().unwrap_or_else(|e| {
            failed(verb, &e);
            std::ptr::null_mut()
        })
    })
}

/// Sets errno to the error's and tells the reason where the user asked for it (`UNBROKEN_LOG`): C
/// gets only a number.
#[cold]
pub fn failed(verb: &str, e: &Error) -> c_int {
    if !matches!(e.errno(), libc::EAGAIN | libc::EINTR) {
        tell(Part::Verbs, Level::Warn, format_args!("{verb}: {e}"));
    }
    set_errno(e.errno());
    e.errno()
}

/// Tells the user. A standard error that is full or closed is no reason to fail at anything.
#[cold]
pub fn say(what: std::fmt::Arguments<'_>) {
    unbroken_log::complain(what);
}

/// Keeps the call before it from being the caller's last jump: whoever is called then sees that it
/// is this library that calls, which sanitizers go by (a lock that this library took, and the
/// program gave back, would be an error to them).
#[inline(always)]
pub fn stay() {
    std::hint::black_box(());
}

/// The object behind a pointer that C passed; NULL is an error that names the argument.
///
/// # Safety
/// `p` is NULL or points to a live `T` that stays alive for `'a`: an object that this library gave
/// out and that the program has not destroyed.
pub unsafe fn deref<'a, T>(p: *mut T, what: &str) -> Result<&'a T> {
    // SAFETY: promised by the caller.
    unsafe { p.as_ref() }.ok_or_else(|| Error::invalid(format!("{what} is NULL")))
}

/// Copies text into a C array, with its final NUL, cut where it is too long.
pub fn copy_text(to: &mut [c_char], text: &str) {
    let n = text.len().min(to.len() - 1);
    for (to, from) in to.iter_mut().zip(&text.as_bytes()[..n]) {
        *to = *from as c_char;
    }
    to[n] = 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_and_ends_with_nul() {
        let mut to = [1 as c_char; 4];
        copy_text(&mut to, "abcdef");
        assert_eq!(to.map(|c| c as u8), *b"abc\0");
        copy_text(&mut to, "");
        assert_eq!(to[0], 0);
    }
}
