//! What an extended poll looks at.

use unbroken_types::Wc;

/// The completion at hand and when it was taken.
#[derive(Clone, Copy, Default)]
pub struct Current {
    pub wc: Wc,
    /// What waited behind the first when `start_poll` was called: as much `next_poll` takes.
    pub left: u32,
    pub monotonic_ns: u64,
    pub wallclock_ns: u64,
    /// Which of the two clocks the program asked for: reading them costs more than the rest of a
    /// poll.
    pub wants_monotonic: bool,
    pub wants_wallclock: bool,
    /// The program polls from one thread, so that no lock is needed.
    pub single_threaded: bool,
}
