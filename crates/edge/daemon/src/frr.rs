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

use std::collections::BTreeSet;
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
use crate::config::Config;
use crate::error::{EdgeError, Result};
use crate::folder::{own_user, Folder, Ids, OWN};
use crate::process::Running;

mod text;
pub(crate) mod watch;

pub use text::text;

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
/// How a daemon's refusal begins.
const REFUSED: &str = "% ";
/// What comes before the number and the text of a line that was not taken.
const ON_LINE: &str = "on config line ";
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

    /// Writes the configuration. Gives whether it is another one than before. What a daemon would
    /// not take of it is an error: FRR itself leaves such a line out and goes on.
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
        if changed {
            NAMES.iter().try_for_each(|name| self.try_configuration(name))?;
        }
        Ok(changed)
    }

    /// Has a daemon read its configuration, and do nothing else.
    fn try_configuration(&self, name: &str) -> Result<()> {
        let mut command = self.start_command(name)?;
        command.retain(|word| word != "-d");
        command.push("-C".into());
        let (out, err) = command::run_both(None, &command)?;
        refused(name, &(out + &err))
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
            "env --default-signal=TERM,INT,HUP setpriv --reuid frr --regid frr --init-groups \
             --reset-env --inh-caps {CAPABILITIES} --ambient-caps {CAPABILITIES} {DAEMONS}/{name} \
             -d -f {folder}/{name}.conf -i {folder}/{name}.pid -z {sockets}/zserv.api --vty_socket \
             {sockets} -P 0 --log file:{folder}/{name}.log --log-level notifications"
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
        let answer = command::run_as(Some(frr_user()?), &args)?;
        // vtysh goes on, and ends well, when a daemon has refused a command.
        match answer.lines().find(|line| line.starts_with(REFUSED)) {
            Some(line) => Err(EdgeError::Frr(format!("{}: {line}", commands.join("; ")))),
            None => Ok(answer),
        }
    }
}

/// What a daemon says of lines of its configuration that it has not taken.
fn refused(name: &str, said: &str) -> Result<()> {
    let line = |line: &str| Some(line.split_once(ON_LINE)?.1.to_owned());
    let why: Vec<&str> = said.lines().filter(|line| line.starts_with(REFUSED)).collect();
    let lines: Vec<String> = said.lines().filter_map(line).collect();
    if lines.is_empty() && why.is_empty() {
        return Ok(());
    }
    let (lines, why) = (lines.join("; "), why.join("; "));
    let why = if why.is_empty() { "no such command".to_owned() } else { why };
    Err(EdgeError::Frr(format!("FRR's {name} does not take line {lines} of {name}.conf: {why}")))
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
    fn a_line_that_a_daemon_does_not_take_is_told() {
        let said = "% Configure the peer-group first\n2026/11/27 19:28:29 BGP: [EC 100663304] \
                    Command returned Warning Config Failed on config line 3:  neighbor 10.0.0.9 \
                    peer-group x\n2026/11/27 ZEBRA: [NNACN-54BDA] Disabling MPLS support (no \
                    kernel support)\n";
        let error = refused("bgpd", said).unwrap_err().to_string();
        assert_eq!(
            error,
            "FRR's bgpd does not take line 3:  neighbor 10.0.0.9 peer-group x of bgpd.conf: \
             % Configure the peer-group first"
        );
        let said = "ZEBRA: [SHWNK] No such command on config line 7: nonsense";
        assert!(refused("zebra", said).unwrap_err().to_string().contains("line 7: nonsense"));
        refused("zebra", "ZEBRA: Disabling MPLS support (no kernel support)\n").unwrap();
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
