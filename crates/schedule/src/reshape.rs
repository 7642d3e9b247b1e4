//! AllReduce among hosts that carry unequally much.
//!
//! Let host *h* of *n* carry *c_h* bytes a second each way, all its NICs together, and the vector have *D* bytes. Reducing and spreading
//! along the same tree, a host sends and receives, for each byte, as many bytes as it has neighbours in the tree: at least 1, and 2(n − 1)
//! on all hosts together. So no AllReduce by trees ends before
//!
//! > T* = max(2(n − 1) / Σ c_h, 1 / min c_h) · D
//!
//! and it is attained by any mixture of trees in which host *h* has *c_h T* / D* neighbours on average (collective.md, "AllReduce
//! reshaped"; R²CCL §5.2 has another way):
//!
//! - of *stars*, for three hosts and more: the host in the middle has n − 1 neighbours, the others 1. Host *h* is in the middle for
//!   the share w_h = (c_h T* / D − 1) / (n − 2) of the vector: it owns it ([`stars`]).
//! - of *paths*, as long as no host should have more than 2: hosts at the two ends have 1, the others 2. Host *h* is at an end for the
//!   share 2 − c_h T* / D ([`paths`]). Few connections, and a healthy cluster's rings are a special case.
//!
//! Two hosts send everything to each other whatever they own: T* is 1 / min c_h.

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
    // w_h is in proportion to c_h T* / D - 1; where the slowest host alone is the limit, others may own less than they could
    let weights: Vec<u64> = match 2 * (n - 1) * least >= all {
        true => hosts_mbps.iter().map(|c| 2 * (n - 1) * c - all).collect(),
        false => hosts_mbps.iter().map(|c| c - least).collect(),
    };
    if weights.iter().all(|w| *w == 0) {
        return vec![1; hosts_mbps.len()];
    }
    weights
}

/// A part of the vector whose tree is a path through all hosts, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathShare {
    /// The hosts.
    pub order: Vec<usize>,
    /// How much of the vector, in proportion.
    pub weight: u64,
}

/// The paths, and what goes over each, so that T* is attained; or, where a host carries more than it could use in the middle of every
/// path, the least time that paths allow. Neighbours on the ring stay neighbours as far as it goes. At most twice as many as hosts.
pub fn paths(hosts_mbps: &[u64], ring: &[usize]) -> Vec<PathShare> {
    let n = ring.len();
    if n < 3 {
        return vec![PathShare { order: ring.to_vec(), weight: 1 }];
    }
    // hosts that are neighbours on the ring come half the line apart
    let line: Vec<usize> = (0..n).step_by(2).chain((1..n).step_by(2)).map(|p| ring[p]).collect();
    let ends = time_at_ends(hosts_mbps, &line);
    // the line is 2 units long: whoever lies at x is at one end together with whoever lies at x + 1
    let unit: u64 = ends.iter().sum::<u64>() / 2;
    let mut from = 0;
    let mut cuts: Vec<u64> = vec![0];
    for end in &ends {
        from += end;
        cuts.push(from % unit);
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts.push(unit);
    let at = |x: u64| {
        let mut before = 0;
        let of = ends.iter().position(|end| {
            before += end;
            x < before
        });
        line[of.unwrap_or(n - 1)]
    };
    cuts.windows(2)
        .filter(|cut| cut[0] < cut[1])
        .map(|cut| PathShare { order: between(ring, at(cut[0]), at(cut[0] + unit)), weight: cut[1] - cut[0] })
        .collect()
}

/// For how much of the vector each host of the line is at an end of the path; it adds up to twice the largest that one may have.
fn time_at_ends(hosts_mbps: &[u64], line: &[usize]) -> Vec<u64> {
    const UNIT: u64 = 1 << 32;
    let n = line.len();
    let rate = |host: &usize| hosts_mbps[*host] as f64;
    let least = line.iter().map(rate).fold(f64::INFINITY, f64::min);
    // T (for D = 1) such that all neighbours together are 2(n - 1), with at most 2 each
    let mut capped = vec![false; n];
    let mut t = 0.0;
    for _ in 0..n {
        let free: f64 = line.iter().zip(&capped).filter(|(_, c)| !**c).map(|(h, _)| rate(h)).sum();
        let left = 2.0 * (n as f64 - 1.0) - 2.0 * capped.iter().filter(|c| **c).count() as f64;
        t = if free > 0.0 { left / free } else { 0.0 };
        let over: Vec<usize> = (0..n).filter(|i| !capped[*i] && rate(&line[*i]) * t > 2.0).collect();
        if over.is_empty() {
            break;
        }
        over.into_iter().for_each(|i| capped[i] = true);
    }
    let t = t.max(1.0 / least.max(1.0));
    let at_ends = |host: &usize| ((2.0 - rate(host) * t).clamp(0.0, 1.0) * UNIT as f64) as u64;
    let mut ends: Vec<u64> = line.iter().map(at_ends).collect();
    // where the slowest host is the limit there is time left over: share out what is missing, and what rounding took
    let mut missing = (2 * UNIT).saturating_sub(ends.iter().sum());
    while missing > 0 {
        let open = ends.iter().filter(|e| **e < UNIT).count() as u64;
        for end in ends.iter_mut().filter(|e| **e < UNIT) {
            let more = missing.div_ceil(open).min(UNIT - *end).min(missing);
            *end += more;
            missing -= more;
        }
    }
    let mut over = ends.iter().sum::<u64>() - 2 * UNIT;
    for end in &mut ends {
        let less = over.min(*end);
        *end -= less;
        over -= less;
    }
    ends
}

/// All hosts of the ring, from one to another, in the order of the ring.
fn between(ring: &[usize], a: usize, b: usize) -> Vec<usize> {
    let n = ring.len();
    let place = |host| ring.iter().position(|h| *h == host).unwrap_or(0);
    // begin at the one behind which the way round is the longer
    let (first, last) = if (place(a) + 1) % n == place(b) { (b, a) } else { (a, b) };
    let from = place(first);
    let inner = (1..n).map(|k| ring[(from + k) % n]).filter(|h| *h != last);
    std::iter::once(first).chain(inner).chain(std::iter::once(last)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rates() -> impl Strategy<Value = Vec<u64>> {
        prop::collection::vec(prop_oneof![3 => Just(800_000u64), 1 => (1u64..8).prop_map(|k| k * 100_000)], 3..20)
    }

    /// The time that a share of the vector takes on the busiest host, given what each host carries of it.
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
            let kept_now = all_reduce_bound_us(1 << 30, &healthy) / all_reduce_bound_us(1 << 30, &degraded);
            assert!((kept_now - kept).abs() < 1e-3, "{n}: {kept_now}");
        }
        assert_eq!(all_reduce_bound_us(1 << 30, &[1]), 0.0);
    }

    #[test]
    fn a_healthy_ring_is_a_special_case_of_paths() {
        let ring = [2, 0, 3, 1];
        let paths = paths(&[1000; 4], &ring);
        for PathShare { order, .. } in &paths {
            let place = |host| ring.iter().position(|h| *h == host).unwrap();
            assert!(order.windows(2).all(|w| (place(w[0]) + 1) % 4 == place(w[1])), "{order:?}");
        }
        assert!(paths.iter().all(|p| p.weight == paths[0].weight));
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
        fn paths_attain_the_bound(rates in rates(), seed in any::<u64>()) {
            let n = rates.len();
            let mut ring: Vec<usize> = (0..n).collect();
            ring.rotate_left(seed as usize % n);
            let shares = paths(&rates, &ring);
            prop_assert!(shares.len() <= 2 * n);
            let all: u64 = shares.iter().map(|p| p.weight).sum();
            let mut loads = vec![2.0; n];
            for PathShare { order, weight } in &shares {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                prop_assert_eq!(sorted, (0..n).collect::<Vec<_>>(), "every host once");
                loads[order[0]] -= *weight as f64 / all as f64;
                loads[order[n - 1]] -= *weight as f64 / all as f64;
            }
            let bound = all_reduce_bound_us(1_000_000, &rates) / 8e6;
            // a host in the middle of every path has two neighbours, and cannot use more
            let sum: u64 = rates.iter().sum();
            if rates.iter().all(|c| 2.0 >= *c as f64 * bound) && sum > 0 {
                prop_assert!(time(&loads, &rates) <= bound * (1.0 + 1e-6), "{loads:?} {shares:?}");
            }
        }
    }
}
