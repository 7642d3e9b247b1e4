//! The RDMA devices of a machine, as the kernel shows them in files. The folders are arguments, so
//! that tests have their own.

use std::fs;
use std::io;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

use unbroken_nics::{choose_gid, MAX_GIDS};
use unbroken_shift::Place;
use unbroken_types::{Gid, GidType};
use unbroken_verbs::GidEntry;

use super::pci::Pci;

/// Devices that are looked at.
const MAX_DEVICES: usize = 64;
/// Ports of a device that are looked at.
const MAX_PORTS: u8 = 8;

/// Where the kernel shows things.
pub(crate) struct Roots {
    /// `/sys`
    pub(crate) sys: PathBuf,
    /// `/dev`
    pub(crate) dev: PathBuf,
    /// `/proc`
    pub(crate) proc: PathBuf,
    /// `/boot`
    pub(crate) boot: PathBuf,
}

impl Default for Roots {
    fn default() -> Roots {
        Roots { sys: "/sys".into(), dev: "/dev".into(), proc: "/proc".into(), boot: "/boot".into() }
    }
}

/// What verbs are called through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    /// The kernel has made none.
    None,
    /// The kernel has one of this name, and this file of it is not there.
    Missing(PathBuf),
    /// This file cannot be opened, and why.
    Refused(PathBuf, String),
    /// It can be opened.
    Opens(PathBuf),
}

/// An RDMA device.
pub(crate) struct Device {
    pub(crate) name: String,
    /// InfiniBand or RoCE.
    pub(crate) is_channel_adapter: bool,
    pub(crate) node: Node,
    pub(crate) ports: Vec<Port>,
    pub(crate) pci: Option<Pci>,
    pub(crate) place: Option<Place>,
}

/// A port.
pub(crate) struct Port {
    /// From 1.
    pub(crate) number: u8,
    /// `ACTIVE`, `DOWN`, …; empty where it is not readable.
    pub(crate) state: String,
    /// `LinkUp`, `Disabled`, `Polling`, …
    pub(crate) physical: String,
    /// `100 Gb/sec (4X EDR)`
    pub(crate) rate: String,
    pub(crate) is_ethernet: bool,
    /// Index by index; empty ones keep their place.
    pub(crate) gids: Vec<GidEntry>,
    /// The network interface behind it.
    pub(crate) interface: Option<String>,
}

impl Port {
    pub(crate) fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }

    /// The GID by which peers reach it, and its index.
    pub(crate) fn chosen(&self) -> Option<(GidEntry, u8)> {
        let (_, index) = choose_gid(&self.gids)?;
        Some((self.gids[usize::from(index)], index))
    }
}

impl Device {
    /// Port 1, the one that queue pairs use.
    pub(crate) fn port(&self) -> Option<&Port> {
        self.ports.iter().find(|port| port.number == 1)
    }
}

/// The text of a file without the space around it; none where it cannot be read, or is empty.
pub(crate) fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The names in a folder, sorted; none where there is no such folder.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// All that the kernel shows.
pub(crate) fn devices(roots: &Roots) -> Vec<Device> {
    let folder = roots.sys.join("class/infiniband");
    let all = names(&folder).into_iter().take(MAX_DEVICES);
    all.map(|name| device(roots, &folder.join(&name), name)).collect()
}

fn device(roots: &Roots, folder: &Path, name: String) -> Device {
    let ports = (1..=MAX_PORTS).map(|n| (n, folder.join("ports").join(n.to_string())));
    let ports: Vec<Port> = ports.filter(|(_, p)| p.is_dir()).map(|(n, p)| port(n, &p)).collect();
    // Software devices (rxe) have none of their own; that of their interface is theirs.
    let interface = ports.first().and_then(|port| port.interface.clone());
    let below = interface.map(|name| roots.sys.join("class/net").join(name).join("device"));
    let own = folder.join("device");
    let of_interface = || below.as_deref();
    Device {
        is_channel_adapter: text(&folder.join("node_type")).is_none_or(|t| t.starts_with("1:")),
        node: node(roots, &name),
        pci: Pci::of(&own).or_else(|| Pci::of(of_interface()?)),
        place: Place::of_device(&own).or_else(|| Place::of_device(of_interface()?)),
        ports,
        name,
    }
}

fn node(roots: &Roots, device: &str) -> Node {
    let folder = roots.sys.join("class/infiniband_verbs");
    let of_device =
        |name: &String| text(&folder.join(name).join("ibdev")).is_some_and(|dev| dev == device);
    let Some(name) = names(&folder).into_iter().find(of_device) else { return Node::None };
    let file = roots.dev.join("infiniband").join(name);
    match fs::OpenOptions::new().read(true).write(true).open(&file) {
        Ok(_) => Node::Opens(file),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Node::Missing(file),
        Err(e) => Node::Refused(file, e.to_string()),
    }
}

fn port(number: u8, folder: &Path) -> Port {
    // `4: ACTIVE`
    let word = |name: &str| {
        let text = text(&folder.join(name)).unwrap_or_default();
        text.split_once(':').map_or(text.clone(), |(_, word)| word.trim().to_owned())
    };
    let is_ethernet = text(&folder.join("link_layer")).is_none_or(|layer| layer == "Ethernet");
    let mut gids: Vec<GidEntry> =
        (0..MAX_GIDS).map(|i| gid(folder, &i.to_string(), is_ethernet)).collect();
    while gids.last().is_some_and(|entry| entry.gid == Gid::default()) {
        gids.pop();
    }
    let interfaces = folder.join("gid_attrs/ndevs");
    Port {
        number,
        state: word("state"),
        physical: word("phys_state"),
        rate: text(&folder.join("rate")).unwrap_or_default(),
        is_ethernet,
        gids,
        interface: (0..MAX_GIDS).find_map(|i| text(&interfaces.join(i.to_string()))),
    }
}

/// An entry of the table; what is not there, or not readable, is an empty one.
fn gid(port: &Path, index: &str, is_ethernet: bool) -> GidEntry {
    let gid = text(&port.join("gids").join(index)).and_then(|t| t.parse::<Ipv6Addr>().ok());
    let kind = match text(&port.join("gid_attrs/types").join(index)).as_deref() {
        _ if !is_ethernet => GidType::Infiniband,
        Some("RoCE v2") => GidType::RoceV2,
        _ => GidType::RoceV1,
    };
    GidEntry { gid: gid.map_or_else(Gid::default, |ip| Gid(ip.octets())), kind }
}
