//! Errors of the fabric.

use std::io;
use std::path::Path;

use unbroken_runtime::RuntimeError;

/// Why the fabric cannot do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// The runtime folder cannot be used.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// A system call failed.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// A line of `fabric.toml` is wrong.
    #[error("{path}:{line}: {what}")]
    Config {
        /// The file.
        path: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// A shared page is not one, or is of another version.
    #[error(
        "{path}: {what}; name another folder in UNBROKEN_RUNTIME, or, while no program uses this \
         fabric, move the file away"
    )]
    Page {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// The second octet is in use, or none is left.
    #[error("{0}")]
    Octet(String),
    /// A fault, a NIC or a host was not understood or does not exist.
    #[error("{0}")]
    Name(String),
    /// The table of faults is full.
    #[error("{0} faults are set already, which is the limit; clear some first")]
    Full(usize),
}

impl FabricError {
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> FabricError {
        let path = path.display().to_string();
        move |source| FabricError::Io { path, action, source }
    }
}

/// The result of this crate.
pub(crate) type Result<T> = std::result::Result<T, FabricError>;
