//! tc: which devices are ready, filters, shared actions, and the messages of operations.

use std::net::Ipv4Addr;

use netlink_packet_core::{DefaultNla, Nla as _, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::tc::{
    TcAction, TcActionAttribute, TcActionGeneric, TcActionMessage, TcActionMessageAttribute,
    TcActionMessageFlags, TcActionMessageFlagsWithSelector, TcActionMirrorOption, TcActionOption,
    TcActionTunnelKeyOption, TcActionType, TcAttribute, TcFilterFlowerOption as Flower, TcHandle,
    TcHeader, TcMessage, TcMirror, TcMirrorActionType, TcOption, TcTunnelKey,
};
use netlink_packet_route::RouteNetlinkMessage;
use unbroken_edge_rules::{
    Action, ActionId, ActionKind, ActionSpec, Filter, Mac, Match, Offload, Op, Settings,
    TunnelMatch, COOKIE,
};

pub(super) const KINDS: [ActionKind; 2] = [ActionKind::TunnelKey, ActionKind::Mirred];
const ETH_P_ALL: u16 = 3;
const TUNNEL_KEY_SET: i32 = 1;
const TUNNEL_KEY_UNSET: i32 = 2;
const SKIP_HW: u32 = 1;
const SKIP_SW: u32 = 2;
const IN_HW: u32 = 4;
/// Flags of an action (TCA_ACT_FLAGS), which must say the same as those of a filter that it is
/// bound to. The library has no name for them.
const ACT_FLAGS: u16 = 7;
const ACT_SKIP_HW: u32 = 1 << 1;
const ACT_SKIP_SW: u32 = 1 << 2;
const WHOLE_MAC: [u8; 6] = [0xff; 6];
const WHOLE_IP: Ipv4Addr = Ipv4Addr::BROADCAST;

fn kind_name(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::TunnelKey => "tunnel_key",
        ActionKind::Mirred => "mirred",
    }
}

fn tc(ifindex: u32, parent: TcHandle, handle: u32, priority: u16) -> TcMessage {
    let info = u32::from(priority) << 16 | u32::from(ETH_P_ALL.to_be());
    let header = TcHeader {
        index: ifindex as i32,
        parent,
        handle: handle.into(),
        info,
        ..TcHeader::default()
    };
    let mut message = TcMessage::default();
    message.header = header;
    message
}

fn ingress() -> TcHandle {
    TcHandle { major: u16::MAX, minor: TcHandle::MIN_INGRESS }
}

pub(super) fn clsact_request() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default())
}

pub(super) fn clsact(message: &RouteNetlinkMessage) -> Option<u32> {
    let RouteNetlinkMessage::NewQueueDiscipline(qdisc) = message else { return None };
    let is_clsact =
        qdisc.attributes.iter().any(|a| matches!(a, TcAttribute::Kind(kind) if kind == "clsact"));
    is_clsact.then_some(qdisc.header.index as u32)
}

pub(super) fn filters_request(ifindex: u32, priority: u16) -> RouteNetlinkMessage {
    let mut message = tc(ifindex, ingress(), 0, priority);
    // Of all protocols, so that whoever else uses our priority is seen.
    message.header.info = u32::from(priority) << 16;
    RouteNetlinkMessage::GetTrafficFilter(message)
}

pub(super) fn actions_request(kind: ActionKind) -> RouteNetlinkMessage {
    let mut message = TcActionMessage::default();
    let flags = TcActionMessageFlagsWithSelector::new(TcActionMessageFlags::LargeDump);
    message.attributes = vec![
        TcActionMessageAttribute::Actions(vec![action(kind, Vec::new())]),
        TcActionMessageAttribute::Flags(flags),
    ];
    RouteNetlinkMessage::GetTrafficAction(message)
}

pub(super) fn filter(message: &RouteNetlinkMessage) -> Option<Filter> {
    let RouteNetlinkMessage::NewTrafficFilter(tc) = message else { return None };
    let handle = u32::from(tc.header.handle.major) << 16 | u32::from(tc.header.handle.minor);
    // The first message about a priority has no filter yet.
    if handle == 0 {
        return None;
    }
    let mut filter = Filter {
        ifindex: tc.header.index as u32,
        priority: (tc.header.info >> 16) as u16,
        handle,
        matches: None,
        actions: Vec::new(),
        offload: Offload::Both,
        in_hw: false,
    };
    let options = tc.attributes.iter().find_map(|a| match a {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    });
    let flower = options.into_iter().flatten().filter_map(|o| match o {
        TcOption::Flower(option) => Some(option),
        _ => None,
    });
    let mut seen = Seen::default();
    for option in flower {
        match option {
            Flower::Actions(all) => {
                filter.actions = all.iter().filter_map(parse).map(|a| (a.id, a.cookie)).collect();
                seen.other |= filter.actions.len() != all.len();
            }
            Flower::Flags(flags) => {
                filter.in_hw = flags & IN_HW != 0;
                filter.offload = match (flags & SKIP_SW != 0, flags & SKIP_HW != 0) {
                    (true, _) => Offload::SkipSw,
                    (_, true) => Offload::SkipHw,
                    _ => Offload::Both,
                };
            }
            other => seen.see(other),
        }
    }
    filter.matches = seen.matches();
    Some(filter)
}

/// What a flower filter compares.
#[derive(Default)]
struct Seen {
    mac: Option<Mac>,
    vni: Option<u32>,
    dst: Option<Ipv4Addr>,
    port: Option<u16>,
    /// Something else, or not the whole of it.
    other: bool,
}

impl Seen {
    fn see(&mut self, option: &Flower) {
        match option {
            Flower::EthDst(mac) => self.mac = Some(Mac(*mac)),
            Flower::EncKeyId(vni) => self.vni = Some(*vni),
            Flower::EncKeyIpv4Dst(dst) => self.dst = Some(*dst),
            Flower::EncKeyUdpDstPort(port) => self.port = Some(*port),
            Flower::EthDstMask(mask) => self.other |= *mask != WHOLE_MAC,
            Flower::EncKeyIpv4DstMask(mask) => self.other |= *mask != WHOLE_IP,
            Flower::EncKeyUdpDstPortMask(mask) => self.other |= *mask != u16::MAX,
            // Dumped with every filter, and no comparison.
            Flower::InHwCount(_) => {}
            Flower::EthType(kind) => self.other |= *kind != ETH_P_ALL,
            _ => self.other = true,
        }
    }

    fn matches(&self) -> Option<Match> {
        if self.other {
            return None;
        }
        let tunnel = match (self.vni, self.dst, self.port) {
            (None, None, None) => None,
            (Some(vni), Some(dst), Some(port)) => Some(TunnelMatch { vni, dst, port }),
            _ => return None,
        };
        Some(Match { mac: self.mac?, tunnel })
    }
}

pub(super) fn actions(message: &RouteNetlinkMessage, all: &mut Vec<Action>) {
    if let RouteNetlinkMessage::NewTrafficAction(message)
    | RouteNetlinkMessage::GetTrafficAction(message) = message
    {
        for attribute in &message.attributes {
            if let TcActionMessageAttribute::Actions(some) = attribute {
                all.extend(some.iter().filter_map(parse));
            }
        }
    }
}

fn parse(action: &TcAction) -> Option<Action> {
    let (mut kind, mut cookie, mut generic, mut spec) = (None, false, None, None);
    let mut offload = Offload::Both;
    for attribute in &action.attributes {
        match attribute {
            TcActionAttribute::Kind(name) => {
                kind = KINDS.into_iter().find(|k| kind_name(*k) == name)
            }
            TcActionAttribute::Cookie(bytes) => cookie = bytes == COOKIE,
            TcActionAttribute::Options(options) => (generic, spec) = parse_options(options),
            TcActionAttribute::Other(other) if other.kind() == ACT_FLAGS => {
                offload = parse_flags(other)
            }
            _ => {}
        }
    }
    let (kind, generic): (_, TcActionGeneric) = (kind?, generic?);
    let id = ActionId { kind, index: generic.index };
    Some(Action { id, spec, cookie, offload, bound: u32::try_from(generic.bindcnt).unwrap_or(0) })
}

fn parse_flags(flags: &DefaultNla) -> Offload {
    let mut bytes = vec![0; flags.value_len()];
    flags.emit_value(&mut bytes);
    let value = bytes.first_chunk::<4>().map_or(0, |b| u32::from_ne_bytes(*b));
    match (value & ACT_SKIP_SW != 0, value & ACT_SKIP_HW != 0) {
        (true, _) => Offload::SkipSw,
        (_, true) => Offload::SkipHw,
        _ => Offload::Both,
    }
}

fn parse_options(options: &[TcActionOption]) -> (Option<TcActionGeneric>, Option<ActionSpec>) {
    let (mut generic, mut set, mut decap) = (None, false, false);
    let (mut src, mut dst, mut vni, mut dst_port, mut redirect) = (None, None, None, None, None);
    for option in options {
        match option {
            TcActionOption::TunnelKey(TcActionTunnelKeyOption::Parms(parms)) => {
                generic = Some(parms.generic);
                (set, decap) =
                    (parms.t_action == TUNNEL_KEY_SET, parms.t_action == TUNNEL_KEY_UNSET);
            }
            TcActionOption::TunnelKey(TcActionTunnelKeyOption::EncIpv4Src(ip)) => src = Some(*ip),
            TcActionOption::TunnelKey(TcActionTunnelKeyOption::EncIpv4Dst(ip)) => dst = Some(*ip),
            TcActionOption::TunnelKey(TcActionTunnelKeyOption::EncKeyId(id)) => vni = Some(*id),
            TcActionOption::TunnelKey(TcActionTunnelKeyOption::EncDstPort(port)) => {
                dst_port = Some(*port)
            }
            TcActionOption::Mirror(TcActionMirrorOption::Parms(parms)) => {
                generic = Some(parms.generic);
                if parms.eaction == TcMirrorActionType::EgressRedir {
                    redirect = Some(ActionSpec::Redirect { ifindex: parms.ifindex });
                }
            }
            _ => {}
        }
    }
    let encap = match (set, vni, src, dst, dst_port) {
        (true, Some(vni), Some(src), Some(dst), Some(dst_port)) => {
            Some(ActionSpec::Encap { vni, src, dst, dst_port })
        }
        _ => None,
    };
    (generic, encap.or(decap.then_some(ActionSpec::Decap)).or(redirect))
}

/// The message of an operation, with its flags beyond request and acknowledgement.
pub(super) fn operation(op: &Op, settings: &Settings) -> (RouteNetlinkMessage, u16) {
    let new = NLM_F_CREATE | NLM_F_EXCL;
    match op {
        Op::AddClsact { ifindex } => {
            let mut message = tc(*ifindex, TcHandle::CLSACT, 0xFFFF_0000, 0);
            message.header.info = 0;
            message.attributes = vec![TcAttribute::Kind("clsact".into())];
            (RouteNetlinkMessage::NewQueueDiscipline(message), new)
        }
        Op::AddAction { id, spec } => (
            RouteNetlinkMessage::NewTrafficAction(actions_message(make(
                *id,
                *spec,
                settings.offload,
            ))),
            new,
        ),
        Op::EditAction { id, spec } => (
            RouteNetlinkMessage::NewTrafficAction(actions_message(make(
                *id,
                *spec,
                settings.offload,
            ))),
            NLM_F_CREATE | NLM_F_REPLACE,
        ),
        Op::DelAction { id } => {
            let index = TcActionAttribute::Index(id.index);
            (
                RouteNetlinkMessage::DelTrafficAction(actions_message(action(
                    id.kind,
                    vec![index],
                ))),
                0,
            )
        }
        Op::PutFilter { ifindex, handle, replace, matches, actions } => {
            let mut message = tc(*ifindex, ingress(), *handle, settings.own.priority);
            let options = flower(matches, actions, settings.offload)
                .into_iter()
                .map(TcOption::Flower)
                .collect();
            message.attributes =
                vec![TcAttribute::Kind("flower".into()), TcAttribute::Options(options)];
            (
                RouteNetlinkMessage::NewTrafficFilter(message),
                if *replace { NLM_F_CREATE } else { new },
            )
        }
        Op::DelFilter { ifindex, handle } => {
            let mut message = tc(*ifindex, ingress(), *handle, settings.own.priority);
            message.attributes = vec![TcAttribute::Kind("flower".into())];
            (RouteNetlinkMessage::DelTrafficFilter(message), 0)
        }
    }
}

fn flower(matches: &Match, actions: &[ActionId; 2], offload: Offload) -> Vec<Flower> {
    let mut options = vec![Flower::EthDst(matches.mac.0), Flower::EthDstMask(WHOLE_MAC)];
    if let Some(tunnel) = matches.tunnel {
        options.extend([
            Flower::EncKeyId(tunnel.vni),
            Flower::EncKeyIpv4Dst(tunnel.dst),
            Flower::EncKeyIpv4DstMask(WHOLE_IP),
            Flower::EncKeyUdpDstPort(tunnel.port),
            Flower::EncKeyUdpDstPortMask(u16::MAX),
        ]);
    }
    options.push(Flower::Flags(match offload {
        Offload::SkipHw => SKIP_HW,
        Offload::Both => 0,
        Offload::SkipSw => SKIP_SW,
    }));
    let refer = |(place, id): (usize, &ActionId)| {
        let mut action = action(id.kind, vec![TcActionAttribute::Options(parameters(*id, None))]);
        action.tab = place as u16 + 1;
        action
    };
    options.push(Flower::Actions(actions.iter().enumerate().map(refer).collect()));
    options
}

fn actions_message(action: TcAction) -> TcActionMessage {
    let mut message = TcActionMessage::default();
    message.attributes = vec![TcActionMessageAttribute::Actions(vec![action])];
    message
}

fn action(kind: ActionKind, attributes: Vec<TcActionAttribute>) -> TcAction {
    let mut action = TcAction::default();
    action.attributes.push(TcActionAttribute::Kind(kind_name(kind).into()));
    action.attributes.extend(attributes);
    action
}

/// A shared action that is to be made.
fn make(id: ActionId, spec: ActionSpec, offload: Offload) -> TcAction {
    let options = TcActionAttribute::Options(parameters(id, Some(spec)));
    let flag = match offload {
        Offload::SkipHw => ACT_SKIP_HW,
        Offload::Both => 0,
        Offload::SkipSw => ACT_SKIP_SW,
    };
    // struct nla_bitfield32: value, and which bits of it are meant
    let bits = [flag, ACT_SKIP_HW | ACT_SKIP_SW].iter().flat_map(|b| b.to_ne_bytes()).collect();
    let flags = TcActionAttribute::Other(DefaultNla::new(ACT_FLAGS, bits));
    action(id.kind, vec![options, TcActionAttribute::Cookie(COOKIE.to_vec()), flags])
}

/// What an action does; none: only its number, to refer to it.
fn parameters(id: ActionId, spec: Option<ActionSpec>) -> Vec<TcActionOption> {
    let mut generic = TcActionGeneric::default();
    generic.index = id.index;
    generic.action = match id.kind {
        ActionKind::TunnelKey => TcActionType::Pipe,
        ActionKind::Mirred => TcActionType::Stolen,
    };
    if id.kind == ActionKind::Mirred {
        let mut parms = TcMirror::default();
        parms.generic = generic;
        if let Some(ActionSpec::Redirect { ifindex }) = spec {
            (parms.eaction, parms.ifindex) = (TcMirrorActionType::EgressRedir, ifindex);
        }
        return vec![TcActionOption::Mirror(TcActionMirrorOption::Parms(parms))];
    }
    let mut parms = TcTunnelKey { generic, t_action: TUNNEL_KEY_UNSET };
    let mut options = Vec::new();
    if let Some(ActionSpec::Encap { vni, src, dst, dst_port }) = spec {
        parms.t_action = TUNNEL_KEY_SET;
        options = vec![
            TcActionTunnelKeyOption::EncIpv4Src(src),
            TcActionTunnelKeyOption::EncIpv4Dst(dst),
            TcActionTunnelKeyOption::EncKeyId(vni),
            TcActionTunnelKeyOption::EncDstPort(dst_port),
            TcActionTunnelKeyOption::NoCsum(true),
        ];
    }
    options.insert(0, TcActionTunnelKeyOption::Parms(parms));
    options.into_iter().map(TcActionOption::TunnelKey).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(spec: ActionSpec) {
        let id = ActionId { kind: spec.kind(), index: 7 };
        for offload in [Offload::SkipHw, Offload::Both, Offload::SkipSw] {
            let parsed = parse(&make(id, spec, offload)).unwrap();
            assert_eq!(parsed, Action { id, spec: Some(spec), cookie: true, offload, bound: 0 });
        }
    }

    #[test]
    fn what_is_made_is_read_back_as_it_was_asked_for() {
        let ip = Ipv4Addr::new(10, 255, 0, 2);
        round(ActionSpec::Encap {
            vni: 100,
            src: Ipv4Addr::new(10, 255, 0, 1),
            dst: ip,
            dst_port: 4789,
        });
        round(ActionSpec::Decap);
        round(ActionSpec::Redirect { ifindex: 12 });
        let ids = [
            ActionId { kind: ActionKind::TunnelKey, index: 3 },
            ActionId { kind: ActionKind::Mirred, index: 4 },
        ];
        for tunnel in [None, Some(TunnelMatch { vni: 9, dst: ip, port: 4789 })] {
            let matches = Match { mac: Mac([2, 0, 0, 0, 0, 9]), tunnel };
            let mut message = tc(5, ingress(), 0x0100_0001, 4789);
            let options =
                flower(&matches, &ids, Offload::SkipHw).into_iter().map(TcOption::Flower).collect();
            message.attributes = vec![TcAttribute::Options(options)];
            let filter = filter(&RouteNetlinkMessage::NewTrafficFilter(message)).unwrap();
            assert_eq!((filter.ifindex, filter.priority, filter.handle), (5, 4789, 0x0100_0001));
            assert_eq!((filter.matches, filter.offload), (Some(matches), Offload::SkipHw));
            // Only a number: whose cookie it is comes from the kernel.
            assert_eq!(filter.actions, ids.map(|id| (id, false)));
        }
    }

    #[test]
    fn a_filter_that_compares_something_else_is_not_taken_for_ours() {
        for other in
            [Flower::EthDstMask([0xff, 0, 0, 0, 0, 0]), Flower::IpProto(6), Flower::EncKeyId(3)]
        {
            let mut message = tc(5, ingress(), 1, 4789);
            let options =
                [Flower::EthDst([2, 0, 0, 0, 0, 1]), other].map(TcOption::Flower).to_vec();
            message.attributes = vec![TcAttribute::Options(options)];
            assert_eq!(
                filter(&RouteNetlinkMessage::NewTrafficFilter(message)).unwrap().matches,
                None
            );
        }
    }
}
