//! Whether a thread is inside the installed libibverbs.
//!
//! Where a program has been given our own `ibv_*` functions, libibverbs and its providers find
//! ours, too, when they call each other: they reach their own public functions through the dynamic
//! linker. So each call that we make into libibverbs is marked, and our definitions hand marked
//! calls on to libibverbs.

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether the calling thread is inside a call that was made by [`enter`].
#[inline]
pub fn is_inside() -> bool {
    // A thread that ends has no such variable any more, and calls nothing.
    DEPTH.try_with(|depth| depth.get() > 0).unwrap_or(false)
}

/// Runs a call of libibverbs: what it calls in this thread is its own.
#[inline]
pub fn enter<T>(call: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            let _ = DEPTH.try_with(|depth| depth.set(depth.get().saturating_sub(1)));
        }
    }
    let _ = DEPTH.try_with(|depth| depth.set(depth.get() + 1));
    let _leave = Leave;
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
