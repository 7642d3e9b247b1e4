//! Descriptions of operations, by which ranks notice that they disagree.
//!
//! Every frame carries a digest of the operation as its sender understands it. A receiver with a
//! different digest does not touch the data, so data about which ranks disagree is never summed.
//! The receiver then sends its [`Description`] to all ranks, and they send theirs. Once all are
//! known, or after a timeout, each rank finds the same first rank that differs. Ranks that wait for
//! each other without exchanging anything notice after they have waited for a long time. If a rank
//! could complete an operation without hearing from all others, it waits until all agree
//! ([`crate::consent`]).

use std::sync::Arc;

use unbroken_schedule::{Collective, Counts, DataType, Matrix, Operation, ReduceOp};

use crate::codec::{Reader, Writer};
use crate::Rank;

/// The properties on which all ranks must agree. Numbers that do not apply to an operation are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// The operation: its index among the names of [`Operation::name`] in alphabetical order; or
    /// the split of the communicator.
    pub operation: u8,
    /// Its type: the index in [`DataType::ALL`].
    pub data: u8,
    /// Its reduction: the index in [`ReduceOp::ALL`], plus one.
    pub reduce: u8,
    /// Its count, or a digest of its counts. For an AllToAll with a matrix, no rank knows all
    /// counts ([`Terms::counts`]).
    pub count: u64,
    /// The root; for SendRecv, the sender.
    pub root: u32,
    /// For SendRecv, the receiver.
    pub to: u32,
    /// For SendRecv, the tag by which receives match sends. Ranks that differ only in the tag do
    /// not disagree: the program may still post the matching operation.
    pub tag: u64,
}

/// Internal operations follow those of programs.
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
/// A split gathers data about ranks, and must not be mistaken for an AllGather of the program.
const SPLIT: &str = "CommSplit";

/// An operation as a rank understands it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The properties on which all ranks must agree.
    pub description: Description,
    /// For an AllToAll with a count for each pair: the counts that this rank sends to each rank, then
    /// the counts that it expects from each. For blocks with a count each: these counts. Otherwise
    /// empty.
    pub counts: Arc<[u64]>,
}

/// How ranks find out that all of them agree on an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agreed {
    /// Each rank's result depends on what every other one sends.
    Data,
    /// All ranks confirm it; this is the checksum of this rank.
    All(u64),
    /// Nothing is transferred; the sender confirms it.
    Sender {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
}

impl Terms {
    /// The terms of a collective with this description, at rank `me`.
    pub fn of(description: Description, collective: &Collective, me: Rank) -> Terms {
        let counts = match collective.operation() {
            Operation::AllToAll { counts: Matrix::Each(_) } => {
                let ranks = collective.ranks();
                let sends = (0..ranks).map(|peer| collective.pair(me, peer));
                sends.chain((0..ranks).map(|peer| collective.pair(peer, me))).collect()
            }
            Operation::AllGather { counts: Counts::Each(each) }
            | Operation::ReduceScatter { counts: Counts::Each(each), .. } => each.clone(),
            _ => Arc::default(),
        };
        Terms { description, counts }
    }

    /// The terms that a rank has sent.
    pub(crate) fn said(description: Description, counts: Vec<u64>) -> Terms {
        Terms { description, counts: counts.into() }
    }

    /// Whether each pair of ranks has its own count.
    pub(crate) fn has_pairs(&self) -> bool {
        self.name() == Some("AllToAll") && !self.counts.is_empty()
    }

    fn name(&self) -> Option<&'static str> {
        NAMES.get(usize::from(self.description.operation)).copied()
    }

    /// The counts that the rank sends to each rank, and those that it expects from each.
    fn pairs(&self) -> Option<(&[u64], &[u64])> {
        self.has_pairs().then(|| self.counts.split_at(self.counts.len() / 2))
    }

    /// How ranks find out that all agree.
    pub(crate) fn agreed(&self, me: Rank) -> Agreed {
        let Description { count, root, to, .. } = self.description;
        match self.name() {
            Some("Barrier" | SPLIT) => Agreed::Data,
            Some("SendRecv") if count == 0 && root != to => {
                Agreed::Sender { from: root as Rank, to: to as Rank }
            }
            Some("SendRecv") => Agreed::Data,
            Some("Broadcast" | "Reduce") => Agreed::All(0),
            _ if self.has_pairs() => Agreed::All(self.checksum(me)),
            _ if self.counts.contains(&0) => Agreed::All(0),
            _ if self.counts.is_empty() && count == 0 => Agreed::All(0),
            _ => Agreed::Data,
        }
    }

    /// A checksum whose sum over all ranks is 0 if every pair agrees.
    fn checksum(&self, me: Rank) -> u64 {
        let Some((sends, awaits)) = self.pairs() else { return 0 };
        let of = |from: Rank, to: Rank, count: u64| match count {
            0 => 0,
            _ => digest([from as u64, to as u64, count].into_iter()),
        };
        let sum = |counts: &[u64], of: &dyn Fn(Rank, u64) -> u64| {
            let each = counts.iter().enumerate().map(|(peer, count)| of(peer, *count));
            each.fold(0u64, u64::wrapping_add)
        };
        let sent = sum(sends, &|peer, count| of(me, peer, count));
        sent.wrapping_sub(sum(awaits, &|peer, count| of(peer, me, count)))
    }

    pub(crate) fn encode(&self, w: &mut Writer) {
        self.description.encode(w);
        w.numbers(&self.counts);
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<Terms> {
        Some(Terms::said(Description::decode(r)?, r.list(Reader::u64)?))
    }
}

/// A pair of ranks that disagree about the size of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unequal {
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) sent: u64,
    pub(crate) awaited: u64,
}

/// The first pair that disagrees, among the ranks whose terms are known.
pub(crate) fn first_unequal_pair(known: &[Option<Terms>]) -> Option<Unequal> {
    let pairs: Vec<_> = known.iter().map(|terms| terms.as_ref().and_then(Terms::pairs)).collect();
    for (from, sender) in pairs.iter().enumerate() {
        for (to, receiver) in pairs.iter().enumerate() {
            let (Some((sends, _)), Some((_, awaits))) = (sender, receiver) else { continue };
            // A rank may say anything.
            let (Some(sent), Some(awaited)) = (sends.get(to), awaits.get(from)) else { continue };
            if sent != awaited {
                return Some(Unequal { from, to, sent: *sent, awaited: *awaited });
            }
        }
    }
    None
}

/// FNV-1a.
fn digest(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        word.to_le_bytes()
            .iter()
            .fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    })
}

impl Description {
    /// The description of a collective.
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

    /// The description of a split of the communicator, whatever data the ranks exchange in it.
    pub fn split() -> Description {
        let operation = NAMES.iter().position(|n| *n == SPLIT).map_or(u8::MAX, |k| k as u8);
        Description { operation, data: 0, reduce: 0, count: 0, root: 0, to: 0, tag: 0 }
    }

    /// This description with other rank numbers.
    pub(crate) fn renumbered(self, of: &[Rank]) -> Description {
        let n = |rank: u32| of.get(rank as usize).map_or(rank, |rank| *rank as u32);
        match NAMES.get(usize::from(self.operation)) {
            Some(&"SendRecv") => Description { root: n(self.root), to: n(self.to), ..self },
            Some(&"Broadcast" | &"Reduce") => Description { root: n(self.root), ..self },
            _ => self,
        }
    }

    /// The digest that frames carry.
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

/// Finds the lowest rank whose terms are known, and the first rank whose description differs from
/// it.
pub fn first_that_differs(known: &[Option<Terms>]) -> Option<(Rank, Rank)> {
    let mut known =
        known.iter().enumerate().filter_map(|(rank, t)| Some((rank, t.as_ref()?.description)));
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
            let said = |d| Some(Terms::said(d, Vec::new()));
            assert_eq!(first_that_differs(&[None, said(a), said(a), said(b)]), Some((1, 3)));
        }
        assert_eq!(a.to_string(), "AllReduce of 5 F32, Sum");
        let said = Some(Terms::said(a, Vec::new()));
        assert_eq!(first_that_differs(&[said.clone(), None, said]), None);
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

    fn all_to_all(me: Rank, matrix: &[u64]) -> Terms {
        let ranks = matrix.len().isqrt();
        let operation = Operation::AllToAll { counts: Matrix::Each(matrix.into()) };
        let collective = Collective::new(operation, DataType::U8, false, ranks).unwrap();
        Terms::of(Description::of(&collective), &collective, me)
    }

    fn sum(terms: &[Option<Terms>]) -> u64 {
        let of = |(me, terms): (Rank, &Option<Terms>)| match terms.as_ref().unwrap().agreed(me) {
            Agreed::All(sum) => sum,
            other => panic!("{other:?}"),
        };
        terms.iter().enumerate().map(of).fold(0, u64::wrapping_add)
    }

    #[test]
    fn a_pair_that_does_not_agree_shows_in_the_sum_and_is_named() {
        let right = [0, 3, 0, 7, 1, 0, 0, 2, 5];
        let mut said: Vec<_> = (0..3).map(|me| Some(all_to_all(me, &right))).collect();
        assert_eq!((sum(&said), first_unequal_pair(&said)), (0, None));
        // Rank 2 awaits what rank 0 does not send.
        let mut wrong = right;
        wrong[2] = 4;
        said[2] = Some(all_to_all(2, &wrong));
        assert_ne!(sum(&said), 0);
        let unequal = Unequal { from: 0, to: 2, sent: 0, awaited: 4 };
        assert_eq!(first_unequal_pair(&said), Some(unequal));
        said[0] = None;
        assert_eq!(first_unequal_pair(&said), None, "it has not spoken");
        said[0] = Some(Terms::said(said[1].as_ref().unwrap().description, vec![9]));
        assert_eq!(first_unequal_pair(&said), None, "what it says is short");
    }

    /// If a rank could complete without the others, it asks them.
    #[test]
    fn ranks_are_asked_where_data_does_not_show_that_they_agree() {
        let of = |operation| {
            let collective = Collective::new(operation, DataType::F32, false, 3).unwrap();
            Terms::of(Description::of(&collective), &collective, 1).agreed(1)
        };
        let op = ReduceOp::Sum;
        let counts = |each: &[u64]| Counts::Each(each.into());
        for asked in [
            Operation::Broadcast { root: 1, count: 5 },
            Operation::Reduce { op, root: 0, count: 5 },
            Operation::AllReduce { op, count: 0 },
            Operation::AllGather { counts: Counts::Equal(0) },
            Operation::AllGather { counts: counts(&[2, 0, 2]) },
            Operation::ReduceScatter { op, counts: counts(&[2, 0, 2]) },
            Operation::AllToAll { counts: Matrix::Equal(0) },
            Operation::AllToAll { counts: Matrix::Each([0; 9].into()) },
        ] {
            assert_eq!(of(asked.clone()), Agreed::All(0), "{asked:?}");
        }
        for shown in [
            Operation::AllReduce { op, count: 1 },
            Operation::AllGather { counts: counts(&[2, 1, 2]) },
            Operation::ReduceScatter { op, counts: Counts::Equal(1) },
            Operation::AllToAll { counts: Matrix::Equal(1) },
            Operation::SendRecv { from: 0, to: 1, count: 1 },
            Operation::Barrier,
        ] {
            assert_eq!(of(shown.clone()), Agreed::Data, "{shown:?}");
        }
        let empty = of(Operation::SendRecv { from: 2, to: 1, count: 0 });
        assert_eq!(empty, Agreed::Sender { from: 2, to: 1 });
    }
}
