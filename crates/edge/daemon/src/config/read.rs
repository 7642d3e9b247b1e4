//! From the text of `edge.toml` to a configuration that can work, with the line of what cannot.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;
use unbroken_edge_rules::Mac;

use super::{
    Bfd, Config, Net, Nic, Port, Role, Rules, Tenant, Uplink, MOST_FUNCTIONS, MOST_NICS,
    MOST_TENANTS, MOST_UPLINKS, NAME_BYTES, VTEP,
};
use crate::error::{EdgeError, Result};

/// The numbers of autonomous systems; the last one is reserved.
const ASN: std::ops::RangeInclusive<u32> = 1..=4_294_967_294;
/// Lengths of networks with more than one machine in them.
const NET: std::ops::RangeInclusive<u8> = 8..=31;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawUplink {
    device: Spanned<String>,
    address: Spanned<String>,
    peer: Spanned<String>,
    peer_asn: Spanned<u32>,
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
    device: Option<Spanned<String>>,
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
pub(super) struct Raw {
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
pub(super) fn line_of(text: &str, place: usize) -> usize {
    1 + text.as_bytes().iter().take(place).filter(|b| **b == b'\n').count()
}

/// Checks values and knows their lines.
pub(super) struct Check<'a> {
    pub(super) text: &'a str,
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

    pub(super) fn config(&self, raw: Raw) -> Result<Config> {
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
        let asn = self.ranged(Some(raw.asn), 0, ASN, "asn")?;
        let config = Config {
            name: self.name(raw.name)?,
            role: raw.role,
            loopback: self.station(&raw.loopback)?,
            asn,
            lines: lines(self.text),
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
            uplinks: raw
                .uplink
                .into_iter()
                .map(|u| self.uplink(u, asn))
                .collect::<Result<_, _>>()?,
            tenants: raw.tenant.into_iter().map(|t| self.tenant(t)).collect::<Result<_, _>>()?,
        };
        self.whole(&config)?;
        Ok(config)
    }

    /// An address that a machine can have.
    fn station(&self, value: &Spanned<String>) -> Result<Ipv4Addr> {
        let address: Ipv4Addr = self.value(value, "an IPv4 address")?;
        if is_station(address) {
            return Ok(address);
        }
        let why = format!("{address} is the address of no machine; give one as 10.255.0.17");
        Err(self.at(value.span(), why))
    }

    /// An address that a machine can have in a network.
    fn net(&self, value: &Spanned<String>) -> Result<Net> {
        let net: Net = self.value(value, "an address with a length, as in 10.1.1.1/31")?;
        if !is_station(net.address) || !NET.contains(&net.length) || net.is_of_all() {
            let why = format!(
                "{net} is no address of a machine in a network; give one as 10.1.1.1/31, with a \
                 length of {} to {}",
                NET.start(),
                NET.end()
            );
            return Err(self.at(value.span(), why));
        }
        Ok(net)
    }

    fn uplink(&self, raw: RawUplink, own_asn: u32) -> Result<Uplink> {
        let line = line_of(self.text, raw.device.span().start);
        let address = self.net(&raw.address)?;
        let peer = self.station(&raw.peer)?;
        let asn_at = raw.peer_asn.span();
        let peer_asn = self.ranged(Some(raw.peer_asn), 0, ASN, "peer_asn")?;
        if peer_asn == own_asn {
            let why = format!(
                "peer_asn is {peer_asn}, and so is our own asn: the session is one of eBGP, and \
                 each machine needs an autonomous system of its own"
            );
            return Err(self.at(asn_at, why));
        }
        if !address.contains(peer) || peer == address.address {
            let why =
                format!("the peer {peer} must be another address in the network of {address}");
            return Err(self.at(raw.peer.span(), why));
        }
        Ok(Uplink {
            device: self.name(raw.device)?,
            address,
            peer,
            peer_asn,
            peer_loopback: self.station(&raw.peer_loopback)?,
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
            self.ranged(Some(raw.virtual_functions), 0, 0..=MOST_FUNCTIONS, "virtual_functions")?;
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
        let made_here = "netns is for a port that has veth, which is made here";
        let whose = "address is for a port that has veth, or device: that of the function";
        let both = "a port has veth or device, and not both";
        match (&raw.veth, &raw.device) {
            (None, _) if raw.netns.is_some() => return Err(self.at(span, made_here)),
            (None, None) if raw.address.is_some() => return Err(self.at(span, whose)),
            (Some(_), Some(_)) => return Err(self.at(span, both)),
            _ => {}
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
            device: raw.device.map(|d| self.name(d)).transpose()?,
            netns: raw.netns.map(|n| self.name(n)).transpose()?,
            mac,
            address: raw.address.map(|a| self.net(&a)).transpose()?,
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
        for uplink in links {
            device(&uplink.device, uplink.line)?;
        }
        uplinks(config)?;
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
                if let Some(function) = &port.device {
                    device(function, port.line)?;
                }
                if let (Some(veth), None) = (&port.veth, &port.netns) {
                    device(veth, port.line)?;
                }
            }
        }
        Ok(())
    }
}

/// What no single uplink shows.
fn uplinks(config: &Config) -> Result<()> {
    let (mut peers, mut switches) = (BTreeSet::new(), BTreeMap::new());
    for (place, uplink) in config.uplinks.iter().enumerate() {
        if !peers.insert(uplink.peer) {
            return Err(EdgeError::config(
                uplink.line,
                format!("two uplinks have the peer {}", uplink.peer),
            ));
        }
        apart(config, place)?;
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
    Ok(())
}

/// Packets of BGP, BFD and tunnels must have one way each: a network is that of one link, and a
/// loopback is in none.
fn apart(config: &Config, place: usize) -> Result<()> {
    let uplink = &config.uplinks[place];
    let refused = |why: String| Err(EdgeError::config(uplink.line, why));
    let net = uplink.address;
    let of_links = |address| config.uplinks.iter().find(|u| u.address.contains(address));
    if net.contains(config.loopback) {
        return refused(format!(
            "the loopback {} is in the network of {net}; give it one of its own",
            config.loopback
        ));
    }
    if let Some(link) = of_links(uplink.peer_loopback) {
        return refused(format!(
            "peer_loopback {} is in the network of {} of {}; give the neighbour's loopback, as \
             10.255.1.1",
            uplink.peer_loopback, link.address, link.device
        ));
    }
    let other = config.uplinks[..place]
        .iter()
        .find(|other| other.address.contains(net.address) || net.contains(other.address.address));
    match other {
        Some(other) => refused(format!(
            "{net} of {} and {} of {} overlap; each link needs a network of its own",
            uplink.device, other.address, other.device
        )),
        None => Ok(()),
    }
}

fn is_station(address: Ipv4Addr) -> bool {
    let first = address.octets()[0];
    first != 0 && first < 224 && !address.is_loopback()
}

/// The lines of the keys that stand in no table.
fn lines(text: &str) -> BTreeMap<String, usize> {
    let keys = text.lines().take_while(|line| !line.trim_start().starts_with('['));
    let key = |line: &str| line.split_once('=').map(|(key, _)| key.trim().to_owned());
    keys.enumerate().filter_map(|(n, line)| Some((key(line)?, n + 1))).collect()
}
