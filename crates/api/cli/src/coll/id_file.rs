//! The file by which ranks that are started apart hand each other a communicator's id, and with it
//! the secret of the job: only its user may read it, and what another user has put in its place is
//! not believed.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::rand::{getrandom, GetRandomFlags};
use unbroken_coll::Id;

use crate::output::{Failure, Result};

/// How often the file is looked for.
const LOOK: Duration = Duration::from_millis(10);
/// More than an id has.
const MAX_BYTES: u64 = 256;

/// Writes the id where the others look for it: whole, or not at all. What is at that place is
/// replaced; a link there is not followed.
pub(crate) fn publish(id: &Id, path: &Path) -> Result {
    let wrong = |e| Failure::io(format!("write {}", path.display()), e);
    let mut name = [0; 8];
    getrandom(&mut name, GetRandomFlags::empty()).map_err(|e| wrong(e.into()))?;
    let fresh = PathBuf::from(format!("{}.{:016x}.new", path.display(), u64::from_ne_bytes(name)));
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh);
    let put = made.and_then(|mut file| {
        file.write_all(id.to_string().as_bytes())?;
        // On a disk that hosts share, too, before it has its name.
        file.sync_all()?;
        std::fs::rename(&fresh, path)
    });
    put.map_err(|e| {
        let _ = std::fs::remove_file(&fresh);
        wrong(e)
    })
}

/// Waits until the file is there, and reads it.
pub(crate) fn wait_for(path: &Path, patience: Duration) -> Result<Id> {
    let began = Instant::now();
    loop {
        match open(path) {
            Err(e) if e.kind() == ErrorKind::NotFound && began.elapsed() < patience => {
                std::thread::sleep(LOOK)
            }
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                let what = format!(
                    "{} is a link, which another may have put there; name the file itself",
                    path.display()
                );
                return Err(Failure::Text(what));
            }
            Err(e) => return Err(Failure::io(format!("wait for the id in {}", path.display()), e)),
            Ok(file) => return read(file, path),
        }
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    // A FIFO in its place is not waited for.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

fn read(file: File, path: &Path) -> Result<Id> {
    let wrong = |e| Failure::io(format!("read the id in {}", path.display()), e);
    let (found, me) = (file.metadata().map_err(wrong)?, rustix::process::geteuid().as_raw());
    let mode = found.mode() & 0o777;
    let why = if !found.is_file() {
        "it is no file".to_string()
    } else if found.uid() != me {
        format!(
            "it is a file of user {}, and this is user {me}: all ranks of a job run as one user",
            found.uid()
        )
    } else if mode & 0o077 != 0 {
        format!(
            "it has mode {mode:03o}, and holds the job's secret: 600 is right, as rank 0 makes it"
        )
    } else {
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text).map_err(wrong)?;
        return text.parse().map_err(|e: unbroken_coll::Error| Failure::Text(e.to_string()));
    };
    Err(Failure::Text(format!("the id in {} is not to be trusted: {why}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{symlink, PermissionsExt};

    fn said(result: Result<Id>) -> String {
        match result {
            Err(Failure::Text(text)) => text,
            Err(_) => "another failure".into(),
            Ok(id) => format!("the id {id}"),
        }
    }

    #[test]
    fn an_id_is_for_its_user_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("id"), folder.path().join("other"));
        let id: Id = format!("127.0.0.1:7/{}", "ab".repeat(16)).parse().unwrap();
        // Whatever is there is replaced, and not written through.
        std::fs::write(&other, "mine").unwrap();
        symlink(&other, &path).unwrap();
        assert!(publish(&id, &path).is_ok());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "mine");
        assert_eq!(path.symlink_metadata().unwrap().mode() & 0o7777, 0o600);
        assert!(wait_for(&path, Duration::ZERO).is_ok_and(|read| read == id));
        assert_eq!(folder.path().read_dir().unwrap().count(), 2, "nothing is left behind");
        for mode in [0o644, 0o640, 0o606] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert!(said(wait_for(&path, Duration::ZERO)).contains("600 is right"), "{mode:o}");
        }
    }

    #[test]
    fn what_is_no_file_is_named_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink(folder.path().join("gone"), &link).unwrap();
        assert!(said(wait_for(&link, Duration::from_secs(60))).contains("is a link"));
        assert!(said(wait_for(folder.path(), Duration::from_secs(60))).contains("it is no file"));
        assert!(said(wait_for(&folder.path().join("none"), Duration::ZERO))
            .contains("wait for the id in"));
    }
}
