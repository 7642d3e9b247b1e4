//! The runtime folder.
//!
//! Whose it is and who may write to it is asked of a descriptor that is opened once, and the path
//! that is used from then on is one that leads to that very folder, so that nobody can put another
//! in its place between looking and using. The folders that lead to it are taken on trust, as with
//! any path that a user names; for the default folder, which others can foresee, a symbolic link is
//! refused.
//!
//! Shared pages lie in the folder too (`shm`), and nowhere else: whoever sees the folder, in
//! whatever container, sees the same pages. They are written with every packet. In a folder on a
//! disk the kernel cleans such a page every few seconds, and the next write to it faults and may
//! wait for the file system's journal, which can take milliseconds in the middle of a stream. So a
//! runtime folder is best on a tmpfs, as the default one is ([`Runtime::default_path`]), and those
//! of tests are ([`Runtime::temporary_root`]).

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::reset::is_ours;
use rustix::fs::{access, statfs, Access, Mode, OFlags};

/// The environment variable that names the runtime folder.
pub const DEFAULT_VARIABLE: &str = "UNBROKEN_RUNTIME";

/// Why a runtime folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A system call failed.
    #[error("runtime folder {path}: cannot {action}: {source}")]
    Io {
        /// The folder.
        path: String,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Something else than a folder has this name.
    #[error(
        "runtime folder {path}: is not a folder; name a folder of your own in UNBROKEN_RUNTIME, or \
         one that is not there yet"
    )]
    NotAFolder {
        /// The path.
        path: String,
    },
    /// There is nothing of this name, and it was only to be looked at.
    #[error(
        "runtime folder {path}: is not there; the first program makes it, and so does `unbroken \
         fabric up`"
    )]
    Missing {
        /// The path.
        path: String,
    },
    /// It is a folder for something else, and was only to be looked at.
    #[error("runtime folder {path}: is no runtime folder: it has {entry}")]
    Other {
        /// The path.
        path: String,
        /// What a runtime folder does not have.
        entry: String,
    },
    /// It is another user's.
    #[error(
        "runtime folder {path}: belongs to user {owner}, this process runs as user {user}; name a \
         folder of your own in UNBROKEN_RUNTIME"
    )]
    Stranger {
        /// The folder.
        path: String,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Others may write to it.
    #[error(
        "runtime folder {path}: others may write to it (mode {mode:03o}); name a folder of your \
         own in UNBROKEN_RUNTIME, or one that is not there yet"
    )]
    Open {
        /// The folder.
        path: String,
        /// Its mode.
        mode: u32,
    },
}

/// The folders in it, in the order in which they are made.
const FOLDERS: [&str; 5] = ["directory", "proc", "shm", "shm/nics", "shm/proc"];
/// The `f_type` of tmpfs.
const TMPFS: u64 = 0x0102_1994;
/// Where memory can be had as files.
const MEMORY: &str = "/dev/shm";

/// The folder that the processes of one fabric share: fabric, directory, logs, sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    path: PathBuf,
}

impl Runtime {
    /// The folder that the environment names (`UNBROKEN_RUNTIME`), else [`Runtime::default_path`];
    /// made if missing.
    pub fn open() -> Result<Runtime, RuntimeError> {
        match std::env::var_os(DEFAULT_VARIABLE) {
            Some(path) if !path.is_empty() => Runtime::at(Path::new(&path)),
            _ => Runtime::checked(&Runtime::default_path(), OFlags::NOFOLLOW),
        }
    }

    /// The folder at `path`; made (mode 0700) if missing. It must be this user's, and no one else
    /// may write to it.
    pub fn at(path: &Path) -> Result<Runtime, RuntimeError> {
        Runtime::checked(path, OFlags::empty())
    }

    /// The folder at `path`, or the one that [`Runtime::open`] would give, to be looked at: nothing
    /// is made. `None` where no program has run yet. A folder that is named and not there, or is
    /// one for something else, is an error.
    pub fn look(path: Option<&Path>) -> Result<Option<Runtime>, RuntimeError> {
        let named = std::env::var_os(DEFAULT_VARIABLE).filter(|path| !path.is_empty());
        let named = path.map(Path::to_path_buf).or_else(|| named.map(PathBuf::from));
        let is_named = named.is_some();
        let (path, links) = match named {
            Some(path) => (path, OFlags::empty()),
            None => (Runtime::default_path(), OFlags::NOFOLLOW),
        };
        let shown = || path.display().to_string();
        let failed = |source| RuntimeError::Io { path: shown(), action: "look at it", source };
        match open_folder(&path, links) {
            Ok(Some(folder)) => check_owner(&path, &folder.metadata().map_err(failed)?)?,
            Ok(None) => return Err(RuntimeError::NotAFolder { path: shown() }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => match is_named {
                true => return Err(RuntimeError::Missing { path: shown() }),
                false => return Ok(None),
            },
            Err(e) => return Err(failed(e)),
        }
        if FOLDERS.iter().all(|name| path.join(name).symlink_metadata().is_ok()) {
            return Runtime::checked(&path, links).map(Some);
        }
        // Somebody may be making them just now.
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if !is_ours(&entry) {
                return Err(RuntimeError::Other { path: shown(), entry });
            }
        }
        Ok(None)
    }

    fn checked(path: &Path, links: OFlags) -> Result<Runtime, RuntimeError> {
        let io = |action| {
            move |source| RuntimeError::Io { path: path.display().to_string(), action, source }
        };
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        let folder = match (open_folder(path, links), made) {
            (Ok(Some(folder)), Ok(())) => folder,
            (Ok(None), _) => {
                return Err(RuntimeError::NotAFolder { path: path.display().to_string() })
            }
            (_, Err(e)) => return Err(io("make it")(e)),
            (Err(e), _) => return Err(io("look at it")(e)),
        };
        let meta = folder.metadata().map_err(io("look at it"))?;
        check_owner(path, &meta)?;
        let real = fs::canonicalize(path).map_err(io("resolve its path"))?;
        let found = fs::symlink_metadata(&real).map_err(io("look at it"))?;
        if (found.dev(), found.ino()) != (meta.dev(), meta.ino()) {
            return Err(io("use it")(io::Error::other("another folder took its place; try again")));
        }
        for name in FOLDERS {
            make_folder(&real.join(name))?;
        }
        Ok(Runtime { path: real })
    }

    /// `$XDG_RUNTIME_DIR/unbroken`, else `/dev/shm/unbroken-<uid>`, else (where that is no memory)
    /// `/tmp/unbroken-<uid>`.
    pub fn default_path() -> PathBuf {
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(dir) if !dir.is_empty() => Path::new(&dir).join("unbroken"),
            _ => memory().unwrap_or_else(|| "/tmp".into()).join(format!("unbroken-{}", user_id())),
        }
    }

    /// Where runtime folders are best made that are needed for a while: in memory, else where
    /// temporary files are.
    pub fn temporary_root() -> PathBuf {
        memory().unwrap_or_else(std::env::temp_dir)
    }

    /// The folder, absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `fabric.toml`: hosts and NICs.
    pub fn fabric_toml(&self) -> PathBuf {
        self.path.join("fabric.toml")
    }

    /// `shm/fabric.page`: the faults.
    pub fn fabric_page(&self) -> PathBuf {
        self.path.join("shm/fabric.page")
    }

    /// `events.jsonl`: the event log.
    pub fn events(&self) -> PathBuf {
        self.path.join("events.jsonl")
    }

    /// `events.1.jsonl`: the part of the log before the last rotation.
    pub fn old_events(&self) -> PathBuf {
        self.path.join("events.1.jsonl")
    }

    /// `directory/`: the embedded directory.
    pub fn directory(&self) -> PathBuf {
        self.path.join("directory")
    }

    /// `proc/`: the status sockets of processes.
    pub fn sockets(&self) -> PathBuf {
        self.path.join("proc")
    }

    /// `shm/proc/`: one page for each process.
    pub fn process_pages(&self) -> PathBuf {
        self.path.join("shm/proc")
    }

    /// `shm/nics/`: one page of counters for each NIC.
    pub fn nic_pages(&self) -> PathBuf {
        self.path.join("shm/nics")
    }
}

/// The effective user of this process.
pub fn user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A descriptor that serves for looking only, which needs no right to the folder and waits for
/// nothing; `None` where it is no folder.
fn open_folder(path: &Path, links: OFlags) -> io::Result<Option<File>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | links;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(folder) => Ok(Some(folder.into())),
        Err(rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Makes a folder (mode 0700) within the runtime folder, or checks the one that is there: it must
/// be this user's, and no one else may write to it.
pub fn make_folder(path: &Path) -> Result<(), RuntimeError> {
    let io = |action| {
        move |source| RuntimeError::Io { path: path.display().to_string(), action, source }
    };
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io("make it")(e)),
        _ => {}
    }
    check_folder(path)
}

/// Checks a folder within the runtime folder, as [`make_folder`] does.
pub(crate) fn check_folder(path: &Path) -> Result<(), RuntimeError> {
    let io = |source| RuntimeError::Io {
        path: path.display().to_string(),
        action: "look at it",
        source,
    };
    match open_folder(path, OFlags::NOFOLLOW).map_err(io)? {
        Some(folder) => check_owner(path, &folder.metadata().map_err(io)?),
        None => Err(RuntimeError::NotAFolder { path: path.display().to_string() }),
    }
}

/// It must be this user's, and no one else may write to it.
fn check_owner(path: &Path, meta: &fs::Metadata) -> Result<(), RuntimeError> {
    let (path, user) = (path.display().to_string(), user_id());
    if meta.uid() != user {
        return Err(RuntimeError::Stranger { path, owner: meta.uid(), user });
    }
    if meta.mode() & 0o022 != 0 {
        return Err(RuntimeError::Open { path, mode: meta.mode() & 0o777 });
    }
    Ok(())
}

/// The folder of files in memory, where this user may use it.
fn memory() -> Option<PathBuf> {
    let usable = statfs(MEMORY).is_ok_and(|s| s.f_type as u64 == TMPFS)
        && access(MEMORY, Access::WRITE_OK).is_ok();
    usable.then(|| MEMORY.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{mknodat, FileType, CWD};
    use std::os::unix::fs::{chown, symlink, PermissionsExt};

    #[test]
    fn makes_the_folder_for_its_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let rt = Runtime::at(&dir.path().join("x/y")).unwrap();
        assert_eq!(fs::metadata(rt.path()).unwrap().mode() & 0o777, 0o700);
        assert!(rt.sockets().is_dir() && rt.nic_pages().is_dir() && rt.process_pages().is_dir());
    }

    #[test]
    fn to_look_makes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let typo = dir.path().join("typo");
        let said = Runtime::look(Some(&typo)).unwrap_err().to_string();
        assert!(said.contains("typo: is not there") && !typo.exists(), "{said}");
        assert_eq!(Runtime::look(Some(dir.path())).unwrap(), None);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let made = Runtime::at(dir.path()).unwrap();
        assert_eq!(Runtime::look(Some(dir.path())).unwrap(), Some(made));
        // One that is being made, and one that is for something else.
        fs::remove_dir(dir.path().join("shm/proc")).unwrap();
        assert_eq!(Runtime::look(Some(dir.path())).unwrap(), None);
        fs::write(dir.path().join("thesis.tex"), "").unwrap();
        let said = Runtime::look(Some(dir.path())).unwrap_err().to_string();
        assert!(said.contains("it has thesis.tex"), "{said}");
    }

    #[test]
    fn refuses_a_folder_that_others_may_write_to() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o770)).unwrap();
        let text = Runtime::at(dir.path()).unwrap_err().to_string();
        assert!(text.contains("others may write") && is_harmless(&text), "{text}");
    }

    /// Whoever names a folder or a file by mistake is not told to change what others need.
    fn is_harmless(advice: &str) -> bool {
        advice.contains("UNBROKEN_RUNTIME")
            && !advice.contains("chmod")
            && !advice.contains("remove")
    }

    #[test]
    fn refuses_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = Runtime::at(file.path()).unwrap_err().to_string();
        assert!(text.contains("is not a folder") && is_harmless(&text), "{text}");
    }

    #[test]
    fn refuses_the_folder_of_another_user() {
        let dir = tempfile::tempdir().unwrap();
        if chown(dir.path(), Some(user_id() + 1), None).is_err() {
            eprintln!("skipped: only root can give folders away");
            return;
        }
        let text = Runtime::at(dir.path()).unwrap_err().to_string();
        assert!(text.contains("belongs to user") && text.contains("UNBROKEN_RUNTIME"), "{text}");
        // Also where it lies within one's own.
        let own = tempfile::tempdir().unwrap();
        Runtime::at(own.path()).unwrap();
        chown(own.path().join("shm"), Some(user_id() + 1), None).unwrap();
        assert!(matches!(Runtime::at(own.path()), Err(RuntimeError::Stranger { .. })));
    }

    #[test]
    fn refuses_what_is_no_folder_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(matches!(Runtime::at(&fifo), Err(RuntimeError::NotAFolder { .. })));
        for name in ["directory", "proc", "shm"] {
            let own = dir.path().join(format!("with-{name}"));
            DirBuilder::new().mode(0o700).create(&own).unwrap();
            symlink(dir.path(), own.join(name)).unwrap();
            let text = Runtime::at(&own).unwrap_err().to_string();
            assert!(
                text.contains(&format!("{name}: is not a folder")) && is_harmless(&text),
                "{text}"
            );
        }
    }

    #[test]
    fn a_link_is_followed_where_the_user_named_it_and_refused_where_others_may_have_made_it() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        DirBuilder::new().mode(0o700).create(&real).unwrap();
        symlink(&real, &link).unwrap();
        assert_eq!(Runtime::at(&link).unwrap().path(), fs::canonicalize(&real).unwrap());
        assert!(matches!(
            Runtime::checked(&link, OFlags::NOFOLLOW),
            Err(RuntimeError::NotAFolder { .. })
        ));
    }
}
