//! The times by which a path is taken for dead, tried again, and trusted.

/// Settings, in microseconds of the observer's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HealthConfig {
    /// Between two probes of a path that is asked, at first. It doubles while nobody answers at
    /// all.
    pub interval_us: u64,
    /// See `interval_us`: at most.
    pub interval_max_us: u64,
    /// A path that has not answered by then is dead, if another has.
    pub round_us: u64,
    /// If no path answers: dead all the same, after so long. The peer may be stopped, and comes
    /// back on the same path then.
    pub silent_peer_us: u64,
    /// A path that had failed is steady when it has lived for so long since; twice that after each
    /// failure more, and at most `steady_max_us`.
    pub steady_us: u64,
    /// See `steady_us`.
    pub steady_max_us: u64,
    /// A failure counts as one more if the last was no longer ago.
    pub forget_us: u64,
    /// From a verdict of dead to the next probe: first, and at most (it doubles).
    pub retry_min_us: u64,
    /// See `retry_min_us`.
    pub retry_max_us: u64,
    /// The same of a path that has never lived.
    pub unproven_max_us: u64,
    /// A path that was compared with others for what it loses is not compared again for so long;
    /// twice that each time.
    pub grey_pause_us: u64,
    /// See `grey_pause_us`: at most.
    pub grey_pause_max_us: u64,
    /// Leaves a rule out, so that the tests can show that they would notice.
    #[doc(hidden)]
    pub mutation: crate::Mutation,
}

impl Default for HealthConfig {
    fn default() -> HealthConfig {
        HealthConfig {
            interval_us: 8_000,
            interval_max_us: 100_000,
            round_us: 45_000,
            silent_peer_us: 10_000_000,
            steady_us: 1_000_000,
            steady_max_us: 60_000_000,
            forget_us: 120_000_000,
            retry_min_us: 50_000,
            retry_max_us: 1_000_000,
            unproven_max_us: 10_000_000,
            grey_pause_us: 1_000_000,
            grey_pause_max_us: 10_000_000,
            mutation: crate::Mutation::None,
        }
    }
}
