//! Logs and counters from folders and files.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;
use unbroken_events::{fill_detect_us, Event};
use unbroken_runtime::{open_found, open_named};

use crate::error::{ObserveError, Result};

/// The longest file that is read.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// Bytes of all files together.
pub const MAX_BYTES: u64 = 256 << 20;
/// The longest line that may be an event.
const MAX_LINE_BYTES: usize = 16 << 10;
/// Logs that are read; beyond is an error.
pub const MAX_LOGS: usize = 4_096;
/// Names of a folder that are looked at.
const MAX_NAMES: usize = 4 * MAX_LOGS;
/// Folders in folders.
const MAX_DEPTH: usize = 16;
/// Events of all logs together; what is beyond is left out, and said.
pub const MAX_EVENTS: usize = 1_000_000;

/// What a NIC carried, as `unbroken status --json` had it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NicBytes {
    /// The file.
    pub log: String,
    /// Its name.
    pub nic: String,
    /// `active`, `down`, `dead`.
    pub state: String,
    /// Sent.
    pub tx_bytes: u64,
    /// Received.
    pub rx_bytes: u64,
    /// Packets that were sent again.
    pub retransmits: u64,
}

/// A log of one host.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// Where it comes from.
    pub name: String,
    /// Its host, as far as its name or its place tells.
    pub host: String,
    /// Its job, as far as its name or its place tells.
    pub job: String,
    /// Its events, in the order of time, with what is known of times to detect.
    pub events: Vec<Event>,
    /// What NICs carried.
    pub nics: Vec<NicBytes>,
    /// What could not be read.
    pub notes: Vec<String>,
}

/// Reads all logs that paths name: a runtime folder, a folder of files, or a file. Files that end
/// in `.jsonl` are logs (`events.jsonl`, or what `unbroken events --json` printed), those in
/// `.json` what `unbroken status --json` printed. A file is read once, whatever names it has.
/// Errors: a path that is not there or has neither, what is no regular file, too many.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Log>> {
    let mut reader = Reader::default();
    for path in paths {
        let before = reader.logs.len() + reader.notes.len();
        if path.is_dir() {
            reader.folder(path, 0)?;
        } else {
            let log = reader.file(path, None, open_named(path))?;
            reader.logs.extend(log);
        }
        if reader.logs.len() + reader.notes.len() == before {
            let why = "has no .jsonl or .json file; right is a runtime folder, a folder of logs, \
                       or a file that `unbroken events --json` wrote";
            return Err(ObserveError::Input(format!("{} {why}", path.display())));
        }
    }
    Ok(reader.done())
}

/// What was read, and what may still be.
#[derive(Default)]
struct Reader {
    logs: Vec<Log>,
    /// What of folders was left out.
    notes: Vec<String>,
    /// Files by device and inode, so that one of many names is read once.
    seen: HashSet<(u64, u64)>,
    bytes: u64,
    events: usize,
    /// Files that were not read, since all together are too long.
    unread: usize,
}

impl Reader {
    fn folder(&mut self, folder: &Path, depth: usize) -> Result<()> {
        let failed = |e| ObserveError::io(folder.display(), e);
        // The two parts of one log: the older one first.
        let parts = [folder.join("events.1.jsonl"), folder.join("events.jsonl")];
        let mut whole: Option<Log> = None;
        for part in parts.iter().filter(|part| is_file(part)) {
            let Some(next) = self.file(part, Some(folder), open_found(part))? else { continue };
            match &mut whole {
                None => whole = Some(next),
                Some(whole) => {
                    whole.events.extend(next.events);
                    whole.notes.extend(next.notes);
                }
            }
        }
        self.logs.extend(whole.map(in_order));
        let mut names = std::fs::read_dir(folder).map_err(failed)?;
        let mut paths: Vec<PathBuf> =
            names.by_ref().take(MAX_NAMES).filter_map(|entry| Some(entry.ok()?.path())).collect();
        if names.next().is_some() {
            let note = format!("{}: names beyond {MAX_NAMES} were left out", folder.display());
            self.notes.push(note);
        }
        paths.sort();
        for path in paths {
            if self.logs.len() >= MAX_LOGS {
                let why = format!("has more than {MAX_LOGS} logs; name fewer");
                return Err(ObserveError::Input(format!("{} {why}", folder.display())));
            }
            // A link may lead back here, or to a log that is here, too.
            let Ok(kind) = path.symlink_metadata().map(|meta| meta.file_type()) else { continue };
            if kind.is_dir() && is_file(&path.join("events.jsonl")) {
                match depth < MAX_DEPTH {
                    true => self.folder(&path, depth + 1)?,
                    false => self.notes.push(format!(
                        "{}: folders more than {MAX_DEPTH} deep were left out",
                        path.display()
                    )),
                }
            } else if kind.is_file() && !parts.contains(&path) {
                let log = self.file(&path, None, open_found(&path))?;
                self.logs.extend(log);
            }
        }
        Ok(())
    }

    /// A log or counters, if the file's name is that of one; as one of a folder, if it is.
    fn file(
        &mut self,
        path: &Path,
        folder: Option<&Path>,
        file: io::Result<File>,
    ) -> Result<Option<Log>> {
        let kind = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let failed = |e| ObserveError::io(path.display(), e);
        let file = file.map_err(failed)?;
        if !matches!(kind, "jsonl" | "json") {
            return Ok(None);
        }
        let meta = file.metadata().map_err(failed)?;
        if !self.seen.insert((meta.dev(), meta.ino())) {
            let note = format!("{}: left out, it is another name of a file", path.display());
            self.note(note);
            return Ok(None);
        }
        let most = MAX_FILE_BYTES.min(MAX_BYTES - self.bytes);
        if most == 0 {
            self.unread += 1;
            return Ok(None);
        }
        let mut text = Vec::new();
        file.take(most).read_to_end(&mut text).map_err(failed)?;
        self.bytes += text.len() as u64;
        let name = folder.unwrap_or(path).display().to_string();
        let (job, host) = job_and_host(folder.unwrap_or(path));
        let mut log = Log { name, job, host, ..Log::default() };
        if meta.len() > most && text.len() as u64 == most {
            let mib = most >> 20;
            log.notes.push(format!("{}: only its first {mib} MiB were read", path.display()));
        }
        if kind == "json" {
            log.nics = counters(&text, &log.name);
            // Not every JSON file is ours.
            return Ok(Some(log).filter(|log| !log.nics.is_empty()));
        }
        self.events(&text, path, &mut log);
        Ok(Some(in_order(log)))
    }

    fn events(&mut self, text: &[u8], path: &Path, log: &mut Log) {
        let (mut skipped, mut beyond) = (0, 0);
        for line in text.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
            let short = Some(line).filter(|line| line.len() <= MAX_LINE_BYTES);
            match short.and_then(|line| serde_json::from_slice::<Event>(line).ok()) {
                Some(_) if self.events == MAX_EVENTS => beyond += 1,
                Some(event) => {
                    self.events += 1;
                    log.events.push(event);
                }
                None => skipped += 1,
            }
        }
        for (count, why) in [
            (skipped, "lines that are no events were left out".to_owned()),
            (beyond, format!("events beyond {MAX_EVENTS} were left out")),
        ] {
            if count > 0 {
                log.notes.push(format!("{}: {count} {why}", path.display()));
            }
        }
    }

    /// A note of a file that is no log; of many of them the first are enough.
    fn note(&mut self, note: String) {
        if self.notes.len() < MAX_LOGS {
            self.notes.push(note);
        }
    }

    /// The logs; what was left out is said with the first.
    fn done(mut self) -> Vec<Log> {
        if self.unread > 0 {
            self.notes.push(format!(
                "{} files were not read: all together are longer than {} MiB; name fewer",
                self.unread,
                MAX_BYTES >> 20
            ));
        }
        if !self.notes.is_empty() {
            if self.logs.is_empty() {
                self.logs.push(Log::default());
            }
            self.logs[0].notes.extend(self.notes);
        }
        self.logs
    }
}

/// Whether it is a regular file itself, and no link to one.
fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_file())
}

/// Times to detect are found in the order in which the log was written.
fn in_order(mut log: Log) -> Log {
    fill_detect_us(&mut log.events);
    log.events.sort_by_key(|event| event.wall_us);
    log
}

/// Job and host by a name: `unbroken-JOB-HOST.jsonl`, as the example for Slurm's TaskEpilog writes
/// it, a folder `unbroken-UID-job-JOB`, else the name itself.
fn job_and_host(path: &Path) -> (String, String) {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("job");
    let rest = stem.strip_prefix("unbroken-").unwrap_or_default();
    if let Some((_, job)) = rest.split_once("-job-") {
        return (format!("job {job}"), String::new());
    }
    match rest.split_once('-') {
        Some((job, host)) if job.parse::<u64>().is_ok() => (format!("job {job}"), host.into()),
        _ => (stem.into(), String::new()),
    }
}

fn counters(text: &[u8], log: &str) -> Vec<NicBytes> {
    let value: Value = serde_json::from_slice(text).unwrap_or_default();
    let nics = value["nics"].as_array().into_iter().flatten().take(MAX_LOGS);
    let nic = |nic: &Value| {
        let count = |name: &str| nic[name].as_u64().unwrap_or(0);
        Some(NicBytes {
            log: log.into(),
            nic: nic["nic"].as_str()?.into(),
            state: nic["state"].as_str().unwrap_or("unknown").into(),
            tx_bytes: count("tx_bytes"),
            rx_bytes: count("rx_bytes"),
            retransmits: count("retransmits"),
        })
    };
    nics.filter_map(nic).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_events::What;

    #[test]
    fn names_tell_job_and_host() {
        let of = |name: &str| job_and_host(Path::new(name));
        assert_eq!(of("/logs/unbroken-123-node7.jsonl"), ("job 123".into(), "node7".into()));
        assert_eq!(of("/logs/unbroken-9-n-a-1.jsonl"), ("job 9".into(), "n-a-1".into()));
        assert_eq!(of("/dev/shm/unbroken-1000-job-77"), ("job 77".into(), String::new()));
        assert_eq!(of("/logs/train.jsonl"), ("train".into(), String::new()));
    }

    #[test]
    fn logs_are_read_from_folders_and_files_and_what_is_wrong_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let line = |nic: &str, time_us| {
            let event = Event::at(What::PortDown { nic: nic.into() }, time_us);
            serde_json::to_string(&event).unwrap() + "\n"
        };
        write("run/events.1.jsonl", &line("a/0", 1));
        write("run/events.jsonl", &(line("a/0", 2) + "garbage\n{\"half\":"));
        write("unbroken-5-n1.jsonl", &line("b/0", 3));
        write("n1.json", r#"{"nics":[{"nic":"a/0","state":"active","tx_bytes":7}]}"#);
        write("other.json", "[1,2]");
        write("readme.txt", "not ours");
        let logs = read(&[dir.path().into()]).unwrap();
        let all: Vec<_> = logs.iter().map(|l| (l.job.as_str(), l.events.len())).collect();
        assert_eq!(all, [("n1", 0), ("run", 2), ("job 5", 1)]);
        assert_eq!(logs[0].nics[0].tx_bytes, 7);
        assert!(logs[1].notes[0].contains("2 lines that are no events"), "{:?}", logs[1].notes);
        for wrong in ["nowhere", "readme.txt"] {
            let said = read(&[dir.path().join(wrong)]).unwrap_err().to_string();
            assert!(said.contains(wrong), "{said}");
        }
    }

    /// A folder of somebody else's: one file of many names, a line without end, links that lead
    /// elsewhere, a FIFO.
    #[test]
    fn what_others_put_into_a_folder_costs_little() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let down = |nic: String| {
            let event = Event::at(What::PortDown { nic }, 1);
            serde_json::to_string(&event).unwrap() + "\n"
        };
        let long = down("a".repeat(MAX_LINE_BYTES));
        std::fs::write(path("x0.jsonl"), down("a/0".into()) + &long).unwrap();
        for n in 1..50 {
            std::fs::hard_link(path("x0.jsonl"), path(&format!("x{n}.jsonl"))).unwrap();
        }
        std::fs::create_dir(path("link")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path("link/events.jsonl")).unwrap();
        let fifo = path("fifo.jsonl");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let logs = read(&[dir.path().into()]).unwrap();
        assert_eq!(logs.len(), 1, "{logs:?}");
        assert_eq!(logs[0].events.len(), 1);
        let said = |words: &str| logs[0].notes.iter().filter(|n| n.contains(words)).count();
        assert_eq!((said("another name"), said("1 lines that are no events")), (49, 1));
        for wrong in [&fifo, Path::new("/dev/zero")] {
            let said = read(&[wrong.into()]).unwrap_err().to_string();
            assert_eq!(said, format!("{}: it is not a regular file", wrong.display()));
        }
    }

    /// Files without contents of their own: all together have a bound.
    #[test]
    fn all_logs_together_have_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let files = MAX_BYTES / MAX_FILE_BYTES + 2;
        for n in 0..files {
            let file = File::create(dir.path().join(format!("{n}.jsonl"))).unwrap();
            file.set_len(MAX_FILE_BYTES + 1).unwrap();
        }
        let logs = read(&[dir.path().into()]).unwrap();
        assert_eq!(logs.len() as u64, files - 2);
        let said = logs[0].notes.iter().find(|note| note.contains("were not read"));
        assert!(said.is_some_and(|s| s.starts_with("2 files")), "{:?}", logs[0].notes);
    }

    #[test]
    fn folders_in_folders_have_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let mut path = dir.path().to_path_buf();
        for _ in 0..100 {
            std::fs::write(path.join("events.jsonl"), "").unwrap();
            path.push("d");
            std::fs::create_dir(&path).unwrap();
        }
        let logs = read(&[dir.path().into()]).unwrap();
        assert_eq!(logs.len(), MAX_DEPTH + 1);
        assert!(logs[0].notes.iter().any(|note| note.contains("deep")), "{:?}", logs[0].notes);
    }
}
