//! The file `fabric.toml`: read, and made.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use unbroken_runtime::{open_own, FileLock, Runtime};

use crate::config::Shape;
use crate::error::{FabricError, Result};
use crate::octet::Registry;

/// More of a `fabric.toml` is not read.
const TOML_BYTES: u64 = 1 << 20;

/// The text of a file, or which of its lines is none.
pub(super) fn text_of(bytes: Vec<u8>, path: &Path) -> Result<String> {
    String::from_utf8(bytes).map_err(|e| {
        let good = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = 1 + good.iter().filter(|b| **b == b'\n').count();
        FabricError::Config {
            path: path.display().to_string(),
            line,
            what: "not UTF-8 text; give the file in UTF-8".into(),
        }
    })
}

pub(super) fn lock_folder(runtime: &Runtime) -> Result<FileLock> {
    let path = runtime.path().join("fabric.lock");
    FileLock::take(&path).map_err(FabricError::io(&path, "lock it"))
}

pub(super) fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_own(path, OpenOptions::new().read(true))?.take(TOML_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a `fabric.toml`.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read_bytes(path)?).map_err(io::Error::other)
}

/// Writes `fabric.toml` with an octet of the runtime's own, unless someone was faster (an error
/// where it `must_be_new`).
pub(super) fn make(runtime: &Runtime, shape: &Shape, must_be_new: bool) -> Result<Shape> {
    // Both: not all who share the folder share the registry.
    let _lock = lock_folder(runtime)?;
    let registry = Registry::lock()?;
    let path = runtime.fabric_toml();
    match read_text(&path) {
        Ok(text) if !must_be_new => return Shape::parse(&text, &path),
        Ok(_) => {
            let what =
                "there is a fabric already; take it away with: unbroken fabric down".to_string();
            return Err(FabricError::Name(format!("{}: {what}", path.display())));
        }
        Err(_) => {}
    }
    let shape = Shape { octet: registry.choose(runtime)?, ..shape.clone() };
    let text = shape.to_toml();
    // What cannot be read back must not be written.
    Shape::parse(&text, &path)?;
    let new = path.with_extension("toml.new");
    let write = || -> io::Result<()> {
        let file = open_own(&new, OpenOptions::new().write(true).create(true))?;
        file.set_len(0)?;
        (&file).write_all(text.as_bytes())
    };
    write().map_err(FabricError::io(&new, "write it"))?;
    fs::rename(&new, &path).map_err(FabricError::io(&path, "make it"))?;
    Ok(shape)
}
