//! From what should and what does exist to the operations between them.
//!
//! The order is such that no packet of a destination that stays finds its rule missing: devices are
//! made ready, new actions are made, filters are made or replaced (each in one step), what is left
//! over is removed, and last the actions that nobody refers to. A shared action is never edited: a
//! NIC's copy of a filter would not follow, and every filter that refers to it would change at
//! once.
//!
//! Few messages: a filter that is right is left alone; one that is no longer wanted gives its
//! number to a new one of the same device, which replaces it.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use crate::model::{
    Action, ActionId, ActionKind, ActionSpec, Filter, Match, Op, Own, Rules, Settings,
};
use crate::mutants::left_out;
use crate::wanted::Wanted;

/// The operations, and what they were counted from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What is to be done, in this order.
    pub ops: Vec<Op>,
    /// Filters of ours that exist, right or wrong.
    pub present: usize,
    /// Those among them that a NIC has taken.
    pub in_hw: usize,
    /// Rules that have no place because all our numbers are taken.
    pub no_place: usize,
}

/// The fewest operations that turn `rules` into those of `wanted`, touching only what is ours.
pub fn diff(settings: &Settings, wanted: &Wanted, rules: &Rules) -> Plan {
    let mut actions = Actions::new(settings, &rules.actions);
    let mut plan = Plan::default();
    let mut devices: BTreeMap<u32, Device> = BTreeMap::new();
    for filter in rules.filters.iter().filter(|f| f.priority == settings.own.priority) {
        let device = devices.entry(filter.ifindex).or_default();
        // A filter may come twice in a dump that was torn.
        if device.handles.insert(filter.handle) && is_ours(settings, filter) {
            plan.present += 1;
            plan.in_hw += usize::from(filter.in_hw);
            device.sort_in(filter);
        }
    }
    let mut puts = Vec::new();
    let mut released: HashMap<ActionId, u32> = HashMap::new();
    let mut release = |filter: &Filter| {
        for (id, _) in &filter.actions {
            *released.entry(*id).or_default() += 1;
        }
    };
    let mut new: BTreeMap<u32, Vec<(Match, [ActionId; 2])>> = BTreeMap::new();
    for (&(ifindex, matches), specs) in &wanted.filters {
        let Some(ids) = actions.ids(specs) else {
            plan.no_place += 1;
            continue;
        };
        match devices.get_mut(&ifindex).and_then(|d| d.right.remove(&matches)) {
            Some(f) if f.actions.iter().map(|a| a.0).eq(ids) && f.offload == settings.offload => {}
            Some(f) => {
                release(f);
                puts.push(Op::PutFilter {
                    ifindex,
                    handle: f.handle,
                    replace: true,
                    matches,
                    actions: ids,
                });
            }
            None => new.entry(ifindex).or_default().push((matches, ids)),
        }
    }
    let mut dels = Vec::new();
    let touched: BTreeSet<u32> = devices.keys().chain(new.keys()).copied().collect();
    for ifindex in touched {
        let mut device = devices.remove(&ifindex).unwrap_or_default();
        // What was not asked for above is no longer wanted.
        device.spare.extend(std::mem::take(&mut device.right).into_values());
        let spare = std::mem::take(&mut device.spare);
        spare.iter().for_each(|f| release(f));
        let mut spare = spare.iter().map(|f| f.handle);
        for (matches, actions) in new.remove(&ifindex).unwrap_or_default() {
            let (handle, replace) = match spare.next() {
                Some(handle) => (handle, true),
                None => match device.free(&settings.own.handles) {
                    Some(handle) => (handle, false),
                    None => {
                        plan.no_place += 1;
                        continue;
                    }
                },
            };
            puts.push(Op::PutFilter { ifindex, handle, replace, matches, actions });
        }
        dels.extend(spare.map(|handle| Op::DelFilter { ifindex, handle }));
    }
    let clsact = wanted.clsact.difference(&rules.clsact).map(|&ifindex| Op::AddClsact { ifindex });
    let (adds, mut unused) = actions.finish(&released);
    plan.ops = clsact.chain(adds).collect();
    if left_out!(settings.mutation, ActionsFirst) {
        plan.ops.append(&mut unused);
    }
    if left_out!(settings.mutation, DeleteFirst) {
        for put in &mut puts {
            if let Op::PutFilter { ifindex, handle, replace: replace @ true, .. } = put {
                plan.ops.push(Op::DelFilter { ifindex: *ifindex, handle: *handle });
                *replace = false;
            }
        }
        plan.ops.append(&mut dels);
    }
    plan.ops.extend(puts.into_iter().chain(dels).chain(unused));
    plan
}

/// A filter is ours if it has our priority, a handle of ours, and nothing but actions with our
/// cookie.
fn is_ours(settings: &Settings, filter: &Filter) -> bool {
    let Own { priority, handles, .. } = &settings.own;
    filter.priority == *priority
        && (handles.contains(&filter.handle) || left_out!(settings.mutation, IgnoreHandles))
        && (left_out!(settings.mutation, IgnoreCookie)
            || !filter.actions.is_empty() && filter.actions.iter().all(|(_, cookie)| *cookie))
}

/// The filters of one device at our priority.
#[derive(Default)]
struct Device<'a> {
    /// All numbers in use, also by others.
    handles: BTreeSet<u32>,
    /// Ours, by what they compare.
    right: BTreeMap<Match, &'a Filter>,
    /// Ours, of no use: they compare what we never ask for, or the same as another.
    spare: Vec<&'a Filter>,
    /// Below this no number is free.
    searched: u32,
}

impl<'a> Device<'a> {
    fn sort_in(&mut self, filter: &'a Filter) {
        match filter.matches {
            Some(matches) if !self.right.contains_key(&matches) => {
                self.right.insert(matches, filter);
            }
            _ => self.spare.push(filter),
        }
    }

    fn free(&mut self, range: &Range<u32>) -> Option<u32> {
        let from = self.searched.max(range.start);
        let handle = (from..range.end).find(|h| !self.handles.contains(h))?;
        self.searched = handle + 1;
        Some(handle)
    }
}

/// The shared actions.
struct Actions<'a> {
    settings: &'a Settings,
    /// Ours that are right for something.
    by_spec: HashMap<ActionSpec, ActionId>,
    /// All of ours.
    ours: Vec<&'a Action>,
    /// All numbers in use, also by others.
    taken: BTreeSet<ActionId>,
    /// Wanted ones.
    used: BTreeSet<ActionId>,
    adds: Vec<Op>,
    /// Below this no number is free.
    searched: HashMap<ActionKind, u32>,
}

impl<'a> Actions<'a> {
    fn new(settings: &'a Settings, actions: &'a [Action]) -> Actions<'a> {
        let own = &settings.own;
        let cookie = |a: &Action| a.cookie || left_out!(settings.mutation, IgnoreCookie);
        let ours: Vec<&Action> =
            actions.iter().filter(|a| own.indexes.contains(&a.id.index) && cookie(a)).collect();
        let mut by_spec: HashMap<ActionSpec, ActionId> = HashMap::new();
        for action in &ours {
            if let Some(spec) = action.spec.filter(|_| action.offload == settings.offload) {
                match by_spec.entry(spec) {
                    Entry::Vacant(place) => {
                        place.insert(action.id);
                    }
                    Entry::Occupied(mut known) => {
                        let lowest = action.id.min(*known.get());
                        known.insert(lowest);
                    }
                }
            }
        }
        let taken = actions.iter().map(|a| a.id).collect();
        let (used, adds, searched) = Default::default();
        Actions { settings, by_spec, ours, taken, used, adds, searched }
    }

    /// The actions that do this; new ones are noted. None when no number is left.
    fn ids(&mut self, specs: &[ActionSpec; 2]) -> Option<[ActionId; 2]> {
        Some([self.id(specs[0])?, self.id(specs[1])?])
    }

    fn id(&mut self, spec: ActionSpec) -> Option<ActionId> {
        if let Some(&id) = self.by_spec.get(&spec) {
            self.used.insert(id);
            return Some(id);
        }
        let kind = spec.kind();
        if left_out!(self.settings.mutation, EditActions) {
            let old = self
                .ours
                .iter()
                .find(|a| a.id.kind == kind && !self.used.contains(&a.id))
                .map(|a| a.id);
            if let Some(id) = old {
                self.adds.push(Op::EditAction { id, spec });
                self.used.insert(id);
                self.by_spec.retain(|_, known| *known != id);
                self.by_spec.insert(spec, id);
                return Some(id);
            }
        }
        let from = self.searched.get(&kind).map_or(self.settings.own.indexes.start, |s| *s);
        let index = (from..self.settings.own.indexes.end)
            .find(|&index| !self.taken.contains(&ActionId { kind, index }))?;
        self.searched.insert(kind, index + 1);
        let id = ActionId { kind, index };
        self.taken.insert(id);
        self.used.insert(id);
        self.by_spec.insert(spec, id);
        self.adds.push(Op::AddAction { id, spec });
        Some(id)
    }

    /// The actions to make, and those of ours to remove: not wanted, and with no reference but
    /// those that are `released` before. One that somebody else's filter refers to stays.
    fn finish(self, released: &HashMap<ActionId, u32>) -> (Vec<Op>, Vec<Op>) {
        let free = |a: &&&Action| {
            !self.used.contains(&a.id)
                && a.bound <= released.get(&a.id).copied().unwrap_or_default()
        };
        let dels = self.ours.iter().filter(free).map(|a| Op::DelAction { id: a.id }).collect();
        (self.adds, dels)
    }
}
