//! The directory: how peers find each other's control addresses.
//!
//! What it holds:
//! - (GID, QPN) of a logical QP → the incarnation of its process, and which connection of the QP it
//!   is;
//! - (GID, QPN) of a UD QP that has moved → where it is now ([`MovedQp`]);
//! - incarnation → where the process can be reached ([`ProcessRecord`]);
//! - one key ([`Directory::key`]), by which the processes that have the directory open know each
//!   other.
//!
//! Shift asks by the trait [`Directory`], and [`open`] gives the one that the [`Settings`] name:
//! - [`Lmdb`], embedded, in the runtime folder: for the processes of one machine. No server. An
//!   owner's life shows by the lock that it holds.
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
//! `unsafe` is the one call that opens LMDB.
#![deny(unsafe_code)]

mod check;
mod error;
mod lmdb;
mod record;
#[cfg(feature = "redis")]
mod redis;
mod settings;

pub use error::DirectoryError;
pub use lmdb::Lmdb;
#[doc(hidden)]
pub use record::check_value;
pub use record::{MovedQp, NicRecord, PortRecord, ProcessRecord, MAX_NAME, MAX_NICS, MAX_PORTS};
#[cfg(feature = "redis")]
pub use redis::Redis;
pub use settings::{RedisSettings, Settings, DEFAULT_VARIABLE};

use error::Result;
use unbroken_types::Gid;

/// Length of the directory's key.
pub const KEY_BYTES: usize = 32;

/// A directory, as shift needs it. One for each process; any number of threads.
///
/// *May wait for a server*, for a bounded time: [`fetch_qp`](Directory::fetch_qp),
/// [`settle`](Directory::settle), [`close`](Directory::close). Only threads of the application call
/// them, while they set QPs up and hold no lock that others need. All other calls take
/// microseconds, whatever the server does: they are answered from what this process knows, and what
/// they enter or take out is done soon.
pub trait Directory: Send + Sync {
    /// The directory's key: random bytes, the same for all who have it open; `None` while a server
    /// that keeps it has not answered yet.
    ///
    /// Who may open the directory may know it and nobody else can, so a message that is
    /// authenticated with it comes from a process of this directory.
    fn key(&self) -> Option<[u8; KEY_BYTES]>;

    /// Finds out about a logical QP and its process, so that the look-ups that follow know them.
    /// That it could not is said by [`lookup_qp`](Directory::lookup_qp).
    fn fetch_qp(&self, _gid: Gid, _qpn: u32) {}

    /// Waits until what this process has entered can be found by others, or as long as makes sense.
    fn settle(&self) {}

    /// Enters a logical QP of this process, or its next connection.
    fn publish_qp(&self, gid: Gid, qpn: u32, incarnation: u64, connection: u32) -> Result<()>;

    /// Takes a logical QP out; not an error if it is not there.
    fn unpublish_qp(&self, gid: Gid, qpn: u32) -> Result<()>;

    /// The incarnation of the living process that has this logical QP, and the number of the QP's
    /// connection. An error: it is not known.
    fn lookup_qp(&self, gid: Gid, qpn: u32) -> Result<Option<(u64, u32)>>;

    /// Enters where a process can be reached, in place of what was there.
    fn publish_process(&self, incarnation: u64, record: &ProcessRecord) -> Result<()>;

    /// Takes a process out, at its end; not an error if it is not there.
    fn unpublish_process(&self, incarnation: u64) -> Result<()>;

    /// Where a living process can be reached. `None`: it has ended. An error: it is not known.
    fn lookup_process(&self, incarnation: u64) -> Result<Option<ProcessRecord>>;

    /// The living processes, with their incarnations; of a server's, those that this one has to do
    /// with.
    fn processes(&self) -> Result<Vec<(u64, ProcessRecord)>>;

    /// Enters UD QPs of this process that have moved, in place of what was there.
    fn publish_moved(&self, moved: &[MovedQp]) -> Result<()>;

    /// Takes UD QPs out that are no more; not an error if they are not there.
    fn unpublish_moved(&self, known: &[(Gid, u32)]) -> Result<()>;

    /// All UD QPs of living processes that have moved. Of a server's, as far as is known;
    /// [`News::Moved`] follows when there is more.
    fn moved(&self) -> Result<Vec<MovedQp>>;

    /// This process ends: takes everything out that it has entered.
    fn close(&self) {}
}

/// What a directory tells by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// There is more to read about UD QPs that have moved.
    Moved,
    /// UD QPs of this process that have moved are entered, and [`Directory::processes`] has those
    /// that use them: they can be told.
    Entered,
    /// The server cannot be asked; why.
    Lost(String),
    /// It can be asked again.
    Back,
}

/// Starts a thread with that name.
pub type Spawn = fn(&str, Box<dyn FnOnce() + Send>) -> std::io::Result<()>;

/// What a directory needs of the process that it works in.
pub struct Surroundings {
    /// Starts the directory's thread, which is to take no signals.
    pub spawn: Spawn,
    /// Takes the news. Called by the directory's thread, which holds no lock then.
    pub news: Box<dyn Fn(News) + Send + Sync>,
}

/// Opens the directory that the settings name. A server that cannot be reached is not an error: it
/// may answer later.
#[cfg(feature = "redis")]
pub fn open(
    settings: &Settings,
    runtime: &unbroken_runtime::Runtime,
    surroundings: Surroundings,
) -> Result<Box<dyn Directory>> {
    match settings {
        Settings::Lmdb => Ok(Box::new(Lmdb::open(runtime)?)),
        Settings::Redis(settings) => Ok(Box::new(Redis::open(settings, surroundings)?)),
    }
}
