//! The clock: microseconds since the process first asked.

use std::sync::OnceLock;
use std::time::Instant;

static START: OnceLock<Instant> = OnceLock::new();

/// Microseconds, the same in all threads.
pub(crate) fn now_us() -> u64 {
    START.get_or_init(Instant::now).elapsed().as_micros() as u64
}
