//! The input of planning, the same at all ranks: which NICs are down, and how fast the others are.
//!
//! Each rank reports its measurements ([`Report`]). Rank 0 combines them into a [`Picture`], on
//! which all ranks agree as part of a view. A path is as slow as the slower of its two NICs, and a
//! measurement does not show which NIC that is. So the rate of a NIC is the fastest rate observed
//! through it: what its host sends over all paths, or any path that ends there. With only two
//! hosts, both ends count as slow, which does not make plans worse. The same holds for a NIC that
//! is slow in one direction. With more hosts, it is identified if it sends slowly to hosts that
//! others reach fast.
//!
//! The ranks of a host share its NICs, and each measures its own share. The shares are added.
//!
//! Measurements vary, most of all when the CPU is the bottleneck. So a picture has the rate of a
//! healthy NIC, and the list of NICs that carry clearly less, in steps. Equal hosts then stay
//! equal, and the picture changes only when one of these values does. A NIC counts as slow after it
//! has been slow for some time ([`Confirmed`]), and as healthy again immediately. Each such
//! alternation doubles that time.

use unbroken_schedule::cost::Costs;
use unbroken_schedule::{Error, Health, Host, Place, Topology};

use crate::codec::{Reader, Writer};
use crate::Rank;

/// A NIC is healthy if it carries at least this percentage of a healthy NIC's rate.
const WELL_PERCENT: u32 = 75;
/// The rates of slow NICs are rounded to steps of this many percent.
const STEP_PERCENT: u32 = 5;
/// The factor by which the rate of healthy NICs, or the time of a message, must change to be
/// reported.
const NEWS_FACTOR: f64 = 1.5;

/// The measurements of a rank. A rate of 0 is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The rank.
    pub rank: Rank,
    /// The time of a message, in ns; 0 if unknown.
    pub alpha_ns: u32,
    /// The rate at which it sends over each rail, in Mbit/s.
    pub rails_mbps: Vec<u32>,
    /// The rates of paths: receiver, rail, Mbit/s.
    pub paths: Vec<(u32, u8, u32)>,
}

impl Report {
    pub(crate) fn encode(&self, w: &mut Writer) {
        w.rank(self.rank).u32(self.alpha_ns).u32(self.rails_mbps.len() as u32);
        self.rails_mbps.iter().for_each(|mbps| {
            w.u32(*mbps);
        });
        w.u32(self.paths.len() as u32);
        self.paths.iter().for_each(|(to, rail, mbps)| {
            w.u32(*to).u8(*rail).u32(*mbps);
        });
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<Report> {
        Some(Report {
            rank: r.rank()?,
            alpha_ns: r.u32()?,
            rails_mbps: r.list(Reader::u32)?,
            paths: r.list(|r| Some((r.u32()?, r.u8()?, r.u32()?)))?,
        })
    }

    /// Whether it differs from an earlier report so much that plans may change.
    pub(crate) fn is_news(&self, before: &Report) -> bool {
        let rates = |of: &Report| -> Vec<u32> {
            of.rails_mbps.iter().copied().chain(of.paths.iter().map(|path| path.2)).collect()
        };
        let (now, then) = (rates(self), rates(before));
        now.len() != then.len()
            || differs(self.alpha_ns, before.alpha_ns, NEWS_FACTOR)
            || now.iter().zip(&then).any(|(a, b)| differs(*a, *b, 1.1))
    }
}

/// Whether the rate of a NIC is clearly lower than that of the best one.
pub(crate) fn is_slow(mbps: u64, best_mbps: u64) -> bool {
    mbps * 100 < best_mbps * u64::from(WELL_PERCENT)
}

/// Whether two rates differ by more than a factor, or one of them is unknown.
fn differs(a: u32, b: u32, factor: f64) -> bool {
    let (least, most) = (f64::from(a.min(b)), f64::from(a.max(b)));
    most > least * factor
}

/// The NICs with which all ranks plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picture {
    /// For each host, a bit for each NIC that is down.
    pub down: Vec<u64>,
    /// The rate of a healthy NIC, in Mbit/s; 0 before the first measurement.
    pub mbps: u32,
    /// The time of a message, in ns; 0 before the first measurement.
    pub alpha_ns: u32,
    /// Slow NICs, in order: host, rail, and the percentage of a healthy NIC's rate.
    pub slow: Vec<(u32, u8, u8)>,
}

impl Picture {
    /// Creates a picture in which all NICs are healthy and nothing has been measured.
    pub fn new(hosts: usize) -> Picture {
        Picture { down: vec![0; hosts], ..Picture::default() }
    }

    /// Creates the picture from reports of ranks on `hosts`. Reports do not contain which NICs are
    /// down.
    pub fn of(hosts: &[u32], rails: u8, reports: &[Option<Report>]) -> Picture {
        let rates = NicRates::of(hosts, rails, reports);
        let best = rates.of_well_ones();
        let mut slow = Vec::new();
        for (host, of_host) in rates.0.iter().enumerate() {
            for (rail, mbps) in of_host.iter().enumerate() {
                let percent = (mbps * 100).checked_div(best).unwrap_or(0) as u32;
                if *mbps > 0 && percent < WELL_PERCENT {
                    let steps = (percent + STEP_PERCENT / 2) / STEP_PERCENT;
                    slow.push((host as u32, rail as u8, (steps.max(1) * STEP_PERCENT) as u8));
                }
            }
        }
        let mut alphas: Vec<u32> =
            reports.iter().flatten().map(|r| r.alpha_ns).filter(|ns| *ns > 0).collect();
        alphas.sort_unstable();
        let alpha_ns = alphas.get(alphas.len() / 2).copied().unwrap_or(0);
        let mbps = best.try_into().unwrap_or(u32::MAX);
        Picture { down: Vec::new(), mbps, alpha_ns, slow }
    }

    /// Whether the measurements differ so much from those of an earlier picture that plans may
    /// change.
    pub fn is_news(&self, before: &Picture) -> bool {
        // A NIC that goes from one step to the next and back is no news.
        let step = |a: &(u32, u8, u8), b: &(u32, u8, u8)| {
            (a.0, a.1) == (b.0, b.1) && a.2.abs_diff(b.2) <= STEP_PERCENT as u8
        };
        let same = self.slow.len() == before.slow.len()
            && self.slow.iter().zip(&before.slow).all(|(a, b)| step(a, b));
        !same
            || differs(self.mbps, before.mbps, NEWS_FACTOR)
            || differs(self.alpha_ns, before.alpha_ns, NEWS_FACTOR)
    }

    /// Applies the picture to a topology.
    pub fn of_topology(&self, topology: &Topology) -> Result<Topology, Error> {
        let mut hosts: Vec<Host> = topology.hosts().to_vec();
        for nic in hosts.iter_mut().flat_map(|host| &mut host.nics) {
            if self.mbps > 0 {
                nic.capacity_mbps = self.mbps;
            }
        }
        let nic = |host: usize, rail: usize| (host < hosts.len()).then_some((host, rail));
        let down = self.down.iter().enumerate().flat_map(|(host, rails)| {
            (0..64).filter(move |rail| rails >> rail & 1 == 1).map(move |rail| (host, rail))
        });
        let slow = self.slow.iter().map(|(host, rail, percent)| {
            ((*host as usize, usize::from(*rail)), Health::Slow(*percent))
        });
        let sick: Vec<_> = slow
            .chain(down.map(|at| (at, Health::Down)))
            .filter_map(|((host, rail), health)| Some((nic(host, rail)?, health)))
            .collect();
        for ((host, rail), health) in sick {
            if let Some(nic) = hosts[host].nics.get_mut(rail) {
                nic.health = health;
            }
        }
        let places: Vec<Place> = (0..topology.ranks()).map(|rank| topology.place(rank)).collect();
        Topology::new(hosts, places, topology.fabric())
    }

    /// The costs of messages.
    pub fn costs(&self) -> Costs {
        let usual = Costs::default();
        let nic_alpha_us = match self.alpha_ns {
            0 => usual.nic_alpha_us,
            ns => f64::from(ns) / 1e3,
        };
        Costs { nic_alpha_us, ..usual }
    }

    pub(crate) fn encode(&self, w: &mut Writer) {
        w.u32(self.down.len() as u32);
        self.down.iter().for_each(|rails| {
            w.u64(*rails);
        });
        w.u32(self.mbps).u32(self.alpha_ns).u32(self.slow.len() as u32);
        self.slow.iter().for_each(|(host, rail, percent)| {
            w.u32(*host).u8(*rail).u8(*percent);
        });
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<Picture> {
        Some(Picture {
            down: r.list(Reader::u64)?,
            mbps: r.u32()?,
            alpha_ns: r.u32()?,
            slow: r.list(|r| Some((r.u32()?, r.u8()?, r.u8()?)))?,
        })
    }
}

/// How long a NIC must have been slow before it counts as slow: initially, and at most. This time
/// doubles after each false alarm.
const FIRST_US: u64 = 1_000_000;
const MOST_US: u64 = 64_000_000;

/// The slow NICs that have been slow for long enough to plan for.
#[derive(Debug, Default)]
pub(crate) struct Confirmed(std::collections::BTreeMap<(u32, u8), Suspect>);

/// A NIC that is slow, or has been.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    since_us: Option<u64>,
    needs_us: u64,
    confirmed: bool,
}

impl Confirmed {
    /// Returns the picture, with only those slow NICs that have been slow for long enough.
    pub(crate) fn of(&mut self, now_us: u64, measured: &Picture) -> Picture {
        for (nic, suspect) in &mut self.0 {
            let slow = measured.slow.iter().any(|(host, rail, _)| (*host, *rail) == *nic);
            if !slow {
                suspect.since_us = None;
                if std::mem::take(&mut suspect.confirmed) {
                    suspect.needs_us = (2 * suspect.needs_us).min(MOST_US);
                }
            }
        }
        let mut confirmed = |(host, rail, _): &(u32, u8, u8)| {
            let first = Suspect { since_us: None, needs_us: FIRST_US, confirmed: false };
            let suspect = self.0.entry((*host, *rail)).or_insert(first);
            let since_us = *suspect.since_us.get_or_insert(now_us);
            suspect.confirmed |= now_us >= since_us + suspect.needs_us;
            suspect.confirmed
        };
        let slow = measured.slow.iter().filter(|nic| confirmed(nic)).copied().collect();
        Picture { slow, ..measured.clone() }
    }
}

/// The highest observed rate of each NIC, in Mbit/s, by host and rail; 0 if there is none.
struct NicRates(Vec<Vec<u64>>);

impl NicRates {
    fn of(hosts: &[u32], rails: u8, reports: &[Option<Report>]) -> NicRates {
        let count = hosts.iter().max().map_or(0, |host| *host as usize + 1);
        let none = || vec![vec![0u64; usize::from(rails)]; count];
        let mut sends = none();
        // Between two hosts over a rail, by the receiving one: what the ranks of one host send.
        let mut pairs = Pairs::new();
        for report in reports.iter().flatten().filter(|report| report.rank < hosts.len()) {
            let from = hosts[report.rank] as usize;
            for (rail, mbps) in report.rails_mbps.iter().take(rails.into()).enumerate() {
                sends[from][rail] += u64::from(*mbps);
            }
            // To several ranks of a host one after the other: the fastest counts.
            let mut fastest = std::collections::BTreeMap::new();
            for (to, rail, mbps) in &report.paths {
                let Some(to) = hosts.get(*to as usize).filter(|_| *rail < rails) else { continue };
                let of = fastest.entry((*to as usize, usize::from(*rail))).or_insert(0);
                *of = (*of).max(u64::from(*mbps));
            }
            for ((to, rail), mbps) in fastest {
                *pairs.entry((from, to, rail)).or_insert(0) += mbps;
            }
        }
        let mut rates = sends.clone();
        for ((from, to, rail), mbps) in &pairs {
            for host in [*from, *to] {
                rates[host][*rail] = rates[host][*rail].max(*mbps);
            }
        }
        NicRates(rates).with_one_way(&sends, &pairs)
    }
}

/// The rate from the first host to the second over a rail, in Mbit/s.
type Pairs = std::collections::BTreeMap<(usize, usize, usize), u64>;

impl NicRates {
    /// The rate of a healthy NIC: three quarters of all NICs are no faster. A few may have been
    /// measured while others were idle and left them more CPU time.
    fn of_well_ones(&self) -> u64 {
        let mut known: Vec<u64> = self.0.iter().flatten().copied().filter(|n| *n > 0).collect();
        known.sort_unstable();
        known.get((3 * known.len()).div_ceil(4).saturating_sub(1)).copied().unwrap_or(0)
    }

    /// The same, where NICs that are slow in one direction are as slow as that.
    fn with_one_way(mut self, sends: &[Vec<u64>], pairs: &Pairs) -> NicRates {
        let best = self.of_well_ones();
        let two = self.0.len() == 2;
        let rails = self.0.first().map_or(0, Vec::len);
        for (host, rail) in (0..sends.len()).flat_map(|h| (0..rails).map(move |r| (h, r))) {
            let mbps = sends[host][rail];
            let others_reach = |to: usize| {
                let reach = |(from, of, over): &(usize, usize, usize), mbps: u64| {
                    *from != host && (*of, *over) == (to, rail) && !is_slow(mbps, best)
                };
                pairs.iter().any(|(pair, mbps)| reach(pair, *mbps))
            };
            let mut to = pairs.keys().filter(|(from, _, over)| (*from, *over) == (host, rail));
            if mbps > 0 && is_slow(mbps, best) && (two || to.all(|(_, to, _)| others_reach(*to))) {
                self.0[host][rail] = mbps;
            }
        }
        if two {
            // Either end may be the one.
            for rail in 0..rails {
                let ends = [self.0[0][rail], self.0[1][rail]];
                let least = ends.into_iter().filter(|mbps| *mbps > 0).min().unwrap_or(0);
                self.0.iter_mut().for_each(|of_host| of_host[rail] = least);
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_schedule::{Fabric, Nic};

    fn report(rank: Rank, rails_mbps: &[u32], paths: &[(u32, u8, u32)]) -> Option<Report> {
        let (rails_mbps, paths) = (rails_mbps.to_vec(), paths.to_vec());
        Some(Report { rank, alpha_ns: 7_000, rails_mbps, paths })
    }

    /// A ring of three hosts, whose first has a slow NIC on rail 0: its neighbours' other paths
    /// acquit them.
    #[test]
    fn a_slow_nic_is_told_from_its_neighbours() {
        let reports = [
            report(0, &[25, 99], &[(1, 0, 25), (1, 1, 99)]),
            report(1, &[98, 100], &[(2, 0, 98), (2, 1, 100)]),
            report(2, &[26, 97], &[(0, 0, 26), (0, 1, 97)]),
        ];
        let picture = Picture::of(&[0, 1, 2], 2, &reports);
        assert_eq!((picture.mbps, picture.alpha_ns), (100, 7_000));
        assert_eq!(picture.slow, [(0, 0, 25)]);
    }

    /// It receives as fast as others.
    #[test]
    fn a_nic_that_sends_slowly_is_slow() {
        let reports = [
            report(0, &[25], &[(1, 0, 13), (2, 0, 12)]),
            report(1, &[98], &[(0, 0, 90), (2, 0, 90)]),
            report(2, &[97], &[(0, 0, 90), (1, 0, 90)]),
        ];
        let picture = Picture::of(&[0, 1, 2], 1, &reports);
        assert_eq!(picture.slow, [(0, 0, 25)]);
        let reports =
            [report(0, &[25, 100], &[(1, 0, 25)]), report(1, &[100, 100], &[(0, 0, 100)])];
        let picture = Picture::of(&[0, 1], 2, &reports);
        assert_eq!(picture.slow, [(0, 0, 25), (1, 0, 25)], "nobody else can tell");
    }

    #[test]
    fn ranks_of_a_host_share_its_nics() {
        let reports = [
            report(0, &[50], &[(2, 0, 50)]),
            report(1, &[50], &[(3, 0, 50)]),
            report(2, &[100], &[(0, 0, 100)]),
            None,
        ];
        let picture = Picture::of(&[0, 0, 1, 1], 1, &reports);
        assert_eq!((picture.mbps, picture.slow.len()), (100, 0));
    }

    #[test]
    fn what_wanders_is_no_news() {
        let one = Picture { mbps: 100, alpha_ns: 9_000, slow: vec![(0, 0, 25)], ..Picture::new(2) };
        let two = Picture { mbps: 120, alpha_ns: 7_000, slow: vec![(0, 0, 30)], ..one.clone() };
        assert!(!two.is_news(&one));
        for other in [
            Picture { mbps: 200, ..one.clone() },
            Picture { alpha_ns: 20_000, ..one.clone() },
            Picture { slow: vec![(0, 0, 40)], ..one.clone() },
            Picture { slow: vec![], ..one.clone() },
            Picture { slow: vec![(1, 0, 25)], ..one.clone() },
        ] {
            assert!(other.is_news(&one), "{other:?}");
        }
        assert!(one.is_news(&Picture::new(2)), "nothing was known");
    }

    #[test]
    fn a_nic_is_slow_when_it_has_been_so_for_a_while() {
        let well = Picture { mbps: 100, ..Picture::new(2) };
        let slow = Picture { slow: vec![(1, 0, 25)], ..well.clone() };
        let mut confirmed = Confirmed::default();
        let mut now_us = 0;
        for needs_us in [FIRST_US, 2 * FIRST_US, 4 * FIRST_US] {
            assert_eq!(confirmed.of(now_us, &slow), well);
            assert_eq!(confirmed.of(now_us + needs_us - 1, &slow), well, "{needs_us}");
            assert_eq!(confirmed.of(now_us + needs_us, &slow), slow);
            now_us += needs_us + 1;
            assert_eq!(confirmed.of(now_us, &well), well, "at once");
        }
        // One that has been well for a moment begins anew.
        confirmed.of(now_us, &slow);
        confirmed.of(now_us + 8 * FIRST_US - 1, &well);
        assert_eq!(confirmed.of(now_us + 8 * FIRST_US, &slow), well);
    }

    #[test]
    fn a_picture_is_a_topology() {
        let topology =
            Topology::uniform(2, 1, Host::new(2, Nic::new(100_000)), Fabric::RailOnly).unwrap();
        let picture = Picture {
            down: vec![0, 0b10, 1],
            mbps: 400,
            slow: vec![(0, 0, 25), (1, 1, 50), (9, 0, 5), (0, 9, 5)],
            ..Picture::new(2)
        };
        let now = picture.of_topology(&topology).unwrap();
        let free: Vec<Vec<u64>> =
            now.hosts().iter().map(|host| host.nics.iter().map(Nic::free_mbps).collect()).collect();
        assert_eq!(free, [[100, 400], [400, 0]], "what does not exist is left out");
        assert_eq!(Picture::new(2).of_topology(&topology).unwrap(), topology);
    }

    #[test]
    fn reports_of_what_does_not_exist_are_harmless() {
        let reports = [report(7, &[1, 2, 3], &[]), report(0, &[5; 9], &[(99, 0, 1), (1, 9, 1)])];
        let picture = Picture::of(&[0, 1], 2, &reports);
        assert_eq!((picture.mbps, picture.slow.len()), (5, 0));
    }
}
