//! What shift asks of a directory, and what a directory asks of its process.
//!
//! *Nothing that a program does to a queue pair waits for the directory.* What is entered or taken
//! out is put down and done soon, in order, by a thread of the directory's own; what is asked is
//! answered when the answer is there.
//!
//! A QP that is connected is looked up like this:
//!
//! ```text
//! ask_qp ──> Later ── News::Answered ──> answer_qp ──> Peer | Nobody
//!    └─────> Peer | Nobody (at once, where no server is asked)
//! ```
//!
//! Invariants:
//! 1. An answer is younger than its question: what was known or under way before [`ask_qp`] is
//!    never given. The QPN may have been another QP's a moment ago.
//! 2. What is entered of one QP is done in its order, and at the end the last of it holds. So an
//!    entry goes some round trips after its QP, never later than a lease.
//! 3. Who takes out a QP takes out its own entry only, however late that is done: the number may be
//!    another process's by then.
//! 4. Queues are bounded: entries of a process, questions that wait, and what is known.
//!
//! Failure cases: a server that is away keeps nothing from happening; its return fills it again,
//! also where it has lost all. An answer may be older than a peer's entry that is still on its way;
//! so [`Found::Nobody`] is no last word, and who found somebody looks again a little later.
//!
//! [`ask_qp`]: Directory::ask_qp

use unbroken_types::Gid;

use crate::error::Result;
use crate::record::{MovedQp, ProcessRecord, KEY_BYTES};

/// A queue pair of a process, as it is entered under a GID and its QPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpEntry {
    /// The process.
    pub incarnation: u64,
    /// Which connection of the QP this is.
    pub connection: u32,
    /// The index of its NIC in the process, where that has another GID than the QP is entered
    /// under: ports have several, and a program may give its peer any of them.
    pub nic: Option<u32>,
}

impl QpEntry {
    /// Of a QP that is entered under the GID of its NIC.
    pub fn new(incarnation: u64, connection: u32) -> QpEntry {
        QpEntry { incarnation, connection, nic: None }
    }
}

/// What is found of a QP that one is connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is a QP of a living process.
    Peer {
        /// Of which process, and which of its NICs and connections.
        qp: QpEntry,
        /// Where the process can be reached.
        process: ProcessRecord,
    },
    /// It is not in the directory now.
    Nobody,
    /// That is not known yet; [`News::Answered`] follows where a server is asked.
    Later,
}

/// A directory, as shift needs it. One for each process; any number of threads.
///
/// [`ask_qp`](Directory::ask_qp), [`publish_qp`](Directory::publish_qp) and
/// [`unpublish_qp`](Directory::unpublish_qp) wait for nobody: programs' threads call them. All
/// other calls take microseconds, whatever a server does; the embedded directory's may wait for a
/// turn at its file, so the worker makes them, with no gate held.
pub trait Directory: Send + Sync {
    /// The directory's key: random bytes, the same for all who have it open; `None` while a server
    /// that keeps it has not answered yet.
    ///
    /// Who may open the directory may know it and nobody else can, so a message that is
    /// authenticated with it comes from a process of this directory.
    fn key(&self) -> Option<[u8; KEY_BYTES]>;

    /// Asks for a logical QP and its process. An error: it cannot be asked just now.
    fn ask_qp(&self, gid: Gid, qpn: u32) -> Result<Found>;

    /// What has come of the question; asks where nobody has.
    fn answer_qp(&self, gid: Gid, qpn: u32) -> Result<Found> {
        self.ask_qp(gid, qpn)
    }

    /// Enters a logical QP of this process, or its next connection. An error: there is no room.
    fn publish_qp(&self, gid: Gid, qpn: u32, qp: QpEntry) -> Result<()>;

    /// Takes a logical QP out; not an error if it is not there, or another process's by now.
    fn unpublish_qp(&self, gid: Gid, qpn: u32) -> Result<()>;

    /// The incarnation of the living process that has this logical QP, and the number of the QP's
    /// connection, as they were when that was looked up last. An error: it is not known.
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

    /// This process ends: takes everything out that it has entered. Waits for a fraction of a
    /// second at most.
    fn close(&self) {}
}

/// What a directory tells by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// There is an answer about these QPs ([`Directory::answer_qp`]).
    Answered(Vec<(Gid, u32)>),
    /// Entries were not taken; why.
    Refused(String),
    /// There is more to read about UD QPs that have moved.
    Moved,
    /// UD QPs of this process that have moved are entered, and [`Directory::processes`] has those
    /// that use them: they can be told.
    Entered,
    /// The server cannot be asked, and has never answered this process; why.
    Unreachable(String),
    /// The server, which has answered before, cannot be asked; why.
    Lost(String),
    /// It can be asked again. What was asked before is forgotten.
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
