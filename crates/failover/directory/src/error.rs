//! Errors of the directory.

use std::path::Path;

/// Why the directory did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// A system call failed.
    #[error("directory {path}: cannot {action}: {source}")]
    Io {
        /// The folder.
        path: String,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The file is damaged.
    #[error(
        "directory {path}: {what}; name another folder in UNBROKEN_RUNTIME, or end the programs \
         that use this one, and the next makes it anew"
    )]
    Damaged {
        /// The folder.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// LMDB failed otherwise.
    #[error("directory {path}: cannot {action}: {what}")]
    Store {
        /// The folder.
        path: String,
        /// What was tried.
        action: &'static str,
        /// LMDB's words.
        what: String,
    },
    /// No space is left, even without the entries of dead processes.
    #[error("directory {path}: full; at most {limit_bytes} bytes of entries are kept")]
    Full {
        /// The folder.
        path: String,
        /// The limit.
        limit_bytes: usize,
    },
    /// A setting is wrong.
    #[error("{0}")]
    Setting(String),
    /// The server cannot be asked, or has not answered so far.
    #[error("directory {url}: {why}")]
    Unreachable {
        /// Which, without its password.
        url: String,
        /// Why.
        why: String,
    },
    /// The record cannot be stored.
    #[error("directory: {0}")]
    Record(String),
    /// This is a forked child of the process that opened it.
    #[error("directory: opened by the parent of this forked process: a child opens its own")]
    Forked,
}

impl DirectoryError {
    pub(crate) fn io(
        path: &Path,
        action: &'static str,
    ) -> impl FnOnce(std::io::Error) -> DirectoryError {
        let path = path.display().to_string();
        move |source| DirectoryError::Io { path, action, source }
    }

    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> DirectoryError {
        DirectoryError::Damaged { path: path.display().to_string(), what: what.into() }
    }

    pub(crate) fn store(path: &Path, action: &'static str, error: &heed::Error) -> DirectoryError {
        use heed::MdbError::{BadTxn, Corrupted, Invalid, PageNotFound, Panic, VersionMismatch};
        match error {
            heed::Error::Mdb(
                Corrupted | Invalid | PageNotFound | Panic | VersionMismatch | BadTxn,
            ) => DirectoryError::damaged(path, format!("damaged ({error})")),
            _ => DirectoryError::Store {
                path: path.display().to_string(),
                action,
                what: error.to_string(),
            },
        }
    }
}

/// The result of this crate.
pub(crate) type Result<T> = std::result::Result<T, DirectoryError>;
