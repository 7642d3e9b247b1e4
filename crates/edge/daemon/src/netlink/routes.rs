//! IPv4 routes.

use std::net::Ipv4Addr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteNextHop, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::routes::{Hop, Hops, RouteSet};

/// All of them: an old kernel would not select.
pub(super) fn request() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetRoute(of_family())
}

fn of_family() -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = AddressFamily::Inet;
    message
}

fn gateway(attributes: &[RouteAttribute]) -> Option<Ipv4Addr> {
    attributes.iter().find_map(|a| match a {
        RouteAttribute::Gateway(RouteAddress::Inet(gateway)) => Some(*gateway),
        _ => None,
    })
}

/// A route of the set, with the ways that have a gateway; none has none. `name` gives a device's.
pub(super) fn route(
    message: &RouteNetlinkMessage,
    set: &RouteSet,
    name: &mut impl FnMut(u32) -> Option<String>,
) -> Option<(String, Hops)> {
    let RouteNetlinkMessage::NewRoute(route) = message else { return None };
    let (mut table, mut to, mut device) = (u32::from(route.header.table), None, None);
    let mut hops = Hops::new();
    let mut hop = |attributes: &[RouteAttribute], index| -> Option<Hop> {
        Some(Hop { gateway: gateway(attributes)?, device: name(index)? })
    };
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Destination(RouteAddress::Inet(address)) => to = Some(*address),
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::MultiPath(ways) => {
                hops.extend(ways.iter().filter_map(|w| hop(&w.attributes, w.interface_index)));
            }
            _ => {}
        }
    }
    hops.extend(device.and_then(|index| hop(&route.attributes, index)));
    let ours = table == set.table && u8::from(route.header.protocol) == set.protocol;
    let length = route.header.destination_prefix_length;
    let to = match (to, length) {
        (None, _) => "default".to_owned(),
        (Some(address), 32) => address.to_string(),
        (Some(address), length) => format!("{address}/{length}"),
    };
    (ours && !hops.is_empty()).then_some((to, hops))
}

/// What makes a route of the set, or (without ways) takes it away. `fresh`: the set has none to
/// there, and one that is in the way is somebody else's. None: the destination is none, or a device
/// is gone.
pub(super) fn change(
    set: &RouteSet,
    to: &str,
    hops: Option<&Hops>,
    fresh: bool,
    index: &mut impl FnMut(&str) -> Option<u32>,
) -> Option<(RouteNetlinkMessage, u16)> {
    let mut message = of_family();
    if to != "default" {
        let (address, length) = to.split_once('/').unwrap_or((to, "32"));
        message.header.destination_prefix_length = length.parse().ok()?;
        message
            .attributes
            .push(RouteAttribute::Destination(RouteAddress::Inet(address.parse().ok()?)));
    }
    message.header.protocol = RouteProtocol::from(set.protocol);
    message.attributes.push(RouteAttribute::Table(set.table));
    message.attributes.extend(set.metric.map(RouteAttribute::Priority));
    let Some(hops) = hops else {
        message.header.scope = RouteScope::NoWhere;
        return Some((RouteNetlinkMessage::DelRoute(message), 0));
    };
    message.header.kind = RouteType::Unicast;
    let mut way = |hop: &Hop| -> Option<RouteNextHop> {
        let mut way = RouteNextHop::default();
        way.interface_index = index(&hop.device)?;
        way.attributes.push(RouteAttribute::Gateway(RouteAddress::Inet(hop.gateway)));
        Some(way)
    };
    message
        .attributes
        .push(RouteAttribute::MultiPath(hops.iter().map(&mut way).collect::<Option<_>>()?));
    let or = if fresh { NLM_F_EXCL } else { NLM_F_REPLACE };
    Some((RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | or))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::{FRR, OURS};

    const SET: RouteSet = RouteSet { table: 4100, protocol: OURS, metric: Some(7) };

    fn hops(devices: &[&str]) -> Hops {
        devices
            .iter()
            .map(|d| Hop { gateway: [10, 1, 1, 0].into(), device: (*d).to_owned() })
            .collect()
    }

    fn index(name: &str) -> Option<u32> {
        name.strip_prefix('p')?.parse().ok()
    }

    fn name(index: u32) -> Option<String> {
        Some(format!("p{index}"))
    }

    #[test]
    fn what_is_made_is_what_is_read() {
        for (to, devices) in
            [("10.255.0.2", &["p1", "p2"][..]), ("10.0.0.0/8", &["p3"]), ("default", &["p1"])]
        {
            for (fresh, or) in [(true, NLM_F_EXCL), (false, NLM_F_REPLACE)] {
                let (_, flags) = change(&SET, to, Some(&hops(devices)), fresh, &mut index).unwrap();
                assert_eq!(flags, NLM_F_CREATE | or);
            }
            let (message, _) = change(&SET, to, Some(&hops(devices)), true, &mut index).unwrap();
            assert_eq!(route(&message, &SET, &mut name), Some((to.to_owned(), hops(devices))));
            for other in [FRR, RouteSet { table: 4101, ..SET }, RouteSet { protocol: 3, ..SET }] {
                assert_eq!(route(&message, &other, &mut name), None, "{other:?}");
            }
        }
    }

    #[test]
    fn a_route_with_one_way_and_a_small_table_is_read() {
        let mut message = of_family();
        (message.header.table, message.header.protocol) = (254, RouteProtocol::Bgp);
        message.header.destination_prefix_length = 32;
        let to = RouteAttribute::Destination(RouteAddress::Inet([10, 255, 1, 1].into()));
        let via = RouteAttribute::Gateway(RouteAddress::Inet([10, 1, 1, 0].into()));
        message.attributes = vec![to.clone(), RouteAttribute::Oif(2), via];
        let read =
            |m: &RouteMessage| route(&RouteNetlinkMessage::NewRoute(m.clone()), &FRR, &mut name);
        assert_eq!(read(&message), Some(("10.255.1.1".to_owned(), hops(&["p2"]))));
        message.attributes = vec![to, RouteAttribute::Oif(2)];
        assert_eq!(read(&message), None, "a link's own route");
    }

    #[test]
    fn a_device_that_is_gone_and_what_is_no_destination_make_nothing() {
        assert!(
            change(&SET, "10.255.0.2", Some(&hops(&["p1", "gone"])), true, &mut index).is_none()
        );
        assert!(change(&SET, "somewhere", None, true, &mut index).is_none());
        let (message, flags) = change(&SET, "10.255.0.2", None, true, &mut index).unwrap();
        assert!(matches!(message, RouteNetlinkMessage::DelRoute(_)) && flags == 0);
    }
}
