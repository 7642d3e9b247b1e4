//! Ranks that ask for different operations: all get the same error, and none has success.

use unbroken_collective_protocol::{Failure, Mutant};
use unbroken_schedule::{Collective, Counts, DataType, Matrix, Operation, ReduceOp};

use crate::world::{self, run, Case, Outcome, Random};
use crate::{case, MOST_US};

/// What one rank takes for something else.
fn altered(random: &mut Random, collective: &Collective) -> Collective {
    let other = match (collective.operation().clone(), random.below(4)) {
        (Operation::Broadcast { root, count }, 0) => {
            Operation::Broadcast { root: (root + 1) % collective.ranks(), count }
        }
        (Operation::Reduce { op, root, count }, 0) => {
            Operation::Reduce { op, root: (root + 1) % collective.ranks(), count }
        }
        (Operation::AllReduce { count, .. }, 0) => {
            Operation::AllReduce { op: ReduceOp::Product, count }
        }
        (Operation::AllReduce { op, count }, 1) => Operation::AllReduce { op, count: count + 1 },
        (Operation::AllReduce { op, count }, 3) => {
            Operation::AllReduce { op, count: if count == 0 { 5 } else { 0 } }
        }
        (Operation::AllGather { counts: Counts::Equal(count) }, 0) => {
            Operation::AllGather { counts: Counts::Equal(if count == 0 { 5 } else { 0 }) }
        }
        (Operation::Barrier, _) => Operation::AllReduce { op: ReduceOp::Sum, count: 3 },
        (same, 2) => {
            let data = if collective.data() == DataType::U8 { DataType::I8 } else { DataType::U8 };
            return Collective::new(same, data, collective.in_place(), collective.ranks()).unwrap();
        }
        _ => Operation::Barrier,
    };
    Collective::new(other, collective.data(), false, collective.ranks()).unwrap()
}

/// One rank takes its first operation for something else. Gives the case and that rank.
pub(crate) fn disagreement(seed: u64, mutant: Option<Mutant>) -> (Case, usize) {
    let mut case = case(seed);
    let mut random = Random(seed ^ 0xd1ff);
    let ranks = case.topology.ranks();
    let rank = random.below(ranks as u64) as usize;
    let mut collective = case.script[0][0].clone();
    while collective.operation().is_pairwise() {
        collective = world::collective(&mut random, ranks);
    }
    let other = altered(&mut random, &collective);
    let mut inputs = world::inputs(&mut random, &collective);
    inputs[rank] = world::inputs(&mut random, &other).swap_remove(rank);
    case.script = (0..ranks)
        .map(|r| vec![if r == rank { other.clone() } else { collective.clone() }])
        .collect();
    case.inputs = vec![inputs];
    case.faults.clear();
    case.leave = false;
    case.mutant = mutant;
    (case, rank)
}

/// Who has success in an operation that not all agree to.
fn deceived(case: &Case, outcome: &Outcome) -> Option<String> {
    let rank = outcome.outputs.iter().position(|outputs| !outputs.is_empty())?;
    Some(format!("rank {rank} has success in {:?}", case.script[rank][0].operation()))
}

/// Why not all ranks were told the same, if they were not.
fn not_told(seed: u64, mutant: Option<Mutant>) -> Option<String> {
    let (case, rank) = disagreement(seed, mutant);
    let outcome = run(&case, MOST_US);
    if let Some(what) = deceived(&case, &outcome) {
        return Some(format!("seed {seed}: rank {rank} differs, and {what}"));
    }
    let ranks = case.topology.ranks();
    for failure in &outcome.failures {
        match failure {
            Some(Failure::Differs { number: 0, first: 0, other, .. }) if *other == rank.max(1) => {}
            other => {
                return Some(format!("seed {seed}: rank {rank} of {ranks} differs, but {other:?}"))
            }
        }
    }
    None
}

#[test]
fn ranks_that_disagree_all_hear_who_differs_first() {
    for seed in 0..600 {
        assert_eq!(not_told(seed, None), None);
    }
}

#[test]
#[cfg(feature = "mutants")]
fn the_digest_left_out_is_noticed() {
    assert!(
        (0..600).any(|seed| not_told(seed, Some(Mutant::NoDigest)).is_some()),
        "sums of different things go unnoticed"
    );
}

#[test]
#[cfg(feature = "mutants")]
fn agreement_left_out_is_noticed() {
    assert!(
        (0..600).any(|seed| not_told(seed, Some(Mutant::NoConsent)).is_some()),
        "two roots of one broadcast go unnoticed by a third rank"
    );
}

/// An AllToAll of which one rank sees one count otherwise than the other end does. Gives the case,
/// the sender, the receiver, and what is sent and awaited.
fn unequal(seed: u64, mutant: Option<Mutant>) -> (Case, (usize, usize, u64, u64)) {
    let mut case = case(seed);
    let mut random = Random(seed ^ 0xa2a);
    let ranks = case.topology.ranks();
    let counts: Vec<u64> =
        (0..ranks * ranks).map(|_| random.below(3) * random.below(300)).collect();
    let (from, to) = (random.below(ranks as u64) as usize, random.below(ranks as u64) as usize);
    let to = if to == from { (to + 1) % ranks } else { to };
    let sent = counts[from * ranks + to];
    let awaited = if sent > 0 && random.below(2) == 0 { 0 } else { sent + 1 };
    let of = |counts: &[u64]| {
        let operation = Operation::AllToAll { counts: Matrix::Each(counts.into()) };
        Collective::new(operation, DataType::I32, false, ranks).unwrap()
    };
    let mut other = counts.clone();
    other[from * ranks + to] = awaited;
    let input = world::inputs(&mut random, &of(&counts));
    case.script = (0..ranks).map(|r| vec![of(if r == to { &other } else { &counts })]).collect();
    (case.inputs, case.leave, case.mutant) = (vec![input], false, mutant);
    case.faults.clear();
    (case, (from, to, sent, awaited))
}

#[test]
fn a_pair_that_does_not_agree_is_named_to_all_with_both_counts() {
    for seed in 0..300 {
        let (case, (from, to, sent, awaited)) = unequal(seed, None);
        let outcome = run(&case, MOST_US);
        assert_eq!(deceived(&case, &outcome), None, "seed {seed}");
        for failure in outcome.failures {
            let Some(Failure::Counts { number: 0, from: f, to: t, sent: s, awaited: a, .. }) =
                failure
            else {
                panic!("seed {seed}: {failure:?}")
            };
            assert_eq!((f, t, s, a), (from, to, sent, awaited), "seed {seed}");
        }
    }
}
