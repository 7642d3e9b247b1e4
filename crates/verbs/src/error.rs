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

/// What sort of failure an [`Error`] is: what a program can act on, whatever the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is wrong, or the object is in a state in which the call makes no sense.
    InvalidInput,
    /// The NIC has no such verb, opcode or flag.
    Unsupported,
    /// A queue, a table or memory is full: the call may succeed once something is completed or
    /// freed.
    NoRoom,
    /// The NIC has failed or is gone.
    DeviceGone,
    /// Others still use the object, or a name that others have was asked for.
    Busy,
    /// There is no NIC, host or file of that name.
    NotFound,
    /// The user has no right to do it.
    PermissionDenied,
    /// It has not happened in time.
    TimedOut,
    /// Something else, which [`Error::errno`] tells.
    Other,
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

    /// What sort of failure it is.
    pub fn kind(&self) -> ErrorKind {
        match self.errno {
            libc::EINVAL | libc::EFAULT | libc::ERANGE => ErrorKind::InvalidInput,
            libc::EOPNOTSUPP | libc::ENOSYS => ErrorKind::Unsupported,
            libc::ENOMEM | libc::ENOSPC | libc::EAGAIN | libc::EMFILE | libc::ENFILE => {
                ErrorKind::NoRoom
            }
            libc::EIO | libc::ENODEV | libc::ENXIO => ErrorKind::DeviceGone,
            libc::EBUSY | libc::EEXIST | libc::EADDRINUSE => ErrorKind::Busy,
            libc::ENOENT => ErrorKind::NotFound,
            libc::EPERM | libc::EACCES => ErrorKind::PermissionDenied,
            libc::ETIMEDOUT => ErrorKind::TimedOut,
            _ => ErrorKind::Other,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_constructor_has_a_kind_of_its_own() {
        let kinds = [
            Error::invalid("x").kind(),
            Error::unsupported("x").kind(),
            Error::no_room("x").kind(),
            Error::device_gone("x").kind(),
            Error::os("x", &std::io::Error::from_raw_os_error(libc::EACCES)).kind(),
            Error::os("x", &std::io::Error::other("no number")).kind(),
        ];
        use ErrorKind::*;
        let right = [InvalidInput, Unsupported, NoRoom, DeviceGone, PermissionDenied, DeviceGone];
        assert_eq!(kinds, right);
    }
}
