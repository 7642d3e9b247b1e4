//! Rules that tests leave out, to show that they would notice. They are there in this crate's unit
//! tests, and with the feature `mutants`, which nothing that ships has. Elsewhere there are none,
//! and the code asks for none.

/// A rule of the switch to leave out: for tests of the tests alone.
#[doc(hidden)]
#[cfg(any(test, feature = "mutants"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum Mutation {
    /// The product as it is.
    #[default]
    None,
    /// What the peer says it has executed is ignored.
    NoCounts,
    /// Sending starts without the peer's Hello of the epoch.
    Early,
    /// A Hello of a higher epoch is ignored.
    NoFollow,
    /// A planned switch does not wait until its own sends are complete.
    NoFence,
    /// A planned switch does not wait until the peer's sends are complete.
    FenceNotAwaited,
    /// A peer that counts receives only is taken for one that counts all.
    NoCountKind,
    /// What must not run twice is sent again like everything else.
    NoCheck,
    /// A QP that an error of the program has ended is moved like any other.
    EndedRevived,
    /// The peer of a QP through which nothing ever came is not asked whether the ends fit.
    UnprovenRevived,
    /// What the peer has sent counts as proof that our requests arrive.
    HeardIsProof,
    /// A path that does not answer is given up although no other answers either.
    NoWitness,
    /// A path whose answers have taken long is given up as soon as any other.
    NoQueue,
    /// Paths that were tried in vain are chosen like others.
    Forgetful,
    /// A path that loses much is left although all others lose as much.
    GreyAlone,
    /// A transport that has given up on a path that loses much does not go on.
    NeverGoesOn,
}

/// There is no rule to leave out.
#[doc(hidden)]
#[cfg(not(any(test, feature = "mutants")))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum Mutation {
    /// Nothing is left out.
    #[default]
    None,
}

pub(crate) use unbroken_mutants::left_out;
