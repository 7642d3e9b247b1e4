//! The directory: how peers find each other's control addresses.
//!
//! What it holds:
//! - (GID, QPN) of a logical QP → the incarnation of its process, and which connection of the QP it
//!   is ([`QpEntry`]); a QP that its program connects by another GID of the port is entered under
//!   that, too;
//! - (GID, QPN) of a UD QP that has moved → where it is now ([`MovedQp`]);
//! - incarnation → where the process can be reached ([`ProcessRecord`]);
//! - one key ([`Directory::key`]), by which the processes that have the directory open know each
//!   other.
//!
//! Shift asks by the trait [`Directory`], and [`open`] gives the one that the [`Settings`] name:
//! - [`Lmdb`], embedded, in the runtime folder: for the processes of one machine. No server. An
//!   owner's life shows by the lock that it holds. `deferred` puts the entries of QPs into it from
//!   a thread of its own.
//! - [`Redis`], for those of several machines. An owner's life shows by a lease. All I/O is in a
//!   thread of its own, behind a cache.
//!
//! What may wait, and for what: see [`Directory`].
//!
//! Fork: a child must not touch its parent's directory. Every call in it gives
//! [`DirectoryError::Forked`], and dropping the directory there leaves it alone.
//!
//! Failure cases: a damaged file is an error that names the folder to remove (see `check` for what
//! is looked at before LMDB may map it); a value that does not decode is an error, whoever wrote
//! it; a full table is an error after a sweep. No bytes in the file, and none that a server sends,
//! make this crate panic.
//!
//! Files use those that stand before them: `error`, `record`, `settings`; `directory` (the trait);
//! `check`; `lmdb` and `deferred`; `redis`.
//!
//! `unsafe` is the one call that opens LMDB.
#![deny(unsafe_code)]

mod check;
mod deferred;
mod directory;
mod error;
mod lmdb;
mod record;
#[cfg(feature = "redis")]
mod redis;
mod servers;
mod settings;

pub use directory::{Directory, Found, News, QpEntry, Spawn, Surroundings};
pub use error::DirectoryError;
pub use lmdb::Lmdb;
#[doc(hidden)]
pub use record::check_value;
pub use record::{
    MovedQp, NicRecord, PortRecord, ProcessRecord, KEY_BYTES, MAX_NAME, MAX_NICS, MAX_PORTS,
};
#[cfg(feature = "redis")]
pub use redis::Redis;
pub use servers::{Address, Servers};
pub use settings::{
    RedisSettings, Settings, DEFAULT_VARIABLE, PASSWORD_FILE_VARIABLE, PASSWORD_VARIABLE,
};

use error::Result;

/// Opens the directory that the settings name. A server that cannot be reached is not an error: it
/// may answer later.
#[cfg(feature = "redis")]
pub fn open(
    settings: &Settings,
    runtime: &unbroken_runtime::Runtime,
    surroundings: Surroundings,
) -> Result<Box<dyn Directory>> {
    match settings {
        Settings::Lmdb => {
            Ok(Box::new(deferred::Deferred::over(Lmdb::open(runtime)?, surroundings)?))
        }
        Settings::Redis(settings) => Ok(Box::new(Redis::open(settings, surroundings)?)),
    }
}
