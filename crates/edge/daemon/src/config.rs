//! `edge.toml`: what one host, or one switch, is to be. An error names the line.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;
use unbroken_edge_rules::{Mac, Offload, Own, Settings, Tenant as OverlayTenant, VXLAN_PORT};

use crate::error::{EdgeError, Result};

/// The port of the external VXLAN device. It cannot share the wire's port with the devices that
/// have an id.
pub const VTEP_PORT: u16 = 4790;
/// The name of the external VXLAN device.
pub const VTEP: &str = "vtep";
/// The longest name of a network device.
const NAME_BYTES: usize = 15;
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
    /// How many virtual functions.
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
    /// The network namespace that the other end is in.
    pub netns: Option<String>,
    /// The MAC address of the virtual function.
    pub mac: Option<Mac>,
    /// With veth: the address of the other end.
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
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawUplink {
    device: Spanned<String>,
    address: Spanned<String>,
    peer: Spanned<String>,
    peer_asn: u32,
    peer_loopback: Spanned<String>,
    #[serde(default)]
    backup: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawNic {
    pci: Spanned<String>,
    virtual_functions: Spanned<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPort {
    representor: Spanned<String>,
    veth: Option<Spanned<String>>,
    netns: Option<Spanned<String>>,
    mac: Option<Spanned<String>>,
    address: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTenant {
    vni: Spanned<u32>,
    #[serde(default)]
    port: Vec<RawPort>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    name: Spanned<String>,
    #[serde(default)]
    role: Role,
    loopback: Spanned<String>,
    asn: Spanned<u32>,
    mtu: Option<Spanned<u32>>,
    #[serde(default)]
    rules: Rules,
    priority: Option<Spanned<u16>>,
    resync_s: Option<Spanned<u32>>,
    #[serde(default)]
    fast_failover: bool,
    #[serde(default = "yes")]
    frr: bool,
    bfd: Option<Spanned<Bfd>>,
    #[serde(default)]
    nic: Vec<RawNic>,
    uplink: Vec<RawUplink>,
    #[serde(default)]
    tenant: Vec<RawTenant>,
}

fn yes() -> bool {
    true
}

impl Config {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Config> {
        let text = std::fs::read_to_string(path).map_err(EdgeError::at(path.display()))?;
        Config::parse(&text).map_err(EdgeError::at(path.display()))
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

fn line_of(text: &str, place: usize) -> usize {
    1 + text.as_bytes().iter().take(place).filter(|b| **b == b'\n').count()
}

/// Checks values and knows their lines.
struct Check<'a> {
    text: &'a str,
}

impl Check<'_> {
    fn at(&self, span: Range<usize>, why: impl std::fmt::Display) -> EdgeError {
        EdgeError::config(line_of(self.text, span.start), why)
    }

    fn name(&self, name: Spanned<String>) -> Result<String> {
        let text = name.get_ref();
        let good = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if text.is_empty()
            || text.len() > NAME_BYTES
            || !text.chars().all(good)
            || text.starts_with(['.', '-'])
        {
            let why = format!(
                "'{text}' is not a name: 1 to {NAME_BYTES} letters, digits, '_', '-' or '.'"
            );
            return Err(self.at(name.span(), why));
        }
        Ok(name.into_inner())
    }

    fn value<T: std::str::FromStr>(&self, value: &Spanned<String>, what: &str) -> Result<T> {
        value
            .get_ref()
            .parse()
            .map_err(|_| self.at(value.span(), format!("'{}' is not {what}", value.get_ref())))
    }

    fn ranged<T: PartialOrd + Copy + std::fmt::Display>(
        &self,
        value: Option<Spanned<T>>,
        default: T,
        range: std::ops::RangeInclusive<T>,
        what: &str,
    ) -> Result<T> {
        let Some(value) = value else { return Ok(default) };
        if range.contains(value.get_ref()) {
            return Ok(*value.get_ref());
        }
        let why = format!(
            "{what} is {}; it may be {} to {}",
            value.get_ref(),
            range.start(),
            range.end()
        );
        Err(self.at(value.span(), why))
    }

    fn config(&self, raw: Raw) -> Result<Config> {
        let bfd_at = raw.bfd.as_ref().map(Spanned::span).unwrap_or_default();
        let bfd = raw.bfd.map_or(Bfd { interval_ms: 300, multiplier: 3 }, Spanned::into_inner);
        if !(10..=60_000).contains(&bfd.interval_ms) || !(2..=255).contains(&bfd.multiplier) {
            return Err(
                self.at(bfd_at, "bfd: interval_ms may be 10 to 60000 and multiplier 2 to 255")
            );
        }
        if raw.fast_failover && !raw.frr {
            return Err(EdgeError::config(
                1,
                "fast_failover needs FRR's BFD; it cannot be with frr = false",
            ));
        }
        let config = Config {
            name: self.name(raw.name)?,
            role: raw.role,
            loopback: self.value(&raw.loopback, "an IPv4 address")?,
            asn: self.ranged(Some(raw.asn), 0, 1..=4_294_967_294, "asn")?,
            mtu: self.ranged(raw.mtu, 1450, 1280..=65_000, "mtu")?,
            rules: raw.rules,
            priority: self.ranged(
                raw.priority,
                unbroken_edge_rules::DEFAULT_PRIORITY,
                1..=65_535,
                "priority",
            )?,
            resync_s: self.ranged(raw.resync_s, 10, 1..=3600, "resync_s")?,
            fast_failover: raw.fast_failover,
            frr: raw.frr,
            bfd,
            nics: raw.nic.into_iter().map(|n| self.nic(n)).collect::<Result<_, _>>()?,
            uplinks: raw.uplink.into_iter().map(|u| self.uplink(u)).collect::<Result<_, _>>()?,
            tenants: raw.tenant.into_iter().map(|t| self.tenant(t)).collect::<Result<_, _>>()?,
        };
        self.whole(&config)?;
        Ok(config)
    }

    fn uplink(&self, raw: RawUplink) -> Result<Uplink> {
        let line = line_of(self.text, raw.device.span().start);
        let address: Net =
            self.value(&raw.address, "an address with a length, as in 10.1.1.1/31")?;
        let peer: Ipv4Addr = self.value(&raw.peer, "an IPv4 address")?;
        if !address.contains(peer) || peer == address.address {
            let why =
                format!("the peer {peer} must be another address in the network of {address}");
            return Err(self.at(raw.peer.span(), why));
        }
        Ok(Uplink {
            device: self.name(raw.device)?,
            address,
            peer,
            peer_asn: raw.peer_asn,
            peer_loopback: self.value(&raw.peer_loopback, "an IPv4 address")?,
            backup: raw.backup,
            line,
        })
    }

    fn nic(&self, raw: RawNic) -> Result<Nic> {
        let (pci, span) = (raw.pci.get_ref(), raw.pci.span());
        // domain:bus:device.function, in hexadecimal digits: it becomes part of a path and of a
        // command.
        let parts: Vec<&str> = pci.split([':', '.']).collect();
        let lens: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        let digits =
            parts.iter().all(|part| part.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f')));
        if lens != [4, 2, 2, 1] || !digits || pci.as_bytes()[10] != b'.' {
            return Err(self.at(
                span,
                format!("'{pci}' is not an address of a PCI device, as in 0000:03:00.0"),
            ));
        }
        let functions =
            self.ranged(Some(raw.virtual_functions), 0, 1..=MOST_FUNCTIONS, "virtual_functions")?;
        Ok(Nic { line: line_of(self.text, span.start), pci: raw.pci.into_inner(), functions })
    }

    fn tenant(&self, raw: RawTenant) -> Result<Tenant> {
        let line = line_of(self.text, raw.vni.span().start);
        let vni = self.ranged(Some(raw.vni), 0, 1..=0xFF_FFFF, "vni")?;
        let ports = raw.port.into_iter().map(|p| self.port(p)).collect::<Result<_, _>>()?;
        Ok(Tenant { vni, ports, line })
    }

    fn port(&self, raw: RawPort) -> Result<Port> {
        let span = raw.representor.span();
        if raw.veth.is_none() && (raw.netns.is_some() || raw.address.is_some()) {
            return Err(
                self.at(span, "netns and address are for a port that has veth, which is made here")
            );
        }
        let mac = raw
            .mac
            .map(|m| m.get_ref().parse::<Mac>().map_err(|e| self.at(m.span(), e)))
            .transpose()?;
        if mac.is_some_and(|m| !m.is_unicast() || m == Mac::ZERO) {
            return Err(self.at(span, "the mac of a port must be that of one station"));
        }
        Ok(Port {
            line: line_of(self.text, span.start),
            representor: self.name(raw.representor)?,
            veth: raw.veth.map(|v| self.name(v)).transpose()?,
            netns: raw.netns.map(|n| self.name(n)).transpose()?,
            mac,
            address: raw
                .address
                .map(|a| self.value(&a, "an address with a length, as in 10.1.1.1/24"))
                .transpose()?,
        })
    }

    /// What no single value shows.
    fn whole(&self, config: &Config) -> Result<()> {
        let mut seen = BTreeSet::from(["lo".to_owned(), VTEP.to_owned()]);
        let mut device = |name: &str, line: usize| match seen.insert(name.to_owned()) {
            true => Ok(()),
            false => Err(EdgeError::config(
                line,
                format!(
                    "the device name '{name}' is taken (by another entry, or by what is made here)"
                ),
            )),
        };
        let (links, tenants) = (&config.uplinks, &config.tenants);
        if links.is_empty() || links.len() > MOST_UPLINKS || tenants.len() > MOST_TENANTS {
            return Err(EdgeError::config(
                1,
                format!("there may be 1 to {MOST_UPLINKS} uplinks and 0 to {MOST_TENANTS} tenants"),
            ));
        }
        if config.nics.len() > MOST_NICS {
            return Err(EdgeError::config(
                config.nics[MOST_NICS].line,
                format!("there may be {MOST_NICS} NICs"),
            ));
        }
        let mut nics = BTreeSet::new();
        if let Some(twice) = config.nics.iter().find(|nic| !nics.insert(&nic.pci)) {
            return Err(EdgeError::config(
                twice.line,
                format!("the NIC {} is named twice", twice.pci),
            ));
        }
        let (mut peers, mut switches) = (BTreeSet::new(), BTreeMap::new());
        for uplink in links {
            device(&uplink.device, uplink.line)?;
            if !peers.insert(uplink.peer) {
                return Err(EdgeError::config(
                    uplink.line,
                    format!("two uplinks have the peer {}", uplink.peer),
                ));
            }
            let loopback = uplink.peer_loopback;
            if loopback == config.loopback {
                return Err(EdgeError::config(
                    uplink.line,
                    format!("the peer's loopback {loopback} is our own"),
                ));
            }
            // Over several uplinks to it there is one session of EVPN.
            if *switches.entry(loopback).or_insert(uplink.peer_asn) != uplink.peer_asn {
                return Err(EdgeError::config(
                    uplink.line,
                    format!("two uplinks to {loopback} have different peer_asn"),
                ));
            }
        }
        let mut vnis = BTreeSet::new();
        for tenant in tenants {
            if config.role == Role::Switch {
                return Err(EdgeError::config(tenant.line, "a switch has no tenants"));
            }
            if !vnis.insert(tenant.vni) {
                return Err(EdgeError::config(
                    tenant.line,
                    format!("two tenants have the vni {}", tenant.vni),
                ));
            }
            device(&tenant.anchor(), tenant.line)?;
            device(&tenant.bridge(), tenant.line)?;
            for port in &tenant.ports {
                device(&port.representor, port.line)?;
                if let (Some(veth), None) = (&port.veth, &port.netns) {
                    device(veth, port.line)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"name = "h1"
loopback = "10.255.0.1"
asn = 65001

[[uplink]]
device = "p1"
address = "10.1.1.1/31"
peer = "10.1.1.0"
peer_asn = 65101
peer_loopback = "10.255.1.1"

[[tenant]]
vni = 100

[[tenant.port]]
representor = "rep0"
veth = "vf0"
mac = "02:00:00:00:00:01"
address = "192.168.9.1/24"
"#;

    const SECOND: &str = r#"[[uplink]]
device = "p2"
address = "10.2.1.1/31"
peer = "10.2.1.0"
peer_asn = 65102
peer_loopback = "10.255.1.1"
[[tenant]]"#;

    #[test]
    fn a_good_file_is_read() {
        let config = Config::parse(GOOD).unwrap();
        assert_eq!((config.asn, config.role, config.rules), (65001, Role::Host, Rules::None));
        assert_eq!(
            (config.tenants[0].anchor(), config.tenants[0].bridge()),
            ("vni100".into(), "unb100".into())
        );
        assert_eq!(config.overlay(), None);
        let settings =
            Config::parse(&GOOD.replace("\nloopback", "\nrules = \"skip_hw\"\nloopback"))
                .unwrap()
                .overlay()
                .unwrap();
        assert_eq!(settings.tenants[0].ports, ["rep0"]);
    }

    const NIC: &str = "[[nic]]\npci = \"0000:03:00.0\"\nvirtual_functions = 2\n";

    #[test]
    fn a_nic_is_read() {
        let text = GOOD.replacen("[[uplink]]", &format!("{NIC}[[uplink]]"), 1);
        assert_eq!(
            Config::parse(&text).unwrap().nics,
            [Nic { pci: "0000:03:00.0".into(), functions: 2, line: 6 }]
        );
        let cases = [
            (
                "0000:03:00.0",
                "0000:03:00:0",
                "line 6: '0000:03:00:0' is not an address of a PCI device",
            ),
            ("0000:03:00.0", "../../:03:.0", "is not an address of a PCI device"),
            ("= 2", "= 0", "line 7: virtual_functions is 0; it may be 1 to"),
            (NIC, &NIC.repeat(2), "line 9: the NIC 0000:03:00.0 is named twice"),
        ];
        for (from, to, why) in cases {
            let error = Config::parse(&text.replacen(from, to, 1)).unwrap_err();
            assert!(error.to_string().contains(why), "{to}: {error}");
        }
    }

    #[test]
    fn an_error_names_the_line_and_the_value() {
        let cases = [
            ("asn = 65001", "asn = 0", "line 3: asn is 0; it may be 1 to"),
            ("asn = 65001", "asn = 65001\nfast = true", "line 4: unknown field"),
            ("10.255.0.1", "10.255.0", "line 2: '10.255.0' is not an IPv4 address"),
            ("10.1.1.1/31", "10.1.1.1", "line 7: '10.1.1.1' is not an address with a length"),
            (
                "peer = \"10.1.1.0\"",
                "peer = \"10.1.2.0\"",
                "line 8: the peer 10.1.2.0 must be another address in",
            ),
            (
                "\"p1\"",
                "\"a name that is too long\"",
                "line 6: 'a name that is too long' is not a name",
            ),
            ("10.255.1.1", "10.255.0.1", "line 6: the peer's loopback 10.255.0.1 is our own"),
            ("[[tenant]]", SECOND, "line 13: two uplinks to 10.255.1.1 have different peer_asn"),
            ("vni = 100", "vni = 16777216", "line 13: vni is 16777216; it may be 1 to 16777215"),
            ("veth = \"vf0\"", "veth = \"p1\"", "line 16: the device name 'p1' is taken"),
            ("02:00:00:00:00:01", "02:00:00", "line 18: '02:00:00' is not a MAC address"),
            (
                "02:00:00:00:00:01",
                "01:00:5e:00:00:01",
                "line 16: the mac of a port must be that of one station",
            ),
            ("veth = \"vf0\"\n", "", "line 16: netns and address are for a port that has veth"),
            (
                "[[tenant]]",
                "[bfd]\ninterval_ms = 5\nmultiplier = 3\n[[tenant]]",
                "bfd: interval_ms may be 10 to 60000",
            ),
            ("name =", "role = \"switch\"\nname =", "line 14: a switch has no tenants"),
            ("name =", "name", "line 1:"),
        ];
        for (from, to, why) in cases {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD);
            let error = Config::parse(&text).unwrap_err();
            assert!(error.to_string().contains(why), "{to}: {error}");
        }
    }
}
