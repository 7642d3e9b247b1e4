//! Ranks on several hosts of the emulated network, as threads of one process.

mod ranks;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use ranks::{check, options, Fabric};
use unbroken_coll::{
    Buffers, Counts, DataType, Error, Folding, Matrix, Operation, Options, ReduceOp,
};
use unbroken_fabric::DeviceKind;

#[test]
fn every_operation_on_two_hosts() {
    let fabric = Fabric::new(DeviceKind::Full);
    let op = ReduceOp::Sum;
    let operations = [
        Operation::AllReduce { op, count: 10_000 },
        Operation::ReduceScatter { op, counts: Counts::Equal(3_333) },
        Operation::AllGather { counts: Counts::Equal(3_333) },
        Operation::Broadcast { root: 1, count: 10_001 },
        Operation::Reduce { op, root: 0, count: 9_999 },
        Operation::AllToAll { counts: Matrix::Equal(5_000) },
        Operation::SendRecv { from: 0, to: 1, count: 7 },
        Operation::Barrier,
        Operation::AllReduce { op: ReduceOp::Avg, count: 1 },
    ];
    fabric.run(&["a", "b"], &options(), |comm| {
        for operation in &operations {
            check(comm, operation, DataType::F32, false, 1);
            if !operation.is_pairwise() {
                check(comm, operation, DataType::I64, true, 2);
            }
        }
    });
}

/// As many ranks as share two cores in a test of seconds: four on each of four hosts, side by side
/// or mixed; every operation, with a NIC that is dead for some of them.
#[test]
fn every_operation_on_sixteen_ranks() {
    let block = ["a", "a", "a", "a", "b", "b", "b", "b", "c", "c", "c", "c", "d", "d", "d", "d"];
    let mixed = ["a", "b", "c", "d", "d", "c", "b", "a", "a", "b", "c", "d", "a", "b", "c", "d"];
    let each: Vec<u64> = (0..16).map(|rank| [700, 0, 1, 33][rank % 4]).collect();
    let op = ReduceOp::Sum;
    let operations = [
        Operation::AllReduce { op, count: 5_000 },
        Operation::ReduceScatter { op, counts: Counts::Equal(333) },
        Operation::ReduceScatter { op: ReduceOp::Max, counts: Counts::Each(each.clone().into()) },
        Operation::AllGather { counts: Counts::Equal(333) },
        Operation::AllGather { counts: Counts::Each(each.into()) },
        Operation::Broadcast { root: 9, count: 5_001 },
        Operation::Reduce { op, root: 6, count: 4_999 },
        Operation::AllToAll { counts: Matrix::Equal(100) },
        Operation::SendRecv { from: 1, to: 14, count: 7_000 },
        Operation::Barrier,
        Operation::AllReduce { op: ReduceOp::Avg, count: 1 },
    ];
    for (hosts, folding) in [(block, Folding::InOrder), (mixed, Folding::Any)] {
        let fabric = Fabric::new(DeviceKind::Full);
        fabric.run(&hosts, &Options { folding, ..options() }, |comm| {
            for (round, operation) in operations.iter().enumerate() {
                if comm.rank() == 0 {
                    match round {
                        3 => fabric.breaker.set("nic b/2 dead"),
                        8 => fabric.breaker.clear(),
                        _ => {}
                    }
                }
                check(comm, operation, DataType::F32, false, round as u64);
                if !operation.is_pairwise() {
                    check(comm, operation, DataType::I64, true, round as u64);
                }
            }
        });
    }
}

#[test]
fn a_nic_dies_again_and_again_and_results_are_right() {
    for device in [DeviceKind::Full, DeviceKind::Plain] {
        let fabric = Fabric::new(device);
        let breaker = &fabric.breaker;
        fabric.run(&["a", "b", "c"], &options(), |comm| {
            let operation = Operation::AllReduce { op: ReduceOp::Sum, count: 100_000 };
            for round in 0..12 {
                if comm.rank() == 0 {
                    match round % 4 {
                        1 => breaker.set("nic a/1 dead"),
                        2 => breaker.set("nic b/0 dead"),
                        3 => breaker.clear(),
                        _ => {}
                    }
                }
                check(comm, &operation, DataType::F32, true, round);
            }
            if comm.rank() == 0 {
                let counters = comm.counters();
                assert!(counters.failures > 0 && counters.moves > 0, "{counters:?}");
            }
        });
    }
}

/// Says so when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Hundreds of operations, with a random fault before every few of them that ends a little later,
/// at some frame or other.
#[test]
fn random_faults_at_random_frames_change_no_result() {
    let fabric = Fabric::new(DeviceKind::Plain);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut state = 7u64;
            let mut draw = |n: u64| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % n
            };
            while !over.load(Ordering::Relaxed) {
                let (host, rail) = (["a", "b", "c"][draw(3) as usize], draw(3));
                fabric.breaker.set(&match draw(5) {
                    0 => format!("nic {host}/{rail} dead"),
                    1 => format!("nic {host}/{rail} down"),
                    2 => format!("cable {host}/{rail} cut"),
                    3 => format!("switch rail{rail} down"),
                    _ => format!("wqe-error {host}/{rail}"),
                });
                std::thread::sleep(Duration::from_millis(draw(40)));
                fabric.breaker.clear();
                std::thread::sleep(Duration::from_millis(draw(40)));
            }
        });
        // Whatever ends the ranks ends the faults.
        let _ends = Ends(&over);
        fabric.run(&["a", "b", "c"], &options(), |comm| {
            for round in 0..300 {
                let count = 1_000 + 97 * (round % 300);
                let operation = match round % 4 {
                    0 => Operation::AllReduce { op: ReduceOp::Sum, count },
                    1 => Operation::AllGather { counts: Counts::Equal(count) },
                    2 => {
                        Operation::ReduceScatter { op: ReduceOp::Max, counts: Counts::Equal(count) }
                    }
                    _ => Operation::AllToAll { counts: Matrix::Equal(count) },
                };
                check(comm, &operation, DataType::I32, false, round);
            }
        });
    });
}

#[test]
fn several_communicators_work_at_once() {
    let fabric = Fabric::new(DeviceKind::Full);
    std::thread::scope(|scope| {
        for (k, hosts) in [["a", "b"], ["b", "c"], ["a", "a"]].iter().enumerate() {
            let fabric = &fabric;
            scope.spawn(move || {
                fabric.run(hosts, &options(), |comm| {
                    for round in 0..30 {
                        let operation =
                            Operation::AllReduce { op: ReduceOp::Sum, count: 5_000 + k as u64 };
                        check(comm, &operation, DataType::F64, true, round + 100 * k as u64);
                    }
                });
            });
        }
    });
}

#[test]
fn wrong_requests_are_refused_and_cost_nothing() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b"], &options(), |comm| {
        let mut buffer = [0; 10];
        let said = |result: Result<(), Error>| result.unwrap_err().to_string();
        assert!(said(comm.all_reduce(DataType::F32, ReduceOp::Sum, &mut buffer))
            .contains("no whole number of F32"));
        let root = Operation::Broadcast { root: 2, count: 10 };
        let wrong = comm.run(root, DataType::U8, Buffers::InPlace(&mut buffer));
        assert!(said(wrong).contains("rank 2 does not exist; the numbers are 0 to 1"));
        let short = Operation::AllReduce { op: ReduceOp::Max, count: 11 };
        let wrong = comm.run(short, DataType::U8, Buffers::InPlace(&mut buffer));
        assert!(
            said(wrong).contains("the buffer has 10 bytes; rank 0 needs 11") || comm.rank() == 1
        );
        check(comm, &Operation::Barrier, DataType::U8, false, 0);
    });
}

#[test]
fn ranks_that_disagree_are_told_by_name() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c"], &options(), |comm| {
        let mut buffer = [0; 64];
        let op = if comm.rank() == 2 { ReduceOp::Max } else { ReduceOp::Sum };
        let error = comm.all_reduce(DataType::F32, op, &mut buffer).unwrap_err().to_string();
        let want = "rank 2 has AllReduce of 16 F32, Max, rank 0 has AllReduce of 16 F32, Sum";
        assert!(error.contains(want), "rank {}: {error}", comm.rank());
        assert!(comm.barrier().unwrap_err().to_string().contains(want), "it stays broken");
    });
}

/// Each is done with its part before it hears of the other's: the next operation names the one that
/// they disagree about.
#[test]
fn roots_that_differ_are_named_though_each_has_done_its_part() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b"], &options(), |comm| {
        let _ = comm.broadcast(DataType::U8, comm.rank(), &mut [1; 64]);
        let error =
            comm.all_reduce(DataType::U8, ReduceOp::Sum, &mut [1; 64]).unwrap_err().to_string();
        assert!(error.contains("operation 0 is not the same at all ranks"), "{error}");
        assert!(error.contains("root 0") && error.contains("root 1"), "{error}");
    });
}

#[test]
fn a_rank_that_has_left_is_named() {
    let fabric = Fabric::new(DeviceKind::Full);
    fabric.run(&["a", "b", "c"], &options(), |comm| {
        check(comm, &Operation::Barrier, DataType::U8, false, 0);
        if comm.rank() != 1 {
            let error = comm.barrier().unwrap_err().to_string();
            assert!(
                error.contains("rank 1 has left the communicator after 1 operations"),
                "{error}"
            );
        }
    });
}

fn operation(ranks: usize) -> impl Strategy<Value = Operation> {
    let op = prop::sample::select(ReduceOp::ALL.to_vec());
    let count = prop_oneof![1 => Just(0u64), 2 => 1u64..8, 4 => 1u64..3000];
    let each = prop::collection::vec(prop_oneof![1 => Just(0u64), 3 => 0u64..900], ranks);
    let counts =
        prop_oneof![(0u64..900).prop_map(Counts::Equal), each.prop_map(|c| Counts::Each(c.into()))];
    prop_oneof![
        3 => (op.clone(), count.clone()).prop_map(|(op, count)| Operation::AllReduce { op, count }),
        2 => (op.clone(), counts.clone()).prop_map(|(op, counts)| Operation::ReduceScatter { op, counts }),
        2 => counts.prop_map(|counts| Operation::AllGather { counts }),
        1 => (0..ranks, count.clone()).prop_map(|(root, count)| Operation::Broadcast { root, count }),
        1 => (op, 0..ranks, count.clone()).prop_map(|(op, root, count)| Operation::Reduce { op, root, count }),
        1 => (0u64..300).prop_map(|count| Operation::AllToAll { counts: Matrix::Equal(count) }),
        1 => (0..ranks, 0..ranks, count).prop_map(|(from, to, count)| Operation::SendRecv { from, to, count }),
        1 => Just(Operation::Barrier),
    ]
}

/// Ranks on hosts in some order, several on some: memory and NICs.
fn places() -> impl Strategy<Value = Vec<&'static str>> {
    (prop::collection::vec(prop::sample::select(vec!["a", "b", "c", "d"]), 2..7), any::<bool>())
        .prop_map(|(mut hosts, sorted)| {
            if sorted {
                hosts.sort_unstable();
            }
            hosts
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every operation, type and odd size, against the reference, on 2 to 6 ranks of 1 to 4 hosts;
    /// logical queue pairs, too.
    #[test]
    fn whatever_is_asked_for_is_done(
        (hosts, operations) in places().prop_flat_map(|hosts| {
            let ranks = hosts.len();
            let data = prop::sample::select(DataType::ALL.to_vec());
            (Just(hosts), prop::collection::vec((operation(ranks), data, any::<bool>()), 1..12))
        }),
        logical in any::<bool>(),
        seed in any::<u32>(),
    ) {
        let fabric = Fabric::new(DeviceKind::Full);
        fabric.run(&hosts, &Options { logical, ..options() }, |comm| {
            for (k, (operation, data, in_place)) in operations.iter().enumerate() {
                // Bitwise operators take integers alone.
                let takes = operation.reduce_op().is_none_or(|op| op.takes(*data));
                let data = if takes { *data } else { DataType::U16 };
                check(comm, operation, data, *in_place && !operation.is_pairwise(), u64::from(seed) + k as u64);
            }
        });
    }
}
