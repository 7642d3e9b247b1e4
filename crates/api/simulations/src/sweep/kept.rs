//! The file of results: a line for each, and a first one that says of what they are.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Head, Line};
use crate::{Error, Result};

/// The file of results, which is this sweep's alone as long as it is open.
pub(super) struct Kept {
    file: File,
    path: PathBuf,
}

impl Kept {
    /// Opens or makes it, and hands out its results.
    pub fn open(path: &Path, head: &Head, mut keep: impl FnMut(Line)) -> Result<Kept> {
        let shown = path.display();
        let failed = |e| Error::file("resume", format!("cannot use {shown}"), e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let text = format!("another sweep writes to {shown}; name another file");
                return Err(Error::value("resume", text));
            }
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        let mut whole = 0u64;
        let mut reader = BufReader::new(&file);
        let mut text = String::new();
        while reader.read_line(&mut text).map_err(failed)? > 0 && text.ends_with('\n') {
            if whole == 0 {
                let found: Option<Head> = serde_json::from_str(&text).ok();
                if found.as_ref() != Some(head) {
                    let text = format!(
                        "{shown} is of another sweep: another cluster, job or seed; name another \
                         file"
                    );
                    return Err(Error::value("resume", text));
                }
            } else {
                let damaged = |e: serde_json::Error| format!("{shown}: a line is damaged: {e}");
                let line = serde_json::from_str(&text);
                keep(line.map_err(|e| Error::value("resume", damaged(e)))?);
            }
            whole += text.len() as u64;
            text.clear();
        }
        // a line that was cut off when the sweep was interrupted
        file.set_len(whole).and_then(|()| file.seek(SeekFrom::Start(whole))).map_err(failed)?;
        let mut kept = Kept { file, path: path.into() };
        if whole == 0 {
            kept.append(head)?;
        }
        Ok(kept)
    }

    /// Adds a line.
    pub fn append(&mut self, value: &impl Serialize) -> Result {
        let cannot = || format!("cannot write {}", self.path.display());
        let text = serde_json::to_string(value)
            .map_err(|e| Error::system(Some("resume"), format!("{}: {e}", cannot())))?;
        let written = self.file.write_all((text + "\n").as_bytes());
        written.map_err(|e| Error::file("resume", cannot(), e))
    }
}
