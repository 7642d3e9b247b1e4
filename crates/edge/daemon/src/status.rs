//! What `unbroken edge status` shows: from the daemon's status, from FRR and from the kernel.

use std::net::Ipv4Addr;

use serde::Serialize;
use serde_json::Value;

use crate::command::run;
use crate::error::{EdgeError, Result};
use crate::last::BEHIND;
use crate::netlink::Kernel;
use crate::routes::{error, FRR};
use crate::state::State;

/// One uplink.
#[derive(Clone, Debug, Serialize)]
pub struct Uplink {
    /// The device.
    pub device: String,
    /// The neighbour.
    pub peer: Ipv4Addr,
    /// Whether the device has a carrier: `up`, `down`, or `missing`.
    pub carrier: String,
    /// The state of the BFD session.
    pub bfd: String,
    /// The state of the BGP session.
    pub bgp: String,
}

/// The whole.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The name of the host.
    pub name: String,
    /// The daemon's process.
    pub daemon: Option<u32>,
    /// The uplinks.
    pub uplinks: Vec<Uplink>,
    /// Addresses on other hosts, of all tenants.
    pub destinations: usize,
    /// Destinations that FRR has no route to, and that keep their last way.
    pub last_ways: Vec<String>,
    /// What the daemon says about its rules.
    pub rules: Option<Value>,
}

impl Status {
    /// Reads it all; what does not answer is `unknown`.
    pub fn read(state: &State) -> Result<Status> {
        let config = state.config()?;
        let frr = state.frr();
        let ask = |command: &str| -> Value {
            frr.vtysh(&[command])
                .ok()
                .and_then(|t| serde_json::from_str(&t).ok())
                .unwrap_or_default()
        };
        let (bfd, bgp) = (ask("show bfd peers json"), ask("show bgp summary json"));
        let links: Value =
            serde_json::from_str(&run(&["ip", "-j", "link"])?).map_err(EdgeError::at("ip"))?;
        let uplinks = config.uplinks.iter().map(|u| {
            let unknown = || "unknown".to_owned();
            let session =
                bfd.as_array().and_then(|all| all.iter().find(|s| s["peer"] == u.peer.to_string()));
            let link =
                links.as_array().and_then(|all| all.iter().find(|l| l["ifname"] == u.device));
            let has = |l: &Value, flag: &str| {
                l["flags"].as_array().is_some_and(|f| f.iter().any(|f| f == flag))
            };
            let carrier =
                link.map_or("missing", |l| if has(l, "LOWER_UP") { "up" } else { "down" });
            let bgp = bgp["ipv4Unicast"]["peers"][u.peer.to_string()]["state"].as_str();
            Uplink {
                device: u.device.clone(),
                peer: u.peer,
                carrier: carrier.into(),
                bfd: session.and_then(|s| s["status"].as_str()).map_or_else(unknown, str::to_owned),
                bgp: bgp.map_or_else(unknown, str::to_owned),
            }
        });
        let text = state.text("status.json");
        let written: Value = serde_json::from_str(&text).unwrap_or_default();
        let mut destinations = 0;
        for tenant in &config.tenants {
            let table = run(&["bridge", "-j", "fdb", "show", "dev", &tenant.anchor()])?;
            let table: Vec<Value> =
                serde_json::from_str(&table).map_err(EdgeError::at("bridge"))?;
            let learned = |e: &&Value| {
                e["flags"].as_array().is_some_and(|f| f.iter().any(|f| f == "extern_learn"))
            };
            destinations += table.iter().filter(learned).filter(|e| e["dst"].is_string()).count();
        }
        let mut kernel = Kernel::open().map_err(error)?;
        let (kept, frr_has) =
            (kernel.routes(&BEHIND).map_err(error)?, kernel.routes(&FRR).map_err(error)?);
        Ok(Status {
            destinations,
            last_ways: kept.into_keys().filter(|to| !frr_has.contains_key(to)).collect(),
            name: config.name,
            daemon: state.daemon(),
            uplinks: uplinks.collect(),
            rules: Some(written["rules"].clone()).filter(|r| !r.is_null()),
        })
    }
}
