//! Which processes of a runtime folder live: each holds a lock that the kernel gives back when it
//! ends.
//!
//! A pid says little: it is a process's name in one PID namespace, so two containers that share a
//! runtime folder may have the same pid twice or not see each other's at all, it is given to
//! another process later, and looking at `/proc` takes a descriptor, which there may be none of. So
//! a process that takes part draws a random *id*, and locks the byte of that number in
//! `alive.lock`. Whoever wants to know asks the kernel (F_GETLK) whether the byte is locked:
//! without a descriptor beside the one that holds its own lock, and in whatever namespace. A
//! stopped process holds its lock, so it lives; a killed one has lost it, even as a zombie. Where
//! the kernel does not answer, the other counts as living: to wait for a dead process is a delay,
//! to bury a living one is damage.
//!
//! The locks are POSIX record locks, not those of open file descriptions (`flock`, F_OFD_SETLK): a
//! forked child inherits the latter with the descriptor, and would make its parent live on for as
//! long as it keeps that. Record locks belong to the process alone. Their peculiarity is that a
//! process loses them all when it closes *any* descriptor of the file. So all of a process's
//! presences in a folder share one descriptor, which is opened and closed under one lock
//! ([`TABLE`]); and a forked child never touches its copy, nor could it harm the parent's locks by
//! closing it.
//!
//! Beside the range of the processes there are one for marks ([`Mark`]: who has the directory open)
//! and a byte for short exclusive turns ([`Presence::turn`]).

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{fcntl, FcntlArg};
use nix::libc;

use crate::files::{fill_random, held, open_own, try_until};
use crate::Runtime;

/// Ids are below this; the ranges of the file are that long.
const RANGE: u64 = 1 << 60;
/// The byte of turns.
const TURN: u64 = 2 * RANGE;
/// For so long a turn is waited for: others take microseconds, unless they are stopped in the
/// middle.
const TURN_WAIT: Duration = Duration::from_secs(3);
/// Ids drawn before giving up; even one that is taken would be a wonder.
const DRAWS: usize = 8;

/// Names a process for the time of its life and ever after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessName {
    /// Its pid as it sees it itself: for people, and not unique where there are PID namespaces.
    pub pid: u32,
    /// The id of its [`Presence`].
    pub id: u64,
}

impl fmt::Display for ProcessName {
    /// As part of a file's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:015x}", self.pid, self.id)
    }
}

impl FromStr for ProcessName {
    type Err = ();

    fn from_str(text: &str) -> Result<ProcessName, ()> {
        let (pid, id) = text.split_once('-').ok_or(())?;
        let name = ProcessName {
            pid: pid.parse().map_err(drop)?,
            id: u64::from_str_radix(id, 16).map_err(drop)?,
        };
        if name.id < RANGE && name.to_string() == text {
            Ok(name)
        } else {
            Err(())
        }
    }
}

/// What a process says of itself beside being there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// It has the directory open.
    Directory,
}

impl Mark {
    fn range(self) -> u64 {
        match self {
            Mark::Directory => RANGE,
        }
    }
}

/// This process in a runtime folder. All of a process's presences in one folder are one.
pub struct Presence(Option<Arc<Shared>>);

struct Shared {
    file: File,
    /// Device and inode.
    key: (u64, u64),
    name: ProcessName,
    marked: Mutex<bool>,
    turn: Mutex<()>,
}

/// The presences of this process. A forked child finds its parent's here, which it leaves alone.
static TABLE: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Presence {
    /// Takes part: from now on, and until all presences in this folder are dropped or the process
    /// ends, it lives for others.
    pub fn join(runtime: &Runtime) -> io::Result<Presence> {
        let path = runtime.path().join("alive.lock");
        let pid = std::process::id();
        let mut table = lock(&TABLE);
        let find = |table: &[Arc<Shared>], key| {
            table.iter().find(|s| s.key == key && s.name.pid == pid).cloned()
        };
        // Looked for by name first: a second descriptor must not be opened, since it would have to
        // be closed.
        if let Some(shared) =
            fs::symlink_metadata(&path).ok().and_then(|m| find(&table, (m.dev(), m.ino())))
        {
            return Ok(Presence(Some(shared)));
        }
        let file = open_own(&path, OpenOptions::new().read(true).write(true).create(true))?;
        let meta = file.metadata()?;
        let key = (meta.dev(), meta.ino());
        if let Some(shared) = find(&table, key) {
            // It got its name back meanwhile. Closing this one would cost the locks.
            std::mem::forget(file);
            return Ok(Presence(Some(shared)));
        }
        for _ in 0..DRAWS {
            let mut id = [0; 8];
            fill_random(&mut id)?;
            let id = u64::from_ne_bytes(id) % RANGE;
            if id != 0 && set(&file, libc::F_WRLCK, id)? {
                let name = ProcessName { pid, id };
                let shared = Arc::new(Shared {
                    file,
                    key,
                    name,
                    marked: Mutex::default(),
                    turn: Mutex::default(),
                });
                table.push(shared.clone());
                return Ok(Presence(Some(shared)));
            }
        }
        Err(io::Error::other("no byte of alive.lock can be locked"))
    }

    fn shared(&self) -> &Shared {
        self.0.as_ref().expect("taken in drop alone")
    }

    /// The name of this process.
    pub fn name(&self) -> ProcessName {
        self.shared().name
    }

    /// Whether the process of this id lives. Where that cannot be told, it does.
    pub fn lives(&self, id: u64) -> bool {
        let shared = self.shared();
        id == shared.name.id || id >= RANGE || is_locked(&shared.file, id, 1).unwrap_or(true)
    }

    /// Whether another process has the mark. Where that cannot be told, one has.
    pub fn others_have(&self, mark: Mark) -> bool {
        is_locked(&self.shared().file, mark.range(), RANGE).unwrap_or(true)
    }

    /// Marks this process; `None` if it is marked already.
    pub fn mark(&self, mark: Mark) -> io::Result<Option<Marked>> {
        let shared = self.0.as_ref().expect("taken in drop alone");
        let mut marked = lock(&shared.marked);
        if *marked {
            return Ok(None);
        }
        if !set(&shared.file, libc::F_WRLCK, mark.range() + shared.name.id)? {
            return Err(io::Error::other("its byte of alive.lock is another's"));
        }
        *marked = true;
        drop(marked);
        let presence = Presence(Some(shared.clone()));
        Ok(Some(Marked { presence, mark }))
    }

    /// Waits for a turn, which one thread of one process has at a time; an error if another does
    /// not end its own.
    pub fn turn(&self) -> io::Result<TurnGuard<'_>> {
        let shared = self.shared();
        let thread = lock(&shared.turn);
        if !try_until(TURN_WAIT, || set(&shared.file, libc::F_WRLCK, TURN))? {
            return Err(held(TURN_WAIT));
        }
        Ok(TurnGuard { shared, _thread: thread })
    }

    /// A turn, if nobody has one just now: waits for nobody.
    pub fn try_turn(&self) -> io::Result<Option<TurnGuard<'_>>> {
        let shared = self.shared();
        let thread = match shared.turn.try_lock() {
            Ok(thread) => thread,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return Ok(None),
        };
        let free = set(&shared.file, libc::F_WRLCK, TURN)?;
        Ok(free.then_some(TurnGuard { shared, _thread: thread }))
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let Some(shared) = self.0.take() else { return };
        if shared.name.pid != std::process::id() {
            // A forked child: the table's lock may be held for ever, and there is nothing to give
            // back.
            std::mem::forget(shared);
            return;
        }
        let mut table = lock(&TABLE);
        drop(shared);
        // A clone is made under the table's lock, or of one that is counted, and dropped under the
        // lock: so the count says who is the last. Those of the parent of a forked child stay: to
        // close their descriptor would cost this process its own locks.
        let pid = std::process::id();
        table.retain(|s| Arc::strong_count(s) > 1 || s.name.pid != pid);
    }
}

/// A mark, until it is dropped.
pub struct Marked {
    presence: Presence,
    mark: Mark,
}

impl Drop for Marked {
    fn drop(&mut self) {
        let shared = self.presence.shared();
        if shared.name.pid == std::process::id() {
            let mut marked = lock(&shared.marked);
            let _ = set(&shared.file, libc::F_UNLCK, self.mark.range() + shared.name.id);
            *marked = false;
        }
    }
}

/// A turn, until it is dropped.
pub struct TurnGuard<'a> {
    shared: &'a Shared,
    _thread: MutexGuard<'a, ()>,
}

impl Drop for TurnGuard<'_> {
    fn drop(&mut self) {
        let _ = set(&self.shared.file, libc::F_UNLCK, TURN);
    }
}

fn range(kind: libc::c_int, start: u64, len: u64) -> libc::flock {
    libc::flock {
        l_type: kind as _,
        l_whence: libc::SEEK_SET as _,
        l_start: start as _,
        l_len: len as _,
        l_pid: 0,
    }
}

/// Locks or unlocks a byte; false if another process has it.
fn set(file: &File, kind: libc::c_int, byte: u64) -> io::Result<bool> {
    match fcntl(file, FcntlArg::F_SETLK(&range(kind, byte, 1))) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// The pid of a process that takes part, as it is in this PID namespace, if one does: of the holder
/// of one of the locks in this file.
pub(crate) fn holder(file: &File) -> Option<i32> {
    let mut answer = range(libc::F_WRLCK, 0, RANGE);
    fcntl(file, FcntlArg::F_GETLK(&mut answer)).ok()?;
    (answer.l_type != libc::F_UNLCK as libc::c_short).then_some(answer.l_pid)
}

/// Whether another process has locked something in a range.
fn is_locked(file: &File, start: u64, len: u64) -> io::Result<bool> {
    let mut answer = range(libc::F_WRLCK, start, len);
    fcntl(file, FcntlArg::F_GETLK(&mut answer))?;
    Ok(answer.l_type != libc::F_UNLCK as libc::c_short)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    fn runtime() -> (tempfile::TempDir, Runtime) {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        (dir, runtime)
    }

    #[test]
    fn all_presences_of_a_process_are_one() {
        let (_dir, runtime) = runtime();
        let (one, two) = (Presence::join(&runtime).unwrap(), Presence::join(&runtime).unwrap());
        assert_eq!(one.name(), two.name());
        assert!(one.lives(one.name().id));
        assert!(!one.lives(1), "nobody drew it");
        let first = one.name();
        drop((one, two));
        assert_ne!(Presence::join(&runtime).unwrap().name(), first);
    }

    #[test]
    fn a_mark_is_had_once() {
        let (_dir, runtime) = runtime();
        let presence = Presence::join(&runtime).unwrap();
        let marked = presence.mark(Mark::Directory).unwrap().unwrap();
        assert!(presence.mark(Mark::Directory).unwrap().is_none());
        assert!(!presence.others_have(Mark::Directory), "its own is no other's");
        drop(marked);
        assert!(presence.mark(Mark::Directory).unwrap().is_some());
    }

    #[test]
    fn where_the_kernel_does_not_answer_the_other_lives() {
        let (_dir, runtime) = runtime();
        let presence = Presence::join(&runtime).unwrap();
        let name = presence.name();
        // A descriptor that no lock can be asked of.
        let path = runtime.path().join("alive.lock");
        let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).unwrap();
        let deaf = Presence(Some(Arc::new(Shared {
            file,
            key: (0, 0),
            name: ProcessName { id: name.id ^ 1, ..name },
            marked: Mutex::default(),
            turn: Mutex::default(),
        })));
        assert!(is_locked(&deaf.shared().file, 5, 1).is_err());
        assert!(deaf.lives(5) && deaf.others_have(Mark::Directory));
        assert!(!presence.lives(5));
        // Closing its descriptor takes the locks of this process; see the head of the file.
        std::mem::forget(deaf);
    }

    #[test]
    fn names_read_back() {
        let name = ProcessName { pid: 12, id: 0xabc };
        assert_eq!(name.to_string(), "12-000000000000abc");
        assert_eq!("12-000000000000abc".parse(), Ok(name));
        for wrong in
            ["12", "12-abc", "x-000000000000abc", "12-fffffffffffffffff", "+12-000000000000abc", ""]
        {
            assert_eq!(wrong.parse::<ProcessName>(), Err(()), "{wrong}");
        }
    }

    #[test]
    fn threads_take_turns() {
        let (_dir, runtime) = runtime();
        let presence = Presence::join(&runtime).unwrap();
        let inside = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let _turn = presence.turn().unwrap();
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
    }
}
