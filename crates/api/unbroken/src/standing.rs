//! How a queue pair stands: whether it is protected, and which path carries it.

use std::fmt;

/// Whether a queue pair goes on when its NIC or its path fails.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Protection {
    /// The next failure moves it to another path.
    Protected,
    /// Its peer is being looked for in the directory: it will be protected as soon as that is
    /// found. Until then the next failure may end it.
    Pending {
        /// Why it is not yet, in words.
        reason: String,
    },
    /// The next failure ends it.
    Unprotected {
        /// Why, in words: it was made plain, or the peer has no other NIC, say.
        reason: String,
    },
}

impl Protection {
    /// Whether the next failure moves the queue pair to another path.
    pub fn is_protected(&self) -> bool {
        matches!(self, Protection::Protected)
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Protection::Protected => f.write_str("protected"),
            Protection::Pending { reason } => write!(f, "not protected yet: {reason}"),
            Protection::Unprotected { reason } => write!(f, "not protected: {reason}"),
        }
    }
}

/// The path that carries a logical queue pair. As text: `a/0-b/0`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Path {
    /// Name of the NIC at this end: `a/0` in the emulated network, else its address.
    pub local: String,
    /// Name of the peer's NIC.
    pub remote: String,
    /// How often the queue pair has moved: 0 on its first path.
    pub epoch: u32,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.local, self.remote)
    }
}
