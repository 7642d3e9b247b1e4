//! `fabric.toml`: who is there.
//!
//! ```toml
//! version = 1
//! octet = 77            # addresses are 127.<octet>.<host number>.<NIC>
//! link_layer = "ethernet"    # or "infiniband"; ethernet if nothing is said
//! ports = 1             # ports of a NIC: 1 or 2; 1 if nothing is said
//! mtu = 4096            # of a RoCE packet's payload: 256, 512, 1024, 2048 or 4096, which is what holds if nothing is said
//! device = "full"       # what NICs can do: "full", all that softnic can, or "plain", what an RNIC can; full if nothing is said
//!
//! [[host]]
//! name = "a"
//! number = 1
//! nics = 4
//!
//! [[nic]]               # a NIC that differs from the others
//! name = "a/3"
//! link_layer = "infiniband"  # each as for all others if nothing is said
//! mtu = 1024
//! ```
//!
//! Port 2 of a NIC has the last octet `64 + NIC`. An InfiniBand port has a LID that follows from
//! its address: `host number * 128 + last octet`.

use std::fmt;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;
use toml::Spanned;
use unbroken_types::{LinkLayer, Mtu};

use crate::error::{FabricError, Result};

/// Most hosts of a fabric.
pub const MAX_HOSTS: usize = 64;
/// Most NICs of a host.
pub const MAX_NICS: u8 = 64;
/// Most ports of a NIC.
pub const MAX_PORTS: u8 = 2;
/// The bit of the last octet that tells port 2 from port 1.
const PORT_2: u8 = 0x40;
/// Longest name of a host, in bytes.
const MAX_NAME: usize = 32;

/// A host of the fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name, `a`.
    pub name: String,
    /// The third octet of its addresses, 1 to 254.
    pub number: u8,
    /// NICs that it has; they count from 0, and NIC n is on rail n.
    pub nics: u8,
}

/// The name of a NIC, `a/0`, or of one of its ports, `a/0/2`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NicName {
    /// The host.
    pub host: String,
    /// The NIC, from 0.
    pub index: u8,
    /// The port, from 1; 0: the NIC with all its ports.
    pub port: u8,
}

impl NicName {
    /// NIC `index` of `host`.
    pub fn new(host: &str, index: u8) -> NicName {
        NicName { host: host.into(), index, port: 0 }
    }

    /// Port `port` of this NIC.
    pub fn at_port(&self, port: u8) -> NicName {
        NicName { port, ..self.clone() }
    }
}

impl fmt::Display for NicName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            0 => write!(f, "{}/{}", self.host, self.index),
            port => write!(f, "{}/{}/{port}", self.host, self.index),
        }
    }
}

impl FromStr for NicName {
    type Err = FabricError;

    fn from_str(text: &str) -> Result<NicName> {
        let wrong = || {
            FabricError::Name(format!(
                "'{text}' is not the name of a NIC; a NIC is named like 'a/0', its second port \
                 'a/0/2'"
            ))
        };
        let (host, index) = text.split_once('/').ok_or_else(wrong)?;
        let (index, port) = match index.split_once('/') {
            Some((index, "1")) => (index, 1),
            Some((index, "2")) => (index, 2),
            Some(_) => return Err(wrong()),
            None => (index, 0),
        };
        let index = index.parse().map_err(|_| wrong())?;
        if !is_host_name(host) {
            return Err(wrong());
        }
        Ok(NicName { host: host.into(), index, port })
    }
}

/// Whether two ports of emulated NICs are on one rail, and a switch joins them.
pub fn on_one_rail(a: IpAddr, b: IpAddr) -> bool {
    let rail = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets()[3] & !PORT_2,
        IpAddr::V6(_) => 0,
    };
    rail(a) == rail(b)
}

/// The LID of the InfiniBand port that has this address of a fabric: 128 to 32,639, different for
/// each.
pub fn lid_of(addr: Ipv4Addr) -> u16 {
    let [.., number, index] = addr.octets();
    u16::from(number) << 7 | u16::from(index & 0x7f)
}

/// The LID of the subnet manager that the ports of a fabric name. There is none; no port has this
/// LID.
pub const SM_LID: u16 = 1;

/// The name of a link layer in `fabric.toml`.
pub fn link_layer_name(link_layer: LinkLayer) -> &'static str {
    match link_layer {
        LinkLayer::Infiniband => "infiniband",
        LinkLayer::Ethernet => "ethernet",
    }
}

/// What a NIC can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// All that softnic can.
    #[default]
    Full,
    /// Plain verbs and nothing else, with an RNIC's habits.
    Plain,
}

/// The name of a kind of device in `fabric.toml`.
pub fn device_kind_name(device: DeviceKind) -> &'static str {
    match device {
        DeviceKind::Full => "full",
        DeviceKind::Plain => "plain",
    }
}

/// How a NIC is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicKind {
    /// What its ports are attached to.
    pub link_layer: LinkLayer,
    /// The MTU of its ports.
    pub mtu: Mtu,
    /// Its ports, 1 or 2.
    pub ports: u8,
    /// What it can do.
    pub device: DeviceKind,
}

impl Default for NicKind {
    fn default() -> NicKind {
        NicKind {
            link_layer: LinkLayer::Ethernet,
            mtu: Mtu::B4096,
            ports: 1,
            device: DeviceKind::Full,
        }
    }
}

impl NicKind {
    /// The lines of `fabric.toml`.
    fn to_toml(self) -> String {
        let (link_layer, mtu) = (link_layer_name(self.link_layer), self.mtu.bytes());
        let (ports, device) = (self.ports, device_kind_name(self.device));
        format!(
            "link_layer = \"{link_layer}\"\nmtu = {mtu}\nports = {ports}\ndevice = \"{device}\"\n"
        )
    }
}

/// What `fabric.toml` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The second octet of all addresses.
    pub octet: u8,
    /// How NICs are made.
    pub kind: NicKind,
    /// The hosts.
    pub hosts: Vec<Host>,
    /// The NICs that are made differently.
    pub specials: Vec<(NicName, NicKind)>,
}

impl Shape {
    /// Hosts of these names, numbered from 1, with `nics` NICs each.
    pub fn of(octet: u8, names: &[&str], nics: u8) -> Shape {
        let hosts = names
            .iter()
            .zip(1..)
            .map(|(name, number)| Host { name: (*name).into(), number, nics })
            .collect();
        Shape { octet, kind: NicKind::default(), hosts, specials: Vec::new() }
    }

    /// The default fabric: hosts a to d, four NICs each.
    pub fn standard(octet: u8) -> Shape {
        Shape::of(octet, &["a", "b", "c", "d"], 4)
    }

    /// The address of a port by numbers of the host, the NIC and the port; nothing is checked.
    pub(crate) fn addr(&self, number: u8, index: u8, port: u8) -> Ipv4Addr {
        Ipv4Addr::new(127, self.octet, number, if port > 1 { index | PORT_2 } else { index })
    }

    /// The port that has this address.
    pub(crate) fn locate(&self, addr: Ipv4Addr) -> Option<NicName> {
        let [first, octet, number, last] = addr.octets();
        let host = self.hosts.iter().find(|h| h.number == number)?;
        let (index, port) = (last & !PORT_2, if last & PORT_2 == 0 { 1 } else { 2 });
        let there = first == 127 && octet == self.octet && index < host.nics;
        (there && port <= self.kind(&host.name, index).ports)
            .then(|| NicName::new(&host.name, index).at_port(port))
    }

    /// How a NIC is made.
    pub(crate) fn kind(&self, host: &str, index: u8) -> NicKind {
        let special = self.specials.iter().find(|(nic, _)| nic.host == host && nic.index == index);
        special.map_or(self.kind, |(_, kind)| *kind)
    }

    /// Rails, which is the NICs of the host that has most.
    pub fn rails(&self) -> u8 {
        self.hosts.iter().map(|h| h.nics).max().unwrap_or(0)
    }

    /// The text of the file.
    pub fn to_toml(&self) -> String {
        let mut text = String::from(
            "# The emulated network: the NIC n of a host is 127.<octet>.<host number>.<n>.\n",
        );
        let _ = write!(text, "version = 1\noctet = {}\n{}", self.octet, self.kind.to_toml());
        for host in &self.hosts {
            let _ = write!(
                text,
                "\n[[host]]\nname = \"{}\"\nnumber = {}\nnics = {}\n",
                host.name, host.number, host.nics
            );
        }
        for (nic, kind) in &self.specials {
            let _ = write!(text, "\n[[nic]]\nname = \"{nic}\"\n{}", kind.to_toml());
        }
        text
    }

    /// Reads the text of the file at `path` (named in errors only).
    pub fn parse(text: &str, path: &Path) -> Result<Shape> {
        let path = path.display().to_string();
        let config =
            |line: usize, what: String| FabricError::Config { path: path.clone(), line, what };
        let file: File = toml::from_str(text).map_err(|e| {
            config(line_of(text, e.span()), e.message().lines().collect::<Vec<_>>().join("; "))
        })?;
        let check = |span: Range<usize>, right: bool, what: String| {
            right.then_some(()).ok_or_else(|| config(line_of(text, Some(span)), what))
        };
        let version = *file.version.get_ref();
        check(
            file.version.span(),
            version == 1,
            format!("version is {version}; this program knows version 1"),
        )?;
        let octet = *file.octet.get_ref();
        check(
            file.octet.span(),
            (1..=254).contains(&octet),
            format!("octet is {octet}; 1 to 254 are right"),
        )?;
        let count = file.host.len();
        check(
            0..0,
            (1..=MAX_HOSTS).contains(&count),
            format!("{count} hosts; 1 to {MAX_HOSTS} are right"),
        )?;
        let at = |span: Range<usize>, what: String| config(line_of(text, Some(span)), what);
        let common = kind_of(NicKind::default(), file.written(), at)?;
        let mut hosts: Vec<Host> = Vec::new();
        for host in &file.host {
            let (name, number, nics) =
                (host.name.get_ref(), *host.number.get_ref(), *host.nics.get_ref());
            let rule = format!("a host is named by 1 to {MAX_NAME} of a-z, 0-9 and _, not 'rail…'");
            check(host.name.span(), is_host_name(name), format!("host name '{name}': {rule}"))?;
            let twice = hosts.iter().any(|h| h.name == *name);
            check(host.name.span(), !twice, format!("host '{name}' is there twice"))?;
            let fits = (1..=254).contains(&number);
            check(
                host.number.span(),
                fits,
                format!("number {number} of host '{name}': 1 to 254 are right"),
            )?;
            let other =
                hosts.iter().find(|h| i64::from(h.number) == number).map_or("", |h| &h.name);
            let free = other.is_empty();
            check(
                host.number.span(),
                free,
                format!("number {number} of host '{name}' is that of host '{other}'"),
            )?;
            let fits = (1..=i64::from(MAX_NICS)).contains(&nics);
            check(
                host.nics.span(),
                fits,
                format!("{nics} NICs of host '{name}': 1 to {MAX_NICS} are right"),
            )?;
            hosts.push(Host { name: name.clone(), number: number as u8, nics: nics as u8 });
        }
        let mut specials: Vec<(NicName, NicKind)> = Vec::new();
        for entry in &file.nic {
            let nic = NicName::from_str(entry.name.get_ref())
                .map_err(|e| config(line_of(text, Some(entry.name.span())), e.to_string()))?;
            let known =
                nic.port == 0 && hosts.iter().any(|h| h.name == nic.host && nic.index < h.nics);
            check(
                entry.name.span(),
                known,
                format!("there is no NIC '{nic}': no host above has it"),
            )?;
            let first = specials.iter().all(|(other, _)| *other != nic);
            check(entry.name.span(), first, format!("NIC '{nic}' is there twice"))?;
            specials.push((nic, kind_of(common, entry.written(), at)?));
        }
        Ok(Shape { octet: octet as u8, kind: common, hosts, specials })
    }
}

/// Settings of NICs as they are written.
struct Written<'a> {
    link_layer: &'a Option<Spanned<String>>,
    mtu: &'a Option<Spanned<i64>>,
    ports: &'a Option<Spanned<i64>>,
    device: &'a Option<Spanned<String>>,
}

/// A kind of NIC that differs from another in what is written.
fn kind_of(
    base: NicKind,
    written: Written<'_>,
    at: impl Fn(Range<usize>, String) -> FabricError,
) -> Result<NicKind> {
    let mut kind = base;
    if let Some(name) = written.link_layer {
        kind.link_layer = link_layer(name.get_ref()).map_err(|what| at(name.span(), what))?;
    }
    if let Some(bytes) = written.mtu {
        kind.mtu = mtu(*bytes.get_ref()).map_err(|what| at(bytes.span(), what))?;
    }
    if let Some(count) = written.ports {
        kind.ports = ports(*count.get_ref()).map_err(|what| at(count.span(), what))?;
    }
    if let Some(name) = written.device {
        kind.device = device_kind(name.get_ref()).map_err(|what| at(name.span(), what))?;
    }
    Ok(kind)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: Spanned<i64>,
    octet: Spanned<i64>,
    link_layer: Option<Spanned<String>>,
    mtu: Option<Spanned<i64>>,
    ports: Option<Spanned<i64>>,
    device: Option<Spanned<String>>,
    #[serde(default)]
    host: Vec<HostEntry>,
    #[serde(default)]
    nic: Vec<NicEntry>,
}

impl File {
    fn written(&self) -> Written<'_> {
        Written {
            link_layer: &self.link_layer,
            mtu: &self.mtu,
            ports: &self.ports,
            device: &self.device,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostEntry {
    name: Spanned<String>,
    number: Spanned<i64>,
    nics: Spanned<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NicEntry {
    name: Spanned<String>,
    link_layer: Option<Spanned<String>>,
    mtu: Option<Spanned<i64>>,
    ports: Option<Spanned<i64>>,
    device: Option<Spanned<String>>,
}

impl NicEntry {
    fn written(&self) -> Written<'_> {
        Written {
            link_layer: &self.link_layer,
            mtu: &self.mtu,
            ports: &self.ports,
            device: &self.device,
        }
    }
}

/// The link layer of that name, or what would be right.
pub fn link_layer(name: &str) -> std::result::Result<LinkLayer, String> {
    [LinkLayer::Ethernet, LinkLayer::Infiniband]
        .into_iter()
        .find(|l| link_layer_name(*l) == name)
        .ok_or_else(|| format!("link_layer is '{name}'; 'ethernet' and 'infiniband' are right"))
}

/// The MTU of so many bytes, or what would be right.
pub fn mtu(bytes: i64) -> std::result::Result<Mtu, String> {
    (1..=5)
        .filter_map(Mtu::from_code)
        .find(|m| m.bytes() as i64 == bytes)
        .ok_or_else(|| format!("mtu is {bytes}; 256, 512, 1024, 2048 and 4096 are right"))
}

/// So many ports, or what would be right.
pub fn ports(count: i64) -> std::result::Result<u8, String> {
    let right = (1..=i64::from(MAX_PORTS)).contains(&count);
    right.then_some(count as u8).ok_or_else(|| format!("ports is {count}; 1 and 2 are right"))
}

/// The kind of device of that name, or what would be right.
pub fn device_kind(name: &str) -> std::result::Result<DeviceKind, String> {
    [DeviceKind::Full, DeviceKind::Plain]
        .into_iter()
        .find(|d| device_kind_name(*d) == name)
        .ok_or_else(|| format!("device is '{name}'; 'full' and 'plain' are right"))
}

/// The line, from 1, at which a span begins.
fn line_of(text: &str, span: Option<Range<usize>>) -> usize {
    let start = span.map_or(0, |s| s.start).min(text.len());
    text.as_bytes()[..start].iter().filter(|b| **b == b'\n').count() + 1
}

/// A name without the characters that separate names elsewhere, and not that of a rail.
pub(crate) fn is_host_name(name: &str) -> bool {
    let plain = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    (1..=MAX_NAME).contains(&name.len()) && plain && !name.starts_with("rail")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Shape::parse(text, Path::new("/x/fabric.toml")).unwrap_err().to_string()
    }

    #[test]
    fn text_round_trip() {
        let shape = Shape::standard(77);
        assert_eq!(Shape::parse(&shape.to_toml(), Path::new("x")).unwrap(), shape);
        assert_eq!(shape.rails(), 4);
        assert_eq!(shape.addr(1, 0, 1), Ipv4Addr::new(127, 77, 1, 0));
    }

    #[test]
    fn settings_of_nics() {
        let mut shape = Shape::standard(77);
        shape.kind = NicKind {
            link_layer: LinkLayer::Infiniband,
            mtu: Mtu::B1024,
            ports: 2,
            device: DeviceKind::Plain,
        };
        shape.specials = vec![(NicName::new("b", 1), NicKind::default())];
        assert_eq!(Shape::parse(&shape.to_toml(), Path::new("x")).unwrap(), shape);
        let port = "c/3/2".parse::<NicName>().unwrap();
        assert_eq!(
            (shape.addr(3, 3, 2), port.to_string()),
            (Ipv4Addr::new(127, 77, 3, 67), "c/3/2".into())
        );
        assert_eq!(shape.locate(shape.addr(3, 3, 2)), Some(port));
        assert_eq!(shape.locate(shape.addr(2, 1, 2)), None, "it has one port");
        assert_eq!((shape.kind("b", 1), shape.kind("a", 1)), (NicKind::default(), shape.kind));
        let old = Shape::parse(
            "version = 1\noctet = 77\n[[host]]\nname = \"a\"\nnumber = 1\nnics = 1\n",
            Path::new("x"),
        );
        assert_eq!(old.unwrap().kind, NicKind::default());
    }

    #[test]
    fn lids_differ() {
        assert_eq!(lid_of(Ipv4Addr::new(127, 77, 1, 0)), 128);
        assert_eq!(lid_of(Ipv4Addr::new(127, 77, 254, 127)), 32_639);
    }

    #[test]
    fn a_wrong_line_is_named() {
        let good = Shape::standard(77).to_toml();
        let text = error(&good.replace("octet = 77", "octet = 300"));
        assert_eq!(text, "/x/fabric.toml:3: octet is 300; 1 to 254 are right");
        let text = error(&good.replacen("nics = 4", "nisc = 4", 1));
        assert!(
            text.starts_with("/x/fabric.toml:12: ")
                && text.contains("nisc")
                && text.contains("`nics`"),
            "{text}"
        );
        let text = error(&good.replace("number = 2", "number = 1"));
        assert_eq!(text, "/x/fabric.toml:16: number 1 of host 'b' is that of host 'a'");
        let text = error(&good.replace("\"b\"", "\"a\""));
        assert_eq!(text, "/x/fabric.toml:15: host 'a' is there twice");
        let text = error(&good.replace("version = 1", "version = 9"));
        assert!(text.starts_with("/x/fabric.toml:2: version is 9"), "{text}");
        let text = error(&good.replace("nics = 4", "nics = \"four\""));
        assert!(text.starts_with("/x/fabric.toml:12: "), "{text}");
        let text = error(&good.replace("name = \"c\"", "name = \"rail0\""));
        assert!(text.starts_with("/x/fabric.toml:20: host name 'rail0'"), "{text}");
        let text = error(&good.replace("ethernet", "infinband"));
        assert_eq!(
            text,
            "/x/fabric.toml:4: link_layer is 'infinband'; 'ethernet' and 'infiniband' are right"
        );
        let text = error(&good.replace("ports = 1", "ports = 3"));
        assert_eq!(text, "/x/fabric.toml:6: ports is 3; 1 and 2 are right");
        let text = error(&good.replace("\"full\"", "\"plane\""));
        assert_eq!(text, "/x/fabric.toml:7: device is 'plane'; 'full' and 'plain' are right");
        let text = error(&good.replace("mtu = 4096", "mtu = 1500"));
        assert_eq!(text, "/x/fabric.toml:5: mtu is 1500; 256, 512, 1024, 2048 and 4096 are right");
        let text = error(&(good.clone() + "[[nic]]\nname = \"a/4\"\nlink_layer = \"ethernet\"\n"));
        assert!(text.contains("there is no NIC 'a/4'"), "{text}");
        assert!(error("version = 1\noctet = 77\n").contains("0 hosts"));
        assert!(error("version 1").starts_with("/x/fabric.toml:1: "));
    }

    #[test]
    fn names_of_nics() {
        assert_eq!("a/0".parse::<NicName>().unwrap(), NicName::new("a", 0));
        for wrong in [
            "", "a", "a/", "/0", "a/x", "a/256", "A/0", "a-b/0", "a/0/0", "a/0/3", "a/0/1/1",
            "rail0/1",
        ] {
            assert!(wrong.parse::<NicName>().is_err(), "{wrong}");
        }
    }
}
