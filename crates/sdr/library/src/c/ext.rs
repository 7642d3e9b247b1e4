//! The functions of `sdr_ext.h`.

use super::api::{create_qp, QpAttr};
use super::table::{CContext, CONTEXTS, QPS};
use super::{code, given, guarded, put, LAST};
use crate::{lock, Error};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, LazyLock, Mutex};

/// `struct sdr_mr`
#[repr(C)]
struct Mr {
    address: u64,
    length: u64,
    lkey: u32,
}

/// `struct sdr_qp_attr_ext`
#[repr(C)]
pub(super) struct ExtAttr {
    pub(super) generations: u32,
    pub(super) packet_lifetime_ms: u32,
    pub(super) id_bits: u8,
    pub(super) offset_bits: u8,
    pub(super) user_bits: u8,
}

impl Default for ExtAttr {
    fn default() -> ExtAttr {
        ExtAttr {
            generations: 4,
            packet_lifetime_ms: 2000,
            id_bits: 10,
            offset_bits: 18,
            user_bits: 4,
        }
    }
}

/// `struct sdr_qp_counters`
#[repr(C)]
struct CounterValues {
    packets_sent: u64,
    packets_received: u64,
    duplicates: u64,
    late: u64,
    outside: u64,
    under_runs: u64,
    strangers: u64,
}

/// The key of what a program has registered, and its context.
type Registration = (u32, Arc<CContext>);

/// What programs have registered, by the addresses of the structures that they were given.
static MRS: LazyLock<Mutex<HashMap<usize, Registration>>> = LazyLock::new(Mutex::default);

#[no_mangle]
extern "C" fn sdr_mr_reg(ctx: *mut c_void, address: *mut c_void, length: usize) -> *mut c_void {
    let run = || {
        let context = CONTEXTS.get(ctx)?;
        if address.is_null() || length == 0 {
            return Err(Error::wrong(
                "memory at NULL, or of no bytes: the address and length of what messages lie in is \
                 right",
            ));
        }
        // SAFETY: the program keeps the memory as sdr_ext.h says.
        let memory = unsafe { context.context.register_at(address.addr() as u64, length as u64) }?;
        let lkey = memory.lkey();
        if lock(&context.memories).contains_key(&lkey) {
            return Err(Error::retry("a key that is in use on another NIC already"));
        }
        let mr = Box::into_raw(Box::new(Mr { address: memory.addr(), length: memory.len(), lkey }));
        lock(&context.memories).insert(lkey, memory);
        lock(&MRS).insert(mr.addr(), (lkey, context));
        Ok(mr.cast())
    };
    guarded(run).unwrap_or(null_mut())
}

#[no_mangle]
extern "C" fn sdr_mr_dereg(mr: *mut c_void) -> c_int {
    code(|| {
        let found = lock(&MRS).remove(&mr.addr());
        let (lkey, context) = found.ok_or_else(|| {
            Error::wrong(format!("{mr:?} is no registered memory: sdr_mr_reg gives it"))
        })?;
        lock(&context.memories).remove(&lkey);
        // SAFETY: `sdr_mr_reg` made it, and nobody else takes it out of the table.
        drop(unsafe { Box::from_raw(mr.cast::<Mr>()) });
        Ok(())
    })
}

#[no_mangle]
extern "C" fn sdr_last_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

#[no_mangle]
extern "C" fn sdr_qp_attr_ext_init(ext: *mut ExtAttr) {
    // SAFETY: the program gives NULL, or what sdr_ext.h says.
    let _ = guarded(|| unsafe { put(ext, "ext", ExtAttr::default()) });
}

#[no_mangle]
extern "C" fn sdr_qp_create_ext(
    ctx: *mut c_void,
    attr: *const QpAttr,
    ext: *const ExtAttr,
) -> *mut c_void {
    // SAFETY: the program gives NULL, or what the headers say.
    let run = || create_qp(ctx, unsafe { given(attr, "qp_attr") }?, unsafe { given(ext, "ext") }?);
    guarded(run).unwrap_or(null_mut())
}

#[no_mangle]
extern "C" fn sdr_qp_counters_get(qp: *mut c_void, counters: *mut CounterValues) -> c_int {
    code(|| {
        let c = QPS.get(qp)?.qp.counters();
        let values = CounterValues {
            packets_sent: c.sent,
            packets_received: c.packets,
            duplicates: c.duplicates,
            late: c.late,
            outside: c.outside,
            under_runs: c.under_runs,
            strangers: c.strangers,
        };
        // SAFETY: the program gives NULL, or what sdr_ext.h says.
        unsafe { put(counters, "counters", values) }
    })
}
