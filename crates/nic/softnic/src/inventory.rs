//! What there is, told without opening anything: for programs that look at NICs and do not use
//! them.

use crate::config::{Config, NicSource, MAX_NICS};
use crate::gids::{self, guid_of, lid_of};
use crate::netlink;
use std::net::IpAddr;
use unbroken_fabric::{now_us, DeviceKind, Fabric, NicCounters, NicKind, NicPage, Runtime, SM_LID};
use unbroken_types::LinkLayer;
use unbroken_verbs::{Error, GidEntry, Result};

/// A NIC as it is now.
#[derive(Clone, Debug)]
pub struct NicInfo {
    /// What its ports are attached to.
    pub link_layer: LinkLayer,
    /// Node GUID, host order.
    pub node_guid: u64,
    /// The network interface that carries its packets.
    pub interface: String,
    /// The NUMA node of that interface's device; `None` where it has none, or the machine does not
    /// say.
    pub numa_node: Option<u32>,
    /// Its ports, in order.
    pub ports: Vec<PortInfo>,
}

/// A port as it is now.
#[derive(Clone, Debug, Default)]
pub struct PortInfo {
    /// Its GIDs, in the order of its table.
    pub gids: Vec<GidEntry>,
    /// InfiniBand: its LID; else 0.
    pub lid: u16,
    /// InfiniBand: the LID of the subnet manager; else 0.
    pub sm_lid: u16,
    /// The NIC works and the port has a link.
    pub active: bool,
    /// What all processes together sent and received through it.
    pub counters: NicCounters,
}

fn invalid(e: impl ToString) -> Error {
    Error::invalid(e.to_string())
}

/// The NICs that the configuration names, in order.
pub fn inventory(config: &Config) -> Result<Vec<NicInfo>> {
    let runtime = &config.runtime;
    let mut found = Vec::new();
    match &config.nics {
        NicSource::Host(host) => {
            let fabric = Fabric::open(&config.runtime).map_err(invalid)?;
            for n in 0..fabric.nic_count(host).map_err(invalid)?.min(MAX_NICS as u8) {
                let NicKind { link_layer, ports, device, .. } = fabric.nic_kind(host, n);
                let state = fabric.nic_view(host, n).map_err(invalid)?.state(now_us());
                let mut infos = Vec::new();
                for port in 1..=ports {
                    let ip = IpAddr::V4(fabric.port_addr(host, n, port).map_err(invalid)?);
                    infos.push((ip, state.alive && state.port_up(port)));
                }
                found.push(info(runtime, &infos, link_layer, device)?);
            }
        }
        NicSource::Addresses(addrs, device) => {
            let up = netlink::link_states()
                .map_err(|e| Error::os("asking for the states of interfaces", &e))?;
            for ip in addrs {
                let index = interface(*ip)?.index;
                let active = up.get(&index).copied().unwrap_or(false);
                found.push(info(runtime, &[(*ip, active)], LinkLayer::Ethernet, *device)?);
            }
        }
    }
    Ok(found)
}

fn interface(ip: IpAddr) -> Result<netlink::Interface> {
    netlink::interface_of(ip).map_err(|e| Error::os("finding the NIC's interface", &e))
}

/// The index of the network interface that carries the packets of a port with these GIDs; 0 where
/// none does.
pub fn interface_index(gids: &[GidEntry]) -> u32 {
    let ip = gids.iter().map(|entry| entry.gid.to_ip()).find(|ip| match ip {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    });
    ip.and_then(|ip| interface(ip).ok()).map_or(0, |interface| interface.index)
}

/// A NIC whose ports have these addresses and work or not.
fn info(
    runtime: &Runtime,
    ports: &[(IpAddr, bool)],
    link_layer: LinkLayer,
    device: DeviceKind,
) -> Result<NicInfo> {
    let first = ports[0].0;
    let ports = ports
        .iter()
        .map(|&(ip, active)| {
            let lid = lid_of(ip, link_layer);
            let sm_lid = if lid == 0 { 0 } else { SM_LID };
            let counters = NicPage::open(runtime, ip).map_err(invalid)?.counters();
            Ok(PortInfo {
                gids: gids::table(ip, link_layer, device),
                lid,
                sm_lid,
                active,
                counters,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let interface = interface(first)?.name;
    let numa_node = std::fs::read_to_string(format!("/sys/class/net/{interface}/device/numa_node"));
    let numa_node = numa_node.ok().and_then(|text| text.trim().parse().ok());
    Ok(NicInfo { link_layer, node_guid: guid_of(first), interface, numa_node, ports })
}
