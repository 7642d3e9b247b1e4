//! The verbs of the process: those functions of libibverbs that the program would reach, found on
//! first use. So whatever stands in for libibverbs in the program stands in for it here.

use crate::error::{Error, Result};
use crate::machine::Observed;
use crate::path::{Address, Path};
use std::ffi::{c_int, c_void, CStr};
use std::mem::{transmute_copy, zeroed};
use std::sync::OnceLock;
use unbroken_types::{Gid, PathAttr, PathMigState};
use unbroken_verbs::abi::*;

type QueryDevice = unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
type QueryGid = unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
type QueryQp =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
type ModifyQp = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
type GetAsyncEvent = unsafe extern "C" fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
type AckAsyncEvent = unsafe extern "C" fn(*mut ibv_async_event);

/// `enum ibv_qp_state`: what a queue pair that can migrate is in.
const RTR: c_int = 2;
const RTS: c_int = 3;
const SQD: c_int = 4;
/// `enum ibv_qp_type`.
const RC: c_int = 2;
/// `enum ibv_port_state`.
const PORT_ACTIVE: c_int = 4;
/// `ibv_port_attr::link_layer`.
const ETHERNET: u8 = 2;

/// The functions in use.
#[derive(Clone, Copy)]
pub(crate) struct Verbs {
    query_device: QueryDevice,
    query_port: QueryPort,
    query_gid: QueryGid,
    query_qp: QueryQp,
    modify_qp: ModifyQp,
    get_async_event: GetAsyncEvent,
    ack_async_event: AckAsyncEvent,
}

/// A function by name, in what the program has loaded or in libibverbs.
fn function<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a literal name.
    let mut found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if found.is_null() {
        // A program may have opened libibverbs for itself alone; then this is the same one.
        // SAFETY: literal names; libibverbs' constructors are those that the program would run.
        let library =
            unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !library.is_null() {
            // SAFETY: an open library, never closed, and a literal name.
            found = unsafe { libc::dlsym(library, name.as_ptr()) };
        }
    }
    // SAFETY: F is a function pointer of libibverbs' declaration of that name, and as large as
    // this.
    (!found.is_null()).then(|| unsafe { transmute_copy(&found) })
}

fn result(name: &str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        -1 => Err(Error::call(
            name,
            std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        )),
        errno => Err(Error::call(name, errno.abs())),
    }
}

/// What is asked of a queue pair.
const QUERY: c_int = IBV_QP_STATE
    | IBV_QP_AV
    | IBV_QP_PORT
    | IBV_QP_TIMEOUT
    | IBV_QP_PKEY_INDEX
    | IBV_QP_ALT_PATH
    | IBV_QP_PATH_MIG_STATE;

/// Pointers given to these are of live objects of the program, which keeps them alive: `apm.h` says
/// until when.
impl Verbs {
    /// Those of this process.
    pub(crate) fn of_process() -> Result<Verbs> {
        static FOUND: OnceLock<Option<Verbs>> = OnceLock::new();
        let find = || {
            Some(Verbs {
                query_device: function(c"ibv_query_device")?,
                query_port: function(c"ibv_query_port")?,
                query_gid: function(c"ibv_query_gid")?,
                query_qp: function(c"ibv_query_qp")?,
                modify_qp: function(c"ibv_modify_qp")?,
                get_async_event: function(c"ibv_get_async_event")?,
                ack_async_event: function(c"ibv_ack_async_event")?,
            })
        };
        (*FOUND.get_or_init(find)).ok_or_else(|| {
            Error::new(
                libc::ENOSYS,
                "there is no libibverbs in this process: link the program with -libverbs",
            )
        })
    }

    /// The number of ports, and whether the device migrates paths.
    ///
    /// # Safety
    /// A live context.
    pub(crate) unsafe fn device(&self, context: *mut ibv_context) -> Result<(u8, bool)> {
        // SAFETY: a structure of numbers.
        let mut attr: ibv_device_attr = unsafe { zeroed() };
        // SAFETY: as the caller says.
        result("ibv_query_device", unsafe { (self.query_device)(context, &mut attr) })?;
        Ok((attr.phys_port_cnt, attr.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG != 0))
    }

    /// Where a port is reached, and whether it is up.
    ///
    /// # Safety
    /// A live context.
    pub(crate) unsafe fn address(
        &self,
        context: *mut ibv_context,
        port: u8,
        sgid_index: u8,
    ) -> Result<Address> {
        // SAFETY: a structure of numbers; the exported function writes no more than it has.
        let mut attr: ibv_port_attr = unsafe { zeroed() };
        // SAFETY: as the caller says.
        result("ibv_query_port", unsafe { (self.query_port)(context, port, &mut attr) })?;
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: as the caller says.
        result("ibv_query_gid", unsafe {
            (self.query_gid)(context, port, sgid_index.into(), &mut gid)
        })
        .map_err(|e| e.of(&format!("port {port}, gid_index {sgid_index}")))?;
        // SAFETY: all bytes are there, whichever part was written.
        let gid = Gid(unsafe { gid.raw });
        let (active, ethernet) = (attr.state == PORT_ACTIVE, attr.link_layer == ETHERNET);
        Ok(Address { gid, sgid_index, lid: attr.lid, port, lmc: attr.lmc, ethernet, active })
    }

    /// Whether a port is up.
    ///
    /// # Safety
    /// A live context.
    pub(crate) unsafe fn is_up(&self, context: *mut ibv_context, port: u8) -> bool {
        // SAFETY: a structure of numbers; the exported function writes no more than it has.
        let mut attr: ibv_port_attr = unsafe { zeroed() };
        // SAFETY: as the caller says.
        unsafe { (self.query_port)(context, port, &mut attr) == 0 && attr.state == PORT_ACTIVE }
    }

    /// What the device tells of a queue pair.
    ///
    /// # Safety
    /// A live queue pair.
    pub(crate) unsafe fn query(&self, qp: *mut ibv_qp) -> Result<Observed> {
        // SAFETY: structures of numbers and pointers, which may be null.
        let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = unsafe { (zeroed(), zeroed()) };
        // SAFETY: as the caller says.
        result("ibv_query_qp", unsafe { (self.query_qp)(qp, &mut attr, QUERY, &mut init) })?;
        if init.qp_type != RC {
            return Err(Error::invalid(format!(
                "it is of type {}: only RC queue pairs migrate",
                init.qp_type
            )));
        }
        let state = PathMigState::from_code(attr.path_mig_state as u32).unwrap_or_default();
        attr.ah_attr.port_num = attr.port_num;
        attr.alt_ah_attr.port_num = attr.alt_port_num;
        let has_alternate = state != PathMigState::Migrated && attr.alt_port_num != 0;
        Ok(Observed {
            broken: !matches!(attr.qp_state, RTR | RTS | SQD),
            state,
            primary: Path::of(&attr.ah_attr, attr.timeout, attr.pkey_index),
            alternate: has_alternate
                .then(|| Path::of(&attr.alt_ah_attr, attr.alt_timeout, attr.alt_pkey_index)),
        })
    }

    /// Gives the device an alternate path, and asks for ARMED.
    ///
    /// # Safety
    /// A live queue pair.
    pub(crate) unsafe fn load(&self, qp: *mut ibv_qp, path: &Path, timeout: u8) -> Result<()> {
        // SAFETY: a structure of numbers.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.alt_ah_attr = (&path.attr).into();
        attr.alt_port_num = path.attr.port;
        attr.alt_pkey_index = path.attr.pkey_index;
        attr.alt_timeout = timeout;
        attr.path_mig_state = PathMigState::Rearm as c_int;
        // SAFETY: as the caller says.
        let code =
            unsafe { (self.modify_qp)(qp, &mut attr, IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE) };
        result("ibv_modify_qp with an alternate path", code)
    }

    /// Asks the device to migrate.
    ///
    /// # Safety
    /// A live queue pair.
    pub(crate) unsafe fn migrate(&self, qp: *mut ibv_qp) -> Result<()> {
        // SAFETY: a structure of numbers.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.path_mig_state = PathMigState::Migrated as c_int;
        // SAFETY: as the caller says.
        result("ibv_modify_qp to MIGRATED", unsafe {
            (self.modify_qp)(qp, &mut attr, IBV_QP_PATH_MIG_STATE)
        })
    }

    /// The next asynchronous event; where there is none, as the descriptor is set.
    ///
    /// # Safety
    /// A live context.
    pub(crate) unsafe fn next_event(&self, context: *mut ibv_context) -> Result<ibv_async_event> {
        let mut event =
            ibv_async_event { element: ibv_async_element { port_num: 0 }, event_type: 0 };
        // SAFETY: as the caller says.
        let code = unsafe { (self.get_async_event)(context, &mut event) };
        // Any failure is -1 and errno.
        result("ibv_get_async_event", if code == 0 { 0 } else { -1 })?;
        Ok(event)
    }

    /// # Safety
    /// An event of `next_event` that was not acknowledged.
    pub(crate) unsafe fn acknowledge(&self, mut event: ibv_async_event) {
        // SAFETY: as the caller says.
        unsafe { (self.ack_async_event)(&mut event) }
    }
}

impl Path {
    /// As verbs have it.
    pub(crate) fn of(ah: &ibv_ah_attr, timeout: u8, pkey_index: u16) -> Path {
        Path { attr: PathAttr { pkey_index, ..PathAttr::from(ah) }, timeout }
    }
}
