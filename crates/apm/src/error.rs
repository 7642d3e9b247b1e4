//! Errors: a number of `errno.h`, and words.

use crate::machine::{Refusal, State, MAX_QPS};
use crate::path::{NoChoice, MAX_PATHS};

/// What was wrong, and what would be right.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Error {
    pub(crate) errno: i32,
    pub(crate) text: String,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(errno: i32, text: impl Into<String>) -> Error {
        Error { errno, text: text.into() }
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Error {
        Error::new(libc::EINVAL, text)
    }

    /// A call of the system or of libibverbs failed.
    pub(crate) fn call(name: &str, errno: i32) -> Error {
        let what = std::io::Error::from_raw_os_error(errno);
        Error::new(errno, format!("{name}: {what}"))
    }

    /// The same, with words before it.
    pub(crate) fn of(self, whom: &str) -> Error {
        Error { text: format!("{whom}: {}", self.text), ..self }
    }
}

/// The states by name, as C programs read them.
pub(crate) fn state_name(state: State) -> &'static str {
    ["UNLOADED", "LOADING", "REARM", "ARMED", "MIGRATING", "FAILED"][state as usize]
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        let (errno, text) = match refusal {
            Refusal::Unknown => {
                (libc::ENOENT, "it was not added: unbapm_add comes first".to_string())
            }
            Refusal::Twice => (libc::EEXIST, "it was added already".to_string()),
            Refusal::Full => (
                libc::ENOSPC,
                format!("{MAX_QPS} queue pairs were added: another unbapm_open has room"),
            ),
            Refusal::State(State::Loading | State::Migrating) => (
                libc::EBUSY,
                "a path is being loaded or migrated to: unbapm_wait waits for it".to_string(),
            ),
            Refusal::State(state) => (
                libc::EBUSY,
                format!("it is {}: only when it is ARMED it can migrate", state_name(state)),
            ),
            Refusal::NoPath => (
                libc::EINVAL,
                "it has no path but the one in use: unbapm_specify or unbapm_choose comes first"
                    .to_string(),
            ),
            Refusal::Unhealthy(ports) => (
                libc::ENETDOWN,
                format!(
                    "no path that could be loaded is healthy; those that are not in use have ports \
                     {ports:?}, and a link is down"
                ),
            ),
            Refusal::Paths(count) => (
                libc::EINVAL,
                format!(
                    "{count} paths: 1 to {MAX_PATHS}, the one in use included, are right for a \
                     queue pair"
                ),
            ),
        };
        Error { errno, text }
    }
}

impl From<NoChoice> for Error {
    fn from(why: NoChoice) -> Error {
        let (errno, text) = match why {
            NoChoice::OwnPort => (libc::EINVAL, "its port has no address"),
            NoChoice::PeerAddress => (
                libc::EINVAL,
                "the peer's address in use is not among those given: the peer's own \
                 unbapm_addresses are right, with the gid_index that the queue pair is connected \
                 by",
            ),
            NoChoice::NoOther => (
                libc::EHOSTUNREACH,
                "there is no path to the peer but the one in use: another port of the same kind at \
                 one end is needed",
            ),
        };
        Error::new(errno, text)
    }
}
