//! Rules that tests leave out, to show that they would notice. They are there in this crate's unit
//! tests, and with the feature `mutants`, which nothing that ships has. Elsewhere there are none,
//! and the code asks for none.

/// Rules that can be left out.
#[doc(hidden)]
#[cfg(any(test, feature = "mutants"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A stream goes on where its sender believes to be.
    SendersCount,
    /// A stream goes on before the receiver has said that nothing more comes over the old path.
    ImpatientSender,
    /// A frame that comes twice is used twice.
    NoDedup,
    /// Slots are written again before the receiver has done with them.
    NoCredit,
    /// What the sender takes an operation for does not matter.
    NoDigest,
    /// An operation is over when its data is, whether or not all ranks agree to it.
    NoConsent,
    /// An operation counts as begun when it was planned.
    LateBegin,
    /// A stream that is about to go home waits for that, also when the path home has failed again.
    Homesick,
    /// Ranks that have no rail in common have no path.
    NoDetour,
    /// A receive that has become ready takes what lies aside for it later than what comes next.
    LateReady,
    /// Who stands still names whom it waits for, whatever others have said.
    Hasty,
}

/// There is no rule to leave out.
#[doc(hidden)]
#[cfg(not(any(test, feature = "mutants")))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {}

pub(crate) use unbroken_mutants::left_out;
/// As the macro calls it.
#[cfg(any(test, feature = "mutants"))]
pub(crate) use Mutant as Mutation;
