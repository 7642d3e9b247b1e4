//! What can go wrong.

use thiserror::Error;

/// An error of a communicator.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The communicator is broken, at all ranks. It can do nothing more.
    #[error("{0}")]
    Broken(#[from] unbroken_collective_protocol::Failure),
    /// The request does not make sense; nothing was done.
    #[error("{0}")]
    Refused(String),
    /// So many operations are under way that no other finds room; wait for one of them.
    #[error(
        "{0} operations wait already; wait for one of them, or ask for more room (`Options::queue`)"
    )]
    Full(usize),
    /// The ranks did not find each other.
    #[error("{0}")]
    Bootstrap(String),
    /// A NIC or its memory.
    #[error("{0}{hint}", hint = crate::limits::hint(Some(.0.errno())))]
    Verbs(#[from] unbroken::Error),
    /// Sockets and threads.
    #[error("{what}: {error}{hint}", hint = crate::limits::descriptors(error))]
    Io {
        /// What was tried.
        what: String,
        /// What came of it.
        error: std::io::Error,
    },
}

impl From<unbroken_schedule::Error> for Error {
    fn from(error: unbroken_schedule::Error) -> Error {
        Error::Refused(error.to_string())
    }
}

/// For `map_err`.
pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.into();
    move |error| Error::Io { what, error }
}

/// What a communicator gives.
pub type Result<T> = std::result::Result<T, Error>;
