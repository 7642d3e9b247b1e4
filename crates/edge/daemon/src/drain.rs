//! Taking an uplink out of service without losing a packet, and putting it back.
//!
//! The neighbour and we tell each other that the link is about to go (the well-known community
//! `graceful-shutdown`, RFC 8326): routes over it become the last choice at both ends while it
//! still carries what comes. When nothing prefers it any more, it is shut.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::run;
use crate::config::Config;
use crate::error::{EdgeError, Result};
use crate::state::State;

/// What the sessions of links are for.
const FAMILY: &str = "address-family ipv4 unicast";
const LONGEST: Duration = Duration::from_secs(30);
/// What was sent before the last route changed is on its way no longer than this.
const IN_FLIGHT: Duration = Duration::from_millis(200);
/// A second look at the counters of a link that nothing should use any more; BFD and BGP still do.
const QUIET_PACKETS: u64 = 400;

fn neighbour<'a>(config: &'a Config, device: &str) -> Result<&'a crate::config::Uplink> {
    config.uplinks.iter().find(|u| u.device == device).ok_or_else(|| {
        let names: Vec<&str> = config.uplinks.iter().map(|u| u.device.as_str()).collect();
        EdgeError::Refused(format!("'{device}' is no uplink; they are {}", names.join(", ")))
    })
}

/// Drains an uplink and shuts it. Refuses if no other one is up.
pub fn drain(state: &State, device: &str) -> Result<()> {
    let config = state.config()?;
    let uplink = neighbour(&config, device)?;
    let status = crate::status::Status::read(state)?;
    let up = |u: &crate::status::Uplink| {
        u.device != device && u.carrier == "up" && u.bgp == "Established"
    };
    if !status.uplinks.iter().any(up) {
        return Err(EdgeError::Refused(format!(
            "'{device}' is the only uplink that is up: draining it would cut the host off"
        )));
    }
    let frr = state.frr();
    let (router, peer) = (format!("router bgp {}", config.asn), uplink.peer.to_string());
    let map = |map: &str, way: &str| {
        let line = format!("neighbor {peer} route-map {map} {way}");
        frr.vtysh(&["configure terminal", &router, FAMILY, &line]).map(drop)
    };
    // Out: what we tell this neighbour is marked and lengthened, so that it and all behind it
    // prefer another way. In: so do we.
    map("drain-out", "out")?;
    map("drain-in", "in")?;
    frr.vtysh(&[&format!("clear bgp {peer} soft")])?;
    let deadline = Instant::now() + LONGEST;
    while uses(device)? {
        if Instant::now() > deadline {
            return Err(EdgeError::Refused(format!(
                "routes still lead over {device} after {} s; it is left up, drained",
                LONGEST.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // The other direction: until hardly anything comes in.
    loop {
        let before = received(device)?;
        std::thread::sleep(IN_FLIGHT);
        if received(device)?.saturating_sub(before) < QUIET_PACKETS {
            break;
        }
        if Instant::now() > deadline {
            return Err(EdgeError::Refused(format!(
                "{device} still receives after {} s; it is left up, drained",
                LONGEST.as_secs()
            )));
        }
    }
    frr.vtysh(&["configure terminal", &router, &format!("neighbor {peer} shutdown")])?;
    run(&["ip", "link", "set", device, "down"]).map(drop)
}

/// Puts a drained uplink back into service.
pub fn undrain(state: &State, device: &str) -> Result<()> {
    let config = state.config()?;
    let uplink = neighbour(&config, device)?;
    let frr = state.frr();
    let (router, peer) = (format!("router bgp {}", config.asn), uplink.peer.to_string());
    run(&["ip", "link", "set", device, "up"])?;
    for way in ["drain-out out", "drain-in in"] {
        let line = format!("no neighbor {peer} route-map {way}");
        // One that was not drained has none to remove.
        let _ = frr.vtysh(&["configure terminal", &router, FAMILY, &line]);
    }
    frr.vtysh(&["configure terminal", &router, &format!("no neighbor {peer} shutdown")]).map(drop)
}

/// Whether a route of FRR's leads over a device.
fn uses(device: &str) -> Result<bool> {
    let routes: Vec<Value> =
        serde_json::from_str(&run(&["ip", "-j", "route", "show", "proto", "bgp"])?)
            .map_err(EdgeError::at("ip"))?;
    let over = |r: &Value| {
        r["dev"] == device
            || r["nexthops"].as_array().is_some_and(|h| h.iter().any(|h| h["dev"] == device))
    };
    // The neighbour's own address has no other way that is as short, and carries no tenant's
    // traffic.
    Ok(routes
        .iter()
        .filter(|r| r["nexthops"].is_array() || r["dev"] == device)
        .filter(|r| over(r))
        .count()
        > 1)
}

fn received(device: &str) -> Result<u64> {
    let path = format!("/sys/class/net/{device}/statistics/rx_packets");
    let text = std::fs::read_to_string(&path).map_err(EdgeError::at(&path))?;
    text.trim().parse().map_err(EdgeError::at(&path))
}
