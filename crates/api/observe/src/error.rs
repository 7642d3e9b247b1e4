//! Why a runtime folder cannot be observed.

use std::io;

use unbroken_fabric::{FabricError, RuntimeError};

/// Why a runtime folder cannot be observed.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// A file or socket of it.
    #[error("{what}: {source}")]
    Io {
        /// What was read.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// Its fabric.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The folder itself.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// What was given to be read, and what would be right.
    #[error("{0}")]
    Input(String),
}

/// What can be observed, or why not.
pub type Result<T> = std::result::Result<T, ObserveError>;

impl ObserveError {
    /// An error of a file or socket, with what was read.
    pub(crate) fn io(what: impl std::fmt::Display, source: io::Error) -> ObserveError {
        ObserveError::Io { what: what.to_string(), source }
    }
}
