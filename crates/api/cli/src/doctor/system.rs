//! Checks of the machine itself: versions, limits, GPU memory.

use std::path::{Path, PathBuf};

use super::machine::{text, Device, Roots};
use super::pci::Acs;
use super::report::Line;

/// Below this many bytes of locked memory hardly a program begins: its regions count once for each
/// device that stands in for another.
const LEAST_LOCKED_BYTES: u64 = 64 << 20;
/// `CAP_IPC_LOCK`.
const IPC_LOCK: u32 = 14;
/// The first line of `uid_map` where users are the machine's own.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

/// How much memory may be locked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memlock {
    /// Bytes; none: no limit.
    pub(crate) soft: Option<u64>,
    pub(crate) hard: Option<u64>,
    /// The limit does not count for this process.
    pub(crate) is_exempt: bool,
}

impl Memlock {
    /// Of this process; whether it is exempt is in the files of `proc`.
    pub(crate) fn of_this_process(proc: &Path) -> Memlock {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
        Memlock { soft: limit.current, hard: limit.maximum, is_exempt: is_exempt(proc) }
    }
}

fn is_exempt(proc: &Path) -> bool {
    let read = |name| text(&proc.join("self").join(name)).unwrap_or_default();
    let status = read("status");
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let has = set
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
        .is_some_and(|set| set >> IPC_LOCK & 1 == 1);
    // A capability within a container's own users is none to the kernel here.
    has && read("uid_map").split_whitespace().eq(ALL_USERS)
}

fn bytes(limit: Option<u64>) -> String {
    match limit {
        None => "unlimited".into(),
        Some(n) if n >= 1 << 20 => format!("{} MiB", n >> 20),
        Some(n) => format!("{} KiB", n >> 10),
    }
}

/// RLIMIT_MEMLOCK.
pub(crate) fn memlock(limit: &Memlock) -> Line {
    const CHECK: &str = "memlock";
    let text = format!("locked memory: soft {}, hard {}", bytes(limit.soft), bytes(limit.hard));
    let here = match limit.hard {
        None => "`ulimit -l unlimited` in this shell; for good, ",
        Some(_) => "",
    };
    let remedy = format!(
        "{here}`* soft memlock unlimited` and `* hard memlock unlimited` in \
         /etc/security/limits.conf, and log in anew; in a systemd unit LimitMEMLOCK=infinity; \
         docker: `--ulimit memlock=-1`"
    );
    match limit.soft {
        None => Line::ok(CHECK, text),
        Some(_) if limit.is_exempt => {
            Line::ok(CHECK, format!("{text}; it does not count for this user (CAP_IPC_LOCK)"))
        }
        Some(n) if n < LEAST_LOCKED_BYTES => Line::problem(
            CHECK,
            format!("{text}; that is too little for a program's regions"),
            remedy,
        ),
        Some(_) => Line::note(
            CHECK,
            format!("{text}; a region counts once for each device that stands in for another"),
        )
        .and_do(remedy),
    }
}

/// The kernel's version.
pub(crate) fn kernel(roots: &Roots) -> Line {
    match release(roots) {
        Some(release) => Line::ok("kernel", format!("Linux {release}")),
        None => Line::note("kernel", "its version is not readable"),
    }
}

fn release(roots: &Roots) -> Option<String> {
    text(&roots.proc.join("sys/kernel/osrelease"))
}

/// libibverbs: whether it can be used, and its version.
pub(crate) fn libibverbs(usable: &Result<(), String>, maps: &str) -> Line {
    const CHECK: &str = "rdma-core";
    match (usable, version(maps)) {
        (Err(why), _) => {
            let remedy =
                "install rdma-core (Debian: libibverbs1, ibverbs-providers, ibverbs-utils)";
            Line::problem(CHECK, why.clone(), remedy)
        }
        (Ok(()), Some((version, path))) => Line::ok(CHECK, format!("{version} ({path})")),
        (Ok(()), None) => Line::note(CHECK, "libibverbs is there; its version is not readable"),
    }
}

/// The version and the file of libibverbs, by the process's maps: the file of rdma-core 44.0 is
/// `libibverbs.so.1.14.44.0`.
fn version(maps: &str) -> Option<(String, String)> {
    let path = maps.lines().find_map(|line| {
        let path = line.get(line.find('/')?..)?;
        path.contains("/libibverbs.so.1").then_some(path)
    })?;
    let (_, numbers) = path.rsplit_once("libibverbs.so.")?;
    let numbers: Vec<&str> = numbers.split('.').collect();
    let [_, _, version @ ..] = &numbers[..] else { return None };
    (!version.is_empty()).then(|| (version.join("."), path.to_owned()))
}

/// Whether `unbroken run` finds the library.
pub(crate) fn library(found: Result<PathBuf, String>) -> Line {
    match found {
        Ok(path) => Line::ok("libunbroken.so", path.display().to_string()),
        Err(why) => Line::problem(
            "libunbroken.so",
            why,
            "`make all`, or install it beside this command or in ../lib",
        ),
    }
}

/// What there is for GPU memory.
pub(crate) fn gpu(roots: &Roots, devices: &[Device]) -> Line {
    let loaded: Vec<&str> = ["nvidia_peermem", "nv_peer_mem", "ib_peer_mem"]
        .into_iter()
        .filter(|module| roots.sys.join("module").join(module).is_dir())
        .collect();
    let modules = match loaded.is_empty() {
        true => "no module for peer memory is loaded".to_owned(),
        false => format!("loaded: {}", loaded.join(", ")),
    };
    let config = release(roots).and_then(|r| text(&roots.boot.join(format!("config-{r}"))));
    let dma_buf = match config {
        None => "dma-buf: the kernel's configuration is not readable".to_owned(),
        Some(config) => {
            let has = |name: &str| config.lines().any(|line| line == format!("{name}=y"));
            let all = has("CONFIG_DMABUF_MOVE_NOTIFY") && has("CONFIG_PCI_P2PDMA");
            format!("dma-buf: the kernel {} it", if all { "has" } else { "lacks" })
        }
    };
    Line::note(
        "gpu memory",
        format!("{modules}; {dma_buf}; {}; not tried with Unbroken yet", acs(devices)),
    )
}

fn acs(devices: &[Device]) -> String {
    let all: Vec<&Acs> = devices.iter().filter_map(|d| d.pci.as_ref()).map(|p| &p.acs).collect();
    let on: Vec<&str> = all
        .iter()
        .filter_map(|acs| match acs {
            Acs::Redirects(bridges) => Some(bridges.iter().map(String::as_str)),
            _ => None,
        })
        .flatten()
        .collect();
    if all.is_empty() {
        return "ACS: no device is on PCI".to_owned();
    }
    match (all.contains(&&Acs::NotReadable), on.is_empty()) {
        (_, false) => format!("ACS sends peers' traffic up at {}", on.join(", ")),
        (true, true) => "ACS: not readable (root can)".to_owned(),
        (false, true) => "ACS: off".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Level;
    use std::fs;

    #[test]
    fn little_locked_memory_is_named_with_what_to_set() {
        let of = |soft, hard, is_exempt| memlock(&Memlock { soft, hard, is_exempt });
        let small = of(Some(8 << 20), Some(8 << 20), false);
        assert_eq!(small.level, Level::Problem);
        assert!(small.text.contains("soft 8 MiB, hard 8 MiB"), "{small:?}");
        let remedy = small.remedy.unwrap();
        assert!(remedy.contains("limits.conf") && remedy.contains("LimitMEMLOCK"), "{remedy}");
        assert!(!remedy.contains("ulimit -l"), "the hard limit forbids it: {remedy}");
        let soft = of(Some(64 << 10), None, false);
        assert!(soft.text.contains("soft 64 KiB, hard unlimited"), "{soft:?}");
        assert!(soft.remedy.unwrap().starts_with("`ulimit -l unlimited`"));
        assert_eq!(of(Some(8 << 20), Some(8 << 20), true).level, Level::Ok);
        assert_eq!(of(Some(64 << 20), Some(64 << 20), false).level, Level::Note);
        assert_eq!(of(None, None, false).level, Level::Ok);
    }

    #[test]
    fn a_capability_counts_among_the_machines_own_users() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("self")).unwrap();
        let write =
            |name, text: &str| fs::write(proc.path().join("self").join(name), text).unwrap();
        assert!(!is_exempt(proc.path()));
        write("status", "Name:\tx\nCapEff:\t000001ffffffffff\n");
        write("uid_map", "         0          0 4294967295\n");
        assert!(is_exempt(proc.path()));
        write("uid_map", "         0     100000      65536\n");
        assert!(!is_exempt(proc.path()));
        write("uid_map", "         0          0 4294967295\n");
        write("status", "CapEff:\t000001ffffffbfff\n");
        assert!(!is_exempt(proc.path()));
    }

    #[test]
    fn the_version_of_rdma_core_is_in_the_files_name() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 12  /usr/lib/libc.so.6\n\
                    7f02-7f03 r-xp 00000000 08:01 13   /usr/lib/libibverbs.so.1.14.44.0\n";
        assert_eq!(version(maps), Some(("44.0".into(), "/usr/lib/libibverbs.so.1.14.44.0".into())));
        assert_eq!(version("7f02-7f03 r-xp 0 08:01 13   /opt/libibverbs.so.1\n"), None);
        assert_eq!(version(""), None);
        let missing = libibverbs(&Err("libibverbs is not installed".into()), "");
        assert_eq!(missing.level, Level::Problem);
        assert_eq!(libibverbs(&Ok(()), maps).level, Level::Ok);
    }
}
