//! Checks of each RDMA device: whether it opens, its port, its GIDs, its place in the machine.

use std::net::Ipv6Addr;
use std::path::Path;

use unbroken_nics::bond_legs;
use unbroken_types::{Gid, GidType};
use unbroken_verbs::GidEntry;

use super::machine::{names, text, Device, Node, Port, Roots};
use super::report::Line;

/// That something works, or why not.
pub(crate) type Answer = Result<(), String>;
/// What libibverbs says of each device that it lists: whether it opens.
pub(crate) type Opens = [(String, Answer)];

/// That the kernel shows devices at all, and those that were named. The devices that are meant.
pub(crate) fn choose(all: Vec<Device>, named: Option<&[String]>) -> (Vec<Device>, Vec<Line>) {
    let there: Vec<String> = all.iter().map(|device| device.name.clone()).collect();
    if there.is_empty() {
        let line = Line::problem(
            "devices",
            "the kernel shows no RDMA device in /sys/class/infiniband",
            "load the NIC's RDMA driver (`modprobe mlx5_ib`, `bnxt_re`, `irdma`, …); in a \
             container, give it the devices of the host; to try it without an RNIC: `rdma link add \
             rxe0 type rxe netdev INTERFACE`",
        );
        return (all, vec![line]);
    }
    let Some(named) = named else {
        let (good, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|d| d.is_channel_adapter);
        let mut lines = vec![few(&good)];
        lines.extend(others.iter().map(no_channel_adapter));
        return (good, lines);
    };
    let mut chosen: Vec<Device> = Vec::new();
    let mut lines = Vec::new();
    let mut all = all;
    for name in named {
        match all.iter().position(|device| device.name == *name) {
            Some(i) => chosen.push(all.swap_remove(i)),
            None => lines.push(
                Line::problem(
                    "devices",
                    format!("this machine has no such device; it has {}", there.join(", ")),
                    "name those that `ibv_devices` lists",
                )
                .of(name),
            ),
        }
    }
    lines.insert(0, few(&chosen));
    lines.extend(chosen.iter().filter(|d| !d.is_channel_adapter).map(no_channel_adapter));
    (chosen, lines)
}

fn few(devices: &[Device]) -> Line {
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    match names.len() {
        0 => Line::problem(
            "devices",
            "none of the machine's devices is meant",
            "name two that `ibv_devices` lists",
        ),
        1 => Line::problem(
            "devices",
            format!("{} alone: nothing can stand in for it", names[0]),
            "a second device, or a second port that is a device of its own, is needed",
        ),
        _ => Line::ok("devices", names.join(", ")),
    }
}

fn no_channel_adapter(device: &Device) -> Line {
    Line::note("devices", "it is neither InfiniBand nor RoCE, so it is not used").of(&device.name)
}

/// Whether programs can open it.
pub(crate) fn opens(device: &Device, libibverbs: &Opens) -> Line {
    const CHECK: &str = "open";
    let line = match (&device.node, libibverbs.iter().find(|(name, _)| *name == device.name)) {
        (Node::None, _) => Line::problem(
            CHECK,
            "the kernel shows no uverbs device for it, so no program can open it",
            "`modprobe ib_uverbs`",
        ),
        (Node::Missing(file), _) => Line::problem(
            CHECK,
            format!("{} is not there, so no program can open it", file.display()),
            format!(
                "in a container, give it this file (docker: `--device {}`); else start udev",
                file.display()
            ),
        ),
        (Node::Refused(file, why), _) => Line::problem(
            CHECK,
            format!("{} cannot be opened: {why}", file.display()),
            "let this user read and write it: a udev rule with MODE=\"0666\", or the group that \
             owns it",
        ),
        (Node::Opens(_), None) => Line::problem(
            CHECK,
            "libibverbs does not list it",
            "install the provider of this NIC (Debian: ibverbs-providers)",
        ),
        (Node::Opens(_), Some((_, Err(why)))) => {
            let remedy = "see `ibv_devinfo` and `dmesg`; rdma-core must know this NIC";
            Line::problem(CHECK, format!("libibverbs cannot open it: {why}"), remedy)
        }
        (Node::Opens(file), Some((_, Ok(())))) => {
            Line::ok(CHECK, format!("libibverbs opens it by {}", file.display()))
        }
    };
    line.of(&device.name)
}

/// The state of port 1.
pub(crate) fn port(device: &Device) -> Line {
    const CHECK: &str = "port";
    let Some(port) = device.port() else {
        let remedy = "see `ibv_devinfo`: a device has ports when its driver has started";
        return Line::problem(CHECK, "it has no port 1", remedy).of(&device.name);
    };
    let interface = port.interface.as_deref().unwrap_or("INTERFACE");
    let others = device.ports.len() - 1;
    let line = match port.is_active() {
        true => {
            let more = match others {
                0 => String::new(),
                n => format!("; {n} more, which queue pairs do not use"),
            };
            let known = [Some(port.rate.as_str()), port.interface.as_deref()];
            let known: String = known
                .into_iter()
                .flatten()
                .filter(|word| !word.is_empty())
                .map(|word| format!(", {word}"))
                .collect();
            Line::ok(CHECK, format!("port 1 is active{known}{more}"))
        }
        false => {
            let state = match port.state.as_str() {
                "" => "not readable",
                state => state,
            };
            Line::problem(
                CHECK,
                format!("port 1 is {state}, physically {}", port.physical),
                match (port.is_ethernet, port.physical.as_str()) {
                    (true, "Disabled") => format!("`ip link set {interface} up`"),
                    (true, _) => format!(
                        "`ip link set {interface} up`; then look at the cable and the switch's \
                         port (`ethtool {interface}`); or leave it out with --devices"
                    ),
                    (false, _) if port.state == "INIT" => "start a subnet manager".to_owned(),
                    (false, _) => "look at the cable (`ibstat`, `ibdiagnet`)".to_owned(),
                },
            )
        }
    };
    line.of(&device.name)
}

/// A type and a family of addresses.
fn kind(entry: &GidEntry) -> &'static str {
    let local = entry.gid.0[..2] == [0xfe, 0x80];
    match (entry.kind, entry.gid.to_ipv4().is_some()) {
        (GidType::Infiniband, _) => "InfiniBand",
        (GidType::RoceV1, _) => "RoCE v1",
        (GidType::RoceV2, true) => "RoCE v2 IPv4",
        (GidType::RoceV2, false) if local => "RoCE v2 link-local",
        (GidType::RoceV2, false) => "RoCE v2 IPv6",
    }
}

/// A GID as programs show it.
fn shown(gid: Gid) -> String {
    gid.to_ipv4().map_or_else(|| Ipv6Addr::from(gid.0).to_string(), |ip| ip.to_string())
}

/// How a device's address is reached: devices that stand in for each other have the same.
pub(crate) fn address_kind(device: &Device) -> Option<&'static str> {
    Some(kind(&device.port()?.chosen()?.0))
}

/// Which GID programs should use.
pub(crate) fn gids(device: &Device) -> Line {
    const CHECK: &str = "gid";
    let Some(port) = device.port() else {
        return Line::note(CHECK, "not readable without a port").of(&device.name);
    };
    let interface = port.interface.as_deref().unwrap_or("INTERFACE");
    let give_address = format!(
        "give {interface} an IPv4 address (`ip addr add ADDRESS/24 dev {interface}`): the kernel \
         makes a RoCE v2 GID of it"
    );
    let Some((chosen, index)) = port.chosen() else {
        let line = Line::problem(CHECK, "port 1 has no GID, so no peer can reach it", give_address);
        return line.of(&device.name);
    };
    let all = counted(port);
    let use_it =
        format!("use index {index} (perftest: -x {index}; UCX_IB_GID_INDEX, NCCL_IB_GID_INDEX)");
    let text =
        format!("index {index} is {}, {}; the port has {all}", shown(chosen.gid), kind(&chosen));
    match kind(&chosen) {
        "RoCE v1" => Line::problem(
            CHECK,
            format!("port 1 has RoCE v1 GIDs alone ({all}), which no router takes"),
            format!(
                "{give_address}; if it has one, let the device speak v2 \
                 (`cma_roce_mode -d {} -p 1 -m 2`, and the NIC's firmware settings)",
                device.name
            ),
        ),
        "RoCE v2 link-local" => Line::note(CHECK, text).and_do(give_address),
        "InfiniBand" => Line::ok(CHECK, text),
        _ => Line::ok(CHECK, text).and_do(use_it),
    }
    .of(&device.name)
}

/// How many GIDs of each kind a port has.
fn counted(port: &Port) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for entry in port.gids.iter().filter(|entry| entry.gid != Gid::default()) {
        let name = kind(entry);
        match counts.iter_mut().find(|(other, _)| *other == name) {
            Some((_, n)) => *n += 1,
            None => counts.push((name, 1)),
        }
    }
    let words: Vec<String> = counts.iter().map(|(name, n)| format!("{n} {name}")).collect();
    words.join(", ")
}

/// The legs of a bond behind a device. None where its interface is no bond.
///
/// When a leg fails, the device loses a part of its rate, and verbs report nothing.
pub(crate) fn bond(roots: &Roots, device: &Device) -> Option<Line> {
    const CHECK: &str = "bond";
    let interface = device.port()?.interface.as_deref()?;
    let legs = bond_legs(&roots.sys, interface)?;
    let names: Vec<&str> = legs.iter().map(|leg| leg.name.as_str()).collect();
    let down: Vec<&str> =
        legs.iter().filter(|leg| !leg.is_up).map(|leg| leg.name.as_str()).collect();
    let all = format!("{interface} is a bond of {}", names.join(" and "));
    let line = match down.is_empty() {
        true => Line::note(
            CHECK,
            format!(
                "{all}; a leg that fails takes a part of its rate, and no program is told: \
                 another device takes over only when the whole bond fails"
            ),
        ),
        false => Line::problem(
            CHECK,
            format!(
                "{all}; {} is down, {} of {} carry",
                down.join(", "),
                legs.len() - down.len(),
                legs.len()
            ),
            format!("look at the cable and the switch's port (`ethtool {}`)", down[0]),
        ),
    };
    Some(line.of(&device.name))
}

/// Where it is in the machine, and how wide its link is.
pub(crate) fn place(device: &Device) -> Line {
    const CHECK: &str = "pci";
    let line = match &device.pci {
        None => Line::note(CHECK, "it is no PCI device"),
        Some(pci) => {
            let node = match pci.numa_node {
                0.. => format!("NUMA node {}", pci.numa_node),
                _ => "NUMA node not told".to_owned(),
            };
            let text = format!("{}, {node}", pci.address);
            match (pci.link.as_str(), pci.max_link.as_str()) {
                ("", _) => Line::note(CHECK, format!("{text}, link not readable")),
                (link, max) if link == max || max.is_empty() => {
                    Line::ok(CHECK, format!("{text}, {link}"))
                }
                (link, max) => Line::note(CHECK, format!("{text}, {link} of {max}"))
                    .and_do("if it is slow, look at the slot, and at `lspci -vv`"),
            }
        }
    };
    line.of(&device.name)
}

/// Flow control and congestion control, as far as files tell.
pub(crate) fn congestion(roots: &Roots, device: &Device) -> Line {
    const CHECK: &str = "pfc and ecn";
    let Some(interface) =
        device.port().filter(|p| p.is_ethernet).and_then(|p| p.interface.as_ref())
    else {
        return Line::note(CHECK, "not readable: no network interface").of(&device.name);
    };
    let folder = roots.sys.join("class/net").join(interface);
    let pfc = match text(&folder.join("qos/pfc")) {
        Some(text) => format!("PFC: {}", text.split_whitespace().collect::<Vec<_>>().join(" ")),
        None => {
            format!("PFC: not readable (`dcb pfc show dev {interface}`, `mlnx_qos -i {interface}`)")
        }
    };
    let ecn = |side: &str| enabled(&folder.join("ecn").join(side).join("enable"));
    let ecn = match (ecn("roce_np"), ecn("roce_rp")) {
        (None, None) => "ECN: not readable".to_owned(),
        (np, rp) => {
            let side = |on: Option<String>| on.unwrap_or_else(|| "not readable".into());
            format!("ECN priorities: receiver {}, sender {}", side(np), side(rp))
        }
    };
    Line::note(CHECK, format!("{pfc}; {ecn}")).of(&device.name)
}

/// The names of the files in a folder that have a 1; none where there is no such folder.
fn enabled(folder: &Path) -> Option<String> {
    let all = names(folder);
    let on: Vec<&str> = all
        .iter()
        .filter(|name| text(&folder.join(name)).as_deref() == Some("1"))
        .map(String::as_str)
        .collect();
    (!all.is_empty()).then(|| if on.is_empty() { "none".into() } else { on.join(" ") })
}
