//! Which GID of a port stands for it: by which peers reach it, and backups connect.
//!
//! A port has one GID for each address of its interface and of each VLAN on it, once for each
//! version of RoCE, and also for interfaces of other network namespaces. Those of one network reach
//! each other, and a program names one of them where it connects. So the ports of a process follow
//! the program ([`closest`]), unless `UNBROKEN_GID` ([`GidChoice`]) says which. Until the program
//! has connected something it is a guess ([`best`]).

use crate::counters::SYSFS;
use std::cmp::Reverse;
use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use unbroken_types::{Gid, GidType};
use unbroken_verbs::{Error, GidEntry, Result};

/// Networks and addresses of a [`GidChoice`].
const MAX_NETWORKS: usize = 64;

/// What the user has said of GIDs (`UNBROKEN_GID`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GidChoice {
    /// That index of each port's table.
    Index(u8),
    /// The first that lies in one of these networks.
    Networks(Vec<Network>),
}

/// An IP network: an address and the bits of it that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// As a GID: IPv4 is mapped.
    base: Gid,
    bits: u32,
}

impl Network {
    fn parse(word: &str) -> Option<Network> {
        let (address, bits) = match word.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u32>().ok()?)),
            None => (word, None),
        };
        let ip: IpAddr = address.parse().ok()?;
        let (most, before) = if ip.is_ipv4() { (32, 96) } else { (128, 0) };
        let bits = bits.unwrap_or(most);
        (bits <= most).then(|| Network { base: Gid::from_ip(ip), bits: before + bits })
    }

    fn has(&self, gid: Gid) -> bool {
        common_bits(self.base, gid) >= self.bits
    }
}

impl GidChoice {
    /// Reads an index, or addresses and networks with commas.
    pub fn parse(text: &str) -> Result<GidChoice> {
        let text = text.trim();
        if let Ok(index) = text.parse() {
            return Ok(GidChoice::Index(index));
        }
        let networks: Option<Vec<Network>> =
            text.split(',').map(|word| Network::parse(word.trim())).collect();
        match networks {
            Some(networks) if networks.len() <= MAX_NETWORKS => Ok(GidChoice::Networks(networks)),
            _ => Err(Error::invalid(format!(
                "'{text}': an index of the GID table, 0 to 255 ('3'), or addresses and networks \
                 with commas, {MAX_NETWORKS} at most ('10.1.0.0/16,fd00:1::/32')"
            ))),
        }
    }

    fn allows(&self, index: u8, gid: Gid) -> bool {
        match self {
            GidChoice::Index(wanted) => *wanted == index,
            GidChoice::Networks(networks) => networks.iter().any(|network| network.has(gid)),
        }
    }
}

/// Bits that two GIDs begin with alike.
fn common_bits(a: Gid, b: Gid) -> u32 {
    (u128::from_be_bytes(a.0) ^ u128::from_be_bytes(b.0)).leading_zeros()
}

fn is_link_local(gid: Gid) -> bool {
    gid.0[..2] == [0xfe, 0x80]
}

/// The entries that there are, with their indexes.
fn present(gids: &[GidEntry]) -> impl Iterator<Item = (u8, &GidEntry)> {
    let there = |(index, entry): (usize, _)| Some((u8::try_from(index).ok()?, entry));
    gids.iter().enumerate().filter_map(there).filter(|(_, entry)| entry.gid != Gid::default())
}

/// How good a GID is where nothing else is known: RoCEv2 and IPv4, RoCEv2 else, or else the first.
fn rank(entry: &GidEntry) -> u8 {
    match entry.kind {
        GidType::RoceV2 if entry.gid.to_ipv4().is_some() => 0,
        GidType::RoceV2 if !is_link_local(entry.gid) => 1,
        GidType::RoceV2 => 2,
        GidType::Infiniband => 3,
        GidType::RoceV1 => 4,
    }
}

/// The best of the GIDs that are `wanted`, and its index: those that `is_ours` first.
fn best_of(
    gids: &[GidEntry],
    wanted: impl Fn(u8, Gid) -> bool,
    is_ours: impl Fn(Gid) -> bool,
) -> Option<(Gid, u8)> {
    present(gids)
        .filter(|(index, entry)| wanted(*index, entry.gid))
        .min_by_key(|(index, entry)| (rank(entry), !is_ours(entry.gid), *index))
        .map(|(index, entry)| (entry.gid, index))
}

/// The GID by which peers reach a port where nothing else is known, and its index: of RoCEv2 and
/// IPv4 where there is one, of RoCEv2 else, or else the first; first those of interfaces of this
/// network namespace.
pub fn choose_gid(gids: &[GidEntry]) -> Option<(Gid, u8)> {
    let ours = own_addresses();
    best_of(gids, |_, _| true, |gid| ours.contains(&gid))
}

/// Where a GID stands in a table. The same address stands there once for each version of RoCE.
pub(crate) fn index_of(gids: &[GidEntry], gid: Gid) -> Option<u8> {
    best_of(gids, |_, other| other == gid, |_| true).map(|(_, index)| index)
}

/// The GID of a device's port 1 that stands for it, by the user's choice if there is one. ENODEV:
/// it has none that is allowed.
pub(crate) fn first(name: &str, gids: &[GidEntry], choice: Option<&GidChoice>) -> Result<Gid> {
    let ours = own_addresses();
    let allowed = |index, gid| choice.is_none_or(|choice| choice.allows(index, gid));
    let found = best_of(gids, allowed, |gid| ours.contains(&gid));
    found.map(|(gid, _)| gid).ok_or_else(|| {
        let what = match choice {
            None => "has no GID".to_string(),
            Some(_) => format!("has no GID that UNBROKEN_GID allows; it has {}", Listed(gids)),
        };
        Error::new(libc::ENODEV, format!("{name}: port 1 {what}"))
    })
}

/// The GIDs of a table, for people.
struct Listed<'a>(&'a [GidEntry]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 16;
        for (nth, (index, entry)) in present(self.0).take(MOST).enumerate() {
            let comma = if nth > 0 { ", " } else { "" };
            write!(f, "{comma}{index}: {} ({:?})", entry.gid, entry.kind)?;
        }
        match present(self.0).count() {
            0 => write!(f, "none"),
            n if n > MOST => write!(f, ", and {} more", n - MOST),
            _ => Ok(()),
        }
    }
}

/// A GID that a program connects by: of what type it is, and in which VLAN where that is known.
pub(crate) struct Followed {
    pub(crate) gid: Gid,
    kind: GidType,
    vlan: Option<u16>,
}

impl Followed {
    /// That of a device at that index; none where it says nothing of networks.
    pub(crate) fn of(device: &str, gids: &[GidEntry], index: u8) -> Option<Followed> {
        let entry = gids.get(usize::from(index)).filter(|entry| entry.gid != Gid::default())?;
        let says = !is_link_local(entry.gid);
        says.then(|| Followed { gid: entry.gid, kind: entry.kind, vlan: vlan_of(device, index) })
    }

    /// The GID of another port that is most likely of the same network: of the same type, in the
    /// same VLAN, and with the most bits in common.
    pub(crate) fn closest(&self, device: &str, gids: &[GidEntry]) -> Option<Gid> {
        self.closest_by(gids, |index| vlan_of(device, index))
    }

    fn closest_by(&self, gids: &[GidEntry], vlan: impl Fn(u8) -> Option<u16>) -> Option<Gid> {
        let elsewhere = |index| matches!((self.vlan, vlan(index)), (Some(a), Some(b)) if a != b);
        present(gids)
            .filter(|(_, entry)| entry.kind == self.kind && !is_link_local(entry.gid))
            .min_by_key(|(index, entry)| {
                (elsewhere(*index), Reverse(common_bits(self.gid, entry.gid)), *index)
            })
            .map(|(_, entry)| entry.gid)
    }
}

/// The VLAN of the interface behind a GID; 0: none. None: the kernel does not say.
fn vlan_of(device: &str, index: u8) -> Option<u16> {
    let folder = Path::new(SYSFS).join(device).join("ports/1/gid_attrs/ndevs");
    let interface = std::fs::read_to_string(folder.join(index.to_string())).ok()?;
    vlan_in(&std::fs::read_to_string("/proc/net/vlan/config").unwrap_or_default(), interface.trim())
}

/// The VLAN of an interface by the kernel's list of them, whose lines are `eth0.5  | 5  | eth0`.
fn vlan_in(config: &str, interface: &str) -> Option<u16> {
    let mut lines = config.lines().map(|line| line.split('|').map(str::trim));
    let found = lines.find_map(|mut words| (words.next()? == interface).then(|| words.next())?);
    found.map_or(Some(0), |id| id.parse().ok())
}

/// The addresses of the interfaces of this network namespace, as GIDs; none where they cannot be
/// read.
fn own_addresses() -> Vec<Gid> {
    let mut list = std::ptr::null_mut();
    // SAFETY: a live local; the list is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let (mut found, mut at) = (Vec::new(), list);
    while !at.is_null() {
        // SAFETY: an entry of the list, which ends with a null pointer.
        let entry = unsafe { &*at };
        // SAFETY: an address of the list, or none.
        found.extend(unsafe { address(entry.ifa_addr) }.map(Gid::from_ip));
        at = entry.ifa_next;
    }
    // SAFETY: the list, once.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// # Safety
/// A valid address of the family that it says, or null.
unsafe fn address(at: *const libc::sockaddr) -> Option<IpAddr> {
    if at.is_null() {
        return None;
    }
    // SAFETY: promised by the caller.
    match i32::from(unsafe { (*at).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says what it is.
            let v4 = unsafe { &*at.cast::<libc::sockaddr_in>() };
            Some(IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says what it is.
            let v6 = unsafe { &*at.cast::<libc::sockaddr_in6>() };
            Some(IpAddr::from(v6.sin6_addr.s6_addr))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use GidType::{RoceV1, RoceV2};

    fn table(gids: &[(&str, GidType)]) -> Vec<GidEntry> {
        let entry = |(text, kind): &(&str, GidType)| {
            let gid = text.parse().map_or_else(|_| Gid::default(), Gid::from_ip);
            GidEntry { gid, kind: *kind }
        };
        gids.iter().map(entry).collect()
    }

    fn gid(text: &str) -> Gid {
        Gid::from_ip(text.parse().unwrap())
    }

    #[test]
    fn peers_are_told_the_address_that_is_routed() {
        let usual = table(&[
            ("fe80::1", RoceV1),
            ("fe80::1", RoceV2),
            ("10.0.0.1", RoceV1),
            ("10.0.0.1", RoceV2),
        ]);
        assert_eq!(choose_gid(&usual).unwrap().1, 3);
        assert_eq!(index_of(&usual, usual[0].gid), Some(1), "RoCE v2, too");
        let v6 = table(&[("fe80::1", RoceV2), ("", RoceV1), ("fd00::1", RoceV2)]);
        assert_eq!(choose_gid(&v6).unwrap().1, 2);
        assert_eq!(choose_gid(&table(&[("", RoceV1)])), None);
    }

    #[test]
    fn a_gid_of_another_namespace_is_not_the_first_choice() {
        let both = table(&[("10.9.0.1", RoceV2), ("10.0.0.1", RoceV2)]);
        let ours = |own: Gid| best_of(&both, |_, _| true, move |gid| gid == own).unwrap().1;
        assert_eq!(
            (ours(gid("10.0.0.1")), ours(gid("10.9.0.1")), ours(gid("10.7.0.1"))),
            (1, 0, 0)
        );
    }

    #[test]
    fn a_choice_is_an_index_or_networks() {
        let gids = table(&[("fe80::1", RoceV2), ("10.0.0.1", RoceV2), ("10.1.2.3", RoceV2)]);
        let chosen = |text: &str| {
            let choice = GidChoice::parse(text).unwrap();
            first("mlx5_0", &gids, Some(&choice)).map(|gid| gid.to_string())
        };
        assert_eq!(chosen("2").unwrap(), "10.1.2.3");
        assert_eq!(chosen("10.1.0.0/16").unwrap(), "10.1.2.3");
        assert_eq!(chosen("fd00::/8, 10.1.2.3").unwrap(), "10.1.2.3");
        assert_eq!(chosen("fe80::/64").unwrap(), "fe80::1");
        let e = chosen("10.2.0.0/16").unwrap_err().to_string();
        assert!(e.contains("mlx5_0") && e.contains("2: 10.1.2.3 (RoceV2)"), "{e}");
        for wrong in ["", "256", "10.0.0.0/33", "eth0", "10.0.0.1,", "-1"] {
            assert!(GidChoice::parse(wrong).unwrap_err().to_string().contains("'3'"), "{wrong}");
        }
    }

    #[test]
    fn backups_are_of_the_network_that_the_program_connects_by() {
        let other = table(&[
            ("10.0.2.1", RoceV1),
            ("10.0.2.1", RoceV2),
            ("10.100.2.1", RoceV1),
            ("10.100.2.1", RoceV2),
            ("fd00::2:1", RoceV2),
        ]);
        let follow = |text, vlan| Followed { gid: gid(text), kind: RoceV2, vlan };
        let closest = |text, vlan| {
            let tags = |index| Some(if index >= 2 { 100 } else { 0 });
            follow(text, vlan).closest_by(&other, tags).unwrap().to_string()
        };
        assert_eq!(closest("10.100.1.1", None), "10.100.2.1");
        assert_eq!(closest("10.0.1.1", None), "10.0.2.1");
        assert_eq!(closest("fd00::1:1", None), "fd00::2:1");
        assert_eq!(closest("10.0.1.1", Some(100)), "10.100.2.1", "the VLAN says more");
        assert!(follow("10.0.1.1", None)
            .closest_by(&table(&[("fe80::1", RoceV2)]), |_| None)
            .is_none());
    }

    #[test]
    fn vlans_are_read_from_the_kernels_list() {
        let config = "VLAN Dev name    | VLAN ID\nName-Type: VLAN_NAME_TYPE_RAW_PLUS_VID_NO_PAD\n\
                      eth0.100       | 100  | eth0\nstorage | 7 | eth1\n";
        let of = |interface| vlan_in(config, interface);
        assert_eq!((of("eth0.100"), of("storage"), of("eth0")), (Some(100), Some(7), Some(0)));
        assert_eq!(vlan_in("", "eth0"), Some(0));
    }
}
