//! Rings where neighbours share too few rails (R²CCL §6 and appendix D).
//!
//! Where rails are apart, neighbours on a ring use the rails that both have. Two that have lost
//! different rails share fewer than either has, and slow down everyone; so a host that shares more
//! with both is moved between them.

use crate::{Fabric, Topology};

/// The order of Algorithm 1 of appendix D: `rails[h]` has a bit for each rail whose NIC is up at
/// host *h*; `ring` is the order before.
///
/// It has a guard that the algorithm lacks: a pair that is apart already, since one of its hosts
/// has become the bridge of another, is left alone. So no neighbours ever share fewer rails than
/// the worst pair did before.
pub fn rerank(ring: &[usize], rails: &[u64]) -> Vec<usize> {
    bridged(ring, |a, b| u64::from((rails[a] & rails[b]).count_ones()), true)
}

/// The order of Algorithm 1 of appendix D for hosts of a topology, from the order `ring`. What
/// counts is how much neighbours can exchange. Where every NIC reaches every other, the order
/// stays.
pub fn rerank_hosts(topology: &Topology, ring: &[usize]) -> Vec<usize> {
    match topology.fabric() {
        Fabric::AnyToAny => ring.to_vec(),
        Fabric::RailOnly => bridged(ring, |a, b| shared_mbps(topology, a, b), true),
    }
}

/// All hosts of a topology, by number but for bridges.
pub fn bridged_ring(topology: &Topology) -> Vec<usize> {
    rerank_hosts(topology, &(0..topology.hosts().len()).collect::<Vec<_>>())
}

/// What two hosts can exchange over the rails that both have, in Mbit/s; of a host with itself,
/// what it carries.
pub fn shared_mbps(topology: &Topology, a: usize, b: usize) -> u64 {
    let (a, b) = (&topology.hosts()[a].nics, &topology.hosts()[b].nics);
    a.iter().zip(b).map(|(x, y)| x.free_mbps().min(y.free_mbps())).sum()
}

/// `shared` says how much two hosts can exchange; of one with itself, what it carries.
fn bridged(ring: &[usize], shared: impl Fn(usize, usize) -> u64, guard: bool) -> Vec<usize> {
    let n = ring.len();
    let enough = ring.iter().map(|host| shared(*host, *host)).min().unwrap_or(0);
    let mut candidates: Vec<(usize, usize)> = (0..n)
        .map(|i| (ring[i], ring[(i + 1) % n]))
        .filter(|(u, v)| shared(*u, *v) < enough)
        .collect();
    // the worst first
    candidates.sort_by_key(|(u, v)| shared(*u, *v));
    let mut order = Order::new(ring);
    for (u, v) in candidates {
        if guard && order.next(u) != v {
            continue;
        }
        let bridge = order.hosts.iter().copied().filter(|w| *w != u && *w != v).find(|w| {
            let (x, y) = (order.previous(*w), order.next(*w));
            shared(u, *w).min(shared(*w, v)) >= enough && (x == y || shared(x, y) >= enough)
        });
        if let Some(w) = bridge {
            order.put_behind(u, w);
        }
    }
    order.hosts
}

/// Hosts round a ring, and where each is.
struct Order {
    hosts: Vec<usize>,
    places: Vec<usize>,
}

impl Order {
    fn new(ring: &[usize]) -> Order {
        let most = ring.iter().max().map_or(0, |most| most + 1);
        let mut order = Order { hosts: ring.to_vec(), places: vec![0; most] };
        order.count();
        order
    }

    fn count(&mut self) {
        self.hosts.iter().enumerate().for_each(|(place, host)| self.places[*host] = place);
    }

    fn next(&self, host: usize) -> usize {
        self.hosts[(self.places[host] + 1) % self.hosts.len()]
    }

    fn previous(&self, host: usize) -> usize {
        let n = self.hosts.len();
        self.hosts[(self.places[host] + n - 1) % n]
    }

    /// Moves a host to the place behind another.
    fn put_behind(&mut self, other: usize, host: usize) {
        self.hosts.remove(self.places[host]);
        self.count();
        self.hosts.insert(self.places[other] + 1, host);
        self.count();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn worst(ring: &[usize], rails: &[u64]) -> u32 {
        let n = ring.len();
        (0..n).map(|i| (rails[ring[i]] & rails[ring[(i + 1) % n]]).count_ones()).min().unwrap()
    }

    /// Figure 6: a healthy host comes between two that have lost different rails.
    #[test]
    fn a_bridge_comes_between() {
        let rails = [0b1110, 0b1101, 0b1111, 0b1111];
        let ring = rerank(&[0, 1, 2, 3], &rails);
        assert_eq!(ring, [0, 2, 1, 3]);
        assert_eq!((worst(&[0, 1, 2, 3], &rails), worst(&ring, &rails)), (2, 3));
    }

    #[test]
    fn rings_that_are_well_stay() {
        assert_eq!(rerank(&[2, 0, 1], &[0b11, 0b11, 0b11]), [2, 0, 1]);
        assert_eq!(rerank(&[0, 1], &[0b01, 0b10]), [0, 1], "nobody is left to come between");
    }

    /// The algorithm as printed puts a second bridge behind a host that has become a bridge itself,
    /// where it does not belong.
    #[test]
    fn a_pair_that_is_apart_already_is_left_alone() {
        let rails = [0b0011u64, 0b0111, 0b1100, 0b1111, 0b1011, 0b1101];
        let ring = [0, 1, 2, 3, 4, 5];
        let shared = |a: usize, b: usize| u64::from((rails[a] & rails[b]).count_ones());
        let (guarded, printed) = (rerank(&ring, &rails), bridged(&ring, shared, false));
        assert_eq!(
            (worst(&ring, &rails), worst(&printed, &rails), worst(&guarded, &rails)),
            (1, 1, 2)
        );
        assert_eq!((printed, guarded), (vec![0, 1, 5, 4, 2, 3], vec![0, 1, 5, 2, 3, 4]));
    }

    proptest! {
        #[test]
        fn it_is_never_worse_than_before(
            rails in prop::collection::vec(prop_oneof![2 => Just(0xffu64), 1 => 1u64..256], 2..24),
        ) {
            let before: Vec<usize> = (0..rails.len()).collect();
            let after = rerank(&before, &rails);
            let mut sorted = after.clone();
            sorted.sort_unstable();
            prop_assert_eq!(&sorted, &before, "every host once");
            prop_assert!(worst(&after, &rails) >= worst(&before, &rails));
        }
    }
}
