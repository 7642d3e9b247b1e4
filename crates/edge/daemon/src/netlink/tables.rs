//! Devices and forwarding entries.

use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use unbroken_edge_rules::{FdbEntry, Link, Mac};

pub(super) fn links_request() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetLink(LinkMessage::default())
}

pub(super) fn fdb_request() -> RouteNetlinkMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    RouteNetlinkMessage::GetNeighbour(message)
}

pub(super) fn link(message: &RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(link) = message else { return None };
    let name = link.attributes.iter().find_map(|a| match a {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    });
    Some(Link { ifindex: link.header.index, name: name? })
}

pub(super) fn fdb_entry(message: &RouteNetlinkMessage) -> Option<FdbEntry> {
    let RouteNetlinkMessage::NewNeighbour(entry) = message else { return None };
    let header = &entry.header;
    let mut found = FdbEntry {
        ifindex: header.ifindex,
        mac: Mac::ZERO,
        dst: None,
        extern_learn: header.flags.contains(NeighbourFlags::ExtLearned),
        permanent: matches!(header.state, NeighbourState::Permanent),
    };
    let mut has_mac = false;
    for attribute in &entry.attributes {
        match attribute {
            NeighbourAttribute::LinkLayerAddress(bytes) => {
                found.mac = Mac(bytes.as_slice().try_into().ok()?);
                has_mac = true;
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet(dst)) => found.dst = Some(*dst),
            // In a bridge's tables the address has a family that only its length tells.
            NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => {
                found.dst =
                    bytes.first_chunk::<4>().filter(|_| bytes.len() == 4).map(|b| (*b).into());
            }
            _ => {}
        }
    }
    has_mac.then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn a_vxlan_entry_has_its_host() {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Bridge;
        (message.header.ifindex, message.header.flags) =
            (7, NeighbourFlags::Own | NeighbourFlags::ExtLearned);
        message.attributes = vec![
            NeighbourAttribute::LinkLayerAddress(vec![2, 0, 0, 0, 9, 2]),
            // as the kernel's bytes are read for this family
            NeighbourAttribute::Destination(NeighbourAddress::Other(vec![10, 255, 0, 2])),
        ];
        let entry = fdb_entry(&RouteNetlinkMessage::NewNeighbour(message)).unwrap();
        assert_eq!(
            (entry.ifindex, entry.mac, entry.extern_learn),
            (7, Mac([2, 0, 0, 0, 9, 2]), true)
        );
        assert_eq!(entry.dst, Some(Ipv4Addr::new(10, 255, 0, 2)));
    }
}
