//! What goes wrong in a trial.

use std::io;

/// The result of this crate.
pub type Result<T> = std::result::Result<T, TrialError>;

/// Why a trial could not be held.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The fabric of the lab.
    #[error(transparent)]
    Fabric(#[from] unbroken_fabric::FabricError),
    /// The runtime folder of the lab.
    #[error(transparent)]
    Runtime(#[from] unbroken_fabric::RuntimeError),
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A program did not do what it should.
    #[error("{program} {what}{}", shown(.output))]
    Program {
        /// Its name.
        program: String,
        /// What happened.
        what: String,
        /// The end of its output.
        output: String,
    },
}

impl TrialError {
    /// Makes an [`TrialError::Io`] of what was tried.
    pub fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> TrialError {
        let action = action.into();
        move |source| TrialError::Io { action, source }
    }
}

fn shown(output: &str) -> String {
    match output.trim_end() {
        "" => String::new(),
        text => format!("; its output ends with:\n{text}"),
    }
}
