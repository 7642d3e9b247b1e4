//! Tables and rules as plain data, as far as the overlay looks at them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::str::FromStr;

use crate::mutants::Mutation;

/// The cookie of every action that is ours (tc allows 16 bytes).
pub const COOKIE: &[u8] = b"unbroken-edge";
/// The priority of our filters unless another is configured.
pub const DEFAULT_PRIORITY: u16 = 4789;
/// The UDP port of VXLAN.
pub const VXLAN_PORT: u16 = 4789;

/// A MAC address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Entries with this address are for floods, not for a destination.
    pub const ZERO: Mac = Mac([0; 6]);

    /// Whether it is the address of one station, not of a group.
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Mac, String> {
        let wrong =
            || format!("'{text}' is not a MAC address; it has six bytes, as in 02:00:00:00:00:01");
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
        }
        parts.next().is_none().then_some(Mac(bytes)).ok_or_else(wrong)
    }
}

/// Where rules are to work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Offload {
    /// In the kernel alone.
    SkipHw,
    /// In the NIC if it can, and in the kernel.
    Both,
    /// In the NIC, or not at all.
    SkipSw,
}

/// What marks rules as ours, beside [`COOKIE`]. Nobody else may use the priority together with the
/// handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Own {
    /// The priority of our filters.
    pub priority: u16,
    /// The handles of our filters; there can be no more filters on a device than this has numbers.
    pub handles: Range<u32>,
    /// The indexes of our actions, of each kind.
    pub indexes: Range<u32>,
}

impl Default for Own {
    fn default() -> Own {
        Own {
            priority: DEFAULT_PRIORITY,
            handles: 0x0100_0000..0x0200_0000,
            indexes: 0x0100_0000..0x0200_0000,
        }
    }
}

/// One tenant: a network of its own, whatever addresses it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its VXLAN network identifier.
    pub vni: u32,
    /// The name of its VXLAN device, whose FDB is filled by EVPN and where its packets are
    /// decapsulated.
    pub anchor: String,
    /// The names of the representors of its virtual functions.
    pub ports: Vec<String>,
}

/// What is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The address of this host's end of all tunnels.
    pub loopback: Ipv4Addr,
    /// The UDP port that tunnels use on the wire.
    pub port: u16,
    /// The name of the external VXLAN device that packets to be encapsulated are redirected to.
    pub vtep: String,
    /// The tenants.
    pub tenants: Vec<Tenant>,
    /// Where rules are to work.
    pub offload: Offload,
    /// What is ours.
    pub own: Own,
    /// For tests: a rule that is left out.
    #[doc(hidden)]
    pub mutation: Mutation,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The kernel's number for it; another one after it was made again.
    pub ifindex: u32,
    /// Its name.
    pub name: String,
}

/// An entry of a bridge's or a VXLAN device's forwarding table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FdbEntry {
    /// The device that leads to the address.
    pub ifindex: u32,
    /// The address.
    pub mac: Mac,
    /// The host behind a VXLAN device.
    pub dst: Option<Ipv4Addr>,
    /// EVPN made it, not traffic.
    pub extern_learn: bool,
    /// The device's own address.
    pub permanent: bool,
}

/// The tables that rules are derived from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// The devices.
    pub links: Vec<Link>,
    /// The forwarding entries of all of them.
    pub fdb: Vec<FdbEntry>,
}

/// Kinds of actions; each numbers its actions for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionKind {
    /// Sets or removes what a tunnel device is to encapsulate with.
    TunnelKey,
    /// Moves the packet to another device.
    Mirred,
}

/// What an action does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionSpec {
    /// To be sent through a tunnel to another host.
    Encap {
        /// The tenant.
        vni: u32,
        /// This host.
        src: Ipv4Addr,
        /// The other.
        dst: Ipv4Addr,
        /// The UDP port at the other.
        dst_port: u16,
    },
    /// Has come out of a tunnel.
    Decap,
    /// To another device.
    Redirect {
        /// The device.
        ifindex: u32,
    },
}

impl ActionSpec {
    /// The kind of action that does this.
    pub fn kind(self) -> ActionKind {
        match self {
            ActionSpec::Encap { .. } | ActionSpec::Decap => ActionKind::TunnelKey,
            ActionSpec::Redirect { .. } => ActionKind::Mirred,
        }
    }
}

/// The name of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ActionId {
    /// Its kind.
    pub kind: ActionKind,
    /// Its number among those.
    pub index: u32,
}

/// An action that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action {
    /// Its name.
    pub id: ActionId,
    /// What it does; `None`: something that we never make.
    pub spec: Option<ActionSpec>,
    /// Whether it has our cookie.
    pub cookie: bool,
    /// Where it is to work; the kernel binds a filter only to actions that work where it does.
    pub offload: Offload,
    /// How many filters refer to it.
    pub bound: u32,
}

/// What a decapsulating NIC compares of the outer packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TunnelMatch {
    /// The tenant.
    pub vni: u32,
    /// This host.
    pub dst: Ipv4Addr,
    /// The UDP port at this host.
    pub port: u16,
}

/// What a filter compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Match {
    /// The destination.
    pub mac: Mac,
    /// The tunnel that it came out of.
    pub tunnel: Option<TunnelMatch>,
}

/// A filter that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// At the ingress of this device.
    pub ifindex: u32,
    /// Its priority.
    pub priority: u16,
    /// Its number among those of the device and the priority.
    pub handle: u32,
    /// What it compares; `None`: something that we never ask for.
    pub matches: Option<Match>,
    /// Its actions, in order, and whether each has our cookie.
    pub actions: Vec<(ActionId, bool)>,
    /// Where it is to work.
    pub offload: Offload,
    /// Whether a NIC has taken it.
    pub in_hw: bool,
}

/// The rules that exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// The devices that filters can be attached to (they have the qdisc `clsact`).
    pub clsact: BTreeSet<u32>,
    /// The filters of all devices, also those of others.
    pub filters: Vec<Filter>,
    /// The shared actions, also those of others.
    pub actions: Vec<Action>,
}

/// An operation on the kernel's rules; one message each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Make a device ready for filters.
    AddClsact {
        /// The device.
        ifindex: u32,
    },
    /// Make a shared action, with our cookie. Fails if the number is taken.
    AddAction {
        /// Its name.
        id: ActionId,
        /// What it does.
        spec: ActionSpec,
    },
    /// Make a filter (fails if the number is taken), or replace the one that has the number, in one
    /// step.
    PutFilter {
        /// The device.
        ifindex: u32,
        /// The number.
        handle: u32,
        /// Whether there is one already.
        replace: bool,
        /// What it compares.
        matches: Match,
        /// The shared actions that it refers to, in order.
        actions: [ActionId; 2],
    },
    /// Remove a filter.
    DelFilter {
        /// The device.
        ifindex: u32,
        /// The number.
        handle: u32,
    },
    /// Remove a shared action.
    DelAction {
        /// Its name.
        id: ActionId,
    },
    /// For a mutant only: change what a shared action does.
    #[doc(hidden)]
    EditAction {
        /// Its name.
        id: ActionId,
        /// What it is to do.
        spec: ActionSpec,
    },
}

/// Devices by name.
pub(crate) fn names(links: &[Link]) -> BTreeMap<&str, u32> {
    links.iter().map(|l| (l.name.as_str(), l.ifindex)).collect()
}
