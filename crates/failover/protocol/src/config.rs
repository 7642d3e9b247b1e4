//! Settings and counters of a logical QP.

/// Settings of a [`crate::LogicalQp`]. All times are microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Config {
    /// First interval between repetitions of a Hello that was not heard; doubles each time.
    pub hello_min_us: u64,
    /// First interval between repetitions of a Hello, Propose or Drained of a planned switch that
    /// was not heard; doubles each time.
    pub plan_min_us: u64,
    /// So much longer for each QP of the process that is on its way, too: the peer has as many to
    /// see to.
    pub plan_crowd_us: u64,
    /// Longest interval between repetitions of a Hello.
    pub hello_max_us: u64,
    /// The shell must answer Quiesce, Open and CheckReplay within this time.
    pub step_us: u64,
    /// The peer may be silent for this long during a switch (it may be stopped, not dead).
    pub peer_silence_us: u64,
    /// The peer may say for this long that it does not know the QP (it may not have connected its
    /// end yet).
    pub unknown_grace_us: u64,
    /// A switch, over all epochs that it takes, ends within this time.
    pub total_us: u64,
    /// Epochs that may be tried at once, without a pause between them, while nothing moves.
    pub free_epochs: u32,
    /// Epochs that may be tried in all while nothing moves.
    pub max_epochs: u32,
    /// Longest pause between epochs once the free ones are used up.
    pub epoch_pause_max_us: u64,
    /// A path that has carried the QP for this long counts as good, even when nothing was there to
    /// be moved.
    pub settle_us: u64,
    /// The sends of a planned switch's fence may stand still for this long; then it is cancelled.
    pub fence_us: u64,
    /// A fence takes no longer than this.
    pub fence_total_us: u64,
    /// Leaves a rule out, so that the tests can show that they would notice.
    #[doc(hidden)]
    pub mutation: crate::Mutation,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            // Short: a Hello that waits on its path for a thread without a core is overtaken by the
            // next, over another path.
            hello_min_us: 300,
            // Longer: the old path works, so a message is seldom lost, and hundreds of QPs that say
            // everything again keep the peer from answering.
            plan_min_us: 5_000,
            plan_crowd_us: 100,
            hello_max_us: 50_000,
            step_us: 5_000_000,
            peer_silence_us: 20_000_000,
            unknown_grace_us: 1_000_000,
            total_us: 30_000_000,
            free_epochs: 8,
            max_epochs: 256,
            epoch_pause_max_us: 100_000,
            settle_us: 1_000_000,
            fence_us: 50_000,
            fence_total_us: 5_000_000,
            mutation: crate::Mutation::None,
        }
    }
}

/// What a logical QP has counted since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Counters {
    /// Switches that ended with the QP carried by another path.
    pub switches: u64,
    /// Epochs entered, whether or not the switch ended there.
    pub epochs_entered: u64,
    /// Hellos sent, repetitions and answers included.
    pub hellos_sent: u64,
    /// Hellos of an epoch that is over.
    pub stale_hellos: u64,
    /// Messages with numbers that cannot be.
    pub impossible: u64,
    /// Messages for or from another incarnation.
    pub wrong_incarnation: u64,
    /// Messages of another connection of the two QPs.
    pub wrong_connection: u64,
    /// Messages that name another QP.
    pub misaddressed: u64,
    /// Suspicions of a life that was over already.
    pub stale_suspicions: u64,
    /// Planned switches that were cancelled.
    pub plans_cancelled: u64,
    /// Fresh physical QPs that could not be made.
    pub open_errors: u64,
    /// Control messages dropped because the shell does not fetch its actions.
    pub sends_dropped: u64,
}
