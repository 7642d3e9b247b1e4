//! NICs of another NUMA node than the rank's: over the link between the nodes where that has room,
//! else through a rank over there.

mod ranks;

use ranks::{check, options, Fabric};
use unbroken_coll::{Communicator, DataType, Numa, Operation, Options, ReduceOp};
use unbroken_fabric::DeviceKind;

const HOSTS: [&str; 8] = ["a", "a", "a", "a", "b", "b", "b", "b"];
const COUNT: u64 = 200_000;

/// Ranks 0, 1, 4 and 5 are on node 0, as NICs 0 and 1 are; the others on node 1.
fn all(cross_mbps: Option<u32>) -> Vec<Options> {
    let node = |rank: usize| (rank % 4 / 2) as u8;
    let of = |rank: usize| {
        let numa =
            Numa { node: Some(node(rank)), nics: vec![0, 0, 1, 1], cross_mbps, memory_mbps: None };
        Options { numa, measure: false, ..options() }
    };
    (0..HOSTS.len()).map(of).collect()
}

/// Bytes that a rank sends over NICs, and to others of its host, in one AllReduce.
fn sent(comm: &Communicator) -> (u64, u64) {
    let bytes = || comm.snapshot().sent_bytes;
    let before = bytes();
    let sum = Operation::AllReduce { op: ReduceOp::Sum, count: COUNT };
    check(comm, &sum, DataType::F32, true, 3);
    let after = bytes();
    let grown: Vec<u64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
    (grown[..4].iter().sum(), grown[4])
}

/// Both NICs of node 0 are lost: whether the ranks there use those of node 1 themselves.
fn uses_nics_of_the_other_node(cross_mbps: Option<u32>) -> [bool; 2] {
    let fabric = Fabric::new(DeviceKind::Full);
    for nic in ["a/0", "a/1"] {
        fabric.breaker.set(&format!("nic {nic} dead"));
    }
    let seen = std::sync::Mutex::new([false; 2]);
    fabric.run_each(&HOSTS, &all(cross_mbps), |comm| {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        // Operations make known what is lost; all ranks do as many.
        for seed in 0..20 {
            let sum = Operation::AllReduce { op: ReduceOp::Sum, count: 5_000 };
            check(comm, &sum, DataType::F32, true, seed);
        }
        while !["0/0", "0/1"].iter().all(|nic| comm.snapshot().down.iter().any(|d| d == nic)) {
            assert!(std::time::Instant::now() < deadline, "{:?}", comm.snapshot().down);
            std::thread::yield_now();
        }
        let (nics, memory) = sent(comm);
        let plan = comm.snapshot().done.last().map(|done| done.plan.clone()).unwrap_or_default();
        assert_eq!(plan.contains("through ranks of other NUMA nodes"), cross_mbps.is_some());
        assert!(memory > 0);
        seen.lock().unwrap()[comm.rank() % 4 / 2] |= nics > 0;
    });
    seen.into_inner().unwrap()
}

#[test]
fn a_link_without_room_is_gone_round() {
    assert_eq!(uses_nics_of_the_other_node(Some(1_000)), [false, true]);
}

#[test]
fn a_link_with_room_is_used() {
    let [from_node_0, _] = uses_nics_of_the_other_node(None);
    assert!(from_node_0);
}

#[test]
fn nodes_of_other_nics_than_there_are_are_refused() {
    let numa = Numa { nics: vec![0; 3], ..Numa::default() };
    let of_three = vec![Options { numa, ..options() }];
    let told = Fabric::new(DeviceKind::Full).join_all(&["a"], &of_three);
    assert!(told[0].contains("NUMA nodes of 3 NICs; the host has 4"), "{told:?}");
}
