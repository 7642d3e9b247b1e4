//! Which ports of a host are taken, and by which of its processes: as those of TCP.
//!
//! ```text
//! cm/ports/HOST/tcp-7174/any@PID-ID        bound to all addresses by that process
//!                        any4@PID-ID       to those of IPv4 (`any6`: of IPv6)
//!                        127.77.1.3@PID-ID bound to one; the file says `listens` once it does
//! cm/processes/PID-ID                      where the process's CM is reached: `NIC GID QPN`, a line each
//! ```
//!
//! A process that is gone has left what its files say. Who lives is told by [`Presence`], which also
//! gives the turn in which ports are taken.

use crate::abi::Result;
use crate::channel::errno;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use unbroken_cm::{Peer, PortSpace};
use unbroken_runtime::{make_folder, open_found, open_own, Presence, ProcessName, Runtime};

/// What a file says when its owner listens.
const LISTENS: &str = "listens\n";
/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// Addresses of a process that are read.
const MAX_ADDRESSES: usize = 64;
/// Files of one port that are looked at.
const MAX_OWNERS: usize = 1024;

/// Ports, and the processes that have them.
pub(crate) struct Ports {
    root: PathBuf,
    host: String,
    presence: Presence,
}

/// A port that this process has, until it is dropped.
pub(crate) struct Taken {
    path: PathBuf,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The addresses that a port is taken for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scope {
    /// All of both families.
    All,
    /// All of IPv4.
    V4,
    /// All of IPv6.
    V6,
    One(IpAddr),
}

impl Scope {
    fn has(self, ip: IpAddr) -> bool {
        match self {
            Scope::All => true,
            Scope::V4 => ip.is_ipv4(),
            Scope::V6 => ip.is_ipv6(),
            Scope::One(own) => own == ip,
        }
    }

    /// Whether two scopes of a port exclude each other.
    fn clashes(self, other: Scope) -> bool {
        match (self, other) {
            (Scope::One(ip), scope) | (scope, Scope::One(ip)) => scope.has(ip),
            (Scope::V4, Scope::V6) | (Scope::V6, Scope::V4) => false,
            _ => true,
        }
    }

    fn parse(text: &str) -> Option<Scope> {
        Some(match text {
            "any" => Scope::All,
            "any4" => Scope::V4,
            "any6" => Scope::V6,
            one => Scope::One(one.parse().ok()?),
        })
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::All => f.write_str("any"),
            Scope::V4 => f.write_str("any4"),
            Scope::V6 => f.write_str("any6"),
            Scope::One(ip) => ip.fmt(f),
        }
    }
}

/// Who has a port.
struct Owner {
    scope: Scope,
    process: ProcessName,
    path: PathBuf,
}

fn space_name(space: PortSpace) -> &'static str {
    match space {
        PortSpace::Ipoib => "ipoib",
        PortSpace::Tcp => "tcp",
        PortSpace::Udp => "udp",
        PortSpace::Ib => "ib",
    }
}

impl Ports {
    /// Those of a host.
    pub(crate) fn of(runtime: &Runtime, host: &str) -> io::Result<Ports> {
        let root = runtime.path().join("cm");
        for folder in ["", "ports", "processes", &format!("ports/{host}")] {
            make_folder(&root.join(folder)).map_err(io::Error::other)?;
        }
        let presence = Presence::join(runtime)?;
        Ok(Ports { root, host: host.to_owned(), presence })
    }

    fn folder(&self, host: &str, space: PortSpace, port: u16) -> PathBuf {
        self.root.join(format!("ports/{host}/{}-{port}", space_name(space)))
    }

    /// Those of a port that live. Files of the dead are removed.
    fn owners(&self, folder: &Path) -> Vec<Owner> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(MAX_OWNERS);
        let owner = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let (scope, process) = name.split_once('@')?;
            let scope = Scope::parse(scope)?;
            let process: ProcessName = process.parse().ok()?;
            let path = entry.path();
            if !self.presence.lives(process.id) {
                let _ = fs::remove_file(&path);
                return None;
            }
            Some(Owner { scope, process, path })
        };
        entries.filter_map(owner).collect()
    }

    /// Takes a port. EADDRINUSE: another has it.
    pub(crate) fn take(&self, space: PortSpace, port: u16, scope: Scope) -> Result<Taken> {
        let _turn = self.presence.turn().map_err(|e| errno(&e))?;
        let folder = self.folder(&self.host, space, port);
        if self.owners(&folder).iter().any(|owner| owner.scope.clashes(scope)) {
            return Err(libc::EADDRINUSE);
        }
        make_folder(&folder).map_err(|_| libc::EIO)?;
        let path = folder.join(format!("{scope}@{}", self.presence.name()));
        let made = open_own(&path, OpenOptions::new().write(true).create(true).truncate(true));
        made.map(|_| Taken { path }).map_err(|e| errno(&e))
    }

    /// Whether a process of that host has the port, for any address.
    pub(crate) fn is_taken(&self, host: &str, space: PortSpace, port: u16) -> bool {
        !self.owners(&self.folder(host, space, port)).is_empty()
    }

    /// The owner of a port listens from now on.
    pub(crate) fn listen(&self, taken: &Taken) -> Result<()> {
        fs::write(&taken.path, LISTENS).map_err(|e| errno(&e))
    }

    /// The process that listens at a port of a host, for this address.
    pub(crate) fn listener(
        &self,
        host: &str,
        space: PortSpace,
        port: u16,
        address: IpAddr,
    ) -> Option<ProcessName> {
        let owners = self.owners(&self.folder(host, space, port));
        let listens = |owner: &&Owner| read(&owner.path).is_ok_and(|text| text == LISTENS);
        let of = |one: bool| {
            let has = |owner: &&Owner| {
                owner.scope.has(address) && matches!(owner.scope, Scope::One(_)) == one
            };
            owners.iter().filter(has).find(listens)
        };
        of(true).or_else(|| of(false)).map(|owner| owner.process)
    }

    /// Says where this process's CM is reached, by NIC.
    pub(crate) fn announce(&self, addresses: &[Option<Peer>]) -> io::Result<()> {
        let line = |(nic, peer): (usize, &Option<Peer>)| {
            let Peer { gid, qpn } = (*peer)?;
            Some(format!("{nic} {:032x} {qpn}\n", u128::from_be_bytes(gid)))
        };
        let text: String = addresses.iter().enumerate().filter_map(line).collect();
        let path = self.process_path(self.presence.name());
        let fresh = path.with_extension("tmp");
        let mut file =
            open_own(&fresh, OpenOptions::new().write(true).create(true).truncate(true))?;
        file.write_all(text.as_bytes())?;
        fs::rename(&fresh, &path)
    }

    fn process_path(&self, process: ProcessName) -> PathBuf {
        self.root.join(format!("processes/{process}"))
    }

    /// Where a process's CM is reached: by which of its NICs, and at which address.
    pub(crate) fn addresses(&self, process: ProcessName) -> Vec<(usize, Peer)> {
        let text = read(&self.process_path(process)).unwrap_or_default();
        let parse = |line: &str| {
            let mut words = line.split(' ');
            let nic = words.next()?.parse().ok()?;
            let gid = u128::from_str_radix(words.next()?, 16).ok()?.to_be_bytes();
            Some((nic, Peer { gid, qpn: words.next()?.parse().ok()? }))
        };
        text.lines().filter_map(parse).take(MAX_ADDRESSES).collect()
    }

    /// The process whose CM has this address.
    pub(crate) fn process_of(&self, peer: Peer) -> Option<ProcessName> {
        let entries = fs::read_dir(self.root.join("processes")).ok()?.flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok()?.parse().ok());
        names.into_iter().find(|name: &ProcessName| {
            self.addresses(*name).iter().any(|(_, address)| *address == peer)
        })
    }

    /// Whether a process lives, as far as is known.
    pub(crate) fn lives(&self, process: ProcessName) -> bool {
        self.presence.lives(process.id)
    }

    /// Removes what processes have left that are gone.
    pub(crate) fn sweep(&self) {
        let entries = fs::read_dir(self.root.join("processes")).into_iter().flatten().flatten();
        for entry in entries.take(MAX_OWNERS) {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let name = name.trim_end_matches(".tmp").parse::<ProcessName>();
            if name.is_ok_and(|name| !self.lives(name)) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// This process takes part no more.
    pub(crate) fn leave(&self) {
        let _ = fs::remove_file(self.process_path(self.presence.name()));
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open_found(path)?.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: PortSpace = PortSpace::Tcp;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_port_is_taken_once() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(folder.path()).unwrap();
        let ports = Ports::of(&runtime, "a").unwrap();
        let one = ports.take(TCP, 7, Scope::One(ip("127.0.0.1"))).unwrap();
        assert_eq!(ports.take(TCP, 7, Scope::One(ip("127.0.0.1"))).err(), Some(libc::EADDRINUSE));
        assert_eq!(ports.take(TCP, 7, Scope::All).err(), Some(libc::EADDRINUSE));
        assert!(ports.take(TCP, 7, Scope::One(ip("127.0.0.2"))).is_ok());
        assert!(ports.take(PortSpace::Udp, 7, Scope::All).is_ok());
        assert_eq!(ports.listener("a", TCP, 7, ip("127.0.0.1")), None, "bound alone");
        ports.listen(&one).unwrap();
        let name = ports.presence.name();
        assert_eq!(ports.listener("a", TCP, 7, ip("127.0.0.1")), Some(name));
        assert_eq!(ports.listener("a", TCP, 7, ip("127.0.0.9")), None);
        drop(one);
        let all = ports.take(TCP, 7, Scope::All).unwrap();
        ports.listen(&all).unwrap();
        assert_eq!(ports.listener("a", TCP, 7, ip("127.0.0.9")), Some(name));
        assert_eq!(ports.listener("b", TCP, 7, ip("127.0.0.9")), None);
    }

    #[test]
    fn the_families_have_ports_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(folder.path()).unwrap();
        let ports = Ports::of(&runtime, "a").unwrap();
        let four = ports.take(TCP, 7, Scope::V4).unwrap();
        assert_eq!(ports.take(TCP, 7, Scope::All).err(), Some(libc::EADDRINUSE));
        assert_eq!(ports.take(TCP, 7, Scope::One(ip("127.5.0.1"))).err(), Some(libc::EADDRINUSE));
        let six = ports.take(TCP, 7, Scope::V6).unwrap();
        ports.listen(&six).unwrap();
        let name = ports.presence.name();
        assert_eq!(ports.listener("a", TCP, 7, ip("127.5.0.1")), None);
        assert_eq!(ports.listener("a", TCP, 7, ip("fd00::1")), Some(name));
        drop(four);
    }

    #[test]
    fn what_a_dead_process_has_left_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(folder.path()).unwrap();
        let ports = Ports::of(&runtime, "a").unwrap();
        let dead = ProcessName { pid: 1, id: 5 };
        let port = ports.folder("a", TCP, 7);
        fs::create_dir_all(&port).unwrap();
        fs::write(port.join(format!("any@{dead}")), LISTENS).unwrap();
        fs::write(ports.process_path(dead), "0 1 1\n").unwrap();
        assert_eq!(ports.listener("a", TCP, 7, ip("127.0.0.1")), None);
        assert!(ports.take(TCP, 7, Scope::All).is_ok());
        ports.sweep();
        assert!(!ports.process_path(dead).exists());
    }

    #[test]
    fn a_process_says_where_it_is_reached() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(folder.path()).unwrap();
        let ports = Ports::of(&runtime, "a").unwrap();
        let peer = Peer { gid: [7; 16], qpn: 9 };
        ports.announce(&[None, Some(peer)]).unwrap();
        let name = ports.presence.name();
        assert_eq!(ports.addresses(name), [(1, peer)]);
        assert_eq!(ports.process_of(peer), Some(name));
        assert_eq!(ports.process_of(Peer { qpn: 8, ..peer }), None);
        fs::write(ports.process_path(name), "x y\n\n1 zz 3\n2").unwrap();
        assert_eq!(ports.addresses(name), []);
        ports.leave();
        assert_eq!(ports.process_of(peer), None);
    }
}
