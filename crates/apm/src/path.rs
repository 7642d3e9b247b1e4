//! Paths, and the choice of alternate ones.
//!
//! Both ends of a queue pair choose for themselves, and must come to the same ways, or a migration ends where the peer does not listen. So the order of
//! [`choose`] depends on nothing that one end alone knows: on the addresses that both have exchanged, and on which of the two in use is the smaller.
//! Health is looked at later, by the [`crate::machine`].

use std::cmp::Reverse;

/// Most paths of a queue pair.
pub const MAX_PATHS: usize = 16;
/// Most path bits that are tried on the same ports.
const MAX_PATH_BITS: u8 = 7;

/// What a packet's global header says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Route {
    /// The peer's.
    pub dgid: [u8; 16],
    /// The index of the own GID in its port's table.
    pub sgid_index: u8,
    /// As verbs have it.
    pub flow_label: u32,
    /// As verbs have it.
    pub hop_limit: u8,
    /// As verbs have it.
    pub traffic_class: u8,
}

/// A path from one of our ports to one of the peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Path {
    /// Our port, from 1.
    pub port: u8,
    /// The peer's LID; 0 on Ethernet.
    pub dlid: u16,
    /// Which of our port's LIDs packets come from.
    pub src_path_bits: u8,
    /// Service level.
    pub sl: u8,
    /// As verbs have it.
    pub static_rate: u8,
    /// With a global header; always on Ethernet.
    pub route: Option<Route>,
    /// Local ACK timeout, coded; 0: that of the path in use.
    pub timeout: u8,
    /// In our port's table.
    pub pkey_index: u16,
}

impl Path {
    /// Whether both are the same way: ports and addresses, not what is wanted on it.
    pub fn is_way_of(&self, other: &Path) -> bool {
        let way = |p: &Path| (p.port, p.dlid, p.src_path_bits, p.route.map(|r| (r.dgid, r.sgid_index)));
        way(self) == way(other)
    }
}

/// Where a port is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Address {
    /// One of the port's GIDs.
    pub gid: [u8; 16],
    /// Its index in the owner's table.
    pub sgid_index: u8,
    /// The port's first LID.
    pub lid: u16,
    /// The port, from 1.
    pub port: u8,
    /// It has 2^lmc LIDs.
    pub lmc: u8,
    /// RoCE.
    pub ethernet: bool,
    /// It was up when its owner looked.
    pub active: bool,
}

impl Address {
    /// Whether packets can go from one to the other: the same kind of link, and on InfiniBand the same subnet.
    fn reaches(&self, other: &Address) -> bool {
        self.ethernet == other.ethernet && (self.ethernet || self.gid[..8] == other.gid[..8])
    }

    /// Whether that path ends here.
    fn is_end_of(&self, path: &Path) -> bool {
        if self.ethernet {
            return path.route.is_some_and(|r| r.dgid == self.gid);
        }
        let bits = path.dlid.wrapping_sub(self.lid);
        path.dlid >= self.lid && bits < 1 << self.lmc.min(MAX_PATH_BITS)
    }
}

/// Why no paths were chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoChoice {
    /// The port in use is not among our addresses.
    OwnPort,
    /// The peer's address in use is not among those given.
    PeerAddress,
    /// There is no other path.
    NoOther,
}

/// All paths but the one in use, the best first; at most [`MAX_PATHS`] less one.
pub fn choose(primary: &Path, own: &[Address], peer: &[Address]) -> Result<Vec<Path>, NoChoice> {
    let here = own.iter().find(|a| a.port == primary.port).ok_or(NoChoice::OwnPort)?;
    let there = peer.iter().find(|a| a.is_end_of(primary)).ok_or(NoChoice::PeerAddress)?;
    // The same at both ends, with the parts changed.
    let first = (here.gid, here.lid) <= (there.gid, there.lid);
    let mut found = Vec::new();
    for (a, b) in own.iter().flat_map(|a| peer.iter().map(move |b| (a, b))).filter(|(a, b)| a.reaches(b)) {
        let kept = u8::from(a.port == here.port) + u8::from(b == there);
        let bits = if a.ethernet { 0 } else { ((1u16 << a.lmc.min(b.lmc).min(3)) - 1) as u8 };
        for bits in 0..=bits {
            let path = between(primary, a, b, bits);
            if !path.is_way_of(primary) {
                let ports = if first { (a.port, b.port) } else { (b.port, a.port) };
                let rank = (Reverse(a.active && b.active), kept, bits, a.port != b.port, ports);
                found.push((rank, path));
            }
        }
    }
    found.sort_by_key(|(rank, _)| *rank);
    found.truncate(MAX_PATHS - 1);
    if found.is_empty() {
        return Err(NoChoice::NoOther);
    }
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// The path between two ports; what is wanted of it is what is wanted of the one in use.
fn between(primary: &Path, own: &Address, peer: &Address, bits: u8) -> Path {
    let global = own.ethernet || primary.route.is_some();
    let as_now = primary.route.unwrap_or(Route { hop_limit: 64, ..Route::default() });
    Path {
        port: own.port,
        dlid: if own.ethernet { 0 } else { peer.lid + u16::from(bits) },
        src_path_bits: bits,
        route: global.then_some(Route { dgid: peer.gid, sgid_index: own.sgid_index, ..as_now }),
        ..*primary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(host: u8, port: u8) -> [u8; 16] {
        [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host, port]
    }

    fn ports(host: u8, count: u8, ethernet: bool, lmc: u8) -> Vec<Address> {
        let lid = |port: u8| if ethernet { 0 } else { u16::from(host) * 256 + u16::from(port) * 16 };
        let address =
            |port| Address { gid: gid(host, port), lid: lid(port), port, lmc, ethernet, active: true, sgid_index: 3 };
        (1..=count).map(address).collect()
    }

    fn primary(own: &[Address], peer: &[Address], from: usize, to: usize) -> Path {
        let as_wanted = Path { sl: 2, timeout: 14, route: own[from].ethernet.then(Route::default), ..Path::default() };
        between(&as_wanted, &own[from], &peer[to], 0)
    }

    /// The same way, seen from the other end.
    fn turned(path: &Path, own: &[Address], peer: &[Address]) -> (u8, u8, u8) {
        let (from, to) = (path.port, peer.iter().find(|a| a.is_end_of(path)).unwrap().port);
        let (first, second) = if own[0].gid < peer[0].gid { (from, to) } else { (to, from) };
        (first, second, path.src_path_bits)
    }

    #[test]
    fn other_ports_at_both_ends_come_first() {
        let (a, b) = (ports(1, 2, true, 0), ports(2, 2, true, 0));
        let paths = choose(&primary(&a, &b, 0, 0), &a, &b).unwrap();
        let ways: Vec<_> = paths.iter().map(|p| (p.port, p.route.unwrap().dgid[15])).collect();
        assert_eq!(ways, [(2, 2), (1, 2), (2, 1)]);
        assert!(paths.iter().all(|p| p.sl == 2 && p.timeout == 14 && p.dlid == 0 && p.route.unwrap().sgid_index == 3));
    }

    #[test]
    fn both_ends_choose_alike() {
        for (ethernet, lmc) in [(true, 0), (false, 0), (false, 2)] {
            let (a, b) = (ports(1, 3, ethernet, lmc), ports(2, 3, ethernet, lmc));
            for (from, to) in [(0, 0), (0, 1), (2, 1)] {
                let ours = choose(&primary(&a, &b, from, to), &a, &b).unwrap();
                let theirs = choose(&primary(&b, &a, to, from), &b, &a).unwrap();
                let ours: Vec<_> = ours.iter().map(|p| turned(p, &a, &b)).collect();
                let theirs: Vec<_> = theirs.iter().map(|p| turned(p, &b, &a)).collect();
                assert_eq!(ours, theirs, "ethernet {ethernet}, {lmc} path bits, from {from} to {to}");
            }
        }
    }

    #[test]
    fn path_bits_make_paths_of_one_port() {
        let (a, b) = (ports(1, 1, false, 1), ports(2, 1, false, 1));
        let paths = choose(&primary(&a, &b, 0, 0), &a, &b).unwrap();
        assert_eq!(paths.len(), 1);
        assert_eq!((paths[0].port, paths[0].dlid, paths[0].src_path_bits, paths[0].route), (1, b[0].lid + 1, 1, None));
    }

    #[test]
    fn what_cannot_be_chosen_is_said() {
        let (a, b, c) = (ports(1, 1, true, 0), ports(2, 1, true, 0), ports(3, 1, false, 0));
        let now = primary(&a, &b, 0, 0);
        assert_eq!(choose(&now, &a, &b), Err(NoChoice::NoOther));
        assert_eq!(choose(&now, &[], &b), Err(NoChoice::OwnPort));
        assert_eq!(choose(&now, &a, &c), Err(NoChoice::PeerAddress));
        let mut elsewhere = ports(2, 2, false, 0);
        let own = ports(1, 2, false, 0);
        let now = primary(&own, &elsewhere, 0, 0);
        elsewhere[1].gid[1] = 0x81;
        let ways: Vec<_> = choose(&now, &own, &elsewhere).unwrap().iter().map(|p| (p.port, p.dlid)).collect();
        assert_eq!(ways, [(2, elsewhere[0].lid)], "another subnet is not reached");
    }

    #[test]
    fn a_port_that_is_down_comes_last_at_both_ends() {
        let (a, mut b) = (ports(1, 2, true, 0), ports(2, 2, true, 0));
        b[1].active = false;
        let paths = choose(&primary(&a, &b, 0, 0), &a, &b).unwrap();
        assert_eq!((paths[0].port, paths[0].route.unwrap().dgid[15]), (2, 1));
        let paths = choose(&primary(&b, &a, 0, 0), &b, &a).unwrap();
        assert_eq!((paths[0].port, paths[0].route.unwrap().dgid[15]), (1, 2));
    }
}
