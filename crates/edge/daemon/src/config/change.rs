//! From the configuration that is up to another one of the same host: what cannot be changed under
//! a running edge.

use super::{Config, Port, Uplink};
use crate::error::{EdgeError, Result};

impl Config {
    /// Refuses what differs from a configuration that is up and would need devices that are there
    /// to be made anew. What may differ: routing (`asn`, `bfd`, the neighbours of uplinks,
    /// `fast_failover`), rules, `resync_s`, and uplinks, NICs, tenants and ports that are new.
    pub fn can_follow(&self, up: &Config) -> Result<()> {
        let refused = |line: usize, what: String| {
            let why = format!("{what}; `unbroken edge down` first, then `unbroken edge up`");
            Err(EdgeError::config(line, why))
        };
        let at = |key: &str| self.lines.get(key).copied().unwrap_or(1);
        let shown = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        let keys = [
            ("role", shown(&up.role), shown(&self.role)),
            ("loopback", shown(&up.loopback), shown(&self.loopback)),
            ("mtu", shown(&up.mtu), shown(&self.mtu)),
            ("frr", shown(&up.frr), shown(&self.frr)),
        ];
        for (key, old, new) in keys {
            if old != new {
                return refused(
                    at(key),
                    format!("{key} is {new}, and {old} in the edge that is up"),
                );
            }
        }
        for old in &up.uplinks {
            let Some(new) = self.uplinks.iter().find(|new| new.device == old.device) else {
                return refused(
                    1,
                    format!("the uplink {} of the edge that is up is gone", old.device),
                );
            };
            let Uplink { address, .. } = old;
            if new.address != *address {
                let what = format!("{} has {address} in the edge that is up", old.device);
                return refused(new.line, what);
            }
        }
        for old in &up.nics {
            let Some(new) = self.nics.iter().find(|new| new.pci == old.pci) else {
                return refused(1, format!("the NIC {} of the edge that is up is gone", old.pci));
            };
            if new.functions != old.functions {
                let what = format!("the NIC has {} in the edge that is up", old.functions);
                return refused(new.line, what);
            }
        }
        self.tenants_can_follow(up, &refused)
    }

    fn tenants_can_follow(
        &self,
        up: &Config,
        refused: &dyn Fn(usize, String) -> Result<()>,
    ) -> Result<()> {
        let same = |a: &Port, b: &Port| Port { line: b.line, ..a.clone() } == *b;
        for old in &up.tenants {
            let Some(new) = self.tenants.iter().find(|new| new.vni == old.vni) else {
                return refused(
                    1,
                    format!("the tenant {} of the edge that is up is gone", old.vni),
                );
            };
            for port in &old.ports {
                let name = &port.representor;
                match new.ports.iter().find(|p| p.representor == *name) {
                    None => {
                        let what = format!("the port {name} of the edge that is up is gone");
                        return refused(new.line, what);
                    }
                    Some(other) if !same(port, other) => {
                        let what = format!("the port {name} is another in the edge that is up");
                        return refused(other.line, what);
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }
}
