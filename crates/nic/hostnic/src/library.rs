//! The functions of the installed libibverbs.

use crate::inside;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};
use std::io;
use std::sync::OnceLock;
use unbroken_environment as environment;
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, Result};

/// What the library is called by every distribution.
const NAME: &CStr = c"libibverbs.so.1";

/// `ibv_reg_dmabuf_mr`: domain, offset, length, address for the network, descriptor, rights.
pub(crate) type RegDmabufMr =
    unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;

/// Declares the table of functions, and a method for each that runs it inside
/// ([`inside::enter`]).
macro_rules! functions {
    ($($symbol:literal $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?;)*) => {
        /// Addresses of libibverbs' functions.
        pub(crate) struct Library {
            handle: usize,
            $($name: unsafe extern "C" fn($($ty),*) $(-> $ret)?,)*
        }

        impl Library {
            fn resolve(handle: usize) -> Result<Library> {
                Ok(Library {
                    handle,
                    $($name: {
                        let found = symbol(handle, $symbol)?;
                        // SAFETY: the function of that name has this signature in every version of
                        // libibverbs that has the name.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) $(-> $ret)?>(found) }
                    },)*
                })
            }

            $(
                /// # Safety
                /// As the function of libibverbs says.
                #[allow(clippy::too_many_arguments)]
                pub(crate) unsafe fn $name(&self, $($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: promised by the caller.
                    inside::enter(|| unsafe { (self.$name)($($arg),*) })
                }
            )*
        }
    };
}

functions! {
    c"ibv_get_device_list" get_device_list(count: *mut c_int) -> *mut *mut ibv_device;
    c"ibv_free_device_list" free_device_list(list: *mut *mut ibv_device);
    c"ibv_get_device_guid" get_device_guid(device: *mut ibv_device) -> u64;
    c"ibv_open_device" open_device(device: *mut ibv_device) -> *mut ibv_context;
    c"ibv_close_device" close_device(context: *mut ibv_context) -> c_int;
    c"ibv_get_async_event" get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
    c"ibv_ack_async_event" ack_async_event(event: *mut ibv_async_event);
    c"ibv_query_device" query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    c"ibv_query_port" query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int;
    c"ibv_query_gid" query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    c"ibv_query_gid_type" query_gid_type(context: *mut ibv_context, port: u8, index: c_uint, kind: *mut c_uint) -> c_int;
    c"ibv_alloc_pd" alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    c"ibv_dealloc_pd" dealloc_pd(pd: *mut ibv_pd) -> c_int;
    c"ibv_reg_mr_iova2" reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, access: c_uint) -> *mut ibv_mr;
    c"ibv_rereg_mr" rereg_mr(mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, len: usize, access: c_int) -> c_int;
    c"ibv_dereg_mr" dereg_mr(mr: *mut ibv_mr) -> c_int;
    c"ibv_create_comp_channel" create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    c"ibv_destroy_comp_channel" destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    c"ibv_create_cq" create_cq(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int) -> *mut ibv_cq;
    c"ibv_resize_cq" resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int;
    c"ibv_destroy_cq" destroy_cq(cq: *mut ibv_cq) -> c_int;
    c"ibv_get_cq_event" get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> c_int;
    c"ibv_ack_cq_events" ack_cq_events(cq: *mut ibv_cq, count: c_uint);
    c"ibv_create_srq" create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    c"ibv_destroy_srq" destroy_srq(srq: *mut ibv_srq) -> c_int;
    c"ibv_create_qp" create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    c"ibv_modify_qp" modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    c"ibv_query_qp" query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int;
    c"ibv_destroy_qp" destroy_qp(qp: *mut ibv_qp) -> c_int;
    c"ibv_create_ah" create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    c"ibv_destroy_ah" destroy_ah(ah: *mut ibv_ah) -> c_int;
}

/// The address of a function of the library, whoever has another one of that name.
fn symbol(handle: usize, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: a handle of dlopen, which is never closed, and a C string.
    let found = inside::enter(|| unsafe { libc::dlsym(handle as *mut c_void, name.as_ptr()) });
    match found.is_null() {
        false => Ok(found),
        true => Err(Error::unsupported(format!(
            "the installed libibverbs has no {}: rdma-core 33 or newer is needed",
            name.to_string_lossy()
        ))),
    }
}

impl Library {
    /// The installed library, opened at the first call; an error says what is missing.
    pub(crate) fn get() -> Result<&'static Library> {
        static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
        LIBRARY.get_or_init(Library::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Library> {
        let named = environment::text(environment::LIBIBVERBS);
        let name = named.clone().map_or_else(|| Ok(NAME.to_owned()), CString::new);
        let name = name.map_err(|e| Error::invalid(format!("UNBROKEN_LIBIBVERBS: {e}")))?;
        // SAFETY: a C string; constructors of libibverbs are made to be run.
        let handle = inside::enter(|| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) });
        if handle.is_null() {
            let why = named.map_or_else(
                || "devices of the machine need it (Debian: libibverbs1, ibverbs-providers)".into(),
                |name| format!("UNBROKEN_LIBIBVERBS={name} cannot be opened"),
            );
            return Err(Error::new(libc::ENOENT, format!("libibverbs is not installed: {why}")));
        }
        Library::resolve(handle as usize)
    }

    /// `ibv_reg_dmabuf_mr`; none before rdma-core 34. To be called inside ([`inside::enter`]).
    pub(crate) fn reg_dmabuf_mr(&self) -> Option<RegDmabufMr> {
        let found = self.address(c"ibv_reg_dmabuf_mr")?;
        // SAFETY: the function of that name has this signature in every version that has it.
        Some(unsafe { std::mem::transmute::<*mut c_void, RegDmabufMr>(found) })
    }

    /// The address of any function of the library; none where this version has none.
    pub(crate) fn address(&self, name: &CStr) -> Option<*mut c_void> {
        symbol(self.handle, name).ok()
    }
}

/// The error of a function that has returned NULL.
pub(crate) fn null_error(what: &str) -> Error {
    Error::os(what, &io::Error::last_os_error())
}

/// The error of a function that returns 0, an errno, or -1 with errno set.
pub(crate) fn check(what: &str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(Error::os(what, &io::Error::from_raw_os_error(code))),
        _ => Err(null_error(what)),
    }
}

/// The text of a C array.
pub(crate) fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
