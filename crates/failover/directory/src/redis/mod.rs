//! A directory on a Redis server: for processes of several machines, which share nothing else than
//! the network.
//!
//! - `book`: the protocol, without I/O; in it `own`: what this process has entered, and `known`:
//!   what it knows of others.
//! - `thread`: the thread that alone talks to the server.
//! - `server`: which server has the entries, and how it is asked; in it `connection`: sockets, TLS
//!   and times; `resp`: the bytes, without I/O. `command`: what is asked.
//! - `fake`: a model of a server that fails and delays as a test wants it.
//!
//! What is published is put down in the book and done by the thread; what is looked up is answered
//! from the book, also while the server is away, and asked for in the background. Nothing waits for
//! the server but the end of the process ([`Directory::close`]).
//!
//! An entry expires a lease after it was last renewed. So one of a process that was killed is found
//! until then; a peer notices that it is dead by its silence, as it does between machines anyway.

mod book;
mod command;
mod connection;
#[cfg(test)]
mod fake;
mod known;
mod own;
mod resp;
mod server;
mod shared;
#[cfg(test)]
mod tests;
mod thread;

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use unbroken_runtime::fill_random;
use unbroken_types::Gid;

use crate::directory::{Directory, Found, QpEntry, Surroundings};
use crate::error::{DirectoryError, Result};
use crate::record::{MovedQp, ProcessRecord, QpRecord, KEY_BYTES};
use crate::settings::RedisSettings;

use book::{Book, State};
use command::{Connect, QpName};
use own::Entry;
use shared::Shared;

/// For so long a process that ends waits until its entries are taken out.
const CLOSE_WAIT: Duration = Duration::from_millis(300);

/// See the module's text. One for each process; any number of threads.
pub struct Redis {
    shared: Arc<Shared>,
    url: String,
    /// The process that opened it.
    pid: u32,
}

impl Redis {
    /// Opens the directory on this server. That it does not answer is no error: it is asked again
    /// until it does.
    ///
    /// Errors: the settings name files that cannot be read, or no thread can be started.
    pub fn open(settings: &RedisSettings, surroundings: Surroundings) -> Result<Redis> {
        let connect = server::Server::new(settings)?;
        Redis::over(Box::new(connect), settings, surroundings)
    }

    /// Whether the directory can be opened with these settings; the server is not asked.
    ///
    /// Errors: as [`Redis::open`].
    pub fn check(settings: &RedisSettings) -> Result<()> {
        server::Server::new(settings).map(drop)
    }

    /// Asks the server once whether it can be used, and says in words why not.
    pub fn probe(settings: &RedisSettings) -> Result<()> {
        let unreachable = |why| DirectoryError::Unreachable { url: settings.to_string(), why };
        server::Server::new(settings)?
            .connect()
            .and_then(|mut store| store.run(&[command::Command::Time]))
            .map_err(unreachable)?;
        Ok(())
    }

    fn over(
        connect: Box<dyn Connect>,
        settings: &RedisSettings,
        surroundings: Surroundings,
    ) -> Result<Redis> {
        let failed = |action: &'static str| {
            let url = settings.to_string();
            move |source: std::io::Error| DirectoryError::Unreachable {
                url,
                why: format!("cannot {action}: {source}"),
            }
        };
        let mut candidate = [0; KEY_BYTES];
        fill_random(&mut candidate).map_err(failed("draw its key"))?;
        let mut owner = [0; 8];
        fill_random(&mut owner).map_err(failed("draw its number"))?;
        let lease_ms = settings.lease.as_millis() as u64;
        let book =
            Book::new(&settings.key_prefix(), lease_ms, candidate, u64::from_ne_bytes(owner));
        let shared = Arc::new(Shared {
            book: Mutex::new(book),
            work: Condvar::new(),
            done: Condvar::new(),
            started: Instant::now(),
            news: surroundings.news,
        });
        let of_thread = shared.clone();
        (surroundings.spawn)("unb-directory", Box::new(move || thread::run(&of_thread, connect)))
            .map_err(failed("start its thread"))?;
        Ok(Redis { shared, url: settings.to_string(), pid: std::process::id() })
    }

    /// The book, if this is the process that opened it: in a forked child its lock may be held by a
    /// thread that is not there.
    fn book(&self) -> Result<MutexGuard<'_, Book>> {
        match std::process::id() == self.pid {
            true => Ok(self.shared.lock()),
            false => Err(DirectoryError::Forked),
        }
    }

    fn unknown(&self, book: &Book) -> DirectoryError {
        let why = match &book.state {
            State::Down(why) => why.clone(),
            State::Starting | State::Up => "it has not answered so far".into(),
        };
        DirectoryError::Unreachable { url: self.url.clone(), why }
    }

    fn garbage(&self, bytes: usize) -> DirectoryError {
        let why = format!("an entry of {bytes} bytes is none");
        DirectoryError::Unreachable { url: self.url.clone(), why }
    }

    /// Waits for so long at most until what this process has entered can be found by others.
    #[doc(hidden)]
    pub fn settle(&self, wait: Duration) {
        let Ok(book) = self.book() else { return };
        drop(
            self.shared.wait(book, wait, |book| {
                book.own.settled() || matches!(book.state, State::Down(_))
            }),
        );
    }

    /// Wakes the thread, if there is something for it.
    fn wake(&self, book: &Book) {
        if book.pending() {
            self.shared.work.notify_one();
        }
    }

    fn enter(&self, book: &mut Book, entry: Entry, value: Vec<u8>) -> Result<()> {
        if !book.own.set(entry, value) {
            return Err(DirectoryError::Record(format!(
                "a process has at most {} entries",
                own::MAX_ENTRIES
            )));
        }
        self.shared.work.notify_one();
        Ok(())
    }

    fn take_out(&self, entries: impl Iterator<Item = Entry>) -> Result<()> {
        let mut book = self.book()?;
        entries.for_each(|entry| book.own.remove(entry));
        self.wake(&book);
        Ok(())
    }
}

/// What this process has entered itself it knows best.
fn found_own(book: &Book, qp: QpName) -> Option<Found> {
    let QpRecord { qp, .. } = book.own.get(Entry::Qp(qp)).and_then(QpRecord::decode)?;
    let (_, process) = ProcessRecord::decode(book.own.get(Entry::Process(qp.incarnation))?)?;
    Some(Found::Peer { qp, process })
}

impl Directory for Redis {
    fn key(&self) -> Option<[u8; KEY_BYTES]> {
        self.book().ok()?.key()
    }

    fn ask_qp(&self, gid: Gid, qpn: u32) -> Result<Found> {
        let qp = QpName::new(gid, qpn);
        let mut book = self.book()?;
        if let Some(found) = found_own(&book, qp) {
            return Ok(found);
        }
        if matches!(book.state, State::Down(_)) {
            return Err(self.unknown(&book));
        }
        // Where too many wait, who looks for the answer asks again.
        book.known.ask_qp(qp);
        self.wake(&book);
        Ok(Found::Later)
    }

    fn answer_qp(&self, gid: Gid, qpn: u32) -> Result<Found> {
        let (qp, now_ms) = (QpName::new(gid, qpn), self.shared.now_ms());
        let mut book = self.book()?;
        if let Some(found) = found_own(&book, qp) {
            return Ok(found);
        }
        let found = match book.known.qp(&qp) {
            Some(Ok(Some(QpRecord { qp, .. }))) => {
                match book.known.process(qp.incarnation, now_ms) {
                    Some(Some(process)) => Found::Peer { qp, process },
                    Some(None) => Found::Nobody,
                    None => Found::Later,
                }
            }
            Some(Ok(None)) => Found::Nobody,
            Some(Err(bytes)) => return Err(self.garbage(bytes)),
            None if matches!(book.state, State::Down(_)) => return Err(self.unknown(&book)),
            None => {
                book.known.ask_qp_once(qp);
                Found::Later
            }
        };
        self.wake(&book);
        Ok(found)
    }

    fn publish_qp(&self, gid: Gid, qpn: u32, qp: QpEntry) -> Result<()> {
        let value = QpRecord { process: qp.incarnation, qp }.encode();
        self.enter(&mut *self.book()?, Entry::Qp(QpName::new(gid, qpn)), value.to_vec())
    }

    fn unpublish_qp(&self, gid: Gid, qpn: u32) -> Result<()> {
        self.take_out([Entry::Qp(QpName::new(gid, qpn))].into_iter())
    }

    fn lookup_qp(&self, gid: Gid, qpn: u32) -> Result<Option<(u64, u32)>> {
        let qp = QpName::new(gid, qpn);
        let mut book = self.book()?;
        let told = |QpRecord { qp, .. }: QpRecord| (qp.incarnation, qp.connection);
        if let Some(record) = book.own.get(Entry::Qp(qp)).and_then(QpRecord::decode) {
            return Ok(Some(told(record)));
        }
        // For the next time, where it is another connection by now.
        book.known.ask_qp_once(qp);
        self.wake(&book);
        match book.known.qp(&qp) {
            Some(Ok(found)) => Ok(found.map(told)),
            Some(Err(bytes)) => Err(self.garbage(bytes)),
            None => Err(self.unknown(&book)),
        }
    }

    fn publish_process(&self, incarnation: u64, record: &ProcessRecord) -> Result<()> {
        let value = record.encode(incarnation).map_err(DirectoryError::Record)?;
        let mut book = self.book()?;
        if book.known.listens() {
            self.enter(&mut book, Entry::Listener(incarnation), value.clone())?;
        }
        self.enter(&mut book, Entry::Process(incarnation), value)
    }

    fn unpublish_process(&self, incarnation: u64) -> Result<()> {
        self.take_out([Entry::Process(incarnation), Entry::Listener(incarnation)].into_iter())
    }

    fn lookup_process(&self, incarnation: u64) -> Result<Option<ProcessRecord>> {
        let mut book = self.book()?;
        if let Some(bytes) = book.own.get(Entry::Process(incarnation)) {
            return Ok(ProcessRecord::decode(bytes).map(|(_, record)| record));
        }
        let found = book.known.process(incarnation, self.shared.now_ms());
        self.wake(&book);
        found.ok_or_else(|| self.unknown(&book))
    }

    fn processes(&self) -> Result<Vec<(u64, ProcessRecord)>> {
        let book = self.book()?;
        let mut all = book.known.processes();
        let own = book
            .own
            .processes()
            .map(|(incarnation, bytes)| Some((incarnation, ProcessRecord::decode(bytes)?.1)));
        all.extend(own.flatten());
        Ok(all.into_iter().collect())
    }

    fn publish_moved(&self, moved: &[MovedQp]) -> Result<()> {
        let mut book = self.book()?;
        let owner = book.own.processes().map(|(incarnation, _)| incarnation).next();
        let Some(owner) = owner else {
            let what = "a process enters itself before its UD QPs".into();
            return Err(DirectoryError::Record(what));
        };
        moved.iter().try_for_each(|qp| {
            let entry = Entry::Moved(QpName::new(qp.known.0, qp.known.1));
            self.enter(&mut book, entry, qp.encode(owner).to_vec())
        })
    }

    fn unpublish_moved(&self, known: &[(Gid, u32)]) -> Result<()> {
        self.take_out(known.iter().map(|(gid, qpn)| Entry::Moved(QpName::new(*gid, *qpn))))
    }

    fn moved(&self) -> Result<Vec<MovedQp>> {
        let mut book = self.book()?;
        if !book.known.listens() {
            let own: Vec<_> = book
                .own
                .processes()
                .map(|(incarnation, bytes)| (incarnation, bytes.to_vec()))
                .collect();
            own.into_iter()
                .try_for_each(|(i, bytes)| self.enter(&mut book, Entry::Listener(i), bytes))?;
        }
        // Its own are known better here than there.
        let now = book.now(self.shared.now_ms());
        let mut all = book.known.moved(now);
        all.extend(
            book.own.moved().filter_map(|(qp, bytes)| Some((qp, MovedQp::decode(&qp.0, bytes)?.1))),
        );
        self.wake(&book);
        Ok(all.into_values().collect())
    }

    /// Waits [`CLOSE_WAIT`] at most, also for the lock: a process may end by a signal that came
    /// while one of its threads had it.
    fn close(&self) {
        if std::process::id() != self.pid {
            return;
        }
        let deadline = Instant::now() + CLOSE_WAIT;
        let mut book = loop {
            match self.shared.book.try_lock() {
                Ok(book) => break book,
                Err(std::sync::TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(std::sync::TryLockError::WouldBlock) if Instant::now() >= deadline => return,
                Err(std::sync::TryLockError::WouldBlock) => {
                    std::thread::sleep(Duration::from_millis(1))
                }
            }
        };
        book.close();
        self.shared.work.notify_one();
        drop(self.shared.wait(
            book,
            deadline.saturating_duration_since(Instant::now()),
            Book::closed,
        ));
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.close();
    }
}
