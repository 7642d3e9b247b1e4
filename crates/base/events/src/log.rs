//! The event log: `events.jsonl`, one JSON object a line.
//!
//! Events are written by one call, to a file opened for appending, which the kernel keeps whole, so
//! writers need no lock. Only rotation (at [`LOG_LIMIT_BYTES`]; one old part is kept) takes one. A
//! write that ended early (no space) leaves half a line, which whoever writes next ends, so that it
//! costs one event only. The file is opened each time: events are rare, and a process that closes
//! descriptors which it does not know, or a forked child, cannot then write into the wrong file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use unbroken_runtime::{open_own, FileLock, Runtime};

use crate::cause::Causes;
use crate::event::Event;

/// The log is rotated when it would grow beyond this.
pub const LOG_LIMIT_BYTES: u64 = 16 << 20;

/// The writing end of the log.
#[derive(Clone, Debug)]
pub struct EventLog {
    path: PathBuf,
    old: PathBuf,
    lock: PathBuf,
    limit_bytes: u64,
}

impl EventLog {
    /// The log of a runtime folder. Opens nothing yet.
    pub fn open(runtime: &Runtime) -> EventLog {
        EventLog {
            path: runtime.events(),
            old: runtime.old_events(),
            lock: runtime.path().join("events.lock"),
            limit_bytes: LOG_LIMIT_BYTES,
        }
    }

    /// Appends an event. An error (no space, folder gone) means that it is not in the log; nothing
    /// else depends on it.
    pub fn emit(&self, event: &Event) -> io::Result<()> {
        self.emit_all(std::slice::from_ref(event))
    }

    /// Appends several at once: a thousand queue pairs that migrate are one write.
    pub fn emit_all(&self, events: &[Event]) -> io::Result<()> {
        let mut lines = Vec::new();
        for event in events {
            serde_json::to_writer(&mut lines, event)?;
            lines.push(b'\n');
        }
        if lines.is_empty() {
            return Ok(());
        }
        let mut file = self.append()?;
        let mut bytes = file.metadata()?.len();
        if bytes + lines.len() as u64 > self.limit_bytes {
            self.rotate()?;
            file = self.append()?;
            bytes = file.metadata()?.len();
        }
        let mut last = [b'\n'];
        if bytes > 0 && file.read_at(&mut last, bytes - 1)? == 1 && last != [b'\n'] {
            lines.insert(0, b'\n');
        }
        file.write_all(&lines)
    }

    /// Empties it: both of its parts go. Who writes meanwhile begins it anew.
    pub fn clear(&self) -> io::Result<()> {
        let _lock = FileLock::take(&self.lock)?;
        for path in [&self.old, &self.path] {
            match fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    fn append(&self) -> io::Result<File> {
        open_own(&self.path, OpenOptions::new().read(true).append(true).create(true))
    }

    fn rotate(&self) -> io::Result<()> {
        let _lock = FileLock::take(&self.lock)?;
        // Another process may have rotated while this one waited.
        if fs::metadata(&self.path).is_ok_and(|m| m.len() > self.limit_bytes / 2) {
            fs::rename(&self.path, &self.old)?;
        }
        Ok(())
    }
}

/// All events of the log in the order of their times, `detect_us` filled in. An empty list where
/// there is no log.
pub fn read_events(runtime: &Runtime) -> io::Result<Vec<Event>> {
    let mut events = EventTail::open(runtime).poll()?;
    events.sort_by_key(|e| e.time_us);
    Ok(events)
}

/// Reads the log from its beginning and then what is added to it.
pub struct EventTail {
    runtime: Runtime,
    file: Option<File>,
    /// The last line, as far as it is there.
    partial: Vec<u8>,
    causes: Causes,
    /// Lines that were no events.
    skipped: u64,
    /// Why the old part cannot be read, if it cannot.
    old_is_lost: Option<String>,
}

impl EventTail {
    /// Starts at the beginning of the log (the old part first).
    pub fn open(runtime: &Runtime) -> EventTail {
        let (mut file, mut old_is_lost) = (None, None);
        match open(&runtime.old_events()) {
            Ok(old) => file = Some(old),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => old_is_lost = Some(format!("{}: {e}", runtime.old_events().display())),
        }
        let (partial, causes, skipped) = Default::default();
        EventTail { runtime: runtime.clone(), file, partial, causes, skipped, old_is_lost }
    }

    /// What of the log could not be read, in words; whatever it told is not known.
    pub fn lost(&self) -> Vec<String> {
        let skipped = (self.skipped > 0).then(|| {
            let log = self.runtime.events();
            format!("{}: {} lines are no events that are known here", log.display(), self.skipped)
        });
        self.old_is_lost.iter().cloned().chain(skipped).collect()
    }

    /// The events that came since the last call, in the order of the log, `detect_us` filled in.
    pub fn poll(&mut self) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        // The file at hand, then the one that took its name: twice is enough unless the log rotates
        // under our hands.
        for _ in 0..3 {
            self.drain(&mut events)?;
            if !self.advance()? {
                break;
            }
        }
        events.iter_mut().for_each(|event| self.causes.review(event));
        Ok(events)
    }

    fn drain(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let mut bytes = std::mem::take(&mut self.partial);
        file.take(2 * LOG_LIMIT_BYTES).read_to_end(&mut bytes)?;
        let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
        for line in bytes[..whole].split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
            match serde_json::from_slice::<Event>(line) {
                Ok(mut event) => {
                    self.causes.apply(&mut event);
                    events.push(event);
                }
                Err(_) => self.skipped += 1,
            }
        }
        self.partial = bytes.split_off(whole);
        Ok(())
    }

    /// Goes on to the file that bears the name now; false if that is the one at hand, or there is
    /// none.
    fn advance(&mut self) -> io::Result<bool> {
        let next = match open(&self.runtime.events()) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        };
        if let Some(file) = &self.file {
            let (old, new) = (file.metadata()?, next.metadata()?);
            if (old.dev(), old.ino()) == (new.dev(), new.ino()) {
                return Ok(false);
            }
        }
        self.file = Some(next);
        self.partial.clear();
        Ok(true)
    }
}

fn open(path: &Path) -> io::Result<File> {
    open_own(path, OpenOptions::new().read(true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Switch, SwitchKind, What};

    fn nic(n: usize) -> Event {
        Event::now(What::PortDown { nic: format!("a/{n}") })
    }

    #[test]
    fn writes_and_reads_and_follows() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        assert!(read_events(&runtime).unwrap().is_empty());
        let log = EventLog::open(&runtime);
        let mut tail = EventTail::open(&runtime);
        log.emit(&nic(0)).unwrap();
        assert_eq!(tail.poll().unwrap().len(), 1);
        log.emit(&nic(1)).unwrap();
        let more = tail.poll().unwrap();
        assert_eq!(more.len(), 1);
        assert_eq!(more[0].what, nic(1).what);
        assert_eq!(read_events(&runtime).unwrap().len(), 2);
    }

    #[test]
    fn a_cleared_log_is_empty_and_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let log = EventLog::open(&runtime);
        log.clear().unwrap();
        log.emit(&nic(0)).unwrap();
        let mut tail = EventTail::open(&runtime);
        assert_eq!(tail.poll().unwrap().len(), 1);
        log.clear().unwrap();
        assert!(read_events(&runtime).unwrap().is_empty() && tail.poll().unwrap().is_empty());
        log.emit(&nic(1)).unwrap();
        assert_eq!(read_events(&runtime).unwrap().len(), 1);
        assert_eq!(tail.poll().unwrap()[0].what, nic(1).what, "who follows goes on");
    }

    /// Who sets a fault writes its event afterwards, and a switch may be done by then.
    #[test]
    fn a_fault_that_is_told_after_its_switch_is_its_cause() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let log = EventLog::open(&runtime);
        let fault = |time_us| {
            Event::at(
                What::Fault { fault: "nic a/0 dead".into(), lasts_us: None, every_us: None },
                time_us,
            )
        };
        let switch = |detected_at_us| {
            let switch = Switch {
                kind: SwitchKind::Passive,
                host: "a".into(),
                qp: 2,
                from: "a/0-b/0".into(),
                to: "a/1-b/1".into(),
                epoch: 1,
                reason: "device-fatal".into(),
                on_path_since_us: 0,
                detected_at_us,
                detect_us: None,
                switch_us: 20,
                replayed: 0,
            };
            Event::at(What::Switch(switch), detected_at_us + 20)
        };
        // The older fault on the same path is not what the second switch answered.
        for event in [fault(100), switch(130), switch(1_010), fault(1_000)] {
            log.emit(&event).unwrap();
        }
        let detected = read_events(&runtime).unwrap().into_iter().filter_map(|e| match e.what {
            What::Switch(s) => Some(s.detect_us),
            _ => None,
        });
        assert_eq!(detected.collect::<Vec<_>>(), [Some(30), Some(10)]);
    }

    #[test]
    fn skips_what_is_not_an_event() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let log = EventLog::open(&runtime);
        log.emit(&nic(0)).unwrap();
        log.append().unwrap().write_all(b"\x00garbage\n{}\n").unwrap();
        log.emit(&nic(1)).unwrap();
        log.append().unwrap().write_all(b"{\"event\":\"port-do").unwrap();
        assert_eq!(read_events(&runtime).unwrap().len(), 2);
        let mut tail = EventTail::open(&runtime);
        assert_eq!((tail.poll().unwrap().len(), tail.lost().len()), (2, 1));
        assert!(tail.lost()[0].contains("2 lines are no events"), "{:?}", tail.lost());
    }

    #[test]
    fn half_a_line_costs_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let log = EventLog::open(&runtime);
        log.emit(&nic(0)).unwrap();
        // As a full file system leaves it.
        log.append().unwrap().write_all(b"{\"event\":\"port-do").unwrap();
        log.emit(&nic(1)).unwrap();
        log.emit(&nic(2)).unwrap();
        let events = read_events(&runtime).unwrap();
        assert_eq!(
            events.iter().map(|e| e.what.clone()).collect::<Vec<_>>(),
            [0, 1, 2].map(|n| nic(n).what)
        );
    }

    #[test]
    fn a_fifo_in_its_place_is_an_error_and_no_wait() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        for path in [runtime.events(), runtime.old_events()] {
            use rustix::fs::{mknodat, FileType, Mode, CWD};
            mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        }
        assert!(EventLog::open(&runtime)
            .emit(&nic(0))
            .unwrap_err()
            .to_string()
            .contains("not a regular file"));
        assert!(read_events(&runtime).unwrap_err().to_string().contains("not a regular file"));
        let lost = EventTail::open(&runtime).lost();
        let told = lost[0].contains("events.1.jsonl") && lost[0].contains("not a regular file");
        assert!(told && lost.len() == 1, "{lost:?}");
    }

    #[test]
    fn stays_bounded_and_the_tail_sees_every_event() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let mut log = EventLog::open(&runtime);
        log.limit_bytes = 1000;
        let mut tail = EventTail::open(&runtime);
        let mut seen = 0;
        for n in 0..100 {
            log.emit(&nic(n)).unwrap();
            seen += tail.poll().unwrap().len();
        }
        assert_eq!(seen, 100);
        assert!(fs::metadata(runtime.events()).unwrap().len() <= 1000);
        assert!(fs::metadata(runtime.old_events()).unwrap().len() <= 1000);
        assert!(read_events(&runtime).unwrap().len() >= 10);
    }

    #[test]
    fn several_at_once_are_as_many() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let log = EventLog::open(&runtime);
        log.emit_all(&[]).unwrap();
        assert!(!runtime.events().exists());
        log.append().unwrap().write_all(b"half a line").unwrap();
        log.emit_all(&[0, 1, 2].map(nic)).unwrap();
        let events = read_events(&runtime).unwrap();
        assert_eq!(
            events.iter().map(|e| e.what.clone()).collect::<Vec<_>>(),
            [0, 1, 2].map(|n| nic(n).what)
        );
    }

    #[test]
    fn many_writers_keep_lines_whole() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let log = EventLog::open(&runtime);
                    for n in 0..100 {
                        log.emit(&nic(n)).unwrap();
                    }
                });
            }
        });
        assert_eq!(read_events(&runtime).unwrap().len(), 400);
    }
}
