//! Errors: what went wrong, and where it can be told, what would be right.

use std::error::Error;
use std::fmt::Display;

/// Why an edge could not be set up, watched, changed or taken down.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EdgeError {
    /// The configuration is wrong, or does not fit this machine.
    #[error("line {line}: {why}")]
    Config {
        /// Where in the configuration.
        line: usize,
        /// What is wrong there, and what would be right.
        why: String,
    },
    /// A file, a socket or an answer is not as it should be.
    #[error("{what}: {source}")]
    At {
        /// What it is about: a path, a daemon, a part of the kernel.
        what: String,
        /// Why.
        source: Why,
    },
    /// A program of the system ended with an error, or did not end.
    #[error("{command}: {why}")]
    Command {
        /// As it was started.
        command: String,
        /// What it wrote.
        why: String,
    },
    /// The kernel refused a rule, or a look at its tables.
    #[error("{0}")]
    Kernel(String),
    /// FRR's daemons answer with an error, or not at all.
    #[error("{0}")]
    Frr(String),
    /// What was asked for cannot be done here and now.
    #[error("{0}")]
    Refused(String),
}

/// What is behind an error.
pub(crate) type Why = Box<dyn Error + Send + Sync>;

/// What this crate gives.
pub type Result<T, E = EdgeError> = std::result::Result<T, E>;

impl EdgeError {
    /// What an error is about, for `map_err`.
    pub(crate) fn at<E>(what: impl Display) -> impl Fn(E) -> EdgeError
    where
        E: Into<Why>,
    {
        move |source| EdgeError::At { what: what.to_string(), source: source.into() }
    }

    /// What is wrong in a line of the configuration.
    pub(crate) fn config(line: usize, why: impl Display) -> EdgeError {
        EdgeError::Config { line, why: why.to_string() }
    }
}
