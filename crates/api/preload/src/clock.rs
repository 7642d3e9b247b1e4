//! The clocks that completions are stamped with.

use std::time::{SystemTime, UNIX_EPOCH};

/// The clock that completions are stamped with, in nanoseconds.
#[inline]
pub fn monotonic_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes a live local; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Wall-clock nanoseconds since 1970.
#[inline]
pub fn wallclock_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}
