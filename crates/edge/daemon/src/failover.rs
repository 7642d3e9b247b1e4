//! Fast failover: when BFD says that a neighbour is gone, routes over it are overruled at once,
//! before BGP has worked it out.
//!
//! FRR's routes are not touched. A table of ours ([`TABLE`]), which a rule lets the kernel look at
//! first, gets a route for each of FRR's that leads over the dead link: over the links that are
//! left, or over those marked `backup` whose neighbour has told bgpd of a way of its own. Where
//! there is neither, the route stays as it is. BGP confirms it a little later: when none of FRR's
//! routes leads over the link any more, when BFD says that the neighbour is back, or after
//! [`LONGEST_US`], the table is emptied.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use crate::config::{Config, Uplink};
use crate::error::Result;
use crate::frr::Frr;
use crate::netlink::Kernel;
use crate::routes::{error, Hop, Hops, RouteSet, Routes, Tables, FRR, OURS};

/// The number of our table, and the priority of the rule ([`crate::policy`]).
pub const TABLE: u32 = 4100;
const ROUTES: RouteSet = RouteSet { table: TABLE, protocol: OURS, metric: None };
/// BGP's own timers would have noticed a dead neighbour by then.
const LONGEST_US: u64 = 15_000_000;
const CONFIRM_US: u64 = 100_000;
/// After an error, which may last.
const RETRY_US: u64 = 250_000;
/// How long bgpd may think about what a neighbour has told it. After that it has worked out the
/// routes itself.
const ANSWER: Duration = Duration::from_millis(30);

/// The dead links, and since when.
pub struct Failover<K = Kernel> {
    uplinks: Vec<Uplink>,
    frr: Frr,
    kernel: K,
    dead: BTreeMap<String, u64>,
    /// The table is not what the dead links want it to be: making it so has failed.
    stale: bool,
    next_look_us: u64,
}

impl Failover {
    /// Empties what a daemon that died has left in the table.
    pub fn open(config: &Config, frr: Frr) -> Result<Failover> {
        let mut kernel = Kernel::open().map_err(error)?;
        kernel.make_routes(&ROUTES, &Routes::new()).map_err(error)?;
        Ok(Failover {
            uplinks: config.uplinks.clone(),
            frr,
            kernel,
            dead: BTreeMap::new(),
            stale: false,
            next_look_us: u64::MAX,
        })
    }
}

impl<K: Tables> Failover<K> {
    /// The next time that [`Failover::look`] has something to do.
    pub fn deadline_us(&self) -> u64 {
        self.next_look_us
    }

    /// A neighbour's state has changed; gives how many routes were overruled.
    pub fn bfd(&mut self, now_us: u64, peer: Ipv4Addr, state: &str) -> Result<usize> {
        let Some(uplink) = self.uplinks.iter().find(|u| u.peer == peer) else { return Ok(0) };
        let device = uplink.device.clone();
        if state == "up" {
            if self.dead.remove(&device).is_some() {
                return self.overrule(now_us);
            }
            return Ok(0);
        }
        if state != "down" || self.dead.contains_key(&device) {
            return Ok(0);
        }
        self.dead.insert(device, now_us);
        self.next_look_us = now_us + CONFIRM_US;
        self.overrule(now_us)
    }

    /// Routes have changed, perhaps ours: while a link is dead the next look makes the table again.
    pub fn changed(&mut self) {
        self.stale |= !self.dead.is_empty();
    }

    /// Looks whether BGP has confirmed. After an error it looks again a little later.
    pub fn look(&mut self, now_us: u64) -> Result<()> {
        if now_us < self.next_look_us {
            return Ok(());
        }
        self.next_look_us = now_us + RETRY_US;
        let routes = self.kernel.routes(&FRR).map_err(error)?;
        let used: BTreeSet<&str> = routes.values().flatten().map(|h| h.device.as_str()).collect();
        let before = self.dead.len();
        self.dead
            .retain(|device, since| used.contains(device.as_str()) && now_us < *since + LONGEST_US);
        if self.stale || self.dead.len() != before {
            self.overrule(now_us)?;
        }
        self.next_look_us = if self.dead.is_empty() { u64::MAX } else { now_us + CONFIRM_US };
        Ok(())
    }

    /// Makes the table what the dead links want it to be, or has [`Failover::look`] try again.
    fn overrule(&mut self, now_us: u64) -> Result<usize> {
        let done = self.make_table();
        self.stale = done.is_err();
        if self.stale {
            self.next_look_us = now_us + RETRY_US;
        }
        done
    }

    fn make_table(&mut self) -> Result<usize> {
        let dead: BTreeSet<&str> = self.dead.keys().map(String::as_str).collect();
        let mut left = match dead.is_empty() {
            true => Routes::new(),
            false => left(&self.kernel.routes(&FRR).map_err(error)?, &dead),
        };
        if left.values().any(Hops::is_empty) {
            let backups =
                self.uplinks.iter().filter(|u| u.backup && !dead.contains(u.device.as_str()));
            for backup in backups {
                // Without an answer nothing is overruled, and bgpd's own work is waited for.
                let told = self.frr.told_by(backup.peer, ANSWER).unwrap_or_default();
                let hop = Hop { gateway: backup.peer, device: backup.device.clone() };
                offer(&mut left, &hop, &told);
            }
        }
        left.retain(|_, hops| !hops.is_empty());
        self.kernel.make_routes(&ROUTES, &left).map_err(error)?;
        Ok(left.len())
    }
}

/// Takes our routes out of the table.
pub fn close() -> Result<()> {
    let mut kernel = Kernel::open().map_err(error)?;
    kernel.make_routes(&ROUTES, &Routes::new()).map_err(error)
}

/// Of the routes that lead over dead links, the ways that do not.
fn left(routes: &Routes, dead: &BTreeSet<&str>) -> Routes {
    let alive = |hops: &Hops| {
        hops.iter().filter(|h| !dead.contains(h.device.as_str())).cloned().collect::<Hops>()
    };
    let all = routes.iter().map(|(to, hops)| (to, hops, alive(hops)));
    all.filter(|(_, hops, left)| left.len() < hops.len())
        .map(|(to, _, left)| (to.clone(), left))
        .collect()
}

/// A backup link is a way to where its neighbour has one, if there is no other. A neighbour that
/// has lost its own would send it back.
fn offer(left: &mut Routes, backup: &Hop, told: &BTreeSet<String>) {
    for (_, hops) in left.iter_mut().filter(|(to, hops)| hops.is_empty() && told.contains(*to)) {
        hops.insert(backup.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::Played;

    fn uplink(device: &str, n: u8) -> Uplink {
        Uplink {
            device: device.into(),
            address: format!("10.{n}.1.1/31").parse().unwrap(),
            peer: [10, n, 1, 0].into(),
            peer_asn: 65_100,
            peer_loopback: [10, 255, 1, n].into(),
            backup: false,
            line: 0,
        }
    }

    fn hop(device: &str, n: u8) -> Hop {
        Hop { gateway: [10, n, 1, 0].into(), device: device.into() }
    }

    fn failover() -> Failover<Played> {
        let both: Hops = [hop("p1", 1), hop("p2", 2)].into();
        Failover {
            uplinks: vec![uplink("p1", 1), uplink("p2", 2)],
            frr: Frr::new(std::path::Path::new("/nonexistent")),
            kernel: Played { frr: [("10.255.0.2".to_owned(), both)].into(), ..Played::default() },
            dead: BTreeMap::new(),
            stale: false,
            next_look_us: u64::MAX,
        }
    }

    /// What the daemon does until `until_us`; gives how often it looked.
    fn turns(failover: &mut Failover<Played>, until_us: u64) -> usize {
        let mut looks = 0;
        while failover.deadline_us() < until_us && looks < 1000 {
            let now_us = failover.deadline_us();
            // The daemon writes an error down, and goes on.
            let _ = failover.look(now_us);
            looks += 1;
        }
        looks
    }

    #[test]
    fn an_error_is_no_reason_to_look_at_every_turn() {
        let mut failover = failover();
        failover.bfd(0, [10, 1, 1, 0].into(), "down").unwrap();
        failover.kernel.failures = u32::MAX;
        assert!((3..20).contains(&turns(&mut failover, 2_000_000)));
    }

    #[test]
    fn what_could_not_be_overruled_is_tried_again_and_what_no_longer_is_taken_back() {
        let mut failover = failover();
        failover.kernel.failures = 1;
        assert!(failover.bfd(0, [10, 1, 1, 0].into(), "down").is_err());
        turns(&mut failover, 1_000_000);
        assert_eq!(failover.kernel.made["10.255.0.2"], [hop("p2", 2)].into());
        failover.kernel.failures = 1;
        assert!(failover.bfd(1_000_000, [10, 1, 1, 0].into(), "up").is_err());
        turns(&mut failover, 2_000_000);
        assert_eq!((failover.kernel.made, failover.next_look_us), (Routes::new(), u64::MAX));
    }

    #[test]
    fn routes_over_a_dead_link_go_over_what_is_left() {
        let p1 = Hop { gateway: [10, 1, 1, 0].into(), device: "p1".into() };
        let p2 = Hop { gateway: [10, 2, 1, 0].into(), device: "p2".into() };
        let routes: Routes = [
            ("10.255.0.2".to_owned(), [p1.clone(), p2.clone()].into()),
            ("10.255.1.1".to_owned(), [p1].into()),
            ("10.255.1.2".to_owned(), [p2.clone()].into()),
        ]
        .into();
        let mut left = left(&routes, &["p1"].into());
        let expected: Routes = [
            ("10.255.0.2".to_owned(), [p2.clone()].into()),
            ("10.255.1.1".to_owned(), Hops::new()),
        ]
        .into();
        assert_eq!(left, expected);
        offer(&mut left, &p2, &["10.255.1.2".to_owned()].into());
        assert_eq!(left, expected);
        let backup = Hop { gateway: [10, 3, 0, 1].into(), device: "isl".into() };
        offer(&mut left, &backup, &["10.255.0.2".to_owned(), "10.255.1.1".to_owned()].into());
        assert_eq!(left["10.255.0.2"], [p2].into());
        assert_eq!(left["10.255.1.1"], [backup].into());
        assert!(super::left(&routes, &["p1", "p2"].into()).values().all(Hops::is_empty));
    }
}
