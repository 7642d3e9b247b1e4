//! Folders that only the user of this process (root) may write into, and the files in them.
//!
//! A folder is opened once and looked at, and its files are opened below that descriptor without
//! following a link and without waiting for the other end of a FIFO. So nobody else can lead what
//! is read or written here to another place. Modes are set, and not left to the umask.

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    fchmod, fchown, fstat, mkdirat, openat, renameat, unlinkat, AtFlags, FileType, Gid, Mode,
    OFlags, Stat, Uid, CWD,
};
use rustix::io::Errno;

use crate::error::{EdgeError, Result, Why};

/// No file that is read whole is larger.
const LARGEST_BYTES: u64 = 16 << 20;
const SAFE: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC);
/// Of a file that nobody else may read.
pub(crate) const OWN: u32 = 0o600;

/// A user and a group, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ids {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

/// An open folder.
pub(crate) struct Folder {
    descriptor: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// Opens one, which must be this user's, and nobody else may write into it.
    pub(crate) fn open(path: &Path) -> Result<Folder> {
        Folder::found(path)?.checked()
    }

    /// Opens one, whoever may write into it. What is read there must be known by other means.
    pub(crate) fn foreign(path: &Path) -> Result<Option<Folder>> {
        match open_folder(CWD, path) {
            Ok(descriptor) => Ok(Some(Folder { descriptor, path: path.to_owned() })),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(EdgeError::at(path.display())(e)),
        }
    }

    /// Makes one with this mode if it is missing. It must be this user's, and nobody else may write
    /// into it; those that lead to it are taken on trust.
    pub(crate) fn make(path: &Path, mode: u32) -> Result<Folder> {
        let error = EdgeError::at(path.display());
        if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(&error)?;
        }
        match mkdirat(CWD, path, Mode::from_raw_mode(0o700)) {
            Ok(()) => {
                let folder = Folder::found(path)?.checked()?;
                folder.give(None, mode)?;
                Ok(folder)
            }
            Err(Errno::EXIST) => Folder::open(path),
            Err(e) => Err(error(e.into())),
        }
    }

    /// Makes a folder in this one if it is missing, and gives it this mode.
    pub(crate) fn within(&self, name: &str, mode: u32) -> Result<Folder> {
        let path = self.path.join(name);
        match mkdirat(&self.descriptor, name, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(EdgeError::at(path.display())(e)),
        }
        let descriptor = open_folder(&self.descriptor, name).map_err(|e| self.error(name, e))?;
        let folder = Folder { descriptor, path };
        let owner = folder.stat()?.st_uid;
        if owner != own_user() {
            return Err(folder.strange(owner));
        }
        folder.give(None, mode)?;
        Ok(folder)
    }

    /// Makes a folder in this one for somebody else, who alone may use it.
    pub(crate) fn for_other(&self, name: &str, ids: Ids) -> Result<()> {
        let path = self.path.join(name);
        match mkdirat(&self.descriptor, name, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(EdgeError::at(path.display())(e)),
        }
        let descriptor = open_folder(&self.descriptor, name).map_err(|e| self.error(name, e))?;
        Folder { descriptor, path }.give(Some(ids), 0o700)
    }

    /// Sets whose it is and who may use it.
    pub(crate) fn give(&self, ids: Option<Ids>, mode: u32) -> Result<()> {
        give(&self.descriptor, ids, mode).map_err(EdgeError::at(self.path.display()))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a regular file in it, with the mode [`OWN`] if it is made.
    pub(crate) fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | SAFE | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fresh = flags.contains(OFlags::CREATE);
        let file: File = openat(&self.descriptor, name, flags, Mode::from_raw_mode(OWN))?.into();
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("it is not a regular file"));
        }
        if fresh && stat.st_uid == own_user() && stat.st_mode & 0o777 != OWN {
            fchmod(&file, Mode::from_raw_mode(OWN))?;
        }
        Ok(file)
    }

    /// Opens what may be anything for looking at only.
    pub(crate) fn look(&self, name: &str) -> io::Result<OwnedFd> {
        Ok(openat(&self.descriptor, name, OFlags::PATH | SAFE, Mode::empty())?)
    }

    /// The text of a file; `None` if there is none.
    pub(crate) fn read(&self, name: &str) -> Result<Option<String>> {
        let file = match self.file(name, OFlags::RDONLY) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(|e| self.error(name, e))?,
        };
        let mut text = String::new();
        match file.take(LARGEST_BYTES + 1).read_to_string(&mut text) {
            Ok(bytes) if bytes as u64 > LARGEST_BYTES => Err(self.error(name, "it is too large")),
            Ok(_) => Ok(Some(text)),
            Err(e) => Err(self.error(name, e)),
        }
    }

    /// Writes a file so that a reader sees the old or the new one.
    pub(crate) fn replace(&self, name: &str, text: &str) -> Result<()> {
        self.replace_for(name, text, None, OWN)
    }

    /// As [`Folder::replace`], with this owner and this mode from the beginning.
    pub(crate) fn replace_for(
        &self,
        name: &str,
        text: &str,
        ids: Option<Ids>,
        mode: u32,
    ) -> Result<()> {
        let next = format!("{name}.next");
        let write = || -> io::Result<()> {
            // Of one who died while writing it.
            match unlinkat(&self.descriptor, &next, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
            let mut file = self.file(&next, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
            file.write_all(text.as_bytes())?;
            give(&file, ids, mode)?;
            Ok(renameat(&self.descriptor, &next, &self.descriptor, name)?)
        };
        write().map_err(|e| self.error(name, e))
    }

    /// Makes an empty file of somebody else's, if there is none.
    pub(crate) fn file_for_other(&self, name: &str, ids: Ids) -> Result<()> {
        let file = self.file(name, OFlags::RDONLY | OFlags::CREATE);
        let file = file.map_err(|e| self.error(name, e))?;
        give(&file, Some(ids), OWN).map_err(|e| self.error(name, e))
    }

    /// Gives a file of it another name in it.
    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.descriptor, from, &self.descriptor, to)?)
    }

    /// Removes it with all that is in it. Links in it are removed, and not followed.
    pub(crate) fn remove(self) -> Result<()> {
        std::fs::remove_dir_all(&self.path).map_err(EdgeError::at(self.path.display()))
    }

    /// Whose it is.
    pub(crate) fn owner(&self) -> Result<u32> {
        Ok(self.stat()?.st_uid)
    }

    fn error<E: Into<Why>>(&self, name: &str, why: E) -> EdgeError {
        EdgeError::at(self.path.join(name).display())(why)
    }

    fn found(path: &Path) -> Result<Folder> {
        Folder::foreign(path)?
            .ok_or_else(|| EdgeError::at(path.display())(io::Error::from(Errno::NOENT)))
    }

    fn stat(&self) -> Result<Stat> {
        fstat(&self.descriptor).map_err(EdgeError::at(self.path.display()))
    }

    fn checked(self) -> Result<Folder> {
        let stat = self.stat()?;
        if stat.st_uid != own_user() {
            return Err(self.strange(stat.st_uid));
        }
        match stat.st_mode & 0o022 {
            0 => Ok(self),
            _ => Err(EdgeError::Refused(format!(
                "{}: others may write into this folder (mode {:03o}); name one of your own in \
                 UNBROKEN_EDGE",
                self.path.display(),
                stat.st_mode & 0o777
            ))),
        }
    }

    fn strange(&self, owner: u32) -> EdgeError {
        EdgeError::Refused(format!(
            "{}: belongs to user {owner}, and this process runs as user {}",
            self.path.display(),
            own_user()
        ))
    }
}

fn open_folder(at: impl std::os::fd::AsFd, path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    openat(at, path, OFlags::RDONLY | OFlags::DIRECTORY | SAFE, Mode::empty())
}

/// The owner first: a change of the owner may change the mode.
fn give(file: impl std::os::fd::AsFd, ids: Option<Ids>, mode: u32) -> io::Result<()> {
    if let Some(ids) = ids {
        fchown(&file, Some(Uid::from_raw(ids.user)), Some(Gid::from_raw(ids.group)))?;
    }
    Ok(fchmod(&file, Mode::from_raw_mode(mode))?)
}

/// The user of this process, who is root where an edge is set up.
pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt as _};

    #[test]
    fn no_link_is_followed() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::make(&home.path().join("own"), 0o700).unwrap();
        let victim = home.path().join("victim");
        std::fs::write(&victim, "kept").unwrap();
        for name in ["a", "a.next"] {
            symlink(&victim, folder.path().join(name)).unwrap();
        }
        assert!(folder.read("a").is_err());
        assert!(folder.file("a", OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC).is_err());
        assert!(folder.file_for_other("a", Ids { user: 1, group: 1 }).is_err());
        folder.replace("a", "new").unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "kept");
        assert_eq!(folder.read("a").unwrap().as_deref(), Some("new"));
        symlink(home.path(), folder.path().join("link")).unwrap();
        assert!(Folder::open(&folder.path().join("link")).is_err());
        assert!(folder.within("link", 0o700).is_err());
    }

    #[test]
    fn a_folder_that_others_may_write_into_is_refused() {
        let home = tempfile::tempdir().unwrap();
        std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o770)).unwrap();
        let Err(why) = Folder::open(home.path()) else { panic!("it was taken") };
        let why = why.to_string();
        assert!(why.contains("others may write") && why.contains("UNBROKEN_EDGE"), "{why}");
    }
}
