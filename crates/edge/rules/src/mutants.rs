//! Rules that tests leave out, to show that they would notice. They are there in this crate's unit
//! tests, and with the feature `mutants`, which nothing that ships has. Elsewhere there are none,
//! and the code asks for none.

/// A rule that is left out, so that tests show that it is needed.
#[doc(hidden)]
#[cfg(any(test, feature = "mutants"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutation {
    /// Nothing is left out.
    #[default]
    None,
    /// The cookie is not looked at.
    IgnoreCookie,
    /// The range of handles is not looked at.
    IgnoreHandles,
    /// A shared action is changed where it stands.
    EditActions,
    /// Actions are removed before the filters that refer to them.
    ActionsFirst,
    /// Old filters are removed before the new ones are made.
    DeleteFirst,
    /// Entries that traffic made count, too.
    AnyFdbEntry,
    /// Entries for floods count, too.
    ZeroMacs,
    /// Only notifications make it look.
    NoResync,
    /// A torn dump is taken for a whole one.
    IgnoreInterrupted,
    /// An answer is waited for without end.
    NoTimeout,
    /// What fails is not tried again before the next resync, and that one not after a failure.
    NoRetry,
    /// Filters are made also when their actions could not be.
    BindBlindly,
    /// Tenants share their filters' destinations.
    OneTenant,
}

/// There is no rule to leave out.
#[doc(hidden)]
#[cfg(not(any(test, feature = "mutants")))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutation {
    /// Nothing is left out.
    #[default]
    None,
}

pub(crate) use unbroken_mutants::left_out;
