//! The second octet of a runtime's addresses: one for each living runtime folder of a machine, whoever's it is.
//!
//! The registry is a folder that all users share, with one file for each octet that a user has, `<octet>-<uid>`, which holds the path
//! of the runtime. What others wrote there is believed as far as it costs little: an octet is avoided if an entry for it belongs to
//! the user whom it names, and the runtime folder that it names is there or cannot be looked at. An entry of one's own is stale when
//! that folder is gone or its `fabric.toml` has another octet.
//!
//! Processes of one user take turns under a lock of his, so that a folder which has its entry but not yet its `fabric.toml` is never
//! taken for stale. Users cannot take turns (one could keep the others waiting): each makes its entry and then looks whether another has
//! come for the same octet; of two who see each other the one with the smaller uid keeps it.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{renameat_with, OFlags, RenameFlags, CWD};
use unbroken_telemetry::{fill_random, open_own, user_id, FileLock, Runtime};

use crate::config::Shape;
use crate::error::{FabricError, Result};

/// The registry.
const FOLDER: &str = "/tmp/unbroken-octets";
/// Octets that are given out: 1 to 254. Not 0 (127.0.0.1 is there) and not 255.
const OCTETS: u16 = 254;
/// The longest path that an entry may hold.
const PATH_BYTES: u64 = 4096;

/// The registry, locked against other processes of this user.
pub(crate) struct Registry {
    folder: PathBuf,
    _lock: FileLock,
}

impl Registry {
    /// Locks the registry for this user.
    pub(crate) fn lock() -> Result<Registry> {
        Registry::lock_at(PathBuf::from(FOLDER))
    }

    fn lock_at(folder: PathBuf) -> Result<Registry> {
        make_shared(&folder)?;
        let path = folder.join(format!("lock-{}", user_id()));
        let lock = FileLock::take(&path).map_err(FabricError::io(&path, "lock it"))?;
        Ok(Registry { folder, _lock: lock })
    }

    /// An octet for a runtime that has none yet, entered in the registry. Its `fabric.toml` must be written before the lock goes.
    pub(crate) fn choose(&self, runtime: &Runtime) -> Result<u8> {
        // Starting at a place of the path's own keeps fabrics apart also where the registry is not shared (containers), mostly.
        let start = hash(runtime.path()) % OCTETS;
        for step in 0..OCTETS {
            let octet = ((start + step) % OCTETS + 1) as u8;
            if self.holder(octet).is_some_and(|path| path != runtime.path()) || self.stranger(octet, None).is_some() {
                continue;
            }
            self.enter(octet, runtime)?;
            if self.stranger(octet, Some(user_id())).is_none() {
                return Ok(octet);
            }
            self.release(octet, runtime);
        }
        Err(FabricError::Octet(format!(
            "all {OCTETS} second octets are taken by runtime folders (see {}); remove one that is no longer needed",
            self.folder.display()
        )))
    }

    /// Enters the octet that an existing `fabric.toml` has, unless another living runtime holds it.
    pub(crate) fn claim(&self, octet: u8, runtime: &Runtime) -> Result<()> {
        let taken = match self.holder(octet) {
            Some(path) if path == runtime.path() => return Ok(()),
            Some(path) => Some(format!("the runtime folder {}", path.display())),
            None => self.stranger(octet, None).map(|uid| format!("a runtime folder of user {uid}")),
        };
        match taken {
            Some(whose) => Err(FabricError::Octet(format!(
                "{}: octet {octet} is that of {whose}; remove fabric.toml to get a free one",
                runtime.fabric_toml().display()
            ))),
            None => self.enter(octet, runtime),
        }
    }

    /// Forgets the octet of a runtime.
    pub(crate) fn release(&self, octet: u8, runtime: &Runtime) {
        let file = entry(&self.folder, octet, user_id());
        if read(&file, user_id()).is_some_and(|path| path == runtime.path()) {
            let _ = fs::remove_file(file);
        }
    }

    /// Whether the registry says that this runtime has this octet: the usual case, found out without the lock.
    pub(crate) fn knows(octet: u8, runtime: &Runtime) -> bool {
        read(&entry(Path::new(FOLDER), octet, user_id()), user_id()).is_some_and(|path| path == runtime.path())
    }

    /// The living runtime folder of this user that has this octet.
    fn holder(&self, octet: u8) -> Option<PathBuf> {
        let path = read(&entry(&self.folder, octet, user_id()), user_id())?;
        let file = path.join("fabric.toml");
        let text = crate::fabric::read_text(&file).ok()?;
        // A file with an error is still someone's.
        Shape::parse(&text, &file).map_or(true, |s| s.octet == octet).then_some(path)
    }

    /// Another user (with a smaller uid than `below`, if that is given) who has a runtime folder with this octet.
    fn stranger(&self, octet: u8, below: Option<u32>) -> Option<u32> {
        let prefix = format!("{octet}-");
        let names = fs::read_dir(&self.folder).ok()?.flatten().map(|e| e.file_name());
        let users = names.filter_map(|name| name.to_str()?.strip_prefix(&prefix)?.parse::<u32>().ok());
        let mut others = users.filter(|uid| *uid != user_id() && below.is_none_or(|below| *uid < below));
        others.find(|uid| {
            let path = read(&entry(&self.folder, octet, *uid), *uid);
            path.is_some_and(|path| match fs::symlink_metadata(path) {
                Err(e) => e.kind() != io::ErrorKind::NotFound,
                Ok(_) => true,
            })
        })
    }

    fn enter(&self, octet: u8, runtime: &Runtime) -> Result<()> {
        let file = entry(&self.folder, octet, user_id());
        let new = self.folder.join(format!("new-{}", user_id()));
        let write = || -> io::Result<()> {
            let _ = fs::remove_file(&new);
            let mut made = open_own(&new, OpenOptions::new().write(true).create_new(true))?;
            io::Write::write_all(&mut made, runtime.path().as_os_str().as_encoded_bytes())?;
            // Others read it.
            made.set_permissions(Permissions::from_mode(0o644))?;
            fs::rename(&new, &file)
        };
        write().map_err(FabricError::io(&file, "write it"))
    }
}

/// Makes the folder that all users write to, where each may remove what is his. It has its name when it has its rights.
fn make_shared(folder: &Path) -> Result<()> {
    let io = |action| FabricError::io(folder, action);
    match fs::symlink_metadata(folder) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(meta) => {
            let what = format!("is not a folder; remove it (it belongs to user {})", meta.uid());
            return Err(FabricError::Octet(format!("{}: {what}", folder.display())));
        }
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io("look at it")(e)),
        Err(_) => {}
    }
    let mut name = [0; 8];
    fill_random(&mut name).map_err(io("make it"))?;
    let new = folder.with_extension(format!("{:016x}", u64::from_ne_bytes(name)));
    DirBuilder::new().mode(0o700).create(&new).map_err(io("make it"))?;
    let shared = fs::set_permissions(&new, Permissions::from_mode(0o1777))
        .and_then(|()| Ok(renameat_with(CWD, &new, CWD, folder, RenameFlags::NOREPLACE)?));
    if shared.is_err() {
        let _ = fs::remove_dir(&new);
    }
    match shared {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(io("make it")(e)),
        _ => Ok(()),
    }
}

fn entry(folder: &Path, octet: u8, uid: u32) -> PathBuf {
    folder.join(format!("{octet}-{uid}"))
}

/// The path in an entry, if the entry is that user's. Waits for nothing, whatever lies there.
fn read(file: &Path, uid: u32) -> Option<PathBuf> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(file).ok()?;
    if !file.metadata().is_ok_and(|m| m.is_file() && m.uid() == uid) {
        return None;
    }
    let mut path = Vec::new();
    file.take(PATH_BYTES).read_to_end(&mut path).ok()?;
    Some(PathBuf::from(std::ffi::OsString::from_vec(path)))
}

/// FNV-1a, folded to 16 bits.
fn hash(path: &Path) -> u16 {
    let bytes = path.as_os_str().as_encoded_bytes();
    let full = bytes.iter().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193));
    (full ^ (full >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, symlink};

    fn runtime(dir: &Path, name: &str) -> Runtime {
        Runtime::at(&dir.join(name)).unwrap()
    }

    fn record(runtime: &Runtime, octet: u8) {
        fs::write(runtime.fabric_toml(), Shape::standard(octet).to_toml()).unwrap();
    }

    #[test]
    fn every_living_runtime_has_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::lock_at(dir.path().join("octets")).unwrap();
        let mut seen = std::collections::HashSet::new();
        for n in 0..OCTETS {
            let rt = runtime(dir.path(), &format!("r{n}"));
            let octet = registry.choose(&rt).unwrap();
            assert!((1..=254).contains(&octet));
            assert!(seen.insert(octet), "octet {octet} twice");
            record(&rt, octet);
        }
        let late = runtime(dir.path(), "late");
        assert!(registry.choose(&late).unwrap_err().to_string().contains("all 254"));
        fs::remove_dir_all(dir.path().join("r5")).unwrap();
        let freed = registry.choose(&late).unwrap();
        record(&late, freed);
        let other = runtime(dir.path(), "r6");
        assert!(registry.claim(freed, &other).unwrap_err().to_string().contains("late"));
        registry.claim(freed, &late).unwrap();
    }

    #[test]
    fn the_octet_of_another_user_is_avoided_while_his_folder_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::lock_at(dir.path().join("octets")).unwrap();
        let mine = runtime(dir.path(), "mine");
        let first = registry.choose(&mine).unwrap();
        registry.release(first, &mine);
        // Another user, whose default folder came to the same octet.
        let (uid, his) = (user_id() + 1, dir.path().join("his"));
        fs::create_dir(&his).unwrap();
        let file = entry(&registry.folder, first, uid);
        fs::write(&file, his.as_os_str().as_encoded_bytes()).unwrap();
        assert_eq!(registry.choose(&mine).unwrap(), first, "an entry in the name of another is no entry");
        registry.release(first, &mine);
        if chown(&file, Some(uid), None).is_err() {
            eprintln!("skipped: only root can give files away");
            return;
        }
        assert_ne!(registry.choose(&mine).unwrap(), first);
        assert!(registry.claim(first, &mine).unwrap_err().to_string().contains(&format!("user {uid}")));
        fs::remove_dir(&his).unwrap();
        assert_eq!(registry.choose(&mine).unwrap(), first, "his folder is gone");
    }

    #[test]
    fn what_lies_in_the_way_is_no_entry_and_stops_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::lock_at(dir.path().join("octets")).unwrap();
        let mine = runtime(dir.path(), "mine");
        let octet = registry.choose(&mine).unwrap();
        registry.release(octet, &mine);
        for uid in [user_id(), user_id() + 1, user_id() + 2] {
            use rustix::fs::{mknodat, FileType, Mode};
            let file = entry(&registry.folder, octet, uid);
            match uid % 2 {
                0 => mknodat(CWD, &file, FileType::Fifo, Mode::RWXU, 0).unwrap(),
                _ => symlink("/etc/passwd", &file).unwrap(),
            }
        }
        assert_eq!(registry.choose(&mine).unwrap(), octet);
        drop(registry);
        fs::write(dir.path().join("file"), "").unwrap();
        let text = Registry::lock_at(dir.path().join("file")).err().unwrap().to_string();
        assert!(text.contains("is not a folder; remove it"), "{text}");
    }
}
