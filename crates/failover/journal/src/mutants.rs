//! Rules that tests leave out, to show that they would notice. They are there in this crate's unit
//! tests, and with the feature `mutants`, which nothing that ships has. Elsewhere there are none,
//! and the code asks for none.

/// A rule to leave out: for tests of the tests alone.
#[doc(hidden)]
#[cfg(any(test, feature = "mutants"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// The product as it is.
    #[default]
    None,
    /// A flush that comes by itself reaches the application.
    FlushLetThrough,
    /// The QP counts as stopped as soon as it is in ERR.
    NoMarker,
    /// Sends that make no WC are not kept.
    UnsignaledLost,
    /// What the peer has executed completes as soon as it is given over.
    ExecutedEarly,
    /// A success that arrives while the QP is being stopped is taken for a flush.
    LateSuccessLost,
    /// Receives that complete while the QP is being stopped are not counted.
    LateReceiveUncounted,
    /// What the peer has executed goes on the wire again.
    ExecutedAgain,
    /// An error of the application's own is held like one of the network.
    OwnErrorHeld,
    /// Sends before the first error, or before the marker, count as done.
    FlushTrusted,
    /// A flush that stands still is waited for.
    FlushAwaited,
    /// A success completes in place, whatever is to complete with it.
    UsualTooSoon,
}

/// There is no rule to leave out.
#[doc(hidden)]
#[cfg(not(any(test, feature = "mutants")))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// Nothing is left out.
    #[default]
    None,
}

pub(crate) use unbroken_mutants::left_out;
