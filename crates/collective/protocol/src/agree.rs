//! What an operation is taken for, so that ranks which disagree find out.
//!
//! Every frame says by a digest what its sender takes the operation for, and is not touched by a
//! receiver that takes it for something else: what ranks disagree about is never summed. The
//! receiver then tells all ranks its [`Description`], they tell theirs, and once all are known (or
//! some time has passed) each rank finds the same first one that differs. Ranks that wait for each
//! other without exchanging anything find out when they have waited for long.

use unbroken_schedule::{Collective, Counts, DataType, Matrix, Operation, ReduceOp};

use crate::message::{Reader, Writer};
use crate::Rank;

/// What all ranks must agree on. Numbers that an operation does not have are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// Which operation, as [`Operation::name`] has them in alphabetical order; or the split of the
    /// communicator.
    pub operation: u8,
    /// Its type, as a position in [`DataType::ALL`].
    pub data: u8,
    /// How it reduces, as one more than a position in [`ReduceOp::ALL`].
    pub reduce: u8,
    /// Its count; of different counts, a digest of them. Those of an AllToAll with a matrix are
    /// known to no rank in full.
    pub count: u64,
    /// The root; of SendRecv the sender.
    pub root: u32,
    /// Of SendRecv the receiver.
    pub to: u32,
    /// Of SendRecv what a receive is matched with a send by. Ranks that differ in it alone do not
    /// disagree: the one that is meant may be asked for yet.
    pub tag: u64,
}

/// What is no operation of a program, but done as one, stands behind those that are.
const NAMES: [&str; 9] = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Broadcast",
    "Reduce",
    "ReduceScatter",
    "SendRecv",
    SPLIT,
];
/// A split gathers what ranks say of themselves, and is not to be mistaken for an AllGather of the
/// program's.
const SPLIT: &str = "CommSplit";

/// FNV-1a.
fn digest(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        word.to_le_bytes()
            .iter()
            .fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    })
}

impl Description {
    /// Of a collective.
    pub fn of(collective: &Collective) -> Description {
        let of_counts = |counts: &Counts| match counts {
            Counts::Equal(count) => *count,
            Counts::Each(each) => digest(each.iter().copied()),
        };
        let (count, root, to) = match collective.operation() {
            Operation::AllReduce { count, .. } => (*count, 0, 0),
            Operation::ReduceScatter { counts, .. } | Operation::AllGather { counts } => {
                (of_counts(counts), 0, 0)
            }
            Operation::Broadcast { root, count } | Operation::Reduce { root, count, .. } => {
                (*count, *root, 0)
            }
            Operation::AllToAll { counts: Matrix::Equal(count) } => (*count, 0, 0),
            Operation::SendRecv { from, to, count } => (*count, *from, *to),
            Operation::AllToAll { .. } | Operation::Barrier => (0, 0, 0),
        };
        let name = collective.operation().name();
        let reduces = collective
            .operation()
            .reduce_op()
            .filter(|_| *collective.operation() != Operation::Barrier);
        let position = |found: Option<usize>| found.map_or(u8::MAX, |k| k as u8);
        Description {
            operation: position(NAMES.iter().position(|n| *n == name)),
            data: position(DataType::ALL.iter().position(|d| *d == collective.data())),
            reduce: reduces
                .map_or(0, |op| position(ReduceOp::ALL.iter().position(|o| *o == op)) + 1),
            count,
            root: root as u32,
            to: to as u32,
            tag: 0,
        }
    }

    /// Of the split of the communicator, whatever each rank says in it.
    pub fn split() -> Description {
        let operation = NAMES.iter().position(|n| *n == SPLIT).map_or(u8::MAX, |k| k as u8);
        Description { operation, data: 0, reduce: 0, count: 0, root: 0, to: 0, tag: 0 }
    }

    /// The same, where ranks are counted otherwise.
    pub(crate) fn renumbered(self, of: &[Rank]) -> Description {
        let n = |rank: u32| of.get(rank as usize).map_or(rank, |rank| *rank as u32);
        match NAMES.get(usize::from(self.operation)) {
            Some(&"SendRecv") => Description { root: n(self.root), to: n(self.to), ..self },
            Some(&"Broadcast" | &"Reduce") => Description { root: n(self.root), ..self },
            _ => self,
        }
    }

    /// What frames carry of it.
    pub fn digest(&self) -> u64 {
        let small =
            u64::from(self.operation) | u64::from(self.data) << 8 | u64::from(self.reduce) << 16;
        digest(
            [small, self.count, u64::from(self.root) << 32 | u64::from(self.to), self.tag]
                .into_iter(),
        )
    }

    pub(crate) fn encode(&self, w: &mut Writer) {
        w.u8(self.operation)
            .u8(self.data)
            .u8(self.reduce)
            .u64(self.count)
            .u32(self.root)
            .u32(self.to)
            .u64(self.tag);
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<Description> {
        Some(Description {
            operation: r.u8()?,
            data: r.u8()?,
            reduce: r.u8()?,
            count: r.u64()?,
            root: r.u32()?,
            to: r.u32()?,
            tag: r.u64()?,
        })
    }
}

impl std::fmt::Display for Description {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = NAMES.get(usize::from(self.operation)).unwrap_or(&"an unknown operation");
        write!(f, "{name}")?;
        if [SPLIT, "Barrier"].contains(name) {
            return Ok(());
        }
        match DataType::ALL.get(usize::from(self.data)) {
            Some(data) => write!(f, " of {} {data:?}", self.count)?,
            None => write!(f, " of {} elements", self.count)?,
        }
        if let Some(op) = self.reduce.checked_sub(1).and_then(|k| ReduceOp::ALL.get(usize::from(k)))
        {
            write!(f, ", {op:?}")?;
        }
        match *name {
            "Broadcast" | "Reduce" => write!(f, ", root {}", self.root),
            "SendRecv" if self.tag != 0 => {
                write!(f, ", from {} to {}, tag {}", self.root, self.to, self.tag)
            }
            "SendRecv" => write!(f, ", from {} to {}", self.root, self.to),
            _ => Ok(()),
        }
    }
}

/// The first rank whose description differs from that of the lowest rank that is known, and that
/// rank.
pub fn first_that_differs(known: &[Option<Description>]) -> Option<(Rank, Rank)> {
    let mut known = known.iter().enumerate().filter_map(|(rank, d)| d.map(|d| (rank, d)));
    let (lowest, first) = known.next()?;
    known.find(|(_, d)| *d != first).map(|(rank, _)| (lowest, rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_reduce(op: ReduceOp, count: u64, data: DataType) -> Description {
        Description::of(
            &Collective::new(Operation::AllReduce { op, count }, data, false, 4).unwrap(),
        )
    }

    #[test]
    fn whatever_differs_is_seen_and_named() {
        let a = all_reduce(ReduceOp::Sum, 5, DataType::F32);
        let others = [
            all_reduce(ReduceOp::Max, 5, DataType::F32),
            all_reduce(ReduceOp::Sum, 6, DataType::F32),
            all_reduce(ReduceOp::Sum, 5, DataType::I32),
            Description { root: 1, ..a },
            Description { operation: 0, ..a },
            Description { tag: 1, ..a },
        ];
        for b in others {
            assert_ne!(a.digest(), b.digest(), "{b}");
            assert_eq!(first_that_differs(&[None, Some(a), Some(a), Some(b)]), Some((1, 3)));
        }
        assert_eq!(a.to_string(), "AllReduce of 5 F32, Sum");
        assert_eq!(first_that_differs(&[Some(a), None, Some(a)]), None);
        let split = Description::split();
        assert_ne!(split.digest(), a.digest());
        assert_eq!(split.to_string(), "CommSplit");
    }

    #[test]
    fn what_is_local_is_not_compared() {
        let new = |in_place| {
            Description::of(
                &Collective::new(
                    Operation::Broadcast { root: 2, count: 5 },
                    DataType::U8,
                    in_place,
                    3,
                )
                .unwrap(),
            )
        };
        assert_eq!(new(true), new(false));
        assert_eq!(new(true).to_string(), "Broadcast of 5 U8, root 2");
    }
}
