//! Rules that tests leave out, to show that they would notice. They are there in this crate's unit
//! tests, and with the feature `mutants`, which nothing that ships has. Elsewhere there are none,
//! and the code asks for none.

/// A rule that a QP leaves out, to show that tests notice.
#[doc(hidden)]
#[cfg(any(test, feature = "mutants"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// Nothing is left out.
    #[default]
    None,
    /// A packet that was kept is executed twice.
    ExecuteTwice,
    /// The data of a WRITE is placed when it comes, also before its turn.
    PlaceEarly,
    /// The map in a NAK is one PSN off.
    ShiftMap,
    /// What an atomic found is not kept: its repeat gets no answer.
    ForgetAtomics,
    /// Requests leave before the acknowledgement that is owed.
    AckLate,
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
