//! Flows that are alike, together.
//!
//! Among *n* hosts stars and rings have n² flows on each channel, but few that differ: shards of
//! owners that carry as much are as long, and hosts with the same NICs take the same routes. So
//! stars are followed by classes of hosts, and rings by their edges, each of which has the same at
//! every level. Only messages that take turns on several routes are followed one by one.

use std::collections::BTreeMap;

use crate::flows::{At, Walk};
use crate::{Flow, Grouping, Phase, Shard};

/// By how much shards may differ that count as alike: parts of a vector are rounded.
const ALIKE: f64 = 1e-4;

/// The same flow from each of some ranks to each of some others, at several levels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bundle<'b> {
    /// One of them: from the first sender to the first receiver that is another, at the lowest
    /// level.
    pub flow: Flow,
    /// How many levels have it, from that of `flow` on.
    pub levels: usize,
    /// The ranks that send, each of another host.
    pub senders: &'b [usize],
    /// The ranks that receive, each of another host.
    pub receivers: &'b [usize],
    /// Whether the hosts of both are the same, in the same order. Then each sends to all but that
    /// of its own host.
    pub same_hosts: bool,
}

impl Bundle<'_> {
    /// To how many each of them sends, and from how many each receives, at each level.
    pub fn degrees(&self) -> (usize, usize) {
        let itself = usize::from(self.same_hosts);
        (self.receivers.len() - itself, self.senders.len() - itself)
    }

    /// Calls `each` with every flow.
    pub fn flows(&self, each: &mut impl FnMut(Flow)) {
        for level in self.flow.level..self.flow.level + self.levels {
            for (place, from) in self.senders.iter().copied().enumerate() {
                let others = self.receivers.iter().enumerate();
                for (_, to) in others.filter(|(other, _)| !self.same_hosts || *other != place) {
                    each(Flow { level, from, to: *to, ..self.flow });
                }
            }
        }
    }
}

impl<F: FnMut(Bundle<'_>)> Walk<'_, F> {
    /// Between hosts, all shards.
    pub fn trees(&mut self) {
        let plan = self.plan;
        // of what ranks have by themselves, that of all first ranks of hosts, of all second ones …
        let local = |shard: &Shard| shard.rank.map(|rank| plan.topology.local(rank));
        let mut of_forest: BTreeMap<_, Vec<&Shard>> = BTreeMap::new();
        for shard in &plan.shards {
            let star = plan.forests[shard.forest].is_star();
            if plan.choice.grouping == Grouping::Hosts && (star || self.is_common(shard)) {
                let group = (shard.channel, shard.forest, shard.set, local(shard));
                of_forest.entry(group).or_default().push(shard);
            } else {
                self.shard(shard);
            }
        }
        for ((channel, number, ..), shards) in of_forest {
            let forest = &plan.forests[number];
            if forest.is_star() {
                self.stars(channel, &shards);
                continue;
            }
            match forest.ring() {
                Some((ring, leaves, first)) if self.is_even(&shards, ring.len()) => {
                    self.ring(&shards, ring, (Phase::Reduce, first));
                    self.ring(&shards, ring, (Phase::Spread, 0));
                    self.leaves(&shards, leaves);
                    self.outsiders(&shards, ring);
                }
                _ => shards.into_iter().for_each(|shard| self.shard(shard)),
            }
        }
    }

    /// Hosts that are alike to all others, in classes: of the same NICs, and the same number in
    /// `own`, but for rounding.
    fn classes(&self, own: &[f64]) -> Vec<Vec<usize>> {
        let plan = self.plan;
        let mut classes: Vec<Vec<usize>> = Vec::new();
        for host in 0..own.len() {
            let is_of = |class: &&mut Vec<usize>| {
                let first = class[0];
                plan.binding.kind(first) == plan.binding.kind(host)
                    && self.alike[first] == self.alike[host]
                    && (own[first] - own[host]).abs() <= ALIKE * own[first]
            };
            match classes.iter_mut().find(is_of) {
                Some(class) => class.push(host),
                None => classes.push(vec![host]),
            }
        }
        classes
    }

    /// Whether there is a shard for each of so many nodes, and all are as long.
    fn is_even(&self, shards: &[&Shard], nodes: usize) -> bool {
        let first = shards.first().map_or(0.0, |shard| self.bytes(shard));
        let is_alike = |shard: &&Shard| (self.bytes(shard) - first).abs() <= ALIKE * first;
        shards.len() == nodes && shards.iter().all(is_alike)
    }

    /// Everyone to each owner, and each owner to everyone; a host owns one of the shards at most.
    fn stars(&mut self, channel: usize, shards: &[&Shard]) {
        let plan = self.plan;
        let ([reduces, to_all], set) = (self.ways(), shards[0].set);
        let (mut own, mut row) = (vec![0.0; plan.nodes.len()], vec![0; plan.nodes.len()]);
        for shard in shards {
            own[shard.owner] = self.bytes(shard);
            row[shard.owner] = shard.row;
        }
        let classes = self.classes(&own);
        let leaders = |class: &Vec<usize>| -> Vec<usize> {
            class.iter().map(|node| plan.leader(channel, *node)).collect()
        };
        let ranks: Vec<Vec<usize>> = classes.iter().map(leaders).collect();
        for (owners, owning) in classes.iter().zip(&ranks) {
            let all: f64 = owners.iter().map(|node| own[*node]).sum();
            let bytes = all / owners.len() as f64;
            if bytes == 0.0 {
                continue;
            }
            for (others, other) in classes.iter().zip(&ranks) {
                let (a, b) = (others[0], owners[owners.len() - 1]);
                if a == b {
                    continue;
                }
                let alike =
                    self.are_alike(channel, a, b, bytes) && self.are_alike(channel, b, a, bytes);
                if alike {
                    let both = [(Phase::Reduce, other, owning), (Phase::Spread, owning, other)];
                    for ((phase, from, to), _) in
                        both.into_iter().zip([reduces, to_all]).filter(|(_, goes)| *goes)
                    {
                        let pairs = (&from[..], &to[..], owners == others);
                        self.between_all((At::of(phase, 0, set), 1), channel, pairs, bytes);
                    }
                    continue;
                }
                for (owner, at) in owners.iter().zip(owning) {
                    for from in other.iter().filter(|from| *from != at) {
                        let turn = (channel, plan.turn(row[*owner], *from, *at));
                        if reduces {
                            let way = At::of(Phase::Reduce, 0, set);
                            self.between(way, turn, *from, *at, own[*owner]);
                        }
                        if to_all {
                            let way = At::of(Phase::Spread, 0, set);
                            self.between(way, turn, *at, *from, own[*owner]);
                        }
                    }
                }
            }
        }
    }

    /// As much from each rank to each, so many bytes.
    pub fn all_pairs(&mut self, bytes: f64) {
        let plan = self.plan;
        let topology = &plan.topology;
        let members: Vec<f64> =
            (0..plan.hosts()).map(|host| topology.members(host).len() as f64).collect();
        let classes = self.classes(&members);
        let ranks_of = |class: &[usize], local: usize| -> Vec<usize> {
            class.iter().map(|host| topology.members(*host)[local]).collect()
        };
        let same_host = (0..topology.ranks()).flat_map(|from| {
            let mates = topology.members(topology.host_of(from)).iter().copied();
            mates.filter(move |to| *to != from).map(move |to| (from, to))
        });
        for (from, to) in same_host {
            self.pair(from, to, bytes);
        }
        for (a, b) in classes.iter().flat_map(|a| classes.iter().map(move |b| (a, b))) {
            let same = a == b;
            let Some(other) = b.get(usize::from(same)).copied() else { continue };
            for (i, j) in (0..members[a[0]] as usize)
                .flat_map(|i| (0..members[b[0]] as usize).map(move |j| (i, j)))
            {
                let (from, to) = (ranks_of(a, i), ranks_of(b, j));
                let (channels, each) = self.channels_of(from[0], to[usize::from(same)], bytes);
                let alike =
                    channels.clone().all(|channel| self.are_alike(channel, a[0], other, each));
                if alike {
                    for channel in channels {
                        let pairs = (&from[..], &to[..], same);
                        self.between_all((At::of(Phase::Reduce, 0, 0), 1), channel, pairs, each);
                    }
                    continue;
                }
                for (place, from) in from.iter().enumerate() {
                    for (_, to) in to.iter().enumerate().filter(|(at, _)| !same || *at != place) {
                        self.pair(*from, *to, bytes);
                    }
                }
            }
        }
    }

    /// What goes round: on each edge one shard at each level.
    fn ring(&mut self, shards: &[&Shard], ring: &[usize], (phase, first): (Phase, usize)) {
        let plan = self.plan;
        let (channel, set, levels) = (shards[0].channel, shards[0].set, ring.len() - 1);
        let all: f64 = shards.iter().map(|shard| self.bytes(shard)).sum();
        let bytes = all / shards.len() as f64;
        for (place, node) in ring.iter().copied().enumerate() {
            let next = ring[(place + 1) % ring.len()];
            if node == next {
                continue;
            }
            let (from, to) = (plan.leader(channel, node), plan.leader(channel, next));
            if self.are_alike(channel, node, next, bytes) {
                let pairs = (&[from][..], &[to][..], false);
                self.between_all((At::of(phase, first, set), levels), channel, pairs, bytes);
                continue;
            }
            let position = |owner: usize| ring.iter().position(|node| *node == owner).unwrap_or(0);
            for shard in shards {
                // what is reduced ends at the owner, the result begins there
                let ahead = (place + ring.len() - position(shard.owner)) % ring.len();
                let level = match phase {
                    Phase::Spread => Some(ahead),
                    _ => ahead.checked_sub(1),
                };
                if let Some(level) = level.filter(|level| *level < levels) {
                    let turn = (channel, plan.turn(shard.row, from, to));
                    let way = At::of(phase, first + level, set);
                    self.between(way, turn, from, to, self.bytes(shard));
                }
            }
        }
    }

    /// What hangs on a ring: for each shard on another node.
    fn leaves(&mut self, shards: &[&Shard], leaves: &[usize]) {
        for shard in shards {
            for leaf in leaves {
                self.tree(shard, *leaf, self.bytes(shard), [true, true]);
            }
        }
    }

    /// What outsiders add, round the ring, and what they get ([`crate::paper`]).
    fn outsiders(&mut self, shards: &[&Shard], ring: &[usize]) {
        let outsiders = self.plan.outsiders[shards[0].forest].len();
        if outsiders == 0 {
            return;
        }
        self.ring(shards, ring, (Phase::Join, outsiders));
        for shard in shards {
            self.enter_and_return(shard, self.bytes(shard));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use crate::{
        Choice, Collective, Counts, DataType, Fabric, Flow, Grouping, Health, Host, Matrix, Nic,
        Operation, Owners, Path, Phase, Plan, ReduceOp, Shape, Topology,
    };

    /// Bytes and messages from rank to rank, by phase, level and NICs.
    type Sums = BTreeMap<(Phase, usize, usize, usize, Option<(usize, usize)>), [f64; 2]>;

    fn sums(flows: impl FnOnce(&mut dyn FnMut(Flow))) -> Sums {
        let mut sums = Sums::new();
        flows(&mut |flow| {
            let Flow { phase, level, set: _, is_leaf: _, from, to, path, bytes, messages } = flow;
            let nics = match path {
                Path::Memory => None,
                Path::Nics { from, to } => Some((from, to)),
            };
            let sum = sums.entry((phase, level, from, to, nics)).or_default();
            *sum = [sum[0] + bytes, sum[1] + messages];
        });
        sums
    }

    fn topology(
        (hosts, ranks): (usize, usize),
        nics: usize,
        fabric: Fabric,
        lost: &[(usize, usize, u8)],
    ) -> Topology {
        let host = Host::new(nics, Nic::new(100_000));
        let mut topology = Topology::uniform(hosts, ranks, host, fabric).unwrap();
        for (host, nic, part) in lost.iter().filter(|(h, n, _)| *h < hosts && *n < nics) {
            let health = if *part == 0 { Health::Down } else { Health::Slow(*part) };
            topology = topology.with_health(*host, *nic, health).unwrap();
        }
        topology
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        /// Together or shard by shard, flows are the same.
        #[test]
        fn flows_are_those_of_each_shard(
            (hosts, nics) in (2usize..9, 1usize..5),
            lost in prop::collection::vec(
                (0usize..9, 0usize..4, prop::sample::select(vec![0, 0, 50])),
                0..4,
            ),
            shape in prop::sample::select(
                vec![Shape::Direct, Shape::Ring, Shape::SubRings, Shape::Tree],
            ),
            by_capacity in any::<bool>(),
            any_to_any in any::<bool>(),
            kind in 0usize..6,
            ranks in 1usize..4,
            chunk_kib in prop::sample::select(vec![4u64, 64, 1024]),
            divide_bytes in prop::sample::select(vec![64u64, 1 << 30]),
        ) {
            let fabric = if any_to_any { Fabric::AnyToAny } else { Fabric::RailOnly };
            let topology = topology((hosts, ranks), nics, fabric, &lost);
            let all = hosts * ranks;
            let (op, count, each) = (ReduceOp::Sum, 1 << 22, (1 << 22) / all as u64);
            let operation = match kind {
                0..=2 => Operation::AllReduce { op, count },
                3 => Operation::ReduceScatter { op, counts: Counts::Equal(each) },
                4 => Operation::AllGather { counts: Counts::Equal(each) },
                _ => Operation::AllToAll { counts: Matrix::Equal(each) },
            };
            let collective = Collective::new(operation, DataType::F32, false, all).unwrap();
            let by_capacity = by_capacity && kind <= 2;
            let owners = if by_capacity { Owners::ByCapacity } else { Owners::Equal };
            let chunk_bytes = chunk_kib << 10;
            let usual = Choice::new(shape, Grouping::Hosts);
            let choice = Choice { owners, chunk_bytes, divide_bytes, ..usual };
            let plan = Plan::new(&topology, &collective, choice);
            prop_assume!(plan.is_ok());
            let plan = plan.unwrap();
            let together = sums(|each| plan.flows(each));
            let one_by_one = sums(|each| plan.flows_one_by_one(each));
            prop_assert_eq!(together.len(), one_by_one.len());
            for (key, [bytes, messages]) in one_by_one {
                let found = together.get(&key).copied().unwrap_or_default();
                let near = (found[0] - bytes).abs() <= 1e-4 * bytes;
                prop_assert!(near, "{key:?}: {found:?} for {bytes}");
                // messages through memory cost nothing by themselves
                let counted = key.4.is_some();
                let as_many = !counted || (found[1] - messages).abs() <= 1e-6;
                prop_assert!(as_many, "{key:?}: {found:?} for {messages}");
            }
        }
    }

    /// Shards that are not as long have classes of their own.
    #[test]
    fn hosts_that_carry_less_are_a_class() {
        let topology = topology((64, 2), 8, Fabric::AnyToAny, &[(1, 3, 0), (7, 2, 0)]);
        let operation = Operation::AllReduce { op: ReduceOp::Sum, count: 1 << 28 };
        let collective = Collective::new(operation, DataType::F32, false, 128).unwrap();
        let owners = Owners::ByCapacity;
        let choice = Choice {
            owners,
            divide_bytes: 64,
            chunk_bytes: 64 << 10,
            ..Choice::new(Shape::Direct, Grouping::Hosts)
        };
        let plan = Plan::new(&topology, &collective, choice).unwrap();
        let count = |alike: &[usize]| {
            let mut bundles = 0;
            plan.bundles(alike, |bundle| bundles += usize::from(bundle.flow.path != Path::Memory));
            bundles
        };
        // three kinds of hosts; pairs of them, both ways, on eight channels, over up to eight NICs
        assert!(count(&[0; 64]) <= 9 * 2 * 8 * 8, "{}", count(&[0; 64]));
        let pods: Vec<usize> = (0..64).map(|host| host / 32).collect();
        assert!((count(&[0; 64]) + 1..=16 * 2 * 8 * 8).contains(&count(&pods)));
    }
}
