//! What is kept of the speed of AllReduce where NICs limit it and one is lost: the engine that
//! ships, in virtual time, so that no machine's cores play a part (docs/internals/collectives.md,
//! "What a lost NIC costs").

use unbroken_schedule::{
    Collective, DataType, Fabric, Folding, Host, Nic, Operation, ReduceOp, Topology,
};
use world::{run, Case, Fault, Planned};

#[allow(dead_code)]
mod world;

const NICS: usize = 8;
/// Slow enough that ranks, which look every few microseconds, are never what limits.
const MBPS: u64 = 100;
const BYTES: u64 = 16 << 20;
/// The first is under way when the NIC dies, the second is the first that is planned without it.
const OPERATIONS: usize = 4;

/// The bus bandwidth of the later operations, as a share of what a host's NICs carry.
fn share_of_rate(hosts: usize, lost: bool) -> f64 {
    let topology =
        Topology::uniform(hosts, 1, Host::new(NICS, Nic::new(MBPS as u32)), Fabric::RailOnly)
            .unwrap();
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count: BYTES / 4 };
    let collective = Collective::new(operation, DataType::I32, false, hosts).unwrap();
    let death =
        Planned { fault: Fault::NicDead { host: 0, rail: 0 }, after_writes: 50, lasts_us: None };
    let case = Case {
        script: vec![vec![collective; OPERATIONS]; hosts],
        inputs: vec![vec![vec![1; (BYTES / 4) as usize]; hosts]; OPERATIONS],
        topology,
        faults: if lost { vec![death] } else { vec![] },
        seed: 1,
        // As `collective::Options` has them.
        folding: Folding::InOrder,
        slots: 16,
        payload: 64 << 10,
        window: 16,
        mutant: None,
        held_one_in: u64::MAX,
        timeout_us: 20_000_000,
        leave: false,
        nic_mbps: Some(MBPS),
    };
    let outcome = run(&case, 600_000_000);
    assert!(
        outcome.outputs.iter().flatten().flatten().all(|sum| *sum == hosts as u64),
        "a wrong sum"
    );
    let ended_us = |k: usize| outcome.results_us.iter().map(|of_rank| of_rank[k]).max().unwrap();
    let took_us = (ended_us(OPERATIONS - 1) - ended_us(1)) as f64 / (OPERATIONS - 2) as f64;
    let moved_bits = 2.0 * (hosts as f64 - 1.0) / hosts as f64 * BYTES as f64 * 8.0;
    moved_bits / took_us / (NICS as f64 * MBPS as f64)
}

/// Of what can be kept of the healthy rate (T*), 97 % are.
#[test]
fn a_lost_nic_costs_little_more_than_its_share() {
    for (hosts, possible) in [(2, 0.875), (3, 0.958), (4, 0.969)] {
        let (well, sick) = (share_of_rate(hosts, false), share_of_rate(hosts, true));
        let kept = sick / well;
        let of_hundred = [well, sick, kept, possible].map(|share| (1000.0 * share).round() / 10.0);
        println!("{hosts} hosts: {of_hundred:?} % (healthy, one of {NICS} lost, kept, possible)");
        assert!(well > 0.85 && kept > 0.97 * possible, "{hosts} hosts: {of_hundred:?}");
    }
}
