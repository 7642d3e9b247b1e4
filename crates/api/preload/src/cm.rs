//! `/dev/infiniband/rdma_cm`: what librdmacm opens, writes commands to, and polls.
//!
//! The descriptor is one end of a pair of sockets ([`unbroken_rdmacm`]), so `poll`, `epoll`, `fcntl`,
//! `dup` and `close` are the kernel's own. Two functions of libc are ours: `write`, which carries
//! out commands, and `fstat`, which says that the descriptor is a character device. Programs that
//! have opened none pay one comparison.
#![cfg(target_arch = "x86_64")]

use crate::ffi::{guard, set_errno};
use crate::loader::{real, Behind, REAL};
use std::arch::global_asm;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::mem::transmute;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use unbroken_rdmacm::{Memory, Outcome};

/// What librdmacm opens for each event channel.
const DEVICE: &CStr = c"/dev/infiniband/rdma_cm";
/// The header of a command, and the shortest body.
const LEAST_BYTES: usize = 8 + 4;
/// Commands that there are.
const COMMANDS: u32 = 25;
/// Major number of misc devices, and a minor of those that are given out as they are asked for:
/// where the kernel has no such device, nobody compares.
const MISC_MAJOR: u32 = 10;
const ANY_MINOR: u32 = 122;

/// The functions behind ours are not known yet.
const EARLY: u32 = 1;
/// A channel was opened.
const OPENED: u32 = 2;
/// 0: `write` and `fstat` are libc's.
static STATE: AtomicU32 = AtomicU32::new(EARLY);

/// Descriptors that were given out. One whose bit is not set may still be a copy.
static GIVEN: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// The functions behind ours are known: what is not a channel's goes straight to them.
pub fn functions_are_known() {
    STATE.fetch_and(!EARLY, Ordering::Relaxed);
}

/// Whether a path is the device's.
///
/// # Safety
/// `path` is a C string.
pub unsafe fn is_device(path: *const c_char) -> bool {
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(path) == DEVICE }
}

/// Opens a channel; -1 and errno where there is none.
pub fn open(flags: c_int) -> isize {
    guard(-1, || match unbroken_rdmacm::open() {
        Ok(fd) => {
            let fd = fd.into_raw_fd();
            if flags & libc::O_CLOEXEC == 0 {
                // SAFETY: a descriptor of ours.
                unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
            }
            if flags & libc::O_NONBLOCK != 0 {
                // SAFETY: as above.
                unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
            }
            if let Some((word, bit)) = given(fd) {
                word.fetch_or(bit, Ordering::Release);
            }
            STATE.fetch_or(OPENED, Ordering::Release);
            fd as isize
        }
        Err(errno) => {
            set_errno(errno);
            -1
        }
    })
}

fn given(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((GIVEN.get(fd / 64)?, 1 << (fd % 64)))
}

/// Defines `$name`: libc's, unless [`STATE`] says that it may be ours.
macro_rules! unless_opened {
    ($($name:literal, $ours:path, $real:expr;)*) => { $(
        global_asm!(
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            ".cfi_startproc",
            "endbr64",
            "cmp dword ptr [rip + {state}], 0",
            "jne {ours}",
            "jmp qword ptr [rip + {real} + {offset}]",
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            state = sym STATE,
            ours = sym $ours,
            real = sym REAL,
            offset = const $real as usize * 8,
        );
    )* };
}

unless_opened! {
    "write", maybe_write, Behind::Write;
    "fstat", maybe_fstat, Behind::Fstat;
    "fstat64", maybe_fstat64, Behind::Fstat64;
    "__fxstat", maybe_fxstat, Behind::Fxstat;
    "__fxstat64", maybe_fxstat64, Behind::Fxstat64;
}

/// Whether a write may be a command: the descriptor was given out, or what is written looks like
/// one.
///
/// # Safety
/// `bytes` has `len` bytes, as write(2) wants it.
unsafe fn may_be_command(fd: c_int, bytes: *const c_void, len: usize) -> bool {
    if STATE.load(Ordering::Acquire) & OPENED == 0 || bytes.is_null() {
        return false;
    }
    if given(fd).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0) {
        return true;
    }
    if len < LEAST_BYTES {
        return false;
    }
    // SAFETY: promised by the caller; at least eight bytes.
    let header = unsafe { bytes.cast::<u64>().read_unaligned() };
    let (number, body) = (header as u32, (header >> 32) as u16);
    number < COMMANDS && usize::from(body) + 8 == len
}

/// The program's memory.
struct Own;

impl Memory for Own {
    fn read(&self, at: u64, len: usize) -> Option<Vec<u8>> {
        if at == 0 && len > 0 {
            return None;
        }
        let mut bytes = vec![0u8; len];
        // SAFETY: the program says that so many bytes lie there, as it would to the kernel; not
        // NULL, and no memory of ours.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, bytes.as_mut_ptr(), len) };
        Some(bytes)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> bool {
        if at == 0 {
            return false;
        }
        // SAFETY: the program says that so many bytes may be written there, as it would to the
        // kernel; not NULL, and no memory of ours.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
        true
    }
}

extern "C-unwind" {
    // A cancellation point, as write(2) is: a thread that waits for an event can be cancelled.
    #[link_name = "recv"]
    fn receive(fd: c_int, to: *mut c_void, len: usize, flags: c_int) -> isize;
}

extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const CANCEL_DISABLE: c_int = 1;

/// libc's, or a command. A thread that is cancelled while it waits here is unwound, so nothing that
/// would have to be dropped is kept meanwhile.
unsafe extern "C-unwind" fn maybe_write(fd: c_int, bytes: *const c_void, len: usize) -> isize {
    type Write = unsafe extern "C-unwind" fn(c_int, *const c_void, usize) -> isize;
    // SAFETY: the caller's promises to write.
    if unsafe { may_be_command(fd, bytes, len) } {
        loop {
            // SAFETY: as above.
            match unsafe { uncancelled(fd, bytes, len) } {
                Some(Ok(Outcome::Done)) => return len as isize,
                Some(Ok(Outcome::Wait)) => {}
                Some(Err(errno)) => {
                    set_errno(errno);
                    return -1;
                }
                None => break,
            }
            let mut byte = 0u8;
            // SAFETY: one byte of ours. EAGAIN where the descriptor does not block, EINTR where a
            // signal handler ran that does not ask for the wait to go on.
            match unsafe { receive(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK) } {
                1.. => {}
                // Our end is gone, which happens in a forked child alone.
                0 => {
                    set_errno(libc::EIO);
                    return -1;
                }
                _ => return -1,
            }
        }
    }
    // SAFETY: the address is of libc's write; the arguments are the caller's.
    unsafe { transmute::<usize, Write>(real(Behind::Write))(fd, bytes, len) }
}

/// A command. The thread is not cancelled in the midst of it.
///
/// # Safety
/// As write(2).
unsafe fn uncancelled(
    fd: c_int,
    bytes: *const c_void,
    len: usize,
) -> Option<Result<Outcome, unbroken_rdmacm::Errno>> {
    let mut before = 0;
    // SAFETY: a number of ours.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    let done = guard(Some(Err(libc::EIO)), || {
        // SAFETY: promised by the caller; the descriptor is open as long as the program keeps it.
        let (fd, bytes) = unsafe {
            (BorrowedFd::borrow_raw(fd), std::slice::from_raw_parts(bytes.cast::<u8>(), len))
        };
        let done = unbroken_rdmacm::command(fd, bytes, &Own);
        if let (None, Some((word, bit))) = (&done, given(fd.as_raw_fd())) {
            // It was closed, and something else has its number.
            word.fetch_and(!bit, Ordering::AcqRel);
        }
        done
    });
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, &mut before) };
    done
}

/// Has a channel look like the device.
///
/// # Safety
/// `to` is what fstat has filled for `fd`.
unsafe fn as_device(fd: c_int, to: *mut libc::stat) {
    if STATE.load(Ordering::Acquire) & OPENED == 0 {
        return;
    }
    guard((), || {
        // SAFETY: fstat has just succeeded on it.
        if unbroken_rdmacm::is_channel(unsafe { BorrowedFd::borrow_raw(fd) }) {
            // SAFETY: promised by the caller.
            unsafe {
                (*to).st_mode = (*to).st_mode & !libc::S_IFMT | libc::S_IFCHR;
                (*to).st_rdev = device_number();
            }
        }
    });
}

/// That of the kernel's own device, if there is one: librdmacm has asked for it.
fn device_number() -> libc::dev_t {
    let told = std::fs::read_to_string("/sys/class/misc/rdma_cm/dev").ok();
    let numbers = told.as_deref().and_then(|text| text.trim().split_once(':'));
    let parse = |(major, minor): (&str, &str)| Some((major.parse().ok()?, minor.parse().ok()?));
    let (major, minor) = numbers.and_then(parse).unwrap_or((MISC_MAJOR, ANY_MINOR));
    libc::makedev(major, minor)
}

/// Defines functions like fstat.
macro_rules! like_fstat {
    ($($name:ident($($arg:ident: $type:ty),*), $behind:expr;)*) => { $(
        unsafe extern "C" fn $name($($arg: $type,)* fd: c_int, to: *mut libc::stat) -> c_int {
            type Real = unsafe extern "C" fn($($type,)* c_int, *mut libc::stat) -> c_int;
            // SAFETY: the address is of libc's function; the arguments are the caller's.
            let done = unsafe { transmute::<usize, Real>(real($behind))($($arg,)* fd, to) };
            if done == 0 {
                // SAFETY: it has succeeded.
                unsafe { as_device(fd, to) };
            }
            done
        }
    )* };
}

like_fstat! {
    maybe_fstat(), Behind::Fstat;
    maybe_fstat64(), Behind::Fstat64;
    maybe_fxstat(version: c_int), Behind::Fxstat;
    maybe_fxstat64(version: c_int), Behind::Fxstat64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_no_command_goes_to_libc() {
        let command = |number: u32, body: u16, len: usize| {
            let mut bytes = vec![0u8; len];
            bytes[..4].copy_from_slice(&number.to_ne_bytes());
            bytes[4..6].copy_from_slice(&body.to_ne_bytes());
            // SAFETY: the bytes live through the call.
            unsafe { may_be_command(40_000, bytes.as_ptr().cast(), len) }
        };
        assert!(!command(10, 4, 12), "nobody has opened a channel");
        STATE.fetch_or(OPENED, Ordering::Relaxed);
        assert!(command(10, 4, 12));
        assert!(!command(10, 5, 12) && !command(25, 4, 12) && !command(10, 0, 8));
        STATE.fetch_and(!OPENED, Ordering::Relaxed);
    }
}
