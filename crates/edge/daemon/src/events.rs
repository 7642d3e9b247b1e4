//! What happened, one JSON object a line, with the time (CLOCK_MONOTONIC, µs). One older file is
//! kept when it grows.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;

use rustix::fs::OFlags;
use rustix::time::{clock_gettime, ClockId};
use serde_json::{json, Value};
use unbroken_log::{tell, Level, Part};

use crate::folder::Folder;

const LARGEST_BYTES: u64 = 4 << 20;
pub(crate) const NAME: &str = "events.jsonl";
const APPEND: OFlags = OFlags::WRONLY.union(OFlags::APPEND).union(OFlags::CREATE);
/// An error that comes again and again is written down once in so long.
const AGAIN_US: u64 = 10_000_000;
/// How many errors are told apart.
const ERRORS: usize = 16;

/// The clock of all events.
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
}

/// The log of one host.
pub struct Events {
    folder: Folder,
    file: File,
    /// The last errors that were written down, and when.
    errors: VecDeque<(String, u64)>,
}

impl Events {
    /// Opens it, to write behind what is there.
    pub(crate) fn open(folder: Folder) -> Result<Events, std::io::Error> {
        let file = folder.file(NAME, APPEND)?;
        Ok(Events { folder, file, errors: VecDeque::new() })
    }

    /// Writes down an error, but not one that was written a moment ago: it may come at every turn.
    pub(crate) fn error(&mut self, what: &dyn std::fmt::Display) {
        let what = what.to_string();
        let now_us = now_us();
        self.errors.retain(|(_, at_us)| now_us < at_us + AGAIN_US);
        if self.errors.iter().any(|(known, _)| *known == what) {
            return;
        }
        if self.errors.len() == ERRORS {
            self.errors.pop_front();
        }
        self.errors.push_back((what.clone(), now_us));
        tell(Part::Edge, Level::Warn, format_args!("{what}"));
        self.put("error", json!({ "what": what }));
    }

    /// Writes one down, and tells it where `UNBROKEN_LOG` asks for that.
    pub fn write(&mut self, event: &str, what: Value) {
        let is_empty = what.as_object().is_some_and(serde_json::Map::is_empty);
        match is_empty {
            true => tell(Part::Edge, Level::Info, format_args!("{event}")),
            false => tell(Part::Edge, Level::Info, format_args!("{event} {what}")),
        }
        self.put(event, what);
    }

    /// By one call, so that no reader finds a part of a line but where a page of the file ends. A
    /// full disk must not stop the daemon.
    fn put(&mut self, event: &str, mut what: Value) {
        what["time_us"] = json!(now_us());
        what["event"] = json!(event);
        let _ = self.file.write_all(format!("{what}\n").as_bytes());
        if self.file.metadata().is_ok_and(|m| m.len() > LARGEST_BYTES) {
            let _ = self.folder.rename(NAME, "events.jsonl.old");
            if let Ok(file) = self.folder.file(NAME, APPEND) {
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
                    let mut events = Events::open(Folder::open(folder.path()).unwrap()).unwrap();
                    for n in 0..20 {
                        events.write("bfd", json!({"peer": "10.1.1.0", "state": "down", "n": n}));
                    }
                    std::fs::remove_file(&path).unwrap();
                }
            });
            let mut found = 0_u64;
            while !writer.is_finished() {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                assert!(
                    text.is_empty() || text.ends_with('\n'),
                    "a part of a line was there: {text}"
                );
                found += u64::from(!text.is_empty());
            }
            assert!(found > 0);
        });
    }

    /// Each event and each error is a line of the log, once.
    #[test]
    fn what_is_written_is_told() {
        use std::sync::Mutex;
        static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());
        struct Logger;
        impl log::Log for Logger {
            fn enabled(&self, _: &log::Metadata<'_>) -> bool {
                true
            }
            fn log(&self, record: &log::Record<'_>) {
                let words = format!("{} {} {}", record.level(), record.target(), record.args());
                SEEN.lock().unwrap().push(words);
            }
            fn flush(&self) {}
        }
        log::set_logger(&Logger).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let folder = tempfile::tempdir().unwrap();
        let mut events = Events::open(Folder::open(folder.path()).unwrap()).unwrap();
        events.write("failover", json!({"peer": "10.9.9.9", "routes": 4}));
        events.error(&"it told this");
        events.error(&"it told this");
        // Other tests write at the same time.
        let seen = SEEN.lock().unwrap();
        let told = |words: &str| seen.iter().filter(|line| line.as_str() == words).count();
        assert_eq!(told(r#"INFO unbroken::edge failover {"peer":"10.9.9.9","routes":4}"#), 1);
        assert_eq!(told("WARN unbroken::edge it told this"), 1);
    }

    #[test]
    fn an_error_that_comes_at_every_turn_is_written_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = Events::open(Folder::open(folder.path()).unwrap()).unwrap();
        for _ in 0..1000 {
            events.error(&"one");
            events.error(&"another");
        }
        let text = std::fs::read_to_string(folder.path().join(NAME)).unwrap();
        assert_eq!(text.lines().count(), 2);
    }
}
