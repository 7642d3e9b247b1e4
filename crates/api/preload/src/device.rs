//! Devices and contexts: list, open, close, asynchronous events.

use crate::ffi::{code, copy_text, failed, guard, minus_one, pointer, say};
use crate::objects::{free, ContextObj, CqObj, DeviceObj, QpObj, SrqObj, CQS, QPS, SRQS};
use crate::real::{function, pass};
use crate::{cq, cq_poll, dm, domain, memory, post, qp, query, races, srq, unsupported, window};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{addr_of_mut, null_mut};
use std::sync::{Once, OnceLock};
use unbroken_nics::{inside, HostNics};
use unbroken_shift::api::{AsyncElement, DeviceInfo};
use unbroken_verbs::abi::{
    ibv_async_element, ibv_async_event, ibv_context, ibv_device, verbs_context, PollCq, PostRecv,
    PostSend, IBV_EVENT_CQ_ERR, IBV_EVENT_SRQ_ERR, IBV_EVENT_SRQ_LIMIT_REACHED, IBV_NODE_CA,
    IBV_TRANSPORT_IB,
};
use unbroken_verbs::{Error, Result};

/// The process's devices; made at the first look and never freed, as a program may keep pointers to
/// them.
fn devices() -> Result<&'static [&'static DeviceObj]> {
    struct List(Vec<&'static DeviceObj>);
    // SAFETY: devices are never changed after they were made.
    unsafe impl Sync for List {}
    // SAFETY: as above.
    unsafe impl Send for List {}
    static DEVICES: OnceLock<List> = OnceLock::new();
    let system = unbroken_nics::system()?;
    let list = || {
        // SAFETY: the library is never unloaded (`-z nodelete`), so the function is there when the
        // process ends. That it cannot be registered costs peers some seconds.
        unsafe { libc::atexit(at_exit) };
        List(system.devices().iter().map(new_device).collect())
    };
    Ok(&DEVICES.get_or_init(list).0)
}

extern "C" fn at_exit() {
    guard((), unbroken_rdmacm::finish);
    guard((), unbroken_nics::at_exit);
}

fn new_device(info: &DeviceInfo) -> &'static DeviceObj {
    let c = match unbroken_nics::machine() {
        Ok(Some(machine)) => of_machine(machine, info.index),
        _ => emulated(info),
    };
    let object = DeviceObj {
        c: UnsafeCell::new(c),
        behind: [0; 32],
        index: info.index,
        node_guid: info.node_guid,
    };
    Box::leak(Box::new(object))
}

fn emulated(info: &DeviceInfo) -> ibv_device {
    // SAFETY: an ibv_device of zeros is valid: integers, characters and null pointers.
    let mut c: ibv_device = unsafe { zeroed() };
    c.node_type = IBV_NODE_CA;
    c.transport_type = IBV_TRANSPORT_IB;
    copy_text(&mut c.name, &info.name);
    copy_text(&mut c.dev_name, &format!("uverbs{}", info.index));
    copy_text(&mut c.dev_path, &format!("/sys/class/infiniband_verbs/uverbs{}", info.index));
    copy_text(&mut c.ibdev_path, &format!("/sys/class/infiniband/{}", info.name));
    c
}

/// As libibverbs shows it, but for the provider's functions.
fn of_machine(machine: &HostNics, index: usize) -> ibv_device {
    let shown = machine.with_context(index, |context| {
        // SAFETY: an open context, whose device lives as long; plain data.
        let c = unsafe { *(*context).device };
        ibv_device { _ops: [null_mut(); 2], ..c }
    });
    // One that has gone since it was looked at has nothing to show but its name.
    shown.unwrap_or_else(|_| {
        // SAFETY: plain integers, characters and null pointers.
        let mut c: ibv_device = unsafe { zeroed() };
        copy_text(&mut c.name, machine.name(index));
        c
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    pass!(ibv_get_device_list(num_devices));
    let list = guard(None, || match devices() {
        Ok(devices) => Some(devices),
        Err(e) => {
            // The program will only say that it found no device. Said once, the reason is worth a
            // line.
            static TOLD: Once = Once::new();
            TOLD.call_once(|| say(format_args!("no RDMA devices: {e}")));
            failed("ibv_get_device_list", &e);
            None
        }
    });
    let Some(devices) = list else {
        // SAFETY: NULL or the caller's integer.
        if let Some(n) = unsafe { num_devices.as_mut() } {
            *n = 0;
        }
        return null_mut();
    };
    // SAFETY: calloc is told the size that the loop below fills, plus the final NULL; the result is
    // checked.
    let array = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()) }
        .cast::<*mut ibv_device>();
    if array.is_null() {
        return null_mut();
    }
    for (i, d) in devices.iter().enumerate() {
        // SAFETY: i is less than the number of entries allocated.
        unsafe { *array.add(i) = d.c.get() };
    }
    // SAFETY: NULL or the caller's integer.
    if let Some(n) = unsafe { num_devices.as_mut() } {
        *n = devices.len() as c_int;
    }
    array
}

#[no_mangle]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    pass!(ibv_free_device_list(list));
    // SAFETY: the list came from ibv_get_device_list, which takes it from the C allocator.
    unsafe { libc::free(list.cast()) };
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    pass!(ibv_get_device_name(device));
    // SAFETY: a device of ours, which lives for ever; only the address of a field is taken.
    unsafe { addr_of_mut!((*device).name).cast() }
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    pass!(ibv_get_device_guid(device));
    // SAFETY: a device of ours.
    unsafe { DeviceObj::of(device) }.map_or(0, |d| d.node_guid.to_be())
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    pass!(ibv_get_device_index(device));
    guard(-1, || {
        // SAFETY: a device of ours.
        let Ok(d) = (unsafe { DeviceObj::of(device) }) else { return -1 };
        match unbroken_nics::machine() {
            Ok(Some(machine)) => kernels_index(machine, d.index).unwrap_or(-1),
            _ => d.index as c_int,
        }
    })
}

/// The kernel's index of a device, by which its rdma_cm names it; `None` where it cannot be had.
fn kernels_index(machine: &HostNics, index: usize) -> Option<c_int> {
    let ours = ibv_get_device_index as unsafe extern "C" fn(_) -> _;
    let real = function(c"ibv_get_device_index", ours)?;
    let ask = |context: *mut ibv_context| {
        // SAFETY: an open context of libibverbs, whose device lives as long.
        inside::enter(|| unsafe { real((*context).device) })
    };
    machine.with_context(index, ask).ok()
}

#[no_mangle]
unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pass!(ibv_open_device(device));
    pointer("ibv_open_device", || {
        // SAFETY: a device of ours.
        let d = unsafe { DeviceObj::of(device) }?;
        let api = unbroken_nics::system()?.open(d.index)?;
        // SAFETY: a verbs_context of zeros is valid: integers, null pointers, empty slots of verbs,
        // a fresh mutex.
        let mut c: verbs_context = unsafe { zeroed() };
        c.query_port = Some(query::query_port);
        c.query_device_ex = Some(query::query_device_ex);
        c.query_rt_values = Some(query::query_rt_values);
        c.create_cq_ex = Some(cq::create_cq_ex);
        c.create_qp_ex = Some(qp::create_qp_ex);
        c.create_srq_ex = Some(srq::create_srq_ex);
        c.alloc_parent_domain = Some(domain::alloc_parent_domain);
        c.alloc_td = Some(domain::alloc_td);
        c.dealloc_td = Some(domain::dealloc_td);
        c.alloc_dm = Some(dm::alloc_dm);
        c.free_dm = Some(dm::free_dm);
        c.reg_dm_mr = Some(dm::reg_dm_mr);
        c.advise_mr = Some(unsupported::advise_mr);
        c.alloc_null_mr = Some(memory::alloc_null_mr);
        c.close_xrcd = Some(unsupported::close_xrcd);
        c.sz = size_of::<verbs_context>();
        c.context.device = device;
        c.context.ops.req_notify_cq = Some(cq_poll::req_notify_cq);
        let short: (PollCq, PostSend, PostRecv) = match unbroken_nics::machine()? {
            Some(_) => {
                (cq_poll::poll_cq_directly, post::post_send_by_lane, post::post_recv_by_lane)
            }
            None => (cq_poll::poll_cq, post::post_send, post::post_recv),
        };
        c.context.ops.poll_cq = Some(short.0);
        c.context.ops.post_send = Some(short.1);
        c.context.ops.post_recv = Some(short.2);
        c.context.ops.post_srq_recv = Some(srq::post_srq_recv);
        c.context.ops.alloc_mw = Some(window::alloc_mw);
        c.context.ops.bind_mw = Some(window::bind_mw);
        c.context.ops.dealloc_mw = Some(window::dealloc_mw);
        races::wrap_context(&mut c.context.ops);
        let command = command_fd()?;
        c.context.cmd_fd = command.as_raw_fd();
        c.context.async_fd = api.async_fd();
        c.context.num_comp_vectors = comp_vectors(d.index)? as c_int;
        c.context.abi_compat = usize::MAX as *mut c_void;
        let object =
            Box::into_raw(Box::new(ContextObj { c: UnsafeCell::new(c), api, _command: command }));
        Ok(object.cast::<u8>().wrapping_add(offset_of!(verbs_context, context)).cast())
    })
}

/// Completion vectors that programs may name.
fn comp_vectors(index: usize) -> Result<u32> {
    let Some(machine) = unbroken_nics::machine()? else { return Ok(cq::COMP_VECTORS) };
    // SAFETY: an open context; the field never changes.
    let count = machine.with_context(index, |context| unsafe { (*context).num_comp_vectors });
    Ok(count.ok().and_then(|count| u32::try_from(count).ok()).unwrap_or(1))
}

/// A descriptor for `cmd_fd`: an empty file that no other descriptor names.
fn command_fd() -> Result<OwnedFd> {
    // SAFETY: a literal name; the result is checked.
    let fd = unsafe { libc::memfd_create(c"unbroken".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Error::os("memfd_create", &std::io::Error::last_os_error()));
    }
    // SAFETY: just made, nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[no_mangle]
unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    pass!(ibv_close_device(context));
    code("ibv_close_device", || {
        // SAFETY: a context of ours that the program gives up.
        let c = unsafe { ContextObj::of(context) }?;
        c.api.close()?;
        // SAFETY: made by Box in ibv_open_device. Objects that outlive it hold what they need of it
        // themselves.
        unsafe { free(c) };
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    pass!(ibv_get_async_event(context, event));
    minus_one("ibv_get_async_event", || {
        // SAFETY: a context of ours. Its inner part is kept over the wait, should another thread
        // close it.
        let api = unsafe { ContextObj::of(context) }?.api.clone();
        let (event_type, element) = loop {
            let e = api.next_async_event()?;
            let element = match e.element {
                AsyncElement::Device => Some(ibv_async_element { port_num: 0 }),
                AsyncElement::Port(port) => Some(ibv_async_element { port_num: port.into() }),
                AsyncElement::Qp(cookie) => QPS
                    .get()
                    .deliver(cookie, |q: &QpObj| &q.async_events)
                    .map(|qp| ibv_async_element { qp: qp.cast_mut().cast() }),
                AsyncElement::Cq(cookie) => CQS
                    .get()
                    .deliver(cookie, |q: &CqObj| &q.async_events)
                    .map(|cq| ibv_async_element { cq: cq.cast_mut().cast() }),
                AsyncElement::Srq(cookie) => SRQS
                    .get()
                    .deliver(cookie, |s: &SrqObj| &s.async_events)
                    .map(|srq| ibv_async_element { srq: srq.cast_mut().cast() }),
            };
            if let Some(element) = element {
                break (e.event_type as c_int, element);
            }
        };
        // SAFETY: the caller's structure.
        unsafe { event.write(ibv_async_event { element, event_type }) };
        Ok(())
    })
}

/// Whether events of this type are of a QP.
fn is_qp_event(event_type: c_int) -> bool {
    // QP_FATAL, QP_REQ_ERR, QP_ACCESS_ERR, COMM_EST, SQ_DRAINED, PATH_MIG, PATH_MIG_ERR;
    // QP_LAST_WQE_REACHED
    matches!(event_type, 1..=7 | 16)
}

#[no_mangle]
unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    pass!(ibv_ack_async_event(event));
    guard((), || {
        // SAFETY: an event that ibv_get_async_event filled; its object waits for this
        // acknowledgement before it goes.
        let Some(event) = (unsafe { event.as_ref() }) else { return };
        if is_qp_event(event.event_type) {
            // SAFETY: the type says that the element is a QP.
            if let Ok(qp) = unsafe { QpObj::of(event.element.qp) } {
                // SAFETY: the field is the program's to look at, ours to write.
                unsafe { (*qp.c.get()).qp_base.events_completed += 1 };
                qp.async_events.acknowledge(1);
            }
        } else if event.event_type == IBV_EVENT_CQ_ERR {
            // SAFETY: the type says that the element is a CQ.
            if let Ok(cq) = unsafe { CqObj::of(event.element.cq) } {
                // SAFETY: as above.
                unsafe { (*cq.c.get()).async_events_completed += 1 };
                cq.async_events.acknowledge(1);
            }
        } else if matches!(event.event_type, IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED) {
            // SAFETY: the type says that the element is an SRQ.
            if let Ok(srq) = unsafe { SrqObj::of(event.element.srq) } {
                // SAFETY: as above.
                unsafe { (*srq.c.get()).events_completed += 1 };
                srq.async_events.acknowledge(1);
            }
        }
    });
}
