//! The second octet of a runtime's addresses: one for each living runtime folder of the user.
//!
//! The registry is a folder with one file for each octet in use, which holds the path of the runtime. An entry is stale when that
//! folder is gone or its `fabric.toml` has another octet. Everything happens under one lock, so that a folder which has its entry
//! but not yet its `fabric.toml` is never taken for stale.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{flock, FlockOperation};
use unbroken_telemetry::{user_id, Runtime};

use crate::config::Shape;
use crate::error::{FabricError, Result};

/// That of the default runtime.
pub(crate) const DEFAULT_OCTET: u8 = 77;
/// Those that are given to others: not 0 (127.0.0.1 is there) and not 255.
const OCTETS: u16 = 254;

/// The registry, locked.
pub(crate) struct Registry {
    folder: PathBuf,
    _lock: File,
}

impl Registry {
    /// Locks the registry of this user.
    pub(crate) fn lock() -> Result<Registry> {
        Registry::lock_at(PathBuf::from(format!("/tmp/unbroken-octets-{}", user_id())))
    }

    fn lock_at(folder: PathBuf) -> Result<Registry> {
        let io = |action| FabricError::io(&folder, action);
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(io("make it"))?;
        let meta = fs::symlink_metadata(&folder).map_err(io("look at it"))?;
        if !meta.is_dir() || meta.uid() != user_id() || meta.mode() & 0o022 != 0 {
            return Err(FabricError::Octet(format!(
                "{}: is not a folder that only this user may write to; remove it",
                folder.display()
            )));
        }
        let lock = folder.join("lock");
        let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(lock);
        let lock = lock.map_err(io("open its lock"))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|e| io("lock it")(e.into()))?;
        Ok(Registry { folder, _lock: lock })
    }

    /// An octet for a runtime that has none yet, entered in the registry. Its `fabric.toml` must be written before the lock goes.
    pub(crate) fn choose(&self, runtime: &Runtime) -> Result<u8> {
        if runtime.is_default() {
            return Ok(DEFAULT_OCTET);
        }
        // Starting at a place of the path's own keeps fabrics of different users and namespaces apart, mostly.
        let start = hash(runtime.path()) % OCTETS;
        for step in 0..OCTETS {
            let octet = ((start + step) % OCTETS + 1) as u8;
            if octet != DEFAULT_OCTET && self.holder(octet).is_none_or(|path| path == runtime.path()) {
                self.enter(octet, runtime)?;
                return Ok(octet);
            }
        }
        Err(FabricError::Octet(format!(
            "all {} second octets are taken by runtime folders (see {}); remove one that is no longer needed",
            OCTETS - 1,
            self.folder.display()
        )))
    }

    /// Enters the octet that an existing `fabric.toml` has, unless another living runtime holds it.
    pub(crate) fn claim(&self, octet: u8, runtime: &Runtime) -> Result<()> {
        match self.holder(octet) {
            Some(path) if path != runtime.path() => Err(FabricError::Octet(format!(
                "{}: octet {octet} is that of the runtime folder {}; remove fabric.toml to get a free one",
                runtime.fabric_toml().display(),
                path.display()
            ))),
            Some(_) => Ok(()),
            None => self.enter(octet, runtime),
        }
    }

    /// Forgets the octet of a runtime.
    pub(crate) fn release(&self, octet: u8, runtime: &Runtime) {
        if self.entry(octet).is_some_and(|path| path == runtime.path()) {
            let _ = fs::remove_file(self.folder.join(octet.to_string()));
        }
    }

    /// Whether the registry says that this runtime has this octet: the usual case, found out without the lock.
    pub(crate) fn knows(octet: u8, runtime: &Runtime) -> bool {
        let file = PathBuf::from(format!("/tmp/unbroken-octets-{}/{octet}", user_id()));
        fs::read_to_string(file).is_ok_and(|path| Path::new(&path) == runtime.path())
    }

    fn entry(&self, octet: u8) -> Option<PathBuf> {
        fs::read_to_string(self.folder.join(octet.to_string())).ok().map(PathBuf::from)
    }

    /// The living runtime folder that has this octet.
    fn holder(&self, octet: u8) -> Option<PathBuf> {
        let path = self.entry(octet)?;
        let file = path.join("fabric.toml");
        let shape = Shape::parse(&fs::read_to_string(&file).ok()?, &file);
        // A file with an error is still someone's.
        shape.map_or(true, |s| s.octet == octet).then_some(path)
    }

    fn enter(&self, octet: u8, runtime: &Runtime) -> Result<()> {
        let file = self.folder.join(octet.to_string());
        let text = runtime.path().as_os_str().as_encoded_bytes();
        fs::write(&file, text).map_err(FabricError::io(&file, "write it"))
    }
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
        for n in 0..253 {
            let rt = runtime(dir.path(), &format!("r{n}"));
            let octet = registry.choose(&rt).unwrap();
            assert!((1..=254).contains(&octet) && octet != DEFAULT_OCTET);
            assert!(seen.insert(octet), "octet {octet} twice");
            record(&rt, octet);
        }
        let late = runtime(dir.path(), "late");
        assert!(registry.choose(&late).unwrap_err().to_string().contains("all 253"));
        fs::remove_dir_all(dir.path().join("r5")).unwrap();
        let freed = registry.choose(&late).unwrap();
        record(&late, freed);
        let other = runtime(dir.path(), "r6");
        assert!(registry.claim(freed, &other).unwrap_err().to_string().contains("late"));
        registry.claim(freed, &late).unwrap();
    }
}
