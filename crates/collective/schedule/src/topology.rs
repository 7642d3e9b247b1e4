//! What there is to run on: hosts with NICs, ranks on hosts, and which NICs reach which.

use crate::Error;

/// The most ranks of a topology.
pub const MAX_RANKS: usize = 1 << 16;
/// The most NICs of a host.
pub const MAX_NICS: usize = 64;

/// How much of a NIC works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Health {
    /// All.
    #[default]
    Up,
    /// A part of its capacity, in percent (a link that came up with fewer lanes, a NIC that others
    /// use, too).
    Slow(u8),
    /// Nothing: the NIC, its port or its cable is dead, or the switch behind it.
    Down,
}

/// A NIC. Its number among its host's is its *rail*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nic {
    /// What it carries when healthy, in each direction, in Mbit/s.
    pub capacity_mbps: u32,
    /// How much of it works.
    pub health: Health,
    /// The NUMA node that it is attached to.
    pub numa: u8,
}

impl Nic {
    /// A healthy NIC on NUMA node 0.
    pub fn new(capacity_mbps: u32) -> Nic {
        Nic { capacity_mbps, health: Health::Up, numa: 0 }
    }

    /// What it carries now, in each direction, in Mbit/s.
    pub fn free_mbps(&self) -> u64 {
        match self.health {
            Health::Up => u64::from(self.capacity_mbps),
            Health::Slow(percent) => {
                u64::from(self.capacity_mbps) * u64::from(percent.min(100)) / 100
            }
            Health::Down => 0,
        }
    }
}

/// A host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Host {
    /// Its NICs, by rail.
    pub nics: Vec<Nic>,
    /// What the link between its NUMA nodes carries, in each direction, in Mbit/s.
    pub cross_numa_mbps: u32,
    /// What a rank sends to others through the host's memory (or NVLink), and what it receives, in
    /// Mbit/s.
    pub memory_mbps: u32,
}

impl Host {
    /// A host whose NICs all are as given; ranks reach any of them as well as any other, and each
    /// other at no cost to speak of.
    pub fn new(nics: usize, nic: Nic) -> Host {
        Host { nics: vec![nic; nics], cross_numa_mbps: u32::MAX, memory_mbps: u32::MAX }
    }

    /// What all its NICs carry now, in each direction, in Mbit/s.
    pub fn free_mbps(&self) -> u64 {
        self.nics.iter().map(Nic::free_mbps).sum()
    }
}

/// Where a rank runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The host.
    pub host: usize,
    /// The NUMA node that its memory (or its GPU) is attached to.
    pub numa: u8,
}

/// Which NICs reach which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fabric {
    /// A NIC reaches the NICs of its own rail alone.
    RailOnly,
    /// Every NIC reaches every other (rails joined by spines).
    AnyToAny,
}

/// Hosts, their NICs with capacity and health, and the ranks on them. All ranks must have the same
/// picture of it: every schedule follows from it alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    hosts: Vec<Host>,
    places: Vec<Place>,
    fabric: Fabric,
    /// The ranks of each host, in order.
    members: Vec<Vec<usize>>,
    /// Each rank's position among those of its host.
    local: Vec<usize>,
}

impl Topology {
    /// Checks and builds it. `places` has an entry for each rank.
    pub fn new(hosts: Vec<Host>, places: Vec<Place>, fabric: Fabric) -> Result<Topology, Error> {
        let within = |what, count: usize, most: usize| match (1..=most).contains(&count) {
            true => Ok(()),
            false => Err(Error::Count { what, count: count as u64, least: 1, most: most as u64 }),
        };
        within("ranks", places.len(), MAX_RANKS)?;
        for host in &hosts {
            within("NICs of a host", host.nics.len().max(1), MAX_NICS)?;
        }
        let mut members = vec![Vec::new(); hosts.len()];
        let mut local = Vec::with_capacity(places.len());
        for (rank, place) in places.iter().enumerate() {
            let of_host = members.get_mut(place.host).ok_or(Error::Unknown {
                what: "host",
                number: place.host,
                last: hosts.len().saturating_sub(1),
            })?;
            local.push(of_host.len());
            of_host.push(rank);
        }
        match members.iter().position(Vec::is_empty) {
            Some(host) => Err(Error::Idle { host }),
            None => Ok(Topology { hosts, places, fabric, members, local }),
        }
    }

    /// Hosts that are all alike, with consecutive ranks on each.
    pub fn uniform(
        hosts: usize,
        ranks_per_host: usize,
        host: Host,
        fabric: Fabric,
    ) -> Result<Topology, Error> {
        let places = (0..hosts * ranks_per_host)
            .map(|rank| Place { host: rank / ranks_per_host, numa: 0 })
            .collect();
        Topology::new(vec![host; hosts], places, fabric)
    }

    /// This topology with another health of one NIC, `nic` of `host`. An error where there is no
    /// such host or NIC.
    pub fn with_health(
        mut self,
        host: usize,
        nic: usize,
        health: Health,
    ) -> Result<Topology, Error> {
        let unknown = |what, number, count: usize| Error::Unknown {
            what,
            number,
            last: count.saturating_sub(1),
        };
        let count = self.hosts.len();
        let nics = &mut self.hosts.get_mut(host).ok_or(unknown("host", host, count))?.nics;
        let count = nics.len();
        nics.get_mut(nic).ok_or(unknown("NIC", nic, count))?.health = health;
        Ok(self)
    }

    /// This topology with all NICs up.
    #[must_use]
    pub fn healthy(mut self) -> Topology {
        let nics = self.hosts.iter_mut().flat_map(|host| &mut host.nics);
        nics.for_each(|nic| nic.health = Health::Up);
        self
    }

    /// This topology over another fabric.
    #[must_use]
    pub fn with_fabric(self, fabric: Fabric) -> Topology {
        Topology { fabric, ..self }
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.places.len()
    }

    /// Where a rank runs.
    pub fn place(&self, rank: usize) -> Place {
        self.places[rank]
    }

    /// The host of a rank.
    pub fn host_of(&self, rank: usize) -> usize {
        self.places[rank].host
    }

    /// The ranks of a host, in order; at least one.
    pub fn members(&self, host: usize) -> &[usize] {
        &self.members[host]
    }

    /// A rank's position among those of its host.
    pub fn local(&self, rank: usize) -> usize {
        self.local[rank]
    }

    /// Which NICs reach which.
    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// What each host can exchange with all others together, in each direction, in Mbit/s: where
    /// rails are apart, a NIC is of use as far as the other hosts' NICs on its rail.
    pub fn useful_mbps(&self) -> Vec<u64> {
        let useful = |host: &Host| match self.fabric {
            Fabric::AnyToAny => host.free_mbps(),
            Fabric::RailOnly => {
                let all = |rail| {
                    self.hosts
                        .iter()
                        .filter_map(|h| h.nics.get(rail))
                        .map(Nic::free_mbps)
                        .sum::<u64>()
                };
                let rails = host.nics.iter().enumerate();
                rails.map(|(rail, nic)| nic.free_mbps().min(all(rail) - nic.free_mbps())).sum()
            }
        };
        self.hosts.iter().map(useful).collect()
    }

    /// What two hosts can exchange with each other, in each direction, in Mbit/s.
    pub fn pair_mbps(&self, a: usize, b: usize) -> u64 {
        let (a, b) = (&self.hosts[a], &self.hosts[b]);
        match self.fabric {
            Fabric::AnyToAny => a.free_mbps().min(b.free_mbps()),
            Fabric::RailOnly => {
                let rails = a.nics.iter().zip(&b.nics);
                rails.map(|(x, y)| x.free_mbps().min(y.free_mbps())).sum()
            }
        }
    }

    /// Whether a NIC of one host reaches a NIC of another, and both are up.
    pub fn joined(&self, host_a: usize, nic_a: usize, host_b: usize, nic_b: usize) -> bool {
        let up = |host: usize, nic: usize| {
            self.hosts[host].nics.get(nic).is_some_and(|n| n.free_mbps() > 0)
        };
        (self.fabric == Fabric::AnyToAny || nic_a == nic_b)
            && up(host_a, nic_a)
            && up(host_b, nic_b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_may_lie_anywhere() {
        let host = Host::new(2, Nic::new(100));
        let places = [1, 0, 1].map(|host| Place { host, numa: 0 }).to_vec();
        let t = Topology::new(vec![host.clone(), host], places, Fabric::RailOnly).unwrap();
        assert_eq!((t.members(0), t.members(1)), (&[1][..], &[0, 2][..]));
        assert_eq!((t.local(2), t.host_of(2)), (1, 1));
        assert!(t.joined(0, 1, 1, 1) && !t.joined(0, 0, 1, 1) && !t.joined(0, 2, 1, 2));
    }

    #[test]
    fn health_is_capacity() {
        let host = Host::new(2, Nic::new(100));
        let t = Topology::uniform(2, 2, host, Fabric::AnyToAny).unwrap();
        let t =
            t.with_health(0, 1, Health::Down).unwrap().with_health(1, 0, Health::Slow(25)).unwrap();
        assert_eq!((t.hosts()[0].free_mbps(), t.hosts()[1].free_mbps()), (100, 125));
        assert!(t.joined(0, 0, 1, 1) && !t.joined(0, 1, 1, 1));
        assert_eq!(t.useful_mbps(), [100, 125]);
        let host = Host::new(2, Nic::new(100));
        let t = Topology::uniform(2, 2, host, Fabric::RailOnly)
            .unwrap()
            .with_health(0, 1, Health::Slow(30))
            .unwrap();
        assert_eq!(t.useful_mbps(), [130, 130]);
    }

    #[test]
    fn bad_topologies_are_named() {
        let host = || Host::new(1, Nic::new(100));
        let says = |r: Result<Topology, Error>| r.unwrap_err().to_string();
        let place = |host| Place { host, numa: 0 };
        assert_eq!(
            says(Topology::new(vec![host(), host()], vec![place(0)], Fabric::RailOnly)),
            "host 1 has no rank; leave it out of the topology"
        );
        assert!(says(Topology::new(vec![host()], vec![place(1)], Fabric::RailOnly))
            .contains("host 1 does not exist"));
        assert!(says(Topology::new(vec![], vec![], Fabric::RailOnly))
            .contains("0 ranks; there can be 1 to 65536"));
        let one = Topology::uniform(1, 1, host(), Fabric::RailOnly).unwrap();
        assert!(says(one.with_health(0, 1, Health::Down)).contains("NIC 1 does not exist"));
    }
}
