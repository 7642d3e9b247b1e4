//! Verbs that this device does not have: each says so with EOPNOTSUPP.

use crate::ffi::{code, deref, failed};
use crate::objects::QpObj;
use crate::real::pass;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use unbroken_verbs::abi::{ibv_ece, ibv_pd, ibv_qp, ibv_sge};
use unbroken_verbs::Error;

/// EOPNOTSUPP, with the reason where the user asked for reasons.
fn absent(verb: &str, why: &'static str) -> c_int {
    failed(verb, &Error::unsupported(why))
}

/// Exported verbs that return EOPNOTSUPP, whatever they are given.
macro_rules! absent_verbs {
    ($($name:ident($($arg:ident: $ty:ty),*): $why:expr;)*) => {
        $( #[no_mangle] extern "C" fn $name($($arg: $ty),*) -> c_int {
            pass!($name($($arg),*));
            absent(stringify!($name), $why)
        } )*
    };
}

/// Exported verbs that return NULL with EOPNOTSUPP.
macro_rules! absent_objects {
    ($($name:ident($($arg:ident: $ty:ty),*): $why:expr;)*) => {
        $( #[no_mangle] extern "C" fn $name($($arg: $ty),*) -> *mut c_void {
            pass!($name($($arg),*));
            absent(stringify!($name), $why);
            null_mut()
        } )*
    };
}

const MULTICAST: &str =
    "there is no multicast: UDP carries it to hosts only, not to each process's QPs";
const IMPORT: &str =
    "objects of another process cannot be imported: they live in that process, no kernel driver \
     holds them";

const DMA_HANDLES: &str =
    "there are no handles of DMA: they are hints for PCIe and a processor's caches, which no \
     packet passes here";
/// librdmacm refuses to pass on the options of no vendor, which a device without any would tell.
const ECE: &str =
    "there are no options of enhanced connection establishment: they are a vendor's hardware's";
const COUNTERS: &str = "there are no completion counters: completions are in the completion queue";

absent_verbs! {
    ibv_dealloc_dmah(dmah: *mut c_void): DMA_HANDLES;
    _ibv_query_comp_cntr_caps(context: *mut c_void, caps: *mut c_void, size: usize): COUNTERS;
    ibv_destroy_comp_cntr(counter: *mut c_void): COUNTERS;
    ibv_set_comp_cntr(counter: *mut c_void, value: u64): COUNTERS;
    ibv_set_err_comp_cntr(counter: *mut c_void, value: u64): COUNTERS;
    ibv_inc_comp_cntr(counter: *mut c_void, amount: u64): COUNTERS;
    ibv_inc_err_comp_cntr(counter: *mut c_void, amount: u64): COUNTERS;
    ibv_read_comp_cntr(counter: *mut c_void, value: *mut u64): COUNTERS;
    ibv_read_err_comp_cntr(counter: *mut c_void, value: *mut u64): COUNTERS;
    ibv_qp_attach_comp_cntr(qp: *mut c_void, counter: *mut c_void, attr: *mut c_void): COUNTERS;
    ibv_attach_mcast(qp: *mut c_void, gid: *const c_void, lid: u16): MULTICAST;
    ibv_detach_mcast(qp: *mut c_void, gid: *const c_void, lid: u16): MULTICAST;
    ibv_query_ece(qp: *mut c_void, ece: *mut c_void): ECE;
}

absent_objects! {
    ibv_alloc_dmah(context: *mut c_void, attr: *mut c_void): DMA_HANDLES;
    ibv_create_comp_cntr(context: *mut c_void, attr: *mut c_void): COUNTERS;
    ibv_import_device(cmd_fd: c_int): IMPORT;
    ibv_import_pd(context: *mut c_void, handle: u32): IMPORT;
    ibv_import_mr(pd: *mut c_void, handle: u32): IMPORT;
    ibv_import_dm(context: *mut c_void, handle: u32): IMPORT;
}

/// No options may be set; to set none is right.
#[no_mangle]
unsafe extern "C" fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    pass!(ibv_set_ece(qp, ece));
    code("ibv_set_ece", || {
        // SAFETY: a QP of ours and the caller's structure.
        let ece = unsafe {
            QpObj::of(qp)?;
            deref(ece, "ece")?
        };
        if ece.comp_mask != 0 {
            return Err(Error::invalid(format!(
                "comp_mask {:#x}: nothing is known",
                ece.comp_mask
            )));
        }
        if (ece.vendor_id, ece.options) != (0, 0) {
            return Err(Error::unsupported(format!(
                "vendor {:#x}, options {:#x}: this device has no options of enhanced connection \
                 establishment",
                ece.vendor_id, ece.options
            )));
        }
        Ok(())
    })
}

/// In the extended verbs.
pub unsafe extern "C" fn advise_mr(
    _: *mut ibv_pd,
    _: c_int,
    _: u32,
    _: *mut ibv_sge,
    _: u32,
) -> c_int {
    absent("ibv_advise_mr", "there is no on-demand paging: all registered memory is there")
}

#[no_mangle]
extern "C" fn ibv_unimport_pd(pd: *mut c_void) {
    pass!(ibv_unimport_pd(pd));
}

#[no_mangle]
extern "C" fn ibv_unimport_mr(mr: *mut c_void) {
    pass!(ibv_unimport_mr(mr));
}

#[no_mangle]
extern "C" fn ibv_unimport_dm(dm: *mut c_void) {
    pass!(ibv_unimport_dm(dm));
}

/// Returns a descriptor, or -1.
#[no_mangle]
extern "C" fn ibv_dm_export_dmabuf_fd(dm: *mut c_void) -> c_int {
    pass!(ibv_dm_export_dmabuf_fd(dm));
    absent(
        "ibv_dm_export_dmabuf_fd",
        "device memory is the process's own: no dma-buf is behind it",
    );
    -1
}

/// Returns -1, as it does for addresses that do not resolve: peers are reached through UDP, their
/// MAC addresses are the kernel's affair.
#[no_mangle]
extern "C" fn ibv_resolve_eth_l2_from_gid(
    arg0: *mut c_void,
    arg1: *mut c_void,
    mac: *mut u8,
    vid: *mut u16,
) -> c_int {
    pass!(ibv_resolve_eth_l2_from_gid(arg0, arg1, mac, vid));
    absent(
        "ibv_resolve_eth_l2_from_gid",
        "peers are reached through UDP; their MAC addresses are the kernel's affair",
    );
    -1
}

/// Drivers of hardware register themselves with libibverbs when they are loaded; here they find
/// nobody to drive.
#[no_mangle]
extern "C" fn ibv_register_driver(_name: *const c_char, _init: *mut c_void) {}

/// With devices of the machine, whose kernel pins memory, libibverbs knows what is to be done at a
/// fork: it counts for the whole process, our regions as well as its own.
macro_rules! for_machine {
    (@any $arg:ident) => { _ };
    ($name:ident($($arg:ident),*)) => {
        if unbroken_nics::names_devices() {
            let name = concat!(stringify!($name), "\0").as_bytes();
            let ours = $name as unsafe extern "C" fn($(for_machine!(@any $arg)),*) -> _;
            let real = std::ffi::CStr::from_bytes_with_nul(name).ok();
            if let Some(real) = real.and_then(|name| crate::real::function(name, ours)) {
                // SAFETY: as our caller has promised to that function.
                return unbroken_nics::inside::enter(|| unsafe { real($($arg),*) });
            }
        }
    };
}

/// Memory is never hidden from children: nothing is pinned, the network's copies go through the
/// process's own mapping.
#[no_mangle]
extern "C" fn ibv_fork_init() -> c_int {
    pass!(ibv_fork_init());
    for_machine!(ibv_fork_init());
    0
}

/// `IBV_FORK_UNNEEDED`.
#[no_mangle]
extern "C" fn ibv_is_fork_initialized() -> c_int {
    pass!(ibv_is_fork_initialized());
    for_machine!(ibv_is_fork_initialized());
    2
}

#[no_mangle]
extern "C" fn ibv_dontfork_range(base: *mut c_void, size: usize) -> c_int {
    pass!(ibv_dontfork_range(base, size));
    for_machine!(ibv_dontfork_range(base, size));
    0
}

#[no_mangle]
extern "C" fn ibv_dofork_range(base: *mut c_void, size: usize) -> c_int {
    pass!(ibv_dofork_range(base, size));
    for_machine!(ibv_dofork_range(base, size));
    0
}

/// In the extended verbs, which call it without looking whether it is there.
pub unsafe extern "C" fn close_xrcd(_xrcd: *mut c_void) -> c_int {
    absent("ibv_close_xrcd", "there is no XRC")
}
