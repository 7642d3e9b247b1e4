//! The kernel's routes, as `ip` tells and takes them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command::run;

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

/// Routes by destination, as `ip` writes it.
pub type Routes = BTreeMap<String, Hops>;

/// As `ip route` takes them.
pub struct Ways<'a>(pub &'a Hops);

impl Display for Ways<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|hop| write!(f, " nexthop via {} dev {}", hop.gateway, hop.device))
    }
}

/// The routes that a selection (`ip route show …`) has; of a table that does not exist, none.
pub fn show(selection: &[&str]) -> Result<Routes, String> {
    let text = match run(&[&["ip", "-j", "route", "show"], selection].concat()) {
        Err(error) if error.contains("table does not exist") => return Ok(Routes::new()),
        shown => shown?,
    };
    let routes: Vec<Value> = serde_json::from_str(&text).map_err(|e| format!("ip route: {e}"))?;
    Ok(parse(&routes))
}

/// What bgpd has made of the table that all look at.
pub fn of_frr() -> Result<Routes, String> {
    show(&["table", "main", "proto", "bgp"])
}

/// Routes from `ip -j route`; those without a gateway are left out.
pub fn parse(routes: &[Value]) -> Routes {
    let hop = |h: &Value| {
        let gateway = h["gateway"].as_str()?.parse().ok()?;
        Some(Hop { gateway, device: h["dev"].as_str()?.to_owned() })
    };
    let ways = |r: &Value| match r["nexthops"].as_array() {
        Some(all) => all.iter().filter_map(hop).collect(),
        None => hop(r).into_iter().collect::<Hops>(),
    };
    let all = routes.iter().filter_map(|r| Some((r["dst"].as_str()?.to_owned(), ways(r))));
    all.filter(|(_, hops)| !hops.is_empty()).collect()
}

/// Gives `ip` many commands. One that fails (a device has just gone) does not stop the others.
pub fn apply(batch: &str) -> Result<(), String> {
    if batch.is_empty() {
        return Ok(());
    }
    let error = |e: std::io::Error| format!("ip: {e}");
    let mut child = Command::new("ip")
        .args(["-force", "-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(error)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(batch.as_bytes()).map_err(error)?;
    }
    child.wait().map(drop).map_err(error)
}
