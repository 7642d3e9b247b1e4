//! The embedded directory: an LMDB file in the runtime folder, for the processes of one machine
//! that share it.
//!
//! An entry belongs to a living process, which is told by the lock that it holds
//! ([`unbroken_runtime::Presence`]). One of a dead process is never returned, is swept out when
//! another process opens the directory or when it is full, and the whole file is made anew by
//! whoever opens it alone: nothing in it is worth keeping, so nothing needs to reach the disk
//! either (no fsync), and damage does not outlive the processes that saw it.
//!
//! LMDB's own locks are not used (MDB_NOLOCK). They know processes by their pids, and threads by
//! their thread ids, of which two are equal where two containers share a runtime folder: a reader
//! could then not lock its byte (EAGAIN, for ever), and a thread that is killed while it waits for
//! the writers' mutex could free one that another holds. Instead every transaction has a turn
//! ([`Presence::turn`]): one at a time, over all processes, for some microseconds. A turn ends with
//! its process, and a transaction that was not committed leaves no trace in the file.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions, RwTxn, WithoutTls};
use unbroken_runtime::{
    fill_random, open_own, FileLock, Mark, Marked, Presence, ProcessName, Runtime, TurnGuard,
};
use unbroken_types::Gid;

use crate::check::check;
use crate::directory::{Directory, Found, QpEntry};
use crate::error::{DirectoryError, Result};
use crate::record::{self, qp_key, MovedQp, ProcessRecord, QpRecord, KEY_BYTES};

/// Size limit of the file.
const LIMIT_BYTES: usize = 64 << 20;
/// The table of the key, and its entry there.
const KEY_TABLE: &str = "key";

type Table = Database<Bytes, Bytes>;

/// What is to be done about the entry of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QpChange {
    /// Enter it, or its next connection.
    Enter(QpEntry),
    /// Take it out.
    TakeOut,
}

/// The directory of a runtime folder. One for each process and folder; any number of threads.
pub struct Lmdb {
    path: PathBuf,
    env: Env<WithoutTls>,
    qps: Table,
    processes: Table,
    moved: Table,
    key: [u8; KEY_BYTES],
    /// To see that the file was not cut short behind LMDB's back, which would end this process when
    /// it is touched.
    data: File,
    seen_bytes: AtomicU64,
    /// Held while the directory is open: behind the environment, which is closed before.
    _open: Marked,
    presence: Presence,
}

/// So long the threads of a host that is gone may take to close the directory.
const CLOSES: Duration = Duration::from_secs(1);

/// Marks the directory as open in this process. One that a host of this process had is closed by
/// the last of that host's threads, a moment after the program has let go of the host.
fn mark(presence: &Presence) -> io::Result<Option<Marked>> {
    let ends = Instant::now() + CLOSES;
    loop {
        match presence.mark(Mark::Directory)? {
            None if Instant::now() < ends => std::thread::sleep(Duration::from_millis(2)),
            open => return Ok(open),
        }
    }
}

impl Lmdb {
    /// Opens the directory of a runtime folder; makes it if it is missing, and makes it anew if
    /// nobody else has it open.
    ///
    /// Errors: it is damaged, this process has it open already, or system calls fail.
    pub fn open(runtime: &Runtime) -> Result<Lmdb> {
        let path = runtime.directory();
        let io = |action| DirectoryError::io(&path, action);
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(io("make it"))?;
        // Who holds the gate decides alone whether the file is in use; it is held for the time of
        // opening only.
        let _gate = FileLock::take(&path.join("gate.lock")).map_err(io("lock it"))?;
        let presence = Presence::join(runtime).map_err(io("take part in its runtime folder"))?;
        let open = mark(&presence).map_err(io("lock it"))?;
        let open = open
            .ok_or_else(|| io("open it")(io::Error::other("this process has it open already")))?;
        let alone = !presence.others_have(Mark::Directory);
        let file = path.join("data.mdb");
        let turn = presence.turn().map_err(io("wait for it"))?;
        if alone {
            remove_names(&path);
            match fs::remove_file(&file) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io("make it anew")(e)),
                _ => {}
            }
        } else {
            check(&path, &file, LIMIT_BYTES)?;
        }
        let env = open_env(&path, &file, presence.name())?;
        let [qps, processes, moved] = open_tables(&path, &env)?;
        let key = if alone { make_key(&path, &env)? } else { read_key(&path, &env)? };
        drop(turn);
        let data = open_own(&file, OpenOptions::new().read(true)).map_err(io("open its file"))?;
        let seen_bytes = AtomicU64::new(0);
        let path = path.clone();
        let directory =
            Lmdb { path, env, qps, processes, moved, key, data, seen_bytes, _open: open, presence };
        if !alone {
            directory.write("remove entries of dead processes", |txn| directory.sweep(txn))?;
        }
        Ok(directory)
    }

    /// The entries of a table that belong to living processes; `decode` gives the id of an entry's
    /// process, too.
    fn living<T>(
        &self,
        table: Table,
        action: &'static str,
        decode: impl Fn(&[u8], &[u8]) -> Option<(u64, T)>,
    ) -> Result<Vec<T>> {
        let failed = |e| DirectoryError::store(&self.path, action, &e);
        let mut found = Vec::new();
        {
            let (env, _turn) = self.env()?;
            let txn = env.read_txn().map_err(failed)?;
            for entry in table.iter(&txn).map_err(failed)? {
                let (key, value) = entry.map_err(failed)?;
                found.push(decode(key, value).ok_or_else(|| self.garbage(value))?);
            }
        }
        let mut lives = self.census();
        Ok(found
            .into_iter()
            .filter(|(process, _)| lives(*process))
            .map(|(_, entry)| entry)
            .collect())
    }

    /// Tells which processes live, and asks for each of them once.
    fn census(&self) -> impl FnMut(u64) -> bool + '_ {
        let mut known = HashMap::new();
        move |id| *known.entry(id).or_insert_with(|| self.presence.lives(id))
    }

    /// The error of a system call that failed.
    pub(crate) fn io(&self, action: &'static str) -> impl FnOnce(io::Error) -> DirectoryError {
        DirectoryError::io(&self.path, action)
    }

    /// Changes the entries of QPs in one transaction.
    pub(crate) fn change_qps(&self, changes: &[((Gid, u32), QpChange)]) -> Result<()> {
        let process = self.presence.name().id;
        self.put_all("enter QPs", |txn| {
            changes.iter().try_for_each(|((gid, qpn), change)| {
                let key = qp_key(*gid, *qpn);
                match *change {
                    QpChange::Enter(qp) => {
                        let value = QpRecord { process, qp }.encode();
                        self.qps.put(txn, &key, &value)
                    }
                    QpChange::TakeOut => self.take_out(txn, &key),
                }
            })
        })
    }

    /// Takes out the entry of a QP, unless the number is another process's by now.
    fn take_out(&self, txn: &mut RwTxn, key: &[u8]) -> heed::Result<()> {
        let found = self.qps.get(txn, key)?.and_then(QpRecord::decode);
        match found.is_some_and(|record| record.process != self.presence.name().id) {
            true => Ok(()),
            false => self.qps.delete(txn, key).map(drop),
        }
    }

    /// Finds a QP and its process, if it is nobody's turn at the file just now.
    pub(crate) fn find(&self, gid: Gid, qpn: u32) -> Result<Found> {
        let failed = |e| DirectoryError::store(&self.path, "look a QP up", &e);
        if self.is_forked() {
            return Err(DirectoryError::Forked);
        }
        let Some(turn) = self.presence.try_turn().map_err(self.io("look whether it is free"))?
        else {
            return Ok(Found::Later);
        };
        let (env, _turn) = self.with_turn(turn)?;
        let txn = env.read_txn().map_err(failed)?;
        let get = |table: Table, key: &[u8]| table.get(&txn, key).map_err(failed);
        let Some(bytes) = get(self.qps, &qp_key(gid, qpn))? else {
            return Ok(Found::Nobody);
        };
        let record = QpRecord::decode(bytes).ok_or_else(|| self.garbage(bytes))?;
        if !self.presence.lives(record.process) {
            return Ok(Found::Nobody);
        }
        let Some(bytes) = get(self.processes, &record.qp.incarnation.to_be_bytes())? else {
            return Ok(Found::Nobody);
        };
        let (id, process) = ProcessRecord::decode(bytes).ok_or_else(|| self.garbage(bytes))?;
        Ok(match self.presence.lives(id) {
            true => Found::Peer { qp: record.qp, process },
            false => Found::Nobody,
        })
    }

    fn garbage(&self, bytes: &[u8]) -> DirectoryError {
        DirectoryError::damaged(&self.path, format!("an entry of {} bytes is none", bytes.len()))
    }

    /// The environment, and the turn for a transaction in it, if it may be touched.
    fn env(&self) -> Result<(&Env<WithoutTls>, TurnGuard<'_>)> {
        if self.is_forked() {
            return Err(DirectoryError::Forked);
        }
        let turn = self.presence.turn().map_err(DirectoryError::io(&self.path, "wait for it"))?;
        self.with_turn(turn)
    }

    fn with_turn<'a>(
        &'a self,
        turn: TurnGuard<'a>,
    ) -> Result<(&'a Env<WithoutTls>, TurnGuard<'a>)> {
        let bytes =
            self.data.metadata().map_err(DirectoryError::io(&self.path, "look at its file"))?.len();
        let seen_bytes = self.seen_bytes.fetch_max(bytes, Ordering::Relaxed);
        if bytes < seen_bytes {
            let what = format!("data.mdb was cut short, from {seen_bytes} to {bytes} bytes");
            return Err(DirectoryError::damaged(&self.path, what));
        }
        Ok((&self.env, turn))
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.presence.name().pid
    }

    fn read<T>(
        &self,
        table: Table,
        action: &'static str,
        key: &[u8],
        decode: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        let failed = |e| DirectoryError::store(&self.path, action, &e);
        let (env, _turn) = self.env()?;
        let txn = env.read_txn().map_err(failed)?;
        let Some(bytes) = table.get(&txn, key).map_err(failed)? else {
            return Ok(None);
        };
        decode(bytes).ok_or_else(|| self.garbage(bytes)).map(Some)
    }

    /// Runs one write transaction.
    fn write(
        &self,
        action: &'static str,
        f: impl FnOnce(&mut RwTxn) -> heed::Result<()>,
    ) -> Result<()> {
        let failed = |e| match e {
            heed::Error::Mdb(heed::MdbError::MapFull) => DirectoryError::Full {
                path: self.path.display().to_string(),
                limit_bytes: LIMIT_BYTES,
            },
            e => DirectoryError::store(&self.path, action, &e),
        };
        let (env, _turn) = self.env()?;
        let mut txn = env.write_txn().map_err(failed)?;
        f(&mut txn).map_err(failed)?;
        txn.commit().map_err(failed)
    }

    fn put(&self, table: Table, action: &'static str, key: &[u8], value: &[u8]) -> Result<()> {
        self.put_all(action, |txn| table.put(txn, key, value))
    }

    /// Enters something; where there is no room for it, the dead make some.
    fn put_all(
        &self,
        action: &'static str,
        put: impl Fn(&mut RwTxn) -> heed::Result<()>,
    ) -> Result<()> {
        match self.write(action, &put) {
            Err(DirectoryError::Full { .. }) => {
                self.write("remove entries of dead processes", |txn| self.sweep(txn))?;
                self.write(action, &put)
            }
            result => result,
        }
    }

    /// Removes the entries of dead processes, and those that are none.
    fn sweep(&self, txn: &mut RwTxn) -> heed::Result<()> {
        let mut lives = self.census();
        let of_qp = |_: &[u8], bytes: &[u8]| QpRecord::decode(bytes).map(|r| r.process);
        let of_process =
            |_: &[u8], bytes: &[u8]| ProcessRecord::decode(bytes).map(|(process, _)| process);
        let of_moved =
            |key: &[u8], bytes: &[u8]| MovedQp::decode(key, bytes).map(|(process, _)| process);
        type ProcessOf = fn(&[u8], &[u8]) -> Option<u64>;
        let tables: [(Table, ProcessOf); 3] =
            [(self.qps, of_qp), (self.processes, of_process), (self.moved, of_moved)];
        for (table, process_of) in tables {
            let mut dead = Vec::new();
            for entry in table.iter(txn)? {
                let (key, value) = entry?;
                if !process_of(key, value).is_some_and(&mut lives) {
                    dead.push(key.to_vec());
                }
            }
            for key in dead {
                table.delete(txn, &key)?;
            }
        }
        Ok(())
    }
}

impl Directory for Lmdb {
    fn key(&self) -> Option<[u8; KEY_BYTES]> {
        Some(self.key)
    }

    fn publish_qp(&self, gid: Gid, qpn: u32, qp: QpEntry) -> Result<()> {
        self.change_qps(&[((gid, qpn), QpChange::Enter(qp))])
    }

    fn unpublish_qp(&self, gid: Gid, qpn: u32) -> Result<()> {
        self.change_qps(&[((gid, qpn), QpChange::TakeOut)])
    }

    fn ask_qp(&self, gid: Gid, qpn: u32) -> Result<Found> {
        self.find(gid, qpn)
    }

    fn lookup_qp(&self, gid: Gid, qpn: u32) -> Result<Option<(u64, u32)>> {
        let record = self.read(self.qps, "look a QP up", &qp_key(gid, qpn), QpRecord::decode)?;
        let living = record.filter(|record| self.presence.lives(record.process));
        Ok(living.map(|QpRecord { qp, .. }| (qp.incarnation, qp.connection)))
    }

    fn publish_process(&self, incarnation: u64, record: &ProcessRecord) -> Result<()> {
        let value = record.encode(self.presence.name().id).map_err(DirectoryError::Record)?;
        self.put(self.processes, "enter a process", &incarnation.to_be_bytes(), &value)
    }

    fn unpublish_process(&self, incarnation: u64) -> Result<()> {
        let key = incarnation.to_be_bytes();
        self.write("take a process out", |txn| self.processes.delete(txn, &key).map(|_| ()))
    }

    fn lookup_process(&self, incarnation: u64) -> Result<Option<ProcessRecord>> {
        let key = incarnation.to_be_bytes();
        let record = self.read(self.processes, "look a process up", &key, ProcessRecord::decode)?;
        Ok(record.filter(|(process, _)| self.presence.lives(*process)).map(|(_, record)| record))
    }

    fn processes(&self) -> Result<Vec<(u64, ProcessRecord)>> {
        self.living(self.processes, "list the processes", |key, value| {
            let incarnation = u64::from_be_bytes(key.try_into().ok()?);
            ProcessRecord::decode(value).map(|(process, record)| (process, (incarnation, record)))
        })
    }

    fn publish_moved(&self, moved: &[MovedQp]) -> Result<()> {
        let process = self.presence.name().id;
        self.put_all("enter UD QPs that have moved", |txn| {
            moved.iter().try_for_each(|qp| {
                let (gid, qpn) = qp.known;
                self.moved.put(txn, &qp_key(gid, qpn), &qp.encode(process))
            })
        })
    }

    fn unpublish_moved(&self, known: &[(Gid, u32)]) -> Result<()> {
        self.write("take UD QPs out that had moved", |txn| {
            known
                .iter()
                .try_for_each(|(gid, qpn)| self.moved.delete(txn, &qp_key(*gid, *qpn)).map(|_| ()))
        })
    }

    fn moved(&self) -> Result<Vec<MovedQp>> {
        self.living(self.moved, "list the UD QPs that have moved", MovedQp::decode)
    }
}

impl Drop for Lmdb {
    fn drop(&mut self) {
        // In a forked child the environment is the parent's: a reference that is never given back
        // keeps it from being closed.
        if self.is_forked() {
            std::mem::forget(self.env.clone());
        }
    }
}

/// Removes the names that processes left which were killed while they opened it (see [`open_env`]).
fn remove_names(path: &Path) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("open-"))
    {
        let _ = fs::remove_file(entry.path());
    }
}

/// Opens the file under a name of this process's own, which is gone again when it returns. heed
/// refuses a file that it has open by that name, and in a forked child it still has its parent's,
/// which must be neither used nor closed there.
fn open_env(path: &Path, file: &Path, process: ProcessName) -> Result<Env<WithoutTls>> {
    let io = |action| DirectoryError::io(path, action);
    open_own(file, OpenOptions::new().read(true).append(true).create(true))
        .map_err(io("make its file"))?;
    let own = path.join(format!("open-{process}.mdb"));
    match fs::remove_file(&own) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io("open it")(e)),
        _ => {}
    }
    // Where a file can have no second name, only a process that was not forked gets any further.
    let named = fs::hard_link(file, &own).is_ok();
    let env = open_at(path, if named { &own } else { file });
    if named {
        fs::remove_file(&own).map_err(io("open it"))?;
    }
    env
}

#[allow(unsafe_code)]
fn open_at(path: &Path, file: &Path) -> Result<Env<WithoutTls>> {
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(LIMIT_BYTES).max_dbs(4);
    // SAFETY: NO_LOCK leaves to us that no transaction runs beside another, which turns see to;
    // NO_SYNC gives up only what a crash of the machine leaves, and a file of an earlier boot is
    // never used. The file was checked (see `check`) or is new, and the folder is this user's
    // alone.
    let env = unsafe {
        options.flags(
            EnvFlags::NO_SUB_DIR | EnvFlags::NO_LOCK | EnvFlags::NO_SYNC | EnvFlags::NO_META_SYNC,
        );
        options.open(file)
    };
    env.map_err(|e| DirectoryError::store(path, "open it", &e))
}

fn open_tables(path: &Path, env: &Env<WithoutTls>) -> Result<[Table; 3]> {
    let open = || -> heed::Result<_> {
        let mut txn = env.write_txn()?;
        let qps = env.create_database(&mut txn, Some("qps"))?;
        let processes = env.create_database(&mut txn, Some("processes"))?;
        let moved = env.create_database(&mut txn, Some("moved"))?;
        txn.commit()?;
        Ok([qps, processes, moved])
    };
    open().map_err(|e| DirectoryError::store(path, "open its tables", &e))
}

/// Draws the key of a directory that is made anew.
fn make_key(path: &Path, env: &Env<WithoutTls>) -> Result<[u8; KEY_BYTES]> {
    let action = "make its key";
    let mut key = [0; KEY_BYTES];
    fill_random(&mut key).map_err(DirectoryError::io(path, action))?;
    let write = || -> heed::Result<_> {
        let mut txn = env.write_txn()?;
        let table: Table = env.create_database(&mut txn, Some(KEY_TABLE))?;
        table.put(&mut txn, KEY_TABLE.as_bytes(), &record::encode_key(&key))?;
        txn.commit()
    };
    write().map_err(|e| DirectoryError::store(path, action, &e))?;
    Ok(key)
}

/// Reads the key of a directory that others have open.
fn read_key(path: &Path, env: &Env<WithoutTls>) -> Result<[u8; KEY_BYTES]> {
    let read = || -> heed::Result<_> {
        let txn = env.read_txn()?;
        let table: Option<Table> = env.open_database(&txn, Some(KEY_TABLE))?;
        let Some(table) = table else { return Ok(None) };
        Ok(table.get(&txn, KEY_TABLE.as_bytes())?.and_then(record::decode_key))
    };
    let key = read().map_err(|e| DirectoryError::store(path, "read its key", &e))?;
    key.ok_or_else(|| DirectoryError::damaged(path, "its key is missing or damaged"))
}
