//! Logs and counters from folders and files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;
use unbroken_events::{fill_detect_us, Event};

use crate::error::{ObserveError, Result};

/// The longest file that is read.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// Logs that are read, and events of all of them together; beyond is an error, or left out and
/// said.
pub const MAX_LOGS: usize = 4_096;
/// Events of all logs together.
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
/// `.json` what `unbroken status --json` printed. Errors: a path that is not there or has neither,
/// too many.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Log>> {
    let mut logs = Vec::new();
    let mut left = MAX_EVENTS;
    for path in paths {
        let before = logs.len();
        if path.is_dir() {
            read_folder(path, &mut logs, &mut left)?;
        } else {
            logs.extend(read_file(path, None, &mut left)?);
        }
        if logs.len() == before {
            let why = "has no .jsonl or .json file; right is a runtime folder, a folder of logs, \
                       or a file that `unbroken events --json` wrote";
            return Err(ObserveError::Input(format!("{} {why}", path.display())));
        }
    }
    Ok(logs)
}

fn read_folder(folder: &Path, logs: &mut Vec<Log>, left: &mut usize) -> Result<()> {
    let failed = |e| ObserveError::io(folder.display(), e);
    // The two parts of one log: the older one first.
    let parts = [folder.join("events.1.jsonl"), folder.join("events.jsonl")];
    if parts.iter().any(|part| part.is_file()) {
        let mut whole: Option<Log> = None;
        for part in parts.iter().filter(|part| part.is_file()) {
            let Some(next) = read_file(part, Some(folder), left)? else { continue };
            match &mut whole {
                None => whole = Some(next),
                Some(whole) => {
                    whole.events.extend(next.events);
                    whole.notes.extend(next.notes);
                }
            }
        }
        logs.extend(whole.map(in_order));
    }
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(failed)?
        .take(4 * MAX_LOGS)
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .collect();
    names.sort();
    for path in names {
        if logs.len() >= MAX_LOGS {
            let why = format!("has more than {MAX_LOGS} logs; name fewer");
            return Err(ObserveError::Input(format!("{} {why}", folder.display())));
        }
        // A link may lead back here, or to a log that is here, too.
        let is_link = path.symlink_metadata().is_ok_and(|meta| meta.is_symlink());
        if is_link {
            continue;
        }
        if path.is_dir() && path.join("events.jsonl").is_file() {
            read_folder(&path, logs, left)?;
        } else if path.is_file() && !parts.contains(&path) {
            logs.extend(read_file(&path, None, left)?);
        }
    }
    Ok(())
}

/// A log or counters, if the file's name is that of one; as one of a folder, if it is.
fn read_file(path: &Path, folder: Option<&Path>, left: &mut usize) -> Result<Option<Log>> {
    let kind = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    if !matches!(kind, "jsonl" | "json") {
        return Ok(None);
    }
    let failed = |e| ObserveError::io(path.display(), e);
    let mut text = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text).map_err(failed)?;
    let name = folder.unwrap_or(path).display().to_string();
    let (job, host) = job_and_host(folder.unwrap_or(path));
    let mut log = Log { name, job, host, ..Log::default() };
    if text.len() as u64 > MAX_FILE_BYTES {
        text.truncate(MAX_FILE_BYTES as usize);
        let mib = MAX_FILE_BYTES >> 20;
        log.notes.push(format!("{}: only its first {mib} MiB were read", path.display()));
    }
    if kind == "json" {
        log.nics = counters(&text, &log.name);
        // Not every JSON file is ours.
        return Ok(Some(log).filter(|log| !log.nics.is_empty()));
    }
    let (mut skipped, mut beyond) = (0, 0);
    for line in text.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        match serde_json::from_slice::<Event>(line) {
            Ok(_) if *left == 0 => beyond += 1,
            Ok(event) => {
                *left -= 1;
                log.events.push(event);
            }
            Err(_) => skipped += 1,
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
    Ok(Some(in_order(log)))
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
}
