//! The faults of a runtime folder's devices, as files: `device-faults/`.
//!
//! - `table`: the faults with their times, a line each. It is replaced as a whole, under `lock`.
//! - `<process>`: the devices of a process that takes faults, while it lives.
//!
//! All is this user's and no one else's; a table that is another's, that others may read or write,
//! that is too large, or in which a line is not a fault, is refused as a whole. Times are those of
//! CLOCK_MONOTONIC, so a table of an earlier boot of the machine is empty.

use super::words::{is_device_name, DeviceFault, Harm};
use super::{cable, link};
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use unbroken_runtime::{make_folder, now_us, open_own, FileLock, Presence, ProcessName, Runtime};
use unbroken_verbs::{Error, Result};

/// Faults that are set at one time.
const MAX_FAULTS: usize = 256;
/// Bytes of a table.
const MAX_BYTES: u64 = 64 * 1024;
/// Processes that are looked at.
const MAX_PROCESSES: usize = 4096;
/// Shortest time from beginning to beginning.
const MIN_EVERY_US: u64 = 40_000;
/// What a table begins with; the version is the last.
const HEAD: &str = "unbroken device faults 1";

/// When a fault holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct When {
    /// So long from now it begins.
    pub at_us: u64,
    /// For so long it holds; for ever if there is none.
    pub lasts_us: Option<u64>,
    /// So long from beginning to beginning; once if there is none.
    pub every_us: Option<u64>,
}

/// A fault that is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetFault {
    /// Given to no other fault of the table.
    pub id: u64,
    /// When it begins.
    pub from_us: u64,
    /// For how long it holds each time.
    pub lasts_us: Option<u64>,
    /// From beginning to beginning.
    pub every_us: Option<u64>,
    /// What it is.
    pub fault: DeviceFault,
}

impl SetFault {
    /// The round that it is in, from 0, and whether it holds in it; none before it begins and after
    /// it is over.
    pub fn at(&self, now_us: u64) -> Option<(u64, bool)> {
        let since_us = now_us.checked_sub(self.from_us)?;
        if now_us >= self.until_us() {
            return None;
        }
        let every_us = self.every_us.unwrap_or(u64::MAX).max(1);
        let holds = self.lasts_us.is_none_or(|lasts_us| since_us % every_us < lasts_us);
        Some((since_us / every_us, holds))
    }

    /// When it is over for good; `u64::MAX` for never.
    pub fn until_us(&self) -> u64 {
        match (self.lasts_us, self.every_us) {
            (Some(lasts_us), None) => self.from_us.saturating_add(lasts_us),
            _ => u64::MAX,
        }
    }

    fn line(&self) -> String {
        let SetFault { id, from_us, lasts_us, every_us, fault } = self;
        let (lasts_us, every_us) = (lasts_us.unwrap_or(0), every_us.unwrap_or(0));
        format!("{id} {from_us} {lasts_us} {every_us} {fault}\n")
    }

    fn parse(line: &str) -> Option<SetFault> {
        let mut parts = line.splitn(5, ' ');
        let mut number = || parts.next()?.parse::<u64>().ok();
        let (id, from_us, lasts_us, every_us) = (number()?, number()?, number()?, number()?);
        let some = |us: u64| Some(us).filter(|us| *us != 0);
        let fault = parts.next()?.parse().ok()?;
        Some(SetFault { id, from_us, lasts_us: some(lasts_us), every_us: some(every_us), fault })
    }
}

/// A process that takes faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taker {
    /// Its pid.
    pub pid: u32,
    /// Its devices.
    pub devices: Vec<String>,
}

/// The faults of the devices of a runtime folder.
pub struct DeviceFaults {
    runtime: Runtime,
    folder: PathBuf,
}

/// Of which file the table was, when it was read last.
pub(crate) type Stamp = Option<(u64, i64, i64, u64)>;

fn failed(path: &Path, what: &str, e: io::Error) -> Error {
    Error::os(&format!("{}: cannot {what}", path.display()), &e)
}

fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Reads a file that nobody but this user may write or read.
fn read_own(path: &Path) -> io::Result<String> {
    let file = open_own(path, OpenOptions::new().read(true))?;
    let mode = file.metadata()?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(io::Error::other(format!("others may use it (mode {mode:o}); 600 is right")));
    }
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("it has more than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

/// Writes a file of this user's alone, as a whole.
fn write_own(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    // A link, or what was left by a process that ended, is put away, not followed.
    match fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = open_own(&new, OpenOptions::new().write(true).create_new(true))?;
    file.write_all(text.as_bytes())?;
    fs::rename(&new, path)
}

fn parse(text: &str) -> io::Result<Vec<SetFault>> {
    let mut lines = text.lines();
    let head = lines.next().unwrap_or_default();
    let of_boot = head.strip_prefix(HEAD).ok_or_else(|| {
        io::Error::other(format!("it is no table of faults: its first line is not '{HEAD} …'"))
    })?;
    let faults: Vec<SetFault> = lines
        .enumerate()
        .map(|(i, line)| {
            let what = || io::Error::other(format!("line {} is not a fault with its times", i + 2));
            SetFault::parse(line).ok_or_else(what)
        })
        .collect::<io::Result<_>>()?;
    if faults.len() > MAX_FAULTS {
        return Err(io::Error::other(format!("it has more than {MAX_FAULTS} faults")));
    }
    Ok(if of_boot.trim() == boot() { faults } else { Vec::new() })
}

/// Carries out a fault of a network interface.
fn break_interface(fault: &DeviceFault) -> Result<()> {
    match fault.harm {
        Harm::CableCut => cable::cut(&fault.device),
        _ => link::set_up(&link::interface_of_link(&fault.device)?, false),
    }
}

/// Ends it. A device that is gone has no link.
fn mend_interface(fault: &DeviceFault) -> Result<()> {
    match (fault.harm, link::is_there(&fault.device)) {
        (Harm::CableCut, _) => cable::mend(&fault.device),
        (_, true) => link::set_up(&link::interface_of_link(&fault.device)?, true),
        (_, false) => Ok(()),
    }
}

impl DeviceFaults {
    /// Those of that folder; makes nothing.
    pub fn of(runtime: &Runtime) -> DeviceFaults {
        let folder = runtime.path().join("device-faults");
        DeviceFaults { runtime: runtime.clone(), folder }
    }

    fn table(&self) -> PathBuf {
        self.folder.join("table")
    }

    /// The file that the table is in now.
    pub(crate) fn stamp(&self) -> Stamp {
        let meta = fs::symlink_metadata(self.table()).ok()?;
        Some((meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()))
    }

    /// All that the table has, over or not; an error where it cannot be trusted.
    pub fn all(&self) -> Result<Vec<SetFault>> {
        let path = self.table();
        match read_own(&path) {
            Ok(text) => parse(&text).map_err(|e| self.refused(e)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(self.refused(e)),
        }
    }

    fn refused(&self, e: io::Error) -> Error {
        let path = self.table();
        Error::invalid(format!(
            "{}: {e}; remove it, and set the faults again with `unbroken fault set`",
            path.display()
        ))
    }

    /// Those that are not over, in the order of their times.
    pub fn list(&self) -> Result<Vec<SetFault>> {
        let now_us = now_us();
        let mut faults = self.all()?;
        faults.retain(|set| set.until_us() > now_us);
        faults.sort_by_key(|set| set.from_us);
        Ok(faults)
    }

    /// Those that hold now.
    pub fn holding(&self) -> Result<Vec<DeviceFault>> {
        let now_us = now_us();
        let mut faults = self.list()?;
        faults.retain(|set| set.at(now_us).is_some_and(|(_, holds)| holds));
        Ok(faults.into_iter().map(|set| set.fault).collect())
    }

    /// Sets a fault, in place of one that is the same. What is set is carried out by the programs
    /// that take faults; those of a network interface are there before this returns.
    pub fn set(&self, fault: &DeviceFault, when: When) -> Result<SetFault> {
        if !fault.harm.is_of_interface() {
            return self.write_down(fault, when);
        }
        if when != When::default() {
            return Err(Error::invalid(format!(
                "fault '{fault}': nobody is there later to end it, so it has no times; it holds \
                 until `unbroken fault clear`"
            )));
        }
        let interface = link::interface_of_link(&fault.device)?;
        let is_ours = self.list()?.iter().any(|set| set.fault == *fault);
        if !is_ours && fault.harm == Harm::LinkDown && !link::is_up(&interface) {
            return Err(Error::invalid(format!(
                "fault '{fault}': the interface '{interface}' is down already, and not by a fault"
            )));
        }
        if !is_ours && fault.harm == Harm::CableCut && cable::is_cut(&fault.device) {
            return Err(Error::invalid(format!(
                "fault '{fault}': it is cut already, by a fault of another runtime folder"
            )));
        }
        // It is in the table first: what breaks an interface must be known to whoever clears.
        let set = self.write_down(fault, when)?;
        break_interface(fault).inspect_err(|_| {
            let _ = self.change(|faults| {
                faults.retain(|other| other.id != set.id || is_ours);
                Ok(())
            });
        })?;
        Ok(set)
    }

    fn write_down(&self, fault: &DeviceFault, when: When) -> Result<SetFault> {
        let wrong = |what: &str| Err(Error::invalid(format!("fault '{fault}': {what}")));
        match (when.lasts_us, when.every_us) {
            (_, Some(every_us)) if every_us < MIN_EVERY_US => {
                return wrong("it can come again every 40ms at most")
            }
            (None, Some(_)) if !fault.harm.strikes() => {
                return wrong("one that comes again must be over before: say for how long")
            }
            (Some(lasts_us), Some(every_us)) if lasts_us >= every_us => {
                return wrong("it would come again before it is over")
            }
            _ => {}
        }
        let now_us = now_us();
        self.change(|faults| {
            faults.retain(|set| set.until_us() > now_us && set.fault != *fault);
            if faults.len() == MAX_FAULTS {
                return Err(Error::invalid(format!(
                    "{MAX_FAULTS} faults of devices are set already, which is the limit; clear \
                     some first"
                )));
            }
            let id = now_us.max(faults.iter().map(|set| set.id + 1).max().unwrap_or(0));
            let set = SetFault {
                id,
                from_us: now_us.saturating_add(when.at_us),
                lasts_us: when.lasts_us,
                every_us: when.every_us,
                fault: fault.clone(),
            };
            faults.push(set.clone());
            Ok(set)
        })
    }

    /// Clears the faults that are named ([`DeviceFault::is_named_by`]), or all. Gives those that
    /// were not over.
    pub fn clear(&self, named: Option<&str>) -> Result<Vec<SetFault>> {
        if !self.folder.exists() {
            return Ok(Vec::new());
        }
        let now_us = now_us();
        self.change(|faults| {
            let is_named = |set: &SetFault| named.is_none_or(|text| set.fault.is_named_by(text));
            let named = faults.iter().filter(|set| is_named(set)).map(|set| &set.fault);
            named.filter(|fault| fault.harm.is_of_interface()).try_for_each(mend_interface)?;
            let (mut gone, left) = faults.drain(..).partition::<Vec<_>, _>(is_named);
            *faults = left;
            gone.retain(|set| set.until_us() > now_us);
            Ok(gone)
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut Vec<SetFault>) -> Result<T>) -> Result<T> {
        self.make()?;
        let lock = self.folder.join("lock");
        let _lock = FileLock::take(&lock).map_err(|e| failed(&lock, "lock it", e))?;
        let mut faults = self.all()?;
        let result = change(&mut faults)?;
        let mut text = format!("{HEAD} {}\n", boot());
        text.extend(faults.iter().map(SetFault::line));
        let path = self.table();
        write_own(&path, &text).map_err(|e| failed(&path, "write it", e))?;
        Ok(result)
    }

    fn make(&self) -> Result<()> {
        make_folder(&self.folder).map_err(|e| Error::invalid(e.to_string()))
    }

    /// This process takes faults, for those devices.
    pub(crate) fn take_part(&self, name: ProcessName, devices: &[String]) -> Result<()> {
        self.make()?;
        let path = self.folder.join(name.to_string());
        write_own(&path, &devices.join("\n")).map_err(|e| failed(&path, "write it", e))
    }

    /// The processes that take faults. What those left that have ended is put away.
    pub fn takers(&self) -> Result<Vec<Taker>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(failed(&self.folder, "read it", e)),
            Ok(entries) => entries,
        };
        let presence = Presence::join(&self.runtime)
            .map_err(|e| failed(self.runtime.path(), "take part in it", e))?;
        let mut takers = Vec::new();
        for entry in entries.flatten().take(MAX_PROCESSES) {
            let Some(name) = entry.file_name().to_str().and_then(|n| ProcessName::from_str(n).ok())
            else {
                continue;
            };
            if !presence.lives(name.id) {
                let _ = fs::remove_file(entry.path());
                continue;
            }
            let Ok(text) = read_own(&entry.path()) else { continue };
            let devices = text.lines().filter(|name| is_device_name(name)).map(str::to_owned);
            takers.push(Taker { pid: name.pid, devices: devices.collect() });
        }
        takers.sort_unstable_by_key(|taker| taker.pid);
        Ok(takers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    fn faults() -> (tempfile::TempDir, DeviceFaults) {
        let folder = tempfile::tempdir().unwrap();
        let faults = DeviceFaults::of(&Runtime::at(folder.path()).unwrap());
        (folder, faults)
    }

    fn fault(text: &str) -> DeviceFault {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_set_is_listed_until_it_is_cleared() {
        let (_folder, faults) = faults();
        assert!(faults.list().unwrap().is_empty() && faults.clear(None).unwrap().is_empty());
        let set = faults.set(&fault("nic x dead"), When::default()).unwrap();
        let later = When { at_us: 1_000_000, lasts_us: Some(5), every_us: Some(50_000) };
        faults.set(&fault("refuse x EIO"), later).unwrap();
        assert_eq!(faults.list().unwrap()[0], set);
        let again = faults.set(&fault("nic x dead"), When::default()).unwrap();
        assert!(again.id > set.id, "it strikes anew");
        assert_eq!(faults.list().unwrap().len(), 2);
        assert_eq!(faults.clear(Some("nic x")).unwrap(), [again]);
        assert_eq!(faults.clear(None).unwrap().len(), 1);
        assert!(faults.list().unwrap().is_empty());
    }

    #[test]
    fn it_holds_for_ever_once_or_in_rounds() {
        let set = |lasts_us, every_us| SetFault {
            id: 1,
            from_us: 100,
            lasts_us,
            every_us,
            fault: fault("nic x down"),
        };
        let at = |set: SetFault, times: [u64; 3]| times.map(|now_us| set.at(now_us));
        assert_eq!(
            at(set(None, None), [99, 100, 1 << 60]),
            [None, Some((0, true)), Some((0, true))]
        );
        assert_eq!(
            at(set(Some(10), None), [100, 109, 110]),
            [Some((0, true)), Some((0, true)), None]
        );
        assert_eq!(
            at(set(Some(10), Some(50)), [109, 110, 150]),
            [Some((0, true)), Some((0, false)), Some((1, true))]
        );
    }

    #[test]
    fn times_that_make_no_sense_are_refused() {
        let (_folder, faults) = faults();
        for (text, lasts_us, every_us, hint) in [
            ("nic x dead", None, Some(1_000_000), "say for how long"),
            ("nic x dead", Some(2_000_000), Some(1_000_000), "before it is over"),
            ("wqe-error x", None, Some(1_000), "40ms"),
        ] {
            let when = When { at_us: 0, lasts_us, every_us };
            let e = faults.set(&fault(text), when).unwrap_err().to_string();
            assert!(e.contains(hint), "{e}");
        }
    }

    #[test]
    fn a_table_that_is_not_ours_is_refused() {
        let (folder, faults) = faults();
        faults.set(&fault("nic x dead"), When::default()).unwrap();
        let path = faults.table();
        let good = fs::read_to_string(&path).unwrap();
        let refuses = |hint: &str| {
            let e = faults.list().unwrap_err().to_string();
            assert!(e.contains(hint) && e.contains("device-faults/table"), "{e}");
            faults.set(&fault("nic y dead"), When::default()).unwrap_err();
        };
        for (text, hint) in [
            ("", "no table of faults"),
            ("\u{1}garbage", "no table of faults"),
            (&format!("{good}fire\n"), "line 3 is not a fault"),
            (&format!("{good}1 2 3 4 nic ../x dead\n"), "line 3"),
            (&format!("{good}1 2 3 99999999999999999999 nic x dead\n"), "line 3"),
            (&format!("{HEAD} {}", "x".repeat(70_000)), "more than 65536 bytes"),
        ] {
            fs::write(&path, text).unwrap();
            refuses(hint);
        }
        fs::write(&path, [0xff, 0xfe]).unwrap();
        refuses("UTF-8");
        fs::write(&path, &good).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        refuses("600 is right");
        if unbroken_runtime::user_id() == 0 {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            refuses("belongs to user 65534");
        }
        let elsewhere = folder.path().join("elsewhere");
        fs::rename(&path, &elsewhere).unwrap();
        symlink(&elsewhere, &path).unwrap();
        refuses("symbolic link");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refuses("not a regular file");
        fs::remove_dir(&path).unwrap();
        assert!(faults.list().unwrap().is_empty());
        fs::write(&path, good.replace(&boot(), "earlier")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(faults.list().unwrap().is_empty(), "of an earlier boot");
    }

    #[test]
    fn processes_that_live_are_named() {
        let (_folder, faults) = faults();
        assert!(faults.takers().unwrap().is_empty());
        let presence = Presence::join(&faults.runtime).unwrap();
        faults.take_part(presence.name(), &["x".into(), "y".into()]).unwrap();
        let dead = ProcessName { pid: 1, id: presence.name().id ^ 1 };
        faults.take_part(dead, &["z".into()]).unwrap();
        let devices = vec!["x".to_owned(), "y".to_owned()];
        assert_eq!(faults.takers().unwrap(), [Taker { pid: presence.name().pid, devices }]);
        assert!(!faults.folder.join(dead.to_string()).exists());
    }
}
