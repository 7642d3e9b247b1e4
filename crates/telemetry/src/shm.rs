//! Where the shared pages of a runtime lie.
//!
//! Counters are written with every packet. A page of a disk file would be cleaned by the kernel every few seconds, and the next
//! write to it would fault and could wait for the file system's journal: milliseconds, in the middle of a stream. So the pages lie
//! in memory: in the runtime folder itself where that is on tmpfs, else in a folder of their own in `/dev/shm`, to which the
//! runtime folder has a link (`shm`). Folders whose runtime is gone are removed when a new one is made.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{symlink, DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{flock, statfs, FlockOperation};

use crate::clock::wall_us;
use crate::user_id;

/// The `f_type` of tmpfs.
const TMPFS: u64 = 0x0102_1994;
const MEMORY: &str = "/dev/shm";

/// Makes `<runtime>/shm` with its folders if it is missing.
pub(crate) fn make(runtime: &Path) -> io::Result<()> {
    let shm = runtime.join("shm");
    if !shm.join("nics").is_dir() || !shm.join("proc").is_dir() {
        let lock = File::open(runtime)?;
        flock(&lock, FlockOperation::LockExclusive)?;
        if !shm.is_dir() {
            // A link whose target is gone (the machine was started anew).
            let _ = fs::remove_file(&shm);
            if on_tmpfs(runtime) || make_in_memory(runtime, &shm).is_err() {
                let _ = fs::remove_file(&shm);
                DirBuilder::new().recursive(true).mode(0o700).create(&shm)?;
            }
        }
        for folder in ["nics", "proc"] {
            DirBuilder::new().recursive(true).mode(0o700).create(shm.join(folder))?;
        }
    }
    Ok(())
}

fn on_tmpfs(path: &Path) -> bool {
    statfs(path).is_ok_and(|s| s.f_type as u64 == TMPFS)
}

fn make_in_memory(runtime: &Path, link: &Path) -> io::Result<()> {
    let memory = Path::new(MEMORY);
    if !on_tmpfs(memory) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let prefix = format!("unbroken-{}-", user_id());
    let lock = memory.join(format!("{prefix}lock"));
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(lock)?;
    flock(&lock, FlockOperation::LockExclusive)?;
    remove_orphans(memory, &prefix);
    let folder = memory.join(format!("{prefix}{}-{}", std::process::id(), wall_us()));
    DirBuilder::new().mode(0o700).create(&folder)?;
    fs::write(folder.join("runtime"), runtime.as_os_str().as_encoded_bytes())?;
    symlink(&folder, link)
}

/// Removes our folders whose runtime no longer links to them.
fn remove_orphans(memory: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(memory) else { return };
    for folder in entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()) {
        let ours = fs::symlink_metadata(&folder).is_ok_and(|m| m.is_dir() && m.uid() == user_id());
        let runtime = fs::read_to_string(folder.join("runtime")).map(PathBuf::from);
        let linked = runtime.is_ok_and(|r| fs::read_link(r.join("shm")).is_ok_and(|target| target == folder));
        if ours && !linked {
            let _ = fs::remove_dir_all(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_lie_in_memory_and_go_with_their_runtime() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = fs::canonicalize(dir.path()).unwrap();
        make(&runtime).unwrap();
        make(&runtime).unwrap();
        let shm = runtime.join("shm");
        assert!(shm.join("nics").is_dir() && shm.join("proc").is_dir());
        if !on_tmpfs(Path::new(MEMORY)) {
            return;
        }
        assert!(on_tmpfs(&shm.join("nics")));
        let Ok(target) = fs::read_link(&shm) else { return };
        // Lost with the memory: made anew.
        fs::remove_dir_all(&target).unwrap();
        make(&runtime).unwrap();
        let target = fs::read_link(&shm).unwrap();
        assert!(shm.join("nics").is_dir());
        drop(dir);
        assert!(target.exists());
        let other = tempfile::tempdir().unwrap();
        make(other.path()).unwrap();
        assert!(!target.exists());
    }
}
