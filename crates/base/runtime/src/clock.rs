//! The two clocks.

use rustix::time::{clock_gettime, ClockId};

/// CLOCK_MONOTONIC in µs: the time of everything in the project, the same for all processes of a
/// machine.
pub fn now_us() -> u64 {
    micros(ClockId::Monotonic)
}

/// The wall clock in µs since the epoch of Unix: only for people who read the log.
pub fn wall_us() -> u64 {
    micros(ClockId::Realtime)
}

fn micros(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    t.tv_sec as u64 * 1_000_000 + t.tv_nsec as u64 / 1_000
}
