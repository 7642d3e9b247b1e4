//! Known numbers: what ranks put in, and what must come out.
//!
//! Element *p* of rank *r*'s vector is (3*r* + *p*) mod 7: sums of a thousand of them are exact in
//! every type but f16, bf16 and u8, and those of a few are exact in all.

use unbroken_coll::{DataType, Operation, ReduceOp};
use unbroken_schedule::divide;

use super::Op;

const PERIOD: u64 = 7;

/// The bits of a small number.
fn bits(data: DataType, n: u64) -> u64 {
    match data {
        DataType::F16 => u64::from(half::f16::from_f64(n as f64).to_bits()),
        DataType::Bf16 => u64::from(half::bf16::from_f64(n as f64).to_bits()),
        DataType::F32 => u64::from((n as f32).to_bits()),
        DataType::F64 => (n as f64).to_bits(),
        _ => n,
    }
}

fn number(rank: usize, at: u64) -> u64 {
    (3 * rank as u64 + at) % PERIOD
}

/// A run of elements that has a period.
struct Run {
    period: Vec<u64>,
    size: usize,
}

impl Run {
    fn put(&self, from: u64, out: &mut [u8]) {
        for (k, element) in out.chunks_exact_mut(self.size).enumerate() {
            let bits = self.period[((from + k as u64) % PERIOD) as usize];
            element.copy_from_slice(&bits.to_le_bytes()[..self.size]);
        }
    }
}

/// An operation of `count` elements a block, as one rank sees it.
pub(crate) struct Numbers {
    pub(crate) op: Op,
    pub(crate) data: DataType,
    pub(crate) reduce: ReduceOp,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) root: usize,
    pub(crate) count: u64,
}

impl Numbers {
    fn size(&self) -> usize {
        self.data.bytes() as usize
    }

    fn of(&self, rank: usize) -> Run {
        let period = (0..PERIOD).map(|p| bits(self.data, number(rank, p))).collect();
        Run { period, size: self.size() }
    }

    fn reduced(&self) -> Run {
        let all = |p| {
            let mut each = (0..self.ranks).map(|rank| bits(self.data, number(rank, p)));
            let first = each.next().unwrap_or_default();
            let sum = each.fold(first, |a, b| self.reduce.combine(self.data, a, b));
            if self.reduce == ReduceOp::Avg {
                divide(self.data, sum, self.ranks as u32)
            } else {
                sum
            }
        };
        Run { period: (0..PERIOD).map(all).collect(), size: self.size() }
    }

    /// The operation.
    pub(crate) fn operation(&self) -> Operation {
        use unbroken_coll::{Counts, Matrix};
        let (op, count, root) = (self.reduce, self.count, self.root);
        match self.op {
            Op::AllReduce => Operation::AllReduce { op, count },
            Op::ReduceScatter => Operation::ReduceScatter { op, counts: Counts::Equal(count) },
            Op::AllGather => Operation::AllGather { counts: Counts::Equal(count) },
            Op::Broadcast => Operation::Broadcast { root, count },
            Op::Reduce => Operation::Reduce { op, root, count },
            Op::AllToAll => Operation::AllToAll { counts: Matrix::Equal(count) },
            Op::SendRecv => Operation::SendRecv { from: 0, to: self.ranks - 1, count },
            Op::Barrier => Operation::Barrier,
        }
    }

    /// What this rank puts in.
    pub(crate) fn input(&self) -> Vec<u8> {
        let (from, blocks) = match self.op {
            Op::AllReduce | Op::Reduce => (0, 1),
            Op::ReduceScatter | Op::AllToAll => (0, self.ranks as u64),
            Op::AllGather => (self.rank as u64 * self.count, 1),
            Op::Broadcast => (0, u64::from(self.rank == self.root)),
            Op::SendRecv => (0, u64::from(self.rank == 0)),
            Op::Barrier => (0, 0),
        };
        let mut out = vec![0; (blocks * self.count) as usize * self.size()];
        self.of(self.rank).put(from, &mut out);
        out
    }

    /// What must come out at this rank.
    pub(crate) fn output(&self) -> Vec<u8> {
        let (count, size) = (self.count, self.size());
        let bytes = |blocks: u64| vec![0; (blocks * count) as usize * size];
        let block = count as usize * size;
        match self.op {
            Op::AllReduce => {
                let mut out = bytes(1);
                self.reduced().put(0, &mut out);
                out
            }
            Op::ReduceScatter => {
                let mut out = bytes(1);
                self.reduced().put(self.rank as u64 * count, &mut out);
                out
            }
            Op::Reduce => {
                let mut out = bytes(u64::from(self.rank == self.root));
                self.reduced().put(0, &mut out);
                out
            }
            Op::Broadcast => {
                let mut out = bytes(1);
                self.of(self.root).put(0, &mut out);
                out
            }
            Op::SendRecv => {
                let mut out = bytes(u64::from(self.rank == self.ranks - 1));
                self.of(0).put(0, &mut out);
                out
            }
            Op::AllGather | Op::AllToAll => {
                let mut out = bytes(self.ranks as u64);
                for (rank, out) in out.chunks_exact_mut(block.max(1)).enumerate() {
                    let from = if self.op == Op::AllGather { rank } else { self.rank };
                    self.of(rank).put(from as u64 * count, out);
                }
                out
            }
            Op::Barrier => Vec::new(),
        }
    }

    /// What a NIC carries for each byte of the size, as nccl-tests reckons.
    pub(crate) fn bus_factor(&self) -> f64 {
        let n = self.ranks as f64;
        match self.op {
            Op::AllReduce => 2.0 * (n - 1.0) / n,
            Op::ReduceScatter | Op::AllGather | Op::AllToAll => (n - 1.0) / n,
            _ => 1.0,
        }
    }

    /// Blocks in the larger buffer.
    fn blocks(op: Op, ranks: usize) -> u64 {
        match op {
            Op::ReduceScatter | Op::AllGather | Op::AllToAll => ranks as u64,
            Op::Barrier => 0,
            _ => 1,
        }
    }

    /// The bytes of one element in each block.
    pub(crate) fn smallest(op: Op, data: DataType, ranks: usize) -> u64 {
        data.bytes() * Numbers::blocks(op, ranks)
    }

    /// Elements of a block, for a size in bytes: whole ones, and one at least.
    pub(crate) fn count_for(op: Op, data: DataType, bytes: u64, ranks: usize) -> u64 {
        bytes.checked_div(Numbers::smallest(op, data, ranks)).map_or(0, |count| count.max(1))
    }

    /// Bytes of the larger buffer.
    pub(crate) fn bytes(&self) -> u64 {
        self.count * Numbers::smallest(self.op, self.data, self.ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing is measured that has no bytes.
    #[test]
    fn a_block_has_an_element_at_least() {
        let count = |op, bytes| Numbers::count_for(op, DataType::F32, bytes, 4);
        assert_eq!([3, 4, 7, 8].map(|bytes| count(Op::AllReduce, bytes)), [1, 1, 1, 2]);
        assert_eq!([3, 8, 31, 32].map(|bytes| count(Op::AllGather, bytes)), [1, 1, 1, 2]);
        assert_eq!(count(Op::Barrier, 8), 0);
        assert_eq!(Numbers::smallest(Op::AllToAll, DataType::F64, 3), 24);
    }
}
