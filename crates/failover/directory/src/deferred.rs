//! Puts the entries of QPs into the embedded directory from a thread of its own: a program that
//! makes, resets or ends a queue pair waits for no turn at the file.
//!
//! ```text
//! publish, unpublish ──> waiting ── the thread takes all ──> writing ── one transaction ──> done
//! ```
//!
//! Of each QP only the last change waits, so the queue is bounded by [`MAX_WAITING`] QPs. What
//! waits or is being written counts as entered for look-ups of this process.
//!
//! Failure cases: a transaction that fails is told ([`News::Refused`]) and not tried again: the
//! QPs stay unprotected, as those of a directory that is full. A process that ends or is killed
//! before an entry is written takes nothing with it that others know. In a forked child there is no
//! thread, and nothing is done.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use unbroken_types::Gid;

use crate::directory::{Directory, Found, News, Surroundings};
use crate::error::{DirectoryError, Result};
use crate::lmdb::{Lmdb, QpChange};
use crate::record::{MovedQp, ProcessRecord, KEY_BYTES};

/// QPs whose entries may wait.
const MAX_WAITING: usize = 1 << 20;
/// Changes of one transaction: others wait for its turn.
const BATCH: usize = 256;
/// For so long the end waits for the thread.
const END_WAIT: Duration = Duration::from_secs(2);

type Name = (Gid, u32);

#[derive(Default)]
struct Queue {
    waiting: BTreeMap<Name, QpChange>,
    writing: BTreeMap<Name, QpChange>,
    closing: bool,
    ended: bool,
}

impl Queue {
    fn get(&self, name: &Name) -> Option<&QpChange> {
        self.waiting.get(name).or_else(|| self.writing.get(name))
    }

    /// What to write now.
    fn take(&mut self) -> Vec<(Name, QpChange)> {
        let mut taken = BTreeMap::new();
        while taken.len() < BATCH {
            let Some((name, change)) = self.waiting.pop_first() else { break };
            taken.insert(name, change);
        }
        self.writing = taken.clone();
        taken.into_iter().collect()
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    done: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module's text.
pub(crate) struct Deferred {
    inner: Arc<Lmdb>,
    shared: Arc<Shared>,
    /// The process that opened it.
    pid: u32,
}

impl Deferred {
    /// Starts the thread.
    pub(crate) fn over(inner: Lmdb, surroundings: Surroundings) -> Result<Deferred> {
        let (inner, shared) = (Arc::new(inner), Arc::<Shared>::default());
        let of_thread = (inner.clone(), shared.clone());
        let body = Box::new(move || {
            let (inner, shared) = of_thread;
            run(inner, &shared, &surroundings.news);
            shared.lock().ended = true;
            shared.done.notify_all();
        });
        (surroundings.spawn)("unb-directory", body).map_err(inner.io("start its thread"))?;
        Ok(Deferred { inner, shared, pid: std::process::id() })
    }

    fn queue(&self) -> Result<MutexGuard<'_, Queue>> {
        match std::process::id() == self.pid {
            true => Ok(self.shared.lock()),
            false => Err(DirectoryError::Forked),
        }
    }

    fn change(&self, name: Name, change: QpChange) -> Result<()> {
        let mut queue = self.queue()?;
        if queue.waiting.len() >= MAX_WAITING && !queue.waiting.contains_key(&name) {
            let what = format!("entries of {MAX_WAITING} QPs wait for their turn already");
            return Err(DirectoryError::Record(what));
        }
        queue.waiting.insert(name, change);
        self.shared.work.notify_one();
        Ok(())
    }
}

/// Writes until the directory is closed, and what waits then. The directory is dropped at the end,
/// before anybody hears of it.
fn run(inner: Arc<Lmdb>, shared: &Shared, news: &(dyn Fn(News) + Send + Sync)) {
    loop {
        let changes = {
            let idle = |queue: &mut Queue| queue.waiting.is_empty() && !queue.closing;
            let waited = shared.work.wait_while(shared.lock(), idle);
            let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
            queue.take()
        };
        if changes.is_empty() {
            return;
        }
        let written = inner.change_qps(&changes);
        shared.lock().writing.clear();
        if let Err(e) = written {
            news(News::Refused(e.to_string()));
        }
    }
}

impl Directory for Deferred {
    fn key(&self) -> Option<[u8; KEY_BYTES]> {
        self.inner.key()
    }

    fn ask_qp(&self, gid: Gid, qpn: u32) -> Result<Found> {
        let own = self.queue()?.get(&(gid, qpn)).copied();
        self.inner.find(gid, qpn, own)
    }

    fn publish_qp(&self, gid: Gid, qpn: u32, incarnation: u64, connection: u32) -> Result<()> {
        self.change((gid, qpn), QpChange::Enter { incarnation, connection })
    }

    fn unpublish_qp(&self, gid: Gid, qpn: u32) -> Result<()> {
        self.change((gid, qpn), QpChange::TakeOut)
    }

    fn lookup_qp(&self, gid: Gid, qpn: u32) -> Result<Option<(u64, u32)>> {
        let own = self.queue()?.get(&(gid, qpn)).copied();
        match own {
            Some(QpChange::Enter { incarnation, connection }) => {
                Ok(Some((incarnation, connection)))
            }
            _ => self.inner.lookup_qp(gid, qpn),
        }
    }

    fn publish_process(&self, incarnation: u64, record: &ProcessRecord) -> Result<()> {
        self.inner.publish_process(incarnation, record)
    }

    fn unpublish_process(&self, incarnation: u64) -> Result<()> {
        self.inner.unpublish_process(incarnation)
    }

    fn lookup_process(&self, incarnation: u64) -> Result<Option<ProcessRecord>> {
        self.inner.lookup_process(incarnation)
    }

    fn processes(&self) -> Result<Vec<(u64, ProcessRecord)>> {
        self.inner.processes()
    }

    fn publish_moved(&self, moved: &[MovedQp]) -> Result<()> {
        self.inner.publish_moved(moved)
    }

    fn unpublish_moved(&self, known: &[(Gid, u32)]) -> Result<()> {
        self.inner.unpublish_moved(known)
    }

    fn moved(&self) -> Result<Vec<MovedQp>> {
        self.inner.moved()
    }
}

impl Drop for Deferred {
    /// Waits for the thread: who opens the directory next in this process must find it closed.
    fn drop(&mut self) {
        let Ok(mut queue) = self.queue() else {
            // In a forked child the thread is not there, and what it has is the parent's.
            std::mem::forget(self.inner.clone());
            return;
        };
        queue.closing = true;
        self.shared.work.notify_one();
        drop(self.shared.done.wait_timeout_while(queue, END_WAIT, |queue| !queue.ended));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::NicRecord;
    use std::time::Instant;
    use unbroken_runtime::{Presence, Runtime};

    fn gid(n: u8) -> Gid {
        Gid::from_ip([10, 0, 1, n].into())
    }

    fn open(runtime: &Runtime) -> Deferred {
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
        };
        let surroundings = Surroundings { spawn, news: Box::new(|news| panic!("{news:?}")) };
        Deferred::over(Lmdb::open(runtime).unwrap(), surroundings).unwrap()
    }

    fn process() -> ProcessRecord {
        let nic = NicRecord {
            index: 0,
            gid: gid(1),
            control_qpn: 9,
            key_set: 0,
            name: "a/0".into(),
            further_ports: vec![],
        };
        ProcessRecord { pid: 7, nics: vec![nic] }
    }

    /// Another process may be stopped in the middle of its turn.
    #[test]
    fn nothing_waits_for_another_ones_turn_at_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(folder.path()).unwrap();
        let directory = open(&runtime);
        directory.publish_process(11, &process()).unwrap();
        let presence = Presence::join(&runtime).unwrap();
        let turn = presence.turn().unwrap();
        let start = Instant::now();
        for qpn in 0..1000 {
            directory.publish_qp(gid(1), qpn, 11, qpn).unwrap();
            assert_eq!(directory.ask_qp(gid(2), qpn).unwrap(), Found::Later);
            directory.unpublish_qp(gid(1), 2000 + qpn).unwrap();
        }
        let took = start.elapsed();
        drop(turn);
        assert!(took < Duration::from_millis(500), "{took:?}");
        let found = |qpn| loop {
            match directory.ask_qp(gid(1), qpn).unwrap() {
                Found::Later => std::thread::yield_now(),
                found => return found,
            }
        };
        for qpn in 0..1000 {
            let peer = Found::Peer { incarnation: 11, connection: qpn, process: process() };
            assert_eq!(found(qpn), peer);
        }
        assert_eq!(found(2000), Found::Nobody);
        drop(directory);
        // Whatever waited is written before it closes, and it can be opened again at once.
        drop(open(&runtime));
    }
}
