//! From a plan to programs.
//!
//! Programs are generated host by host: what a rank sends and receives follows from the plan alone, and only proxies need to know of
//! the other ranks of their host. Each list is in the order of *turns*: in a turn a rank first sends and then receives, and it sends
//! at most one message on any lane. So a rank that does one step at a time in the order of its list waits for nobody in vain.

mod pairs;
mod trees;

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use crate::binding::Route;
use crate::builder::Builder;
use crate::split::split;
use crate::{Lane, Operation, Path, Plan, Program, Slice, Stage, Work};

/// The program of one rank.
pub(crate) fn program(plan: &Plan, rank: usize) -> Program {
    let mut emitter = Emitter::new(plan, vec![rank]);
    emitter.run();
    emitter.finish().remove(&rank).unwrap_or_default()
}

/// The programs of all ranks.
pub(crate) fn programs(plan: &Plan) -> Vec<Program> {
    let mut all = vec![Program::default(); plan.topology.ranks()];
    for host in 0..plan.topology.hosts().len() {
        let mut emitter = Emitter::new(plan, plan.topology.members(host).to_vec());
        emitter.run();
        emitter.finish().into_iter().for_each(|(rank, program)| all[rank] = program);
    }
    all
}

/// What becomes of a message.
#[derive(Clone, Copy, Debug)]
enum Take {
    Into(Slice),
    Reduce { with: Slice, into: Slice },
}

impl Take {
    fn part(&self, start: u64, len: u64) -> Take {
        match self {
            Take::Into(into) => Take::Into(into.part(start, len)),
            Take::Reduce { with, into } => Take::Reduce { with: with.part(start, len), into: into.part(start, len) },
        }
    }
}

/// What a message is part of.
#[derive(Clone, Debug)]
struct Flow {
    from: usize,
    to: usize,
    stage: Stage,
    channel: usize,
    /// Elements. Both ends divide them among routes alike.
    len: u64,
    /// Counts messages of the flow's channel; where a message takes one of several routes, the next takes another.
    turn: u64,
}

/// Generates programs for ranks of one host.
struct Emitter<'p> {
    plan: &'p Plan,
    /// Ranks whose programs are made.
    ranks: Vec<usize>,
    builders: HashMap<usize, Builder>,
    routes: HashMap<(usize, usize, usize), Rc<[Route]>>,
}

impl<'p> Emitter<'p> {
    fn new(plan: &'p Plan, ranks: Vec<usize>) -> Emitter<'p> {
        let reserved = u64::from(*plan.collective.operation() == Operation::Barrier);
        let builders = ranks.iter().map(|rank| (*rank, Builder::new(reserved))).collect();
        Emitter { plan, ranks, builders, routes: HashMap::new() }
    }

    fn run(&mut self) {
        if self.plan.collective.operation().is_pairwise() {
            pairs::emit(self);
        } else {
            trees::emit(self);
        }
    }

    fn finish(self) -> HashMap<usize, Program> {
        self.builders.into_iter().map(|(rank, builder)| (rank, builder.finish())).collect()
    }

    fn builder(&mut self, rank: usize) -> &mut Builder {
        self.builders.get_mut(&rank).expect("a rank whose program is made")
    }

    fn begin_chunk(&mut self, chunk: u64) {
        self.builders.values_mut().for_each(|b| b.begin_chunk(chunk));
    }

    /// The pieces of a flow's message: which part of it takes which lane.
    fn pieces(&mut self, flow: &Flow) -> Vec<(Lane, Range<u64>)> {
        let topology = &self.plan.topology;
        let (a, b) = (topology.host_of(flow.from), topology.host_of(flow.to));
        let lane = |path, route| Lane {
            from: flow.from,
            to: flow.to,
            path,
            stage: flow.stage,
            channel: flow.channel,
            flow: (flow.from, flow.to),
            route,
        };
        if a == b {
            return vec![(lane(Path::Memory, 0), 0..flow.len)];
        }
        let binding = &self.plan.binding;
        let kinds = (flow.channel, binding.kind(a), binding.kind(b));
        let routes = self.routes.entry(kinds).or_insert_with(|| {
            binding.routes(flow.channel, a, b).expect("the plan has checked that there is a path").into()
        });
        let on = |route: usize| lane(Path::Nics { from: routes[route].from, to: routes[route].to }, route);
        let bytes = flow.len * self.plan.collective.data().bytes();
        if routes.len() == 1 || bytes / (routes.len() as u64) < self.plan.choice.divide_bytes {
            return vec![(on(in_turn(routes, flow.turn)), 0..flow.len)];
        }
        let shares: Vec<u64> = routes.iter().map(|r| r.share).collect();
        let grain = crate::split::grain(flow.len, routes.len() as u64, self.plan.collective.data().bytes());
        let bounds = split(flow.len, &shares, grain);
        let pieces = (0..routes.len()).map(|route| (on(route), bounds[route]..bounds[route + 1]));
        pieces.filter(|(_, part)| !part.is_empty()).collect()
    }

    /// The sender's side of a message.
    fn send(&mut self, flow: &Flow, data: Slice) {
        debug_assert_eq!(flow.len, data.len);
        for (lane, part) in self.pieces(flow) {
            let builder = self.builder(flow.from);
            let lane = builder.lane(lane);
            builder.step(Work::Send { lane, data: data.part(part.start, part.end - part.start) });
        }
    }

    /// The receiver's side of a message.
    fn recv(&mut self, flow: &Flow, take: Take) {
        for (lane, part) in self.pieces(flow) {
            let builder = self.builder(flow.to);
            let lane = builder.lane(lane);
            builder.step(match take.part(part.start, part.end - part.start) {
                Take::Into(into) => Work::Recv { lane, into },
                Take::Reduce { with, into } => Work::RecvReduce { lane, with, into },
            });
        }
    }
}

/// The route that message `turn` takes, where each takes one: all in proportion to their shares, and evenly mixed.
fn in_turn(routes: &[Route], turn: u64) -> usize {
    let all: u64 = routes.iter().map(|r| r.share).sum();
    // multiples of the golden ratio modulo 1 fill the interval evenly
    let fraction = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let at = ((u128::from(fraction) * u128::from(all)) >> 64) as u64;
    let mut before = 0;
    routes
        .iter()
        .position(|r| {
            before += r.share;
            at < before
        })
        .unwrap_or(0)
}
