//! R²CCL's AllReduce among hosts of which some have lost NICs (§5.2, §6, appendix A), for
//! comparison with [`crate::reshape`].
//!
//! A ring of all hosts reduces a part of the vector, at the pace of the slowest; at the same time a
//! ring without that host reduces the rest, as if the host had nothing to add. Then the host's own
//! part of the rest goes round the others, who add it, and the last of them returns the sum
//! (*tailored broadcast*). With several degraded hosts, rings within rings, without the slowest
//! host, without the two slowest, and so on, take parts in proportion to what their hosts have more
//! than those left out.
//!
//! Where rails are apart, the hosts of each ring are re-ranked ([`crate::rerank`]): who is left out
//! may have been the bridge of two others.
//!
//! [`crate::Shape::SubRings`] executes it. A healthy host sends the rest nearly three times, where
//! [`crate::reshape::rings`] sends it twice.

use crate::Owners;

/// X, the fraction of bandwidth lost, up to which the paper keeps the plain ring: ng / (3ng − 2),
/// about a third (appendix A).
pub fn threshold(hosts: usize, ranks_per_host: usize) -> f64 {
    let all = (hosts * ranks_per_host) as f64;
    all / (3.0 * all - 2.0)
}

/// Y*, the part of the vector that goes round the ring without the degraded host, which has lost
/// the fraction `lost` of its bandwidth. 0 up to the threshold.
pub fn partial_share(hosts: usize, ranks_per_host: usize, lost: f64) -> f64 {
    match lost <= threshold(hosts, ranks_per_host) {
        true => 0.0,
        false => balanced_share(hosts, ranks_per_host, lost),
    }
}

/// The part with which both rings end together, below the threshold, too: what dividing the vector
/// costs there.
pub fn balanced_share(hosts: usize, ranks_per_host: usize, lost: f64) -> f64 {
    let (n, g, x) = (hosts as f64, ranks_per_host as f64, lost);
    if hosts < 2 || x <= 0.0 || x >= 1.0 {
        return 0.0;
    }
    x + x * (1.0 - x) / (x + (g * (n - 1.0) - 1.0) * n)
}

/// T(Y*), by the paper's own account, in units of the time that a healthy host takes to send the
/// vector once.
///
/// The account gives the broadcast the bandwidth XB. Where more than half is lost the degraded
/// host, at which it begins and ends, has less than that, and the result is below
/// [`crate::reshape::all_reduce_bound_us`], which no schedule can be.
pub fn time(hosts: usize, ranks_per_host: usize, lost: f64) -> f64 {
    let y = partial_share(hosts, ranks_per_host, lost);
    let [first, second, third] = stages(hosts, ranks_per_host, lost, y);
    first.max(second) + third
}

/// T1, T2 and T3 of appendix A: the ring of all, the ring without the degraded host, the broadcast.
fn stages(hosts: usize, ranks_per_host: usize, lost: f64, partial: f64) -> [f64; 3] {
    let (n, g, x, y) = (hosts as f64, ranks_per_host as f64, lost, partial);
    let a = 2.0 * (n * g - 1.0) / (n * g);
    let b = 2.0 * ((n - 1.0) * g - 1.0) / ((n - 1.0) * g);
    match y > 0.0 {
        true => [a * (1.0 - y) / (1.0 - x), b * y / x, y / x],
        false => [a / (1.0 - x), 0.0, 0.0],
    }
}

/// A ring of some hosts, and those left out, whose contributions are added afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubRing {
    /// The hosts of the ring, in order.
    pub members: Vec<usize>,
    /// The others, slowest first.
    pub outsiders: Vec<usize>,
    /// Its part of the vector, in proportion.
    pub weight: u64,
}

/// When the vector is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// As appendix A has it: one degraded host keeps the plain ring up to the threshold.
    AboveThreshold,
    /// Whenever a host carries less than others.
    Always,
}

impl Division {
    /// As the owners of a plan ask for it.
    pub(crate) fn of(owners: &Owners) -> Division {
        match owners {
            Owners::ByCapacity => Division::Always,
            _ => Division::AboveThreshold,
        }
    }
}

/// The rings for hosts that carry so much each; `order` has all hosts as they come after each other
/// on a ring. One degraded host: the division of appendix A, with hosts as the nodes of rings.
/// Several: in proportion to increments (§6).
pub fn sub_rings(hosts_mbps: &[u64], order: &[usize], division: Division) -> Vec<SubRing> {
    const ALL: f64 = (1u64 << 32) as f64;
    let mut levels: Vec<u64> = order.iter().map(|host| hosts_mbps[*host]).collect();
    levels.sort_unstable();
    let (slowest, second) = (levels[0], levels.get(1).copied().unwrap_or(0));
    levels.dedup();
    let ring = |least: u64, weight: u64| {
        let mut outsiders: Vec<usize> =
            order.iter().copied().filter(|h| hosts_mbps[*h] < least).collect();
        outsiders.sort_by_key(|host| (hosts_mbps[*host], *host));
        SubRing {
            members: order.iter().copied().filter(|h| hosts_mbps[*h] >= least).collect(),
            outsiders,
            weight,
        }
    };
    let mut rings: Vec<SubRing> = if levels.len() == 2 && second > slowest {
        let share = match division {
            Division::AboveThreshold => partial_share,
            Division::Always => balanced_share,
        };
        let partial = share(order.len(), 1, 1.0 - slowest as f64 / second as f64);
        vec![ring(slowest, ((1.0 - partial) * ALL) as u64), ring(second, (partial * ALL) as u64)]
    } else {
        let increments = levels.iter().zip(std::iter::once(&0).chain(&levels));
        increments.map(|(level, before)| ring(*level, level - before)).collect()
    };
    rings.retain(|r| r.weight > 0);
    if rings.is_empty() {
        rings.push(SubRing { weight: 1, ..ring(0, 0) });
    }
    rings
}

/// How often each host sends the vector, or receives it, whichever is more often.
pub fn loads(rings: &[SubRing], hosts: usize) -> Vec<f64> {
    let all: u64 = rings.iter().map(|r| r.weight).sum();
    let mut loads = vec![0.0; hosts];
    for ring in rings {
        let (part, members) = (ring.weight as f64 / all as f64, ring.members.len() as f64);
        let joins = if ring.outsiders.is_empty() { 0.0 } else { 1.0 };
        let of_member = part * (2.0 * (members - 1.0) / members + joins);
        ring.members.iter().for_each(|host| loads[*host] += of_member);
        // the slowest begins; the others pass on what it adds, and what it gets
        for (place, host) in ring.outsiders.iter().enumerate() {
            loads[*host] += part * if place > 0 { 2.0 } else { 1.0 };
        }
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshape::all_reduce_bound_us;

    #[test]
    fn the_division_makes_both_rings_end_together() {
        for (n, g) in [(2, 2), (2, 8), (3, 8), (8, 8), (64, 8)] {
            for x in [0.45, 0.5, 0.75] {
                let y = partial_share(n, g, x);
                let [first, second, _] = stages(n, g, x, y);
                assert!((first - second).abs() < 1e-9, "n {n} g {g} X {x}: {first} {second}");
                assert!(y > 0.0 && y < 1.0);
            }
            assert_eq!(partial_share(n, g, 0.125), 0.0, "the plain ring");
        }
        assert!((threshold(2, 8) - 16.0 / 46.0).abs() < 1e-12);
    }

    /// At the threshold the plain ring and the two rings take the same.
    #[test]
    fn the_threshold_is_where_both_are_equal() {
        for (n, g) in [(2, 8), (4, 8), (64, 8)] {
            let x = threshold(n, g);
            let (below, above) = (time(n, g, x - 1e-6), time(n, g, x + 1e-6));
            assert!((below - above).abs() < 1e-3, "{below} {above}");
        }
    }

    #[test]
    fn it_takes_longer_than_the_bound_or_more_than_there_is() {
        for n in [3, 4, 8, 64] {
            for eighths in 1..7 {
                let lost = f64::from(eighths) / 8.0;
                let mut hosts = vec![800u64; n];
                hosts[0] = (800.0 * (1.0 - lost)) as u64;
                // in units of the time that a healthy host takes to send the vector
                let bound = all_reduce_bound_us(100, &hosts);
                let paper = time(n, 1, lost);
                if lost <= 0.5 {
                    assert!(paper >= bound - 1e-9, "{n} hosts, {lost} lost: {paper} {bound}");
                }
            }
        }
        // three quarters lost: the host needs four units to send its vector once
        assert!(
            time(8, 8, 0.75) < all_reduce_bound_us(100, &[200, 800, 800, 800, 800, 800, 800, 800])
        );
    }

    #[test]
    fn rings_leave_out_the_slowest() {
        let sub_rings =
            |mbps: &[u64], order: &[usize]| super::sub_rings(mbps, order, Division::AboveThreshold);
        let rings = sub_rings(&[800, 300, 800, 500], &[0, 1, 2, 3]);
        let parts: Vec<_> =
            rings.iter().map(|r| (r.members.len(), r.outsiders.clone(), r.weight)).collect();
        assert_eq!(parts, [(4, vec![], 300), (3, vec![1], 200), (2, vec![1, 3], 300)]);
        assert_eq!(
            sub_rings(&[800, 700, 800], &[0, 1, 2]).len(),
            1,
            "an eighth lost: the plain ring"
        );
        assert_eq!(
            super::sub_rings(&[800, 700, 800], &[0, 1, 2], Division::Always)[1].outsiders,
            [1],
            "divided all the same"
        );
        assert_eq!(sub_rings(&[800, 400, 800], &[0, 1, 2])[1].outsiders, [1]);
        assert_eq!(sub_rings(&[0, 0], &[0, 1]).len(), 1, "whoever cannot send is named elsewhere");
    }
}
