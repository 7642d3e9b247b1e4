//! How long a plan takes, by its volumes.
//!
//! A collective is a few flows ([`Flow`]): what its plan sends in all from one rank to another over
//! one pair of NICs, or through memory. Flows share links max-min fairly, each in proportion to its
//! volume, as queue pairs do that take turns message by message. Flows that begin together then end
//! together where the busiest link is, so a phase takes as long as its busiest link, and no rates
//! need be followed through time. What pipelining costs comes on top: the first chunk goes through
//! all phases, one after the other; each further one takes as long as the busiest link is busy with
//! a chunk. [`super::time`] follows every message instead; `crates/collective/simulate/tests`
//! compares the two.

use super::switches::{Network, Switches};
use super::Costs;
use crate::{Flow, Path, Phase, Plan, Shape, Topology};

/// Levels are kept apart while the table has no more entries than this; else they are taken to be
/// alike, as they are on rings.
const MOST_ENTRIES: usize = 1 << 23;

/// A time, and what it consists of, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Time {
    /// All.
    pub us: f64,
    /// How long the busiest link takes for its bytes.
    pub busiest_us: f64,
    /// The first chunk, from end to end.
    pub first_us: f64,
    /// Each further chunk, on average.
    pub chunk_us: f64,
}

/// So many chunks are under way at once in a rank's scratch memory.
const CHUNKS_IN_SCRATCH: f64 = 3.0;
/// Hosts that carry unequally much use about this part of the time in which a chunk is on its way
/// for others (from the deviations that
/// `crates/collective/simulate/tests/messages.rs` tells).
const UNEVEN_USE: f64 = 0.5;

/// The time of a plan for this topology, if all ranks begin at once.
pub fn time(plan: &Plan, topology: &Topology, switches: &Switches, costs: &Costs) -> Time {
    let links = Network::new(topology, switches);
    let chunks = plan.chunks() as f64;
    let mut phases: [PhaseLoad; Phase::COUNT] = Default::default();
    let mut bytes_us = vec![0.0; links.capacity.len()];
    let Kinds { levels, sets, leaves } = Kinds::of(plan);
    let apart = levels * (sets + 1) * links.capacity.len() <= MOST_ENTRIES;
    // what each set of trees does without leaves, where it is not all
    let of_sets = if (sets > 1 || leaves) && apart { sets } else { 0 };
    let mut alone: Vec<[PhaseLoad; Phase::COUNT]> = Vec::new();
    alone.resize_with(of_sets, Default::default);
    let alike = links.alike();
    plan.bundles(&alike, |bundle| {
        let Flow { phase, level, set, is_leaf, from, to, path, bytes, messages } = bundle.flow;
        let (alpha_us, own_us) = match path {
            Path::Memory => (costs.memory_alpha_us, 0.0),
            Path::Nics { .. } => (costs.nic_alpha_us, costs.message_us),
        };
        let load = &mut phases[phase as usize];
        let (sends, receives) = bundle.degrees();
        let pairs = (bundle.senders.len() * sends) as f64;
        let levels = level..level + bundle.levels;
        levels.clone().for_each(|level| load.note(level, alpha_us, bytes * pairs));
        let mut of_set =
            alone.get_mut(set).filter(|_| !is_leaf).map(|phases| &mut phases[phase as usize]);
        if let Some(of_set) = &mut of_set {
            levels.clone().for_each(|level| of_set.note(level, alpha_us, bytes * pairs));
        }
        let ends = links.ends(topology, (from, to), path);
        let mut least =
            ends.map(|link| links.capacity[link]).into_iter().fold(f64::INFINITY, f64::min);
        links.between(topology, (from, to), path, |link| least = least.min(links.capacity[link]));
        let bits = bytes * 8.0 / chunks + own_us * messages * least;
        let mut add = |link: usize, times: f64| {
            let us = bits / links.capacity[link] * times;
            if apart {
                levels.clone().for_each(|level| load.add(level, link, us, links.capacity.len()));
            } else {
                load.add(0, link, us * bundle.levels as f64, links.capacity.len());
            }
            if let Some(of_set) = &mut of_set {
                let each = levels.clone();
                each.for_each(|level| of_set.add(level, link, us, links.capacity.len()));
            }
            bytes_us[link] += bytes * 8.0 / links.capacity[link] * times * bundle.levels as f64;
        };
        for sender in bundle.senders {
            add(links.ends(topology, (*sender, to), path)[0], sends as f64);
        }
        for receiver in bundle.receivers {
            add(links.ends(topology, (from, *receiver), path)[1], receives as f64);
        }
        links.between(topology, (from, to), path, |link| add(link, pairs));
    });
    // what is gathered in turn is sent in turn: the last host's part is complete last
    let turns = plan.gathered_in_turn() as f64;
    let lengths: Vec<f64> = plan.chunk_lengths().collect();
    let of_first = lengths[0];
    let first_us: f64 = phases.iter().map(|p| p.busy_us() * of_first + p.alpha_us()).sum::<f64>()
        - phases[Phase::Gather as usize].busy_us() * of_first / turns * f64::from(turns > 1.0);
    // what each link carries of a chunk, in all phases
    let mut all_us = vec![0.0; links.capacity.len()];
    phases.iter().for_each(|p| p.add_to(&mut all_us));
    let busiest = all_us.iter().copied().fold(0.0, f64::max);
    // lanes that keep the order of chunks are those of one set; a leaf's have one level
    let in_order: Vec<&PhaseLoad> = match (plan.has_ordered_levels(), alone.is_empty()) {
        (false, _) => Vec::new(),
        (true, true) => phases.iter().collect(),
        (true, false) => alone.iter().flatten().collect(),
    };
    let ordered = in_order.into_iter().filter(|p| p.levels > 1).map(PhaseLoad::first_us);
    let ordered = ordered.fold(0.0, f64::max);
    let scratch = if plan.waits_in_scratch() {
        phases[Phase::Reduce as usize].first_us() / CHUNKS_IN_SCRATCH
    } else {
        0.0
    };
    let chunk_us = busiest.max(ordered).max(scratch);
    let least_us = ordered.max(scratch);
    let further_us = further_us(&phases, &lengths, (least_us, chunk_us), links.capacity.len());
    let free = |host: usize| topology.hosts()[host].free_mbps();
    let uneven = (1..topology.hosts().len()).any(|host| free(host) != free(0));
    let waits_us = waits_us(&phases, &all_us) * if uneven { UNEVEN_USE } else { 1.0 };
    Time {
        us: first_us + further_us - waits_us.min(further_us),
        busiest_us: bytes_us.into_iter().fold(0.0, f64::max),
        first_us,
        chunk_us,
    }
}

/// The time of all chunks but the first. While one is being reduced, the one before it is being
/// spread. Where they are unequally long, another link may be the busiest each time.
fn further_us(
    phases: &[PhaseLoad; Phase::COUNT],
    lengths: &[f64],
    (least_us, chunk_us): (f64, f64),
    links: usize,
) -> f64 {
    if lengths.iter().all(|length| *length == lengths[0]) {
        return (lengths.len() - 1) as f64 * chunk_us;
    }
    let load = |phases: &[PhaseLoad]| {
        let mut us = vec![0.0; links];
        phases.iter().for_each(|p| p.add_to(&mut us));
        us
    };
    let (before, after) = phases.split_at(Phase::Reduce as usize + 1);
    let (reduced, spread) = (load(before), load(after));
    let pair_us = |this: f64, last: f64| {
        let busy = reduced.iter().zip(&spread).map(|(r, s)| this * r + last * s);
        busy.fold(least_us * this, f64::max)
    };
    // Few pairs differ.
    let mut known: Vec<((f64, f64), f64)> = Vec::new();
    let mut all_us = 0.0;
    for pair in lengths.windows(2).map(|pair| (pair[1], pair[0])) {
        let found = known.iter().find(|(of, _)| *of == pair).map(|(_, us)| *us);
        all_us += found.unwrap_or_else(|| {
            let us = pair_us(pair.0, pair.1);
            known.push((pair, us));
            us
        });
    }
    // NICs do not wait for the end of a pair, where they have something else to send.
    let least_us = (lengths.len() as f64 - lengths[0]) * chunk_us;
    least_us + (all_us - least_us) * UNEVEN_USE
}

/// How long the busiest link waits, while a chunk is under way, between the first time and the last
/// that it carries a part of it. Other chunks make use of that.
fn waits_us(phases: &[PhaseLoad], all_us: &[f64]) -> f64 {
    let Some(link) = (0..all_us.len()).max_by(|a, b| all_us[*a].total_cmp(&all_us[*b])) else {
        return 0.0;
    };
    let carries = |p: &PhaseLoad| p.us.iter().any(|l| l.get(link).is_some_and(|us| *us > 0.0));
    let (first, last) = (phases.iter().position(carries), phases.iter().rposition(carries));
    let (Some(first), Some(last)) = (first, last) else { return 0.0 };
    phases[first..last].iter().map(PhaseLoad::alpha_us).sum()
}

/// What flows there are of a plan.
struct Kinds {
    /// The most levels that any phase has.
    levels: usize,
    /// How many sets of trees there are.
    sets: usize,
    /// Whether hosts hang on rings.
    leaves: bool,
}

impl Kinds {
    fn of(plan: &Plan) -> Kinds {
        let mut kinds = Kinds { levels: 1, sets: 1, leaves: false };
        if matches!(plan.choice().shape, Shape::Direct | Shape::OneShot) {
            return kinds;
        }
        let alike = vec![0; plan.hosts()];
        plan.bundles(&alike, |bundle| {
            kinds.levels = kinds.levels.max(bundle.flow.level + bundle.levels);
            kinds.sets = kinds.sets.max(bundle.flow.set + 1);
            kinds.leaves |= bundle.flow.is_leaf;
        });
        kinds
    }
}

/// What a phase loads links with, for each chunk.
#[derive(Default)]
struct PhaseLoad {
    levels: usize,
    /// By level, then link: the time that it is busy.
    us: Vec<Vec<f64>>,
    /// By level: latency times bytes, and bytes.
    alpha: Vec<(f64, f64)>,
}

impl PhaseLoad {
    fn note(&mut self, level: usize, alpha_us: f64, bytes: f64) {
        self.levels = self.levels.max(level + 1);
        if self.alpha.len() <= level {
            self.alpha.resize(level + 1, (0.0, 0.0));
        }
        self.alpha[level].0 += alpha_us * bytes;
        self.alpha[level].1 += bytes;
    }

    fn add(&mut self, level: usize, link: usize, us: f64, links: usize) {
        if self.us.len() <= level {
            self.us.resize_with(level + 1, Vec::new);
        }
        let of_level = &mut self.us[level];
        if of_level.is_empty() {
            of_level.resize(links, 0.0);
        }
        of_level[link] += us;
    }

    fn add_to(&self, all_us: &mut [f64]) {
        for level in &self.us {
            level.iter().enumerate().for_each(|(link, us)| all_us[link] += us);
        }
    }

    /// The time of a chunk that has all links to itself: its levels come one after the other, and
    /// the busiest link decides about each.
    fn first_us(&self) -> f64 {
        self.busy_us() + self.alpha_us()
    }

    /// The same without latency.
    fn busy_us(&self) -> f64 {
        self.us.iter().map(|l| l.iter().copied().fold(0.0, f64::max)).sum()
    }

    /// The latency of all levels.
    fn alpha_us(&self) -> f64 {
        let levels = self.alpha.iter().filter(|(_, bytes)| *bytes > 0.0);
        levels.map(|(alpha, bytes)| alpha / bytes).sum()
    }
}
