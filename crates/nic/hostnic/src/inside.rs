//! Whether a thread is inside the installed libibverbs.
//!
//! Where a program has been given our own `ibv_*` functions, libibverbs and its providers find
//! ours, too, when they call each other: they reach their own public functions through the dynamic
//! linker. So each call that we make into libibverbs is marked, and our definitions hand marked
//! calls on to libibverbs.
//!
//! Several libraries of a process may have this module: the one with our `ibv_*` functions, and
//! libraries for programs, such as that of collectives, which use libibverbs for themselves. The
//! functions look at the mark of their own library, so the others make that one ([`Marker`]), too.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;

/// Adds to the mark of the calling thread in the library that has our `ibv_*` functions.
pub type Marker = unsafe extern "C" fn(step: c_int);

/// The name of that library's [`Marker`].
const MARKER: &std::ffi::CStr = c"unbroken_mark_inside_libibverbs";

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether the calling thread is inside a call that was made by [`enter`].
#[inline]
pub fn is_inside() -> bool {
    // A thread that ends has no such variable any more, and calls nothing.
    DEPTH.try_with(|depth| depth.get() > 0).unwrap_or(false)
}

/// Adds to the mark of the calling thread in this library.
#[inline]
pub fn mark(step: i32) {
    let _ = DEPTH.try_with(|depth| depth.set(depth.get().saturating_add_signed(step)));
}

/// The marker of the library that has our `ibv_*` functions, where the process has that library.
fn marker() -> Option<Marker> {
    static FOUND: OnceLock<Option<Marker>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, MARKER.as_ptr()) };
        // SAFETY: a function of that name is ours, and has this signature.
        (!found.is_null())
            .then(|| unsafe { std::mem::transmute::<*mut libc::c_void, Marker>(found) })
    })
}

/// Runs a call of libibverbs: what it calls in this thread is its own.
#[inline]
pub fn enter<T>(call: impl FnOnce() -> T) -> T {
    struct Marked(Option<Marker>);
    impl Marked {
        fn step(&self, step: i32) {
            mark(step);
            if let Some(marker) = self.0 {
                // SAFETY: it takes any number.
                unsafe { marker(step) };
            }
        }
    }
    impl Drop for Marked {
        fn drop(&mut self) {
            self.step(-1);
        }
    }
    let marked = Marked(marker());
    marked.step(1);
    call()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_inside_until_the_outermost_call_ends() {
        assert!(!is_inside());
        enter(|| {
            enter(|| assert!(is_inside()));
            assert!(is_inside());
            assert!(!std::thread::spawn(is_inside).join().unwrap());
        });
        assert!(!is_inside());
        let _ = std::panic::catch_unwind(|| enter(|| panic!("inside")));
        assert!(!is_inside());
    }
}
