//! Address handles: where a UD send goes.

use crate::ffi::{code, pointer};
use crate::objects::{free, AhObj, ContextObj, PdObj};
use crate::real::pass;
use std::ffi::c_int;
use std::mem::zeroed;
use std::net::{Ipv4Addr, Ipv6Addr};
use unbroken_shift::api;
use unbroken_types::{Gid, GidType, LinkLayer, PathAttr, WcFlags, MAX_FLOW_LABEL};
use unbroken_verbs::abi::{ibv_ah, ibv_ah_attr, ibv_context, ibv_gid, ibv_grh, ibv_pd, ibv_wc};
use unbroken_verbs::{Error, GidEntry, Result};

/// The port that address vectors begin at.
pub trait Ports {
    /// What a port, by number, is attached to.
    fn link_layer(&self, port: u8) -> Result<LinkLayer>;
    /// How many GIDs a port has.
    fn gid_count(&self, port: u8) -> Result<usize>;
    /// The GID of the port that has this LID.
    fn gid_of_lid(&self, lid: u16) -> Result<Gid>;
}

impl Ports for api::Context {
    fn link_layer(&self, port: u8) -> Result<LinkLayer> {
        Ok(self.port(port)?.link_layer)
    }

    fn gid_count(&self, port: u8) -> Result<usize> {
        Ok(self.port(port)?.gids.len())
    }

    fn gid_of_lid(&self, lid: u16) -> Result<Gid> {
        self.gid_of_lid(lid)
    }
}

/// The path that an address vector describes.
pub fn path(attr: &ibv_ah_attr, ports: &impl Ports) -> Result<PathAttr> {
    let mut path = PathAttr { dest_gid: destination(attr, ports)?, ..PathAttr::from(attr) };
    // No device looks at bits beyond the field, and UCX sets all that there are where it wants no
    // label.
    path.flow_label &= MAX_FLOW_LABEL;
    path.check()?;
    Ok(path)
}

/// The peer that an address vector names. RoCE needs a global route; whether it leads from the GID
/// that is named to the peer is the device's to say. In an InfiniBand subnet the LID leads to the
/// peer; a global route may be there too, and stands for the LID where that is 0.
fn destination(attr: &ibv_ah_attr, ports: &impl Ports) -> Result<Gid> {
    let infiniband = ports.link_layer(attr.port_num)? == LinkLayer::Infiniband;
    let (index, count) = (attr.grh.sgid_index, ports.gid_count(attr.port_num)?);
    if attr.is_global != 0 && usize::from(index) >= count {
        return Err(Error::invalid(format!(
            "sgid_index {index}: this port has {count} GIDs (count from 0)"
        )));
    }
    match (infiniband, attr.is_global != 0) {
        (true, global) if attr.dlid != 0 || !global => ports.gid_of_lid(attr.dlid),
        // SAFETY: all members of the union are plain bytes.
        (_, true) => Ok(Gid(unsafe { attr.grh.dgid.raw })),
        (_, false) => Err(Error::invalid(
            "is_global is 0: RoCE addresses peers by GID, set is_global and grh.dgid",
        )),
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    pass!(ibv_create_ah(pd, attr));
    pointer("ibv_create_ah", || {
        // SAFETY: an object of ours and the caller's structure.
        let (owner, attr) = unsafe { (PdObj::of(pd)?, crate::ffi::deref(attr, "attr")?) };
        let c = ibv_ah { context: owner.c.context, pd, handle: 0 };
        let path = path(attr, &*owner.api)?;
        owner.api.check_path(&path)?;
        Ok(Box::into_raw(Box::new(AhObj { c, path })).cast())
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    pass!(ibv_destroy_ah(ah));
    code("ibv_destroy_ah", || {
        // SAFETY: an address handle of ours that the program gives up, made by Box.
        unsafe { free(AhObj::of(ah)?) };
        Ok(())
    })
}

/// The 40 bytes before a received datagram, as RoCEv2 has them: an IPv6 header, or an IPv4 header
/// in the last 20 bytes.
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
    pass!(ibv_init_ah_from_wc(context, port, wc, grh, attr));
    crate::ffi::minus_one("ibv_init_ah_from_wc", || {
        // SAFETY: an object of ours and the caller's structures. The GRH lies in a receive buffer,
        // at any alignment.
        let (owner, wc) = unsafe { (ContextObj::of(context)?, crate::ffi::deref(wc, "wc")?) };
        let port_attr = owner.api.port(port)?;
        let with_grh = wc.wc_flags & WcFlags::GRH != 0;
        if grh.is_null() && (with_grh || port_attr.link_layer == LinkLayer::Ethernet) {
            return Err(Error::invalid("grh is NULL, but it holds the sender's address"));
        }
        // SAFETY: plain integers.
        let mut a: ibv_ah_attr = unsafe { zeroed() };
        a.port_num = port;
        a.sl = wc.sl;
        a.dlid = wc.slid;
        a.src_path_bits = wc.dlid_path_bits;
        if !with_grh {
            if port_attr.link_layer == LinkLayer::Ethernet {
                return Err(Error::invalid(
                    "the completion has no GRH, which holds the sender's address in RoCE",
                ));
            }
            // SAFETY: the caller's structure.
            unsafe { attr.write(a) };
            return Ok(());
        }
        // SAFETY: as above.
        let (from, to, hop_limit, traffic_class, flow_label) =
            route_back(&unsafe { grh.read_unaligned() });
        let sent_to = |e: &GidEntry| e.gid == to && e.kind != GidType::RoceV1;
        let index = port_attr.gids.iter().position(sent_to).unwrap_or(0);
        a.is_global = 1;
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
    pass!(ibv_create_ah_from_wc(pd, wc, grh, port));
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
pub mod tests {
    use super::*;

    /// A device with one port, where LID 5 is known.
    pub struct OnePort(pub LinkLayer);

    impl Ports for OnePort {
        fn link_layer(&self, port: u8) -> Result<LinkLayer> {
            (port == 1).then_some(self.0).ok_or_else(|| Error::invalid(format!("port {port}")))
        }

        fn gid_count(&self, _: u8) -> Result<usize> {
            Ok(2)
        }

        fn gid_of_lid(&self, lid: u16) -> Result<Gid> {
            (lid == 5).then_some(Gid([5; 16])).ok_or_else(|| Error::invalid(format!("LID {lid}")))
        }
    }

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
    fn ethernet_needs_a_gid() {
        // SAFETY: plain integers.
        let mut attr: ibv_ah_attr = unsafe { zeroed() };
        let port = OnePort(LinkLayer::Ethernet);
        assert!(destination(&attr, &port).unwrap_err().to_string().contains("port 0"));
        attr.port_num = 1;
        attr.dlid = 5;
        assert!(destination(&attr, &port).unwrap_err().to_string().contains("is_global"));
        attr.is_global = 1;
        assert_eq!(destination(&attr, &port).unwrap(), Gid::default());
        attr.grh.sgid_index = 1;
        assert_eq!(destination(&attr, &port).unwrap(), Gid::default());
        attr.grh.sgid_index = 2;
        assert!(destination(&attr, &port).unwrap_err().to_string().contains("sgid_index 2"));
    }

    #[test]
    fn infiniband_goes_by_the_lid() {
        // SAFETY: plain integers.
        let mut attr: ibv_ah_attr = unsafe { zeroed() };
        let port = OnePort(LinkLayer::Infiniband);
        attr.port_num = 1;
        assert!(destination(&attr, &port).unwrap_err().to_string().contains("LID 0"));
        attr.dlid = 5;
        assert_eq!(destination(&attr, &port).unwrap(), Gid([5; 16]));
        attr.is_global = 1;
        attr.grh.dgid = ibv_gid { raw: [9; 16] };
        assert_eq!(destination(&attr, &port).unwrap(), Gid([5; 16]), "the subnet's way");
        attr.dlid = 0;
        assert_eq!(destination(&attr, &port).unwrap(), Gid([9; 16]));
    }
}
