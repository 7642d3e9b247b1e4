//! Address handles: where a UD send goes.

use crate::ffi::{code, pointer};
use crate::objects::{free, AhObj, ContextObj, PdObj};
use std::ffi::c_int;
use std::mem::zeroed;
use std::net::{Ipv4Addr, Ipv6Addr};
use unbroken_types::{Gid, WcFlags};
use unbroken_verbs::abi::{ibv_ah, ibv_ah_attr, ibv_context, ibv_gid, ibv_grh, ibv_pd, ibv_wc};
use unbroken_verbs::{Error, Result};

/// The destination of an address vector; RoCE needs a global route from GID index 0 of port 1.
pub fn destination(attr: &ibv_ah_attr) -> Result<Gid> {
    if attr.is_global == 0 {
        return Err(Error::invalid("is_global is 0: RoCE addresses peers by GID, set is_global and grh.dgid"));
    }
    if attr.port_num != 1 {
        return Err(Error::invalid(format!("port_num {}: this device has port 1 only", attr.port_num)));
    }
    if attr.grh.sgid_index != 0 {
        return Err(Error::invalid(format!("sgid_index {}: this port has GID index 0 only", attr.grh.sgid_index)));
    }
    // SAFETY: all members of the union are plain bytes.
    Ok(Gid(unsafe { attr.grh.dgid.raw }))
}

#[no_mangle]
unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    pointer("ibv_create_ah", || {
        // SAFETY: an object of ours and the caller's structure.
        let (owner, attr) = unsafe { (PdObj::of(pd)?, crate::ffi::deref(attr, "attr")?) };
        let c = ibv_ah { context: owner.c.context, pd, handle: 0 };
        Ok(Box::into_raw(Box::new(AhObj { c, gid: destination(attr)? })).cast())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    code("ibv_destroy_ah", || {
        // SAFETY: an address handle of ours that the program gives up, made by Box.
        unsafe { free(AhObj::of(ah)?) };
        Ok(())
    })
}

/// The 40 bytes before a received datagram, as RoCEv2 has them: an IPv6 header, or an IPv4 header in the last 20 bytes.
fn route_back(grh: &ibv_grh) -> (Gid, Gid, u8, u8, u32) {
    // SAFETY: ibv_grh is 40 bytes without padding.
    let bytes: [u8; 40] = unsafe { std::mem::transmute(*grh) };
    let word = u32::from_be(grh.version_tclass_flow);
    if word >> 28 == 6 {
        // SAFETY: all members of the unions are plain bytes.
        let (sgid, dgid) = unsafe { (grh.sgid.raw, grh.dgid.raw) };
        return (Gid(sgid), Gid(dgid), grh.hop_limit, (word >> 20) as u8, word & 0x000f_ffff);
    }
    let ip = |at: usize| {
        let v4 = Ipv4Addr::new(bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]);
        let v6: Ipv6Addr = v4.to_ipv6_mapped();
        Gid(v6.octets())
    };
    (ip(32), ip(36), bytes[28], bytes[21], 0)
}

#[no_mangle]
unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    crate::ffi::minus_one("ibv_init_ah_from_wc", || {
        // SAFETY: an object of ours and the caller's structures. The GRH lies in a receive buffer, at any alignment.
        let (owner, wc) = unsafe { (ContextObj::of(context)?, crate::ffi::deref(wc, "wc")?) };
        owner.front.port(port)?;
        if wc.wc_flags & WcFlags::GRH == 0 || grh.is_null() {
            return Err(Error::invalid("the completion has no GRH, which holds the sender's address in RoCE"));
        }
        // SAFETY: as above.
        let (from, to, hop_limit, traffic_class, flow_label) = route_back(&unsafe { grh.read_unaligned() });
        let index = owner.front.port(port)?.gids.iter().position(|g| *g == to).unwrap_or(0);
        // SAFETY: plain integers.
        let mut a: ibv_ah_attr = unsafe { zeroed() };
        a.is_global = 1;
        a.port_num = port;
        a.sl = wc.sl;
        a.grh.dgid = ibv_gid { raw: from.0 };
        a.grh.sgid_index = index as u8;
        a.grh.hop_limit = hop_limit;
        a.grh.traffic_class = traffic_class;
        a.grh.flow_label = flow_label;
        // SAFETY: the caller's structure.
        unsafe { attr.write(a) };
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    // SAFETY: plain integers.
    let mut attr: ibv_ah_attr = unsafe { zeroed() };
    // SAFETY: objects of ours and the caller's structures.
    unsafe {
        let context = PdObj::of(pd).map_or(std::ptr::null_mut(), |p| p.c.context);
        if ibv_init_ah_from_wc(context, port, wc, grh, &raw mut attr) != 0 {
            return std::ptr::null_mut();
        }
        ibv_create_ah(pd, &raw mut attr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_sender_is_read_from_the_last_twenty_bytes() {
        let mut bytes = [0u8; 40];
        bytes[20] = 0x45;
        bytes[28] = 64;
        bytes[32..36].copy_from_slice(&[127, 77, 1, 0]);
        bytes[36..40].copy_from_slice(&[127, 77, 2, 1]);
        // SAFETY: ibv_grh is 40 plain bytes.
        let grh: ibv_grh = unsafe { std::mem::transmute(bytes) };
        let (from, to, hop_limit, _, _) = route_back(&grh);
        assert_eq!(from.to_ipv4(), Some(Ipv4Addr::new(127, 77, 1, 0)));
        assert_eq!(to.to_ipv4(), Some(Ipv4Addr::new(127, 77, 2, 1)));
        assert_eq!(hop_limit, 64);
    }

    #[test]
    fn an_address_without_a_gid_is_refused() {
        // SAFETY: plain integers.
        let mut attr: ibv_ah_attr = unsafe { zeroed() };
        attr.port_num = 1;
        assert!(destination(&attr).unwrap_err().to_string().contains("is_global"));
        attr.is_global = 1;
        assert!(destination(&attr).is_ok());
        attr.grh.sgid_index = 3;
        assert!(destination(&attr).unwrap_err().to_string().contains("sgid_index 3"));
    }
}
