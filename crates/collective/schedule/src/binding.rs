//! Which NICs carry a channel between two hosts.
//!
//! A channel has a *home* NIC on each host: the one with its number, modulo the host's NICs. What a
//! NIC carries is to be in proportion to what it can carry now; so a channel whose home is dead or
//! slow is spread over the other NICs, in proportion to the room that their own channels leave
//! (R²CCL §5.1, Balance). It is the same calculation for one dead NIC, for several, and for NICs
//! that never were equal.
//!
//! On a fabric where every NIC reaches every other, the two hosts share out the channel
//! independently, and the shares are laid over each other. Where rails are apart, both ends of a
//! route are on one rail. A host that talks to one other at a time then uses a rail as far as the
//! weaker of its two NICs goes. Where all talk to all, what a pair can no longer send on one rail
//! would crowd the others: pairs that still can use that rail more, until no NIC has more than its
//! part ([`Demand::Everyone`]).

use std::collections::HashMap;

use crate::rails;
use crate::split::split;
use crate::{Error, Fabric, Topology};

/// What the shares of a channel add up to, over all channels. Shares are integers, so that all
/// ranks compute the same.
pub const SHARES: u64 = 1 << 24;

/// A way from one host to another, and how much of the channel takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The NIC of the sending host.
    pub from: usize,
    /// The NIC of the receiving host.
    pub to: usize,
    /// Its share, of [`SHARES`] for all channels together.
    pub share: u64,
}

/// Who talks to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand<'a> {
    /// A host sends to one other, and receives from one other (rings, pairs).
    Neighbours,
    /// Every host talks to every other: each pair exchanges in proportion to the sum of their
    /// weights (what they own of an AllReduce).
    Everyone(&'a [u64]),
}

/// What becomes of the share of a NIC that cannot carry it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Repair {
    /// All others carry a part (R²CCL-Balance).
    #[default]
    Balance,
    /// The next one that is up carries all (R²CCL-HotRepair, for comparison).
    Backup,
}

/// The shares of every channel on every NIC, for each kind of host.
#[derive(Clone, Debug)]
pub struct Binding {
    fabric: Fabric,
    repair: Repair,
    /// The kind of each host. Hosts whose NICs carry the same and that have the same weight are of
    /// one kind.
    kinds: Vec<usize>,
    /// What each NIC carries, in Mbit/s, of each kind.
    free_mbps: Vec<Vec<u64>>,
    /// What each channel is of everything, in [`SHARES`].
    channels: Vec<u64>,
    /// `[kind][channel][nic]`: the share that the channel has on the NIC, in [`SHARES`].
    shares: Vec<Vec<Vec<u64>>>,
    /// `[kind][kind]`, rails apart: how much of a pair's traffic each rail takes, in proportion.
    rails: Vec<Vec<Vec<u64>>>,
}

impl Binding {
    /// Binds channels that carry parts of the data in proportion to `weights`.
    pub fn new(topology: &Topology, weights: &[u64], demand: Demand, repair: Repair) -> Binding {
        let mut numbers = HashMap::new();
        let mut free_mbps: Vec<Vec<u64>> = Vec::new();
        let mut owned = Vec::new();
        let mut hosts = Vec::new();
        let mut kinds = Vec::new();
        for (number, host) in topology.hosts().iter().enumerate() {
            let free: Vec<u64> = host.nics.iter().map(|nic| nic.free_mbps()).collect();
            let weight = match demand {
                Demand::Neighbours => 0,
                Demand::Everyone(weights) => weights[number],
            };
            let kind = *numbers.entry((free.clone(), weight)).or_insert_with(|| {
                free_mbps.push(free);
                owned.push(weight);
                hosts.push(0);
                free_mbps.len() - 1
            });
            hosts[kind] += 1;
            kinds.push(kind);
        }
        let bounds = split(SHARES, weights, 1);
        let channels: Vec<u64> = bounds.windows(2).map(|w| w[1] - w[0]).collect();
        let shares = free_mbps.iter().map(|free| share_out(&channels, free, repair)).collect();
        let rails = match (topology.fabric(), demand) {
            (Fabric::AnyToAny, _) => Vec::new(),
            (Fabric::RailOnly, Demand::Neighbours) => rails::of_pairs(&free_mbps),
            (Fabric::RailOnly, Demand::Everyone(_)) => {
                rails::of_everyone(&free_mbps, &owned, &hosts)
            }
        };
        Binding { fabric: topology.fabric(), repair, kinds, free_mbps, channels, shares, rails }
    }

    /// How many channels there are.
    pub fn channels(&self) -> usize {
        self.channels.len()
    }

    /// The routes of a channel from one host to another, by the sender's NIC and then the
    /// receiver's. From the other end they are the same, with `from` and `to` exchanged, and in
    /// another order.
    pub fn routes(&self, channel: usize, from: usize, to: usize) -> Result<Vec<Route>, Error> {
        let parted = |why| Error::Parted { a: from, b: to, why };
        let (a, b) = (self.kinds[from], self.kinds[to]);
        match self.fabric {
            Fabric::AnyToAny => {
                let routes = lay_over(&self.shares[a][channel], &self.shares[b][channel]);
                (!routes.is_empty())
                    .then_some(routes)
                    .ok_or(parted("one of them has no NIC that is up"))
            }
            Fabric::RailOnly => {
                if self.rails[a][b].iter().all(|part| *part == 0) {
                    return Err(parted("they share no rail whose NICs are up at both"));
                }
                let shares = share_out(&self.channels, &self.rails[a][b], self.repair);
                let routes = shares[channel].iter().enumerate().filter(|(_, share)| **share > 0);
                Ok(routes.map(|(nic, share)| Route { from: nic, to: nic, share: *share }).collect())
            }
        }
    }

    /// What a channel has on each NIC of a host, of [`SHARES`] for all channels together. Where
    /// rails are apart, pairs of hosts may divide it otherwise.
    pub fn shares(&self, host: usize, channel: usize) -> &[u64] {
        &self.shares[self.kinds[host]][channel]
    }

    /// Whether every host has a path to every other.
    pub fn all_joined(&self) -> bool {
        let alone = self.kinds.len() == 1;
        alone
            || self.free_mbps.iter().enumerate().all(|(i, a)| match self.fabric {
                Fabric::AnyToAny => a.iter().any(|mbps| *mbps > 0),
                Fabric::RailOnly => self.free_mbps[i..]
                    .iter()
                    .all(|b| a.iter().zip(b).any(|(x, y)| *x > 0 && *y > 0)),
            })
    }

    /// The kind of a host: two pairs of hosts of the same kinds have the same routes.
    pub fn kind(&self, host: usize) -> usize {
        self.kinds[host]
    }

    /// How many kinds there are.
    pub(crate) fn kind_count(&self) -> usize {
        self.free_mbps.len()
    }
}

/// Shares out channels over NICs so that each NIC has its part of the capacity, and as much as
/// possible stays at home. `[channel][nic]`; all 0 where no NIC carries anything.
fn share_out(channels: &[u64], free_mbps: &[u64], repair: Repair) -> Vec<Vec<u64>> {
    let nics = free_mbps.len();
    let mut shares = vec![vec![0; nics]; channels.len()];
    if free_mbps.iter().all(|mbps| *mbps == 0) {
        return shares;
    }
    if repair == Repair::Backup {
        for (channel, share) in channels.iter().enumerate() {
            let chain = (channel..channel + nics).map(|nic| nic % nics);
            chain
                .filter(|nic| free_mbps[*nic] > 0)
                .take(1)
                .for_each(|nic| shares[channel][nic] = *share);
        }
        return shares;
    }
    let bounds = split(channels.iter().sum(), free_mbps, 1);
    let mut room: Vec<u64> = bounds.windows(2).map(|w| w[1] - w[0]).collect();
    let mut left = channels.to_vec();
    for (channel, left) in left.iter_mut().enumerate() {
        let home = channel % nics;
        let stays = (*left).min(room[home]);
        shares[channel][home] = stays;
        room[home] -= stays;
        *left -= stays;
    }
    for (channel, left) in left.into_iter().enumerate() {
        let bounds = split(left, &room, 1);
        for nic in 0..nics {
            // never more than the room: what is left of all channels is the room of all NICs
            let part = bounds[nic + 1] - bounds[nic];
            shares[channel][nic] += part;
            room[nic] -= part;
        }
    }
    shares
}

/// Joins two ways of sharing out the same amount into pairs, in order.
fn lay_over(from: &[u64], to: &[u64]) -> Vec<Route> {
    let mut routes = Vec::new();
    let mut to = to.iter().copied().enumerate().filter(|(_, share)| *share > 0).peekable();
    for (nic, share) in from.iter().copied().enumerate() {
        let mut left = share;
        while left > 0 {
            let Some((other, room)) = to.peek_mut() else { return routes };
            let share = left.min(*room);
            routes.push(Route { from: nic, to: *other, share });
            left -= share;
            *room -= share;
            if *room == 0 {
                to.next();
            }
        }
    }
    routes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Health, Host, Nic};
    use proptest::prelude::*;

    fn hosts(nics: usize, fabric: Fabric) -> Topology {
        Topology::uniform(3, 1, Host::new(nics, Nic::new(1000)), fabric).unwrap()
    }

    fn balance(t: &Topology, channels: usize) -> Binding {
        Binding::new(t, &vec![1; channels], Demand::Neighbours, Repair::Balance)
    }

    fn down(t: Topology, dead: &[(usize, usize)]) -> Topology {
        dead.iter().fold(t, |t, (host, nic)| t.with_health(*host, *nic, Health::Down).unwrap())
    }

    #[test]
    fn healthy_channels_are_at_home() {
        for fabric in [Fabric::RailOnly, Fabric::AnyToAny] {
            let binding = balance(&hosts(4, fabric), 4);
            for channel in 0..4 {
                let routes = binding.routes(channel, 0, 1).unwrap();
                assert_eq!(routes, [Route { from: channel, to: channel, share: SHARES / 4 }]);
            }
        }
    }

    /// R²CCL §5.1: the share of a dead NIC goes to the others in proportion; the healthy end keeps
    /// its rail where it can.
    #[test]
    fn a_dead_nics_share_is_spread_over_the_others() {
        let t = down(hosts(4, Fabric::AnyToAny), &[(0, 2)]);
        let routes = balance(&t, 4).routes(2, 0, 1).unwrap();
        assert_eq!(
            routes.iter().map(|r| (r.from, r.to)).collect::<Vec<_>>(),
            [(0, 2), (1, 2), (3, 2)]
        );
        let (least, most) =
            (routes.iter().map(|r| r.share).min(), routes.iter().map(|r| r.share).max());
        assert!(most.unwrap() - least.unwrap() <= 2);
        let t = down(hosts(4, Fabric::RailOnly), &[(0, 2), (1, 3)]);
        let routes = balance(&t, 4).routes(2, 0, 1).unwrap();
        assert_eq!(routes.iter().map(|r| (r.from, r.to)).collect::<Vec<_>>(), [(0, 0), (1, 1)]);
    }

    /// R²CCL §4.3: the chain of backup NICs, for successive failures.
    #[test]
    fn a_backup_carries_all_of_it() {
        let t = down(hosts(4, Fabric::AnyToAny), &[(0, 2), (0, 3)]);
        let binding = Binding::new(&t, &[1; 4], Demand::Neighbours, Repair::Backup);
        for (channel, nic) in [(0, 0), (1, 1), (2, 0), (3, 0)] {
            let routes = binding.routes(channel, 0, 1).unwrap();
            assert_eq!(routes, [Route { from: nic, to: channel, share: SHARES / 4 }]);
        }
    }

    #[test]
    fn hosts_without_a_path_are_named() {
        let t = down(hosts(2, Fabric::RailOnly), &[(0, 0), (1, 1)]);
        let error = balance(&t, 2).routes(0, 0, 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no path between host 0 and host 1: they share no rail whose NICs are up at both"
        );
        let t = down(hosts(2, Fabric::AnyToAny), &[(1, 0), (1, 1)]);
        assert!(balance(&t, 2)
            .routes(1, 0, 1)
            .unwrap_err()
            .to_string()
            .contains("no NIC that is up"));
    }

    proptest! {
        /// Every channel is carried in full, over NICs that are up, and every NIC has its part.
        #[test]
        fn shares_are_in_proportion_to_capacity(
            weights in prop::collection::vec(1u64..9, 1..9),
            free in prop::collection::vec(prop::sample::select(vec![0u64, 25_000, 100_000, 400_000]), 1..9),
        ) {
            prop_assume!(free.iter().any(|mbps| *mbps > 0));
            let bounds = split(SHARES, &weights, 1);
            let channels: Vec<u64> = bounds.windows(2).map(|w| w[1] - w[0]).collect();
            let shares = share_out(&channels, &free, Repair::Balance);
            for (channel, shares) in channels.iter().zip(&shares) {
                prop_assert_eq!(*channel, shares.iter().sum::<u64>());
            }
            let all: u64 = free.iter().sum();
            for (nic, mbps) in free.iter().enumerate() {
                let share: u64 = shares.iter().map(|s| s[nic]).sum();
                let ideal = SHARES as f64 * *mbps as f64 / all as f64;
                prop_assert!((share as f64 - ideal).abs() <= 16.0, "{share} for {ideal}");
                prop_assert!(*mbps > 0 || share == 0, "a dead NIC");
            }
        }

        #[test]
        fn both_ends_see_the_same_routes(
            a in prop::collection::vec(0u64..5, 1..6),
            b in prop::collection::vec(0u64..5, 1..6),
        ) {
            let bounds = |w: &[u64]| split(1000, w, 1).windows(2).map(|w| w[1] - w[0]).collect::<Vec<_>>();
            let (a, b) = (bounds(&a), bounds(&b));
            let mut back: Vec<Route> =
                lay_over(&b, &a).into_iter().map(|r| Route { from: r.to, to: r.from, share: r.share }).collect();
            back.sort_by_key(|r| (r.from, r.to));
            prop_assert_eq!(lay_over(&a, &b), back);
        }
    }
}
