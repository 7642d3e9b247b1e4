//! A plan: the few numbers that every rank's program follows from.
//!
//! A plan is small and made by all ranks alike, each for itself; a rank then generates its own
//! program from it ([`Plan::program`]). The vector is cut into *channels*, each with a rank on
//! every host that speaks for it there (its *leader*) and home NICs; each channel's part into
//! *shards*, each with an owner, at which it is reduced; and each shard into *chunks*, which follow
//! each other through all stages (pipelining).

use std::ops::Range;

use crate::binding::Binding;
use crate::relay::Relays;
use crate::shape::Forest;
use crate::split::{grain, Parts};
use crate::{Choice, Collective, Matrix, Operation, Shape, Topology};

/// The most chunks of a shard. Chunks are made larger where there would be more.
pub const MAX_CHUNKS: u64 = 1024;

/// What the parts of a chunk add up to.
pub(crate) const PARTS: u64 = 1 << 32;

/// A part of the vector with one owner, on one channel. Chunks of it need not lie one behind the
/// other ([`Plan::chunk`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The part of the vector that is cut into chunks.
    pub(crate) span: Range<u64>,
    /// Which part of each chunk it is, in units of 1 / [`PARTS`].
    pub(crate) part: Range<u64>,
    /// The channel.
    pub channel: usize,
    /// Counts owners; shards of one row differ in their channel.
    pub row: usize,
    /// The node at which it is reduced or that has it.
    pub owner: usize,
    /// Which of the plan's forests has its tree.
    pub(crate) forest: usize,
    /// Shards of different sets have lanes of their own.
    pub(crate) set: usize,
    /// The rank that alone is to have it (ReduceScatter, Reduce) or has it (AllGather, Broadcast).
    pub rank: Option<usize>,
}

impl Shard {
    /// Its elements, but for rounding.
    pub(crate) fn about(&self) -> u64 {
        let len = self.span.end - self.span.start;
        (u128::from(len) * u128::from(self.part.end - self.part.start)).div_ceil(u128::from(PARTS))
            as u64
    }
}

/// Who owns a part of each channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) node: usize,
    pub(crate) weight: u64,
    /// The trees of its part, if they are not the channel's.
    pub(crate) forest: Option<usize>,
}

/// How an operation is done.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) topology: Topology,
    pub(crate) collective: Collective,
    pub(crate) choice: Choice,
    pub(crate) binding: Binding,
    pub(crate) relays: Relays,
    /// The ranks of each node.
    pub(crate) nodes: Vec<Vec<usize>>,
    /// The node of each rank.
    pub(crate) node_of: Vec<usize>,
    /// How many channels there are.
    pub(crate) channels: usize,
    /// The trees of each channel; or several that all channels share.
    pub(crate) forests: Vec<Forest>,
    /// By forest: the nodes that are left out of it, and added afterwards.
    pub(crate) outsiders: Vec<Vec<usize>>,
    /// Of operations whose owners can be chosen: who they are.
    pub(crate) owners: Vec<Owner>,
    /// By row, then channel.
    pub(crate) shards: Vec<Shard>,
    pub(crate) chunks: u64,
}

impl Plan {
    /// The shards, of operations that have a vector.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// What it was made from.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// How many channels it has.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Hosts of its topology.
    pub fn hosts(&self) -> usize {
        self.topology.hosts().len()
    }

    /// The NICs of its channels.
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// The rank that speaks for a node on a channel.
    pub(crate) fn leader(&self, channel: usize, node: usize) -> usize {
        let ranks = &self.nodes[node];
        ranks[channel % ranks.len()]
    }

    /// The rank that forwards between a rank and a NIC of its host, if one does. With a matrix of
    /// counts nobody does: a rank knows only what it exchanges itself.
    pub(crate) fn relay(&self, rank: usize, nic: usize) -> Option<usize> {
        self.relays.of(rank, nic).filter(|_| self.may_relay())
    }

    /// Whether a host's programs depend on each other.
    pub(crate) fn relays_on(&self, host: usize) -> bool {
        self.relays.any_on(host) && self.may_relay()
    }

    /// Whether ranks reach NICs of other NUMA nodes through ranks there, on any host.
    pub fn forwards(&self) -> bool {
        (0..self.hosts()).any(|host| self.relays_on(host))
    }

    fn may_relay(&self) -> bool {
        !matches!(self.collective.operation(), Operation::AllToAll { counts: Matrix::Each(_) })
    }

    /// The way of what outsiders add to a shard: through them, and through the members of the ring
    /// behind the owner; from the last of those the result goes back to the outsiders, the last of
    /// them first. Empty where there are no outsiders.
    pub(crate) fn chain(&self, shard: &Shard) -> Vec<usize> {
        let outsiders = &self.outsiders[shard.forest];
        match outsiders.is_empty() {
            true => Vec::new(),
            false => [&outsiders[..], &self.forests[shard.forest].behind(shard.owner)].concat(),
        }
    }

    /// Which of several routes a shard's message takes first, where each takes one: another for
    /// each shard and for each pair. Else all that go to one owner at a time, or come from it,
    /// would meet on one NIC.
    pub(crate) fn turn(&self, row: usize, from: usize, to: usize) -> u64 {
        (row + self.node_of[from] + self.node_of[to]) as u64
    }

    /// How many chunks a run of elements is cut into.
    pub(crate) fn chunks_of(&self, len: u64) -> u64 {
        let chunk = (self.choice.chunk_bytes / self.collective.data().bytes()).max(1);
        len.div_ceil(chunk).clamp(1, MAX_CHUNKS)
    }

    /// How long chunks are beside each other. Where all is reduced before anything is spread, NICs
    /// wait for the first chunk to be reduced, and for the last one to be spread: these are short.
    fn parts(&self) -> Parts {
        match self.collective.operation() {
            Operation::AllReduce { .. } if self.choice.shape == Shape::Direct => {
                Parts::Ramp(self.chunks)
            }
            _ => Parts::Equal(self.chunks),
        }
    }

    /// How long each chunk is, in parts of what chunks have on average.
    pub fn chunk_lengths(&self) -> impl Iterator<Item = f64> {
        let (parts, chunks) = (self.parts(), self.chunks);
        let mean = parts.all() as f64 / chunks as f64;
        (0..chunks).map(move |k| (parts.before(k + 1) - parts.before(k)) as f64 / mean)
    }

    /// How many chunks each shard has.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// A chunk of a shard: its part of the vector.
    pub fn chunk(&self, shard: &Shard, chunk: u64) -> Range<u64> {
        let bytes = self.collective.data().bytes();
        // The same for all shards of the span, however long each is: they lie side by side in it.
        let span = shard.span.end - shard.span.start;
        let parts = self.parts();
        let of_all = parts.cut(&shard.span, chunk, grain(span, parts.all(), bytes));
        let len = of_all.end - of_all.start;
        let grain = grain(len, self.owners.len() as u64, bytes);
        let at = |part: u64| match part {
            PARTS => len,
            part => (u128::from(len) * u128::from(part) / u128::from(PARTS)) as u64 / grain * grain,
        };
        of_all.start + at(shard.part.start)..of_all.start + at(shard.part.end)
    }

    /// Whether shards of a channel lie one behind the other in each chunk.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.shards.iter().any(|s| s.part != (0..PARTS))
    }
}
