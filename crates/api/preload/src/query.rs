//! What a device, its port and its tables are.

use crate::clock::monotonic_ns;
use crate::ffi::{code, copy_text, guard, minus_one};
use crate::objects::ContextObj;
use crate::real::pass;
use std::ffi::{c_int, c_uint, CStr};
use std::mem::{offset_of, size_of, zeroed};
use unbroken_nics::{HostNics, PortView};
use unbroken_shift::api;
use unbroken_types::{GidType, LinkLayer};
use unbroken_verbs::abi::*;
use unbroken_verbs::{Error, GidEntry, PortAttr, PortState, Result};

/// The default P_Key, the only one.
const PKEY: u16 = 0xffff;
/// `ibv_port_attr::active_width` 4X and `active_speed` EDR: 100 Gbit/s. A software NIC has no rate
/// of its own; programs that size their windows by the rate want one that does not hold them back.
const WIDTH_4X: u8 = 2;
const SPEED_EDR: u8 = 32;
/// That speed as `ibv_query_port_speed` has it, in units of 100 Mbit/s.
pub const SPEED_100_MBITS: u64 = 1000;
/// How long an acknowledgement may take here, 4.096 µs · 2^n: some milliseconds, as a busy machine
/// needs them.
const ACK_DELAY: u8 = 10;
/// `ibv_port_attr::phys_state`.
const PHYS_LINK_UP: u8 = 5;
const PHYS_DISABLED: u8 = 3;
/// `ibv_port_attr::subnet_timeout` that subnet managers set: 4.096 µs · 2^18, about a second.
const SUBNET_TIMEOUT: u8 = 18;
/// Entries of a port's GID table, at least.
const GID_TABLE_LEN: usize = 4;

/// Writes as much of `value` as the caller has room for, and zeros behind it where the caller's
/// structure is the longer one.
///
/// # Safety
/// `to` is valid for `size` bytes.
unsafe fn write_sized<T: Copy>(to: *mut T, size: usize, value: &T) {
    // SAFETY: no more than `size` bytes are written, no more than the value has are read.
    unsafe {
        to.cast::<u8>().write_bytes(0, size);
        to.cast::<u8>().copy_from((value as *const T).cast(), size.min(size_of::<T>()));
    }
}

/// The devices of the machine, where the process's NICs are those.
fn machine() -> Option<&'static HostNics> {
    unbroken_nics::machine().ok().flatten().map(|machine| &**machine)
}

/// A question about tables that only the device knows is put to the device itself, by the function
/// of libibverbs that has the name of ours.
macro_rules! ask_device {
    (@any $arg:ident) => { _ };
    ($name:ident($context:ident $(, $arg:ident)*)) => {
        if let Some(machine) = machine() {
            // SAFETY: a context of ours.
            if let Ok(object) = unsafe { ContextObj::of($context) } {
                let name = concat!(stringify!($name), "\0").as_bytes();
                let ours = $name as unsafe extern "C" fn(_, $(ask_device!(@any $arg)),*) -> _;
                let real = CStr::from_bytes_with_nul(name).ok();
                if let Some(real) = real.and_then(|name| crate::real::function(name, ours)) {
                    let answer = machine.with_context(object.api.nic(), |context| {
                        // SAFETY: an open context, and what our caller has given.
                        unbroken_nics::inside::enter(|| unsafe { real(context $(, $arg)*) })
                    });
                    if let Ok(answer) = answer {
                        return answer;
                    }
                }
            }
        }
    };
}

/// What the device says of itself, less what is kept back for failover and cannot be protected.
fn machine_attr(machine: &HostNics, api: &api::Context) -> Option<ibv_device_attr> {
    let mut a = machine.device_attr(api.nic()).ok()?;
    a.max_qp_wr = a.max_qp_wr.min(api.attr().max_qp_wr as c_int);
    a.max_mw = 0;
    a.device_cap_flags &= !(IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_MEM_WINDOW_TYPE_2A
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B
        | IBV_DEVICE_MEM_MGT_EXTENSIONS
        | IBV_DEVICE_AUTO_PATH_MIG);
    Some(a)
}

fn device_attr(api: &api::Context) -> ibv_device_attr {
    if let Some(a) = machine().and_then(|machine| machine_attr(machine, api)) {
        return a;
    }
    let attr = api.attr();
    // SAFETY: plain integers and characters.
    let mut a: ibv_device_attr = unsafe { zeroed() };
    copy_text(&mut a.fw_ver, &attr.fw_ver);
    a.node_guid = attr.node_guid.to_be();
    a.sys_image_guid = a.node_guid;
    a.max_mr_size = attr.max_mr_size;
    a.page_size_cap = !0xfff;
    a.vendor_id = attr.vendor_id;
    a.vendor_part_id = attr.vendor_part_id;
    a.hw_ver = attr.hw_ver;
    a.max_qp = attr.max_qp as c_int;
    a.max_qp_wr = attr.max_qp_wr as c_int;
    a.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_PORT_ACTIVE_EVENT
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_SRQ_RESIZE
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B
        | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    if attr.phys_port_cnt > 1 {
        a.device_cap_flags |= IBV_DEVICE_AUTO_PATH_MIG;
    }
    a.max_sge = attr.max_sge as c_int;
    a.max_sge_rd = attr.max_sge as c_int;
    a.max_cq = attr.max_cq as c_int;
    a.max_cqe = attr.max_cqe as c_int;
    a.max_mr = attr.max_mr as c_int;
    a.max_mw = attr.max_mw as c_int;
    a.max_pd = attr.max_pd as c_int;
    a.max_srq = attr.max_srq as c_int;
    a.max_srq_wr = attr.max_srq_wr as c_int;
    a.max_srq_sge = attr.max_srq_sge as c_int;
    a.max_qp_rd_atom = attr.max_qp_rd_atom as c_int;
    a.max_res_rd_atom =
        attr.max_qp_rd_atom.saturating_mul(attr.max_qp).min(i32::MAX as u32) as c_int;
    a.max_qp_init_rd_atom = attr.max_qp_rd_atom as c_int;
    a.atomic_cap = if attr.atomics { IBV_ATOMIC_HCA } else { 0 };
    a.max_ah = attr.max_ah as c_int;
    a.max_pkeys = 1;
    a.local_ca_ack_delay = ACK_DELAY;
    a.phys_port_cnt = attr.phys_port_cnt;
    a
}

fn port_attr(api: &api::Context, port: u8) -> Result<ibv_port_attr> {
    let p = api.port(port)?;
    if let Some(machine) = machine() {
        let PortView(mut a) = machine.port_view(api.nic(), port)?;
        // Others may stand in for a port that is down.
        if p.state == PortState::Active {
            (a.state, a.phys_state) = (p.state as c_int, PHYS_LINK_UP);
        }
        return Ok(a);
    }
    // SAFETY: plain integers.
    let mut a: ibv_port_attr = unsafe { zeroed() };
    a.state = p.state as c_int;
    a.max_mtu = p.max_mtu as c_int;
    a.active_mtu = p.active_mtu as c_int;
    a.gid_tbl_len = table_len(&p.gids) as c_int;
    a.port_cap_flags = IBV_PORT_CM_SUP;
    a.max_msg_sz = p.max_msg_sz;
    a.pkey_tbl_len = 1;
    a.max_vl_num = 1;
    a.active_width = WIDTH_4X;
    a.active_speed = SPEED_EDR;
    a.phys_state = if p.state == PortState::Active { PHYS_LINK_UP } else { PHYS_DISABLED };
    a.link_layer = p.link_layer as u8;
    (a.lid, a.lmc, a.sm_lid) = (p.lid, p.lmc, p.sm_lid);
    match p.link_layer {
        LinkLayer::Infiniband => a.subnet_timeout = SUBNET_TIMEOUT,
        LinkLayer::Ethernet => {
            a.port_cap_flags |= IBV_PORT_IP_BASED_GIDS;
            a.flags = IBV_QPF_GRH_REQUIRED;
        }
    }
    Ok(a)
}

/// The GID at an index of the table, `None` where that entry is empty, or an error that says what
/// exists.
fn gid_at(api: &api::Context, port: u32, index: usize) -> Result<Option<GidEntry>> {
    let port = u8::try_from(port)
        .map_err(|_| Error::invalid(format!("port {port}: ports count from 1")))?;
    let PortAttr { gids, .. } = api.port(port)?;
    if index >= table_len(&gids) {
        return Err(Error::invalid(format!(
            "GID index {index}: this port's table has {} (count from 0)",
            table_len(&gids)
        )));
    }
    Ok(gids.get(index).copied())
}

/// A port's table has empty entries behind its GIDs, as on hardware.
pub fn table_len(gids: &[GidEntry]) -> usize {
    (gids.len() + 1).next_power_of_two().max(GID_TABLE_LEN)
}

/// The index of the port's network interface; an InfiniBand port has none.
fn ndev_ifindex(attr: &PortAttr) -> u32 {
    match attr.link_layer {
        LinkLayer::Infiniband => 0,
        LinkLayer::Ethernet => unbroken_nics::interface_index(&attr.gids),
    }
}

fn gid_entry((entry, ndev_ifindex): (GidEntry, u32), index: u32, port: u32) -> ibv_gid_entry {
    let gid_type = match entry.kind {
        GidType::Infiniband => IBV_GID_TYPE_IB,
        GidType::RoceV1 => IBV_GID_TYPE_ROCE_V1,
        GidType::RoceV2 => IBV_GID_TYPE_ROCE_V2,
    };
    ibv_gid_entry {
        gid: ibv_gid { raw: entry.gid.0 },
        gid_index: index,
        port_num: port,
        gid_type,
        ndev_ifindex,
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    pass!(ibv_query_device(context, attr));
    code("ibv_query_device", || {
        // SAFETY: a context of ours and the caller's structure, whose size never changed.
        unsafe { attr.write(device_attr(&ContextObj::of_any(context)?.api)) };
        Ok(())
    })
}

pub unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    code("ibv_query_device_ex", || {
        // SAFETY: NULL or the caller's structure.
        if unsafe { input.as_ref() }.is_some_and(|i| i.comp_mask != 0) {
            return Err(Error::invalid("comp_mask of the input must be 0"));
        }
        if size < offset_of!(ibv_device_attr_ex, odp_caps) {
            return Err(Error::invalid(format!(
                "an ibv_device_attr_ex of {size} bytes is too small"
            )));
        }
        // SAFETY: plain integers.
        let mut a: ibv_device_attr_ex = unsafe { zeroed() };
        // SAFETY: a context of ours.
        a.orig_attr = device_attr(&unsafe { ContextObj::of_any(context) }?.api);
        // Completions are stamped in nanoseconds: a clock of 10^6 kHz.
        a.completion_timestamp_mask = u64::MAX;
        a.hca_core_clock = 1_000_000;
        a.device_cap_flags_ex = a.orig_attr.device_cap_flags.into();
        if machine().is_none() {
            a.max_dm_size = crate::device_memory::MAX_DM_BYTES as u64;
        }
        a.phys_port_cnt_ex = a.orig_attr.phys_port_cnt.into();
        // SAFETY: the caller says how many bytes it has.
        unsafe { write_sized(attr, size, &a) };
        Ok(())
    })
}

pub unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    code("ibv_query_rt_values_ex", || {
        // SAFETY: a context of ours and the caller's structure.
        let (_, values) =
            unsafe { (ContextObj::of(context)?, crate::ffi::deref(values, "values")?) };
        let wanted = values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK;
        let now_ns = monotonic_ns();
        let raw_clock = libc::timespec {
            tv_sec: (now_ns / 1_000_000_000) as _,
            tv_nsec: (now_ns % 1_000_000_000) as _,
        };
        // SAFETY: the caller's structure.
        unsafe {
            (&raw const *values).cast_mut().write(ibv_values_ex { comp_mask: wanted, raw_clock })
        };
        Ok(())
    })
}

pub unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    code("ibv_query_port", || {
        // SAFETY: a context of ours; the caller says how many bytes it has.
        unsafe { write_sized(attr, size, &port_attr(&ContextObj::of(context)?.api, port)?) };
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    pass!(ibv_query_port(context, port, attr));
    // SAFETY: whoever calls this symbol was compiled when the structure ended here.
    unsafe { query_port(context, port, attr, offset_of!(ibv_port_attr, port_cap_flags2)) }
}

#[no_mangle]
unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    pass!(ibv_query_gid(context, port, index, gid));
    ask_device!(ibv_query_gid(context, port, index, gid));
    minus_one("ibv_query_gid", || {
        let index = usize::try_from(index)
            .map_err(|_| Error::invalid(format!("GID index {index} is negative")))?;
        // SAFETY: a context of ours and the caller's union.
        unsafe {
            let found = gid_at(&ContextObj::of(context)?.api, port.into(), index)?;
            gid.write(ibv_gid { raw: found.map_or([0; 16], |entry| entry.gid.0) });
        }
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    gid_type: *mut c_uint,
) -> c_int {
    pass!(ibv_query_gid_type(context, port, index, gid_type));
    ask_device!(ibv_query_gid_type(context, port, index, gid_type));
    minus_one("ibv_query_gid_type", || {
        // SAFETY: a context of ours and the caller's integer.
        unsafe {
            let found = gid_at(&ContextObj::of(context)?.api, port.into(), index as usize)?;
            // libibverbs calls an empty entry InfiniBand or RoCEv1.
            gid_type.write(match found.map(|entry| entry.kind) {
                Some(GidType::RoceV2) => IBV_GID_TYPE_SYSFS_ROCE_V2,
                _ => IBV_GID_TYPE_SYSFS_IB_ROCE_V1,
            });
        }
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    pass!(_ibv_query_gid_ex(context, port, index, entry, flags, size));
    ask_device!(_ibv_query_gid_ex(context, port, index, entry, flags, size));
    code("ibv_query_gid_ex", || {
        if flags != 0 {
            return Err(Error::unsupported(format!("flags {flags:#x}: none are known")));
        }
        // SAFETY: a context of ours; the caller says how many bytes it has.
        unsafe {
            let api = &ContextObj::of(context)?.api;
            let found = gid_at(api, port, index as usize)?;
            let empty =
                || Error::new(libc::ENODATA, format!("GID index {index} of port {port} is empty"));
            let ndev_ifindex = ndev_ifindex(&api.port(port as u8)?);
            write_sized(
                entry,
                size,
                &gid_entry((found.ok_or_else(empty)?, ndev_ifindex), index, port),
            );
        }
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    size: usize,
) -> isize {
    pass!(_ibv_query_gid_table(context, entries, max_entries, flags, size));
    ask_device!(_ibv_query_gid_table(context, entries, max_entries, flags, size));
    let mut count = 0;
    let code = code("ibv_query_gid_table", || {
        if flags != 0 {
            return Err(Error::unsupported(format!("flags {flags:#x}: none are known")));
        }
        // SAFETY: a context of ours.
        let api = &unsafe { ContextObj::of(context) }?.api;
        for port in 1..=u32::from(api.attr().phys_port_cnt) {
            let attr = api.port(port as u8)?;
            let ndev_ifindex = ndev_ifindex(&attr);
            for (index, entry) in attr.gids.into_iter().enumerate() {
                if count == max_entries {
                    return Err(Error::invalid(format!(
                        "{max_entries} entries are too few for all GIDs"
                    )));
                }
                // SAFETY: the caller's array has `max_entries` of `size` bytes each.
                unsafe {
                    let to = entries.cast::<u8>().add(count * size).cast();
                    write_sized(to, size, &gid_entry((entry, ndev_ifindex), index as u32, port));
                }
                count += 1;
            }
        }
        Ok(())
    });
    if code == 0 {
        count as isize
    } else {
        -(code as isize)
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    pass!(ibv_query_pkey(context, port, index, pkey));
    ask_device!(ibv_query_pkey(context, port, index, pkey));
    minus_one("ibv_query_pkey", || {
        // SAFETY: a context of ours and the caller's integer.
        unsafe {
            ContextObj::of(context)?.api.port(port)?;
            if index != 0 {
                return Err(Error::invalid(format!(
                    "P_Key index {index}: this port has index 0 only"
                )));
            }
            pkey.write(PKEY.to_be());
        }
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    pass!(ibv_get_pkey_index(context, port, pkey));
    ask_device!(ibv_get_pkey_index(context, port, pkey));
    guard(-1, || {
        // SAFETY: a context of ours.
        let known = unsafe { ContextObj::of(context) }.is_ok_and(|c| c.api.port(port).is_ok());
        // The top bit says full or limited membership; the key is the rest.
        if known && u16::from_be(pkey) & 0x7fff == PKEY & 0x7fff {
            0
        } else {
            crate::ffi::set_errno(libc::EINVAL);
            -1
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_byte_past_the_callers_size_is_written() {
        let mut to = [0xaau8; 32];
        // SAFETY: 4 and 24 of 32 bytes.
        unsafe {
            write_sized(to.as_mut_ptr().cast::<u64>(), 4, &0x1111_1111_1111_1111);
            assert_eq!(to[..6], [0x11, 0x11, 0x11, 0x11, 0xaa, 0xaa]);
            write_sized(to.as_mut_ptr().cast::<u64>(), 24, &u64::MAX);
        }
        assert_eq!(to[7..10], [0xff, 0, 0]);
        assert_eq!(to[23..26], [0, 0xaa, 0xaa]);
    }
}
