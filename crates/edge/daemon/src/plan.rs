//! The steps that make a host's devices, from what it is to be and what there is. Pure: `ip -j -d
//! addr` comes in, commands go out.
//!
//! Each step has a key, by which it is remembered when it was taken, the commands that take it, and
//! those that undo it. What is there already and right is not made again, nor taken away later;
//! what is there and wrong is an error that says what is wrong.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use unbroken_edge_rules::VXLAN_PORT;

use crate::command::words;
use crate::config::{Config, Port, Role, Rules, Tenant, VTEP, VTEP_PORT};
use crate::error::{EdgeError, Result};

/// A bridge forgets an address after this, in seconds. It is long (a year), since a NIC that
/// forwards by itself does not show the bridge its packets; an address that moves is learned anew
/// at once.
const AGEING_S: u32 = 31_536_000;

/// One step.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Step {
    /// What it makes; unique.
    pub key: String,
    /// The commands that make it.
    pub make: Vec<Vec<String>>,
    /// The last command may fail for a moment: a bridge forwards a little after its port is up.
    #[serde(default)]
    pub patient: bool,
    /// The commands that take it away. What they complain about is already gone.
    pub undo: Vec<Vec<String>>,
}

/// What a host has: devices with their addresses, and the value of a kernel setting.
pub struct Present<'a> {
    /// `ip -j -d addr show`.
    pub links: &'a Value,
    /// Gives the value of a setting, as `net.ipv4.ip_forward`.
    pub setting: &'a dyn Fn(&str) -> Option<String>,
}

impl Present<'_> {
    fn link(&self, name: &str) -> Option<&Value> {
        self.links.as_array()?.iter().find(|l| l["ifname"] == name)
    }

    fn has_address(&self, device: &str, address: &str) -> bool {
        let shown =
            |a: &Value| format!("{}/{}", a["local"].as_str().unwrap_or_default(), a["prefixlen"]);
        let addresses = self.link(device).and_then(|l| l["addr_info"].as_array());
        addresses.is_some_and(|all| all.iter().any(|a| shown(a) == address))
    }

    fn is_up(&self, device: &str) -> bool {
        let flags = self.link(device).and_then(|l| l["flags"].as_array());
        flags.is_some_and(|all| all.iter().any(|f| f == "UP"))
    }
}

/// The steps that are not taken yet, in order.
pub fn plan(config: &Config, present: &Present) -> Result<Vec<Step>> {
    let mut plan = Planner { config, present, steps: Vec::new() };
    plan.settings()?;
    plan.address("lo", &format!("{}/32", config.loopback));
    plan.up("lo");
    for uplink in &config.uplinks {
        if present.link(&uplink.device).is_none() {
            return Err(EdgeError::config(
                uplink.line,
                format!("there is no device '{}'; 'ip link' shows those there are", uplink.device),
            ));
        }
        plan.address(&uplink.device, &uplink.address.to_string());
        plan.up(&uplink.device);
    }
    if config.rules != Rules::None {
        plan.vtep()?;
    }
    for tenant in &config.tenants {
        plan.tenant(tenant)?;
    }
    Ok(plan.steps)
}

struct Planner<'a> {
    config: &'a Config,
    present: &'a Present<'a>,
    steps: Vec<Step>,
}

impl Planner<'_> {
    fn step(&mut self, key: String, make: &[String], undo: &[String]) {
        let all = |list: &[String]| list.iter().map(|c| words(c)).collect();
        self.steps.push(Step { key, make: all(make), patient: false, undo: all(undo) });
    }

    /// A link without carrier carries no route; both links of a pair may bring a packet; ports
    /// spread tunnels over uplinks.
    fn settings(&mut self) -> Result<()> {
        let mut wanted = vec![
            ("net.ipv4.conf.all.ignore_routes_with_linkdown".to_owned(), "1"),
            ("net.ipv4.fib_multipath_hash_policy".to_owned(), "1"),
        ];
        if self.config.role == Role::Switch {
            wanted.push(("net.ipv4.ip_forward".to_owned(), "1"));
        }
        for uplink in &self.config.uplinks {
            wanted.push((
                format!("net.ipv4.conf.{}.rp_filter", uplink.device.replace('.', "/")),
                "2",
            ));
        }
        for (key, value) in wanted {
            let Some(old) = (self.present.setting)(&key) else {
                // The device's own settings are those of a device that does not exist, which is
                // reported later.
                if key.contains(".conf.") && !key.contains(".all.") {
                    continue;
                }
                return Err(EdgeError::Refused(format!("this kernel has no setting {key}")));
            };
            if old != value {
                let set = |value: &str| format!("sysctl -qw {key}={value}");
                self.step(format!("setting {key}"), &[set(value)], &[set(&old)]);
            }
        }
        Ok(())
    }

    fn address(&mut self, device: &str, address: &str) {
        if !self.present.has_address(device, address) {
            let command = |verb: &str| format!("ip addr {verb} {address} dev {device}");
            self.step(
                format!("address {address} of {device}"),
                &[command("add")],
                &[command("del")],
            );
        }
    }

    fn up(&mut self, device: &str) {
        if !self.present.is_up(device) {
            let command = |state: &str| format!("ip link set {device} {state}");
            self.step(format!("{device} is up"), &[command("up")], &[command("down")]);
        }
    }

    /// The external device that packets to be encapsulated are redirected to. Its port is not that
    /// of the wire, since it cannot share one with devices that have an id; rules name the wire's.
    fn vtep(&mut self) -> Result<()> {
        if let Some(link) = self.present.link(VTEP) {
            let data = &link["linkinfo"]["info_data"];
            if data["external"] == true && data["port"] == VTEP_PORT {
                return Ok(());
            }
            return Err(EdgeError::Refused(format!(
                "there is a device '{VTEP}' that is not an external VXLAN device at port {VTEP_PORT}; \
                 rules need that name: give yours another, or leave rules = \"none\""
            )));
        }
        let mtu = self.config.mtu;
        let make = [
            format!(
                "ip link add {VTEP} mtu {mtu} type vxlan external dstport {VTEP_PORT} nolearning"
            ),
            format!("ip link set {VTEP} up"),
        ];
        self.step(format!("device {VTEP}"), &make, &[format!("ip link del {VTEP}")]);
        Ok(())
    }

    fn tenant(&mut self, tenant: &Tenant) -> Result<()> {
        let (mtu, loopback) = (self.config.mtu, self.config.loopback);
        let (bridge, anchor) = (tenant.bridge(), tenant.anchor());
        if let Some(link) = self.present.link(&bridge) {
            if link["linkinfo"]["info_kind"] != "bridge" {
                return Err(EdgeError::config(
                    tenant.line,
                    format!(
                        "there is a device '{bridge}' that is not a bridge; choose another vni"
                    ),
                ));
            }
        } else {
            let make = [
                format!(
                    "ip link add {bridge} mtu {mtu} type bridge stp_state 0 ageing_time {}00 mcast_snooping 0",
                    AGEING_S
                ),
                // The bridge is a device of the host, too, and the host is no member of the
                // tenant's network: it answers no ARP there, and takes no packet, since no route
                // leads back over the bridge.
                format!("ip link set {bridge} arp off addrgenmode none"),
                format!("sysctl -qw net.ipv4.conf.{bridge}.rp_filter=1"),
                format!("sysctl -eqw net.ipv6.conf.{bridge}.disable_ipv6=1"),
                format!("ip link set {bridge} up"),
            ];
            self.step(format!("device {bridge}"), &make, &[format!("ip link del {bridge}")]);
        }
        if let Some(link) = self.present.link(&anchor) {
            let data = &link["linkinfo"]["info_data"];
            let right = data["id"] == tenant.vni
                && data["local"] == loopback.to_string()
                && data["port"] == VXLAN_PORT
                && link["master"] == bridge;
            if !right {
                let why = format!(
                    "that is not vni {} from {loopback} at port {VXLAN_PORT} in {bridge}",
                    tenant.vni
                );
                return Err(EdgeError::config(
                    tenant.line,
                    format!("there is a device '{anchor}' {why}; choose another vni"),
                ));
            }
        } else {
            let make = [
                format!(
                    "ip link add {anchor} mtu {mtu} type vxlan id {} local {loopback} dstport {VXLAN_PORT} nolearning",
                    tenant.vni
                ),
                format!("ip link set {anchor} addrgenmode none"),
                format!("ip link set {anchor} master {bridge}"),
                format!("bridge link set dev {anchor} learning off"),
                format!("ip link set {anchor} up"),
            ];
            self.step(format!("device {anchor}"), &make, &[format!("ip link del {anchor}")]);
        }
        tenant.ports.iter().try_for_each(|port| self.port(port, &bridge))
    }

    fn port(&mut self, port: &Port, bridge: &str) -> Result<()> {
        let rep = &port.representor;
        let mtu = self.config.mtu;
        let found = self.present.link(rep);
        // EVPN tells others of an address that the bridge knows; so the first packet need not be
        // flooded.
        let announce = |plan: &mut Self| {
            if let Some(mac) = port.mac {
                plan.step(
                    format!("address {mac} at {rep}"),
                    &[format!("bridge fdb replace {mac} dev {rep} master dynamic")],
                    &[],
                );
                plan.steps.iter_mut().last().into_iter().for_each(|s| s.patient = true);
            }
        };
        let master = format!("ip link set {rep} master {bridge}");
        match (found, &port.veth) {
            (Some(link), _) if link["master"] == bridge => Ok(()),
            (Some(link), _) if link["master"].is_string() => {
                Err(EdgeError::config(port.line, format!("'{rep}' is in {} already", link["master"])))
            }
            (Some(_), None) => {
                let up = format!("ip link set {rep} up");
                self.step(format!("port {rep}"), &[master, up], &[format!("ip link set {rep} nomaster")]);
                announce(self);
                Ok(())
            }
            (Some(_), Some(_)) => Err(EdgeError::config(port.line, format!("there is a device '{rep}' already; choose another name for the representor"))),
            (None, None) => Err(EdgeError::config(port.line, format!("there is no representor '{rep}'; 'devlink port' shows them (give veth for a pair instead)"))),
            (None, Some(veth)) => {
                let within = port.netns.as_deref().map(|n| format!("netns {n} ")).unwrap_or_default();
                let ip = port.netns.as_deref().map_or("ip".to_owned(), |n| format!("ip -n {n}"));
                let mac = port.mac.map(|m| format!("address {m} ")).unwrap_or_default();
                let mut make =
                    vec![format!("ip link add {rep} mtu {mtu} type veth peer name {veth} {mac}{within}mtu {mtu}")];
                make.push(format!("ip link set {rep} addrgenmode none"));
                make.extend(port.address.map(|a| format!("{ip} addr add {a} dev {veth}")));
                make.push(format!("{ip} link set {veth} up"));
                make.push(master);
                make.push(format!("ip link set {rep} up"));
                self.step(format!("device {rep}"), &make, &[format!("ip link del {rep}")]);
                announce(self);
                Ok(())
            }
        }
    }
}
