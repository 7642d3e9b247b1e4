//! Routes, as the ways to destinations. The kernel's are read and made by
//! [`crate::netlink::Kernel`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use crate::error::EdgeError;

/// One way out: a neighbour at a link.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hop {
    /// The neighbour.
    pub gateway: Ipv4Addr,
    /// The link.
    pub device: String,
}

/// The ways of one route.
pub type Hops = BTreeSet<Hop>;

/// Routes by destination, as `ip` writes it: an address, or `address/length`, or `default`.
pub type Routes = BTreeMap<String, Hops>;

/// Which routes of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteSet {
    /// The number of their table.
    pub table: u32,
    /// Who has made them.
    pub protocol: u8,
    /// Of those that are made; none is the best.
    pub metric: Option<u32>,
}

/// The table that all look at.
pub const MAIN: u32 = 254;

/// What bgpd has made of it. zebra gives its routes a metric of its own.
pub const FRR: RouteSet = RouteSet { table: MAIN, protocol: 186, metric: None };

/// Whose our own are, in the kernel; no number of FRR's.
pub const OURS: u8 = 85;

/// A rule of ours (`ip rule`) that has the kernel look at one of our tables.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Policy {
    /// Lower numbers are looked at first.
    pub priority: u32,
    /// The table that it leads to.
    pub table: u32,
    /// Only for what comes in by this device.
    pub device: Option<String>,
}

/// What makes the routes that are there those that are wanted: for each destination its ways, or
/// none, and then it goes.
pub fn difference(wanted: &Routes, present: &Routes) -> Vec<(String, Option<Hops>)> {
    let changed = wanted.iter().filter(|(to, hops)| present.get(*to) != Some(*hops));
    let made = changed.map(|(to, hops)| (to.clone(), Some(hops.clone())));
    made.chain(present.keys().filter(|to| !wanted.contains_key(*to)).map(|to| (to.clone(), None)))
        .collect()
}

/// Says what an error was about.
pub fn error(error: std::io::Error) -> EdgeError {
    EdgeError::at("routes")(error)
}

/// Where routes are, for those who keep some: the kernel, or a test's stand-in.
pub(crate) trait Tables {
    /// Those of a set.
    fn routes(&mut self, set: &RouteSet) -> std::io::Result<Routes>;
    /// Makes a set what is wanted.
    fn make_routes(&mut self, set: &RouteSet, wanted: &Routes) -> std::io::Result<()>;
}

impl Tables for crate::netlink::Kernel {
    fn routes(&mut self, set: &RouteSet) -> std::io::Result<Routes> {
        crate::netlink::Kernel::routes(self, set)
    }

    fn make_routes(&mut self, set: &RouteSet, wanted: &Routes) -> std::io::Result<()> {
        crate::netlink::Kernel::make_routes(self, set, wanted)
    }
}

/// FRR's routes, what was made of them, and how many calls fail from now on.
#[cfg(test)]
#[derive(Default)]
pub(crate) struct Played {
    pub(crate) frr: Routes,
    pub(crate) made: Routes,
    pub(crate) failures: u32,
}

#[cfg(test)]
impl Played {
    fn fail(&mut self) -> std::io::Result<()> {
        match self.failures.checked_sub(1) {
            Some(left) => {
                self.failures = left;
                Err(std::io::Error::other("no memory"))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
impl Tables for Played {
    fn routes(&mut self, _: &RouteSet) -> std::io::Result<Routes> {
        self.fail()?;
        Ok(self.frr.clone())
    }

    fn make_routes(&mut self, _: &RouteSet, wanted: &Routes) -> std::io::Result<()> {
        self.fail()?;
        self.made = wanted.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_made() {
        let hops = |devices: &[&str]| -> Hops {
            devices
                .iter()
                .map(|d| Hop { gateway: [10, 0, 0, 1].into(), device: (*d).to_owned() })
                .collect()
        };
        let wanted: Routes =
            [("10.255.0.2".into(), hops(&["p1", "p2"])), ("10.255.0.4".into(), hops(&["p1"]))]
                .into();
        assert!(difference(&wanted, &wanted).is_empty());
        let present: Routes = [
            ("10.255.0.2".into(), hops(&["p1"])),
            ("10.255.0.3".into(), hops(&["p1"])),
            ("10.255.0.4".into(), hops(&["p1"])),
        ]
        .into();
        let expected =
            [("10.255.0.2".to_owned(), Some(hops(&["p1", "p2"]))), ("10.255.0.3".to_owned(), None)];
        assert_eq!(difference(&wanted, &present), expected);
    }
}
