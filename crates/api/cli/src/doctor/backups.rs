//! Whether devices can stand in for each other, and what to run.

use unbroken_nics::Reach;

use super::devices::{address_kind, Opens};
use super::machine::Device;
use super::report::Line;

/// Farther than this are devices of different NUMA nodes.
const OTHER_NODE: u16 = 1_000;

/// Whether programs can use it: it opens, its port is active, peers can reach an address of it.
pub(crate) fn is_usable(device: &Device, libibverbs: &Opens) -> bool {
    let opens = libibverbs.iter().any(|(name, opened)| *name == device.name && opened.is_ok());
    let active = device.port().is_some_and(|port| port.is_active());
    opens && active && address_kind(device).is_some_and(|kind| kind != "RoCE v1")
}

/// For each device the order in which its queue pairs would like the others, and whether their
/// addresses are of one kind with the first's.
pub(crate) fn backups(devices: &[&Device]) -> Vec<Line> {
    const CHECK: &str = "backups";
    let of = |device: &&Device| {
        let mut others: Vec<(u16, &str)> = devices
            .iter()
            .filter(|other| other.name != device.name)
            .map(|other| (distance(device, other), other.name.as_str()))
            .collect();
        others.sort_by_key(|(far, _)| *far);
        let words: Vec<String> = others
            .iter()
            .map(|(far, name)| match far {
                OTHER_NODE.. => format!("{name} (other NUMA node)"),
                _ => (*name).to_owned(),
            })
            .collect();
        Line::ok(CHECK, format!("the nearest first: {}", words.join(", "))).of(&device.name)
    };
    let mut lines: Vec<Line> = match devices.len() {
        0 | 1 => Vec::new(),
        _ => devices.iter().map(of).collect(),
    };
    let Some((first, others)) = devices.split_first() else { return lines };
    lines.extend(others.iter().map(|other| {
        let kind = |device| address_kind(device).unwrap_or("none");
        let (here, there) = (kind(first), kind(other));
        match here == there {
            true => Line::ok(CHECK, format!("both addresses are {here}")),
            false => Line::problem(
                CHECK,
                format!(
                    "one address is {here}, the other {there}: they cannot reach the same peers"
                ),
                "give both addresses of the same kind, best IPv4",
            ),
        }
        .of(format!("{}-{}", first.name, other.name))
    }));
    lines
}

fn distance(from: &Device, to: &Device) -> u16 {
    match (&from.place, &to.place) {
        (Some(from), Some(to)) => from.distance(to),
        _ => 0,
    }
}

/// What came of sending between each two.
pub(crate) enum Sent {
    /// Nobody asked for it.
    NotAsked,
    /// Fewer than two devices can be used.
    TooFew,
    /// It could not be tried, and why.
    Failed(String),
    /// What came of it.
    Done(Vec<Reach>),
}

/// A message over each path between the machine's own devices.
pub(crate) fn paths(devices: &[&Device], sent: &Sent) -> Vec<Line> {
    const CHECK: &str = "path";
    let of = |reach: &Reach| {
        let pair = format!("{}-{}", reach.from, reach.to);
        match &reach.took {
            Ok(took) => Line::ok(CHECK, format!("64 bytes arrived in {} us", took.as_micros())),
            Err(why) => Line::problem(
                CHECK,
                format!("64 bytes did not arrive: {why}"),
                remedy(devices, reach),
            ),
        }
        .of(pair)
    };
    match sent {
        Sent::NotAsked => vec![Line::note(
            CHECK,
            "not tried; --devices with two names sends 64 bytes from each to each other",
        )],
        Sent::TooFew => vec![Line::note(CHECK, "not tried: fewer than two devices can be used")],
        Sent::Failed(why) => vec![Line::problem(
            CHECK,
            format!("the devices cannot be tried: {why}"),
            "solve what is said above; `ibv_rc_pingpong` tries a device without Unbroken",
        )],
        Sent::Done(all) => {
            let mut lines: Vec<Line> = all.iter().map(of).collect();
            let is_in = |d: &Device| all.iter().any(|reach| reach.from == d.name);
            let left_out: Vec<&str> =
                devices.iter().filter(|d| !is_in(d)).map(|d| d.name.as_str()).collect();
            if !left_out.is_empty() {
                let text = format!("too many to try all; not tried: {}", left_out.join(", "));
                lines.push(Line::note(CHECK, text).and_do("name those in --devices"));
            }
            let text =
                "these paths join this machine's own devices; those to a peer's are what counts";
            lines.push(Line::note(CHECK, text).and_do(at_the_peer(devices)));
            lines
        }
    }
}

fn named<'a>(devices: &[&'a Device], name: &str) -> Option<&'a Device> {
    devices.iter().find(|device| device.name == name).copied()
}

/// `-d mlx5_0 -x 3`
fn arguments(device: &Device) -> String {
    let index = device.port().and_then(|port| port.chosen()).map(|(_, index)| index);
    let index = index.map_or(String::new(), |index| format!(" -x {index}"));
    format!("-d {}{index}", device.name)
}

fn remedy(devices: &[&Device], reach: &Reach) -> String {
    let interface = |name: &str| {
        let port = named(devices, name).and_then(Device::port);
        port.and_then(|port| port.interface.clone()).unwrap_or_else(|| "INTERFACE".into())
    };
    let (from, to) = (interface(&reach.from), interface(&reach.to));
    format!(
        "where each device has a network of its own (rails) this is as it must be: try the peer's \
         device on the same one; else look at switch, VLAN, subnet and UDP port 4791 (`arping -I \
         {from}` the address of {to}; where both are of one subnet, net.ipv4.conf.all.arp_ignore=1 \
         and arp_announce=2). rxe reaches no other device of its own machine unless routes say so"
    )
}

/// How to try a peer's devices.
fn at_the_peer(devices: &[&Device]) -> String {
    let Some(first) = devices.first() else { return "`ib_write_bw`".into() };
    format!(
        "for each of its devices and each here: there `ib_write_bw -d ITS_DEVICE -x ITS_INDEX`, \
         here `ib_write_bw {} PEER`",
        arguments(first)
    )
}

/// What to run, where two devices can be used.
pub(crate) fn command(usable: &[&Device]) -> Option<String> {
    let names: Vec<&str> = usable.iter().map(|device| device.name.as_str()).collect();
    let enough = names.len() > 1;
    enough.then(|| {
        let arguments = arguments(usable[0]);
        format!("unbroken run --devices {} -- ib_write_bw {arguments} PEER", names.join(","))
    })
}
