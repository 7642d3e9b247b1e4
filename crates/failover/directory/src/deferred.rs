//! Puts the entries of QPs into the embedded directory from a thread of its own: a program that
//! makes, resets or ends a queue pair waits for no turn at the file.
//!
//! ```text
//! publish, unpublish ──> waiting ── the thread takes all ──> writing ── one transaction ──> done
//! ```
//!
//! Of each QP only the last change waits, so the queue is bounded by [`MAX_OWN`] QPs. What this
//! process has entered it knows itself: QPs that it connects to one another are found at once,
//! whoever has the turn at the file.
//!
//! Failure cases: a transaction that fails is told ([`News::Refused`]) and not tried again: the
//! QPs stay unprotected, as those of a directory that is full. A process that ends or is killed
//! before an entry is written takes nothing with it that others know. In a forked child there is no
//! thread, and nothing is done.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use unbroken_types::Gid;

use crate::directory::{Directory, Found, News, QpEntry, Surroundings};
use crate::error::{DirectoryError, Result};
use crate::lmdb::{Lmdb, QpChange};
use crate::record::{MovedQp, ProcessRecord, KEY_BYTES};

/// QPs of a process, and of those how many whose entries may wait.
const MAX_OWN: usize = 1 << 20;
/// Changes of one transaction: others wait for its turn.
const BATCH: usize = 256;
/// For so long the end waits for the thread.
const END_WAIT: Duration = Duration::from_secs(2);

type Name = (Gid, u32);

#[derive(Default)]
struct Queue {
    waiting: BTreeMap<Name, QpChange>,
    /// What is being taken out of the file.
    leaving: BTreeSet<Name>,
    /// QPs of this process.
    own: BTreeMap<Name, QpEntry>,
    /// Where this process can be reached, by incarnation.
    processes: BTreeMap<u64, ProcessRecord>,
    closing: bool,
    ended: bool,
}

impl Queue {
    /// What this process knows of a QP without the file.
    fn find(&self, name: &Name) -> Option<Found> {
        if let Some(&qp) = self.own.get(name) {
            let process = self.processes.get(&qp.incarnation)?.clone();
            return Some(Found::Peer { qp, process });
        }
        let left = self.waiting.contains_key(name) || self.leaving.contains(name);
        left.then_some(Found::Nobody)
    }

    fn put(&mut self, name: Name, change: QpChange) -> Result<()> {
        let room = |len: usize, known: bool| len < MAX_OWN || known;
        let mut fits = room(self.waiting.len(), self.waiting.contains_key(&name));
        if let QpChange::Enter(qp) = change {
            fits &= room(self.own.len(), self.own.contains_key(&name));
            if fits {
                self.own.insert(name, qp);
            }
        } else {
            self.own.remove(&name);
        }
        if !fits {
            let what = format!("a process has at most {MAX_OWN} QPs in the directory");
            return Err(DirectoryError::Record(what));
        }
        self.waiting.insert(name, change);
        Ok(())
    }

    /// What to write now.
    fn take(&mut self) -> Vec<(Name, QpChange)> {
        let mut taken = Vec::new();
        while taken.len() < BATCH {
            let Some(next) = self.waiting.pop_first() else { break };
            taken.push(next);
        }
        let leaving = taken.iter().filter(|(_, change)| *change == QpChange::TakeOut);
        self.leaving = leaving.map(|(name, _)| *name).collect();
        taken
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
        self.queue()?.put(name, change)?;
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
        shared.lock().leaving.clear();
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
        let known = self.queue()?.find(&(gid, qpn));
        known.map_or_else(|| self.inner.find(gid, qpn), Ok)
    }

    fn publish_qp(&self, gid: Gid, qpn: u32, qp: QpEntry) -> Result<()> {
        self.change((gid, qpn), QpChange::Enter(qp))
    }

    fn unpublish_qp(&self, gid: Gid, qpn: u32) -> Result<()> {
        self.change((gid, qpn), QpChange::TakeOut)
    }

    fn lookup_qp(&self, gid: Gid, qpn: u32) -> Result<Option<(u64, u32)>> {
        let own = self.queue()?.own.get(&(gid, qpn)).copied();
        let told = |qp: QpEntry| Ok(Some((qp.incarnation, qp.connection)));
        own.map_or_else(|| self.inner.lookup_qp(gid, qpn), told)
    }

    fn publish_process(&self, incarnation: u64, record: &ProcessRecord) -> Result<()> {
        self.inner.publish_process(incarnation, record)?;
        self.queue()?.processes.insert(incarnation, record.clone());
        Ok(())
    }

    fn unpublish_process(&self, incarnation: u64) -> Result<()> {
        self.queue()?.processes.remove(&incarnation);
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
            address: gid(1),
            control_qpn: 9,
            key_set: 0,
            lid: 0,
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
            directory.publish_qp(gid(1), qpn, QpEntry::new(11, qpn)).unwrap();
            let peer = Found::Peer { qp: QpEntry::new(11, qpn), process: process() };
            assert_eq!(directory.ask_qp(gid(1), qpn).unwrap(), peer, "one's own needs no turn");
            assert_eq!(directory.ask_qp(gid(2), qpn).unwrap(), Found::Later);
            directory.unpublish_qp(gid(1), 2000 + qpn).unwrap();
        }
        let took = start.elapsed();
        drop(turn);
        assert!(took < Duration::from_millis(500), "{took:?}");
        for qpn in 0..1000 {
            while directory.inner.lookup_qp(gid(1), qpn).unwrap() != Some((11, qpn)) {
                assert!(start.elapsed() < Duration::from_secs(30), "QP {qpn} is not entered");
                std::thread::yield_now();
            }
        }
        assert_eq!(directory.inner.lookup_qp(gid(1), 2000).unwrap(), None);
        directory.unpublish_qp(gid(1), 0).unwrap();
        assert_eq!(directory.ask_qp(gid(1), 0).unwrap(), Found::Nobody, "at once");
        drop(directory);
        // Whatever waited is written before it closes, and it can be opened again at once.
        drop(open(&runtime));
    }
}
