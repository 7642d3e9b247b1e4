//! AllReduce among hosts that carry unequally much.
//!
//! Let host *h* of *n* carry *c_h* bytes a second each way, all its NICs together, and the vector
//! have *D* bytes. Reducing and spreading along the same tree, a host sends and receives, for each
//! byte, as many bytes as it has neighbours in the tree: at least 1, and 2(n − 1) on all hosts
//! together. So no AllReduce by trees ends before
//!
//! > T* = max(2(n − 1) / Σ c_h, 1 / min c_h) · D
//!
//! and it is attained by any mixture of trees in which host *h* has *c_h T* / D* neighbours on
//! average (R²CCL §5.2 has another way, [`crate::paper`]):
//!
//! - of *stars*, for three hosts and more: the host in the middle has n − 1 neighbours, the others
//!   have one. Host *h* is in the middle for the share w_h = (c_h T* / D − 1) / (n − 2) of the
//!   vector: it owns it ([`stars`]);
//! - of *rings with leaves*: for a part of the vector all hosts are in a ring; for the rest the
//!   slowest host hangs on the ring of the others as a leaf, with 1 neighbour instead of about 2;
//!   for a part of that the two slowest; and so on ([`rings`]). A host has few connections, and a
//!   healthy cluster's ring is the special case. It is R²CCL's recursive AllReduce (§6) without its
//!   broadcasts: what a leaf contributes enters the ring where the chain of a shard begins, and
//!   costs the others no second round.
//!
//! Every NIC is then busy all the time in both directions, so how messages share NICs decides
//! whether time follows volume ([`crate::cost::Sharing`]). Of stars all chunks are alike, and with
//! messages in turn and *k* chunks it takes (k + 1) / k of T*. Of rings with leaves they are not,
//! and it takes about a tenth longer (`tests/time.rs`).
//!
//! Two hosts send everything to each other whatever they own: T* is 1 / min c_h.
//!
//! With one slow host among *n*, which keeps the fraction *c* of its rate, T* is 1 / c where c is
//! at most about a half, and 2(n − 1) / (n − 1 + c) above. So it is at most n / (n − 1) times that
//! of healthy hosts as long as c is at least a half: an overhead of O(1/n), as OptCC's lower bound
//! for one straggler has it (arXiv 2606.01680, for *n* GPUs). Below a half no schedule can hide it.

/// T*, in µs, for a vector of so many bytes. Infinite if a host carries nothing.
pub fn all_reduce_bound_us(bytes: u64, hosts_mbps: &[u64]) -> f64 {
    let n = hosts_mbps.len();
    if n < 2 {
        return 0.0;
    }
    let all: u64 = hosts_mbps.iter().sum();
    let least = hosts_mbps.iter().min().copied().unwrap_or(0);
    let rounds = (2.0 * (n as f64 - 1.0) / all as f64).max(1.0 / least as f64);
    bytes as f64 * 8.0 * rounds
}

/// What hosts should own of the vector, in proportion, so that [`crate::Shape::Direct`] attains T*.
pub fn stars(hosts_mbps: &[u64]) -> Vec<u64> {
    let n = hosts_mbps.len() as u64;
    if n < 3 {
        return vec![1; hosts_mbps.len()];
    }
    let all: u64 = hosts_mbps.iter().sum();
    let least = hosts_mbps.iter().min().copied().unwrap_or(0);
    // w_h is in proportion to c_h T* / D - 1; where the slowest host alone is the limit, others may
    // own less than they could
    let weights: Vec<u64> = match 2 * (n - 1) * least >= all {
        true => hosts_mbps.iter().map(|c| 2 * (n - 1) * c - all).collect(),
        false => hosts_mbps.iter().map(|c| c - least).collect(),
    };
    if weights.iter().all(|w| *w == 0) {
        return vec![1; hosts_mbps.len()];
    }
    weights
}

/// A part of the vector that goes round a ring on which some hosts are leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// The hosts of the ring, in order.
    pub members: Vec<usize>,
    /// The hosts that hang on it.
    pub leaves: Vec<usize>,
    /// How much of the vector, in proportion.
    pub weight: u64,
}

/// The rings, and what goes round each, so that T* is attained; `order` has all hosts as they come
/// after each other on a ring.
///
/// With hosts by their rate, slowest first, let A_i be the part for which the first i are leaves. A
/// member of that ring has (2n − i − 2) / (n − i) neighbours on average, a leaf has 1; so host i +
/// 1 carries A_i (n − 2) / (n − i) more than host i, which is to be (c_{i+1} − c_i) T*. What is
/// left is A_0. It is not negative just where the slowest host alone is not the limit; where it is,
/// there is no ring of all hosts, and the others carry less than they could.
pub fn rings(hosts_mbps: &[u64], order: &[usize]) -> Vec<Ring> {
    let n = order.len();
    let mut slowest_first = order.to_vec();
    slowest_first.sort_by_key(|host| (hosts_mbps[*host], *host));
    let rate = |i: usize| hosts_mbps[slowest_first[i]];
    let all: u64 = hosts_mbps.iter().sum();
    let without = |count: usize| {
        let (leaves, _) = slowest_first.split_at(count);
        let members = order.iter().copied().filter(|h| !leaves.contains(h)).collect();
        (members, leaves.to_vec())
    };
    let ring = |count: usize, weight: u64| {
        let (members, leaves) = without(count);
        Ring { members, leaves, weight }
    };
    if n < 3 {
        return vec![ring(0, 1)];
    }
    // in units of T* / (n - 2), and T* = 2 (n - 1) / all
    let steps = (1..n).filter(|i| rate(*i) > rate(i - 1));
    let mut weights: Vec<(usize, u128)> = steps
        .map(|i| (i, u128::from(rate(i) - rate(i - 1)) * (2 * (n - i) * (n - 1)) as u128))
        .collect();
    let leaves: u128 = weights.iter().map(|(_, weight)| weight).sum();
    let rest = (u128::from(all) * (n as u128 - 2)).saturating_sub(leaves);
    if rest > 0 || weights.is_empty() {
        weights.insert(0, (0, rest.max(1)));
    }
    // 48 bits are precise enough
    let largest = weights.iter().map(|(_, weight)| *weight).max().unwrap_or(1);
    let shift = (128 - largest.leading_zeros()).saturating_sub(48);
    weights.into_iter().map(|(leaves, weight)| ring(leaves, (weight >> shift) as u64)).collect()
}

/// How often each host sends the vector, and receives it, on rings with leaves.
pub fn loads(rings: &[Ring], hosts: usize) -> Vec<f64> {
    let all: u64 = rings.iter().map(|r| r.weight).sum();
    let mut loads = vec![0.0; hosts];
    for Ring { members, leaves, weight } in rings {
        let (part, m) = (*weight as f64 / all as f64, members.len() as f64);
        let of_member = part * (2.0 * (m - 1.0) + leaves.len() as f64) / m;
        members.iter().for_each(|h| loads[*h] += of_member);
        leaves.iter().for_each(|h| loads[*h] += part);
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rates() -> impl Strategy<Value = Vec<u64>> {
        prop::collection::vec(
            prop_oneof![3 => Just(800_000u64), 1 => (1u64..8).prop_map(|k| k * 100_000)],
            3..20,
        )
    }

    /// The time that a share of the vector takes on the busiest host, given what each host carries
    /// of it.
    fn time(loads: &[f64], rates: &[u64]) -> f64 {
        loads.iter().zip(rates).map(|(load, rate)| load / *rate as f64).fold(0.0, f64::max)
    }

    #[test]
    fn the_bound_is_that_of_the_design() {
        // 1 of 8 lost: 87.5 % of healthy for 2 hosts, 95.8 % for 3, 96.9 % for 4
        for (n, kept) in [(2, 0.875), (3, 0.9583), (4, 0.96875), (8, 0.984375), (64, 0.998)] {
            let healthy = vec![800_000; n];
            let mut degraded = healthy.clone();
            degraded[0] = 700_000;
            let kept_now =
                all_reduce_bound_us(1 << 30, &healthy) / all_reduce_bound_us(1 << 30, &degraded);
            assert!((kept_now - kept).abs() < 1e-3, "{n}: {kept_now}");
        }
        assert_eq!(all_reduce_bound_us(1 << 30, &[1]), 0.0);
    }

    /// OptCC (arXiv 2606.01680): a straggler that keeps at least half of its rate costs O(1/n).
    #[test]
    fn a_host_with_half_of_its_rate_costs_one_nth() {
        for n in [3, 4, 8, 64, 1024] {
            let longer = |mbps: u64| {
                let mut hosts = vec![1000; n];
                let healthy = all_reduce_bound_us(1 << 30, &hosts);
                hosts[n / 2] = mbps;
                all_reduce_bound_us(1 << 30, &hosts) / healthy - 1.0
            };
            let most = 1.0 / (n as f64 - 1.0);
            for mbps in (500..1000).step_by(25) {
                assert!(longer(mbps) <= most + 1e-9, "{n} hosts, {mbps}: {}", longer(mbps));
            }
            assert!((longer(500) - most).abs() < 1e-9, "it is attained at a half");
            // below, what the straggler alone takes counts, however many hosts there are
            assert!(longer(400) > 0.24 && longer(250) > 0.99, "{n}: {}", longer(400));
        }
    }

    #[test]
    fn healthy_hosts_have_one_ring() {
        assert_eq!(
            rings(&[1000; 4], &[2, 0, 3, 1]),
            [Ring { members: vec![2, 0, 3, 1], leaves: vec![], weight: 8000 }]
        );
        assert_eq!(
            rings(&[0; 4], &[0, 1, 2, 3]).len(),
            1,
            "whoever cannot send is named elsewhere"
        );
        let one_slow = rings(&[1000, 700, 1000, 1000], &[0, 1, 2, 3]);
        assert_eq!(one_slow.len(), 2);
        assert_eq!((&one_slow[1].members, &one_slow[1].leaves), (&vec![0, 2, 3], &vec![1]));
    }

    proptest! {
        #[test]
        fn stars_attain_the_bound(rates in rates()) {
            let n = rates.len() as f64;
            let owners = stars(&rates);
            let all: u64 = owners.iter().sum();
            let loads: Vec<f64> = owners.iter().map(|w| 1.0 + (n - 2.0) * *w as f64 / all as f64).collect();
            let bound = all_reduce_bound_us(1_000_000, &rates) / 8e6;
            prop_assert!(time(&loads, &rates) <= bound * (1.0 + 1e-9));
        }

        #[test]
        fn rings_with_leaves_attain_the_bound(rates in rates()) {
            let n = rates.len();
            let rings = rings(&rates, &(0..n).collect::<Vec<_>>());
            prop_assert!(rings.iter().all(|r| r.members.len() + r.leaves.len() == n));
            let loads = loads(&rings, n);
            let bound = all_reduce_bound_us(1_000_000, &rates) / 8e6;
            prop_assert!(time(&loads, &rates) <= bound * (1.0 + 1e-9), "{loads:?} {rings:?}");
        }
    }
}
