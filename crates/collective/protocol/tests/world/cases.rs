//! Operations at random, and whether what came of a case is right.

use super::*;
use unbroken_schedule::verify::expected;
use unbroken_schedule::{Counts, Matrix, Operation};

/// An operation at random.
pub fn collective(random: &mut Random, ranks: usize) -> Collective {
    let count = [1, 7, 64, 333, 2_000, 0][random.below(6) as usize];
    let op = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg][random.below(4) as usize];
    let data =
        [DataType::I32, DataType::U8, DataType::I64, DataType::F32][random.below(4) as usize];
    let rank = |random: &mut Random| random.below(ranks as u64) as usize;
    let operation = match random.below(10) {
        0 | 1 => Operation::AllReduce { op, count },
        2 => Operation::ReduceScatter { op, counts: Counts::Equal(count) },
        3 => Operation::AllGather { counts: Counts::Equal(count) },
        4 => Operation::Broadcast { root: rank(random), count },
        5 => Operation::Reduce { op, root: rank(random), count },
        6 => Operation::AllToAll { counts: Matrix::Equal(count.min(300)) },
        7 => {
            let counts = (0..ranks * ranks).map(|_| random.below(3) * random.below(90)).collect();
            Operation::AllToAll { counts: Matrix::Each(counts) }
        }
        8 => Operation::SendRecv { from: rank(random), to: rank(random), count },
        _ => Operation::Barrier,
    };
    let in_place = random.below(2) == 0 && !operation.is_pairwise();
    Collective::new(operation, data, in_place, ranks).unwrap()
}

/// What ranks give to it.
pub fn inputs(random: &mut Random, collective: &Collective) -> Vec<Vec<u64>> {
    let number = |random: &mut Random| match collective.data() {
        DataType::F32 => u64::from((random.below(16) as f32).to_bits()),
        data => random.below(100) & (u64::MAX >> (64 - 8 * data.bytes())),
    };
    let of = |random: &mut Random, rank| {
        let range = collective.input_range(rank);
        (range.start..range.end).map(|_| number(random)).collect()
    };
    (0..collective.ranks()).map(|rank| of(random, rank)).collect()
}

/// What is wrong with an outcome, if anything is.
pub fn wrong(case: &Case, outcome: &Outcome) -> Option<String> {
    if let Some((rank, failure)) =
        outcome.failures.iter().enumerate().find_map(|(r, f)| f.as_ref().map(|f| (r, f)))
    {
        return Some(format!("rank {rank} fails: {failure}"));
    }
    if outcome.took_us.is_none() {
        return Some("it never ends".into());
    }
    for (k, collective) in case.script[0].iter().enumerate() {
        let want = expected(collective, &case.topology, &case.inputs[k]);
        for (rank, want) in want.iter().enumerate() {
            if outcome.outputs[rank].get(k) != Some(want) {
                return Some(format!(
                    "rank {rank} has a wrong result of {:?}",
                    collective.operation()
                ));
            }
        }
    }
    None
}
