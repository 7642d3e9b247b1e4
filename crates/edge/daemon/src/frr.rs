//! FRR: its configuration for EVPN and BFD, and an instance of its daemons for this host alone.
//!
//! The instance has its own files and sockets under the host's folder, so a FRR that the system
//! runs is not touched; but only one bgpd can listen at port 179 in a network namespace.
//!
//! | in the folder `frr` | whose | for |
//! | --- | --- | --- |
//! | the folder itself | root's; the group frr may pass through | nobody but root makes, renames or removes files here |
//! | `lock` | root's | one at a time starts and ends daemons |
//! | `<daemon>.conf` | root's, readable for the group frr | |
//! | `<daemon>.pid`, `<daemon>.log` | frr's files | root reads neither: the lock on a pid file, as the kernel tells it, says which process is the daemon |
//! | `run/` | frr's folder, 0700 | sockets; what root connects to there is opened without following a link and looked at |
//!
//! The daemons are started as the user frr with the capabilities that they need. FRR started as
//! root gives folders to frr by names that frr can make links of (`/var/tmp/frr`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{chmod, flock, fstat, FileType, FlockOperation, Mode, OFlags};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;

use crate::command;
use crate::config::{Config, Role};
use crate::error::{EdgeError, Result};
use crate::folder::{own_user, Folder, Ids, OWN};
use crate::process::Running;

/// Where Debian has FRR's daemons.
pub const DAEMONS: &str = "/usr/lib/frr";
/// In the order in which they are started.
pub const NAMES: [&str; 3] = ["zebra", "bfdd", "bgpd"];
const START: Duration = Duration::from_secs(10);
/// Longer than all daemons need to start.
const TURN: Duration = Duration::from_secs(40);
/// bfdd sends every few milliseconds: other work must not delay it, or a link is taken for dead.
const BFDD_PRIORITY: &str = "20";
/// What the daemons need of root: each keeps its part of it and drops the rest when it has set its
/// groups.
const CAPABILITIES: &str = "-all,+net_bind_service,+net_admin,+net_raw,+sys_admin,+setgid";
/// An answer that is longer is none.
const LONGEST_ANSWER_BYTES: usize = 16 << 20;

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

    fn sockets(&self) -> PathBuf {
        self.folder.join("run")
    }

    /// The process of a daemon, if it runs.
    fn running(folder: &Folder, name: &str) -> Option<Running> {
        let file = folder.file(&format!("{name}.pid"), OFlags::RDONLY).ok()?;
        let running = Running::holder(&file)?;
        let program = Path::new(DAEMONS).join(name);
        (running.program()? == program.canonicalize().unwrap_or(program)).then_some(running)
    }

    /// Writes the configuration. Gives whether it is another one than before.
    pub fn configure(&self, config: &Config) -> Result<bool> {
        let ids = frr_user()?;
        let readers = Ids { user: own_user(), group: ids.group };
        let state = self.folder.parent().unwrap_or(Path::new("/"));
        let folder = Folder::open(state)?.within("frr", 0o710)?;
        folder.give(Some(readers), 0o710)?;
        folder.for_other("run", ids)?;
        let mut changed = false;
        for name in NAMES {
            let file = format!("{name}.conf");
            let text = text(config, name);
            if folder.read(&file).ok().flatten().as_deref() != Some(&text) {
                changed = true;
                folder.replace_for(&file, &text, Some(readers), 0o640)?;
            }
            for kind in ["pid", "log"] {
                folder.file_for_other(&format!("{name}.{kind}"), ids)?;
            }
        }
        Ok(changed)
    }

    /// Waits until nobody else starts or ends daemons; nobody does while the file is open. Our
    /// daemon and `unbroken edge up` may both find one dead, and a second that is started fails.
    fn turn(folder: &Folder) -> Result<File> {
        let path = folder.path().join("lock").display().to_string();
        let file =
            folder.file("lock", OFlags::WRONLY | OFlags::CREATE).map_err(EdgeError::at(&path))?;
        let deadline = Instant::now() + TURN;
        while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if Instant::now() > deadline {
                return Err(EdgeError::Refused(format!(
                    "{path}: held by another for {} s ({error})",
                    TURN.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(file)
    }

    /// Starts the daemons that do not run; gives their names.
    pub fn start(&self) -> Result<Vec<&'static str>> {
        let folder = Folder::open(&self.folder)?;
        let _turn = Frr::turn(&folder)?;
        let mut started = Vec::new();
        for name in NAMES {
            if Frr::running(&folder, name).is_some() {
                continue;
            }
            command::run(&self.start_command(name)?)?;
            let deadline = Instant::now() + START;
            while Frr::running(&folder, name).is_none() {
                if Instant::now() > deadline {
                    return Err(EdgeError::Frr(format!(
                        "{name} does not run {} s after its start; see {}/{name}.log",
                        START.as_secs(),
                        self.folder.display()
                    )));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            self.close_sockets(name)?;
            if name == "bfdd" {
                Frr::prefer_bfdd(&folder);
            }
            started.push(name);
        }
        Ok(started)
    }

    /// Our daemon blocks the signals that end it, and what it starts must not.
    fn start_command(&self, name: &str) -> Result<Vec<String>> {
        let (folder, sockets) = (self.folder.display(), self.sockets());
        let sockets = sockets.display();
        let mut args = format!(
            "env --default-signal=TERM,INT setpriv --reuid frr --regid frr --init-groups --reset-env --inh-caps {CAPABILITIES} \
             --ambient-caps {CAPABILITIES} {DAEMONS}/{name} -d -f {folder}/{name}.conf -i {folder}/{name}.pid -z {sockets}/zserv.api \
             --vty_socket {sockets} -P 0 --log file:{folder}/{name}.log --log-level notifications"
        );
        match name {
            "zebra" => args += " -s 90000000",
            "bfdd" => write!(args, " --bfdctl {sockets}/bfdd.sock").map_err(EdgeError::at(name))?,
            _ => {}
        }
        Ok(command::words(&args))
    }

    /// FRR makes some of its sockets for everybody.
    fn close_sockets(&self, daemon: &str) -> Result<()> {
        let mut names = vec![format!("{daemon}.vty")];
        names.extend(match daemon {
            "zebra" => Some("zserv.api".to_owned()),
            "bfdd" => Some("bfdd.sock".to_owned()),
            _ => None,
        });
        for name in names {
            let path = self.sockets().join(&name);
            let error = EdgeError::at(path.display());
            let (socket, _) = self.socket(&name).map_err(&error)?;
            chmod(by_descriptor(&socket), Mode::from_raw_mode(OWN)).map_err(|e| error(e.into()))?;
        }
        Ok(())
    }

    /// A socket of frr's and nothing else, and its owner.
    fn socket(&self, name: &str) -> io::Result<(OwnedFd, u32)> {
        let folder = Folder::foreign(&self.sockets()).map_err(io::Error::other)?;
        let folder = folder.ok_or(io::ErrorKind::NotFound)?;
        let user = folder.owner().map_err(io::Error::other)?;
        let socket = folder.look(name)?;
        let stat = fstat(&socket)?;
        match FileType::from_raw_mode(stat.st_mode) == FileType::Socket && stat.st_uid == user {
            true => Ok((socket, user)),
            false => Err(io::Error::other("it is no socket of FRR's")),
        }
    }

    /// A connection to a daemon, which does not block. One that lets others queue is not waited
    /// for.
    fn connect(&self, name: &str) -> io::Result<UnixStream> {
        let (socket, user) = self.socket(name)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&stream, &SocketAddrUnix::new(by_descriptor(&socket))?)?;
        match socket_peercred(&stream)?.uid.as_raw() == user {
            true => Ok(stream.into()),
            false => Err(io::Error::other("another user than FRR's listens there")),
        }
    }

    /// A connection to bfdd, which tells of its sessions; it does not block.
    pub fn bfdd(&self) -> io::Result<UnixStream> {
        self.connect("bfdd.sock")
    }

    /// Gives bfdd a real-time priority. Where that is not allowed, short intervals are less
    /// reliable, and that is all.
    fn prefer_bfdd(folder: &Folder) {
        if let Some(bfdd) = Frr::running(folder, "bfdd") {
            let _ =
                command::run(&["chrt", "-a", "-f", "-p", BFDD_PRIORITY, &bfdd.pid().to_string()]);
        }
    }

    /// Ends the daemons, bgpd first, so that neighbours are told; zebra takes its routes with it.
    pub fn stop(&self) -> Result<()> {
        // That of an older version was frr's, and is stopped all the same.
        let Some(folder) = Folder::foreign(&self.folder)? else { return Ok(()) };
        let _turn = (folder.owner()? == own_user()).then(|| Frr::turn(&folder)).transpose()?;
        for name in NAMES.iter().rev() {
            if let Some(daemon) = Frr::running(&folder, name) {
                daemon.end(START).map_err(EdgeError::at(&name))?;
            }
        }
        Ok(())
    }

    /// The destinations that a neighbour has told bgpd of. Asked without a program in between,
    /// since it is urgent.
    pub fn told_by(&self, peer: Ipv4Addr, within: Duration) -> Result<BTreeSet<String>> {
        let deadline = Instant::now() + within;
        let error = EdgeError::at("bgpd");
        let mut stream = self.connect("bgpd.vty").map_err(&error)?;
        stream.set_nonblocking(false).map_err(&error)?;
        stream.set_write_timeout(Some(within)).map_err(&error)?;
        let question = format!("show bgp ipv4 unicast neighbors {peer} routes json\0");
        stream.write_all(question.as_bytes()).map_err(&error)?;
        prefixes(&read_answer(&mut stream, deadline).map_err(EdgeError::at("bgpd"))?)
    }

    /// Asks or tells the daemons something, as at FRR's own prompt, and as FRR's user: the sockets
    /// lie in a folder of that user's.
    pub fn vtysh(&self, commands: &[&str]) -> Result<String> {
        let sockets = self.sockets().display().to_string();
        let mut args = vec!["vtysh", "--vty_socket", &sockets];
        commands.iter().for_each(|c| args.extend(["-c", c]));
        command::run_as(Some(frr_user()?), &args)
    }
}

/// A path that leads to what a descriptor is of, and nowhere else.
fn by_descriptor(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// What a daemon's prompt answers: text, then three zeros and how it went.
fn read_answer(stream: &mut UnixStream, deadline: Instant) -> io::Result<String> {
    let (mut text, mut buffer) = (Vec::new(), [0; 16 << 10]);
    loop {
        let left = deadline
            .checked_duration_since(Instant::now())
            .filter(|d| !d.is_zero())
            .ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))?;
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer)? {
            0 => return Err(io::Error::other("the daemon has ended")),
            n => text.extend(&buffer[..n]),
        }
        if text.len() > LONGEST_ANSWER_BYTES {
            return Err(io::Error::other("the answer is too long"));
        }
        if let [.., 0, 0, 0, status] = text[..] {
            text.truncate(text.len() - 4);
            let text = String::from_utf8_lossy(&text).into_owned();
            return if status == 0 { Ok(text) } else { Err(io::Error::other(text)) };
        }
    }
}

/// Addresses as `ip` writes them, from bgpd's list of what a neighbour has told.
fn prefixes(answer: &str) -> Result<BTreeSet<String>> {
    let answer: Value = serde_json::from_str(answer).map_err(EdgeError::at("bgpd"))?;
    let routes =
        answer["routes"].as_object().ok_or_else(|| EdgeError::Frr("bgpd: no routes".into()))?;
    Ok(routes.keys().map(|to| to.strip_suffix("/32").unwrap_or(to).to_owned()).collect())
}

/// The user and the group that FRR's daemons run as.
pub(crate) fn frr_user() -> Result<Ids> {
    let text = std::fs::read_to_string("/etc/passwd").map_err(EdgeError::at("/etc/passwd"))?;
    let missing =
        || EdgeError::Refused("there is no user 'frr': install FRR (Debian package frr)".into());
    let line = text.lines().find(|l| l.starts_with("frr:")).ok_or_else(missing)?;
    let mut fields = line.split(':').skip(2).map(str::parse);
    match (fields.next(), fields.next()) {
        (Some(Ok(user)), Some(Ok(group))) => Ok(Ids { user, group }),
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
        // With groups of the kernel, zebra 8.4 does not notice that the kernel has taken a link
        // that lost its carrier out of a group, and leaves the group without it when the link is
        // back.
        "zebra" => head + "no zebra nexthop kernel enable\n",
        _ => head,
    }
}

/// Each uplink is a session of its own (eBGP), with BFD, for routes between loopbacks. EVPN's
/// sessions lead from loopback to loopback over whatever way there is, without BFD: that a link is
/// dead is no news about addresses. A host tells of itself only, so that nobody sends through it.
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
    let switches: BTreeMap<Ipv4Addr, u32> =
        config.uplinks.iter().map(|u| (u.peer_loopback, u.peer_asn)).collect();
    let links = config.uplinks.iter().map(|u| (u.peer, u.peer_asn, "link"));
    for (peer, asn, group) in
        links.chain(switches.into_iter().map(|(peer, asn)| (peer, asn, "overlay")))
    {
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
        theirs
            .write_all(br#"{"routes":{"10.255.0.1/32":[{"valid":true}],"10.7.0.0/16":[{}]}}"#)
            .unwrap();
        theirs.write_all(&[0, 0, 0, 0]).unwrap();
        let told = prefixes(&read_answer(&mut ours, soon()).unwrap()).unwrap();
        assert_eq!(told, ["10.255.0.1".to_owned(), "10.7.0.0/16".to_owned()].into());
        theirs.write_all(b"% No such neighbor\0\0\0\x01").unwrap();
        let refused = read_answer(&mut ours, soon()).unwrap_err();
        assert_eq!(refused.to_string(), "% No such neighbor");
        assert!(read_answer(&mut ours, Instant::now()).is_err());
        drop(theirs);
        assert!(read_answer(&mut ours, soon()).is_err());
    }

    #[test]
    fn one_at_a_time_starts_daemons() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::open(home.path()).unwrap();
        let first = Frr::turn(&folder).unwrap();
        let other = std::thread::spawn(move || Frr::turn(&folder).map(|_| Instant::now()));
        std::thread::sleep(Duration::from_millis(50));
        let released = Instant::now();
        drop(first);
        assert!(other.join().unwrap().unwrap() >= released);
    }
}
