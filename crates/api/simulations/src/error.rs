//! Why there is no answer.

use serde::Serialize;

/// Of what kind an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The question makes no sense.
    Value,
    /// The system refused something: a file, a thread.
    System,
    /// The answer is not wanted any longer.
    Stopped,
    /// A defect of this library.
    Defect,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Error {
    /// Of what kind.
    pub kind: Kind,
    /// The option that is wrong, if it is one: `nic-rate`.
    pub argument: Option<String>,
    /// What is wrong, and what would be right.
    pub text: String,
}

/// An answer, or why there is none.
pub type Result<T = ()> = std::result::Result<T, Error>;

impl Error {
    /// An option has a wrong value.
    pub(crate) fn value(argument: &str, text: impl Into<String>) -> Error {
        Error { kind: Kind::Value, argument: Some(argument.into()), text: text.into() }
    }

    /// The system refused something.
    pub(crate) fn system(argument: Option<&str>, text: impl Into<String>) -> Error {
        Error { kind: Kind::System, argument: argument.map(String::from), text: text.into() }
    }

    /// A file of an option cannot be used.
    pub(crate) fn file(argument: &str, what: String, error: std::io::Error) -> Error {
        Error::system(Some(argument), format!("{what}: {error}"))
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

impl From<unbroken_simulate::Error> for Error {
    fn from(e: unbroken_simulate::Error) -> Error {
        let kind = match e {
            unbroken_simulate::Error::Stopped => Kind::Stopped,
            _ => Kind::Value,
        };
        Error { kind, argument: e.argument().map(String::from), text: e.to_string() }
    }
}
