//! What a forked child does with its parent's NICs: nothing, and nothing that could hurt them.
//!
//! The child has copies of the parent's sockets, which would keep the parent's slots taken after its death, and locks that a thread
//! of the parent may have held at the fork. So it closes the sockets at once, touches no lock, and every verb answers EIO.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::Once;
use unbroken_verbs::Error;

/// Sockets that a child closes: five for each port of 64 NICs, and as many again for those that are closed and opened meanwhile.
const SOCKETS: usize = 1280;

static ABANDONED: AtomicBool = AtomicBool::new(false);
static FDS: [AtomicI32; SOCKETS] = [const { AtomicI32::new(-1) }; SOCKETS];
static INSTALL: Once = Once::new();

/// Whether this process is a forked child of the one that opened the NICs.
#[inline]
pub fn abandoned() -> bool {
    ABANDONED.load(Ordering::Relaxed)
}

/// What verbs answer in a child.
#[cold]
pub(crate) fn error() -> Error {
    Error::device_gone("this process was forked from the one that opened the NIC; open it after the fork")
}

/// Installs the handler, once.
pub(crate) fn install() {
    INSTALL.call_once(|| {
        // SAFETY: the handler uses atomics and close(2) only, which a forked child may.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

unsafe extern "C" fn in_child() {
    for slot in &FDS {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            ABANDONED.store(true, Ordering::Relaxed);
            // SAFETY: the descriptor is this process's copy; its owner is never used or dropped in a child (see `abandoned`).
            unsafe { libc::close(fd) };
        }
    }
}

/// Names a socket that a child closes.
pub(crate) fn register(fd: RawFd) {
    for slot in &FDS {
        if slot.compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// Takes back [`register`], before the socket is closed.
pub(crate) fn unregister(fd: RawFd) {
    for slot in &FDS {
        if slot.compare_exchange(fd, -1, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}
