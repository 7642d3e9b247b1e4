//! The installed libibverbs behind our definitions.
//!
//! It calls its own public functions through the dynamic linker, as its providers do, and finds
//! ours there. What it calls while we are inside it ([`unbroken_nics::inside`]) goes on to it. So
//! does everything where the program uses devices of the machine and failover is off: then it has
//! libibverbs as if we were not there.
//!
//! [`pass!`] stands first in each definition. `tests/e2e/test_pass_through.py` reads which
//! functions the installed libraries import, and fails where one of them does not begin so.

use std::ffi::{c_int, CStr};
use std::mem::transmute_copy;
use unbroken_nics::{inside, is_bypassed, HostNics};

/// Whether a call of a verb is for libibverbs itself.
#[inline]
pub fn is_asked() -> bool {
    inside::is_inside() || is_bypassed()
}

/// Marks the calling thread as inside libibverbs, for other libraries of ours in this process
/// ([`inside::Marker`]).
#[no_mangle]
pub extern "C" fn unbroken_mark_inside_libibverbs(step: c_int) {
    inside::mark(step);
}

/// libibverbs' function of that name, as a pointer of the type of `_like`, which is ours of the
/// same name. None where the installed version has none.
pub fn function<F: Copy>(name: &CStr, _like: F) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<usize>()) };
    let address = HostNics::library_function(name)?;
    // SAFETY: a pointer to a function of the same signature: that of the public header.
    Some(unsafe { transmute_copy(&address) })
}

/// Hands a call on to libibverbs' function of the same name, if it is asked for.
macro_rules! pass {
    (@any $arg:ident) => { _ };
    ($name:ident($($arg:ident),*)) => {
        if $crate::real::is_asked() {
            let name = concat!(stringify!($name), "\0").as_bytes();
            // The name ends with its only NUL.
            if let Ok(name) = std::ffi::CStr::from_bytes_with_nul(name) {
                let ours = $name as unsafe extern "C" fn($(pass!(@any $arg)),*) -> _;
                if let Some(real) = $crate::real::function(name, ours) {
                    // SAFETY: as our caller has promised to that function.
                    #[allow(unused_unsafe)]
                    return unsafe { real($($arg),*) };
                }
            }
        }
    };
}
pub(crate) use pass;
