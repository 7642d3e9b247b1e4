//! A schedule: who sends what to whom, after what.
//!
//! # How it is read
//!
//! Each rank has a [`Program`]: a list of [`Step`]s over three [`Buffer`]s. A step may run as soon
//! as the steps that it names in `after` are done; nothing else orders the steps of a rank, but
//! that the messages of a [`Lane`] leave in the order of the list, and are taken in the order of
//! the list. The *k*-th send on a lane is received by the *k*-th receive on it, and both have the
//! same length.
//!
//! A send is done when its data may be overwritten; a receive, when its data may be used. A
//! receiver that is not ready lets its sender wait (there need be room for one message on a lane).
//!
//! # What holds for every schedule
//!
//! 1. `after` names earlier steps of the same list.
//! 2. The sends and receives of a lane match, in number and lengths. No message and no slice is
//!    empty.
//! 3. Two steps of a rank that touch the same element, where one of them writes it, are ordered by
//!    `after`. So the result does not depend on the order in which ready steps are run, and a
//!    step's memory may be used from the moment that it is ready: a receive can be given to the NIC
//!    with its final address.
//! 4. It ends, in whatever order ready steps are run, also where a rank does one step at a time in
//!    the order of the list, if a lane has room for one message.
//! 5. A lane that is on NICs joins two hosts, by NICs that are up and reach each other; a lane in
//!    memory stays on its host.
//! 6. The input is never written, but where the operation is in place.
//!
//! [`crate::verify::check`] checks 1 to 6.

use crate::Collective;

/// A schedule for all ranks. Executors need their own rank's program alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What it does.
    pub collective: Collective,
    /// A program for each rank.
    pub programs: Vec<Program>,
}

/// What one rank does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// The lanes that it sends and receives on.
    pub lanes: Vec<Lane>,
    /// The steps.
    pub steps: Vec<Step>,
    /// Elements of the scratch buffer that it needs.
    pub scratch: u64,
}

/// A step of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What is done.
    pub work: Work,
    /// The steps that must be done before it begins, by their position in the list; in order, each
    /// once.
    pub after: Vec<u32>,
}

/// What a step does. `⊕` is the operation's [`crate::ReduceOp`]; slices of a step have equal
/// lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Send a slice.
    Send {
        /// On this lane.
        lane: u32,
        /// The data.
        data: Slice,
    },
    /// Receive a message.
    Recv {
        /// On this lane.
        lane: u32,
        /// Where it goes.
        into: Slice,
    },
    /// Receive a message and reduce it with a slice: `into = with ⊕ message`.
    RecvReduce {
        /// On this lane.
        lane: u32,
        /// What it is reduced with.
        with: Slice,
        /// Where the result goes: `with` itself, or apart from it.
        into: Slice,
    },
    /// `into = data`.
    Copy {
        /// The data.
        data: Slice,
        /// Where it goes, apart from `data`.
        into: Slice,
    },
    /// `into = a ⊕ b`.
    Reduce {
        /// One operand.
        a: Slice,
        /// The other.
        b: Slice,
        /// Where the result goes: one of the operands itself, or apart from both.
        into: Slice,
    },
    /// Divide each element by a number ([`crate::ReduceOp::Avg`]).
    Divide {
        /// The elements.
        data: Slice,
        /// The number.
        by: u32,
    },
}

impl Work {
    /// The lane that it uses.
    pub fn lane(&self) -> Option<u32> {
        match *self {
            Work::Send { lane, .. } | Work::Recv { lane, .. } | Work::RecvReduce { lane, .. } => {
                Some(lane)
            }
            _ => None,
        }
    }

    /// What it reads.
    pub fn reads(&self) -> [Option<Slice>; 2] {
        match *self {
            Work::Send { data, .. } | Work::Copy { data, .. } | Work::Divide { data, .. } => {
                [Some(data), None]
            }
            Work::Recv { .. } => [None, None],
            Work::RecvReduce { with, .. } => [Some(with), None],
            Work::Reduce { a, b, .. } => [Some(a), Some(b)],
        }
    }

    /// What it writes.
    pub fn writes(&self) -> Option<Slice> {
        match *self {
            Work::Send { .. } => None,
            Work::Recv { into, .. } | Work::RecvReduce { into, .. } => Some(into),
            Work::Copy { into, .. } | Work::Reduce { into, .. } => Some(into),
            Work::Divide { data, .. } => Some(data),
        }
    }

    /// Its elements.
    pub fn len(&self) -> u64 {
        self.writes().or(self.reads()[0]).map_or(0, |s| s.len)
    }

    /// Whether it has none; no step of a schedule has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// What the operation is given. In place, where a rank has both: the one buffer of
    /// ReduceScatter; else not used.
    Input,
    /// What the operation gives. In place, where a rank has both: the one buffer, but of
    /// ReduceScatter not used.
    Output,
    /// Memory of the executor, [`Program::scratch`] elements. Its first contents do not matter.
    Scratch,
}

/// A run of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    /// The buffer.
    pub buffer: Buffer,
    /// The first element.
    pub start: u64,
    /// The number of elements.
    pub len: u64,
}

impl Slice {
    /// Elements `start` to `start + len` of it.
    pub(crate) fn part(&self, start: u64, len: u64) -> Slice {
        debug_assert!(start + len <= self.len);
        Slice { start: self.start + start, len, ..*self }
    }

    /// Whether any element is in both.
    pub fn meets(&self, other: &Slice) -> bool {
        self.buffer == other.buffer
            && self.start < other.start + other.len
            && other.start < self.start + self.len
    }
}

/// A stream of messages in order, from one rank to another, over one pair of NICs or through the
/// memory of their host. Both ends know it by what it consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane {
    /// The rank that sends.
    pub from: usize,
    /// The rank that receives.
    pub to: usize,
    /// What carries it.
    pub path: Path,
    /// The part of the operation that it belongs to.
    pub stage: Stage,
    /// The channel that it belongs to.
    pub channel: usize,
    /// The set of trees that it belongs to, where a channel has several.
    pub set: usize,
    /// The ranks between which the data goes as a whole, where a proxy forwards it; else `(from,
    /// to)`.
    pub flow: (usize, usize),
    /// Which of the flow's routes it is, where a channel uses several.
    pub route: usize,
}

/// What carries a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Path {
    /// The shared memory of a host.
    Memory,
    /// A pair of NICs.
    Nics {
        /// The sender's.
        from: usize,
        /// The receiver's.
        to: usize,
    },
}

/// Parts of an operation. A stage has lanes of its own, so that what is ready is not stuck behind
/// what is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Within a host, towards the rank that speaks for it on the channel.
    Gather,
    /// Between hosts (or ranks), towards the owner of a shard.
    Reduce,
    /// Between hosts (or ranks), from the owner of a shard.
    Spread,
    /// Between hosts, what those add that were left out of a ring.
    Join,
    /// Within a host, from the rank that speaks for it.
    Scatter,
    /// From pair to pair.
    Exchange,
}
