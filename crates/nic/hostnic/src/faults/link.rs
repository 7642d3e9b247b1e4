//! The link of a device of the machine: its network interface goes down, for all that use it.
//!
//! The kernel is asked by netlink, which takes a process that may administer the network. No
//! interface is touched but one that is behind an RDMA device.

use crate::counters::{interface_of, SYSFS};
use std::fs;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use unbroken_verbs::{Error, Result};

/// Bytes of a netlink header, of what is said of an interface, and of both.
const HEADER_BYTES: usize = 16;
const LINK_BYTES: usize = 16;
const REQUEST_BYTES: usize = HEADER_BYTES + LINK_BYTES;
/// How long the kernel is waited for; it answers within the call.
static PATIENCE: libc::timeval = libc::timeval { tv_sec: 5, tv_usec: 0 };

/// The network interface behind a device. While its link is down some devices name it in one of
/// these places only.
fn interface_behind(device: &str) -> Option<String> {
    let folder = Path::new(SYSFS).join(device);
    let parent = || fs::read_to_string(folder.join("parent")).ok();
    let below = || {
        let mut names = fs::read_dir(folder.join("device/net")).ok()?;
        names.next()?.ok()?.file_name().into_string().ok()
    };
    let named = interface_of(device).or_else(parent).or_else(below)?;
    Some(named.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Whether the kernel has such a device.
pub(super) fn is_there(device: &str) -> bool {
    Path::new(SYSFS).join(device).exists()
}

/// The network interface of a device's link; an error that says what is missing.
pub fn interface_of_link(device: &str) -> Result<String> {
    interface_behind(device).ok_or_else(|| {
        let what = match is_there(device) {
            true => format!("the kernel names no network interface behind '{device}'"),
            false => format!("there is no RDMA device '{device}' (`ibv_devices` lists them)"),
        };
        Error::new(libc::ENODEV, what)
    })
}

/// Whether the interface has been set up.
pub(super) fn is_up(interface: &str) -> bool {
    let file = Path::new("/sys/class/net").join(interface).join("flags");
    let text = fs::read_to_string(file).unwrap_or_default();
    let flags = u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap_or(0);
    flags & libc::IFF_UP as u32 != 0
}

/// Sets the interface up or down, as `ip link set` does.
pub(super) fn set_up(interface: &str, up: bool) -> Result<()> {
    change(interface, up).map_err(|e| match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Error::new(
            libc::EPERM,
            format!(
                "setting the interface '{interface}' {} takes root; without root, 'nic NAME down' \
                 strikes programs that were started with --faults",
                if up { "up" } else { "down" }
            ),
        ),
        _ => Error::os(&format!("the interface '{interface}' cannot be changed"), &e),
    })
}

/// RTM_NEWLINK of one flag of an interface that there is.
fn request(index: u32, up: bool) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    let flag = libc::IFF_UP as u32;
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &(REQUEST_BYTES as u32).to_ne_bytes());
    put(4, &libc::RTM_NEWLINK.to_ne_bytes());
    put(6, &((libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16).to_ne_bytes());
    put(HEADER_BYTES + 4, &index.to_ne_bytes());
    put(HEADER_BYTES + 8, &if up { flag } else { 0 }.to_ne_bytes());
    put(HEADER_BYTES + 12, &flag.to_ne_bytes());
    bytes
}

/// The errno of an answer; 0 where it was done.
fn errno_of(answer: &[u8]) -> io::Result<i32> {
    let strange = || io::Error::other("the kernel's answer is not understood");
    let kind = answer.get(4..6).ok_or_else(strange)?;
    let code = answer.get(HEADER_BYTES..HEADER_BYTES + 4).ok_or_else(strange)?;
    if u16::from_ne_bytes([kind[0], kind[1]]) != libc::NLMSG_ERROR as u16 {
        return Err(strange());
    }
    Ok(i32::from_ne_bytes([code[0], code[1], code[2], code[3]]).saturating_neg())
}

fn checked(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn change(interface: &str, up: bool) -> io::Result<()> {
    let name = std::ffi::CString::new(interface)?;
    // SAFETY: a live C string.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
    checked(fd as isize)?;
    // SAFETY: `fd` was just made and is owned by nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain integers, for which zero is valid.
    let mut to: libc::sockaddr_nl = unsafe { zeroed() };
    to.nl_family = libc::AF_NETLINK as _;
    let (bytes, fd) = (request(index, up), socket.as_raw_fd());
    // SAFETY: live values of the lengths given.
    let sent = unsafe {
        let (option, size) = ((&raw const PATIENCE).cast(), size_of_val(&PATIENCE) as u32);
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, option, size);
        let size = size_of_val(&to) as u32;
        libc::sendto(fd, bytes.as_ptr().cast(), bytes.len(), 0, (&raw const to).cast(), size)
    };
    checked(sent)?;
    let mut answer = [0u8; 512];
    // SAFETY: a live buffer of the length given.
    let came = unsafe { libc::recv(fd, answer.as_mut_ptr().cast(), answer.len(), 0) };
    match errno_of(&answer[..checked(came)?])? {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_answers_is_read_and_garbage_is_not() {
        let mut answer = [0u8; 36];
        answer[4..6].copy_from_slice(&(libc::NLMSG_ERROR as u16).to_ne_bytes());
        assert_eq!(errno_of(&answer).unwrap(), 0);
        answer[16..20].copy_from_slice(&(-libc::EPERM).to_ne_bytes());
        assert_eq!(errno_of(&answer).unwrap(), libc::EPERM);
        for garbage in [&answer[..19], &[0xff; 36], &[]] {
            errno_of(garbage).unwrap_err();
        }
    }

    #[test]
    fn an_interface_is_found_by_its_device_alone() {
        for name in ["lo", "eth0", "no_such_device"] {
            let e = interface_of_link(name).unwrap_err().to_string();
            assert!(e.contains("there is no RDMA device"), "{e}");
        }
        assert!(is_up("lo") && !is_up("no_such_interface"));
        set_up("no_such_interface", false).unwrap_err();
    }
}
