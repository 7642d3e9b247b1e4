//! Interfaces of the kernel: which one has an address, and whether its link is up.
//!
//! In interface mode a NIC is the address of a real interface, so a pulled cable or `ip link set
//! down` is a port that goes down, and a deleted interface is a NIC that is gone.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// What is known of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) mtu: usize,
}

/// A change of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LinkChange {
    /// The link is up (or not) now.
    Up(u32, bool),
    /// The interface no longer exists.
    Deleted(u32),
    /// Changes were lost: ask for all states again.
    Overrun,
}

fn is_up(flags: u32) -> bool {
    let need = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
    flags & need == need
}

/// Calls `each` with name, flags, address and netmask of every address of the machine's interfaces.
fn for_each_address(
    mut each: impl FnMut(&str, u32, Option<IpAddr>, Option<IpAddr>),
) -> io::Result<()> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a live local; on success it owns a list that is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut at = list;
    while !at.is_null() {
        // SAFETY: `at` is an entry of the list, whose name is a C string and whose addresses are
        // null or of their family's size.
        let (entry, name) = unsafe { (&*at, CStr::from_ptr((*at).ifa_name)) };
        // SAFETY: as above.
        let (addr, mask) = unsafe { (ip_of(entry.ifa_addr), ip_of(entry.ifa_netmask)) };
        at = entry.ifa_next;
        // libunbroken.so shows programs emulated NICs as interfaces, and marks them so.
        if addr.is_some() && !entry.ifa_data.is_null() {
            continue;
        }
        each(&name.to_string_lossy(), entry.ifa_flags, addr, mask);
    }
    // SAFETY: the list came from getifaddrs and is not used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(())
}

/// # Safety
/// `addr` is null or points to a socket address of its family's size.
unsafe fn ip_of(addr: *const libc::sockaddr) -> Option<IpAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: see above; the family is checked before the address is read as such.
    unsafe {
        match i32::from((*addr).sa_family) {
            libc::AF_INET => {
                let a = addr.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let a = addr.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(a.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

/// The interface that answers for an address: it has it, or it is the loopback interface and the
/// address is of its network.
pub(crate) fn interface_of(ip: IpAddr) -> io::Result<Interface> {
    let mut found: Option<String> = None;
    let mut known = Vec::new();
    for_each_address(|name, flags, addr, mask| {
        let Some(addr) = addr else { return };
        if !addr.is_loopback() {
            known.push(format!("{addr} ({name})"));
        }
        let same_net = match (addr, mask, ip) {
            (IpAddr::V4(a), Some(IpAddr::V4(m)), IpAddr::V4(ip)) => {
                u32::from(a) & u32::from(m) == u32::from(ip) & u32::from(m)
            }
            _ => false,
        };
        if addr == ip || (flags & libc::IFF_LOOPBACK as u32 != 0 && same_net) {
            found.get_or_insert_with(|| name.to_owned());
        }
    })?;
    let name = found.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::AddrNotAvailable,
            format!("no interface has the address {ip}; there are {}", known.join(", ")),
        )
    })?;
    let c_name = std::ffi::CString::new(name.clone())?;
    // SAFETY: a live C string.
    let index = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
    let mtu = std::fs::read_to_string(format!("/sys/class/net/{name}/mtu"))
        .ok()
        .and_then(|s| s.trim().parse().ok());
    Ok(Interface { index, name, mtu: mtu.unwrap_or(1500) })
}

/// Whether the link of each interface is up, by index.
pub(crate) fn link_states() -> io::Result<HashMap<u32, bool>> {
    let mut states = HashMap::new();
    for_each_address(|name, flags, _, _| {
        if let Ok(c_name) = std::ffi::CString::new(name) {
            // SAFETY: a live C string.
            let index = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
            if index != 0 {
                states.insert(index, is_up(flags));
            }
        }
    })?;
    Ok(states)
}

/// A subscription to link changes.
pub(crate) struct LinkWatch(OwnedFd);

impl LinkWatch {
    pub(crate) fn new() -> io::Result<LinkWatch> {
        // SAFETY: no pointers.
        let fd = unsafe {
            libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_ROUTE)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just made and is owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain integers, for which zero is valid.
        let mut addr: libc::sockaddr_nl = unsafe { zeroed() };
        addr.nl_family = libc::AF_NETLINK as _;
        addr.nl_groups = libc::RTMGRP_LINK as _;
        // SAFETY: a live address of the length given.
        let rc = unsafe {
            libc::bind(
                fd.as_raw_fd(),
                (&raw const addr).cast(),
                size_of::<libc::sockaddr_nl>() as _,
            )
        };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(LinkWatch(fd))
    }

    /// Waits for changes, at most `timeout_ms`; gives those that came.
    pub(crate) fn wait(&self, timeout_ms: i32) -> Vec<LinkChange> {
        let mut pfd = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one live entry.
        if unsafe { libc::poll(&raw mut pfd, 1, timeout_ms) } <= 0 {
            return Vec::new();
        }
        let mut buf = [0u8; 16_384];
        // SAFETY: a live buffer of the length given.
        let n = unsafe {
            libc::recv(self.0.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), libc::MSG_DONTWAIT)
        };
        match usize::try_from(n) {
            Ok(n) => parse_changes(&buf[..n]),
            Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::ENOBUFS) => {
                vec![LinkChange::Overrun]
            }
            Err(_) => Vec::new(),
        }
    }
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Reads RTM_NEWLINK and RTM_DELLINK messages: a 16-byte nlmsghdr, then an ifinfomsg whose index is
/// at 4 and flags at 8.
fn parse_changes(mut b: &[u8]) -> Vec<LinkChange> {
    const HEADER: usize = 16;
    let mut out = Vec::new();
    while b.len() >= HEADER {
        let (len, kind) = (u32_at(b, 0) as usize, u16_at(b, 4));
        if len < HEADER || len > b.len() {
            break;
        }
        let body = &b[HEADER..len];
        // A bridge speaks of its members in messages of its own family: those say nothing about the
        // interface itself.
        if body.len() >= 16 && i32::from(body[0]) == libc::AF_UNSPEC {
            let (index, flags) = (u32_at(body, 4), u32_at(body, 8));
            match kind {
                libc::RTM_NEWLINK => out.push(LinkChange::Up(index, is_up(flags))),
                libc::RTM_DELLINK => out.push(LinkChange::Deleted(index)),
                _ => {}
            }
        }
        b = &b[len.next_multiple_of(4).min(b.len())..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_answers_for_its_network() {
        let i = interface_of("127.77.1.0".parse().unwrap()).unwrap();
        assert_eq!(i.name, "lo");
        assert!(i.mtu >= 1500);
        assert_eq!(link_states().unwrap().get(&i.index), Some(&true));
    }

    #[test]
    fn unknown_address_names_the_known_ones() {
        let e = interface_of("203.0.113.77".parse().unwrap()).unwrap_err();
        assert!(e.to_string().contains("203.0.113.77"), "{e}");
    }

    #[test]
    fn changes_are_read_and_garbage_is_not() {
        let mut m = vec![0u8; 32];
        m[0..4].copy_from_slice(&32u32.to_ne_bytes());
        m[4..6].copy_from_slice(&libc::RTM_NEWLINK.to_ne_bytes());
        m[20..24].copy_from_slice(&7u32.to_ne_bytes());
        m[24..28].copy_from_slice(&((libc::IFF_UP | libc::IFF_RUNNING) as u32).to_ne_bytes());
        assert_eq!(parse_changes(&m), [LinkChange::Up(7, true)]);
        m[24..28].copy_from_slice(&0u32.to_ne_bytes());
        assert_eq!(parse_changes(&m), [LinkChange::Up(7, false)]);
        m[0..4].copy_from_slice(&400u32.to_ne_bytes());
        assert_eq!(parse_changes(&m), []);
        assert_eq!(parse_changes(&[0xff; 64]), []);
    }
}
