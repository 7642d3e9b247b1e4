//! Verbs that this device does not have: each says so with EOPNOTSUPP.

use crate::ffi::set_errno;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use unbroken_verbs::abi::ibv_ece;

fn absent() -> c_int {
    set_errno(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

fn absent_object() -> *mut c_void {
    absent();
    null_mut()
}

/// Exported verbs that return EOPNOTSUPP, whatever they are given.
macro_rules! absent_verbs {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        $( #[no_mangle] extern "C" fn $name($(_: $ty),*) -> c_int { absent() } )*
    };
}

/// Exported verbs that return NULL with EOPNOTSUPP.
macro_rules! absent_objects {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        $( #[no_mangle] extern "C" fn $name($(_: $ty),*) -> *mut c_void { absent_object() } )*
    };
}

absent_verbs! {
    ibv_resize_cq(cq: *mut c_void, cqe: c_int);
    ibv_attach_mcast(qp: *mut c_void, gid: *const c_void, lid: u16);
    ibv_detach_mcast(qp: *mut c_void, gid: *const c_void, lid: u16);
    ibv_set_ece(qp: *mut c_void, ece: *mut ibv_ece);
    ibv_query_ece(qp: *mut c_void, ece: *mut ibv_ece);
}

absent_objects! {
    ibv_import_device(cmd_fd: c_int);
    ibv_import_pd(context: *mut c_void, handle: u32);
    ibv_import_mr(pd: *mut c_void, handle: u32);
    ibv_import_dm(context: *mut c_void, handle: u32);
    ibv_reg_dmabuf_mr(pd: *mut c_void, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int);
}

#[no_mangle]
extern "C" fn ibv_unimport_pd(_pd: *mut c_void) {}

#[no_mangle]
extern "C" fn ibv_unimport_mr(_mr: *mut c_void) {}

#[no_mangle]
extern "C" fn ibv_unimport_dm(_dm: *mut c_void) {}

/// Returns -1, as it does for addresses that do not resolve: peers are reached through UDP, their MAC addresses are the kernel's affair.
#[no_mangle]
extern "C" fn ibv_resolve_eth_l2_from_gid(_: *mut c_void, _: *mut c_void, _mac: *mut u8, _vid: *mut u16) -> c_int {
    absent();
    -1
}

/// Drivers of hardware register themselves with libibverbs when they are loaded; here they find nobody to drive.
#[no_mangle]
extern "C" fn ibv_register_driver(_name: *const c_char, _init: *mut c_void) {}

/// Memory is never hidden from children: nothing is pinned, the network's copies go through the process's own mapping.
#[no_mangle]
extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `IBV_FORK_UNNEEDED`.
#[no_mangle]
extern "C" fn ibv_is_fork_initialized() -> c_int {
    2
}

#[no_mangle]
extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

#[no_mangle]
extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// In the extended verbs, which call it without looking whether it is there.
pub unsafe extern "C" fn close_xrcd(_xrcd: *mut c_void) -> c_int {
    absent()
}
