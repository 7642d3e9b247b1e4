//! The second octet of a runtime's addresses: one for each living runtime folder of a machine,
//! whoever's it is.
//!
//! The registry is a folder that all users share, with a file for each runtime folder,
//! `<octet>-<hash of its path>`, which holds the path and, behind a zero byte, the mount namespace
//! in which it is one. Whose an entry is says the file's owner, as this process sees him (in a user
//! namespace users have other numbers, so these are not part of a name). One's own entry is stale
//! when its folder is gone or its `fabric.toml` has another octet. What others wrote is believed as
//! far as it costs little: their octet is avoided while the folder is there or cannot be looked at.
//!
//! Whether a folder is there can be seen in its own mount namespace alone: containers that share
//! this registry and the network may each have a `/dev/shm` of their own. An entry of another
//! namespace whose folder is not seen is therefore neither living nor stale, but out of sight: its
//! octet is given out only when no other is free, the longest unused first, which also clears away
//! what ended containers left behind.
//!
//! Processes of one user take turns under a lock of his, so that a folder which has its entry but
//! not yet its `fabric.toml` is never taken for stale. Users cannot take turns (one could keep the
//! others waiting): each makes his entry and then looks whether another has come for the same
//! octet; of two who see each other the one with the smaller hash keeps it.
//!
//! Any user may write to the folder. Names that no entry can have are skipped, however many there
//! are; a folder with more entries than can be read is refused, since an entry that is not seen
//! would make two networks share an octet.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, Metadata, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{
    renameat_with, utimensat, AtFlags, OFlags, RenameFlags, Timespec, Timestamps, CWD, UTIME_NOW,
};
use unbroken_runtime::{fill_random, open_own, user_id, FileLock, Runtime};

use crate::config::Shape;
use crate::error::{FabricError, Result};

/// The registry.
const FOLDER: &str = "/tmp/unbroken-octets";
/// Octets that are given out: 1 to 254. Not 0 (127.0.0.1 is there) and not 255.
const OCTETS: u64 = 254;
/// The longest path that an entry may hold.
const PATH_BYTES: u64 = 4096;
/// Entries of the registry that are read, and names that are looked at for that. With more of
/// either the registry is refused: one that is read in part would give an octet out twice.
const MAX_ENTRIES: usize = 4096;
const MAX_NAMES: usize = 1 << 18;
/// What makes a file's times those of now.
const NOW: Timestamps = {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW as _ };
    Timestamps { last_access: now, last_modification: now }
};
/// Names that a user's lock may have, since others may have taken some.
const LOCK_NAMES: u32 = 16;

/// The registry, locked against other processes of this user.
pub(crate) struct Registry {
    folder: PathBuf,
    _lock: FileLock,
}

/// What a file of the registry says.
struct Entry {
    file: PathBuf,
    octet: u8,
    hash: u64,
    owner: u32,
    path: PathBuf,
    /// As `mount_namespace` has it.
    namespace: Vec<u8>,
    /// When a process last used it: the file's modification time.
    used: SystemTime,
}

/// What can be said of an entry's runtime folder from here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It is there with this octet, or cannot be looked at.
    Lives,
    /// It is not, and this is the mount namespace in which it would be.
    Gone,
    /// It is not seen, but is one of another mount namespace.
    OutOfSight,
}

impl Entry {
    /// Reads a file; `None` if it is no entry. Waits for nothing, whatever lies there.
    fn read(file: PathBuf) -> Option<Entry> {
        let (octet, hash) = parse_name(file.file_name()?.to_str()?)?;
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let open =
            OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(&file).ok()?;
        let meta = open.metadata().ok().filter(Metadata::is_file)?;
        let mut path = Vec::new();
        open.take(PATH_BYTES + 64).read_to_end(&mut path).ok()?;
        let namespace = match path.iter().position(|b| *b == 0) {
            Some(end) => path.drain(end..).skip(1).collect(),
            None => Vec::new(),
        };
        let path = PathBuf::from(OsString::from_vec(path));
        Some(Entry {
            file,
            octet,
            hash,
            owner: meta.uid(),
            path,
            namespace,
            used: meta.modified().ok()?,
        })
    }

    fn is_own(&self) -> bool {
        self.owner == user_id()
    }

    fn is_of(&self, runtime: &Runtime) -> bool {
        self.is_own() && self.path == runtime.path()
    }

    fn standing(&self) -> Standing {
        if self.is_seen() {
            return Standing::Lives;
        }
        match mount_namespace() {
            Some(here) if here == self.namespace => Standing::Gone,
            _ => Standing::OutOfSight,
        }
    }

    /// Whether its runtime folder is there, with this octet as far as one can look.
    fn is_seen(&self) -> bool {
        if !self.is_own() {
            return !matches!(fs::symlink_metadata(&self.path), Err(e) if e.kind() == io::ErrorKind::NotFound);
        }
        let toml = self.path.join("fabric.toml");
        // A file with an error is still someone's.
        let shape = crate::fabric::read_text(&toml).map(|text| Shape::parse(&text, &toml));
        shape.is_ok_and(|shape| shape.map_or(true, |s| s.octet == self.octet))
    }
}

impl Registry {
    /// Locks the registry for this user.
    pub(crate) fn lock() -> Result<Registry> {
        Registry::lock_at(PathBuf::from(FOLDER))
    }

    fn lock_at(folder: PathBuf) -> Result<Registry> {
        make_shared(&folder)?;
        let path = |n: u32| folder.join(format!("lock-{}-{n}", user_id()));
        let mut n = 0;
        // The first name that is ours or nobody's; all processes of this user come to the same.
        let lock = loop {
            match FileLock::take(&path(n)) {
                Err(e) if e.kind() != io::ErrorKind::TimedOut && n + 1 < LOCK_NAMES => n += 1,
                taken => break taken.map_err(FabricError::io(&path(n), "lock it"))?,
            }
        };
        Ok(Registry { folder, _lock: lock })
    }

    /// An octet for a runtime that has none yet, entered in the registry. Its `fabric.toml` must be
    /// written before the lock goes.
    pub(crate) fn choose(&self, runtime: &Runtime) -> Result<u8> {
        let hash = hash(runtime.path());
        // Others' entries, by what is known of each; what is this runtime's own stands in nobody's
        // way.
        let mut taken = [false; OCTETS as usize + 1];
        taken[0] = true;
        let mut unseen: Vec<Entry> = Vec::new();
        for e in self.entries()?.into_iter().filter(|e| !e.is_of(runtime)) {
            match e.standing() {
                Standing::Gone if e.is_own() => drop(fs::remove_file(&e.file)),
                Standing::Gone => {}
                Standing::Lives => {
                    taken.get_mut(usize::from(e.octet)).into_iter().for_each(|t| *t = true)
                }
                Standing::OutOfSight => unseen.push(e),
            }
        }
        unseen.sort_by_key(|e| e.used);
        // Starting at a place of the path's own keeps fabrics apart also where the registry is not
        // shared (containers), mostly.
        let start = hash % OCTETS;
        let by_path = (0..OCTETS).map(|step| ((start + step) % OCTETS + 1) as u8);
        let free = by_path.filter(|octet| unseen.iter().all(|e| e.octet != *octet));
        for octet in free.chain(unseen.iter().map(|e| e.octet)) {
            if taken.get(usize::from(octet)).is_none_or(|taken| *taken)
                || self.enter(octet, runtime).is_err()
            {
                continue;
            }
            let late = |e: &Entry| {
                e.octet == octet && e.hash < hash && !e.is_own() && e.standing() == Standing::Lives
            };
            if !self.entries()?.iter().any(late) {
                unseen
                    .iter()
                    .filter(|e| e.octet == octet && e.is_own())
                    .for_each(|e| drop(fs::remove_file(&e.file)));
                return Ok(octet);
            }
            self.release(octet, runtime);
        }
        Err(FabricError::Octet(format!(
            "no second octet is free, or can be entered in {}: all {OCTETS} may be those of \
             runtime folders; `unbroken fabric down` gives back that of a folder of yours",
            self.folder.display()
        )))
    }

    /// Enters the octet that an existing `fabric.toml` has, unless another living runtime holds it.
    pub(crate) fn claim(&self, octet: u8, runtime: &Runtime) -> Result<()> {
        let entries = self.entries()?;
        if entries.iter().any(|e| e.octet == octet && e.is_of(runtime)) {
            return Ok(());
        }
        match entries.iter().find(|e| e.octet == octet && e.standing() == Standing::Lives) {
            Some(e) => Err(FabricError::Octet(format!(
                "{}: octet {octet} is that of the runtime folder {} of user {}; name another octet \
                 there, or another folder in UNBROKEN_RUNTIME",
                runtime.fabric_toml().display(),
                e.path.display(),
                e.owner
            ))),
            None => self.enter(octet, runtime),
        }
    }

    /// Forgets the octet of a runtime.
    pub(crate) fn release(&self, octet: u8, runtime: &Runtime) {
        let file = entry(&self.folder, octet, runtime);
        if Entry::read(file.clone()).is_some_and(|e| e.is_of(runtime)) {
            let _ = fs::remove_file(file);
        }
    }

    /// The runtime folder at this path is gone: its octets are free.
    pub(crate) fn forget(&self, path: &Path) {
        for entry in self.entries().into_iter().flatten().filter(|e| e.is_own() && e.path == path) {
            let _ = fs::remove_file(&entry.file);
        }
    }

    /// Whether the registry says that this runtime has this octet: the usual case, found out
    /// without the lock. The entry has been used then.
    pub(crate) fn knows(octet: u8, runtime: &Runtime) -> bool {
        let file = entry(Path::new(FOLDER), octet, runtime);
        let known = Entry::read(file.clone()).is_some_and(|e| e.is_of(runtime));
        if known {
            // It matters to nobody but those for whom all octets are taken.
            let _ = utimensat(CWD, &file, &NOW, AtFlags::SYMLINK_NOFOLLOW);
        }
        known
    }

    fn entries(&self) -> Result<Vec<Entry>> {
        let (mut names, mut files) = (0, Vec::new());
        for file in fs::read_dir(&self.folder).map_err(FabricError::io(&self.folder, "read it"))? {
            let file = file.map_err(FabricError::io(&self.folder, "read it"))?;
            names += 1;
            if file.file_name().to_str().and_then(parse_name).is_some() {
                files.push(file.path());
            }
            if names > MAX_NAMES || files.len() > MAX_ENTRIES {
                return Err(FabricError::Octet(format!(
                    "{}: full: more than {MAX_ENTRIES} entries or {MAX_NAMES} names; `ls -ln` \
                     shows whose they are, who can remove them, as root can",
                    self.folder.display()
                )));
            }
        }
        Ok(files.into_iter().filter_map(Entry::read).collect())
    }

    fn enter(&self, octet: u8, runtime: &Runtime) -> Result<()> {
        let file = entry(&self.folder, octet, runtime);
        let write = || -> io::Result<()> {
            // Not renamed into its place, which another user's file may have.
            let mut made = open_own(&file, OpenOptions::new().write(true).create(true))?;
            made.set_len(0)?;
            made.write_all(&entry_text(runtime, &mount_namespace().unwrap_or_default()))?;
            // Others read it.
            made.set_permissions(Permissions::from_mode(0o644))
        };
        write().map_err(FabricError::io(&file, "write it"))
    }
}

/// Makes the folder that all users write to, where each may remove what is his. It has its name
/// when it has its rights.
fn make_shared(folder: &Path) -> Result<()> {
    let io = |action| FabricError::io(folder, action);
    match fs::symlink_metadata(folder) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(meta) => {
            let what = format!(
                "is not a folder; its owner (user {}) or root has to move it away",
                meta.uid()
            );
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

fn entry_text(runtime: &Runtime, namespace: &[u8]) -> Vec<u8> {
    [runtime.path().as_os_str().as_encoded_bytes(), namespace].join(&0)
}

/// The mount namespace of this process, as the kernel names it; `None` where there is no `/proc` to
/// say it.
fn mount_namespace() -> Option<Vec<u8>> {
    Some(fs::read_link("/proc/self/ns/mnt").ok()?.into_os_string().into_vec())
}

fn entry(folder: &Path, octet: u8, runtime: &Runtime) -> PathBuf {
    folder.join(name(octet, hash(runtime.path())))
}

/// The name of an entry's file.
fn name(octet: u8, hash: u64) -> String {
    format!("{octet}-{hash:016x}")
}

/// What an entry's name says; `None` where no entry has this name.
fn parse_name(text: &str) -> Option<(u8, u64)> {
    let (octet, hash) = text.split_once('-')?;
    let (octet, hash) = (octet.parse().ok()?, u64::from_str_radix(hash, 16).ok()?);
    (name(octet, hash) == text).then_some((octet, hash))
}

/// FNV-1a, mixed once more: the octet comes of its remainder.
fn hash(path: &Path) -> u64 {
    let bytes = path.as_os_str().as_encoded_bytes();
    let full = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3_u64));
    full ^ (full >> 32)
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
        assert!(registry
            .choose(&late)
            .unwrap_err()
            .to_string()
            .contains("no second octet is free"));
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
        let (uid, his) = (user_id() + 1, runtime(dir.path(), "his"));
        let file = entry(&registry.folder, first, &his);
        fs::write(&file, entry_text(&his, &mount_namespace().unwrap())).unwrap();
        if chown(&file, Some(uid), None).is_err() {
            eprintln!("skipped: only root can give files away");
            return;
        }
        assert_ne!(registry.choose(&mine).unwrap(), first);
        assert!(registry
            .claim(first, &mine)
            .unwrap_err()
            .to_string()
            .contains(&format!("of user {uid}")));
        fs::remove_dir_all(his.path()).unwrap();
        assert_eq!(registry.choose(&mine).unwrap(), first, "his folder is gone");
        assert!(file.exists(), "his entry is his to remove");
        // His entry has the very name that ours would have.
        chown(entry(&registry.folder, first, &mine), Some(uid), None).unwrap();
        assert_ne!(registry.choose(&mine).unwrap(), first);
    }

    /// Rewrites the entry of a runtime as that of a container, and its folder goes out of sight.
    fn put_out_of_sight(registry: &Registry, octet: u8, runtime: &Runtime) {
        fs::write(entry(&registry.folder, octet, runtime), entry_text(runtime, b"mnt:[1]"))
            .unwrap();
        let _ = fs::remove_dir_all(runtime.path());
    }

    #[test]
    fn what_another_mount_namespace_hides_keeps_its_octet_while_others_are_free() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::lock_at(dir.path().join("octets")).unwrap();
        let mine = runtime(dir.path(), "mine");
        let first = registry.choose(&mine).unwrap();
        registry.release(first, &mine);
        let hidden = runtime(dir.path(), "hidden");
        let file = registry
            .enter(first, &hidden)
            .map(|()| entry(&registry.folder, first, &hidden))
            .unwrap();
        put_out_of_sight(&registry, first, &hidden);
        let second = registry.choose(&mine).unwrap();
        assert_ne!(second, first);
        assert!(file.exists(), "its folder may be there for those who see it");
        registry.claim(first, &runtime(dir.path(), "other")).unwrap();
        // Without a word of where it is one, it is believed too.
        fs::write(&file, hidden.path().as_os_str().as_encoded_bytes()).unwrap();
        registry.release(second, &mine);
        assert_eq!(registry.choose(&mine).unwrap(), second);
    }

    #[test]
    fn when_all_octets_are_taken_the_longest_unused_out_of_sight_goes() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::lock_at(dir.path().join("octets")).unwrap();
        let long_ago = SystemTime::now() - std::time::Duration::from_secs(1000);
        for octet in 1..=OCTETS as u8 {
            let hidden = runtime(dir.path(), &format!("r{octet}"));
            registry.enter(octet, &hidden).unwrap();
            put_out_of_sight(&registry, octet, &hidden);
            let age = std::time::Duration::from_secs(u64::from(octet ^ 77));
            let file = OpenOptions::new()
                .write(true)
                .open(entry(&registry.folder, octet, &hidden))
                .unwrap();
            file.set_modified(long_ago + age).unwrap();
        }
        for octet in [77, 76] {
            let late = runtime(dir.path(), &format!("late{octet}"));
            assert_eq!(registry.choose(&late).unwrap(), octet);
            record(&late, octet);
        }
        assert_eq!(
            registry.entries().unwrap().len(),
            OCTETS as usize,
            "the entries of those two are gone"
        );
    }

    #[test]
    fn stale_entries_of_ones_own_go_and_a_taken_lock_has_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("octets");
        let registry = Registry::lock_at(folder.clone()).unwrap();
        for n in 0..3 {
            let gone = runtime(dir.path(), &format!("gone{n}"));
            let octet = registry.choose(&gone).unwrap();
            record(&gone, octet);
            fs::remove_dir_all(gone.path()).unwrap();
        }
        registry.choose(&runtime(dir.path(), "mine")).unwrap();
        assert_eq!(registry.entries().unwrap().len(), 1);
        drop(registry);
        fs::remove_file(folder.join(format!("lock-{}-0", user_id()))).unwrap();
        fs::create_dir(folder.join(format!("lock-{}-0", user_id()))).unwrap();
        drop(Registry::lock_at(folder.clone()).unwrap());
        assert!(folder.join(format!("lock-{}-1", user_id())).is_file());
    }

    #[test]
    fn names_that_are_no_entries_hide_none_and_a_full_folder_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::lock_at(dir.path().join("octets")).unwrap();
        // As many as were once looked at, in names that a folder lists before and after entries.
        for n in 0..2 * MAX_ENTRIES {
            fs::write(registry.folder.join(format!("{}-junk{n}", n % 300)), "").unwrap();
        }
        let mut seen = std::collections::HashSet::new();
        for n in 0..20 {
            let rt = runtime(dir.path(), &format!("r{n}"));
            let octet = registry.choose(&rt).unwrap();
            assert!(seen.insert(octet), "octet {octet} twice");
            record(&rt, octet);
        }
        for n in 0..MAX_ENTRIES as u64 {
            fs::write(registry.folder.join(name(1, n)), "/nowhere").unwrap();
        }
        let late = runtime(dir.path(), "late");
        for error in [registry.choose(&late).map(drop), registry.claim(7, &late)] {
            let text = error.unwrap_err().to_string();
            assert!(text.contains("octets: full") && text.contains("ls -ln"), "{text}");
        }
    }

    #[test]
    fn what_lies_in_the_way_is_no_entry_and_stops_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::lock_at(dir.path().join("octets")).unwrap();
        let mine = runtime(dir.path(), "mine");
        let octet = registry.choose(&mine).unwrap();
        registry.release(octet, &mine);
        for (n, name) in ["1", "2", "zz"].iter().enumerate() {
            use rustix::fs::{mknodat, FileType, Mode};
            let file = registry.folder.join(format!("{octet}-{name}"));
            match n % 2 {
                0 => mknodat(CWD, &file, FileType::Fifo, Mode::RWXU, 0).unwrap(),
                _ => symlink("/etc/passwd", &file).unwrap(),
            }
        }
        assert_eq!(registry.choose(&mine).unwrap(), octet);
        drop(registry);
        fs::write(dir.path().join("file"), "").unwrap();
        let text = Registry::lock_at(dir.path().join("file")).err().unwrap().to_string();
        assert!(text.contains("is not a folder; its owner"), "{text}");
    }
}
