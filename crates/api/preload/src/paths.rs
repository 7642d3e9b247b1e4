//! Paths that programs read to learn of RDMA devices, answered from a tree of our own (see
//! [`crate::sysfs`]).
//!
//! UCX wants `/dev/infiniband/uverbs0` to be a device, Open MPI looks below
//! `/sys/class/infiniband`, others follow its links. So the functions of libc that take a path look
//! at its beginning: one of the few prefixes below is led into the tree, everything else goes on to
//! libc as it came. They are trampolines that change one argument and jump, so flags, modes and
//! return addresses stay. `realpath` and `canonicalize_file_name` give the path as the program
//! knows it, without the tree's place.
//!
//! Not seen: system calls made without libc, libc's calls of itself (`fts`, `glob`), and relative
//! paths from a working folder that was entered by `chdir`.
#![cfg(target_arch = "x86_64")]

use crate::cm;
use crate::ffi::guard;
use crate::loader::{real, Behind, Loaded, REAL};
use crate::sysfs;
use std::arch::global_asm;
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, CStr};
use std::ptr::null_mut;

/// What begins so is answered from the tree, if a slash or nothing follows.
const PREFIXES: [&[u8]; 3] =
    [b"/sys/class/infiniband", b"/sys/class/infiniband_verbs", b"/dev/infiniband"];
/// The same, whatever follows: PCI devices of a domain that no machine has, see [`crate::sysfs`].
const PCI_PREFIXES: [&[u8]; 3] =
    [b"/sys/devices/pcifab0:", b"/sys/bus/pci/devices/fab0:", b"/sys/class/pci_bus/fab0:"];
const PATH_MAX: usize = libc::PATH_MAX as usize;

thread_local! {
    /// The path in the tree, from when it is made until libc has read it.
    static LED: UnsafeCell<[u8; PATH_MAX]> = const { UnsafeCell::new([0; PATH_MAX]) };
}

/// Defines `$name`, whose path is in `$reg`: leads the path and jumps to libc's.
macro_rules! lead {
    ($($name:literal, $reg:literal, $real:expr;)*) => { $(
        global_asm!(
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            ".cfi_startproc",
            "endbr64",
            "push rdi",
            "push rsi",
            "push rdx",
            "push rcx",
            "push r8",
            "push r9",
            "push rax",
            ".cfi_adjust_cfa_offset 56",
            concat!("mov rdi, ", $reg),
            "call {lead}",
            "mov r11, rax",
            "pop rax",
            "pop r9",
            "pop r8",
            "pop rcx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            ".cfi_adjust_cfa_offset -56",
            concat!("mov ", $reg, ", r11"),
            "jmp qword ptr [rip + {real} + {offset}]",
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            lead = sym lead,
            real = sym REAL,
            offset = const $real as usize * 8,
        );
    )* };
}

/// Defines `$name`, whose path is in `$path` and whose flags are in `$flags`: opens what is answered
/// here itself, or leads the path and jumps to libc's.
macro_rules! lead_open {
    ($($name:literal, $path:literal, $flags:literal, $real:expr;)*) => { $(
        global_asm!(
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            ".cfi_startproc",
            "endbr64",
            "push rdi",
            "push rsi",
            "push rdx",
            "push rcx",
            "push rax",
            ".cfi_adjust_cfa_offset 40",
            concat!("mov rax, ", $flags),
            concat!("mov rdi, ", $path),
            "mov rsi, rax",
            "call {lead}",
            "mov r11, rax",
            "mov r10, rdx",
            "pop rax",
            "pop rcx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            ".cfi_adjust_cfa_offset -40",
            "test r11, r11",
            "jz 2f",
            concat!("mov ", $path, ", r11"),
            "jmp qword ptr [rip + {real} + {offset}]",
            "2: mov rax, r10",
            "ret",
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            lead = sym open_or_lead,
            real = sym REAL,
            offset = const $real as usize * 8,
        );
    )* };
}

lead_open! {
    "open", "rdi", "rsi", Behind::Open;
    "open64", "rdi", "rsi", Behind::Open64;
    "__open_2", "rdi", "rsi", Behind::Open2;
    "__open64_2", "rdi", "rsi", Behind::Open642;
    "openat", "rsi", "rdx", Behind::Openat;
    "openat64", "rsi", "rdx", Behind::Openat64;
    "__openat_2", "rsi", "rdx", Behind::Openat2;
    "__openat64_2", "rsi", "rdx", Behind::Openat642;
}

lead! {
    "fopen", "rdi", Behind::Fopen;
    "fopen64", "rdi", Behind::Fopen64;
    "stat", "rdi", Behind::Stat;
    "stat64", "rdi", Behind::Stat64;
    "lstat", "rdi", Behind::Lstat;
    "lstat64", "rdi", Behind::Lstat64;
    "__xstat", "rsi", Behind::Xstat;
    "__xstat64", "rsi", Behind::Xstat64;
    "__lxstat", "rsi", Behind::Lxstat;
    "__lxstat64", "rsi", Behind::Lxstat64;
    "fstatat", "rsi", Behind::Fstatat;
    "fstatat64", "rsi", Behind::Fstatat64;
    "statx", "rsi", Behind::Statx;
    "access", "rdi", Behind::Access;
    "faccessat", "rsi", Behind::Faccessat;
    "opendir", "rdi", Behind::Opendir;
    "scandir", "rdi", Behind::Scandir;
    "scandir64", "rdi", Behind::Scandir64;
    "readlink", "rdi", Behind::Readlink;
    "__readlink_chk", "rdi", Behind::ReadlinkChk;
    "readlinkat", "rsi", Behind::Readlinkat;
    "getxattr", "rdi", Behind::Getxattr;
    "lgetxattr", "rdi", Behind::Lgetxattr;
    "listxattr", "rdi", Behind::Listxattr;
    "llistxattr", "rdi", Behind::Llistxattr;
}

/// What became of an `open`.
#[repr(C)]
struct Opened {
    /// The path to go on with; NULL: it is done.
    path: *const c_char,
    /// What it gave then.
    fd: isize,
}

/// Opens the connection manager's device; leads any other path.
unsafe extern "C" fn open_or_lead(path: *const c_char, flags: usize) -> Opened {
    // SAFETY: the caller's string, or NULL.
    let led = unsafe { lead(path) };
    // SAFETY: as above; what is led elsewhere is not NULL.
    if std::ptr::eq(led, path) || !unsafe { cm::is_device(path) } {
        return Opened { path: led, fd: -1 };
    }
    Opened { path: null_mut(), fd: cm::open(flags as c_int) }
}

/// The path to go on with: `path` itself, or where it leads to.
unsafe extern "C" fn lead(path: *const c_char) -> *const c_char {
    Loaded::get();
    // SAFETY: the caller's string, or NULL.
    if !unsafe { is_ours(path) } {
        return path;
    }
    guard(path, || {
        // No tree: the NICs are devices of the machine, or there are none.
        sysfs::root().map_or(path, |root| {
            // SAFETY: as above.
            LED.with(|led| unsafe { join(led.get(), root, path) })
        })
    })
}

/// Whether the path is one that the tree answers. Looks at no byte behind the first that differs.
///
/// # Safety
/// `path` is NULL or a C string.
#[inline]
unsafe fn is_ours(path: *const c_char) -> bool {
    // SAFETY: promised by the caller.
    if path.is_null() || unsafe { *path } != b'/' as c_char {
        return false;
    }
    let path: *const u8 = path.cast();
    // SAFETY: a byte is read only if those before it were as in the prefix, thus not the end.
    let begins =
        |prefix: &[u8]| prefix.iter().enumerate().all(|(i, b)| unsafe { *path.add(i) } == *b);
    // SAFETY: as above.
    let whole =
        |prefix: &[u8]| begins(prefix) && matches!(unsafe { *path.add(prefix.len()) }, 0 | b'/');
    PREFIXES.iter().any(|prefix| whole(prefix)) || PCI_PREFIXES.iter().any(|prefix| begins(prefix))
}

/// Writes `root` and `path` behind each other. A path that does not fit stays as it is: libc says
/// that it does not exist.
///
/// # Safety
/// `path` is a C string; nobody else uses the buffer.
unsafe fn join(to: *mut [u8; PATH_MAX], root: &[u8], path: *const c_char) -> *const c_char {
    // SAFETY: promised by the caller.
    let (to, name) = unsafe { (&mut *to, CStr::from_ptr(path).to_bytes()) };
    let len = root.len() + name.len();
    if len >= PATH_MAX {
        return path;
    }
    to[..root.len()].copy_from_slice(root);
    to[root.len()..len].copy_from_slice(name);
    to[len] = 0;
    to.as_ptr().cast()
}

type RealpathFn = unsafe extern "C" fn(*const c_char, *mut c_char) -> *mut c_char;

/// `realpath` for a path in the tree, or libc's for all others.
///
/// # Safety
/// As realpath: `path` is NULL or a C string, `resolved` is NULL or has PATH_MAX bytes.
unsafe fn resolve(path: *const c_char, resolved: *mut c_char) -> *mut c_char {
    // SAFETY: the address is of libc's realpath, or of a function that returns NULL.
    let realpath: RealpathFn = unsafe { std::mem::transmute(real(Behind::Realpath)) };
    // SAFETY: promised by the caller.
    let led = unsafe { lead(path) };
    // SAFETY: as the caller asked, with its path or one of ours.
    let found = unsafe { realpath(led, resolved) };
    if std::ptr::eq(led, path) || found.is_null() {
        return found;
    }
    // What lies in the tree gets its name back; what a link of the tree leads out to (/dev/null)
    // has the right one.
    guard(found, || {
        if let Some(root) = sysfs::root() {
            // SAFETY: realpath gave a C string in memory of the caller's, or of malloc, that is
            // ours to write.
            unsafe {
                let len = CStr::from_ptr(found).to_bytes().len();
                let bytes = std::slice::from_raw_parts(found.cast::<u8>(), len);
                if bytes.starts_with(root) && bytes.get(root.len()) == Some(&b'/') {
                    std::ptr::copy(found.add(root.len()), found, len - root.len() + 1);
                }
            }
        }
        found
    })
}

#[no_mangle]
unsafe extern "C" fn realpath(path: *const c_char, resolved: *mut c_char) -> *mut c_char {
    // SAFETY: as the caller promised.
    unsafe { resolve(path, resolved) }
}

#[no_mangle]
unsafe extern "C" fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    // SAFETY: as the caller promised.
    unsafe { resolve(path, null_mut()) }
}

/// What a program that was compiled with checks of its buffers calls.
#[no_mangle]
unsafe extern "C" fn __realpath_chk(
    path: *const c_char,
    resolved: *mut c_char,
    len: usize,
) -> *mut c_char {
    type Chk = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> *mut c_char;
    // SAFETY: the caller's string, or NULL.
    if len >= PATH_MAX && unsafe { is_ours(path) } {
        // SAFETY: as the caller promised.
        return unsafe { resolve(path, resolved) };
    }
    // SAFETY: the address is of libc's function, or of one that returns NULL.
    let chk: Chk = unsafe { std::mem::transmute(real(Behind::RealpathChk)) };
    // SAFETY: as the caller promised.
    unsafe { chk(path, resolved, len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_names_lead_into_the_tree() {
        for ours in [
            c"/sys/class/infiniband",
            c"/sys/class/infiniband/unb0/ports",
            c"/dev/infiniband/uverbs0",
            c"/sys/devices/pcifab0:00/x",
        ] {
            // SAFETY: a C string.
            assert!(unsafe { is_ours(ours.as_ptr()) });
        }
        for other in [
            c"",
            c"/",
            c"/sys",
            c"/sys/class/infinibandx",
            c"/dev/infinibanD",
            c"sys/class/infiniband",
        ] {
            // SAFETY: a C string.
            assert!(!unsafe { is_ours(other.as_ptr()) });
        }
        // SAFETY: NULL is allowed.
        assert!(!unsafe { is_ours(std::ptr::null()) });
    }

    #[test]
    fn other_paths_reach_libc() {
        assert!(std::fs::metadata("/proc/self/status").is_ok());
        assert_eq!(std::fs::canonicalize("/proc/../").unwrap().to_str(), Some("/"));
        assert!(std::fs::read_to_string("/proc/self/no-such-file").is_err());
    }
}
