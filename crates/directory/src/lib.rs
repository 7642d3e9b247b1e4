//! The embedded directory: how peers find each other's control addresses.
//!
//! Tables in an LMDB file (`<runtime>/directory/`) that all processes of a runtime folder open at once; no server:
//! - (GID, QPN) of a logical QP → the incarnation of its process;
//! - (GID, QPN) of a UD QP that has moved → where it is now ([`MovedQp`]);
//! - incarnation → where the process can be reached ([`ProcessRecord`]);
//! - one key ([`Directory::key`]), drawn when the directory is made anew, by which the processes that have it open know each other.
//!
//! An entry belongs to a living process, which is told by the lock that it holds ([`unbroken_telemetry::Presence`]). One of a dead process is never returned, is swept out when another process opens the
//! directory or when it is full, and the whole file is made anew by whoever opens it alone: nothing in it is worth keeping, so
//! nothing needs to reach the disk either (no fsync), and damage does not outlive the processes that saw it.
//!
//! Fork: a child must not touch its parent's environment. Every call in it gives [`DirectoryError::Forked`], and dropping the
//! directory there leaves the environment alone.
//!
//! Failure cases: a damaged file is an error that names the folder to remove (see `check` for what is looked at before LMDB may
//! map it); a value that does not decode is the same; a full table is an error after a sweep. No bytes in the file make this crate
//! panic.
//!
//! `unsafe` is the one call that opens LMDB.
#![deny(unsafe_code)]

mod check;
mod error;
mod record;
mod store;

pub use error::DirectoryError;
#[doc(hidden)]
pub use record::check_value;
pub use record::{MovedQp, NicRecord, ProcessRecord, MAX_NAME, MAX_NICS};
pub use store::{Directory, KEY_BYTES};
