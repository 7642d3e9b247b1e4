//! Address handles: where a UD send goes.

use crate::ffi::{code, pointer};
use crate::objects::{free, AhObj, ContextObj, PdObj};
use crate::real::pass;
use std::ffi::c_int;
use std::mem::zeroed;
use unbroken_shift::api;
use unbroken_types::{Gid, GidType, Grh, LinkLayer, PathAttr, WcFlags, GRH_BYTES, MAX_FLOW_LABEL};
use unbroken_verbs::abi::{ibv_ah, ibv_ah_attr, ibv_context, ibv_gid, ibv_grh, ibv_pd, ibv_wc};
use unbroken_verbs::{Error, GidEntry, Result};

/// The port that address vectors begin at.
pub trait Ports {
    /// What a port, by number, is attached to.
    fn link_layer(&self, port: u8) -> Result<LinkLayer>;
    /// How many GIDs a port has.
    fn gid_count(&self, port: u8) -> Result<usize>;
    /// The GID of the port that has this LID, which the address vector may name, too.
    fn gid_of_lid(&self, lid: u16, global: Option<Gid>) -> Result<Gid>;
}

impl Ports for api::Context {
    fn link_layer(&self, port: u8) -> Result<LinkLayer> {
        Ok(self.port(port)?.link_layer)
    }

    fn gid_count(&self, port: u8) -> Result<usize> {
        Ok(self.port(port)?.gids.len())
    }

    fn gid_of_lid(&self, lid: u16, global: Option<Gid>) -> Result<Gid> {
        self.gid_of_lid(lid, global)
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
    // SAFETY: all members of the union are plain bytes.
    let global = (attr.is_global != 0).then_some(Gid(unsafe { attr.grh.dgid.raw }));
    match global {
        _ if infiniband && (attr.dlid != 0 || global.is_none()) => {
            ports.gid_of_lid(attr.dlid, global)
        }
        Some(gid) => Ok(gid),
        None => Err(Error::invalid(
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
        // SAFETY: as above; ibv_grh is 40 bytes without padding.
        let header = Grh::parse(&unsafe { grh.cast::<[u8; GRH_BYTES]>().read_unaligned() })
            .ok_or_else(|| Error::invalid("grh is neither of IPv4 nor of IPv6"))?;
        let sent_to = |e: &GidEntry| e.gid == header.destination && e.kind != GidType::RoceV1;
        let index = port_attr.gids.iter().position(sent_to).unwrap_or(0);
        a.is_global = 1;
        a.grh.dgid = ibv_gid { raw: header.source.0 };
        a.grh.sgid_index = index as u8;
        a.grh.hop_limit = header.hop_limit;
        a.grh.traffic_class = header.traffic_class;
        a.grh.flow_label = header.flow_label;
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

        fn gid_of_lid(&self, lid: u16, _global: Option<Gid>) -> Result<Gid> {
            (lid == 5).then_some(Gid([5; 16])).ok_or_else(|| Error::invalid(format!("LID {lid}")))
        }
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
