//! Why nothing can be served.

use std::io;
use std::net::SocketAddr;

use unbroken_observe::ObserveError;

/// Why nothing can be served.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Others than this machine's users would see it, and nothing was said about who may.
    #[error(
        "{0} is not of the loopback interface: give --token-file FILE, which clients must send"
    )]
    Open(SocketAddr),
    /// The file of the token.
    #[error("token file {path}: {why}")]
    Token {
        /// The file.
        path: String,
        /// What is wrong with it, and what would be right.
        why: String,
    },
    /// The runtime folder cannot be observed.
    #[error(transparent)]
    Observe(#[from] ObserveError),
}

/// What can be served, or why not.
pub type Result<T> = std::result::Result<T, WebError>;
