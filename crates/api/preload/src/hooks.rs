//! The second way in: programs that open libibverbs themselves.
//!
//! NCCL and others call `dlopen("libibverbs.so.1")` and take each function with `dlsym` or
//! `dlvsym(handle, "ibv_…", "IBVERBS_1.1")`. A preloaded definition does not help there, since the
//! look-up starts at the handle. So `dlsym` and `dlvsym` are ours, too: names of verbs are answered
//! with our own definitions, whatever the version, and all else goes to the real function.
//!
//! Two things need care:
//! - The real `dlsym` looks at its return address to know who asks (`RTLD_NEXT`, namespaces). So
//!   ours are trampolines in assembly that *jump* to the real one: the stack is then as if we had
//!   not been there.
//! - The real `dlsym` cannot be found by asking `dlsym`: see [`crate::loader`].
//!
//! `dlopen` of libibverbs gives a handle of ours where libibverbs is not installed.
//!
//! Other processors than x86-64 have the first way in only (linked programs), until there is one to
//! test the trampolines on.
#![cfg(target_arch = "x86_64")]

use crate::ffi::guard;
use crate::loader::{real, Behind, Loaded, REAL};
use std::arch::global_asm;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::null_mut;

/// Defines `$name`: asks `$pick` with the same arguments; returns its answer, or jumps to `$real`
/// if that is NULL.
macro_rules! trampoline {
    ($name:literal, $pick:path, $real:expr) => {
        global_asm!(
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            ".cfi_startproc",
            "endbr64",
            "push rdi",
            "push rsi",
            "push rdx",
            ".cfi_adjust_cfa_offset 24",
            "call {pick}",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            ".cfi_adjust_cfa_offset -24",
            "test rax, rax",
            "jnz 2f",
            "jmp qword ptr [rip + {real} + {offset}]",
            "2: ret",
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            pick = sym $pick,
            real = sym REAL,
            offset = const $real as usize * 8,
        );
    };
}

trampoline!("dlsym", pick_symbol, Behind::Dlsym);
trampoline!("dlvsym", pick_symbol, Behind::Dlvsym);
trampoline!("dlopen", pick_library, Behind::Dlopen);

/// Whether a function of this name is ours to answer for.
fn is_verb(name: &CStr) -> bool {
    let n = name.to_bytes();
    n.starts_with(b"ibv_")
        || n.starts_with(b"_ibv_")
        || n == b"mult_to_ibv_rate"
        || n == b"mbps_to_ibv_rate"
}

/// Our definition of a verb; NULL for anything else, with the way to the real function laid.
unsafe extern "C" fn pick_symbol(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    guard(null_mut(), || {
        let loaded = Loaded::get();
        if name.is_null() || handle == libc::RTLD_NEXT {
            return null_mut();
        }
        // SAFETY: the caller's string.
        let name = unsafe { CStr::from_ptr(name) };
        // The first calls come from sanitizers that are not ready for a thread-local variable yet;
        // none of them asks for a verb.
        if is_verb(name) && !unbroken_nics::inside::is_inside() {
            loaded.own(name).unwrap_or(null_mut())
        } else {
            null_mut()
        }
    })
}

/// A handle for libibverbs: its own where it is installed, ours where not. NULL for any other
/// library, with the way laid.
unsafe extern "C" fn pick_library(name: *const c_char, flags: c_int) -> *mut c_void {
    guard(null_mut(), || {
        let loaded = Loaded::get();
        if name.is_null() {
            return null_mut();
        }
        // SAFETY: the caller's string.
        let bytes = unsafe { CStr::from_ptr(name) }.to_bytes();
        let base = bytes.rsplit(|b| *b == b'/').next().unwrap_or_default();
        if !base.starts_with(b"libibverbs.so") {
            return null_mut();
        }
        type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
        // SAFETY: the address is of the real dlopen, or of a function that returns NULL.
        let real: Dlopen = unsafe { std::mem::transmute(real(Behind::Dlopen)) };
        // SAFETY: as the caller asked.
        let theirs = unsafe { real(name, flags) };
        if !theirs.is_null() || loaded.own_path.is_null() {
            return theirs;
        }
        // SAFETY: the path is the loader's own record of us, which lives as long as we do.
        unsafe { real(loaded.own_path, libc::RTLD_NOW) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_verbs_are_known() {
        for verb in [c"ibv_post_recv", c"_ibv_query_gid_ex", c"mbps_to_ibv_rate"] {
            assert!(is_verb(verb));
        }
        for other in [c"dlsym", c"mlx5dv_query_device", c"xibv_", c"rdma_create_id", c""] {
            assert!(!is_verb(other));
        }
    }

    #[test]
    fn the_real_functions_are_found_behind_us() {
        // SAFETY: the trampoline's own contract; everything that is not a verb reaches the real
        // dlsym.
        let strlen = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"strlen".as_ptr()) };
        assert!(!strlen.is_null());
        // SAFETY: as above.
        let none = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"no_such_function_here".as_ptr()) };
        assert!(none.is_null());
    }
}
