//! An executor in memory that takes every liberty that a schedule leaves.
//!
//! Steps begin and end separately, and many are under way at once. A step that writes makes its
//! target unreadable when it begins; what a step reads, it reads partly when it begins and partly
//! when it ends. So steps that should have waited for each other show as wrong results, in some
//! orders; [`super::check`] finds them in all.

use std::collections::{HashMap, VecDeque};

use super::{Flaw, Traffic};
use crate::{divide, Buffer, Lane, ReduceOp, Schedule, Slice, Topology, Work};

/// Runs a schedule once, in an order that follows from a seed.
pub struct Machine<'s> {
    schedule: &'s Schedule,
    topology: &'s Topology,
    ranks: Vec<Memory>,
    /// By rank and step.
    states: Vec<Vec<State>>,
    dependents: Vec<Vec<Vec<u32>>>,
    lanes: Vec<Stream>,
    /// By rank and its number for the lane.
    lane_numbers: Vec<Vec<usize>>,
    /// Steps that are ready or under way.
    open: Vec<(usize, usize)>,
    room: usize,
    random: Random,
    taste: Taste,
    withheld: Vec<bool>,
    traffic: Traffic,
}

/// A rank's buffers: input, output, scratch; the bits of each element.
type Memory = [Vec<u64>; 3];

#[derive(Clone, Debug)]
enum State {
    /// For so many steps.
    Waits(usize),
    /// What it has read so far.
    Begun(Vec<Option<u64>>, Vec<Option<u64>>),
    Done,
}

#[derive(Debug, Default)]
struct Stream {
    /// Messages whose send has begun, and ended; whose receive has begun, and ended.
    sends: [usize; 2],
    receives: [usize; 2],
    /// The numbers, on the lane, of each end's steps.
    turn: HashMap<(usize, usize), usize>,
    waiting: VecDeque<Vec<u64>>,
}

/// What is preferred, so that runs differ in more than the order of equals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taste {
    None,
    ToBegin,
    ToEnd,
    /// These ranks (bits of the rank's number) come last.
    Against(u64),
}

impl<'s> Machine<'s> {
    /// `inputs` has the elements of each rank's input ([`crate::Collective::input_range`]). `room`,
    /// at least 1: messages that a lane holds. The schedule must have matching lanes
    /// ([`super::check`]).
    pub fn new(
        schedule: &'s Schedule,
        topology: &'s Topology,
        inputs: &[Vec<u64>],
        room: usize,
        seed: u64,
    ) -> Machine<'s> {
        let mut random = Random(seed);
        let taste = match random.below(4) {
            0 => Taste::None,
            1 => Taste::ToBegin,
            2 => Taste::ToEnd,
            _ => Taste::Against(random.bits()),
        };
        let mut machine = Machine {
            schedule,
            topology,
            ranks: Vec::new(),
            states: Vec::new(),
            dependents: Vec::new(),
            lanes: Vec::new(),
            lane_numbers: Vec::new(),
            open: Vec::new(),
            room: room.max(1),
            random,
            taste,
            withheld: vec![false; topology.ranks()],
            traffic: Traffic::none(topology),
        };
        let mut numbers: HashMap<Lane, usize> = HashMap::new();
        for (rank, input) in inputs.iter().enumerate() {
            machine.load(rank, input);
            machine.prepare(rank, &mut numbers);
        }
        machine
    }

    /// Fills a rank's memory: the input where it belongs, anything elsewhere.
    fn load(&mut self, rank: usize, input: &[u64]) {
        let collective = &self.schedule.collective;
        let mut fill = |len: u64| (0..len).map(|_| self.random.bits()).collect::<Vec<u64>>();
        let mut memory = [
            fill(collective.buffer_len(rank, Buffer::Input)),
            fill(collective.buffer_len(rank, Buffer::Output)),
            fill(self.schedule.programs[rank].scratch),
        ];
        let range = collective.input_range(rank);
        if !range.is_empty() {
            let into = match collective.operation().is_pairwise() {
                true => Some(Slice { buffer: Buffer::Input, start: 0, len: range.end }),
                false => collective.input(rank, &range),
            };
            let into = into.expect("a rank has its input");
            memory[into.buffer as usize][into.start as usize..][..into.len as usize]
                .copy_from_slice(input);
        }
        self.ranks.push(memory);
    }

    fn prepare(&mut self, rank: usize, numbers: &mut HashMap<Lane, usize>) {
        let program = &self.schedule.programs[rank];
        let lanes = &mut self.lanes;
        let of_rank: Vec<usize> = program
            .lanes
            .iter()
            .map(|lane| {
                *numbers.entry(*lane).or_insert_with(|| {
                    lanes.push(Stream::default());
                    lanes.len() - 1
                })
            })
            .collect();
        let mut dependents = vec![Vec::new(); program.steps.len()];
        let mut ends: HashMap<u32, usize> = HashMap::new();
        let mut states = Vec::new();
        for (number, step) in program.steps.iter().enumerate() {
            step.after.iter().for_each(|before| dependents[*before as usize].push(number as u32));
            states.push(State::Waits(step.after.len()));
            if step.after.is_empty() {
                self.open.push((rank, number));
            }
            if let Some(lane) = step.work.lane() {
                let turn = ends.entry(lane).or_default();
                self.lanes[of_rank[lane as usize]].turn.insert((rank, number), *turn);
                *turn += 1;
            }
        }
        self.lane_numbers.push(of_rank);
        self.dependents.push(dependents);
        self.states.push(states);
    }

    /// A rank that never begins.
    pub fn withhold(&mut self, rank: usize) {
        self.withheld[rank] = true;
    }

    /// Runs until all is done, or nothing goes on.
    pub fn run(&mut self) -> Result<(), Flaw> {
        while !self.open.is_empty() {
            let Some(at) = self.choose() else {
                let (rank, step) = self.open[0];
                return Err(Flaw::Stuck { rank, step, in_order: false });
            };
            let (rank, step) = self.open[at];
            if matches!(self.states[rank][step], State::Waits(_)) {
                self.begin(rank, step);
            } else {
                self.end(rank, step);
                self.open.swap_remove(at);
                for next in self.dependents[rank][step].clone() {
                    let next = next as usize;
                    if let State::Waits(left) = &mut self.states[rank][next] {
                        *left -= 1;
                        if *left == 0 {
                            self.open.push((rank, next));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a rank has done all its steps.
    pub fn is_done(&self, rank: usize) -> bool {
        self.states[rank].iter().all(|s| matches!(s, State::Done))
    }

    /// What has gone over NICs and through memory.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// The elements of a rank's output.
    pub fn output(&self, rank: usize) -> Vec<u64> {
        let collective = &self.schedule.collective;
        let range = collective.output_range(rank);
        if range.is_empty() {
            return Vec::new();
        }
        let slice = match collective.operation().is_pairwise() {
            true => Slice { buffer: Buffer::Output, start: 0, len: range.end },
            false => collective.output(rank, &range).expect("a rank has its output"),
        };
        let memory = &self.ranks[rank][slice.buffer as usize];
        memory[slice.start as usize..][..slice.len as usize].to_vec()
    }

    /// Compares the outputs of all ranks.
    pub fn compare(&self, expected: &[Vec<u64>]) -> Result<(), Flaw> {
        for (rank, want) in expected.iter().enumerate() {
            let got = self.output(rank);
            assert_eq!(got.len(), want.len());
            if let Some(element) = (0..got.len()).find(|e| got[*e] != want[*e]) {
                return Err(Flaw::Wrong { rank, element, got: got[element], want: want[element] });
            }
        }
        Ok(())
    }

    /// Some open step that may go on, by its position.
    fn choose(&mut self) -> Option<usize> {
        let count = self.open.len();
        for _ in 0..8 {
            let at = self.random.below(count as u64) as usize;
            if self.is_preferred(at) && self.may_go_on(at) {
                return Some(at);
            }
        }
        let from = self.random.below(count as u64) as usize;
        let mut any = (0..count).map(|k| (from + k) % count).filter(|at| self.may_go_on(*at));
        match self.taste {
            // a rank that others do not wait for stands still until they have done all they can
            Taste::Against(_) => {
                let first = any.next();
                first
                    .filter(|at| self.is_preferred(*at))
                    .or_else(|| any.find(|at| self.is_preferred(*at)))
                    .or(first)
            }
            _ => any.next(),
        }
    }

    fn is_preferred(&self, at: usize) -> bool {
        let (rank, step) = self.open[at];
        let begins = matches!(self.states[rank][step], State::Waits(_));
        match self.taste {
            Taste::None => true,
            Taste::ToBegin => begins,
            Taste::ToEnd => !begins,
            Taste::Against(ranks) => ranks >> (rank % 64) & 1 == 0,
        }
    }

    fn may_go_on(&self, at: usize) -> bool {
        let (rank, step) = self.open[at];
        let work = &self.schedule.programs[rank].steps[step].work;
        if self.withheld[rank] {
            return false;
        }
        let Some(lane) = work.lane() else { return true };
        let stream = &self.lanes[self.lane_numbers[rank][lane as usize]];
        let turn = stream.turn[&(rank, step)];
        let sends = matches!(work, Work::Send { .. });
        let [begun, ended] = if sends { stream.sends } else { stream.receives };
        match self.states[rank][step] {
            State::Waits(_) if sends => turn == begun && begun - stream.receives[1] < self.room,
            State::Waits(_) => turn == begun,
            _ if sends => turn == ended,
            _ => turn == ended && !stream.waiting.is_empty(),
        }
    }

    fn begin(&mut self, rank: usize, step: usize) {
        let work = self.schedule.programs[rank].steps[step].work;
        if let Some(lane) = work.lane() {
            let stream = &mut self.lanes[self.lane_numbers[rank][lane as usize]];
            let count = if matches!(work, Work::Send { .. }) {
                &mut stream.sends
            } else {
                &mut stream.receives
            };
            count[0] += 1;
        }
        let [a, b] = work.reads().map(|slice| {
            let Some(slice) = slice else { return Vec::new() };
            let memory = &self.ranks[rank][slice.buffer as usize][slice.start as usize..]
                [..slice.len as usize];
            memory.iter().map(|bits| (self.random.bits() & 1 == 0).then_some(*bits)).collect()
        });
        self.states[rank][step] = State::Begun(a, b);
        if let Some(into) = work.writes().filter(|into| !work.reads().contains(&Some(*into))) {
            let memory = &mut self.ranks[rank][into.buffer as usize];
            memory[into.start as usize..][..into.len as usize]
                .iter_mut()
                .for_each(|m| *m = self.random.bits());
        }
    }

    fn end(&mut self, rank: usize, step: usize) {
        let program = &self.schedule.programs[rank];
        let work = program.steps[step].work;
        let State::Begun(a, b) = std::mem::replace(&mut self.states[rank][step], State::Done)
        else {
            return;
        };
        let rest = |slice: Option<Slice>, read: Vec<Option<u64>>| -> Vec<u64> {
            let Some(slice) = slice else { return Vec::new() };
            let memory = &self.ranks[rank][slice.buffer as usize][slice.start as usize..]
                [..slice.len as usize];
            read.iter().zip(memory).map(|(early, late)| early.unwrap_or(*late)).collect()
        };
        let [first, second] = work.reads();
        let (a, b) = (rest(first, a), rest(second, b));
        let stream =
            work.lane().map(|lane| &mut self.lanes[self.lane_numbers[rank][lane as usize]]);
        let collective = &self.schedule.collective;
        let (data, op) =
            (collective.data(), collective.operation().reduce_op().unwrap_or(ReduceOp::Sum));
        let both =
            |a: &[u64], b: &[u64]| a.iter().zip(b).map(|(a, b)| op.combine(data, *a, *b)).collect();
        let result: Vec<u64> = match work {
            Work::Send { lane, .. } => {
                self.traffic.add(
                    self.topology,
                    &program.lanes[lane as usize],
                    a.len() as u64 * data.bytes(),
                );
                if let Some(stream) = stream {
                    stream.sends[1] += 1;
                    stream.waiting.push_back(a);
                }
                return;
            }
            Work::Recv { .. } | Work::RecvReduce { .. } => {
                let message = stream.and_then(|s| {
                    s.receives[1] += 1;
                    s.waiting.pop_front()
                });
                let message = message.expect("it may go on");
                if a.is_empty() {
                    message
                } else {
                    both(&a, &message)
                }
            }
            Work::Copy { .. } => a,
            Work::Reduce { .. } => both(&a, &b),
            Work::Divide { by, .. } => a.iter().map(|v| divide(data, *v, by)).collect(),
        };
        if let Some(into) = work.writes() {
            self.ranks[rank][into.buffer as usize][into.start as usize..][..into.len as usize]
                .copy_from_slice(&result);
        }
    }
}

/// A small generator (splitmix64), the same on every machine.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }
}
