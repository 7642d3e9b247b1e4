//! Whether the kernel wants a device back.
//!
//! A driver that can be parted from its users (mlx5) tells them of the device's end by an event.
//! One that cannot (rxe, siw) tells nobody, and whoever removes the device (`rdma link delete`)
//! waits until the last user has closed it. A program that goes on over its other devices would
//! keep it for as long as it runs. The kernel says by a uevent that the device's character file is
//! gone, before it begins to wait.

use crate::context::Context;
use crate::library::text;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// Where the kernel shows the character files of RDMA devices.
const FILES: &str = "/sys/class/infiniband_verbs";
/// The group of uevents that the kernel sends.
const KERNEL: u32 = 1;
/// Uevents that are read in a row; more raise the descriptor again.
const MOST: usize = 1024;

/// What tells of the removal of a device.
pub(crate) struct Removal {
    socket: OwnedFd,
    file: PathBuf,
}

impl Removal {
    /// That of a device; none where the kernel shows no file of it, or tells no uevents.
    pub(crate) fn of(context: &Context) -> Option<Removal> {
        // SAFETY: an open context, whose device lives as long; an array inside.
        let name = text(unsafe { &(*(*context.raw()).device).dev_name });
        let file = Path::new(FILES).join(name);
        let socket = uevents().filter(|_| file.exists())?;
        Some(Removal { socket, file })
    }

    /// Whether it has been removed. To be asked when the descriptor is readable.
    pub(crate) fn is_gone(&self) -> bool {
        let mut bytes = [0u8; 64];
        for _ in 0..MOST {
            // SAFETY: a live buffer and its size; the descriptor does not block. What a uevent says
            // is not looked at: that there was one is enough.
            let read = unsafe {
                let (to, len) = (bytes.as_mut_ptr().cast(), bytes.len());
                libc::recv(self.socket.as_raw_fd(), to, len, libc::MSG_DONTWAIT)
            };
            if read < 0 && std::io::Error::last_os_error().raw_os_error() != Some(libc::ENOBUFS) {
                break;
            }
        }
        !self.file.exists()
    }
}

impl AsRawFd for Removal {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

fn uevents() -> Option<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: integers; the result is checked.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_KOBJECT_UEVENT);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
    }?;
    // SAFETY: plain integers.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    (address.nl_family, address.nl_groups) = (libc::AF_NETLINK as u16, KERNEL);
    // SAFETY: a live local and its size.
    let bound = unsafe {
        let size = size_of_val(&address) as libc::socklen_t;
        libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size)
    };
    (bound == 0).then_some(socket)
}
