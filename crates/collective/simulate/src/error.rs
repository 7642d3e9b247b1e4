//! What can be wrong with a question.

use thiserror::Error;

/// Why something is not simulated.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Error {
    /// A number that makes no sense.
    #[error("{what} is {given}; {right}")]
    Value {
        /// The option that it was given with.
        argument: &'static str,
        /// Of what.
        what: &'static str,
        /// As it was given.
        given: String,
        /// What would be right.
        right: String,
    },
    /// A part that is not there.
    #[error("'{name}' is not there: {right}")]
    Unknown {
        /// The option that it was given with.
        argument: &'static str,
        /// As it was given.
        name: String,
        /// What there is.
        right: String,
    },
    /// A line of a file that cannot be read.
    #[error("line {line}: {what}")]
    Line {
        /// Its number; the first is 1.
        line: usize,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// What was computed is not wanted any longer.
    #[error("stopped")]
    Stopped,
    /// The schedule's own refusal.
    #[error(transparent)]
    Schedule(#[from] unbroken_schedule::Error),
}

impl Error {
    pub(crate) fn value(
        argument: &'static str,
        what: &'static str,
        given: impl ToString,
        right: impl ToString,
    ) -> Error {
        Error::Value { argument, what, given: given.to_string(), right: right.to_string() }
    }

    /// The option that is wrong, as the command has it: `nic-rate`.
    pub fn argument(&self) -> Option<&'static str> {
        match self {
            Error::Value { argument, .. } | Error::Unknown { argument, .. } => Some(argument),
            Error::Line { .. } => Some("trace"),
            Error::Stopped | Error::Schedule(_) => None,
        }
    }
}
