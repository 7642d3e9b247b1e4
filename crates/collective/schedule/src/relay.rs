//! Ranks that reach a NIC better through another rank than by themselves.
//!
//! A dead NIC's traffic goes to other NICs of the host, and some of those may be on another NUMA
//! node than the rank. The way there is the link between the nodes; or the memory of a rank over
//! there (over NVLink, among GPUs), which forwards (NCCL calls it PXN). R²CCL §5.1: directly as
//! long as the link has room, then whichever is the less loaded of the two.

use std::collections::HashMap;

use crate::binding::{Binding, SHARES};
use crate::{Grouping, Topology};

/// Who forwards for whom.
#[derive(Clone, Debug, Default)]
pub(crate) struct Relays {
    /// Of a rank to a NIC of its host, and back.
    relays: HashMap<(usize, usize), usize>,
    /// By host: whether anyone forwards.
    any: Vec<bool>,
}

impl Relays {
    pub fn new(topology: &Topology, binding: &Binding, grouping: Grouping) -> Relays {
        let mut relays = HashMap::new();
        let mut any = vec![false; topology.hosts().len()];
        for (host, of_host) in any.iter_mut().enumerate() {
            let before = relays.len();
            choose(topology, host, &crossing(topology, binding, grouping, host), &mut relays);
            *of_host = relays.len() > before;
        }
        Relays { relays, any }
    }

    /// The rank that forwards between a rank and a NIC of its host.
    pub fn of(&self, rank: usize, nic: usize) -> Option<usize> {
        self.relays.get(&(rank, nic)).copied()
    }

    /// Whether anyone forwards on a host.
    pub fn any_on(&self, host: usize) -> bool {
        self.any[host]
    }
}

/// A rank's traffic over a NIC of another NUMA node.
struct Crossing {
    rank: usize,
    nic: usize,
    share: u64,
}

fn crossing(
    topology: &Topology,
    binding: &Binding,
    grouping: Grouping,
    host: usize,
) -> Vec<Crossing> {
    let ranks = topology.members(host);
    let nics = &topology.hosts()[host].nics;
    let numa = |rank: usize| topology.place(rank).numa;
    if ranks.iter().all(|rank| nics.iter().all(|nic| nic.numa == numa(*rank))) {
        return Vec::new();
    }
    let mut shares: HashMap<(usize, usize), u64> = HashMap::new();
    for channel in 0..binding.channels() {
        let speakers = match grouping {
            Grouping::Hosts => &ranks[channel % ranks.len()..][..1],
            Grouping::Ranks => ranks,
        };
        for rank in speakers {
            for (nic, share) in binding.shares(host, channel).iter().enumerate() {
                if *share > 0 && nics[nic].numa != numa(*rank) {
                    *shares.entry((*rank, nic)).or_default() += share / speakers.len() as u64;
                }
            }
        }
    }
    let mut all: Vec<Crossing> =
        shares.into_iter().map(|((rank, nic), share)| Crossing { rank, nic, share }).collect();
    all.sort_by_key(|c| (c.rank, c.nic));
    all
}

fn choose(
    topology: &Topology,
    host: usize,
    crossing: &[Crossing],
    relays: &mut HashMap<(usize, usize), usize>,
) {
    let of_host = &topology.hosts()[host];
    let ranks = topology.members(host);
    // times are for all channels, in units of SHARES / Mbit/s
    let nics_take = SHARES as f64 / of_host.free_mbps().max(1) as f64;
    let mut link = 0u64;
    let mut memory: HashMap<usize, u64> = HashMap::new();
    for Crossing { rank, nic, share } in crossing {
        let there: Vec<usize> = ranks
            .iter()
            .copied()
            .filter(|r| topology.place(*r).numa == of_host.nics[*nic].numa)
            .collect();
        let directly = (link + share) as f64 / f64::from(of_host.cross_numa_mbps.max(1));
        let relay = there.get(nic % there.len().max(1)).copied();
        let through = relay.map(|relay| {
            let busy = |rank: usize| memory.get(&rank).copied().unwrap_or(0);
            (busy(*rank).max(busy(relay)) + share) as f64 / f64::from(of_host.memory_mbps.max(1))
        });
        match (relay, through) {
            (Some(relay), Some(through)) if directly > nics_take && through < directly => {
                relays.insert((*rank, *nic), relay);
                *memory.entry(*rank).or_default() += share;
                *memory.entry(relay).or_default() += share;
            }
            _ => link += share,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::binding::{Demand, Repair};
    use crate::{Fabric, Health, Host, Nic, Place};

    /// Two hosts of two NUMA nodes with two ranks and two NICs each.
    fn relays(cross_numa_mbps: u32, memory_mbps: u32, dead: usize) -> Relays {
        let mut host = Host { cross_numa_mbps, memory_mbps, ..Host::new(4, Nic::new(100)) };
        (2..4).for_each(|nic| host.nics[nic].numa = 1);
        let places =
            (0..8).map(|rank| Place { host: rank / 4, numa: (rank % 4 / 2) as u8 }).collect();
        let mut t = Topology::new(vec![host.clone(), host], places, Fabric::AnyToAny).unwrap();
        for nic in 0..dead {
            t = t.with_health(0, nic, Health::Down).unwrap();
        }
        let binding = Binding::new(&t, &[1; 4], Demand::Neighbours, Repair::Balance);
        Relays::new(&t, &binding, Grouping::Hosts)
    }

    fn of_host_0(relays: &Relays) -> Vec<(usize, usize, usize)> {
        let all = (0..4).flat_map(|rank| (0..4).map(move |nic| (rank, nic)));
        all.filter_map(|(rank, nic)| relays.of(rank, nic).map(|relay| (rank, nic, relay))).collect()
    }

    #[test]
    fn nobody_forwards_while_the_link_has_room() {
        assert!(!relays(1, 1000, 0).any_on(0), "healthy: every rank has its NIC beside it");
        let relays = relays(100, 1000, 1);
        // a sixth of everything crosses, in less time than the NICs take for the rest
        assert_eq!(of_host_0(&relays), []);
    }

    #[test]
    fn a_narrow_link_is_relieved_by_ranks_beside_the_nic() {
        let relays = relays(1, 1000, 1);
        assert_eq!(of_host_0(&relays), [(0, 2, 2), (0, 3, 3)]);
        assert!(relays.any_on(0) && !relays.any_on(1));
        assert_eq!(relays.of(0, 1), None, "on the same node");
    }

    #[test]
    fn link_and_memory_share_the_load() {
        let relays = relays(50, 50, 2);
        let through = of_host_0(&relays).len();
        assert!((1..4).contains(&through), "{through} of 4 flows");
    }
}
