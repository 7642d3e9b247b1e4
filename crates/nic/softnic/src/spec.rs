//! NICs that may be opened, and what those of a process share.

use crate::config::MAX_NICS;
use crate::faults::InterfaceState;
use crate::flush::FlushKind;
use crate::memory::Domain;
use crate::netlink;
use std::net::IpAddr;
use std::sync::Arc;
use unbroken_fabric::{DeviceKind, Fabric, GapRecorder, NicKind, NicPage, Runtime};
use unbroken_types::{LinkLayer, Mtu};
use unbroken_verbs::{Error, Result, UdAliases};

/// Bytes around a payload: IPv6 and UDP headers, the longest RoCE header, padding and ICRC.
const OVERHEAD_BYTES: usize = 40 + 8 + 40 + 3 + 4;

/// A NIC that may be opened.
pub(crate) struct Spec {
    pub(crate) name: String,
    /// Of its ports, one or two.
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) mtu: Mtu,
    pub(crate) link_layer: LinkLayer,
    /// What it can do.
    pub(crate) device: DeviceKind,
    /// Port by port.
    pub(crate) pages: Vec<Arc<NicPage>>,
    /// Of a real one.
    pub(crate) interface: Option<Arc<InterfaceState>>,
}

/// What the NICs of a process share. A plain one has a domain of its own, and knows of no QP that
/// has moved.
#[derive(Clone)]
pub(crate) struct Common {
    pub(crate) domain: Arc<Domain>,
    pub(crate) gaps: Arc<GapRecorder>,
    /// Where UD QPs are that have moved.
    pub(crate) aliases: Arc<UdAliases>,
    /// Plain NICs: which of the ways to die each QP has.
    pub(crate) seed: u64,
    /// ... and how they flush.
    pub(crate) flush: FlushKind,
    /// Of their background threads.
    pub(crate) longest_sleep_us: u64,
}

impl Common {
    /// What a NIC of this kind has of it.
    pub(crate) fn of(&self, device: DeviceKind) -> Result<Common> {
        match device {
            DeviceKind::Full => Ok(self.clone()),
            DeviceKind::Plain => Ok(Common {
                domain: Arc::new(Domain::plain()?),
                aliases: Arc::default(),
                ..self.clone()
            }),
        }
    }
}

/// EINVAL, with the words of an error.
pub(crate) fn invalid(e: impl ToString) -> Error {
    Error::invalid(e.to_string())
}

/// The NICs of a host of the emulated network.
pub(crate) fn fabric_specs(runtime: &Runtime, fabric: &Fabric, host: &str) -> Result<Vec<Spec>> {
    let count = fabric.nic_count(host).map_err(invalid)?;
    let mtu = link_mtu("127.0.0.1".parse().expect("an address"))?.1;
    (0..count.min(MAX_NICS as u8))
        .map(|n| {
            let NicKind { link_layer, mtu: asked, ports, device } = fabric.nic_kind(host, n);
            let ips = (1..=ports)
                .map(|port| fabric.port_addr(host, n, port).map(IpAddr::V4).map_err(invalid))
                .collect::<Result<Vec<_>>>()?;
            let pages = pages(runtime, &ips)?;
            let name = format!("{host}/{n}");
            Ok(Spec { name, ips, mtu: mtu.min(asked), link_layer, device, pages, interface: None })
        })
        .collect()
}

/// The NICs at addresses of real interfaces.
pub(crate) fn interface_specs(
    runtime: &Runtime,
    addrs: &[IpAddr],
    device: DeviceKind,
) -> Result<Vec<Spec>> {
    let states =
        netlink::link_states().map_err(|e| Error::os("asking for the states of interfaces", &e))?;
    addrs
        .iter()
        .map(|&ip| {
            let (index, mtu) = link_mtu(ip)?;
            let interface = InterfaceState::new(index);
            interface.set_up(states.get(&index).copied().unwrap_or(false));
            let pages = pages(runtime, &[ip])?;
            let (name, link_layer, interface) =
                (ip.to_string(), LinkLayer::Ethernet, Some(Arc::new(interface)));
            Ok(Spec { name, ips: vec![ip], mtu, link_layer, device, pages, interface })
        })
        .collect()
}

fn pages(runtime: &Runtime, ips: &[IpAddr]) -> Result<Vec<Arc<NicPage>>> {
    ips.iter().map(|ip| Ok(Arc::new(NicPage::open(runtime, *ip).map_err(invalid)?))).collect()
}

/// Index and RDMA MTU of the interface that answers for an address.
fn link_mtu(ip: IpAddr) -> Result<(u32, Mtu)> {
    let interface =
        netlink::interface_of(ip).map_err(|e| Error::os("finding the NIC's interface", &e))?;
    Ok((interface.index, Mtu::fitting(interface.mtu, OVERHEAD_BYTES)))
}
