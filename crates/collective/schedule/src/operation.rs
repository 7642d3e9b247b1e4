//! What is to be done: operations, and which part of the vector lies where.
//!
//! Every operation but AllToAll and SendRecv is seen as one *vector* of elements, numbered from 0.
//! Each rank has some range of it as input and some as output ([`Collective::input_range`],
//! [`Collective::output_range`]); in between elements are reduced, or not.
//!
//! | operation | input | output |
//! | --- | --- | --- |
//! | AllReduce | all | all |
//! | ReduceScatter | all | the rank's block |
//! | AllGather | the rank's block | all |
//! | Broadcast | all, at the root | all |
//! | Reduce | all | all, at the root |
//!
//! In place the two are one buffer where a rank has both. It is that of the output (AllReduce,
//! AllGather, Broadcast, Reduce), where the rank's block of AllGather is already in its place; or
//! that of the input (ReduceScatter), where the rank's block ends up in its place. It is what NCCL
//! calls in place.

use std::ops::Range;
use std::sync::Arc;

use crate::{Buffer, DataType, Error, ReduceOp, Slice, Topology};

/// The most bytes that a buffer can have.
const MAX_BYTES: u64 = 1 << 62;

/// Numbers of elements, one for each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counts {
    /// So many for every rank.
    Equal(u64),
    /// One for each rank.
    Each(Arc<[u64]>),
}

/// Numbers of elements, one for each ordered pair of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matrix {
    /// So many for every pair.
    Equal(u64),
    /// Row after row: what rank 0 sends to each rank, what rank 1 sends, … A rank's own program
    /// depends on its own row and column alone; the rest may be 0.
    Each(Arc<[u64]>),
}

/// A collective operation. Numbers of elements, not bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// All ranks get the reduced vector.
    AllReduce {
        /// How elements are reduced.
        op: ReduceOp,
        /// Elements of the vector.
        count: u64,
    },
    /// Each rank gets its block of the reduced vector.
    ReduceScatter {
        /// How elements are reduced.
        op: ReduceOp,
        /// Elements of each rank's block.
        counts: Counts,
    },
    /// All ranks get the blocks of all.
    AllGather {
        /// Elements of each rank's block.
        counts: Counts,
    },
    /// All ranks get the root's vector.
    Broadcast {
        /// The rank that has it.
        root: usize,
        /// Elements of the vector.
        count: u64,
    },
    /// The root gets the reduced vector.
    Reduce {
        /// How elements are reduced.
        op: ReduceOp,
        /// The rank that gets it.
        root: usize,
        /// Elements of the vector.
        count: u64,
    },
    /// Each rank gets a block from each; blocks lie in the order of ranks in both buffers.
    AllToAll {
        /// Elements from each to each.
        counts: Matrix,
    },
    /// One rank gets another's vector.
    SendRecv {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Elements of the vector.
        count: u64,
    },
    /// No rank is done before all have begun.
    Barrier,
}

impl Operation {
    /// Its name, as messages have it.
    pub fn name(&self) -> &'static str {
        match self {
            Operation::AllReduce { .. } => "AllReduce",
            Operation::ReduceScatter { .. } => "ReduceScatter",
            Operation::AllGather { .. } => "AllGather",
            Operation::Broadcast { .. } => "Broadcast",
            Operation::Reduce { .. } => "Reduce",
            Operation::AllToAll { .. } => "AllToAll",
            Operation::SendRecv { .. } => "SendRecv",
            Operation::Barrier => "Barrier",
        }
    }

    /// How it reduces, if it does. A barrier reduces tokens.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match *self {
            Operation::AllReduce { op, .. }
            | Operation::ReduceScatter { op, .. }
            | Operation::Reduce { op, .. } => Some(op),
            Operation::Barrier => Some(ReduceOp::Max),
            _ => None,
        }
    }

    /// Whether data goes from pair to pair, without a vector that ranks share.
    pub fn is_pairwise(&self) -> bool {
        matches!(self, Operation::AllToAll { .. } | Operation::SendRecv { .. })
    }
}

/// An operation, the type of its elements, and whether input and output are one buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    operation: Operation,
    data: DataType,
    in_place: bool,
    ranks: usize,
    /// Where each rank's block begins, and the end; of operations that have blocks.
    offsets: Vec<u64>,
}

impl Collective {
    /// Checks that the operation makes sense among so many ranks. A barrier has elements of one
    /// byte, whatever `data` is.
    pub fn new(
        operation: Operation,
        data: DataType,
        in_place: bool,
        ranks: usize,
    ) -> Result<Collective, Error> {
        let what = operation.name();
        let rank = |number: usize| match number < ranks {
            true => Ok(()),
            false => Err(Error::Unknown { what: "rank", number, last: ranks.saturating_sub(1) }),
        };
        let mut total = 0u64;
        let mut offsets = Vec::new();
        match &operation {
            Operation::AllReduce { count, .. } => total = *count,
            Operation::ReduceScatter { counts, .. } | Operation::AllGather { counts } => {
                offsets = block_offsets(counts, ranks, what)?;
                total = offsets[ranks];
            }
            Operation::Broadcast { root, count } | Operation::Reduce { root, count, .. } => {
                rank(*root)?;
                total = *count;
            }
            Operation::AllToAll { counts } => total = check_matrix(counts, ranks, what)?,
            Operation::SendRecv { from, to, count } => {
                rank(*from)?;
                rank(*to)?;
                total = *count;
            }
            Operation::Barrier => {}
        }
        let data = if operation == Operation::Barrier { DataType::U8 } else { data };
        if total.checked_mul(data.bytes()).is_none_or(|b| b > MAX_BYTES) {
            return Err(Error::TooLarge { what });
        }
        if operation.reduce_op().is_some_and(|op| !op.takes(data)) {
            return Err(Error::Form {
                what: "a bitwise reduction of floating-point elements",
                instead: "bitwise AND, OR and XOR take integers",
            });
        }
        if in_place && operation.is_pairwise() {
            return Err(Error::InPlace { what });
        }
        Ok(Collective { operation, data, in_place, ranks, offsets })
    }

    /// The hosts that send or receive something, of those that ranks are on.
    pub fn hosts(&self, topology: &Topology) -> Vec<usize> {
        match self.operation {
            Operation::SendRecv { from, to, .. } => {
                let mut both = vec![topology.host_of(from), topology.host_of(to)];
                both.dedup();
                both
            }
            _ => (0..topology.hosts().len()).collect(),
        }
    }

    /// The operation.
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// The type of the elements.
    pub fn data(&self) -> DataType {
        self.data
    }

    /// Whether input and output are one buffer.
    pub fn in_place(&self) -> bool {
        self.in_place
    }

    /// How many ranks take part.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Elements of the vector; 0 of operations that have none. A barrier's is one token.
    pub fn total(&self) -> u64 {
        match self.operation {
            Operation::AllReduce { count, .. }
            | Operation::Broadcast { count, .. }
            | Operation::Reduce { count, .. } => count,
            Operation::ReduceScatter { .. } | Operation::AllGather { .. } => {
                self.offsets[self.ranks]
            }
            Operation::Barrier => 1,
            Operation::AllToAll { .. } | Operation::SendRecv { .. } => 0,
        }
    }

    /// The part of the vector that is a rank's block, of operations that have blocks.
    pub fn block(&self, rank: usize) -> Option<Range<u64>> {
        match self.operation {
            Operation::ReduceScatter { .. } | Operation::AllGather { .. } => {
                Some(self.offsets[rank]..self.offsets[rank + 1])
            }
            _ => None,
        }
    }

    /// The part of the vector that a rank has as its input; of pairwise operations, all that it
    /// sends.
    pub fn input_range(&self, rank: usize) -> Range<u64> {
        match self.operation {
            Operation::AllReduce { count, .. } | Operation::Reduce { count, .. } => 0..count,
            Operation::ReduceScatter { .. } => 0..self.offsets[self.ranks],
            Operation::AllGather { .. } => self.offsets[rank]..self.offsets[rank + 1],
            Operation::Broadcast { root, count } => 0..if rank == root { count } else { 0 },
            Operation::SendRecv { from, count, .. } => 0..if rank == from { count } else { 0 },
            Operation::AllToAll { .. } => {
                0..(0..self.ranks).map(|peer| self.pair(rank, peer)).sum()
            }
            Operation::Barrier => 0..0,
        }
    }

    /// The part of the vector that a rank has as its output; of pairwise operations, all that it
    /// receives.
    pub fn output_range(&self, rank: usize) -> Range<u64> {
        match self.operation {
            Operation::AllReduce { count, .. } | Operation::Broadcast { count, .. } => 0..count,
            Operation::Reduce { root, count, .. } => 0..if rank == root { count } else { 0 },
            Operation::ReduceScatter { .. } => self.offsets[rank]..self.offsets[rank + 1],
            Operation::AllGather { .. } => 0..self.offsets[self.ranks],
            Operation::SendRecv { to, count, .. } => 0..if rank == to { count } else { 0 },
            Operation::AllToAll { .. } => {
                0..(0..self.ranks).map(|peer| self.pair(peer, rank)).sum()
            }
            Operation::Barrier => 0..0,
        }
    }

    /// Whether input and output of a rank are the one buffer `Output`, or (ReduceScatter) the one
    /// buffer `Input`.
    fn is_one_buffer(&self, rank: usize) -> bool {
        let root_alone = matches!(self.operation, Operation::Reduce { root, .. } | Operation::Broadcast { root, .. } if root != rank);
        self.in_place && !root_alone
    }

    /// Elements of a rank's buffer that the operation is given ([`Buffer::Input`],
    /// [`Buffer::Output`]); 0 of the one that is not used in place. Scratch memory is the program's
    /// ([`crate::Program::scratch`]).
    pub fn buffer_len(&self, rank: usize, buffer: Buffer) -> u64 {
        let scatters = matches!(self.operation, Operation::ReduceScatter { .. });
        let unused = match buffer {
            Buffer::Input => self.is_one_buffer(rank) && !scatters,
            Buffer::Output => self.is_one_buffer(rank) && scatters,
            Buffer::Scratch => true,
        };
        let range =
            if buffer == Buffer::Input { self.input_range(rank) } else { self.output_range(rank) };
        if unused {
            0
        } else {
            range.end - range.start
        }
    }

    /// Where a rank has a part of the vector as its input. `None`: it does not have it.
    pub fn input(&self, rank: usize, range: &Range<u64>) -> Option<Slice> {
        let (whole, len) = (self.input_range(rank), range.end - range.start);
        let slice = |buffer, start| Some(Slice { buffer, start, len });
        match self.operation {
            Operation::Barrier => slice(Buffer::Scratch, range.start),
            _ if range.start < whole.start || whole.end < range.end => None,
            Operation::ReduceScatter { .. } => slice(Buffer::Input, range.start),
            _ if self.is_one_buffer(rank) => self.output(rank, range),
            _ => slice(Buffer::Input, range.start - whole.start),
        }
    }

    /// Where a rank has a part of the vector as its output. `None`: it does not get it.
    pub fn output(&self, rank: usize, range: &Range<u64>) -> Option<Slice> {
        let (whole, len) = (self.output_range(rank), range.end - range.start);
        let slice = |buffer, start| Some(Slice { buffer, start, len });
        match self.operation {
            Operation::Barrier => slice(Buffer::Scratch, range.start),
            _ if range.start < whole.start || whole.end < range.end => None,
            Operation::ReduceScatter { .. } if self.in_place => slice(Buffer::Input, range.start),
            _ => slice(Buffer::Output, range.start - whole.start),
        }
    }

    /// Elements that go from one rank to another, or to itself, in a pairwise operation; else 0.
    pub fn pair(&self, from: usize, to: usize) -> u64 {
        match &self.operation {
            Operation::AllToAll { counts: Matrix::Equal(count) } => *count,
            Operation::AllToAll { counts: Matrix::Each(counts) } => counts[from * self.ranks + to],
            Operation::SendRecv { from: f, to: t, count } if (*f, *t) == (from, to) => *count,
            _ => 0,
        }
    }
}

/// Where blocks begin, and where the last ends.
fn block_offsets(counts: &Counts, ranks: usize, what: &'static str) -> Result<Vec<u64>, Error> {
    let mut offsets = vec![0u64];
    let mut end = 0u64;
    if let Counts::Each(each) = counts {
        if each.len() != ranks {
            return Err(Error::Counts { what, given: each.len(), ranks, wanted: ranks });
        }
    }
    for rank in 0..ranks {
        let count = match counts {
            Counts::Equal(count) => *count,
            Counts::Each(each) => each[rank],
        };
        end = end.checked_add(count).ok_or(Error::TooLarge { what })?;
        offsets.push(end);
    }
    Ok(offsets)
}

/// The most elements that any rank has on either side, if the matrix fits the ranks.
fn check_matrix(counts: &Matrix, ranks: usize, what: &'static str) -> Result<u64, Error> {
    let large = Error::TooLarge { what };
    match counts {
        Matrix::Equal(count) => count.checked_mul(ranks as u64).ok_or(large),
        Matrix::Each(each) if each.len() != ranks * ranks => {
            Err(Error::Counts { what, given: each.len(), ranks, wanted: ranks * ranks })
        }
        // more than any row or column
        Matrix::Each(each) => {
            each.iter().try_fold(0u64, |sum, count| sum.checked_add(*count)).ok_or(large)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(operation: Operation, ranks: usize) -> Result<Collective, Error> {
        Collective::new(operation, DataType::F32, false, ranks)
    }

    #[test]
    fn blocks_lie_one_behind_the_other() {
        let counts = Counts::Each([3, 0, 5].into());
        let c = new(Operation::ReduceScatter { op: ReduceOp::Sum, counts }, 3).unwrap();
        assert_eq!(c.total(), 8);
        assert_eq!((c.block(1), c.block(2)), (Some(3..3), Some(3..8)));
        assert_eq!((c.input_range(2), c.output_range(2)), (0..8, 3..8));
    }

    #[test]
    fn a_matrix_is_read_by_rows() {
        let counts = Matrix::Each([1, 2, 3, 4].into());
        let c = new(Operation::AllToAll { counts }, 2).unwrap();
        assert_eq!((c.pair(0, 1), c.pair(1, 0)), (2, 3));
        assert_eq!((c.input_range(0), c.output_range(0)), (0..3, 0..4));
    }

    #[test]
    fn bad_requests_are_named() {
        let says = |r: Result<Collective, Error>| r.unwrap_err().to_string();
        assert_eq!(
            says(new(Operation::Broadcast { root: 4, count: 1 }, 4)),
            "rank 4 does not exist; the numbers are 0 to 3"
        );
        let counts = Counts::Each([1, 2].into());
        assert_eq!(
            says(new(Operation::AllGather { counts }, 3)),
            "AllGather: 2 counts for 3 ranks; 3 are needed"
        );
        let counts = Matrix::Each([1, 2].into());
        assert!(says(new(Operation::AllToAll { counts }, 3)).contains("9 are needed"));
        let op = ReduceOp::Sum;
        assert!(says(new(Operation::AllReduce { op, count: 1 << 61 }, 2)).contains("2^62"));
        assert!(
            says(new(Operation::AllGather { counts: Counts::Equal(1 << 63) }, 2)).contains("2^62")
        );
        let pair = Operation::SendRecv { from: 0, to: 1, count: 1 };
        assert!(says(Collective::new(pair, DataType::U8, true, 2)).contains("in place"));
    }
}
