//! Fast failover: when BFD says that a neighbour is gone, routes over it are overruled at once, before BGP has worked it out.
//!
//! FRR's routes are not touched. A table of ours ([`TABLE`]), which a rule lets the kernel look at first, gets a route for each of FRR's
//! that leads over the dead link: over the links that are left, or over those marked `backup` whose neighbour has told bgpd of a way of its
//! own. Where there is neither, the route stays as it is. BGP confirms it a little later: when none of FRR's routes leads over the link any
//! more, when BFD says that the neighbour is back, or after [`LONGEST_US`], the table is emptied.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use crate::command::run;
use crate::config::{Config, Uplink};
use crate::frr::Frr;
use crate::netlink::Kernel;
use crate::routes::{error, Hop, Hops, RouteSet, Routes, FRR, OURS};

/// The number of our table, and the priority of the rule.
pub const TABLE: u32 = 4100;
const ROUTES: RouteSet = RouteSet { table: TABLE, protocol: OURS, metric: None };
/// BGP's own timers would have noticed a dead neighbour by then.
const LONGEST_US: u64 = 15_000_000;
const CONFIRM_US: u64 = 100_000;
/// How long bgpd may think about what a neighbour has told it. After that it has worked out the routes itself.
const ANSWER: Duration = Duration::from_millis(30);

/// The dead links, and since when.
pub struct Failover {
    uplinks: Vec<Uplink>,
    frr: Frr,
    kernel: Kernel,
    dead: BTreeMap<String, u64>,
    next_look_us: u64,
}

impl Failover {
    /// Makes the rule.
    pub fn open(config: &Config, frr: Frr) -> Result<Failover, String> {
        close();
        run(&["ip", "rule", "add", "pref", &TABLE.to_string(), "lookup", &TABLE.to_string()])?;
        let kernel = Kernel::open().map_err(error)?;
        Ok(Failover { uplinks: config.uplinks.clone(), frr, kernel, dead: BTreeMap::new(), next_look_us: u64::MAX })
    }

    /// The next time that [`Failover::look`] has something to do.
    pub fn deadline_us(&self) -> u64 {
        self.next_look_us
    }

    /// A neighbour's state has changed; gives how many routes were overruled.
    pub fn bfd(&mut self, now_us: u64, peer: Ipv4Addr, state: &str) -> Result<usize, String> {
        let Some(uplink) = self.uplinks.iter().find(|u| u.peer == peer) else { return Ok(0) };
        let device = uplink.device.clone();
        if state == "up" {
            if self.dead.remove(&device).is_some() {
                return self.overrule();
            }
            return Ok(0);
        }
        if state != "down" || self.dead.contains_key(&device) {
            return Ok(0);
        }
        self.dead.insert(device, now_us);
        self.next_look_us = now_us + CONFIRM_US;
        self.overrule()
    }

    /// Looks whether BGP has confirmed.
    pub fn look(&mut self, now_us: u64) -> Result<(), String> {
        if now_us < self.next_look_us {
            return Ok(());
        }
        let routes = self.kernel.routes(&FRR).map_err(error)?;
        let used: BTreeSet<&str> = routes.values().flatten().map(|h| h.device.as_str()).collect();
        let before = self.dead.len();
        self.dead.retain(|device, since| used.contains(device.as_str()) && now_us < *since + LONGEST_US);
        if self.dead.len() != before {
            self.overrule()?;
        }
        self.next_look_us = if self.dead.is_empty() { u64::MAX } else { now_us + CONFIRM_US };
        Ok(())
    }

    /// Makes the table what the dead links want it to be.
    fn overrule(&mut self) -> Result<usize, String> {
        let dead: BTreeSet<&str> = self.dead.keys().map(String::as_str).collect();
        let mut left = match dead.is_empty() {
            true => Routes::new(),
            false => left(&self.kernel.routes(&FRR).map_err(error)?, &dead),
        };
        if left.values().any(Hops::is_empty) {
            let backups = self.uplinks.iter().filter(|u| u.backup && !dead.contains(u.device.as_str()));
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

/// Takes the rule and the table away.
pub fn close() {
    let _ = run(&["ip", "rule", "del", "pref", &TABLE.to_string(), "lookup", &TABLE.to_string()]);
    let _ = run(&["ip", "route", "flush", "table", &TABLE.to_string()]);
}

/// Of the routes that lead over dead links, the ways that do not.
fn left(routes: &Routes, dead: &BTreeSet<&str>) -> Routes {
    let alive = |hops: &Hops| hops.iter().filter(|h| !dead.contains(h.device.as_str())).cloned().collect::<Hops>();
    let all = routes.iter().map(|(to, hops)| (to, hops, alive(hops)));
    all.filter(|(_, hops, left)| left.len() < hops.len()).map(|(to, _, left)| (to.clone(), left)).collect()
}

/// A backup link is a way to where its neighbour has one, if there is no other. A neighbour that has lost its own would send it back.
fn offer(left: &mut Routes, backup: &Hop, told: &BTreeSet<String>) {
    for (_, hops) in left.iter_mut().filter(|(to, hops)| hops.is_empty() && told.contains(*to)) {
        hops.insert(backup.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let expected: Routes =
            [("10.255.0.2".to_owned(), [p2.clone()].into()), ("10.255.1.1".to_owned(), Hops::new())].into();
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
