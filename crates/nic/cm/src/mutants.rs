//! Rules that this crate's unit tests leave out, to show that they would notice. Elsewhere there are
//! none.

/// A rule that is left out.
#[cfg(any(test, feature = "mutants"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Mutation {
    /// Nothing is left out.
    #[default]
    None,
    /// A request that comes twice is told twice.
    TellTwice,
    /// What is lost is not sent again.
    SendOnce,
    /// A message is believed whose sender has another name for the connection.
    BelieveStrangers,
    /// The name of a connection that is over is forgotten at once.
    ForgetAtOnce,
    /// The peer's DREQ is not answered.
    NoDrep,
}

/// There is no rule to leave out.
#[cfg(not(any(test, feature = "mutants")))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Mutation {
    /// Nothing is left out.
    #[default]
    None,
}

pub(crate) use unbroken_mutants::left_out;
