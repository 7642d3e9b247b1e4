//! What there is, told without opening anything: for programs that look at NICs and do not use them.

use crate::config::{Config, NicSource, MAX_NICS};
use crate::netlink;
use crate::nics::{gid_of, guid_of, lid_of};
use std::net::IpAddr;
use unbroken_fabric::{now_us, Fabric, SM_LID};
use unbroken_types::{Gid, LinkLayer};
use unbroken_verbs::{Error, Result};

/// A NIC as it is now.
#[derive(Clone, Debug)]
pub struct NicInfo {
    /// Its GID.
    pub gid: Gid,
    /// What its port is attached to.
    pub link_layer: LinkLayer,
    /// InfiniBand: the port's LID; else 0.
    pub lid: u16,
    /// InfiniBand: the LID of the subnet manager; else 0.
    pub sm_lid: u16,
    /// Node GUID, host order.
    pub node_guid: u64,
    /// The network interface that carries its packets.
    pub interface: String,
    /// It works and its port has a link.
    pub active: bool,
}

fn invalid(e: impl ToString) -> Error {
    Error::invalid(e.to_string())
}

/// The NICs that the configuration names, in order.
pub fn inventory(config: &Config) -> Result<Vec<NicInfo>> {
    let mut found = Vec::new();
    match &config.nics {
        NicSource::Host(host) => {
            let fabric = Fabric::open(&config.runtime).map_err(invalid)?;
            for n in 0..fabric.nic_count(host).map_err(invalid)?.min(MAX_NICS as u8) {
                let ip = IpAddr::V4(fabric.nic_addr(host, n).map_err(invalid)?);
                let state = fabric.nic_view(host, n).map_err(invalid)?.state(now_us());
                found.push(info(ip, fabric.nic_kind(host, n).link_layer, state.alive && state.port_up)?);
            }
        }
        NicSource::Addresses(addrs) => {
            let up = netlink::link_states().map_err(|e| Error::os("asking for the states of interfaces", &e))?;
            for ip in addrs {
                let index = interface(*ip)?.index;
                found.push(info(*ip, LinkLayer::Ethernet, up.get(&index).copied().unwrap_or(false))?);
            }
        }
    }
    Ok(found)
}

fn interface(ip: IpAddr) -> Result<netlink::Interface> {
    netlink::interface_of(ip).map_err(|e| Error::os("finding the NIC's interface", &e))
}

fn info(ip: IpAddr, link_layer: LinkLayer, active: bool) -> Result<NicInfo> {
    let lid = lid_of(ip, link_layer);
    let sm_lid = if lid == 0 { 0 } else { SM_LID };
    let (gid, node_guid, interface) = (gid_of(ip, link_layer), guid_of(ip), interface(ip)?.name);
    Ok(NicInfo { gid, link_layer, lid, sm_lid, node_guid, interface, active })
}
