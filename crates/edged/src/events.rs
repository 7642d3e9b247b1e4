//! What happened, one JSON object a line, with the time (CLOCK_MONOTONIC, µs). One older file is kept when it grows.

use std::fs::{rename, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use rustix::time::{clock_gettime, ClockId};
use serde_json::{json, Value};

const LARGEST_BYTES: u64 = 4 << 20;

/// The clock of all events.
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
}

/// The log of one host.
pub struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// Opens it, to write behind what is there.
    pub fn open(folder: &Path) -> Result<Events, std::io::Error> {
        let path = folder.join("events.jsonl");
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        Ok(Events { path, file })
    }

    /// Writes one down, by one call, so that no reader finds a part of a line but where a page of the file ends. A full disk must not
    /// stop the daemon.
    pub fn write(&mut self, event: &str, mut what: Value) {
        what["time_us"] = json!(now_us());
        what["event"] = json!(event);
        let _ = self.file.write_all(format!("{what}\n").as_bytes());
        if self.file.metadata().is_ok_and(|m| m.len() > LARGEST_BYTES) {
            let _ = rename(&self.path, self.path.with_extension("jsonl.old"));
            if let Ok(file) = OpenOptions::new().create(true).append(true).open(&self.path) {
                self.file = file;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Within one page of the file a reader finds whole lines only, whenever it reads.
    #[test]
    fn a_line_is_written_by_one_call() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for _ in 0..500 {
                    let mut events = Events::open(folder.path()).unwrap();
                    for n in 0..20 {
                        events.write("bfd", json!({"peer": "10.1.1.0", "state": "down", "n": n}));
                    }
                    std::fs::remove_file(&path).unwrap();
                }
            });
            let mut found = 0_u64;
            while !writer.is_finished() {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                assert!(text.is_empty() || text.ends_with('\n'), "a part of a line was there: {text}");
                found += u64::from(!text.is_empty());
            }
            assert!(found > 0);
        });
    }
}
