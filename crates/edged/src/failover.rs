//! Fast failover: when BFD says that a neighbour is gone, routes over it are overruled at once, before BGP has worked it out.
//!
//! FRR's routes are not touched. A table of ours ([`TABLE`]), which a rule lets the kernel look at first, gets a route for each of FRR's
//! that leads over the dead link: over the links that are left, or over those marked `backup`. BGP confirms it a little later: when none of
//! FRR's routes leads over the link any more, when BFD says that the neighbour is back, or after [`LONGEST_US`], the table is emptied.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command::run;
use crate::config::{Config, Uplink};

/// The number of our table, and the priority of the rule.
pub const TABLE: u32 = 4100;
/// BGP's own timers would have noticed a dead neighbour by then.
const LONGEST_US: u64 = 15_000_000;
const CONFIRM_US: u64 = 100_000;

/// The dead links, and since when.
pub struct Failover {
    uplinks: Vec<Uplink>,
    dead: BTreeMap<String, u64>,
    next_look_us: u64,
}

impl Failover {
    /// Makes the rule.
    pub fn open(config: &Config) -> Result<Failover, String> {
        close();
        run(&["ip", "rule", "add", "pref", &TABLE.to_string(), "lookup", &TABLE.to_string()])?;
        Ok(Failover { uplinks: config.uplinks.clone(), dead: BTreeMap::new(), next_look_us: u64::MAX })
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
        let routes = frr_routes()?;
        let used: BTreeSet<&str> = routes.iter().flat_map(|r| hops(r)).filter_map(|h| h["dev"].as_str()).collect();
        let before = self.dead.len();
        self.dead.retain(|device, since| used.contains(device.as_str()) && now_us < *since + LONGEST_US);
        if self.dead.len() != before {
            self.overrule()?;
        }
        self.next_look_us = if self.dead.is_empty() { u64::MAX } else { now_us + CONFIRM_US };
        Ok(())
    }

    /// Makes the table what the dead links want it to be.
    fn overrule(&self) -> Result<usize, String> {
        if self.dead.is_empty() {
            let _ = run(&["ip", "route", "flush", "table", &TABLE.to_string()]);
            return Ok(0);
        }
        let (batch, count) = batch(&frr_routes()?, &self.dead.keys().map(String::as_str).collect(), &self.uplinks);
        let mut child = Command::new("ip")
            .args(["-force", "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("ip: {e}"))?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(batch.as_bytes()).map_err(|e| format!("ip: {e}"))?;
        }
        // A route that has just gone needs no overruling: what fails is looked at again in a moment.
        child.wait().map_err(|e| format!("ip: {e}"))?;
        Ok(count)
    }
}

/// Takes the rule and the table away.
pub fn close() {
    let _ = run(&["ip", "rule", "del", "pref", &TABLE.to_string(), "lookup", &TABLE.to_string()]);
    let _ = run(&["ip", "route", "flush", "table", &TABLE.to_string()]);
}

fn frr_routes() -> Result<Vec<Value>, String> {
    serde_json::from_str(&run(&["ip", "-j", "route", "show", "proto", "bgp"])?).map_err(|e| format!("ip route: {e}"))
}

fn hops(route: &Value) -> Vec<&Value> {
    route["nexthops"].as_array().map_or_else(|| vec![route], |all| all.iter().collect())
}

/// Commands for `ip -batch`, and how many routes they make.
fn batch(routes: &[Value], dead: &BTreeSet<&str>, uplinks: &[Uplink]) -> (String, usize) {
    let (mut text, mut count) = (String::new(), 0);
    for route in routes {
        let Some(dst) = route["dst"].as_str() else { continue };
        let way = |h: &&Value| Some((h["gateway"].as_str()?.to_owned(), h["dev"].as_str()?.to_owned()));
        let all: Vec<(String, String)> = hops(route).iter().filter_map(way).collect();
        let mut left: Vec<_> = all.iter().filter(|(_, dev)| !dead.contains(dev.as_str())).cloned().collect();
        if left.len() == all.len() {
            continue;
        }
        if left.is_empty() {
            let backups = uplinks.iter().filter(|u| u.backup && !dead.contains(u.device.as_str()));
            left = backups.map(|u| (u.peer.to_string(), u.device.clone())).collect();
        }
        if left.is_empty() {
            continue;
        }
        // writing to a String cannot fail
        let _ = write!(text, "route replace {dst} table {TABLE}");
        for (gateway, device) in left {
            let _ = write!(text, " nexthop via {gateway} dev {device}");
        }
        text.push('\n');
        count += 1;
    }
    (text, count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Net;

    fn uplink(device: &str, peer: [u8; 4], backup: bool) -> Uplink {
        let address = Net { address: [10, 9, 9, 9].into(), length: 8 };
        Uplink { device: device.into(), address, peer: peer.into(), peer_asn: 1, backup, line: 1 }
    }

    #[test]
    fn routes_over_a_dead_link_go_over_what_is_left() {
        let routes: Vec<Value> = serde_json::from_str(
            r#"[{"dst":"10.255.0.2","nexthops":[{"gateway":"10.1.1.0","dev":"p1"},{"gateway":"10.2.1.0","dev":"p2"}]},
                {"dst":"10.255.1.1","gateway":"10.1.1.0","dev":"p1"},
                {"dst":"10.255.1.2","gateway":"10.2.1.0","dev":"p2"}]"#,
        )
        .unwrap();
        let uplinks = [uplink("p1", [10, 1, 1, 0], false), uplink("p2", [10, 2, 1, 0], true)];
        let (text, count) = batch(&routes, &["p1"].into(), &uplinks);
        assert_eq!(count, 2);
        assert_eq!(
            text,
            "route replace 10.255.0.2 table 4100 nexthop via 10.2.1.0 dev p2\n\
             route replace 10.255.1.1 table 4100 nexthop via 10.2.1.0 dev p2\n"
        );
        assert_eq!(batch(&routes, &["p1", "p2"].into(), &uplinks).1, 0);
    }
}
