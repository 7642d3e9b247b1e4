//! What goes wrong in a lab.

use std::io;
use std::time::{Duration, Instant};

/// How often a condition is looked at while it is waited for.
const LOOK: Duration = Duration::from_millis(10);

/// Why a call has failed. A test that unwraps it shows the reason.
#[derive(thiserror::Error)]
pub enum Error {
    /// The system refused something.
    #[error("{what}: {why}")]
    System {
        /// What was tried.
        what: String,
        /// What the system says.
        why: io::Error,
    },
    /// The command `unbroken` failed.
    #[error("unbroken {words}: {said}")]
    Command {
        /// Its arguments.
        words: String,
        /// What it printed.
        said: String,
    },
    /// What the test has asked for is not so, or did not come in time.
    #[error("{0}")]
    NotSo(String),
}

/// `unwrap()` and a test that returns it show the words.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// What calls of the lab give.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    move |why| Error::System { what, why }
}

/// Asks until there is an answer; an error, with `what`, after `timeout`.
pub(crate) fn wait_until<T>(
    timeout: Duration,
    what: impl FnOnce() -> String,
    mut answer: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(answer) = answer()? {
            return Ok(answer);
        }
        if begun.elapsed() > timeout {
            return Err(Error::NotSo(format!("{}: not within {timeout:?}", what())));
        }
        std::thread::sleep(LOOK);
    }
}
