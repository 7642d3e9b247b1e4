//! What shift asks of a directory, and what a directory asks of its process.

use unbroken_types::Gid;

use crate::error::Result;
use crate::record::{MovedQp, ProcessRecord, KEY_BYTES};

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
