//! IPv4 rules that say which table of routes is looked at (`ip rule`).

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::routes::{Policy, OURS};

/// All of them.
pub(super) fn request() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetRule(of_family())
}

fn of_family() -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = AddressFamily::Inet;
    message
}

/// One of ours, which its protocol says; none is anybody else's.
pub(super) fn policy(message: &RouteNetlinkMessage) -> Option<Policy> {
    let RouteNetlinkMessage::NewRule(rule) = message else { return None };
    let (mut protocol, mut priority, mut device) = (None, 0, None);
    let mut table = u32::from(rule.header.table);
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Protocol(number) => protocol = Some(u8::from(*number)),
            RuleAttribute::Priority(number) => priority = *number,
            RuleAttribute::Table(number) => table = *number,
            RuleAttribute::Iifname(name) => device = Some(name.clone()),
            _ => {}
        }
    }
    (protocol == Some(OURS)).then_some(Policy { priority, table, device })
}

/// What makes one of ours, or takes it away: nobody else's, whatever it says.
pub(super) fn change(policy: &Policy, make: bool) -> (RouteNetlinkMessage, u16) {
    let mut message = of_family();
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Priority(policy.priority),
        RuleAttribute::Table(policy.table),
        RuleAttribute::Protocol(OURS.into()),
    ];
    message.attributes.extend(policy.device.clone().map(RuleAttribute::Iifname));
    match make {
        true => (RouteNetlinkMessage::NewRule(message), NLM_F_CREATE | NLM_F_EXCL),
        false => (RouteNetlinkMessage::DelRule(message), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_what_is_read_and_others_are_not() {
        for device in [None, Some("isl".to_owned())] {
            let ours = Policy { priority: 4099, table: 4101, device };
            let (message, _) = change(&ours, true);
            assert_eq!(policy(&message), Some(ours));
            let RouteNetlinkMessage::NewRule(mut foreign) = message else { panic!() };
            foreign.attributes.retain(|a| !matches!(a, RuleAttribute::Protocol(_)));
            assert_eq!(policy(&RouteNetlinkMessage::NewRule(foreign.clone())), None);
            foreign.attributes.push(RuleAttribute::Protocol(3.into()));
            assert_eq!(policy(&RouteNetlinkMessage::NewRule(foreign)), None);
        }
    }
}
