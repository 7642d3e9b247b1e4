//! `edge.toml`: what one host, or one switch, is to be. An error names the line.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;

use serde::Deserialize;
use unbroken_edge_rules::{Mac, Offload, Own, Settings, Tenant as OverlayTenant, VXLAN_PORT};

use crate::error::{EdgeError, Result};

mod change;
mod read;

use read::{line_of, Check, Raw};

/// The port of the external VXLAN device. It cannot share the wire's port with the devices that
/// have an id.
pub const VTEP_PORT: u16 = 4790;
/// The name of the external VXLAN device.
pub const VTEP: &str = "vtep";
/// The longest name of a network device.
const NAME_BYTES: usize = 15;
/// A longer file is none.
const LARGEST_BYTES: u64 = 16 << 20;
const MOST_TENANTS: usize = 256;
const MOST_UPLINKS: usize = 512;
const MOST_NICS: usize = 16;
const MOST_FUNCTIONS: u32 = 1024;

/// What a machine does in the fabric.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Has tenants, and sends its own packets only.
    #[default]
    Host,
    /// Forwards between its links, and has no tenants.
    Switch,
}

/// Where the rules work.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Rules {
    /// There are none: the kernel's bridges and VXLAN devices carry the traffic.
    #[default]
    None,
    /// In the kernel.
    SkipHw,
    /// In the NIC if it can, and in the kernel.
    Both,
    /// In the NIC, or not at all.
    SkipSw,
}

/// An address and the length of its network, as `10.1.1.1/31`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Net {
    /// The address.
    pub address: Ipv4Addr,
    /// The length of the prefix.
    pub length: u8,
}

impl std::fmt::Display for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl std::str::FromStr for Net {
    type Err = EdgeError;

    fn from_str(text: &str) -> Result<Net> {
        let wrong = || {
            let why = format!("'{text}' is not an address with a length, as in 10.1.1.1/31");
            EdgeError::Refused(why)
        };
        let (address, length) = text.split_once('/').ok_or_else(wrong)?;
        let net = Net {
            address: address.parse().map_err(|_| wrong())?,
            length: length.parse().map_err(|_| wrong())?,
        };
        (net.length <= 32).then_some(net).ok_or_else(wrong)
    }
}

impl Net {
    /// Whether an address is in the network.
    pub fn contains(self, other: Ipv4Addr) -> bool {
        let shift = 32 - u32::from(self.length);
        (u64::from(u32::from(self.address)) >> shift) == (u64::from(u32::from(other)) >> shift)
    }

    /// Whether the address is that of the network, or of all machines in it. A network of two has
    /// neither.
    fn is_of_all(self) -> bool {
        let hosts = u32::MAX.checked_shr(self.length.into()).unwrap_or_default();
        let host = u32::from(self.address) & hosts;
        self.length < 31 && (host == 0 || host == hosts)
    }
}

/// When a silent neighbour is taken for dead.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Bfd {
    /// Between two packets, in milliseconds.
    pub interval_ms: u32,
    /// So many packets in a row must be missing.
    pub multiplier: u8,
}

/// A link to a switch (or, at a switch, to anything).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// The device.
    pub device: String,
    /// Our address on it.
    pub address: Net,
    /// The neighbour's.
    pub peer: Ipv4Addr,
    /// The neighbour's autonomous system.
    pub peer_asn: u32,
    /// The neighbour's loopback.
    pub peer_loopback: Ipv4Addr,
    /// Leads to a switch that has links to the same hosts. With `fast_failover` what has no other
    /// way goes this way at once, and at any time what came this way for a host of one's own goes
    /// to it and not back.
    pub backup: bool,
    /// The line in the file.
    pub line: usize,
}

/// A NIC that is to have virtual functions, each with a representor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its address on the PCI bus, as `0000:03:00.0`.
    pub pci: String,
    /// How many virtual functions; none where only the mode is to be set.
    pub functions: u32,
    /// The line in the file.
    pub line: usize,
}

/// A virtual function: a representor in the tenant's bridge, and the device that applications use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The representor.
    pub representor: String,
    /// With veth: the other end, made together with the representor.
    pub veth: Option<String>,
    /// Without veth: the device of the virtual function, which gets `mac` and `address`.
    pub device: Option<String>,
    /// The network namespace that the other end is in.
    pub netns: Option<String>,
    /// The MAC address of the virtual function.
    pub mac: Option<Mac>,
    /// The address of the other end, or of the virtual function.
    pub address: Option<Net>,
    /// The line in the file.
    pub line: usize,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its VXLAN network identifier.
    pub vni: u32,
    /// Its ports.
    pub ports: Vec<Port>,
    /// The line in the file.
    pub line: usize,
}

impl Tenant {
    /// The name of its VXLAN device.
    pub fn anchor(&self) -> String {
        format!("vni{}", self.vni)
    }

    /// The name of its bridge.
    pub fn bridge(&self) -> String {
        format!("unb{}", self.vni)
    }
}

/// A whole configuration, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The name of the host, and of its folder.
    pub name: String,
    /// What it does.
    pub role: Role,
    /// The address that is up as long as any link is.
    pub loopback: Ipv4Addr,
    /// Its autonomous system.
    pub asn: u32,
    /// The MTU of the VXLAN devices and what is attached to them.
    pub mtu: u32,
    /// Where the rules work.
    pub rules: Rules,
    /// The priority of our filters.
    pub priority: u16,
    /// The longest time between two looks at the tables, in seconds.
    pub resync_s: u32,
    /// The daemon acts on a dead neighbour itself, before BGP.
    pub fast_failover: bool,
    /// FRR is configured and run here; otherwise routes and forwarding entries are somebody else's
    /// work.
    pub frr: bool,
    /// When a neighbour is taken for dead.
    pub bfd: Bfd,
    /// NICs whose mode and virtual functions are set here.
    pub nics: Vec<Nic>,
    /// Links.
    pub uplinks: Vec<Uplink>,
    /// Tenants.
    pub tenants: Vec<Tenant>,
    /// The lines of the keys that stand in no table.
    pub(crate) lines: BTreeMap<String, usize>,
}

impl Config {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Config> {
        Config::parse(&Config::text(path)?).map_err(EdgeError::at(path.display()))
    }

    /// The text of a file, which is a regular one: root waits for no FIFO.
    pub fn text(path: &Path) -> Result<String> {
        unbroken_runtime::read_named(path, LARGEST_BYTES).map_err(EdgeError::at(path.display()))
    }

    /// Checks a text; an error begins with its line.
    pub fn parse(text: &str) -> Result<Config> {
        let raw: Raw = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |s| line_of(text, s.start));
            EdgeError::config(line, e.message())
        })?;
        Check { text }.config(raw)
    }

    /// What the reconciler needs; none where there are no rules.
    pub fn overlay(&self) -> Option<Settings> {
        let offload = match self.rules {
            Rules::None => return None,
            Rules::SkipHw => Offload::SkipHw,
            Rules::Both => Offload::Both,
            Rules::SkipSw => Offload::SkipSw,
        };
        let tenant = |t: &Tenant| OverlayTenant {
            vni: t.vni,
            anchor: t.anchor(),
            ports: t.ports.iter().map(|p| p.representor.clone()).collect(),
        };
        Some(Settings {
            loopback: self.loopback,
            port: VXLAN_PORT,
            vtep: VTEP.into(),
            tenants: self.tenants.iter().map(tenant).collect(),
            offload,
            own: Own { priority: self.priority, ..Own::default() },
            mutation: Default::default(),
        })
    }
}

#[cfg(test)]
mod tests;
