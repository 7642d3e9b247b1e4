//! Numbers for what messages share: NICs and the memory of ranks, each in both directions.

use crate::{Path, Topology};

/// The NICs of all hosts, then the memory of all ranks, by number: of each two, the first leads
/// away from ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// What each carries, in Mbit/s, which is bits in a µs.
    pub capacity: Vec<f64>,
    /// Where the NICs of each host begin.
    nics: Vec<usize>,
    /// Where ranks begin.
    ranks: usize,
}

impl Links {
    /// Those of a topology.
    pub fn new(topology: &Topology) -> Links {
        let (mut capacity, mut nics) = (Vec::new(), Vec::new());
        for host in topology.hosts() {
            nics.push(capacity.len());
            host.nics.iter().for_each(|nic| capacity.extend([nic.free_mbps() as f64; 2]));
        }
        let ranks = capacity.len();
        for rank in 0..topology.ranks() {
            capacity.extend([f64::from(topology.hosts()[topology.host_of(rank)].memory_mbps); 2]);
        }
        Links { capacity, nics, ranks }
    }

    /// How many NICs each host has.
    pub fn nics(&self) -> Vec<usize> {
        let next = self.nics.iter().skip(1).copied().chain([self.ranks]);
        self.nics.iter().zip(next).map(|(first, next)| (next - first) / 2).collect()
    }

    /// What a path from one rank to another uses: that of the sender, that of the receiver.
    pub fn ends(&self, topology: &Topology, (from, to): (usize, usize), path: Path) -> [usize; 2] {
        match path {
            Path::Memory => [self.ranks + 2 * from, self.ranks + 2 * to + 1],
            Path::Nics { from: out, to: into } => {
                let nics = |rank: usize| self.nics[topology.host_of(rank)];
                [nics(from) + 2 * out, nics(to) + 2 * into + 1]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fabric, Health, Host, Nic};

    #[test]
    fn each_direction_of_a_nic_and_of_a_memory_is_a_link() {
        let host = Host { memory_mbps: 7, ..Host::new(2, Nic::new(100)) };
        let topology = Topology::uniform(2, 2, host, Fabric::AnyToAny).unwrap();
        let topology = topology.with_health(1, 0, Health::Down).unwrap();
        let links = Links::new(&topology);
        // two hosts of two NICs, then four ranks
        let nics = [100.0, 100.0, 100.0, 100.0, 0.0, 0.0, 100.0, 100.0];
        assert_eq!(links.capacity, [&nics[..], &[7.0; 8]].concat());
        let path = Path::Nics { from: 1, to: 0 };
        assert_eq!(links.ends(&topology, (0, 3), path), [2, 5]);
        assert_eq!(links.ends(&topology, (2, 1), path), [6, 1]);
        assert_eq!(links.ends(&topology, (2, 3), Path::Memory), [8 + 4, 8 + 7]);
    }
}
