//! The reason why a communicator is broken. All ranks get it, and every later operation returns it.

use thiserror::Error;

use crate::agree::Description;
use crate::codec::{Reader, Writer};
use crate::Rank;

/// The reason why a communicator is broken.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// Ranks have called different operations.
    #[error(
        "operation {number} is not the same at all ranks: rank {other} has {others}, rank {first} \
         has {its}"
    )]
    Differs {
        /// The operation.
        number: u64,
        /// The lowest rank that is known.
        first: Rank,
        /// What it has.
        its: Description,
        /// The first rank that differs from it.
        other: Rank,
        /// What it has.
        others: Description,
    },
    /// A rank sends more or less than the receiver expects.
    #[error(
        "operation {number} is not the same at all ranks: rank {from} sends {sent} {} to rank {to}, \
         which awaits {awaited}", elements(*.data)
    )]
    Counts {
        /// The operation.
        number: u64,
        /// Its type, as a position in `DataType::ALL`.
        data: u8,
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The number of elements that the sender sends.
        sent: u64,
        /// The number of elements that the receiver expects.
        awaited: u64,
    },
    /// A process has ended.
    #[error("the process of rank {rank} is gone")]
    Lost {
        /// The rank.
        rank: Rank,
    },
    /// A rank has destroyed its communicator while others still use it.
    #[error("rank {rank} has left the communicator after {done} operations")]
    Left {
        /// The rank.
        rank: Rank,
        /// The number of operations of all ranks that it had completed.
        done: u64,
    },
    /// A rank has aborted the communicator.
    #[error("rank {rank} has aborted the communicator")]
    Aborted {
        /// The rank.
        rank: Rank,
    },
    /// There was no progress for the longest permitted time.
    #[error("operation {number} stands still at rank {by}: nothing came from rank {from}, or was \
             taken by it, within {seconds} s{}", silent(.missing))]
    Stalled {
        /// The rank that has waited.
        by: Rank,
        /// The operation.
        number: u64,
        /// The rank for which it waits.
        from: Rank,
        /// The ranks that did not confirm that they had started the operation, although all were
        /// asked; not always known.
        missing: Vec<Rank>,
        /// For how long.
        seconds: u32,
    },
    /// Two ranks have no path left.
    #[error(
        "rank {a} and rank {b} have had no path for {seconds} s: no NIC of one of their hosts is up"
    )]
    Parted {
        /// One.
        a: Rank,
        /// The other.
        b: Rank,
        /// For how long.
        seconds: u32,
    },
    /// A rank has sent an impossible message.
    #[error(
        "rank {rank} breaks the protocol, as rank {by} sees it (number {what}); all ranks must run \
         the same build"
    )]
    Broke {
        /// The rank.
        rank: Rank,
        /// The rank that noticed it.
        by: Rank,
        /// A description for developers.
        what: u32,
    },
}

/// A number of elements of a type, from a description.
fn elements(data: u8) -> String {
    let data = unbroken_schedule::DataType::ALL.get(usize::from(data));
    data.map_or("elements".into(), |data| format!("{data:?}"))
}

/// The most ranks that a message names; further ones are counted.
const NAMED: usize = 16;

/// The ranks that were asked and did not answer.
fn silent(missing: &[Rank]) -> String {
    let named: Vec<String> =
        missing.iter().take(NAMED).map(|rank| format!("rank {rank}")).collect();
    match (named.as_slice(), missing.len().saturating_sub(NAMED)) {
        ([], _) => String::new(),
        ([one], _) => format!("; {one} has not asked for it, or does not answer"),
        ([first @ .., last], 0) => {
            format!("; {} and {last} have not asked for it, or do not answer", first.join(", "))
        }
        (named, more) => {
            format!(
                "; {} and {more} others have not asked for it, or do not answer",
                named.join(", ")
            )
        }
    }
}

impl Failure {
    /// This failure with other rank numbers: `of[k]` is the new number of rank *k*.
    #[must_use]
    pub fn renumbered(self, of: &[Rank]) -> Failure {
        let n = |rank: Rank| of.get(rank).copied().unwrap_or(rank);
        match self {
            Failure::Differs { number, first, its, other, others } => Failure::Differs {
                number,
                first: n(first),
                its: its.renumbered(of),
                other: n(other),
                others: others.renumbered(of),
            },
            Failure::Counts { number, data, from, to, sent, awaited } => {
                Failure::Counts { number, data, from: n(from), to: n(to), sent, awaited }
            }
            Failure::Lost { rank } => Failure::Lost { rank: n(rank) },
            Failure::Left { rank, done } => Failure::Left { rank: n(rank), done },
            Failure::Aborted { rank } => Failure::Aborted { rank: n(rank) },
            Failure::Stalled { by, number, from, missing, seconds } => {
                let missing = missing.into_iter().map(n).collect();
                Failure::Stalled { by: n(by), number, from: n(from), missing, seconds }
            }
            Failure::Parted { a, b, seconds } => Failure::Parted { a: n(a), b: n(b), seconds },
            Failure::Broke { rank, by, what } => Failure::Broke { rank: n(rank), by: n(by), what },
        }
    }

    pub(crate) fn encode(&self, w: &mut Writer) {
        match self {
            Failure::Differs { number, first, its, other, others } => {
                its.encode(w.u8(0).u64(*number).rank(*first));
                others.encode(w.rank(*other));
            }
            Failure::Lost { rank } => {
                w.u8(1).rank(*rank);
            }
            Failure::Left { rank, done } => {
                w.u8(2).rank(*rank).u64(*done);
            }
            Failure::Stalled { by, number, from, missing, seconds } => {
                w.u8(3).rank(*by).u64(*number).rank(*from).u32(*seconds).u32(missing.len() as u32);
                missing.iter().for_each(|rank| {
                    w.rank(*rank);
                });
            }
            Failure::Parted { a, b, seconds } => {
                w.u8(4).rank(*a).rank(*b).u32(*seconds);
            }
            Failure::Broke { rank, by, what } => {
                w.u8(5).rank(*rank).rank(*by).u32(*what);
            }
            Failure::Aborted { rank } => {
                w.u8(6).rank(*rank);
            }
            Failure::Counts { number, data, from, to, sent, awaited } => {
                w.u8(7).u64(*number).u8(*data).rank(*from).rank(*to).u64(*sent).u64(*awaited);
            }
        }
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<Failure> {
        Some(match r.u8()? {
            0 => Failure::Differs {
                number: r.u64()?,
                first: r.rank()?,
                its: Description::decode(r)?,
                other: r.rank()?,
                others: Description::decode(r)?,
            },
            1 => Failure::Lost { rank: r.rank()? },
            2 => Failure::Left { rank: r.rank()?, done: r.u64()? },
            3 => {
                let (by, number, from, seconds) = (r.rank()?, r.u64()?, r.rank()?, r.u32()?);
                Failure::Stalled { by, number, from, missing: r.list(Reader::rank)?, seconds }
            }
            4 => Failure::Parted { a: r.rank()?, b: r.rank()?, seconds: r.u32()? },
            5 => Failure::Broke { rank: r.rank()?, by: r.rank()?, what: r.u32()? },
            6 => Failure::Aborted { rank: r.rank()? },
            7 => Failure::Counts {
                number: r.u64()?,
                data: r.u8()?,
                from: r.rank()?,
                to: r.rank()?,
                sent: r.u64()?,
                awaited: r.u64()?,
            },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_schedule::{Collective, DataType, Operation};

    #[test]
    fn a_failure_of_two_is_told_with_the_numbers_of_all() {
        let takes = |count| {
            let operation = Operation::SendRecv { from: 0, to: 1, count };
            Description::of(&Collective::new(operation, DataType::U8, false, 2).unwrap())
        };
        let of_two =
            Failure::Differs { number: 3, first: 0, its: takes(5), other: 1, others: takes(6) };
        let said = of_two.renumbered(&[7, 4]).to_string();
        assert!(
            said.contains("rank 4 has SendRecv of 6 U8, from 7 to 4, rank 7 has SendRecv of 5 U8"),
            "{said}"
        );
        let stalled = Failure::Stalled { by: 0, number: 1, from: 1, missing: vec![1], seconds: 2 };
        let of_all = Failure::Stalled { by: 7, number: 1, from: 4, missing: vec![4], seconds: 2 };
        assert_eq!(stalled.renumbered(&[7, 4]), of_all);
    }

    #[test]
    fn who_does_not_come_is_named_as_far_as_there_is_room() {
        let said = |missing: std::ops::Range<Rank>| {
            Failure::Stalled { by: 0, number: 5, from: 1, missing: missing.collect(), seconds: 2 }
                .to_string()
        };
        assert!(said(0..0).ends_with("within 2 s"), "{}", said(0..0));
        assert!(
            said(3..4).ends_with("within 2 s; rank 3 has not asked for it, or does not answer"),
            "{}",
            said(3..4)
        );
        assert!(said(3..6).contains("; rank 3, rank 4 and rank 5 have not"), "{}", said(3..6));
        assert!(said(1..21).contains("rank 16 and 4 others have not"), "{}", said(1..21));
    }
}
