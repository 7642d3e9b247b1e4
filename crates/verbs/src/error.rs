//! Errors of verbs: an errno for C callers and a sentence for people.

use std::borrow::Cow;
use unbroken_process::Forked;
use unbroken_types::{PathError, PostError};

/// A verb failed. `errno` is what the C caller gets; the text names what was wrong and what would
/// be right.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}")]
pub struct Error {
    errno: i32,
    what: Cow<'static, str>,
}

impl Error {
    /// An error with an errno of the caller's choice.
    pub fn new(errno: i32, what: impl Into<Cow<'static, str>>) -> Error {
        Error { errno, what: what.into() }
    }

    /// EINVAL: an argument is wrong.
    pub fn invalid(what: impl Into<Cow<'static, str>>) -> Error {
        Error::new(libc::EINVAL, what)
    }

    /// EOPNOTSUPP: a verb, opcode or flag that this device does not have.
    pub fn unsupported(what: impl Into<Cow<'static, str>>) -> Error {
        Error::new(libc::EOPNOTSUPP, what)
    }

    /// ENOMEM: a queue or a table is full.
    pub fn no_room(what: impl Into<Cow<'static, str>>) -> Error {
        Error::new(libc::ENOMEM, what)
    }

    /// EIO: the device is gone.
    pub fn device_gone(what: impl Into<Cow<'static, str>>) -> Error {
        Error::new(libc::EIO, what)
    }

    /// The errno of a failed system call, with what was tried.
    pub fn os(what: &str, err: &std::io::Error) -> Error {
        Error::new(err.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {err}"))
    }

    /// The errno for C callers; never 0.
    pub fn errno(&self) -> i32 {
        self.errno
    }
}

impl From<Forked> for Error {
    #[cold]
    fn from(e: Forked) -> Error {
        Error::device_gone(e.to_string())
    }
}

impl From<PathError> for Error {
    #[cold]
    fn from(e: PathError) -> Error {
        Error::invalid(e.to_string())
    }
}

impl From<PostError> for Error {
    #[cold]
    fn from(e: PostError) -> Error {
        let errno = match e {
            PostError::QueueFull(_) => libc::ENOMEM,
            PostError::Unsupported(_) => libc::EOPNOTSUPP,
            _ => libc::EINVAL,
        };
        Error::new(errno, e.to_string())
    }
}
