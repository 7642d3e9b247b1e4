//! Operations on a vector: each shard is gathered on its hosts, reduced along a tree, spread along
//! a tree, scattered on its hosts; or what of that the operation needs.
//!
//! | operation | gather | reduce | spread | scatter |
//! | --- | --- | --- | --- | --- |
//! | AllReduce, Barrier | to leaders | to the owner's leader | to all leaders | to all |
//! | ReduceScatter, Reduce | to leaders | to the owner's leader | | to the one rank |
//! | AllGather, Broadcast | from the one rank to its leader | | to all leaders | to all |
//!
//! A leader keeps what it has reduced of a chunk in its output where that has the chunk, else in
//! scratch memory.

use std::collections::HashMap;
use std::ops::Range;

use super::{join, Emitter, Flow, Purpose, Take};
use crate::{Folding, Operation, ReduceOp, Shape, Shard, Slice, Stage, Work};

/// A message of a leader, at either of its ends, in the order of turns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    level: usize,
    /// Where a level has several messages for one lane, they come one after the other.
    row: usize,
    /// Sends come first.
    receives: bool,
    /// So that not all ranks begin with the same peer.
    stagger: usize,
    shard: usize,
    /// The rank, by its position among those that are made.
    at: usize,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    SendTo(usize),
    RecvFrom(usize),
    /// Receive from all other nodes and reduce in the order of nodes.
    Fold,
}

/// One of the contributions to a reduction.
#[derive(Clone, Copy, Debug)]
enum Part {
    Own(Slice),
    From(usize),
}

/// Which stages there are, and who has what before and after.
pub(super) struct Stages {
    reduces: bool,
    to_all: bool,
    /// The average: how many ranks the sum is divided by.
    pub(super) divide_by: Option<u32>,
}

pub(super) fn emit(emitter: &mut Emitter) {
    let mut run = Trees::new(emitter);
    for chunk in 0..run.emitter.plan.chunks {
        run.begin(chunk);
        if run.stages.reduces {
            run.gather();
            run.reduce();
        } else {
            run.fetch();
        }
        if run.stages.to_all {
            run.spread();
            join::emit(&mut run);
        }
        run.scatter();
    }
}

pub(super) struct Trees<'e, 'p> {
    pub(super) emitter: &'e mut Emitter<'p>,
    pub(super) stages: Stages,
    reduce: Vec<Event>,
    spread: Vec<Event>,
    /// Where shards of one row begin and end.
    pub(super) rows: Vec<Range<usize>>,
    /// What goes through the memory of a host at once, in turns: shards; or all shards of a channel
    /// together, where they lie one behind the other. Those have numbers behind the shards'.
    turns: Vec<Range<usize>>,
    together: Vec<Vec<usize>>,
    /// The present chunk, and its part of each shard, and of what goes together.
    chunk: u64,
    ranges: Vec<Range<u64>>,
    /// `[rank][shard]`: where the rank (by its position among those that are made) has the chunk,
    /// if it has it.
    pub(super) held: Vec<Vec<Option<Slice>>>,
}

impl<'e, 'p> Trees<'e, 'p> {
    fn new(emitter: &'e mut Emitter<'p>) -> Trees<'e, 'p> {
        let plan = emitter.plan;
        let operation = plan.collective.operation();
        let ranks = plan.topology.ranks();
        let average = operation.reduce_op() == Some(ReduceOp::Avg) && ranks > 1;
        let stages = Stages {
            reduces: operation.reduce_op().is_some(),
            to_all: !matches!(
                operation,
                Operation::ReduceScatter { .. } | Operation::Reduce { .. }
            ),
            divide_by: average.then_some(ranks as u32),
        };
        let mut rows: Vec<Range<usize>> = Vec::new();
        for (at, shard) in plan.shards.iter().enumerate() {
            match rows.last_mut() {
                Some(row) if plan.shards[row.start].row == shard.row => row.end = at + 1,
                _ => rows.push(at..at + 1),
            }
        }
        let (mut reduce, mut spread) = (Vec::new(), Vec::new());
        // shards with the same owner and channel use the same lanes
        let mut seen: HashMap<(usize, usize), usize> = HashMap::new();
        for (number, shard) in plan.shards.iter().enumerate() {
            let nth = seen.entry((shard.owner, shard.channel)).or_default();
            for at in 0..emitter.ranks.len() {
                events(emitter, at, (number, *nth), &mut reduce, &mut spread);
            }
            *nth += 1;
        }
        reduce.sort_unstable();
        spread.sort_unstable();
        let held = vec![vec![None; plan.shards.len()]; emitter.ranks.len()];
        let mut together = Vec::new();
        let mut turns = rows.clone();
        if plan.is_contiguous() {
            together = vec![Vec::new(); plan.channels()];
            plan.shards
                .iter()
                .enumerate()
                .for_each(|(number, shard)| together[shard.channel].push(number));
            together.retain(|shards| !shards.is_empty());
            let first = plan.shards.len();
            turns.clear();
            turns.push(first..first + together.len());
        }
        Trees {
            emitter,
            stages,
            reduce,
            spread,
            rows,
            turns,
            together,
            chunk: 0,
            ranges: Vec::new(),
            held,
        }
    }

    fn begin(&mut self, chunk: u64) {
        let plan = self.emitter.plan;
        self.chunk = chunk;
        self.ranges = plan.shards.iter().map(|s| plan.chunk(s, chunk)).collect();
        for shards in &self.together {
            self.ranges
                .push(self.ranges[shards[0]].start..self.ranges[shards[shards.len() - 1]].end);
        }
        self.held.iter_mut().for_each(|of_rank| of_rank.fill(None));
        self.emitter.begin_chunk(chunk);
    }

    /// A shard; of shards that go together, the first.
    pub(super) fn shard(&self, shard: usize) -> &'p Shard {
        let shards = &self.emitter.plan.shards;
        let first = shard.checked_sub(shards.len()).map_or(shard, |group| self.together[group][0]);
        &shards[first]
    }

    /// The shards of something that goes through memory at once.
    fn shards(&self, item: usize) -> Vec<usize> {
        let group = item.checked_sub(self.emitter.plan.shards.len());
        group.map_or_else(|| vec![item], |group| self.together[group].clone())
    }

    pub(super) fn flow(&self, shard: usize, from: usize, to: usize, stage: Stage) -> Flow {
        let Shard { channel, row, set, .. } = *self.shard(shard);
        let range = &self.ranges[shard];
        let plan = self.emitter.plan;
        let turn = plan.turn(row, from, to) + self.chunk * self.rows.len() as u64;
        Flow { from, to, stage, channel, set, len: range.end - range.start, turn }
    }

    /// The rank that speaks for the node of `rank` on the shard's channel.
    pub(super) fn leader(&self, shard: usize, rank: usize) -> usize {
        let plan = self.emitter.plan;
        plan.leader(self.shard(shard).channel, plan.node_of[rank])
    }

    fn input(&self, shard: usize, rank: usize) -> Option<Slice> {
        self.emitter.plan.collective.input(rank, &self.ranges[shard])
    }

    pub(super) fn output(&self, shard: usize, rank: usize) -> Option<Slice> {
        self.emitter.plan.collective.output(rank, &self.ranges[shard])
    }

    pub(super) fn scratch(&mut self, shard: usize, rank: usize, purpose: Purpose) -> Slice {
        let range = &self.ranges[shard];
        let len = range.end - range.start;
        self.emitter.scratch(rank, (shard, purpose), len)
    }

    /// Calls `each` with every shard of the row that is not empty in this chunk, and every rank
    /// that is made, by position and number.
    pub(super) fn each(
        &mut self,
        row: &Range<usize>,
        mut each: impl FnMut(&mut Self, usize, usize, usize),
    ) {
        for shard in row.clone() {
            if self.ranges[shard].is_empty() {
                continue;
            }
            for at in 0..self.emitter.ranks.len() {
                let rank = self.emitter.ranks[at];
                each(self, shard, at, rank);
            }
        }
    }

    /// Within hosts: the contributions of all ranks to their leaders, who reduce them.
    fn gather(&mut self) {
        for turn in self.turns.clone() {
            self.each(&turn, |s, item, _, rank| {
                let leader = s.leader(item, rank);
                if leader != rank {
                    let data = s.input(item, rank).expect("all ranks contribute");
                    s.emitter.send(&s.flow(item, rank, leader, Stage::Gather), data);
                }
            });
            self.each(&turn, |s, item, at, rank| {
                if s.leader(item, rank) == rank {
                    let plan = s.emitter.plan;
                    let own = s.input(item, rank).expect("all ranks contribute");
                    let mates = &plan.nodes[plan.node_of[rank]];
                    let parts = mates
                        .iter()
                        .map(|m| if *m == rank { Part::Own(own) } else { Part::From(*m) })
                        .collect();
                    let into = s.place(item, rank, mates.len() > 1);
                    let sum = s.fold(item, rank, Stage::Gather, parts, into);
                    let first = s.ranges[item].start;
                    for shard in s.shards(item) {
                        let range = s.ranges[shard].clone();
                        s.held[at][shard] =
                            Some(sum.part(range.start - first, range.end - range.start));
                    }
                }
            });
        }
    }

    /// Where a leader reduces.
    pub(super) fn place(&mut self, shard: usize, rank: usize, several: bool) -> Slice {
        // what is sent to everyone had better not be where the result goes
        let apart = self.emitter.plan.choice.shape == Shape::OneShot && several;
        match self.output(shard, rank) {
            Some(output) if !apart => output,
            _ => self.scratch(shard, rank, Purpose::Sum),
        }
    }

    /// Within the host of the one rank that has the shard: to its leader.
    fn fetch(&mut self) {
        for row in self.rows.clone() {
            self.each(&row, |s, shard, at, rank| {
                if s.shard(shard).rank == Some(rank) {
                    let data = s.input(shard, rank).expect("its own shard");
                    let leader = s.leader(shard, rank);
                    if leader != rank {
                        s.emitter.send(&s.flow(shard, rank, leader, Stage::Gather), data);
                    }
                    s.held[at][shard] = Some(data);
                }
            });
            self.each(&row, |s, shard, at, rank| {
                let source = s.shard(shard).rank.expect("shards of a rank");
                if source != rank && s.leader(shard, source) == rank {
                    let into = s.output(shard, rank).expect("all ranks get it");
                    s.emitter.recv(&s.flow(shard, source, rank, Stage::Gather), Take::Into(into));
                    s.held[at][shard] = Some(into);
                }
            });
        }
    }

    /// Between nodes: to the owner, where it is complete.
    fn reduce(&mut self) {
        let events = std::mem::take(&mut self.reduce);
        self.follow(&events, Stage::Reduce);
        self.reduce = events;
        let Some(by) = self.stages.divide_by else { return };
        let one_shot = self.emitter.plan.choice.shape == Shape::OneShot;
        self.each(&(0..self.emitter.plan.shards.len()), |s, shard, at, rank| {
            let node = s.emitter.plan.node_of[rank];
            let outsiders = &s.emitter.plan.outsiders[s.shard(shard).forest];
            let complete = (one_shot || s.shard(shard).owner == node) && outsiders.is_empty();
            if s.leader(shard, rank) == rank && complete {
                let data = s.held[at][shard].expect("it is complete");
                s.emitter.builder(rank).step(Work::Divide { data, by });
            }
        });
    }

    /// Between nodes: from the owner.
    fn spread(&mut self) {
        let events = std::mem::take(&mut self.spread);
        self.follow(&events, Stage::Spread);
        self.spread = events;
    }

    fn follow(&mut self, events: &[Event], stage: Stage) {
        for event in events {
            let Event { shard, at, .. } = *event;
            if self.ranges[shard].is_empty() {
                continue;
            }
            let plan = self.emitter.plan;
            let leader = |node| plan.leader(plan.shards[shard].channel, node);
            let rank = self.emitter.ranks[at];
            let held = self.held[at][shard];
            match event.what {
                What::SendTo(node) => {
                    let flow = self.flow(shard, rank, leader(node), stage);
                    self.emitter.send(&flow, held.expect("it has come"));
                }
                What::RecvFrom(node) if stage == Stage::Reduce => {
                    let flow = self.flow(shard, leader(node), rank, stage);
                    let with = held.expect("its own contribution");
                    // its input stays as it is
                    let into = if self.is_input(shard, rank, with) {
                        self.place(shard, rank, false)
                    } else {
                        with
                    };
                    self.emitter.recv(&flow, Take::Reduce { with, into });
                    self.held[at][shard] = Some(into);
                }
                What::RecvFrom(node) => {
                    let flow = self.flow(shard, leader(node), rank, stage);
                    let into = self.output(shard, rank).expect("all ranks get it");
                    self.emitter.recv(&flow, Take::Into(into));
                    self.held[at][shard] = Some(into);
                }
                What::Fold => {
                    let own = held.expect("its own contribution");
                    let node_of = plan.node_of[rank];
                    let part = |node| {
                        if node == node_of {
                            Part::Own(own)
                        } else {
                            Part::From(leader(node))
                        }
                    };
                    let parts = (0..plan.nodes.len()).map(part).collect();
                    let keep =
                        plan.choice.shape == Shape::OneShot || self.is_input(shard, rank, own);
                    let into = if keep { self.place(shard, rank, false) } else { own };
                    self.held[at][shard] = Some(self.fold(shard, rank, stage, parts, into));
                }
            }
        }
    }

    /// Whether a slice is the rank's input, which nothing may be written to.
    pub(super) fn is_input(&self, shard: usize, rank: usize, slice: Slice) -> bool {
        self.input(shard, rank) == Some(slice) && self.output(shard, rank) != Some(slice)
    }

    /// Reduces contributions in their order, and says where the result is.
    fn fold(
        &mut self,
        shard: usize,
        rank: usize,
        stage: Stage,
        mut parts: Vec<Part>,
        into: Slice,
    ) -> Slice {
        let mut own =
            parts.iter().position(|p| matches!(p, Part::Own(_))).expect("its own contribution");
        if own == 1 {
            // the first two may change places, and then nothing need be kept apart
            parts.swap(0, 1);
            own = 0;
        }
        let in_the_way = matches!(parts[own], Part::Own(slice) if slice.meets(&into));
        // until its own contribution is in, the place where that lies is taken
        let before =
            if in_the_way && own > 0 { self.scratch(shard, rank, Purpose::Before) } else { into };
        let mut sum: Option<Slice> = None;
        for (at, part) in parts.iter().enumerate() {
            let target = if at < own { before } else { into };
            let take = match (sum, *part) {
                (None, Part::Own(slice)) => {
                    sum = Some(slice);
                    continue;
                }
                (Some(a), Part::Own(b)) => {
                    self.emitter.builder(rank).step(Work::Reduce { a, b, into });
                    sum = Some(into);
                    continue;
                }
                (None, Part::From(_)) => Take::Into(target),
                (Some(with), Part::From(_)) => Take::Reduce { with, into: target },
            };
            if let Part::From(peer) = *part {
                self.emitter.recv(&self.flow(shard, peer, rank, stage), take);
                sum = Some(target);
            }
        }
        sum.expect("its own contribution")
    }

    /// Within hosts: from leaders to all ranks that are to have it, and on every rank to its place.
    fn scatter(&mut self) {
        let to_all = self.stages.to_all;
        for turn in self.turns.clone() {
            self.each(&turn, |s, item, at, rank| {
                let plan = s.emitter.plan;
                let Shard { rank: one, owner, .. } = *s.shard(item);
                let node = plan.node_of[rank];
                if s.leader(item, rank) != rank || !(to_all || node == owner) {
                    return;
                }
                let held = s.held[at].get(item).copied().flatten();
                let data = held.or(s.output(item, rank)).expect("it has come");
                for mate in &plan.nodes[node] {
                    // the one rank is where it comes from, or the only one that it is for
                    if *mate != rank && (one == Some(*mate)) != to_all {
                        s.emitter.send(&s.flow(item, rank, *mate, Stage::Scatter), data);
                    }
                }
            });
            self.each(&turn, |s, item, at, rank| {
                let Some(into) = s.output(item, rank) else { return };
                let shards = s.shards(item);
                if s.held[at][shards[0]].is_none() {
                    let leader = s.leader(item, rank);
                    return s
                        .emitter
                        .recv(&s.flow(item, leader, rank, Stage::Scatter), Take::Into(into));
                }
                for shard in shards {
                    let (data, into) = (s.held[at][shard], s.output(shard, rank));
                    if let (Some(data), Some(into)) = (data, into) {
                        if data != into {
                            s.emitter.builder(rank).step(Work::Copy { data, into });
                        }
                    }
                }
            });
        }
    }
}

/// The messages of a rank for a shard (its number, and which of those with the same owner and
/// channel it is), if it is a leader of it.
fn events(
    emitter: &Emitter,
    at: usize,
    (shard, nth): (usize, usize),
    reduce: &mut Vec<Event>,
    spread: &mut Vec<Event>,
) {
    let plan = emitter.plan;
    let Shard { channel, row, owner, forest, .. } = plan.shards[shard];
    let node = plan.node_of[emitter.ranks[at]];
    if plan.leader(channel, node) != emitter.ranks[at] {
        return;
    }
    let forest = &plan.forests[forest];
    let nodes = plan.nodes.len();
    let row = if forest.repeats_within_level() { row } else { nth };
    let event = |level, what| {
        let (receives, stagger) = match what {
            What::SendTo(peer) => (false, (peer + nodes - node) % nodes),
            What::RecvFrom(peer) => (true, (node + nodes - peer) % nodes),
            What::Fold => (true, 0),
        };
        Event { level, row, receives, stagger, shard, at, what }
    };
    if plan.choice.shape == Shape::OneShot {
        reduce.extend(
            (0..nodes).filter(|peer| *peer != node).map(|peer| event(0, What::SendTo(peer))),
        );
        reduce.push(event(0, What::Fold));
        return;
    }
    reduce.extend(forest.towards(owner, node).map(|e| event(e.level, What::SendTo(e.node))));
    let before = forest.before(owner, node);
    if plan.choice.folding == Folding::InOrder && node == owner && !before.is_empty() {
        reduce.push(event(0, What::Fold));
    } else {
        reduce.extend(before.iter().map(|e| event(e.level, What::RecvFrom(e.node))));
    }
    spread.extend(forest.source(owner, node).map(|e| event(e.level, What::RecvFrom(e.node))));
    spread.extend(forest.after(owner, node).iter().map(|e| event(e.level, What::SendTo(e.node))));
}
