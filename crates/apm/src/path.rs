//! Paths, and the choice of alternate ones.
//!
//! Both ends of a queue pair choose for themselves, and must come to the same ways, or a migration
//! ends where the peer does not listen. So the order of [`choose`] depends on nothing that one end
//! alone knows: on the addresses that both have exchanged, and on which of the two in use is the
//! smaller. Health is looked at later, by the [`crate::machine`].

use std::cmp::Reverse;
use unbroken_types::{Gid, PathAttr};

/// Most paths of a queue pair.
pub const MAX_PATHS: usize = 16;
/// Most path bits that are tried on the same ports.
const MAX_PATH_BITS: u8 = 7;

/// A path from one of our ports to one of the peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// The address vector. Where it has no global header, its GIDs and what goes with them are 0.
    pub attr: PathAttr,
    /// Local ACK timeout, coded; 0: that of the path in use.
    pub timeout: u8,
}

impl Path {
    /// Whether both are the same way: ports and addresses, not what is wanted on it.
    pub fn is_way_of(&self, other: &Path) -> bool {
        let way = |Path { attr: p, .. }: &Path| {
            (p.port, p.dlid, p.src_path_bits, p.grh, p.dest_gid, p.sgid_index)
        };
        way(self) == way(other)
    }
}

impl Default for Path {
    /// None: all is 0, as C has it.
    fn default() -> Path {
        let attr = PathAttr { port: 0, grh: false, hop_limit: 0, ..PathAttr::default() };
        Path { attr, timeout: 0 }
    }
}

/// Where a port is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Address {
    /// One of the port's GIDs.
    pub gid: Gid,
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
    /// Whether packets can go from one to the other: the same kind of link, and on InfiniBand the
    /// same subnet.
    fn reaches(&self, other: &Address) -> bool {
        self.ethernet == other.ethernet && (self.ethernet || self.gid.0[..8] == other.gid.0[..8])
    }

    /// Whether that path ends here.
    fn is_end_of(&self, path: &Path) -> bool {
        let PathAttr { grh, dest_gid, dlid, .. } = path.attr;
        if self.ethernet {
            return grh && dest_gid == self.gid;
        }
        let bits = dlid.wrapping_sub(self.lid);
        dlid >= self.lid && bits < 1 << self.lmc.min(MAX_PATH_BITS)
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
    let here = own.iter().find(|a| a.port == primary.attr.port).ok_or(NoChoice::OwnPort)?;
    let there = peer.iter().find(|a| a.is_end_of(primary)).ok_or(NoChoice::PeerAddress)?;
    // The same at both ends, with the parts changed.
    let first = (here.gid, here.lid) <= (there.gid, there.lid);
    let mut found = Vec::new();
    for (a, b) in
        own.iter().flat_map(|a| peer.iter().map(move |b| (a, b))).filter(|(a, b)| a.reaches(b))
    {
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
    let now = primary.attr;
    let dlid = if own.ethernet { 0 } else { peer.lid + u16::from(bits) };
    let mut attr = PathAttr { port: own.port, dlid, src_path_bits: bits, ..now };
    if own.ethernet || now.grh {
        let hop_limit = if now.grh { now.hop_limit } else { PathAttr::default().hop_limit };
        attr = PathAttr {
            grh: true,
            dest_gid: peer.gid,
            sgid_index: own.sgid_index,
            hop_limit,
            ..attr
        };
    }
    Path { attr, timeout: primary.timeout }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(host: u8, port: u8) -> Gid {
        Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host, port])
    }

    fn ports(host: u8, count: u8, ethernet: bool, lmc: u8) -> Vec<Address> {
        let lid =
            |port: u8| if ethernet { 0 } else { u16::from(host) * 256 + u16::from(port) * 16 };
        let address = |port| Address {
            gid: gid(host, port),
            lid: lid(port),
            port,
            lmc,
            ethernet,
            active: true,
            sgid_index: 3,
        };
        (1..=count).map(address).collect()
    }

    fn primary(own: &[Address], peer: &[Address], from: usize, to: usize) -> Path {
        let attr = PathAttr { sl: 2, grh: own[from].ethernet, ..Path::default().attr };
        between(&Path { attr, timeout: 14 }, &own[from], &peer[to], 0)
    }

    /// Our port and the peer's.
    fn ends(path: &Path) -> (u8, u8) {
        (path.attr.port, path.attr.dest_gid.0[15])
    }

    /// The same way, seen from the other end.
    fn turned(path: &Path, own: &[Address], peer: &[Address]) -> (u8, u8, u8) {
        let (from, to) = (path.attr.port, peer.iter().find(|a| a.is_end_of(path)).unwrap().port);
        let (first, second) = if own[0].gid < peer[0].gid { (from, to) } else { (to, from) };
        (first, second, path.attr.src_path_bits)
    }

    #[test]
    fn other_ports_at_both_ends_come_first() {
        let (a, b) = (ports(1, 2, true, 0), ports(2, 2, true, 0));
        let paths = choose(&primary(&a, &b, 0, 0), &a, &b).unwrap();
        assert_eq!(paths.iter().map(ends).collect::<Vec<_>>(), [(2, 2), (1, 2), (2, 1)]);
        assert!(paths.iter().all(|p| p.timeout == 14 && p.attr.grh));
        assert!(paths
            .iter()
            .all(|Path { attr, .. }| (attr.sl, attr.dlid, attr.sgid_index) == (2, 0, 3)));
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
                assert_eq!(
                    ours, theirs,
                    "ethernet {ethernet}, {lmc} path bits, from {from} to {to}"
                );
            }
        }
    }

    #[test]
    fn path_bits_make_paths_of_one_port() {
        let (a, b) = (ports(1, 1, false, 1), ports(2, 1, false, 1));
        let paths = choose(&primary(&a, &b, 0, 0), &a, &b).unwrap();
        assert_eq!(paths.len(), 1);
        let attr = paths[0].attr;
        assert_eq!(
            (attr.port, attr.dlid, attr.src_path_bits, attr.grh),
            (1, b[0].lid + 1, 1, false)
        );
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
        elsewhere[1].gid.0[1] = 0x81;
        let ways: Vec<_> = choose(&now, &own, &elsewhere)
            .unwrap()
            .iter()
            .map(|p| (p.attr.port, p.attr.dlid))
            .collect();
        assert_eq!(ways, [(2, elsewhere[0].lid)], "another subnet is not reached");
    }

    #[test]
    fn a_port_that_is_down_comes_last_at_both_ends() {
        let (a, mut b) = (ports(1, 2, true, 0), ports(2, 2, true, 0));
        b[1].active = false;
        let paths = choose(&primary(&a, &b, 0, 0), &a, &b).unwrap();
        assert_eq!(ends(&paths[0]), (2, 1));
        let paths = choose(&primary(&b, &a, 0, 0), &b, &a).unwrap();
        assert_eq!(ends(&paths[0]), (1, 2));
    }
}
