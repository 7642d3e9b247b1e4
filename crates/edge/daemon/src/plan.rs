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
use crate::config::{Config, Net, Port, Role, Rules, Tenant, Uplink, VTEP, VTEP_PORT};
use crate::error::{EdgeError, Result};

/// A bridge forgets an address after this, in seconds. It is long (a year), since a NIC that
/// forwards by itself does not show the bridge its packets; an address that moves is learned anew
/// at once.
const AGEING_S: u32 = 31_536_000;

/// What a tunnel puts before a packet: Ethernet, IPv4, UDP and VXLAN.
const VXLAN_BYTES: u32 = 50;

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
        plan.fits(uplink)?;
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

    /// A tenant's packet must fit into the uplink's with the headers of its tunnel: the kernel
    /// drops one that does not, and says nothing.
    fn fits(&self, uplink: &Uplink) -> Result<()> {
        let Some(most) = self.present.link(&uplink.device).and_then(|l| l["mtu"].as_u64()) else {
            return Ok(());
        };
        let mtu = self.config.mtu;
        if self.config.tenants.is_empty() || u64::from(mtu + VXLAN_BYTES) <= most {
            return Ok(());
        }
        let (device, line) = (&uplink.device, self.config.lines.get("mtu").copied());
        Err(EdgeError::config(
            line.unwrap_or(uplink.line),
            format!(
                "mtu is {mtu}, which takes {} in a tunnel, and {device} has {most}: give an mtu of \
                 {} at most, or more to {device} (`ip link set {device} mtu {}`)",
                mtu + VXLAN_BYTES,
                most.saturating_sub(VXLAN_BYTES.into()),
                mtu + VXLAN_BYTES
            ),
        ))
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
                "there is a device '{VTEP}' that is not an external VXLAN device at port \
                 {VTEP_PORT}; rules need that name: give yours another, or leave rules = \"none\""
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
                    "ip link add {bridge} mtu {mtu} type bridge stp_state 0 ageing_time {}00 \
                     mcast_snooping 0",
                    AGEING_S
                ),
                // The bridge is a device of the host, too, and the host is no member of the
                // tenant's network: it answers no ARP there, and takes no packet, since no route
                // leads back over the bridge. (With `arp off` it would not answer for others
                // either, which it does below.)
                format!("ip link set {bridge} addrgenmode none"),
                format!("sysctl -qw net.ipv4.conf.{bridge}.arp_ignore=8"),
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
                    "ip link add {anchor} mtu {mtu} type vxlan id {} local {loopback} dstport \
                     {VXLAN_PORT} nolearning",
                    tenant.vni
                ),
                format!("ip link set {anchor} addrgenmode none"),
                format!("ip link set {anchor} master {bridge}"),
                // The bridge answers a who-has of an address that EVPN has told of, and does not
                // send it to all hosts.
                format!("bridge link set dev {anchor} learning off neigh_suppress on"),
                format!("ip link set {anchor} up"),
            ];
            self.step(format!("device {anchor}"), &make, &[format!("ip link del {anchor}")]);
        }
        tenant.ports.iter().try_for_each(|port| self.port(port, &bridge))
    }

    fn port(&mut self, port: &Port, bridge: &str) -> Result<()> {
        let rep = &port.representor;
        let refused = |why: String| Err(EdgeError::config(port.line, why));
        let master = format!("ip link set {rep} master {bridge}");
        match (self.present.link(rep), &port.veth) {
            (Some(link), _) if link["master"] == bridge => {}
            (Some(link), _) if link["master"].is_string() => {
                return refused(format!("'{rep}' is in {} already", link["master"]));
            }
            (Some(_), None) => {
                let up = format!("ip link set {rep} up");
                let free = format!("ip link set {rep} nomaster");
                self.step(format!("port {rep}"), &[master, up], &[free]);
                // A representor has a carrier, and its port forwards, when the function is up.
                self.function(port)?;
                self.announce(port, bridge);
            }
            (Some(_), Some(_)) => {
                return refused(format!(
                    "there is a device '{rep}' already; choose another name for the representor"
                ));
            }
            (None, None) => {
                return refused(format!(
                    "there is no representor '{rep}'; 'devlink port' shows them (give veth for a \
                     pair instead)"
                ));
            }
            (None, Some(veth)) => {
                self.pair(port, veth, master);
                self.announce(port, bridge);
                self.veth_address(port, veth);
            }
        }
        // Of a port that was there before, as well: what is right is no step.
        if let (Some(device), Some(address)) = (&port.device, port.address) {
            self.address(device, &address.to_string());
        }
        Ok(())
    }

    /// A veth pair that plays function and representor.
    fn pair(&mut self, port: &Port, veth: &str, master: String) {
        let (rep, mtu) = (&port.representor, self.config.mtu);
        let within = port.netns.as_deref().map(|n| format!("netns {n} ")).unwrap_or_default();
        let mac = port.mac.map(|m| format!("address {m} ")).unwrap_or_default();
        let make = [
            format!(
                "ip link add {rep} mtu {mtu} type veth peer name {veth} {mac}{within}mtu {mtu}"
            ),
            format!("ip link set {rep} addrgenmode none"),
            format!("{} link set {veth} up", ip_of(port)),
            master,
            format!("ip link set {rep} up"),
        ];
        self.step(format!("device {rep}"), &make, &[format!("ip link del {rep}")]);
    }

    fn veth_address(&mut self, port: &Port, veth: &str) {
        let Some(address) = port.address else { return };
        let add = format!("{} addr add {address} dev {veth}", ip_of(port));
        // It goes with the device.
        self.step(format!("address {address} of {veth}"), &[add], &[]);
    }

    /// The function itself, where it is a device of this namespace; its IP address comes later.
    fn function(&mut self, port: &Port) -> Result<()> {
        let Some(device) = &port.device else { return Ok(()) };
        let Some(link) = self.present.link(device) else {
            return Err(EdgeError::config(
                port.line,
                format!("there is no device '{device}'; 'ip link' shows those there are"),
            ));
        };
        let old = link["address"].as_str().unwrap_or_default().to_owned();
        if let Some(mac) = port.mac.filter(|mac| mac.to_string() != old) {
            let set = |mac: &str| format!("ip link set {device} address {mac}");
            self.step(format!("mac of {device}"), &[set(&mac.to_string())], &[set(&old)]);
        }
        let (mtu, old) = (self.config.mtu, link["mtu"].as_u64().unwrap_or_default());
        if old != u64::from(mtu) {
            let set = |mtu: u64| format!("ip link set {device} mtu {mtu}");
            self.step(format!("mtu of {device}"), &[set(mtu.into())], &[set(old)]);
        }
        self.up(device);
        Ok(())
    }

    /// Tells EVPN of a port's addresses, so that the first packet need not be flooded, nor a
    /// question whose an address is.
    fn announce(&mut self, port: &Port, bridge: &str) {
        let (Some(mac), rep) = (port.mac, &port.representor) else { return };
        self.step(
            format!("address {mac} at {rep}"),
            &[format!("bridge fdb replace {mac} dev {rep} master dynamic")],
            &[],
        );
        self.steps.iter_mut().last().into_iter().for_each(|s| s.patient = true);
        // Before the host has the address itself: of a neighbour with an address of the host's own
        // zebra does not tell (its type is RTN_LOCAL, from when it was made).
        if let Some(Net { address, .. }) = port.address {
            let command = |what: &str| format!("ip neigh {what} {address} dev {bridge}");
            let make = format!("{} lladdr {mac} nud permanent", command("replace"));
            self.step(format!("address {address} at {rep}"), &[make], &[command("del")]);
        }
    }
}

/// The `ip` of the namespace that a port's other end is in.
fn ip_of(port: &Port) -> String {
    port.netns.as_deref().map_or("ip".to_owned(), |n| format!("ip -n {n}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"name = "h1"
loopback = "10.255.0.1"
asn = 65001
mtu = 1460
[[uplink]]
device = "p1"
address = "10.1.1.1/31"
peer = "10.1.1.0"
peer_asn = 65101
peer_loopback = "10.255.1.1"
[[tenant]]
vni = 100
"#;

    fn planned(text: &str) -> Result<Vec<Step>> {
        let links = serde_json::json!([{ "ifname": "p1", "mtu": 1500, "flags": [] }]);
        let setting = |_: &str| Some("0".to_owned());
        plan(&Config::parse(text).unwrap(), &Present { links: &links, setting: &setting })
    }

    #[test]
    fn a_packet_that_fits_into_no_uplink_is_refused() {
        let error = planned(TEXT).unwrap_err().to_string();
        assert_eq!(
            error,
            "line 4: mtu is 1460, which takes 1510 in a tunnel, and p1 has 1500: give an mtu of \
             1450 at most, or more to p1 (`ip link set p1 mtu 1510`)"
        );
        planned(&TEXT.replace("1460", "1450")).unwrap();
        // A switch has no tenants, and no devices with this MTU.
        planned(&TEXT.replace("[[tenant]]\nvni = 100\n", "")).unwrap();
    }

    #[test]
    fn a_function_gets_its_addresses_and_evpn_is_told_first() {
        let port = "[[tenant.port]]\nrepresentor = \"pf0vf0\"\ndevice = \"vf0\"\n\
                    mac = \"02:00:00:00:09:11\"\naddress = \"192.168.9.1/24\"\n";
        let text = TEXT.replace("1460", "1450") + port;
        let links = serde_json::json!([
            { "ifname": "p1", "mtu": 1500, "flags": [] }, { "ifname": "pf0vf0", "flags": [] },
            { "ifname": "vf0", "mtu": 1500, "address": "aa:00:00:00:00:01", "flags": [] },
        ]);
        let setting = |_: &str| Some("0".to_owned());
        let config = Config::parse(&text).unwrap();
        let steps = plan(&config, &Present { links: &links, setting: &setting }).unwrap();
        let made: Vec<String> = steps.iter().flat_map(|s| &s.make).map(|c| c.join(" ")).collect();
        assert_eq!(
            made[made.len() - 6..],
            [
                "ip link set vf0 address 02:00:00:00:09:11",
                "ip link set vf0 mtu 1450",
                "ip link set vf0 up",
                "bridge fdb replace 02:00:00:00:09:11 dev pf0vf0 master dynamic",
                "ip neigh replace 192.168.9.1 dev unb100 lladdr 02:00:00:00:09:11 nud permanent",
                "ip addr add 192.168.9.1/24 dev vf0",
            ]
        );
        let undone: Vec<String> = steps.iter().flat_map(|s| &s.undo).map(|c| c.join(" ")).collect();
        assert!(undone.contains(&"ip link set vf0 address aa:00:00:00:00:01".to_owned()));
        let gone = text.replace("\"vf0\"", "\"vf7\"");
        let config = Config::parse(&gone).unwrap();
        let error = plan(&config, &Present { links: &links, setting: &setting }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "line 14: there is no device 'vf7'; 'ip link' shows those there are"
        );
    }
}
