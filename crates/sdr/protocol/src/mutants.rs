//! Rules that tests leave out, to show that they would notice. They are there in this crate's unit
//! tests, and with the feature `mutants`, which nothing that ships has. Elsewhere there are none,
//! and the code asks for none.

/// A rule that is left out, for tests which must notice.
#[doc(hidden)]
#[cfg(any(test, feature = "mutants"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Stage one: the key of a message that has ended goes on naming its buffer.
    KeyStays,
    /// Stage two: completions of other generations count.
    AnyGeneration,
    /// Stage two: an id is used again in the same generation without waiting for the packet
    /// lifetime.
    NoLifetime,
}

/// There is no rule to leave out.
#[doc(hidden)]
#[cfg(not(any(test, feature = "mutants")))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {}

pub(crate) use unbroken_mutants::left_out;
