//! How an operation is to be done: what a plan is made from.

use crate::binding::Repair;
use crate::Shape;

/// The most channels of a plan.
pub const MAX_CHANNELS: usize = 256;

/// What the nodes of trees are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// Single ranks: everything between ranks, as NCCL's rings do.
    Ranks,
    /// Hosts: ranks of a host first reduce among themselves through its memory, and the result is
    /// spread there at the end (*hierarchical*).
    Hosts,
}

/// In which order contributions are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Folding {
    /// As suits the shape. Results of floating-point reductions differ by rounding between plans.
    Any,
    /// For each element in the order of ranks on each host, and then in the order of hosts: `(r0 ⊕
    /// r1) ⊕ (r2 ⊕ r3)` for two hosts of two. Results are the same, bit for bit, whatever the plan.
    InOrder,
}

/// How much of the vector each node owns.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owners {
    /// All the same.
    Equal,
    /// In proportion to these.
    Weights(Vec<u64>),
    /// As suits what hosts carry. Hosts are nodes; Direct: stars; Ring: rings with leaves
    /// ([`crate::reshape`]); SubRings: divided below the paper's threshold, too
    /// ([`crate::paper::Division`]).
    ByCapacity,
}

/// How an operation is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The shape of trees. AllToAll and SendRecv are direct in any case.
    pub shape: Shape,
    /// Their nodes.
    pub grouping: Grouping,
    /// The order of reductions.
    pub folding: Folding,
    /// How many channels; `None`: as many as the largest number of NICs, or of ranks, of a host.
    pub channels: Option<usize>,
    /// How long chunks are about, in bytes.
    pub chunk_bytes: u64,
    /// Messages that would be shorter are not divided among several NICs; one of them takes it all,
    /// in turn.
    pub divide_bytes: u64,
    /// AllReduce: how much of the vector each node owns.
    pub owners: Owners,
    /// What becomes of the share of a dead or slow NIC.
    pub repair: Repair,
    /// The hosts in the order that rings and trees have them; `None`: by number. Rings without some
    /// hosts have it, too, but for bridges ([`crate::rerank`]).
    pub ring: Option<Vec<usize>>,
}

impl Choice {
    /// With chunks of 512 KiB, and the rest as the comments say.
    pub fn new(shape: Shape, grouping: Grouping) -> Choice {
        Choice {
            shape,
            grouping,
            folding: Folding::Any,
            channels: None,
            chunk_bytes: 512 << 10,
            divide_bytes: 16 << 10,
            owners: Owners::Equal,
            repair: Repair::Balance,
            ring: None,
        }
    }
}
