//! The program's actions for SIGSEGV and SIGBUS.
//!
//! A softnic has a handler for both, in front of the program's (`unbroken_softnic`, `traps.rs`):
//! memory that was registered may be gone when a packet comes for it. So that a handler which the
//! program installs later does not take its place, the functions that install one are ours. For
//! other signals, and before memory was registered, they call the C library's.
#![cfg(target_arch = "x86_64")]

use crate::loader::{real, Behind};
use std::ffi::c_int;
use std::mem::{transmute, zeroed};
use unbroken_nics::program_action;

type Handler = usize;

#[no_mangle]
unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the caller's structures.
    if let Some(code) = unsafe { program_action(signal, new, old) } {
        return code;
    }
    type Real = unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
    // SAFETY: the address is of the real sigaction.
    unsafe { transmute::<usize, Real>(real(Behind::Sigaction))(signal, new, old) }
}

/// `signal` and its kin, which differ in the flags that they set.
///
/// # Safety
/// `behind` has the signature of `signal`.
unsafe fn install(signal: c_int, handler: Handler, flags: c_int, behind: Behind) -> Handler {
    // SAFETY: plain data, for which zero is valid.
    let (mut new, mut old): (libc::sigaction, libc::sigaction) = unsafe { (zeroed(), zeroed()) };
    (new.sa_sigaction, new.sa_flags) = (handler, flags);
    // SAFETY: live structures.
    if unsafe { program_action(signal, &raw const new, &raw mut old) }.is_some() {
        return old.sa_sigaction;
    }
    // SAFETY: promised by the caller.
    unsafe {
        transmute::<usize, unsafe extern "C" fn(c_int, Handler) -> Handler>(real(behind))(
            signal, handler,
        )
    }
}

/// Defines functions like `signal`.
macro_rules! like_signal {
    ($($name:ident, $flags:expr, $behind:expr;)*) => { $(
        #[no_mangle]
        unsafe extern "C" fn $name(signal: c_int, handler: Handler) -> Handler {
            // SAFETY: the function behind has this signature.
            unsafe { install(signal, handler, $flags, $behind) }
        }
    )* };
}

like_signal! {
    signal, libc::SA_RESTART, Behind::Signal;
    bsd_signal, libc::SA_RESTART, Behind::BsdSignal;
    ssignal, libc::SA_RESTART, Behind::Ssignal;
    sysv_signal, libc::SA_RESETHAND | libc::SA_NODEFER, Behind::SysvSignal;
    __sysv_signal, libc::SA_RESETHAND | libc::SA_NODEFER, Behind::SysvSignal2;
}
