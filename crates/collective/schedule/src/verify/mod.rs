//! What must hold for every schedule, checked; and an executor in memory.
//!
//! [`check`] looks at the steps alone and proves what is promised in [`crate::schedule`] for every
//! order in which they may be run. [`Machine`] runs them, in random orders and with real numbers;
//! [`expected`] says what must come out; [`Traffic`] what each NIC carries.

mod machine;
mod order;

pub use machine::Machine;
pub use order::{match_messages as messages, Messages};

use thiserror::Error;

use crate::{
    divide, Buffer, Collective, Lane, Operation, Path, Program, ReduceOp, Schedule, Slice,
    Topology, Work,
};

/// What is wrong with a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum Flaw {
    #[error("there are {programs} programs for {ranks} ranks")]
    Programs { programs: usize, ranks: usize },
    #[error("rank {rank}, step {step}: {what}")]
    Step { rank: usize, step: usize, what: &'static str },
    #[error("{lane:?}: {what}")]
    Lane { lane: Lane, what: &'static str },
    #[error("{lane:?}: {sends} sends and {receives} receives")]
    Unmatched { lane: Lane, sends: usize, receives: usize },
    #[error(
        "{lane:?}: message {message} is sent with {sent} elements and received with {received}"
    )]
    Lengths { lane: Lane, message: usize, sent: u64, received: u64 },
    #[error(
        "rank {rank}: steps {first} and {second} touch the same elements, one writes, and neither \
         waits for the other"
    )]
    Race { rank: usize, first: usize, second: usize },
    #[error("it does not end: rank {rank} never comes to step {step}{}", if *.in_order { " if it \
                                                                                          runs its \
                                                                                          steps in \
                                                                                          order" } else { "" })]
    Stuck { rank: usize, step: usize, in_order: bool },
    #[error("rank {rank}: element {element} of the output is {got:#x} and should be {want:#x}")]
    Wrong { rank: usize, element: usize, got: u64, want: u64 },
}

/// Proves that the promises of [`crate::schedule`] hold, in whatever order ready steps are run. It
/// takes memory of the square of a rank's steps, in bits.
pub fn check(schedule: &Schedule, topology: &Topology) -> Result<(), Flaw> {
    let (programs, ranks) = (schedule.programs.len(), topology.ranks());
    if programs != ranks || schedule.collective.ranks() != ranks {
        return Err(Flaw::Programs { programs, ranks });
    }
    for (rank, program) in schedule.programs.iter().enumerate() {
        check_lanes(rank, program, topology)?;
        for step in 0..program.steps.len() {
            check_step(&schedule.collective, rank, program, step).map_err(|what| Flaw::Step {
                rank,
                step,
                what,
            })?;
        }
        order::check_races(rank, program)?;
    }
    let messages = messages(schedule)?;
    order::check_progress(schedule, &messages, false)?;
    order::check_progress(schedule, &messages, true)
}

/// Whether lanes can be as they are.
fn check_lanes(rank: usize, program: &Program, topology: &Topology) -> Result<(), Flaw> {
    for lane in &program.lanes {
        let flaw = |what| Err(Flaw::Lane { lane: *lane, what });
        let ranks = 0..topology.ranks();
        if !ranks.contains(&lane.from) || !ranks.contains(&lane.to) || (lane.from == lane.to) {
            return flaw("it does not join two ranks");
        }
        if lane.from != rank && lane.to != rank {
            return flaw("it is another rank's");
        }
        let (a, b) = (topology.host_of(lane.from), topology.host_of(lane.to));
        match lane.path {
            Path::Memory if a != b => return flaw("memory does not join hosts"),
            Path::Nics { .. } if a == b => return flaw("it could stay on its host"),
            Path::Nics { from, to } if !topology.joined(a, from, b, to) => {
                return flaw("its NICs are not up, or do not reach each other")
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a step makes sense by itself.
fn check_step(
    collective: &Collective,
    rank: usize,
    program: &Program,
    step: usize,
) -> Result<(), &'static str> {
    let step_now = &program.steps[step];
    let work = &step_now.work;
    if step_now.after.iter().any(|before| *before as usize >= step)
        || !step_now.after.is_sorted_by(|a, b| a < b)
    {
        return Err("it is to wait for a later step, or twice for the same");
    }
    if work.is_empty() {
        return Err("it has no elements");
    }
    if let Some(lane) = work.lane() {
        let Some(lane) = program.lanes.get(lane as usize) else {
            return Err("there is no such lane");
        };
        if matches!(work, Work::Send { .. }) != (lane.from == rank) {
            return Err("it is at the other end of its lane");
        }
    }
    for slice in work.reads().into_iter().flatten().chain(work.writes()) {
        let room = match slice.buffer {
            Buffer::Scratch => program.scratch,
            buffer => collective.buffer_len(rank, buffer),
        };
        if slice.start.checked_add(slice.len).is_none_or(|end| end > room) {
            return Err("it touches elements that there are not");
        }
        if slice.len != work.len() {
            return Err("its slices have different lengths");
        }
    }
    let Some(into) = work.writes() else { return Ok(()) };
    let partly = |read: Slice| read != into && read.meets(&into);
    if work.reads().into_iter().flatten().any(partly)
        || matches!(work, Work::Copy { data, .. } if *data == into)
    {
        return Err("it writes a part of what it reads");
    }
    let scatters = matches!(collective.operation(), Operation::ReduceScatter { .. });
    if into.buffer == Buffer::Input && !(collective.in_place() && scatters) {
        return Err("it writes to the input");
    }
    Ok(())
}

/// What goes over each NIC, and through the memory of each host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that each NIC of each host sends.
    pub sent: Vec<Vec<u64>>,
    /// Bytes that each NIC of each host receives.
    pub received: Vec<Vec<u64>>,
    /// Bytes that ranks of each host send to each other.
    pub memory: Vec<u64>,
}

impl Traffic {
    fn none(topology: &Topology) -> Traffic {
        let nics: Vec<Vec<u64>> = topology.hosts().iter().map(|h| vec![0; h.nics.len()]).collect();
        Traffic { sent: nics.clone(), received: nics, memory: vec![0; topology.hosts().len()] }
    }

    fn add(&mut self, topology: &Topology, lane: &Lane, bytes: u64) {
        let (a, b) = (topology.host_of(lane.from), topology.host_of(lane.to));
        match lane.path {
            Path::Memory => self.memory[a] += bytes,
            Path::Nics { from, to } => {
                self.sent[a][from] += bytes;
                self.received[b][to] += bytes;
            }
        }
    }

    /// Of a schedule, by its steps.
    pub fn of(schedule: &Schedule, topology: &Topology) -> Traffic {
        let mut traffic = Traffic::none(topology);
        let bytes = schedule.collective.data().bytes();
        for program in &schedule.programs {
            for step in &program.steps {
                if let Work::Send { lane, data } = step.work {
                    traffic.add(topology, &program.lanes[lane as usize], data.len * bytes);
                }
            }
        }
        traffic
    }

    /// Bytes that all NICs of a host send, and receive.
    pub fn host(&self, host: usize) -> (u64, u64) {
        (self.sent[host].iter().sum(), self.received[host].iter().sum())
    }

    /// How long the busiest NIC takes for its bytes in one direction, in µs; infinite where a dead
    /// NIC would carry any.
    pub fn busiest_us(&self, topology: &Topology) -> f64 {
        let mut most = 0.0f64;
        for (host, (sent, received)) in
            topology.hosts().iter().zip(self.sent.iter().zip(&self.received))
        {
            for (nic, bytes) in
                host.nics.iter().zip(sent.iter().zip(received).map(|(s, r)| *s.max(r)))
            {
                if bytes > 0 {
                    most = most.max(bytes as f64 * 8.0 / nic.free_mbps() as f64);
                }
            }
        }
        most
    }
}

/// What each rank must have as its output, from what each has as its input
/// ([`Collective::input_range`]). Reductions are in the order of ranks on each host, then of hosts,
/// as [`crate::Folding::InOrder`] promises.
pub fn expected(
    collective: &Collective,
    topology: &Topology,
    inputs: &[Vec<u64>],
) -> Vec<Vec<u64>> {
    let ranks = 0..collective.ranks();
    let vector: Vec<u64> = match *collective.operation() {
        Operation::AllGather { .. } => inputs.concat(),
        Operation::Broadcast { root, .. } => inputs[root].clone(),
        Operation::Barrier => Vec::new(),
        Operation::SendRecv { from, .. } => inputs[from].clone(),
        Operation::AllToAll { .. } => {
            return ranks.map(|to| exchanged(collective, inputs, to)).collect()
        }
        _ => reduced(collective, topology, inputs),
    };
    ranks
        .map(|rank| {
            let range = collective.output_range(rank);
            vector.get(range.start as usize..range.end as usize).unwrap_or_default().to_vec()
        })
        .collect()
}

fn reduced(collective: &Collective, topology: &Topology, inputs: &[Vec<u64>]) -> Vec<u64> {
    let (data, op) =
        (collective.data(), collective.operation().reduce_op().unwrap_or(ReduceOp::Sum));
    let fold = |a: Vec<u64>, b: Vec<u64>| {
        a.iter().zip(&b).map(|(a, b)| op.combine(data, *a, *b)).collect::<Vec<_>>()
    };
    let hosts = (0..topology.hosts().len())
        .filter_map(|h| topology.members(h).iter().map(|rank| inputs[*rank].clone()).reduce(fold));
    let mut vector = hosts.reduce(fold).unwrap_or_default();
    if op == ReduceOp::Avg && collective.ranks() > 1 {
        vector.iter_mut().for_each(|v| *v = divide(data, *v, collective.ranks() as u32));
    }
    vector
}

fn exchanged(collective: &Collective, inputs: &[Vec<u64>], to: usize) -> Vec<u64> {
    let mut output = Vec::new();
    for (from, input) in inputs.iter().enumerate() {
        let start: u64 = (0..to).map(|peer| collective.pair(from, peer)).sum();
        let end = start + collective.pair(from, to);
        output.extend_from_slice(&input[start as usize..end as usize]);
    }
    output
}
