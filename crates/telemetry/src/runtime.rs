//! The runtime folder.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

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
    #[error("runtime folder {path}: is not a folder; name a folder in UNBROKEN_RUNTIME")]
    NotAFolder {
        /// The path.
        path: String,
    },
    /// It is another user's.
    #[error("runtime folder {path}: belongs to user {owner}, this process runs as user {user}; name a folder of your own in UNBROKEN_RUNTIME")]
    Stranger {
        /// The folder.
        path: String,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Others may write to it.
    #[error("runtime folder {path}: others may write to it (mode {mode:03o}); run: chmod go-w {path}")]
    Open {
        /// The folder.
        path: String,
        /// Its mode.
        mode: u32,
    },
}

/// The folder that the processes of one fabric share: fabric, directory, logs, sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    path: PathBuf,
    is_default: bool,
}

impl Runtime {
    /// The folder that the environment names (`UNBROKEN_RUNTIME`), else [`Runtime::default_path`]; made if missing.
    pub fn open() -> Result<Runtime, RuntimeError> {
        match std::env::var_os(DEFAULT_VARIABLE) {
            Some(path) if !path.is_empty() => Runtime::at(Path::new(&path)),
            _ => Runtime::at(&Runtime::default_path()),
        }
    }

    /// The folder at `path`; made (mode 0700) if missing. It must be this user's, and no one else may write to it.
    pub fn at(path: &Path) -> Result<Runtime, RuntimeError> {
        let shown = || path.display().to_string();
        let io = |action| move |source| RuntimeError::Io { path: path.display().to_string(), action, source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(io("make it"))?;
        let meta = fs::metadata(path).map_err(io("look at it"))?;
        if !meta.is_dir() {
            return Err(RuntimeError::NotAFolder { path: shown() });
        }
        let user = user_id();
        if meta.uid() != user {
            return Err(RuntimeError::Stranger { path: shown(), owner: meta.uid(), user });
        }
        if meta.mode() & 0o022 != 0 {
            return Err(RuntimeError::Open { path: shown(), mode: meta.mode() & 0o777 });
        }
        let path = fs::canonicalize(path).map_err(io("resolve its path"))?;
        DirBuilder::new().recursive(true).mode(0o700).create(path.join("proc")).map_err(io("make a folder in it"))?;
        crate::shm::make(&path).map_err(io("make a folder for pages in it"))?;
        let is_default = fs::canonicalize(Runtime::default_path()).is_ok_and(|d| d == path);
        Ok(Runtime { path, is_default })
    }

    /// `$XDG_RUNTIME_DIR/unbroken`, else `/tmp/unbroken-<uid>`.
    pub fn default_path() -> PathBuf {
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(dir) if !dir.is_empty() => Path::new(&dir).join("unbroken"),
            _ => PathBuf::from(format!("/tmp/unbroken-{}", user_id())),
        }
    }

    /// Whether this is the default folder, whose fabric has the second octet 77.
    pub fn is_default(&self) -> bool {
        self.is_default
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

/// Whether a process of this pid exists (a zombie does not count: it holds nothing any more).
pub fn process_is_alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // "pid (name) state …"; the name may itself hold parentheses.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn makes_the_folder_for_its_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let rt = Runtime::at(&dir.path().join("x/y")).unwrap();
        assert_eq!(fs::metadata(rt.path()).unwrap().mode() & 0o777, 0o700);
        assert!(!rt.is_default());
        assert!(rt.sockets().is_dir() && rt.nic_pages().is_dir() && rt.process_pages().is_dir());
    }

    #[test]
    fn refuses_a_folder_that_others_may_write_to() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o770)).unwrap();
        let text = Runtime::at(dir.path()).unwrap_err().to_string();
        assert!(text.contains("chmod go-w"), "{text}");
    }

    #[test]
    fn refuses_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Runtime::at(file.path()).is_err());
    }

    #[test]
    fn knows_the_living() {
        assert!(process_is_alive(std::process::id()));
        assert!(!process_is_alive(u32::MAX));
    }
}
