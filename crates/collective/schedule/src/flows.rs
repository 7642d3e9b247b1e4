//! What a plan sends over which NICs, in all, without the programs of its ranks.
//!
//! A [`Flow`] is all that one rank sends to another for one shard over one path: as many messages
//! as the plan has chunks, seen as one volume. Models of time that follow volumes instead of
//! messages need nothing else ([`crate::cost::time`] follows messages). Messages that are too
//! short to be divided take one of several paths in turn; here each path has its part of them.
//! Flows that are alike are found together ([`crate::Bundle`]). `tests/flows.rs` compares the sums
//! with those of the programs, NIC by NIC.

use crate::binding::Route;
use crate::generate::in_turn;
use crate::plan::PARTS;
use crate::{Bundle, Matrix, Operation, Path, Plan, Shape, Shard};

/// Of plans with more chunks than this, messages that take turns are spread over their paths in
/// proportion; with fewer it matters which ones they take.
const MOST_TURNS: u64 = 16;

/// A part of the way of a chunk. Chunks go through phases in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Within a host, to the rank that speaks for it on the channel.
    Gather,
    /// Towards the owner of a shard; or from pair to pair.
    Reduce,
    /// From the owner of a shard.
    Spread,
    /// What those add that were left out of a ring.
    Join,
    /// The result, to those that were left out.
    Return,
    /// Within a host, to all ranks that are to have it.
    Scatter,
}

impl Phase {
    /// How many there are.
    pub const COUNT: usize = 6;
}

/// All that one rank sends to another for one shard over one path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// The part of the way.
    pub phase: Phase,
    /// Messages of a chunk and a set that have a higher number wait for those with a lower one.
    pub level: usize,
    /// The set of trees: those of different ones have lanes of their own, and do not wait for each
    /// other. What stays on a host has the first.
    pub set: usize,
    /// One end hangs on a ring: its lane has nothing of other levels.
    pub is_leaf: bool,
    /// The rank that sends.
    pub from: usize,
    /// The rank that receives.
    pub to: usize,
    /// What carries it.
    pub path: Path,
    /// The volume of all chunks together.
    pub bytes: f64,
    /// Messages of each chunk; a part of one where messages take turns among paths.
    pub messages: f64,
}

impl Plan {
    /// Calls `each` with every flow.
    pub fn flows(&self, mut each: impl FnMut(Flow)) {
        let alike = vec![0; self.topology.hosts().len()];
        self.bundles(&alike, |bundle| bundle.flows(&mut each));
    }

    /// Calls `each` with all flows, those together that are alike. Hosts of different numbers in
    /// `alike` are not.
    pub fn bundles(&self, alike: &[usize], each: impl FnMut(Bundle<'_>)) {
        let mut walk = self.walk(alike, each);
        if self.collective.operation().is_pairwise() {
            walk.pairs();
        } else {
            walk.common_memory();
            walk.own_memory();
            walk.trees();
        }
    }

    /// Flows as each shard has them, to compare with.
    #[cfg(test)]
    pub(crate) fn flows_one_by_one(&self, mut each: impl FnMut(Flow)) {
        let alike = vec![0; self.topology.hosts().len()];
        let mut walk = self.walk(&alike, |bundle: Bundle<'_>| bundle.flows(&mut each));
        if self.collective.operation().is_pairwise() {
            return walk.each_pair();
        }
        walk.common_memory();
        for shard in &self.shards {
            walk.shard_memory(shard);
            walk.shard(shard);
        }
    }

    fn walk<'p, F>(&'p self, alike: &'p [usize], each: F) -> Walk<'p, F> {
        let kinds = self.binding.kind_count();
        let rows = self.shards.last().map_or(1, |s| s.row as u64 + 1);
        let relays = self.forwards();
        let (routes, parts) = (Vec::new(), Vec::new());
        let mut walk = Walk { plan: self, alike, rows, kinds, routes, parts, relays, each };
        walk.routes.resize_with(self.channels * kinds * kinds, || None);
        walk
    }

    /// Whether a lane carries messages of several levels for each chunk, in order: then chunks
    /// cannot overtake each other, and each waits for the latency of all levels.
    pub fn has_ordered_levels(&self) -> bool {
        let rows = self.shards.last().map_or(0, |s| s.row + 1);
        rows > 1 && !matches!(self.choice.shape, Shape::Direct | Shape::OneShot)
    }

    /// Whether chunks wait in scratch memory until they are sent between hosts, so that only three
    /// are under way there at once.
    pub fn waits_in_scratch(&self) -> bool {
        let kept = matches!(
            self.collective.operation(),
            Operation::ReduceScatter { .. } | Operation::Reduce { .. }
        );
        let several = self.nodes.iter().any(|ranks| ranks.len() > 1);
        several && (kept || self.choice.shape == Shape::OneShot)
    }

    /// How many hosts own different parts of the vector, which are gathered one after the other.
    pub fn gathered_in_turn(&self) -> usize {
        let scatters = matches!(self.collective.operation(), Operation::ReduceScatter { .. });
        if scatters {
            self.nodes.len()
        } else {
            1
        }
    }
}

/// Which part of the way a message is.
#[derive(Clone, Copy)]
pub(crate) struct At {
    pub phase: Phase,
    pub level: usize,
    pub set: usize,
    pub is_leaf: bool,
}

impl At {
    /// Between others than leaves.
    pub fn of(phase: Phase, level: usize, set: usize) -> At {
        At { phase, level, set, is_leaf: false }
    }
}

pub(crate) struct Walk<'p, F> {
    pub plan: &'p Plan,
    pub alike: &'p [usize],
    /// By how much turns of successive chunks differ.
    rows: u64,
    kinds: usize,
    /// By channel, then the kinds of both hosts.
    routes: Vec<Option<Vec<Route>>>,
    /// Of one message: NICs of both ends, and the part of it.
    parts: Vec<(usize, usize, f64)>,
    /// Whether any rank forwards.
    relays: bool,
    each: F,
}

impl<F: FnMut(Bundle<'_>)> Walk<'_, F> {
    pub fn bytes(&self, shard: &Shard) -> f64 {
        let element = self.plan.collective.data().bytes() as f64;
        let part = (shard.part.end - shard.part.start) as f64 / PARTS as f64;
        (shard.span.end - shard.span.start) as f64 * part * element
    }

    /// Within hosts, where every rank has and gets everything: a channel's shards together, since
    /// there are as many as hosts of them.
    fn common_memory(&mut self) {
        let plan = self.plan;
        let mut of_channel = vec![0.0; plan.channels];
        for shard in plan.shards.iter().filter(|s| self.is_common(s)) {
            of_channel[shard.channel] += self.bytes(shard);
        }
        for (channel, bytes) in of_channel.into_iter().enumerate().filter(|(_, b)| *b > 0.0) {
            for node in 0..plan.nodes.len() {
                let leader = plan.leader(channel, node);
                for mate in plan.nodes[node].iter().copied().filter(|mate| *mate != leader) {
                    self.memory(Phase::Gather, mate, leader, bytes);
                    self.memory(Phase::Scatter, leader, mate, bytes);
                }
            }
        }
    }

    pub fn is_common(&self, shard: &Shard) -> bool {
        let operation = self.plan.collective.operation();
        shard.rank.is_none()
            && matches!(operation, Operation::AllReduce { .. } | Operation::Barrier)
    }

    /// Within hosts, of what one rank alone has or is to have: a channel's shards together.
    fn own_memory(&mut self) {
        let plan = self.plan;
        let [reduces, to_all] = self.ways();
        let mut of_channel = vec![0.0; plan.channels];
        // by channel, then rank
        let mut own = vec![0.0; plan.channels * plan.topology.ranks()];
        let at = |channel: usize, rank: usize| channel * plan.topology.ranks() + rank;
        for shard in plan.shards.iter().filter(|s| !self.is_common(s)) {
            let bytes = self.bytes(shard);
            of_channel[shard.channel] += bytes;
            if let Some(rank) = shard.rank {
                own[at(shard.channel, rank)] += bytes;
            }
        }
        for (channel, all) in of_channel.into_iter().enumerate().filter(|(_, all)| *all > 0.0) {
            for node in 0..plan.nodes.len() {
                let leader = plan.leader(channel, node);
                for mate in plan.nodes[node].iter().copied().filter(|mate| *mate != leader) {
                    let own = own[at(channel, mate)];
                    let gathered = if reduces { all } else { own };
                    let scattered = if to_all { all - own } else { own };
                    for (phase, from, to, bytes) in [
                        (Phase::Gather, mate, leader, gathered),
                        (Phase::Scatter, leader, mate, scattered),
                    ] {
                        // what is left of a difference may be rounding
                        if bytes > all * 1e-12 {
                            self.memory(phase, from, to, bytes);
                        }
                    }
                }
            }
        }
    }

    /// Within hosts, of a shard that one rank alone has or is to have.
    #[cfg(test)]
    fn shard_memory(&mut self, shard: &Shard) {
        if self.is_common(shard) {
            return;
        }
        let plan = self.plan;
        let bytes = self.bytes(shard);
        let [reduces, to_all] = self.ways();
        for node in 0..plan.nodes.len() {
            let leader = plan.leader(shard.channel, node);
            for mate in plan.nodes[node].iter().copied().filter(|mate| *mate != leader) {
                let one = shard.rank == Some(mate);
                if reduces || one {
                    self.memory(Phase::Gather, mate, leader, bytes);
                }
                if (to_all || node == shard.owner) && one != to_all {
                    self.memory(Phase::Scatter, leader, mate, bytes);
                }
            }
        }
    }

    /// Whether something is reduced, and whether all get the result.
    pub fn ways(&self) -> [bool; 2] {
        let operation = self.plan.collective.operation();
        let kept = matches!(operation, Operation::ReduceScatter { .. } | Operation::Reduce { .. });
        [operation.reduce_op().is_some(), !kept]
    }

    /// Between hosts, of a shard by itself.
    pub fn shard(&mut self, shard: &Shard) {
        let bytes = self.bytes(shard);
        let ways = self.ways();
        for node in 0..self.plan.nodes.len() {
            self.tree(shard, node, bytes, ways);
        }
        self.join(shard, bytes);
    }

    /// What a node sends towards the owner, and receives from there.
    pub fn tree(&mut self, shard: &Shard, node: usize, bytes: f64, [reduces, to_all]: [bool; 2]) {
        let (plan, set) = (self.plan, shard.set);
        let forest = &plan.forests[shard.forest];
        let is_leaf = forest.is_leaf(node);
        let leader = |node| plan.leader(shard.channel, node);
        let channel = |from, to| (shard.channel, plan.turn(shard.row, from, to));
        if plan.choice.shape == Shape::OneShot {
            for peer in (0..plan.nodes.len()).filter(|peer| *peer != node) {
                let (from, to) = (leader(node), leader(peer));
                self.between(At::of(Phase::Reduce, 0, set), channel(from, to), from, to, bytes);
            }
            return;
        }
        if let Some(edge) = forest.towards(shard.owner, node).filter(|_| reduces) {
            let at = At { phase: Phase::Reduce, level: edge.level, set, is_leaf };
            let (from, to) = (leader(node), leader(edge.node));
            self.between(at, channel(from, to), from, to, bytes);
        }
        if let Some(edge) = forest.source(shard.owner, node).filter(|_| to_all) {
            let at = At { phase: Phase::Spread, level: edge.level, set, is_leaf };
            let (from, to) = (leader(edge.node), leader(node));
            self.between(at, channel(from, to), from, to, bytes);
        }
    }

    /// What outsiders add, round the ring, and what they get ([`crate::paper`]).
    fn join(&mut self, shard: &Shard, bytes: f64) {
        self.join_and_return(shard, bytes, usize::MAX);
    }

    /// What outsiders add as they enter the ring, and what they get, without what goes round the
    /// ring between its members.
    pub fn enter_and_return(&mut self, shard: &Shard, bytes: f64) {
        self.join_and_return(shard, bytes, self.plan.outsiders[shard.forest].len());
    }

    /// The first so many steps of the way, and the way back.
    fn join_and_return(&mut self, shard: &Shard, bytes: f64, steps: usize) {
        let plan = self.plan;
        let chain = plan.chain(shard);
        let outsiders = plan.outsiders[shard.forest].len();
        let channel = |from, to| (shard.channel, plan.turn(shard.row, from, to));
        let leader = |place: usize| plan.leader(shard.channel, chain[place % chain.len()]);
        for place in (1..chain.len()).take(steps) {
            let at = At::of(Phase::Join, place - 1, shard.set);
            let (from, to) = (leader(place - 1), leader(place));
            self.between(at, channel(from, to), from, to, bytes);
        }
        for place in 0..if chain.is_empty() { 0 } else { outsiders } {
            let from = if place + 1 == outsiders { chain.len() - 1 } else { place + 1 };
            let at = At::of(Phase::Return, outsiders - 1 - place, shard.set);
            let (from, to) = (leader(from), leader(place));
            self.between(at, channel(from, to), from, to, bytes);
        }
    }

    /// Operations from pair to pair.
    fn pairs(&mut self) {
        let element = self.plan.collective.data().bytes();
        match *self.plan.collective.operation() {
            // one pair needs no look at all others
            Operation::SendRecv { from, to, count } => {
                self.pair(from, to, (count * element) as f64);
            }
            Operation::AllToAll { counts: Matrix::Equal(count) } => {
                self.all_pairs((count * element) as f64);
            }
            _ => self.each_pair(),
        }
    }

    fn each_pair(&mut self) {
        let (collective, ranks) = (&self.plan.collective, self.plan.topology.ranks());
        let element = collective.data().bytes();
        for from in 0..ranks {
            for to in (0..ranks).filter(|to| *to != from) {
                self.pair(from, to, (collective.pair(from, to) * element) as f64);
            }
        }
    }

    /// What one rank sends to another, divided among channels as their programs do.
    pub fn pair(&mut self, from: usize, to: usize, bytes: f64) {
        let (channels, each) = self.channels_of(from, to, bytes);
        for channel in channels.filter(|_| bytes > 0.0) {
            let turn = (channel, (from + to) as u64);
            self.between(At::of(Phase::Reduce, 0, 0), turn, from, to, each);
        }
    }

    /// The channels on which one rank sends to another, and what it sends on each of them.
    pub fn channels_of(
        &self,
        from: usize,
        to: usize,
        bytes: f64,
    ) -> (impl Iterator<Item = usize> + Clone, f64) {
        let (topology, channels) = (&self.plan.topology, self.plan.channels);
        let only_pair = matches!(self.plan.collective.operation(), Operation::SendRecv { .. });
        let members = |rank: usize| topology.members(topology.host_of(rank)).len();
        let least = if only_pair { 1 } else { members(from).min(members(to)) };
        let parts = channels.div_ceil(least.min(channels));
        let first = (topology.local(from) + topology.local(to)) * parts;
        ((0..parts).map(move |part| (first + part) % channels), bytes / parts as f64)
    }

    fn memory(&mut self, phase: Phase, from: usize, to: usize, bytes: f64) {
        let path = Path::Memory;
        let At { phase, level, set, is_leaf } = At::of(phase, 0, 0);
        self.one(Flow { phase, level, set, is_leaf, from, to, path, bytes, messages: 1.0 });
    }

    fn one(&mut self, flow: Flow) {
        let (senders, receivers) = (&[flow.from], &[flow.to]);
        (self.each)(Bundle { flow, levels: 1, senders, receivers, same_hosts: false });
    }

    /// Where the routes from host to host on a channel are.
    fn routes_at(&mut self, channel: usize, a: usize, b: usize) -> usize {
        let plan = self.plan;
        let kinds = (plan.binding.kind(a), plan.binding.kind(b));
        let at = (channel * self.kinds + kinds.0) * self.kinds + kinds.1;
        // the plan has checked that there is a path
        self.routes[at]
            .get_or_insert_with(|| plan.binding.routes(channel, a, b).unwrap_or_default());
        at
    }

    /// Between leaders: through memory on one host, else over the routes of the channel.
    pub fn between(
        &mut self,
        At { phase, level, set, is_leaf }: At,
        (channel, turn): (usize, u64),
        from: usize,
        to: usize,
        bytes: f64,
    ) {
        let plan = self.plan;
        let (a, b) = (plan.topology.host_of(from), plan.topology.host_of(to));
        let flow = |from, to, path, bytes, messages| Flow {
            phase,
            level,
            set,
            is_leaf,
            from,
            to,
            path,
            bytes,
            messages,
        };
        if a == b {
            return self.one(flow(from, to, Path::Memory, bytes, 1.0));
        }
        let at = self.routes_at(channel, a, b);
        let divided = self.divides(at, bytes);
        let routes = self.routes[at].as_deref().unwrap_or_default();
        let all: u64 = routes.iter().map(|r| r.share).sum();
        let turns = if divided || routes.len() == 1 { u64::MAX } else { plan.chunks };
        let mut parts = std::mem::take(&mut self.parts);
        for (route, Route { from: out, to: into, share }) in routes.iter().copied().enumerate() {
            let part = if turns > MOST_TURNS {
                share as f64 / all as f64
            } else {
                let rows = self.rows;
                let takes = |chunk: &u64| in_turn(routes, turn + chunk * rows) == route;
                (0..turns).filter(takes).count() as f64 / turns as f64
            };
            if part > 0.0 {
                parts.push((out, into, part));
            }
        }
        for (out, into, part) in parts.drain(..) {
            let messages = if divided { 1.0 } else { part };
            let relays = [plan.relay(from, out), plan.relay(to, into)];
            let bytes = bytes * part;
            if let Some(relay) = relays[0] {
                self.one(flow(from, relay, Path::Memory, bytes, messages));
            }
            if let Some(relay) = relays[1] {
                self.one(flow(relay, to, Path::Memory, bytes, messages));
            }
            let path = Path::Nics { from: out, to: into };
            let (from, to) = (relays[0].unwrap_or(from), relays[1].unwrap_or(to));
            self.one(flow(from, to, path, bytes, messages));
        }
        self.parts = parts;
    }

    /// Whether messages are divided among several routes.
    fn divides(&self, at: usize, bytes: f64) -> bool {
        let routes = self.routes[at].as_ref().map_or(0, Vec::len);
        let message = bytes / self.plan.chunks as f64;
        message / routes as f64 >= self.plan.choice.divide_bytes as f64
    }

    /// Whether all messages from one host to another take their routes in the same parts, whichever
    /// they are.
    pub fn are_alike(&mut self, channel: usize, a: usize, b: usize, bytes: f64) -> bool {
        let at = self.routes_at(channel, a, b);
        let one = self.routes[at].as_ref().is_some_and(|routes| routes.len() == 1);
        (one || self.divides(at, bytes) || self.plan.chunks > MOST_TURNS) && !self.relays
    }

    /// Between leaders of different hosts whose messages are alike ([`Self::are_alike`]): the same
    /// from each sender to each receiver, at so many levels from one on.
    pub fn between_all(
        &mut self,
        (At { phase, level, set, is_leaf }, levels): (At, usize),
        channel: usize,
        (senders, receivers, same_hosts): (&[usize], &[usize], bool),
        bytes: f64,
    ) {
        let plan = self.plan;
        let Some(from) = senders.first().copied() else { return };
        let Some(to) = receivers.get(usize::from(same_hosts)).copied() else { return };
        let (a, b) = (plan.topology.host_of(from), plan.topology.host_of(to));
        let at = self.routes_at(channel, a, b);
        let divided = self.divides(at, bytes);
        let routes = self.routes[at].as_deref().unwrap_or_default();
        let all: u64 = routes.iter().map(|r| r.share).sum();
        for Route { from: out, to: into, share } in routes.iter().copied() {
            let part = share as f64 / all as f64;
            if part > 0.0 {
                let messages = if divided { 1.0 } else { part };
                let path = Path::Nics { from: out, to: into };
                let bytes = bytes * part;
                let flow = Flow { phase, level, set, is_leaf, from, to, path, bytes, messages };
                (self.each)(Bundle { flow, levels, senders, receivers, same_hosts });
            }
        }
    }
}
