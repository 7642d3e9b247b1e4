//! NICs that are to be left by choice: before maintenance, say.
//!
//! Each is a file in the folder `drained` of the runtime folder, so that setting one and taking it
//! back need no lock. Processes look at the folder's time of change ([`Drains::changed`]), which
//! costs a system call.

use crate::runtime::check_folder;
use crate::{make_folder, open_own, wall_us, Runtime};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// A change is young for so long.
const YOUNG_S: u64 = 2;

/// The NICs of a runtime folder that are to be left.
#[derive(Clone, Debug)]
pub struct Drains {
    folder: PathBuf,
    /// When the folder had changed, as of the last look: seconds, nanoseconds.
    seen: Option<(i64, i64)>,
}

/// The file of a NIC: its name may have a slash, or the colons of an address.
fn file_name(nic: &str) -> io::Result<String> {
    let known = |c: char| c.is_ascii_alphanumeric() || "/:.-_".contains(c);
    match nic.is_empty() || nic.starts_with('.') || !nic.chars().all(known) {
        true => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("`{nic}` is no name of a NIC")))
        }
        false => Ok(nic.replace('/', "+")),
    }
}

impl Drains {
    /// Those of that folder.
    pub fn of(runtime: &Runtime) -> Drains {
        Drains { folder: runtime.path().join("drained"), seen: None }
    }

    /// The names of the NICs.
    pub fn all(&self) -> io::Result<BTreeSet<String>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            entries => entries?,
        };
        check_folder(&self.folder).map_err(io::Error::other)?;
        entries.map(|e| Ok(e?.file_name().to_string_lossy().replace('+', "/"))).collect()
    }

    /// Has a NIC drained, or no longer. Gives whether that is new.
    pub fn set(&self, nic: &str, drained: bool) -> io::Result<bool> {
        let path = self.folder.join(file_name(nic)?);
        let done = match drained {
            true => {
                make_folder(&self.folder).map_err(io::Error::other)?;
                open_own(&path, fs::OpenOptions::new().write(true).create_new(true)).map(drop)
            }
            false => fs::remove_file(path),
        };
        match done {
            Ok(()) => Ok(true),
            Err(e)
                if matches!(e.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) =>
            {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Whether something may have changed since this was last asked.
    pub fn changed(&mut self) -> bool {
        let now = fs::metadata(&self.folder).ok().map(|m| (m.mtime(), m.mtime_nsec()));
        // Two changes in one tick of the clock leave one time; so a young one says nothing.
        let young = now.is_some_and(|(s, _)| wall_us() / 1_000_000 <= s as u64 + YOUNG_S);
        std::mem::replace(&mut self.seen, now) != now || young
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_nic_is_drained_and_no_longer() {
        let root = tempfile::tempdir_in(Runtime::temporary_root()).unwrap();
        let mut drains = Drains::of(&Runtime::at(root.path()).unwrap());
        assert!(!drains.changed() && drains.all().unwrap().is_empty());
        assert!(drains.set("a/0", true).unwrap() && !drains.set("a/0", true).unwrap());
        assert!(drains.set("10.0.0.1", true).unwrap() && drains.set("fe80::1", true).unwrap());
        assert!(drains.changed());
        assert_eq!(
            drains.all().unwrap().into_iter().collect::<Vec<_>>(),
            ["10.0.0.1", "a/0", "fe80::1"]
        );
        assert!(drains.set("a/0", false).unwrap() && !drains.set("a/0", false).unwrap());
        assert!(drains.changed());
        for bad in ["", "../x", "a b", ".."] {
            assert!(drains.set(bad, true).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_others_may_write_to_drains_nothing() {
        let root = tempfile::tempdir_in(Runtime::temporary_root()).unwrap();
        let drains = Drains::of(&Runtime::at(root.path()).unwrap());
        drains.set("a/0", true).unwrap();
        assert_eq!(fs::metadata(&drains.folder).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(&drains.folder, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(drains.all().unwrap_err().to_string().contains("others may write"));
        assert!(drains.set("a/1", true).is_err());
    }
}
