//! The GIDs of ports: their tables, and where each entry leads.
//!
//! A NIC with all powers is reached by its address and by its GUID, whichever entry a packet is
//! sent from. A plain one has the table of an RNIC under Linux: each GID twice, as RoCE v1 and as
//! RoCE v2, the link-local one first.
//!
//! ```text
//!   index   GID             type      leads to
//!     0     fe80::GUID      RoCE v1   nobody: no router takes link-local addresses, nor frames without IP
//!     1     fe80::GUID      RoCE v2   nobody
//!     2     the address     RoCE v1   nobody
//!     3     the address     RoCE v2   every peer that is named by its address
//! ```
//!
//! What leads to nobody is taken all the same, as long as Linux can resolve the peer's address
//! (`ib_resolve_unicast_gid_dmac`): both must be IPv4 or both IPv6, but for a link-local peer under
//! RoCE v1, which needs no resolution. Else it is EINVAL. An InfiniBand port has one GID.

use std::net::{IpAddr, Ipv6Addr};
use unbroken_fabric::DeviceKind;
use unbroken_types::{port_guid, Gid, GidType, LinkLayer};
use unbroken_verbs::{Error, GidEntry, Result};

/// The index of the only GID of a plain RoCE port that leads anywhere.
const PLAIN_ROCE_INDEX: u8 = 3;
/// `fe80::/64`.
const LINK_LOCAL_PREFIX: u128 = 0xfe80 << 112;

/// A locally administered EUI-64 with the address in it.
pub(crate) fn guid_of(ip: IpAddr) -> u64 {
    match ip {
        IpAddr::V4(v4) => port_guid(v4),
        IpAddr::V6(v6) => u128::from(v6) as u64 | 0x0200_0000_0000_0000,
    }
}

/// The GID by which the port that has this address is reached.
pub(crate) fn gid_of(ip: IpAddr, link_layer: LinkLayer) -> Gid {
    match (link_layer, ip) {
        (LinkLayer::Infiniband, IpAddr::V4(v4)) => Gid::link_local(v4),
        _ => Gid::from_ip(ip),
    }
}

/// The LID of the port that has this address: 0 unless it is an InfiniBand port.
pub(crate) fn lid_of(ip: IpAddr, link_layer: LinkLayer) -> u16 {
    match (link_layer, ip) {
        (LinkLayer::Infiniband, IpAddr::V4(v4)) => unbroken_fabric::lid_of(v4),
        _ => 0,
    }
}

/// The table of the port that has this address.
pub(crate) fn table(ip: IpAddr, link_layer: LinkLayer, device: DeviceKind) -> Vec<GidEntry> {
    let entry = |gid, kind| GidEntry { gid, kind };
    let link_local = || Gid((LINK_LOCAL_PREFIX | u128::from(guid_of(ip))).to_be_bytes());
    match (link_layer, device, ip) {
        (LinkLayer::Infiniband, _, _) => vec![entry(gid_of(ip, link_layer), GidType::Infiniband)],
        (LinkLayer::Ethernet, DeviceKind::Plain, _) => [link_local(), Gid::from_ip(ip)]
            .into_iter()
            .flat_map(|gid| [entry(gid, GidType::RoceV1), entry(gid, GidType::RoceV2)])
            .collect(),
        (LinkLayer::Ethernet, DeviceKind::Full, IpAddr::V4(_)) => {
            vec![entry(Gid::from_ip(ip), GidType::RoceV2), entry(link_local(), GidType::RoceV2)]
        }
        (LinkLayer::Ethernet, DeviceKind::Full, IpAddr::V6(_)) => {
            vec![entry(Gid::from_ip(ip), GidType::RoceV2)]
        }
    }
}

/// The index of [`gid_of`] in the table.
pub(crate) fn index_of(link_layer: LinkLayer, device: DeviceKind) -> u8 {
    match (link_layer, device) {
        (LinkLayer::Ethernet, DeviceKind::Plain) => PLAIN_ROCE_INDEX,
        _ => 0,
    }
}

/// Whether packets that a plain port with this table sends from the GID at `index` reach a peer of
/// the GID `to`; EINVAL where Linux would not take them.
pub(crate) fn leads(table: &[GidEntry], index: u8, to: Gid) -> Result<bool> {
    let Some(from) = table.get(usize::from(index)) else {
        return Err(Error::invalid(format!(
            "sgid_index {index}: this port has {} GIDs (count from 0)",
            table.len()
        )));
    };
    let link_local = |gid: Gid| Ipv6Addr::from(gid.0).is_unicast_link_local();
    let same_family = from.gid.to_ipv4().is_some() == to.to_ipv4().is_some();
    match from.kind {
        GidType::Infiniband => Ok(true),
        GidType::RoceV1 if link_local(to) => Ok(false),
        _ if !same_family => Err(Error::invalid(format!(
            "no way from {} (sgid_index {index}) to {}: one is IPv4, the other IPv6",
            Ipv6Addr::from(from.gid.0),
            Ipv6Addr::from(to.0)
        ))),
        GidType::RoceV1 => Ok(false),
        GidType::RoceV2 => Ok(!link_local(from.gid) && !link_local(to)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_gid_of_a_plain_roce_port_leads_to_its_peers() {
        let plain = |ip: &str| table(ip.parse().unwrap(), LinkLayer::Ethernet, DeviceKind::Plain);
        let gids = |ip: &str| {
            plain(ip).iter().map(|e| Ipv6Addr::from(e.gid.0).to_string()).collect::<Vec<_>>()
        };
        let ll = "fe80::255:4e00:7f4d:103";
        assert_eq!(gids("127.77.1.3"), [ll, ll, "::ffff:127.77.1.3", "::ffff:127.77.1.3"]);
        let of = |ip: &str| Gid::from_ip(ip.parse().unwrap());
        let seen = |from: &str, to: &str| {
            let way = |index| leads(&plain(from), index, of(to)).map_err(|e| e.errno());
            (0..5).map(way).collect::<Vec<_>>()
        };
        let einval = Err(libc::EINVAL);
        assert_eq!(seen("127.77.1.3", "127.77.2.3"), [einval, einval, Ok(false), Ok(true), einval]);
        assert_eq!(seen("127.77.1.3", ll), [Ok(false), Ok(false), Ok(false), einval, einval]);
        assert_eq!(seen("fd00::1", "fd00::2"), [Ok(false), Ok(false), Ok(false), Ok(true), einval]);
        assert_eq!(seen("fd00::1", "127.77.2.3"), [einval; 5]);
    }

    #[test]
    fn the_gid_of_a_port_is_where_its_index_says() {
        for (link_layer, device, ip) in [
            (LinkLayer::Ethernet, DeviceKind::Plain, "127.77.1.3"),
            (LinkLayer::Ethernet, DeviceKind::Plain, "fd00::1"),
            (LinkLayer::Ethernet, DeviceKind::Full, "127.77.1.3"),
            (LinkLayer::Ethernet, DeviceKind::Full, "fd00::1"),
            (LinkLayer::Infiniband, DeviceKind::Plain, "127.77.1.3"),
            (LinkLayer::Infiniband, DeviceKind::Full, "127.77.1.3"),
        ] {
            let ip = ip.parse().unwrap();
            let (table, index) = (table(ip, link_layer, device), index_of(link_layer, device));
            assert_eq!(table[usize::from(index)].gid, gid_of(ip, link_layer));
            assert!(leads(&table, index, gid_of(ip, link_layer)).unwrap());
        }
    }
}
