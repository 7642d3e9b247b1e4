//! From the kernel's tables to the rules that should exist.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{
    names, ActionSpec, FdbEntry, Mac, Match, Settings, Tables, Tenant, TunnelMatch,
};
use crate::mutants::left_out;
use crate::Offload;

/// The rules that should exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The devices that must be ready for filters.
    pub clsact: BTreeSet<u32>,
    /// Device and match of each filter, and what is done with the packet.
    pub filters: BTreeMap<(u32, Match), [ActionSpec; 2]>,
    /// Destinations on other hosts.
    pub destinations: usize,
}

/// The rules that should exist for these tables.
///
/// For each tenant: on every port, one filter for each destination on another host, which
/// encapsulates; on the anchor, one for each address behind a port, which decapsulates.
/// Destinations are what EVPN put into the anchor's table: entries with a host, not made by
/// traffic, not for floods. Devices that do not exist have no rules.
pub fn wanted(settings: &Settings, tables: &Tables) -> Wanted {
    let names = names(&tables.links);
    let mut by_device: BTreeMap<u32, Vec<&FdbEntry>> = BTreeMap::new();
    for entry in tables.fdb.iter().filter(|e| is_station(settings, e.mac)) {
        by_device.entry(entry.ifindex).or_default().push(entry);
    }
    let mut wanted = Wanted::default();
    let Some(&vtep) = names.get(settings.vtep.as_str()) else { return wanted };
    for tenant in &settings.tenants {
        let Some(&anchor) = names.get(tenant.anchor.as_str()) else { continue };
        let ports: Vec<u32> =
            tenant.ports.iter().filter_map(|p| names.get(p.as_str()).copied()).collect();
        let local = local(&ports, &by_device);
        let remote = remote(settings, tenant, anchor, &local, &by_device);
        wanted.destinations += remote.len();
        wanted.clsact.extend(ports.iter().copied().chain([anchor]));
        for &port in &ports {
            for (&mac, &encap) in &remote {
                wanted.filters.insert(
                    (port, Match { mac, tunnel: None }),
                    [encap, ActionSpec::Redirect { ifindex: vtep }],
                );
            }
        }
        // The kernel's anchor knows its tenant without looking; a NIC sees the outer packet and
        // must compare it. In the kernel such a filter never matches, and the packet goes to the
        // bridge, with the same result.
        let tunnel = match settings.offload {
            Offload::SkipHw => None,
            Offload::Both | Offload::SkipSw => {
                Some(TunnelMatch { vni: tenant.vni, dst: settings.loopback, port: settings.port })
            }
        };
        for (&mac, &port) in &local {
            let actions = [ActionSpec::Decap, ActionSpec::Redirect { ifindex: port }];
            wanted.filters.insert((anchor, Match { mac, tunnel }), actions);
        }
    }
    wanted
}

fn is_station(settings: &Settings, mac: Mac) -> bool {
    mac.is_unicast() && (mac != Mac::ZERO || left_out!(settings.mutation, ZeroMacs))
}

/// The addresses behind the ports. One that is seen behind two, in the middle of a move, is taken
/// to be behind the first.
fn local(ports: &[u32], by_device: &BTreeMap<u32, Vec<&FdbEntry>>) -> BTreeMap<Mac, u32> {
    let mut local = BTreeMap::new();
    for &port in ports {
        for entry in by_device.get(&port).into_iter().flatten() {
            if !entry.permanent && !entry.extern_learn {
                local.entry(entry.mac).or_insert(port);
            }
        }
    }
    local
}

/// The addresses on other hosts. One that is also behind a port is local: the kernel's bridge would
/// not send it away, either.
fn remote(
    settings: &Settings,
    tenant: &Tenant,
    anchor: u32,
    local: &BTreeMap<Mac, u32>,
    by_device: &BTreeMap<u32, Vec<&FdbEntry>>,
) -> BTreeMap<Mac, ActionSpec> {
    let mut remote = BTreeMap::new();
    let devices: Vec<u32> = match left_out!(settings.mutation, OneTenant) {
        true => by_device.keys().copied().collect(),
        false => vec![anchor],
    };
    for entry in devices.iter().flat_map(|d| by_device.get(d).into_iter().flatten()) {
        let counts = entry.extern_learn || left_out!(settings.mutation, AnyFdbEntry);
        let Some(dst) =
            entry.dst.filter(|d| counts && *d != settings.loopback && !d.is_unspecified())
        else {
            continue;
        };
        if !local.contains_key(&entry.mac) {
            let encap = ActionSpec::Encap {
                vni: tenant.vni,
                src: settings.loopback,
                dst,
                dst_port: settings.port,
            };
            // Two hosts for one address: the same one at every look.
            let known = remote.entry(entry.mac).or_insert(encap);
            *known = (*known).min(encap);
        }
    }
    remote
}
