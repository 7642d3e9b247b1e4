//! What there is, told without opening anything: for programs that look at NICs and do not use them.

use crate::config::{Config, NicSource, MAX_NICS};
use crate::netlink;
use crate::nics::guid_of;
use std::net::IpAddr;
use unbroken_fabric::{now_us, Fabric};
use unbroken_types::Gid;
use unbroken_verbs::{Error, Result};

/// A NIC as it is now.
#[derive(Clone, Debug)]
pub struct NicInfo {
    /// Its GID.
    pub gid: Gid,
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
                found.push(info(ip, state.alive && state.port_up)?);
            }
        }
        NicSource::Addresses(addrs) => {
            let up = netlink::link_states().map_err(|e| Error::os("asking for the states of interfaces", &e))?;
            for ip in addrs {
                let index = interface(*ip)?.index;
                found.push(info(*ip, up.get(&index).copied().unwrap_or(false))?);
            }
        }
    }
    Ok(found)
}

fn interface(ip: IpAddr) -> Result<netlink::Interface> {
    netlink::interface_of(ip).map_err(|e| Error::os("finding the NIC's interface", &e))
}

fn info(ip: IpAddr, active: bool) -> Result<NicInfo> {
    Ok(NicInfo { gid: Gid::from_ip(ip), node_guid: guid_of(ip), interface: interface(ip)?.name, active })
}
