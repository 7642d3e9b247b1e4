//! Taking a runtime folder away, damaged or not.
//!
//! What is removed is what this project makes there, by its name ([`is_ours`]), and a folder that
//! has anything else is left as it is: it may have been named by mistake. No link is followed: one
//! in the place of a file is removed itself, and the folder itself must be none.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::files::open_own;
use crate::presence::holder;
use crate::runtime::user_id;

/// What lies in a runtime folder, and whether it is a folder.
const ENTRIES: [(&str, bool); 15] = [
    ("alive.lock", false),
    ("cm", true),
    ("coll", true),
    ("device-faults", true),
    ("directory", true),
    ("drained", true),
    ("events.1.jsonl", false),
    ("events.jsonl", false),
    ("events.lock", false),
    ("fabric.lock", false),
    ("fabric.toml", false),
    ("proc", true),
    ("shm", true),
    ("sysfs", true),
    ("tsan.supp", false),
];
/// What a folder must have one of, to be taken for a runtime folder.
const MARKS: [&str; 4] = ["alive.lock", "fabric.lock", "fabric.toml", "shm"];
/// Entries that are not ours and are named.
const MAX_NAMED: usize = 3;

/// Why a folder was not taken away.
#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// It is no runtime folder.
    #[error("{path} {why}; nothing was removed")]
    NotOurs {
        /// The folder.
        path: String,
        /// What shows that.
        why: String,
    },
    /// A process takes part in it.
    #[error("{path} is in use, by process {pid} for one; end what runs there, or give --force")]
    InUse {
        /// The folder.
        path: String,
        /// One of those that use it.
        pid: i32,
    },
    /// A system call failed.
    #[error("{path}: {source}")]
    Io {
        /// What was removed or looked at.
        path: String,
        /// Why it failed.
        source: io::Error,
    },
}

/// Whether a runtime folder may have an entry of this name.
pub(crate) fn is_ours(name: &str) -> bool {
    let id_of_a_bench = name.starts_with("coll-bench-") && name.contains(".id");
    // A file that was being written when its process ended.
    let unfinished = name.starts_with("fabric.toml.");
    id_of_a_bench || unfinished || ENTRIES.iter().any(|(ours, _)| *ours == name)
}

/// Takes a runtime folder away with all that is in it; false if there is none. Refused where it has
/// what is not ours, where it is another user's, and (unless `force`) while a process takes part in
/// it. This process must not take part itself.
pub fn reset(path: &Path, force: bool) -> Result<bool, ResetError> {
    let shown = path.display().to_string();
    let not_ours = |why: String| ResetError::NotOurs { path: shown.clone(), why };
    let failed = |source| ResetError::Io { path: shown.clone(), source };
    let meta = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        meta => meta.map_err(failed)?,
    };
    if meta.is_symlink() {
        return Err(not_ours("is a link; name the folder that it leads to".into()));
    }
    if !meta.is_dir() {
        return Err(not_ours("is not a folder".into()));
    }
    if meta.uid() != user_id() {
        return Err(not_ours(format!("belongs to user {}", meta.uid())));
    }
    let names = names(path).map_err(failed)?;
    let strange: Vec<&str> =
        names.iter().map(String::as_str).filter(|n| !is_ours(n)).take(MAX_NAMED).collect();
    if !strange.is_empty() {
        return Err(not_ours(format!(
            "is no runtime folder, or more than one: it has {}",
            strange.join(", ")
        )));
    }
    if !names.is_empty() && !names.iter().any(|n| MARKS.contains(&n.as_str())) {
        return Err(not_ours("is no runtime folder: it has none of its marks".into()));
    }
    if let Some(pid) = in_use(path).filter(|_| !force) {
        return Err(ResetError::InUse { path: shown, pid });
    }
    // The marks go last: what is interrupted can be done again.
    let (last, first): (Vec<&String>, Vec<&String>) =
        names.iter().partition(|n| MARKS.contains(&n.as_str()));
    for name in first.into_iter().chain(last) {
        remove(&path.join(name)).map_err(|source| ResetError::Io {
            path: path.join(name).display().to_string(),
            source,
        })?;
    }
    fs::remove_dir(path).map_err(failed)?;
    Ok(true)
}

fn names(path: &Path) -> io::Result<Vec<String>> {
    fs::read_dir(path)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect()
}

/// The pid of a process that takes part, if there is one; where `alive.lock` is damaged, none can
/// be.
fn in_use(path: &Path) -> Option<i32> {
    let lock =
        open_own(&path.join("alive.lock"), OpenOptions::new().read(true).write(true)).ok()?;
    holder(&lock)
}

/// Removes what lies there, whatever it is, and of a folder all that is in it.
fn remove(path: &Path) -> io::Result<()> {
    // Neither follows a link.
    let removed = match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    };
    match removed {
        // A socket of a process that has just ended.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Presence, Runtime};
    use rustix::fs::{mknodat, FileType, Mode, CWD};
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    fn used_folder() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("runtime");
        let runtime = Runtime::at(&path).unwrap();
        drop(Presence::join(&runtime).unwrap());
        for (name, is_folder) in ENTRIES {
            match is_folder {
                true => fs::create_dir_all(path.join(name).join("more/and more")).unwrap(),
                false => fs::write(path.join(name), "x").unwrap(),
            }
        }
        (root, path)
    }

    #[test]
    fn all_of_it_goes() {
        let (_root, path) = used_folder();
        assert!(reset(&path, false).unwrap());
        assert!(!path.exists());
        assert!(!reset(&path, false).unwrap(), "there is none any more");
    }

    #[test]
    fn a_damaged_one_goes_and_what_its_links_lead_to_stays() {
        let (root, path) = used_folder();
        let mine = root.path().join("mine");
        fs::create_dir(&mine).unwrap();
        fs::write(mine.join("letter"), "dear").unwrap();
        fs::remove_dir_all(path.join("directory")).unwrap();
        symlink(&mine, path.join("directory")).unwrap();
        symlink(&mine, path.join("shm/link")).unwrap();
        for name in ["alive.lock", "fabric.toml"] {
            fs::remove_file(path.join(name)).unwrap();
        }
        fs::create_dir(path.join("fabric.toml")).unwrap();
        mknodat(CWD, path.join("alive.lock"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(Runtime::at(&path).is_err(), "it is damaged");
        assert!(reset(&path, false).unwrap());
        assert!(!path.exists());
        assert_eq!(fs::read_to_string(mine.join("letter")).unwrap(), "dear");
    }

    fn refused(path: &Path, why: &str) {
        let said = reset(path, true).unwrap_err().to_string();
        assert!(said.contains(why) && said.contains("nothing was removed"), "{said}");
    }

    #[test]
    fn what_is_not_ours_stays() {
        let (root, path) = used_folder();
        let link = root.path().join("link");
        symlink(&path, &link).unwrap();
        refused(&link, "is a link");
        fs::write(path.join("thesis.tex"), "").unwrap();
        refused(&path, "it has thesis.tex");
        assert!(path.join("shm/nics").is_dir());
        refused(&path.join("thesis.tex"), "is not a folder");
        // Names that others use, too, are no marks.
        let home = root.path().join("home");
        fs::create_dir_all(home.join("directory")).unwrap();
        refused(&home, "none of its marks");
        assert!(home.join("directory").is_dir());
        if user_id() == 0 {
            refused(Path::new("/"), "it has");
        }
    }
}
