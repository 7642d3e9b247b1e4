//! FRR: its configuration for EVPN and BFD, and an instance of its daemons for this host alone.
//!
//! The instance has its own files and sockets under the host's folder, so a FRR that the system runs is not touched; but only one
//! bgpd can listen at port 179 in a network namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;
use std::os::unix::fs::{chown, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{flock, FlockOperation};
use serde_json::Value;

use crate::command;
use crate::config::{Config, Role};

/// Where Debian has FRR's daemons.
pub const DAEMONS: &str = "/usr/lib/frr";
/// In the order in which they are started.
pub const NAMES: [&str; 3] = ["zebra", "bfdd", "bgpd"];
const START: Duration = Duration::from_secs(10);
/// Longer than all daemons need to start.
const TURN: Duration = Duration::from_secs(40);
/// bfdd sends every few milliseconds: other work must not delay it, or a link is taken for dead.
const BFDD_PRIORITY: &str = "20";

/// An instance of FRR under a folder.
#[derive(Clone, Debug)]
pub struct Frr {
    folder: PathBuf,
}

impl Frr {
    /// The one of the host with this folder.
    pub fn new(state: &Path) -> Frr {
        Frr { folder: state.join("frr") }
    }

    /// Where bfdd tells of its sessions.
    pub fn bfd_socket(&self) -> PathBuf {
        self.folder.join("bfdd.sock")
    }

    fn pid_file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.pid"))
    }

    /// The process of a daemon, if it runs.
    pub fn pid(&self, name: &str) -> Option<u32> {
        let pid: u32 = std::fs::read_to_string(self.pid_file(name)).ok()?.trim().parse().ok()?;
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        // The number may have gone to another process.
        let folder = self.folder.to_str()?.as_bytes();
        command.windows(folder.len()).any(|w| w == folder).then_some(pid)
    }

    /// Writes the configuration. Gives whether it is another one than before.
    pub fn configure(&self, config: &Config) -> Result<bool, String> {
        let io = |e: std::io::Error| format!("{}: {e}", self.folder.display());
        std::fs::create_dir_all(&self.folder).map_err(io)?;
        std::fs::set_permissions(&self.folder, std::fs::Permissions::from_mode(0o755)).map_err(io)?;
        let (user, group) = frr_user()?;
        chown(&self.folder, Some(user), Some(group)).map_err(io)?;
        let mut changed = false;
        for name in NAMES {
            let path = self.folder.join(format!("{name}.conf"));
            let text = text(config, name);
            if std::fs::read_to_string(&path).ok().as_deref() != Some(&text) {
                changed = true;
                std::fs::write(&path, &text).map_err(|e| format!("{}: {e}", path.display()))?;
                chown(&path, Some(user), Some(group)).map_err(io)?;
            }
        }
        Ok(changed)
    }

    /// Waits until nobody else starts or ends daemons; nobody does while the file is open. Our daemon and `unbroken edge up` may both
    /// find one dead, and a second that is started fails.
    fn turn(&self) -> Result<File, String> {
        let path = self.folder.join("lock");
        let file = File::create(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let deadline = Instant::now() + TURN;
        while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if Instant::now() > deadline {
                return Err(format!("{}: held by another for {} s ({error})", path.display(), TURN.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(file)
    }

    /// Starts the daemons that do not run; gives their names.
    pub fn start(&self) -> Result<Vec<&'static str>, String> {
        let _turn = self.turn()?;
        let mut started = Vec::new();
        for name in NAMES {
            if self.pid(name).is_some() {
                continue;
            }
            let folder = self.folder.display();
            let mut args = format!(
                "{DAEMONS}/{name} -d -f {folder}/{name}.conf -i {folder}/{name}.pid -z {folder}/zserv.api \
                 --vty_socket {folder} -P 0 --log file:{folder}/{name}.log --log-level notifications"
            );
            match name {
                "zebra" => args += " -s 90000000",
                "bfdd" => write!(args, " --bfdctl {}", self.bfd_socket().display()).map_err(|e| e.to_string())?,
                _ => {}
            }
            command::run(&command::words(&args))?;
            let deadline = Instant::now() + START;
            while self.pid(name).is_none() {
                if Instant::now() > deadline {
                    return Err(format!(
                        "{name} does not run {} s after its start; see {folder}/{name}.log",
                        START.as_secs()
                    ));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            if name == "bfdd" {
                self.prefer_bfdd();
            }
            started.push(name);
        }
        Ok(started)
    }

    /// Gives bfdd a real-time priority. Where that is not allowed, short intervals are less reliable, and that is all.
    fn prefer_bfdd(&self) {
        if let Some(pid) = self.pid("bfdd") {
            let _ = command::run(&["chrt", "-a", "-f", "-p", BFDD_PRIORITY, &pid.to_string()]);
        }
    }

    /// Whether bfdd has a real-time priority.
    pub fn bfdd_is_preferred(&self) -> bool {
        let shown = self.pid("bfdd").and_then(|pid| command::run(&["chrt", "-p", &pid.to_string()]).ok());
        shown.is_some_and(|text| text.contains("SCHED_FIFO"))
    }

    /// Ends the daemons, bgpd first, so that neighbours are told; zebra takes its routes with it.
    pub fn stop(&self) -> Result<(), String> {
        if !self.folder.exists() {
            return Ok(());
        }
        let _turn = self.turn()?;
        for name in NAMES.iter().rev() {
            let Some(pid) = self.pid(name) else { continue };
            let _ = command::run(&["kill", "-TERM", &pid.to_string()]);
            let deadline = Instant::now() + START;
            while self.pid(name).is_some() {
                if Instant::now() > deadline {
                    command::run(&["kill", "-KILL", &pid.to_string()])?;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    /// The destinations that a neighbour has told bgpd of. Asked without a program in between, since it is urgent.
    pub fn told_by(&self, peer: Ipv4Addr, within: Duration) -> Result<BTreeSet<String>, String> {
        let deadline = Instant::now() + within;
        let mut stream = UnixStream::connect(self.folder.join("bgpd.vty")).map_err(|e| format!("bgpd: {e}"))?;
        let question = format!("show bgp ipv4 unicast neighbors {peer} routes json\0");
        stream.write_all(question.as_bytes()).map_err(|e| format!("bgpd: {e}"))?;
        prefixes(&read_answer(&mut stream, deadline).map_err(|e| format!("bgpd: {e}"))?)
    }

    /// Asks or tells the daemons something, as at FRR's own prompt.
    pub fn vtysh(&self, commands: &[&str]) -> Result<String, String> {
        let folder = self.folder.display().to_string();
        let mut args = vec!["vtysh", "--vty_socket", &folder];
        commands.iter().for_each(|c| args.extend(["-c", c]));
        command::run(&args)
    }
}

/// What a daemon's prompt answers: text, then three zeros and how it went.
fn read_answer(stream: &mut UnixStream, deadline: Instant) -> Result<String, String> {
    let (mut text, mut buffer) = (Vec::new(), [0; 16 << 10]);
    loop {
        let left =
            deadline.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()).ok_or("no answer in time")?;
        stream.set_read_timeout(Some(left)).map_err(|e| e.to_string())?;
        match stream.read(&mut buffer).map_err(|e| e.to_string())? {
            0 => return Err("the daemon has ended".into()),
            n => text.extend(&buffer[..n]),
        }
        if let [.., 0, 0, 0, status] = text[..] {
            text.truncate(text.len() - 4);
            let text = String::from_utf8_lossy(&text).into_owned();
            return if status == 0 { Ok(text) } else { Err(text) };
        }
    }
}

/// Addresses as `ip` writes them, from bgpd's list of what a neighbour has told.
fn prefixes(answer: &str) -> Result<BTreeSet<String>, String> {
    let answer: Value = serde_json::from_str(answer).map_err(|e| format!("bgpd: {e}"))?;
    let routes = answer["routes"].as_object().ok_or("bgpd: no routes")?;
    Ok(routes.keys().map(|to| to.strip_suffix("/32").unwrap_or(to).to_owned()).collect())
}

/// Numbers of the user and the group that FRR's daemons run as.
fn frr_user() -> Result<(u32, u32), String> {
    let text = std::fs::read_to_string("/etc/passwd").map_err(|e| format!("/etc/passwd: {e}"))?;
    let missing = || "there is no user 'frr': install FRR (Debian package frr)".to_owned();
    let line = text.lines().find(|l| l.starts_with("frr:")).ok_or_else(missing)?;
    let mut fields = line.split(':').skip(2).map(str::parse);
    match (fields.next(), fields.next()) {
        (Some(Ok(user)), Some(Ok(group))) => Ok((user, group)),
        _ => Err(missing()),
    }
}

/// The configuration of one daemon.
pub fn text(config: &Config, daemon: &str) -> String {
    let head = format!("frr defaults datacenter\nhostname {}\n", config.name);
    match daemon {
        "bfdd" => {
            let (interval, multiplier) = (config.bfd.interval_ms, config.bfd.multiplier);
            format!(
                "{head}bfd\n profile edge\n  transmit-interval {interval}\n  receive-interval {interval}\n  \
                 detect-multiplier {multiplier}\n exit\nexit\n"
            )
        }
        "bgpd" => head + &bgp(config),
        // With groups of the kernel, zebra 8.4 does not notice that the kernel has taken a link that lost its carrier out of a group, and
        // leaves the group without it when the link is back.
        "zebra" => head + "no zebra nexthop kernel enable\n",
        _ => head,
    }
}

/// Each uplink is a session of its own (eBGP), with BFD, for routes between loopbacks. EVPN's sessions lead from loopback to loopback
/// over whatever way there is, without BFD: that a link is dead is no news about addresses. A host tells of itself only, so that nobody
/// sends through it.
fn bgp(config: &Config) -> String {
    let Config { asn, loopback, .. } = config;
    let own = if config.role == Role::Host { "match as-path own\n " } else { "" };
    let mut text = format!(
        "bgp as-path access-list own permit ^$\n\
         route-map own permit 10\n \
          match as-path own\n\
         exit\n\
         route-map drain-out permit 10\n \
          {own}\
          set community graceful-shutdown additive\n \
          set as-path prepend {asn} {asn} {asn}\n\
         exit\n\
         route-map drain-in permit 10\n \
          set local-preference 0\n\
         exit\n\
         router bgp {asn}\n \
          bgp router-id {loopback}\n \
          no bgp ebgp-requires-policy\n \
          no bgp default ipv4-unicast\n \
          no bgp network import-check\n \
          bgp bestpath as-path multipath-relax\n \
          timers bgp 3 9\n \
          neighbor link peer-group\n \
          neighbor link bfd profile edge\n \
          neighbor link timers connect 1\n \
          neighbor link advertisement-interval 0\n \
          neighbor overlay peer-group\n \
          neighbor overlay ebgp-multihop\n \
          neighbor overlay update-source {loopback}\n \
          neighbor overlay timers 10 30\n \
          neighbor overlay timers connect 1\n \
          neighbor overlay advertisement-interval 0\n"
    );
    let mut line = |l: String| {
        text.push_str(&l);
        text.push('\n');
    };
    // Two uplinks may lead to one neighbour.
    let switches: BTreeMap<Ipv4Addr, u32> = config.uplinks.iter().map(|u| (u.peer_loopback, u.peer_asn)).collect();
    let links = config.uplinks.iter().map(|u| (u.peer, u.peer_asn, "link"));
    for (peer, asn, group) in links.chain(switches.into_iter().map(|(peer, asn)| (peer, asn, "overlay"))) {
        line(format!(" neighbor {peer} remote-as {asn}"));
        line(format!(" neighbor {peer} peer-group {group}"));
    }
    for (family, group) in [("ipv4 unicast", "link"), ("l2vpn evpn", "overlay")] {
        line(format!(" address-family {family}"));
        line(format!("  neighbor {group} activate"));
        if config.role == Role::Host {
            line(format!("  neighbor {group} route-map own out"));
        }
        match group {
            "link" => {
                line(format!("  network {loopback}/32"));
                line(format!("  maximum-paths {}", config.uplinks.len().min(64)));
            }
            _ if config.role == Role::Host => line("  advertise-all-vni".into()),
            _ => {}
        }
        line(" exit-address-family".into());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_neighbour_told_is_read() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let soon = || Instant::now() + Duration::from_secs(5);
        theirs.write_all(br#"{"routes":{"10.255.0.1/32":[{"valid":true}],"10.7.0.0/16":[{}]}}"#).unwrap();
        theirs.write_all(&[0, 0, 0, 0]).unwrap();
        let told = prefixes(&read_answer(&mut ours, soon()).unwrap()).unwrap();
        assert_eq!(told, ["10.255.0.1".to_owned(), "10.7.0.0/16".to_owned()].into());
        theirs.write_all(b"% No such neighbor\0\0\0\x01").unwrap();
        assert_eq!(read_answer(&mut ours, soon()), Err("% No such neighbor".into()));
        assert!(read_answer(&mut ours, Instant::now()).is_err());
        drop(theirs);
        assert!(read_answer(&mut ours, soon()).is_err());
    }

    #[test]
    fn one_at_a_time_starts_daemons() {
        let folder = tempfile::tempdir().unwrap();
        let frr = Frr { folder: folder.path().to_owned() };
        let first = frr.turn().unwrap();
        let other = std::thread::spawn(move || frr.turn().map(|_| Instant::now()));
        std::thread::sleep(Duration::from_millis(50));
        let released = Instant::now();
        drop(first);
        assert!(other.join().unwrap().unwrap() >= released);
    }
}
