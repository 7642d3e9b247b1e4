//! A kernel as far as the reconciler sees it: tables, the rules of tc, and who made what.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use unbroken_edge_rules::{
    Action, ActionId, ActionSpec, FdbEntry, Filter, Link, Mac, Match, Offload, Op, Settings,
    TunnelMatch,
};

pub type FilterKey = (u32, u16, u32);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFilter {
    pub matches: Option<Match>,
    pub actions: Vec<ActionId>,
    pub offload: Offload,
    pub foreign: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelAction {
    pub spec: Option<ActionSpec>,
    pub cookie: bool,
    pub offload: Offload,
    pub foreign: bool,
}

#[derive(Clone, Default)]
pub struct Kernel {
    pub links: BTreeMap<u32, String>,
    pub fdb: BTreeSet<FdbEntry>,
    pub clsact: BTreeSet<u32>,
    pub filters: BTreeMap<FilterKey, KernelFilter>,
    pub actions: BTreeMap<ActionId, KernelAction>,
    pub next_ifindex: u32,
    /// Changes of links and of the FDB, whose dumps say that they were interrupted.
    pub generation: u64,
    /// What the reconciler must not do, and did.
    pub violations: Vec<String>,
}

impl Kernel {
    pub fn add_link(&mut self, name: &str) -> u32 {
        self.next_ifindex += 1;
        self.links.insert(self.next_ifindex, name.to_owned());
        self.generation += 1;
        self.next_ifindex
    }

    /// The device goes, with all that hangs on it.
    pub fn del_link(&mut self, ifindex: u32) {
        self.links.remove(&ifindex);
        self.fdb.retain(|e| e.ifindex != ifindex);
        self.del_clsact(ifindex);
        for action in self.actions.values_mut() {
            if action.spec == Some(ActionSpec::Redirect { ifindex }) {
                action.spec = Some(ActionSpec::Redirect { ifindex: 0 });
            }
        }
        self.generation += 1;
    }

    pub fn del_clsact(&mut self, ifindex: u32) {
        self.clsact.remove(&ifindex);
        self.filters.retain(|k, _| k.0 != ifindex);
    }

    pub fn ifindex(&self, name: &str) -> Option<u32> {
        self.links.iter().find(|(_, n)| *n == name).map(|(i, _)| *i)
    }

    pub fn bound(&self, id: ActionId) -> u32 {
        self.filters.values().flat_map(|f| &f.actions).filter(|a| **a == id).count() as u32
    }

    pub fn link_table(&self) -> Vec<Link> {
        self.links.iter().map(|(&ifindex, name)| Link { ifindex, name: name.clone() }).collect()
    }

    pub fn filter_table(&self) -> Vec<Filter> {
        let view = |(&(ifindex, priority, handle), f): (&FilterKey, &KernelFilter)| Filter {
            ifindex,
            priority,
            handle,
            matches: f.matches,
            actions: f
                .actions
                .iter()
                .map(|a| (*a, self.actions.get(a).is_some_and(|a| a.cookie)))
                .collect(),
            offload: f.offload,
            in_hw: false,
        };
        self.filters.iter().map(view).collect()
    }

    pub fn action_table(&self) -> Vec<Action> {
        let view = |(&id, a): (&ActionId, &KernelAction)| Action {
            id,
            spec: a.spec,
            cookie: a.cookie,
            offload: a.offload,
            bound: self.bound(id),
        };
        self.actions.iter().map(view).collect()
    }

    /// What the kernel makes of one operation.
    pub fn apply(&mut self, settings: &Settings, op: &Op) -> Result<(), String> {
        match *op {
            Op::AddClsact { ifindex } => {
                if !self.links.contains_key(&ifindex) {
                    return Err("ENODEV".into());
                }
                self.clsact.insert(ifindex).then_some(()).ok_or("EEXIST".into())
            }
            Op::AddAction { id, spec } => {
                if self.actions.contains_key(&id) {
                    return Err("EEXIST".into());
                }
                if matches!(spec, ActionSpec::Redirect { ifindex } if !self.links.contains_key(&ifindex))
                {
                    return Err("ENODEV".into());
                }
                self.actions.insert(
                    id,
                    KernelAction {
                        spec: Some(spec),
                        cookie: true,
                        offload: settings.offload,
                        foreign: false,
                    },
                );
                Ok(())
            }
            Op::PutFilter { ifindex, handle, replace, matches, actions } => self.put(
                settings,
                (ifindex, settings.own.priority, handle),
                replace,
                matches,
                actions,
            ),
            Op::DelFilter { ifindex, handle } => {
                let key = (ifindex, settings.own.priority, handle);
                match self.filters.get(&key) {
                    None => return Err("ENOENT".into()),
                    Some(f) if f.foreign => {
                        self.violations.push(format!("{op:?} removes a foreign filter"))
                    }
                    Some(_) => {}
                }
                self.filters.remove(&key);
                Ok(())
            }
            Op::DelAction { id } => {
                match self.actions.get(&id) {
                    None => return Err("ENOENT".into()),
                    Some(a) if a.foreign => {
                        self.violations.push(format!("{op:?} removes a foreign action"))
                    }
                    Some(_) if self.bound(id) > 0 => return Err("EPERM".into()),
                    Some(_) => {}
                }
                self.actions.remove(&id);
                Ok(())
            }
            Op::EditAction { id, spec } => {
                if self.bound(id) > 0 {
                    self.violations.push(format!("{op:?} edits a bound action"));
                }
                let action = self.actions.get_mut(&id).ok_or("ENOENT")?;
                action.spec = Some(spec);
                Ok(())
            }
        }
    }

    fn put(
        &mut self,
        settings: &Settings,
        key: FilterKey,
        replace: bool,
        matches: Match,
        actions: [ActionId; 2],
    ) -> Result<(), String> {
        if !self.clsact.contains(&key.0) {
            return Err("EINVAL: no qdisc".into());
        }
        if actions.iter().any(|a| !self.actions.contains_key(a)) {
            return Err("EINVAL: no such action".into());
        }
        if actions.iter().any(|a| self.actions[a].offload != settings.offload) {
            return Err("EINVAL: action and filter are to work in different places".into());
        }
        let same = |(k, f): (&FilterKey, &KernelFilter)| {
            (k.0, k.1) == (key.0, key.1) && k.2 != key.2 && f.matches == Some(matches)
        };
        if self.filters.iter().any(same) {
            return Err("EEXIST: the same match".into());
        }
        match self.filters.get(&key) {
            Some(_) if !replace => return Err("EEXIST: handle".into()),
            Some(f) if f.foreign => {
                self.violations.push(format!("a foreign filter is replaced: {key:?}"))
            }
            _ => {}
        }
        let filter = KernelFilter {
            matches: Some(matches),
            actions: actions.to_vec(),
            offload: settings.offload,
            foreign: false,
        };
        self.filters.insert(key, filter);
        Ok(())
    }

    /// What our filters do, resolved: device, match, and what becomes of the packet.
    pub fn effect(&self) -> BTreeMap<(u32, Match), Vec<Option<ActionSpec>>> {
        let resolve = |id: &ActionId| self.actions.get(id).and_then(|a| a.spec);
        self.filters
            .iter()
            .filter(|(_, f)| !f.foreign)
            .filter_map(|(k, f)| Some(((k.0, f.matches?), f.actions.iter().map(resolve).collect())))
            .collect()
    }

    /// What they should do. It is written down here once more, the long way, so that the crate is
    /// not checked against itself.
    pub fn should(&self, settings: &Settings) -> BTreeMap<(u32, Match), Vec<Option<ActionSpec>>> {
        let mut should = BTreeMap::new();
        let Some(vtep) = self.ifindex(&settings.vtep) else { return should };
        for tenant in &settings.tenants {
            let Some(anchor) = self.ifindex(&tenant.anchor) else { continue };
            let ports: Vec<u32> = tenant.ports.iter().filter_map(|p| self.ifindex(p)).collect();
            let local = |mac: Mac| {
                let behind = |p: &&u32| {
                    self.fdb.iter().any(|e| {
                        e.mac == mac && e.ifindex == **p && !e.permanent && !e.extern_learn
                    })
                };
                ports.iter().find(behind).copied()
            };
            let macs: BTreeSet<Mac> = self
                .fdb
                .iter()
                .map(|e| e.mac)
                .filter(|m| m.is_unicast() && *m != Mac::ZERO)
                .collect();
            for mac in macs {
                let hosts = self
                    .fdb
                    .iter()
                    .filter(|e| e.ifindex == anchor && e.mac == mac && e.extern_learn);
                let host: Option<Ipv4Addr> =
                    hosts.filter_map(|e| e.dst).filter(|d| *d != settings.loopback).min();
                if let Some(port) = local(mac) {
                    let tunnel = (settings.offload != Offload::SkipHw).then_some(TunnelMatch {
                        vni: tenant.vni,
                        dst: settings.loopback,
                        port: settings.port,
                    });
                    let todo =
                        vec![Some(ActionSpec::Decap), Some(ActionSpec::Redirect { ifindex: port })];
                    should.insert((anchor, Match { mac, tunnel }), todo);
                } else if let Some(dst) = host {
                    let src = settings.loopback;
                    let encap =
                        ActionSpec::Encap { vni: tenant.vni, src, dst, dst_port: settings.port };
                    for port in &ports {
                        let todo = vec![Some(encap), Some(ActionSpec::Redirect { ifindex: vtep })];
                        should.insert((*port, Match { mac, tunnel: None }), todo);
                    }
                }
            }
        }
        should
    }

    /// Actions of ours that nothing refers to.
    pub fn orphans(&self) -> Vec<ActionId> {
        self.actions
            .iter()
            .filter(|(id, a)| !a.foreign && self.bound(**id) == 0)
            .map(|(id, _)| *id)
            .collect()
    }
}
