//! From a plan to programs.
//!
//! Programs are generated host by host: what a rank sends and receives follows from the plan alone,
//! and only proxies need to know of the other ranks of their host. Each list is in the order of
//! *turns*: in a turn a rank first sends and then receives, and it sends at most one message on any
//! lane. So a rank that does one step at a time in the order of its list waits for nobody in vain.

mod join;
mod pairs;
mod trees;

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use crate::binding::Route;
use crate::builder::Builder;
use crate::split::{grain, split};
use crate::{Lane, Operation, Path, Plan, Program, Schedule, Slice, Stage, Work};

/// Chunks of a shard differ by fewer elements.
const ROUNDING: u64 = 256;

impl Plan {
    /// The program of one rank.
    pub fn program(&self, rank: usize) -> Program {
        program(self, rank)
    }

    /// The programs of all ranks.
    pub fn schedule(&self) -> Schedule {
        Schedule { collective: self.collective.clone(), programs: programs(self) }
    }
}

/// The program of one rank.
fn program(plan: &Plan, rank: usize) -> Program {
    let host = plan.topology.host_of(rank);
    let ranks =
        if plan.relays_on(host) { plan.topology.members(host).to_vec() } else { vec![rank] };
    let mut emitter = Emitter::new(plan, ranks);
    emitter.run();
    emitter.finish().remove(&rank).unwrap_or_default()
}

/// The programs of all ranks.
fn programs(plan: &Plan) -> Vec<Program> {
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
            Take::Reduce { with, into } => {
                Take::Reduce { with: with.part(start, len), into: into.part(start, len) }
            }
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
    set: usize,
    /// Elements. Both ends divide them among routes alike.
    len: u64,
    /// Counts messages of the flow's channel; where a message takes one of several routes, the next
    /// takes another.
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

    /// The pieces of a flow's message.
    fn pieces(&mut self, flow: &Flow) -> Vec<Piece> {
        let plan = self.plan;
        let (a, b) = (plan.topology.host_of(flow.from), plan.topology.host_of(flow.to));
        if a == b {
            return vec![Piece {
                part: 0..flow.len,
                route: 0,
                path: Path::Memory,
                relays: [None, None],
            }];
        }
        let kinds = (flow.channel, plan.binding.kind(a), plan.binding.kind(b));
        let routes = self.routes.entry(kinds).or_insert_with(|| {
            plan.binding
                .routes(flow.channel, a, b)
                .expect("the plan has checked that there is a path")
                .into()
        });
        let on = |route: usize, part: Range<u64>| {
            let Route { from, to, .. } = routes[route];
            let relays = [plan.relay(flow.from, from), plan.relay(flow.to, to)];
            Piece { part, route, path: Path::Nics { from, to }, relays }
        };
        let element = plan.collective.data().bytes();
        if routes.len() == 1
            || flow.len * element / (routes.len() as u64) < plan.choice.divide_bytes
        {
            return vec![on(in_turn(routes, flow.turn), 0..flow.len)];
        }
        let shares: Vec<u64> = routes.iter().map(|r| r.share).collect();
        let bounds = split(flow.len, &shares, grain(flow.len, routes.len() as u64, element));
        let pieces = (0..routes.len()).map(|route| on(route, bounds[route]..bounds[route + 1]));
        pieces.filter(|piece| !piece.part.is_empty()).collect()
    }

    /// The sender's side of a message.
    fn send(&mut self, flow: &Flow, data: Slice) {
        debug_assert_eq!(flow.len, data.len);
        for piece in self.pieces(flow) {
            let (first, network, _) = flow.lanes(&piece);
            let mut data = data.part(piece.part.start, piece.part.end - piece.part.start);
            if let Some(lane) = first {
                self.step_send(lane, data);
                data = self.step_forward(lane, data.len);
            }
            self.step_send(network, data);
        }
    }

    /// The receiver's side of a message.
    fn recv(&mut self, flow: &Flow, take: Take) {
        for piece in self.pieces(flow) {
            let (_, network, last) = flow.lanes(&piece);
            let len = piece.part.end - piece.part.start;
            if let Some(last) = last {
                let data = self.step_forward(network, len);
                self.step_send(last, data);
            }
            let lane = last.unwrap_or(network);
            let builder = self.builder(flow.to);
            let lane = builder.lane(lane);
            builder.step(match take.part(piece.part.start, len) {
                Take::Into(into) => Work::Recv { lane, into },
                Take::Reduce { with, into } => Work::RecvReduce { lane, with, into },
            });
        }
    }

    fn step_send(&mut self, lane: Lane, data: Slice) {
        let builder = self.builder(lane.from);
        let lane = builder.lane(lane);
        builder.step(Work::Send { lane, data });
    }

    /// A relay takes what it is to forward, and says where it has it.
    fn step_forward(&mut self, lane: Lane, len: u64) -> Slice {
        let number = self.builder(lane.to).lane(lane);
        let into = self.scratch(lane.to, (number as usize, Purpose::Forward), len);
        self.builder(lane.to).step(Work::Recv { lane: number, into });
        into
    }

    /// Scratch memory of a rank, until it is needed for the same purpose some chunks later.
    fn scratch(&mut self, rank: usize, (number, purpose): (usize, Purpose), len: u64) -> Slice {
        // the next chunks may be longer by rounding
        let room = if self.plan.chunks() > 1 { len + ROUNDING } else { len };
        self.builder(rank).scratch((number, purpose as u8), room, len)
    }
}

/// A part of a message, and its way.
struct Piece {
    part: Range<u64>,
    route: usize,
    path: Path,
    /// Ranks that forward it, at the sender's and at the receiver's host.
    relays: [Option<usize>; 2],
}

impl Flow {
    /// The lanes that a piece takes one after the other: to the relay, between hosts (or within
    /// one), from the relay.
    fn lanes(&self, piece: &Piece) -> (Option<Lane>, Lane, Option<Lane>) {
        let lane = |from, to, path| Lane {
            from,
            to,
            path,
            stage: self.stage,
            channel: self.channel,
            set: self.set,
            flow: (self.from, self.to),
            route: piece.route,
        };
        let [first, last] = piece.relays;
        (
            first.map(|relay| lane(self.from, relay, Path::Memory)),
            lane(first.unwrap_or(self.from), last.unwrap_or(self.to), piece.path),
            last.map(|relay| lane(relay, self.to, Path::Memory)),
        )
    }
}

/// What scratch memory is for.
#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// A leader's sum of a shard.
    Sum,
    /// Its sum of what comes before its own contribution.
    Before,
    /// What a relay forwards on a lane.
    Forward,
    /// What outsiders add to a shard.
    Join,
}

/// The route that message `turn` takes, where each takes one: all in proportion to their shares,
/// and evenly mixed.
pub(crate) fn in_turn(routes: &[Route], turn: u64) -> usize {
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
