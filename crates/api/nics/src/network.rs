//! Whose an address is, for programs that connect by address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use unbroken_fabric::Fabric;
use unbroken_runtime::{now_us, Runtime};
use unbroken_softnic::{Config, NicSource};
use unbroken_types::{Gid, LinkLayer};
use unbroken_verbs::{Error, Result};

/// The name that a host has where NICs are addresses of its interfaces: ports are of a network
/// namespace, as those of TCP.
fn machine_name() -> String {
    let namespace = std::fs::metadata("/proc/self/ns/net").map_or(0, |meta| meta.ino());
    format!("machine-{namespace}")
}

/// A port of a NIC of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnPort {
    /// Index of the NIC: that of the device.
    pub nic: usize,
    /// The port, from 1.
    pub port: u8,
    /// Its address.
    pub ip: IpAddr,
}

/// Where an address is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// At a host that shares the runtime folder: its name, and the number of the NIC there.
    Host(String, usize),
    /// Beyond a real network.
    Beyond,
}

/// The network that the NICs of this process are in.
pub struct Network {
    runtime: Runtime,
    /// This host.
    host: String,
    own: Vec<OwnPort>,
    fabric: Option<Fabric>,
}

impl Network {
    /// The network that the environment names. Devices of the machine are the kernel's to connect.
    pub fn from_env() -> Result<Network> {
        if crate::names_devices() {
            return Err(Error::unsupported("devices of the machine are connected by the kernel"));
        }
        let config = Config::from_env()?;
        let invalid = |e: unbroken_fabric::FabricError| Error::invalid(e.to_string());
        let mut own = Vec::new();
        let (host, fabric) = match &config.nics {
            NicSource::Addresses(addresses, _) => {
                let ports = addresses.iter().enumerate();
                own.extend(ports.map(|(nic, ip)| OwnPort { nic, port: 1, ip: *ip }));
                (machine_name(), None)
            }
            NicSource::Host(host) => {
                let fabric = Fabric::open(&config.runtime).map_err(invalid)?;
                for nic in 0..fabric.nic_count(host).map_err(invalid)? {
                    for port in 1..=fabric.nic_kind(host, nic).ports {
                        let ip = fabric.port_addr(host, nic, port).map_err(invalid)?.into();
                        own.push(OwnPort { nic: nic.into(), port, ip });
                    }
                }
                (host.clone(), Some(fabric))
            }
        };
        Ok(Network { runtime: config.runtime, host, own, fabric })
    }

    /// Whether its NICs are emulated, and not addresses of interfaces.
    pub fn is_emulated(&self) -> bool {
        self.fabric.is_some()
    }

    /// The runtime folder.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Its path.
    pub fn folder(&self) -> &Path {
        self.runtime.path()
    }

    /// The name of this host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The ports of this process's NICs.
    pub fn own(&self) -> &[OwnPort] {
        &self.own
    }

    /// The port of ours that has this address.
    pub fn own_port(&self, ip: IpAddr) -> Option<OwnPort> {
        self.own.iter().find(|port| port.ip == ip).copied()
    }

    /// Where an address is; `None`: it is nobody's.
    pub fn locate(&self, ip: IpAddr) -> Option<Place> {
        if let Some(port) = self.own_port(ip) {
            return Some(Place::Host(self.host.clone(), port.nic));
        }
        match (&self.fabric, ip) {
            (None, _) => Some(Place::Beyond),
            (Some(fabric), IpAddr::V4(ip)) => {
                let nic = fabric.locate(ip)?;
                Some(Place::Host(nic.host, nic.index.into()))
            }
            (Some(_), IpAddr::V6(_)) => None,
        }
    }

    /// The hosts that share the loopback interface of this machine, this one first.
    pub fn hosts(&self) -> Vec<String> {
        let others = self.fabric.iter().flat_map(|fabric| fabric.hosts());
        let others = others.map(|host| host.name.clone()).filter(|name| *name != self.host);
        std::iter::once(self.host.clone()).chain(others).collect()
    }

    /// The address of a NIC of a host, counted on from the first where there are not so many.
    pub fn address(&self, host: &str, nic: usize) -> Option<IpAddr> {
        if host == self.host {
            let first_ports: Vec<_> = self.own.iter().filter(|port| port.port == 1).collect();
            return first_ports.get(nic % first_ports.len().max(1)).map(|port| port.ip);
        }
        let fabric = self.fabric.as_ref()?;
        let count = usize::from(fabric.nic_count(host).ok()?.max(1));
        fabric.nic_addr(host, (nic % count) as u8).ok().map(IpAddr::V4)
    }

    /// The GID of the port that has this address.
    pub fn gid(&self, ip: IpAddr) -> Gid {
        let nic = match (&self.fabric, ip) {
            (Some(fabric), IpAddr::V4(ip)) => fabric.locate(ip).map(|nic| (fabric, nic, ip)),
            _ => None,
        };
        match nic {
            Some((fabric, nic, ip))
                if fabric.nic_kind(&nic.host, nic.index).link_layer == LinkLayer::Infiniband =>
            {
                Gid::link_local(ip)
            }
            _ => Gid::from_ip(ip),
        }
    }

    /// Whether packets leave that port, as far as is known.
    pub fn works(&self, port: &OwnPort) -> bool {
        let Some(fabric) = &self.fabric else { return true };
        let view = fabric.nic_view(&self.host, port.nic as u8);
        view.is_ok_and(|mut view| {
            let state = view.state(now_us());
            state.alive && state.port_up(port.port)
        })
    }

    /// The port of ours that packets to an address leave by, as the kernel's routes have it; `None`
    /// in an emulated network, which has none.
    pub fn route(&self, to: IpAddr) -> Option<OwnPort> {
        if self.fabric.is_some() {
            return None;
        }
        let any = match to {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
        };
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
        // No packet leaves by this: the kernel only looks for the route.
        socket.connect(SocketAddr::new(to, unbroken_softnic::ROCE_PORT)).ok()?;
        self.own_port(socket.local_addr().ok()?.ip())
    }
}
