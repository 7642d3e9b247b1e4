//! How often NICs, cables and switches fail, and failures at random.
//!
//! Each part fails after a random time, exponentially distributed, and is repaired after a fixed
//! one. What is published: of 16,384 GPUs, each with a NIC, 7 NICs and 35 cables or switches failed
//! within 54 days (A. Grattafiori et al., *The Llama 3 Herd of Models*, 2024, table 5). That is a
//! NIC in 3,033,000 hours, and a cable or switch in 606,700 for each NIC; together one in 505,600.
//! Cables and switches are not told apart there. Here all 35 are cables, since far more than 16,384
//! of these but few switches were there: an assumption. So is the day that a repair takes.

use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, Loss};
use crate::failures::Event;
use crate::random::Random;
use crate::Error;

/// The most events that a simulated time may have.
const MOST_EVENTS: usize = 1_000_000;

/// 16,384 NICs for 54 days.
const WATCHED_S: f64 = 16_384.0 * 54.0 * 86_400.0;

/// How often NICs fail, whatever the reason is, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Mean time between failures of one NIC, in seconds.
    pub mtbf_s: f64,
    /// How long a repair takes.
    pub repair_s: f64,
    /// How long all is watched.
    pub horizon_s: f64,
}

impl Default for Rates {
    /// 505,600 hours (see the head of this file), a day, thirty days.
    fn default() -> Rates {
        Rates { mtbf_s: WATCHED_S / 42.0, repair_s: 86_400.0, horizon_s: 30.0 * 86_400.0 }
    }
}

/// How often parts fail, each kind by itself, and for how long. Infinite: never.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PartRates {
    /// Mean time between failures of one NIC, with all its ports, in seconds.
    pub nic_mtbf_s: f64,
    /// Of one cable, from a port to its leaf.
    pub cable_mtbf_s: f64,
    /// Of one leaf, which all hosts of a pod have a port of one NIC on.
    pub switch_mtbf_s: f64,
    /// How long a repair takes.
    pub repair_s: f64,
    /// How long all is watched.
    pub horizon_s: f64,
}

impl Default for PartRates {
    /// As published (see the head of this file); a day, thirty days.
    fn default() -> PartRates {
        let Rates { repair_s, horizon_s, .. } = Rates::default();
        PartRates {
            nic_mtbf_s: WATCHED_S / 7.0,
            cable_mtbf_s: WATCHED_S / 35.0,
            switch_mtbf_s: f64::INFINITY,
            repair_s,
            horizon_s,
        }
    }
}

impl From<Rates> for PartRates {
    fn from(Rates { mtbf_s, repair_s, horizon_s }: Rates) -> PartRates {
        let never = f64::INFINITY;
        let (cable_mtbf_s, switch_mtbf_s) = (never, never);
        PartRates { nic_mtbf_s: mtbf_s, cable_mtbf_s, switch_mtbf_s, repair_s, horizon_s }
    }
}

/// Failures and repairs of a cluster's NICs, in order: those of run `number` of a seed.
pub fn events(
    cluster: &Cluster,
    rates: &Rates,
    seed: u64,
    number: u64,
) -> Result<Vec<Event>, Error> {
    events_of_parts(cluster, &PartRates::from(*rates), seed, number)
}

/// Failures and repairs of a cluster's NICs, cables and leaves, in order, as NICs and ports that
/// are lost: those of run `number` of a seed.
pub fn events_of_parts(
    cluster: &Cluster,
    rates: &PartRates,
    seed: u64,
    number: u64,
) -> Result<Vec<Event>, Error> {
    cluster.check()?;
    let nics = cluster.hosts * cluster.nics;
    let pods = cluster.pods();
    check(rates, nics as f64, cluster)?;
    let mut random = Random::part(seed, number);
    let mut all = Vec::new();
    let loss = |nic: usize, port| Loss {
        host: nic / cluster.nics,
        nic: nic % cluster.nics,
        port,
        left: None,
    };
    for nic in 0..nics {
        fails(&mut random, rates.nic_mtbf_s, rates, |at_s, repaired| {
            all.push(Event { at_s, loss: loss(nic, None), repaired });
        });
    }
    for cable in 0..nics * cluster.planes {
        let loss = loss(cable / cluster.planes, port(cluster, cable % cluster.planes));
        fails(&mut random, rates.cable_mtbf_s, rates, |at_s, repaired| {
            all.push(Event { at_s, loss, repaired });
        });
    }
    for leaf in 0..pods * cluster.nics * cluster.planes {
        let (rail, plane) = (leaf / cluster.planes, leaf % cluster.planes);
        let (pod, nic) = (rail / cluster.nics, rail % cluster.nics);
        let first = pod * cluster.hosts_of_pod();
        let last = (first + cluster.hosts_of_pod()).min(cluster.hosts);
        fails(&mut random, rates.switch_mtbf_s, rates, |at_s, repaired| {
            all.extend((first..last).map(|host| {
                let loss = Loss { host, nic, port: port(cluster, plane), left: None };
                Event { at_s, loss, repaired }
            }));
        });
    }
    all.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    Ok(all)
}

/// A port, where NICs have several.
fn port(cluster: &Cluster, number: usize) -> Option<usize> {
    (cluster.planes > 1).then_some(number)
}

fn check(rates: &PartRates, nics: f64, cluster: &Cluster) -> Result<(), Error> {
    let PartRates { nic_mtbf_s, cable_mtbf_s, switch_mtbf_s, repair_s, horizon_s } = *rates;
    let cables = nics * cluster.planes as f64;
    let of = |argument, what, given: f64| match given > 0.0 {
        true => Ok(()),
        false => Err(Error::value(argument, what, given, "seconds above 0 are right")),
    };
    of("nic-mtbf", "mean time between failures of a NIC", nic_mtbf_s)?;
    of("cable-mtbf", "mean time between failures of a cable", cable_mtbf_s)?;
    of("switch-mtbf", "mean time between failures of a switch", switch_mtbf_s)?;
    of("repair", "the time of a repair", repair_s)?;
    of("for", "the time that is watched", horizon_s)?;
    // a switch takes as many NICs along as it has cables
    let each = 1.0 / nic_mtbf_s * nics + cables / cable_mtbf_s + cables / switch_mtbf_s;
    let expected = each * horizon_s;
    match expected < MOST_EVENTS as f64 / 2.0 {
        true => Ok(()),
        false => {
            let right = format!("fewer than {} are right", MOST_EVENTS / 2);
            let given = format!("{expected:.0}");
            Err(Error::value("nic-mtbf", "the number of failures", given, right))
        }
    }
}

/// When one part fails and is repaired, while it is watched.
fn fails(random: &mut Random, mtbf_s: f64, rates: &PartRates, mut tell: impl FnMut(f64, bool)) {
    if !mtbf_s.is_finite() {
        return;
    }
    let mut at_s = 0.0;
    loop {
        at_s -= (1.0 - random.unit()).ln() * mtbf_s;
        if at_s >= rates.horizon_s {
            return;
        }
        tell(at_s, false);
        at_s += rates.repair_s;
        if at_s >= rates.horizon_s {
            return;
        }
        tell(at_s, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: PartRates = PartRates {
        nic_mtbf_s: f64::INFINITY,
        cable_mtbf_s: f64::INFINITY,
        switch_mtbf_s: f64::INFINITY,
        repair_s: 60.0,
        horizon_s: 36_000.0,
    };

    fn failures(events: &[Event]) -> f64 {
        events.iter().filter(|e| !e.repaired).count() as f64
    }

    #[test]
    fn failures_come_at_their_rate() {
        let cluster = Cluster { hosts: 64, ..Cluster::default() };
        let rates = Rates { mtbf_s: 3600.0, repair_s: 60.0, horizon_s: 36_000.0 };
        let found = failures(&events(&cluster, &rates, 1, 0).unwrap());
        // up for an hour, down for a minute, 512 of them for ten hours
        let expected = 512.0 * 36_000.0 / 3660.0;
        assert!((found / expected - 1.0).abs() < 0.05, "{found} for {expected}");
        let impossible = Rates { mtbf_s: 0.0, ..rates };
        let says = events(&cluster, &impossible, 1, 0).unwrap_err().to_string();
        assert_eq!(says, "mean time between failures of a NIC is 0; seconds above 0 are right");
        let many = Rates { horizon_s: 1e9, ..rates };
        assert!(events(&cluster, &many, 1, 0).unwrap_err().to_string().contains("fewer than"));
    }

    /// What is published, by hand: 16,384 · 54 · 24 / 7 hours.
    #[test]
    fn rates_are_those_that_are_published() {
        let hours = |seconds: f64| (seconds / 3600.0).round();
        let parts = PartRates::default();
        assert_eq!((hours(parts.nic_mtbf_s), hours(parts.cable_mtbf_s)), (3_033_381.0, 606_676.0));
        assert_eq!(hours(Rates::default().mtbf_s), 505_563.0);
        let both = 1.0 / parts.nic_mtbf_s + 1.0 / parts.cable_mtbf_s;
        assert!((both * Rates::default().mtbf_s - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_cable_takes_a_port_along_and_a_switch_those_of_its_pod() {
        let cluster = Cluster { hosts: 12, planes: 2, pod_hosts: 8, ..Cluster::default() };
        let of = |rates| events_of_parts(&cluster, &rates, 3, 0).unwrap();
        let cables = of(PartRates { cable_mtbf_s: 3600.0, ..NEVER });
        // 12 hosts of 8 NICs of two ports, up for an hour, down for a minute
        let expected = 192.0 * 36_000.0 / 3660.0;
        assert!((failures(&cables) / expected - 1.0).abs() < 0.1, "{}", failures(&cables));
        assert!(cables.iter().all(|e| e.loss.port.is_some()));
        let switches = of(PartRates { switch_mtbf_s: 36_000.0, ..NEVER });
        let mut pods = std::collections::BTreeSet::new();
        for moment in crate::failures::moments(&switches) {
            let first = moment[0];
            let pod = first.loss.host / 8;
            pods.insert(pod);
            // the second pod has four hosts
            assert_eq!(moment.len(), [8, 4][pod]);
            for (place, event) in moment.iter().enumerate() {
                let loss = Loss { host: pod * 8 + place, ..first.loss };
                assert_eq!(*event, Event { loss, ..first });
            }
        }
        assert_eq!(pods.len(), 2, "{}", switches.len());
        assert_eq!(of(NEVER), []);
        let one = Cluster { planes: 1, ..cluster };
        let rates = PartRates { cable_mtbf_s: 3600.0, ..NEVER };
        let cables = events_of_parts(&one, &rates, 3, 0).unwrap();
        assert!(cables.iter().all(|e| e.loss.port.is_none()) && !cables.is_empty());
    }
}
