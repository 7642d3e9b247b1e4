//! The last way: a destination of which FRR has withdrawn every route keeps the way that it had
//! last.
//!
//! BFD and BGP take a link for dead when they have not heard of the neighbour in time, and a busy
//! machine alone can make them do so. While there is another way nothing is lost by believing it;
//! where there is none, nothing is gained: packets are no more lost on a dead link than for want of
//! a route, and if the link was alive they arrive. So:
//!
//! - Each destination of FRR's has a second route in the main table, behind FRR's ([`BEHIND`]). It
//!   follows FRR's while there is one, and stays when FRR has withdrawn it. Of several ways it has
//!   those that live, or else the one that died last: the others were dead while that one still
//!   carried everything. zebra sees it too (as the worst route of all), so EVPN's forwarding
//!   entries stay valid.
//! - Two switches may each have taken their own link to a host for dead, and send its packets to
//!   each other. What a switch gets over a `backup` link for a host of its own therefore goes to
//!   the host and never back ([`TABLE`]): the sender had no better way.
//! - A destination that FRR has had no route to for [`FORGET_US`] is forgotten.
//!
//! When the daemon dies the routes stay; the next one takes them over.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use crate::config::{Config, Uplink};
use crate::error::Result;
use crate::netlink::Kernel;
use crate::routes::{error, Hops, RouteSet, Routes, Tables, FRR, MAIN, OURS};

/// Those behind FRR's. zebra takes the first byte of a metric for a distance: 253 of at most 255,
/// behind all of its own.
pub(crate) const BEHIND: RouteSet =
    RouteSet { table: MAIN, protocol: OURS, metric: Some(253 << 24) };
/// Those of hosts of a switch's own.
const OWN: RouteSet = RouteSet { table: TABLE, protocol: OURS, metric: None };
/// What came over a backup link looks here first, before the table of [`crate::failover`].
pub const TABLE: u32 = 4101;
/// Of the rules that lead there ([`crate::policy`]).
pub const PRIORITY: u32 = 4099;
/// BGP needs seconds to meet a neighbour again. A host that was taken away is remembered for longer
/// than need be, which harms nobody.
const FORGET_US: u64 = 300_000_000;
/// Changes come in bursts.
const SETTLE_US: u64 = 20_000;
/// After an error, which may last.
const RETRY_US: u64 = 250_000;

/// Which ways destinations had last.
pub struct LastWays<K = Kernel> {
    uplinks: Vec<Uplink>,
    kernel: K,
    ranks: Ranks,
    /// Over any link.
    all: Memory,
    /// Not over backup links.
    own: Memory,
    next_look_us: u64,
}

impl LastWays {
    /// Takes over the routes of a daemon that died.
    pub fn open(config: &Config, now_us: u64) -> Result<LastWays> {
        let uplinks = config.uplinks.clone();
        let mut last = LastWays {
            uplinks,
            kernel: Kernel::open().map_err(error)?,
            ranks: Ranks::default(),
            all: Memory::default(),
            own: Memory::default(),
            next_look_us: now_us,
        };
        last.all.learn(now_us, &last.kernel.routes(&BEHIND).map_err(error)?);
        last.own.learn(now_us, &last.kernel.routes(&OWN).map_err(error)?);
        Ok(last)
    }
}

impl<K: Tables> LastWays<K> {
    /// The next time that [`LastWays::look`] has something to do.
    pub fn deadline_us(&self) -> u64 {
        self.next_look_us
    }

    /// A neighbour's state has changed.
    pub fn bfd(&mut self, now_us: u64, peer: Ipv4Addr, state: &str) {
        let Some(uplink) = self.uplinks.iter().find(|u| u.peer == peer) else { return };
        match state {
            "up" => self.ranks.lives(&uplink.device),
            "down" => self.ranks.died(&uplink.device),
            _ => {}
        }
        self.changed(now_us);
    }

    /// bfdd says nothing more: what it said last may be wrong by now.
    pub fn bfd_is_lost(&mut self) {
        self.ranks = Ranks::default();
    }

    /// Routes or devices have changed.
    pub fn changed(&mut self, now_us: u64) {
        self.next_look_us = self.next_look_us.min(now_us + SETTLE_US);
    }

    /// Follows FRR. Gives how many destinations have their last way only. After an error it looks
    /// again a little later.
    pub fn look(&mut self, now_us: u64) -> Result<Option<usize>> {
        if now_us < self.next_look_us {
            return Ok(None);
        }
        self.next_look_us = now_us + RETRY_US;
        let frr = self.kernel.routes(&FRR).map_err(error)?;
        self.all.learn(now_us, &frr);
        self.own.learn(now_us, &not_over(&frr, &self.backups()));
        self.kernel.make_routes(&BEHIND, &self.all.wanted(&self.ranks)).map_err(error)?;
        let own =
            if self.backups().is_empty() { Routes::new() } else { self.own.wanted(&self.ranks) };
        self.kernel.make_routes(&OWN, &own).map_err(error)?;
        let forget = [self.all.forgets_us(), self.own.forgets_us()].into_iter().flatten().min();
        self.next_look_us = forget.unwrap_or(u64::MAX);
        Ok(Some(self.all.missing()))
    }

    fn backups(&self) -> BTreeSet<&str> {
        self.uplinks.iter().filter(|u| u.backup).map(|u| u.device.as_str()).collect()
    }
}

/// Takes our routes away.
pub fn close() -> Result<()> {
    let mut kernel = Kernel::open().map_err(error)?;
    let none = Routes::new();
    kernel.make_routes(&BEHIND, &none).and(kernel.make_routes(&OWN, &none)).map_err(error)
}

/// The ways that do not lead over some links.
fn not_over(routes: &Routes, links: &BTreeSet<&str>) -> Routes {
    let left = |hops: &Hops| {
        hops.iter().filter(|h| !links.contains(h.device.as_str())).cloned().collect::<Hops>()
    };
    routes
        .iter()
        .map(|(to, hops)| (to.clone(), left(hops)))
        .filter(|(_, hops)| !hops.is_empty())
        .collect()
}

/// Which links have died, in which order.
#[derive(Default)]
struct Ranks {
    dead: BTreeMap<String, u64>,
    deaths: u64,
}

impl Ranks {
    fn lives(&mut self, device: &str) {
        self.dead.remove(device);
    }

    fn died(&mut self, device: &str) {
        self.deaths += 1;
        self.dead.entry(device.to_owned()).or_insert(self.deaths);
    }

    /// Of some ways those that live, or else those that died last.
    fn best(&self, hops: &Hops) -> Hops {
        let rank = |device: &str| self.dead.get(device).copied().unwrap_or(u64::MAX);
        let highest = hops.iter().map(|h| rank(&h.device)).max();
        hops.iter().filter(|h| Some(rank(&h.device)) == highest).cloned().collect()
    }
}

/// The last ways of destinations, and since when FRR has had none.
#[derive(Default)]
struct Memory(BTreeMap<String, (Hops, Option<u64>)>);

impl Memory {
    fn learn(&mut self, now_us: u64, routes: &Routes) {
        for (to, hops) in routes {
            self.0.insert(to.clone(), (hops.clone(), None));
        }
        self.0.retain(|to, (_, missing)| {
            routes.contains_key(to) || now_us < *missing.get_or_insert(now_us) + FORGET_US
        });
    }

    fn wanted(&self, ranks: &Ranks) -> Routes {
        self.0.iter().map(|(to, (hops, _))| (to.clone(), ranks.best(hops))).collect()
    }

    fn missing(&self) -> usize {
        self.0.values().filter(|(_, missing)| missing.is_some()).count()
    }

    /// When the next destination is forgotten.
    fn forgets_us(&self) -> Option<u64> {
        self.0.values().filter_map(|(_, missing)| *missing).min().map(|since| since + FORGET_US)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::{Hop, Played};

    #[test]
    fn after_an_error_it_looks_again() {
        let kernel = Played { frr: route(&["p1", "p2"]), failures: 1, ..Played::default() };
        let mut last = LastWays {
            uplinks: Vec::new(),
            kernel,
            ranks: Ranks::default(),
            all: Memory::default(),
            own: Memory::default(),
            next_look_us: 0,
        };
        assert!(last.look(0).is_err());
        let again_us = last.deadline_us();
        assert!(again_us > 0 && again_us < 1_000_000, "{again_us}");
        assert_eq!(last.look(again_us).unwrap(), Some(0));
        assert_eq!(last.deadline_us(), u64::MAX);
    }

    fn hops(devices: &[&str]) -> Hops {
        devices
            .iter()
            .map(|d| Hop { gateway: [10, 0, 0, 1].into(), device: (*d).to_owned() })
            .collect()
    }

    fn route(devices: &[&str]) -> Routes {
        [("10.255.0.2".to_owned(), hops(devices))].into()
    }

    #[test]
    fn the_way_that_was_left_stays() {
        let (mut memory, ranks) = (Memory::default(), Ranks::default());
        memory.learn(1, &route(&["p1", "p2"]));
        memory.learn(2, &route(&["p2"]));
        memory.learn(3, &Routes::new());
        assert_eq!((memory.wanted(&ranks), memory.missing()), (route(&["p2"]), 1));
        memory.learn(4, &route(&["p1"]));
        assert_eq!((memory.wanted(&ranks), memory.missing()), (route(&["p1"]), 0));
    }

    #[test]
    fn what_is_long_gone_is_forgotten() {
        let mut memory = Memory::default();
        memory.learn(1, &route(&["p1"]));
        memory.learn(5, &Routes::new());
        assert_eq!(memory.forgets_us(), Some(5 + FORGET_US));
        memory.learn(4 + FORGET_US, &Routes::new());
        assert_eq!(memory.missing(), 1);
        memory.learn(5 + FORGET_US, &Routes::new());
        assert_eq!((memory.wanted(&Ranks::default()), memory.forgets_us()), (Routes::new(), None));
    }

    /// The daemon may be late, and hear of both deaths before it sees what BGP made of the first.
    #[test]
    fn the_link_that_died_last_is_the_way() {
        let mut ranks = Ranks::default();
        let both = hops(&["p1", "p2"]);
        assert_eq!(ranks.best(&both), both);
        ranks.died("p2");
        assert_eq!(ranks.best(&both), hops(&["p1"]));
        ranks.died("p1");
        ranks.died("p2");
        assert_eq!(ranks.best(&both), hops(&["p1"]));
        ranks.lives("p2");
        assert_eq!(ranks.best(&both), hops(&["p2"]));
    }

    #[test]
    fn ways_over_some_links_are_left_out() {
        assert_eq!(not_over(&route(&["h1", "isl"]), &["isl"].into()), route(&["h1"]));
        assert_eq!(not_over(&route(&["isl"]), &["isl"].into()), Routes::new());
    }
}
