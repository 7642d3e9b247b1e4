//! Sockets of the folder, for its user alone.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{fchmod, Mode};
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use rustix::net::{
    bind, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType,
};

/// How many clients may wait.
const BACKLOG: i32 = 128;

/// Listens at a path that is for this user alone from the beginning, whatever the umask.
pub fn listen_own(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The kernel gives the file the mode that the socket has.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// A name for a socket of a folder that fits `sockaddr_un` (108 bytes) however long the folder's
/// path is. Valid while the file lives.
fn short_path(folder: &Path, name: &str) -> io::Result<(File, PathBuf)> {
    let folder = File::open(folder)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()));
    Ok((folder, path))
}

/// Makes a socket in a folder, only for this user, that waits for nobody. The folder's path may
/// have any length.
pub fn bind_in(folder: &Path, name: &str) -> io::Result<UnixListener> {
    let (_folder, short) = short_path(folder, name)?;
    let listener = listen_own(&short)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to a socket in a folder, waiting no longer than `timeout` where a stopped process lets
/// others queue. The folder's path may have any length.
pub fn connect_in(folder: &Path, name: &str, timeout: Duration) -> io::Result<UnixStream> {
    let (_folder, short) = short_path(folder, name)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(&short)?)?;
    Ok(UnixStream::from(socket))
}
