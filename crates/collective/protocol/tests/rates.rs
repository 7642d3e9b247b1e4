//! What is kept of the speed of AllReduce where NICs limit it and one is lost: the engine that
//! ships, in virtual time, so that no machine's cores play a part (docs/internals/collectives.md,
//! "What a lost NIC costs").

use unbroken_schedule::{
    Collective, DataType, Fabric, Folding, Health, Host, Nic, Operation, ReduceOp, Topology,
};
use world::{run, Case, Fault, Outcome, Planned};

#[allow(dead_code)]
mod world;

const NICS: usize = 8;
/// Slow enough that ranks, which look every few microseconds, are never what limits.
const MBPS: u64 = 100;
const BYTES: u64 = 16 << 20;
/// The first is under way when the NIC dies, the second is the first that is planned without it.
const OPERATIONS: usize = 4;

/// AllReduces of so many bytes, one after the other, on hosts whose topology says a rate.
fn case(hosts: usize, nics: usize, says_mbps: u64, bytes: u64, operations: usize) -> Case {
    let nic = Nic::new(says_mbps as u32);
    let topology = Topology::uniform(hosts, 1, Host::new(nics, nic), Fabric::RailOnly).unwrap();
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count: bytes / 4 };
    let collective = Collective::new(operation, DataType::I32, false, hosts).unwrap();
    Case {
        script: vec![vec![collective; operations]; hosts],
        inputs: vec![vec![vec![1; (bytes / 4) as usize]; hosts]; operations],
        topology,
        faults: vec![],
        seed: 1,
        // As `collective::Options` has them.
        folding: Folding::InOrder,
        form: None,
        slots: 16,
        payload: 64 << 10,
        window: 16,
        mutant: None,
        held_one_in: u64::MAX,
        timeout_us: 20_000_000,
        leave: false,
        nic_mbps: Some(MBPS),
        slow_nics: vec![],
        measure: false,
        rails_apart: false,
        late_us: 0,
    }
}

/// Runs a case, whose sums must be right.
fn outcome(case: &Case) -> Outcome {
    let outcome = run(case, 600_000_000);
    let hosts = case.topology.ranks() as u64;
    let sums = outcome.outputs.iter().flatten().flatten();
    assert_eq!(outcome.failures, vec![None; case.topology.ranks()]);
    assert!(sums.into_iter().all(|sum| *sum == hosts), "a wrong sum");
    outcome
}

/// The bus bandwidth of the later operations, as a share of what a host's NICs carry.
fn share_of_rate(hosts: usize, lost: bool) -> f64 {
    let death =
        Planned { fault: Fault::NicDead { host: 0, rail: 0 }, after_writes: 50, lasts_us: None };
    let faults = if lost { vec![death] } else { vec![] };
    let outcome = outcome(&Case { faults, ..case(hosts, NICS, MBPS, BYTES, OPERATIONS) });
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

/// How long each operation took after the one before it, in µs.
fn times_us(outcome: &Outcome) -> Vec<u64> {
    let operations = outcome.results_us[0].len();
    let ended = |k: usize| outcome.results_us.iter().map(|of_rank| of_rank[k]).max().unwrap();
    (1..operations).map(|k| ended(k) - ended(k - 1)).collect()
}

/// One of four NICs of a host carries a quarter, and nobody has said so: it is found out, and has
/// its part, as if the topology had said it. With a full share for the slow NIC operations take
/// four times the healthy time.
#[test]
fn a_slow_nic_has_its_part_when_it_was_measured() {
    for hosts in [2, 3, 4] {
        let well = || case(hosts, 4, MBPS, 4 << 20, 12);
        let slow = || Case { slow_nics: vec![(0, 0, MBPS / 4)], ..well() };
        let told = slow().topology.with_health(0, 0, Health::Slow(25)).unwrap();
        // Of the last ones, when it is known.
        let mean = |case: Case| times_us(&outcome(&case)).split_off(7).iter().sum::<u64>() as f64;
        let (healthy, blind) = (mean(well()), mean(slow()));
        let told = mean(Case { topology: told, ..slow() });
        let seen = mean(Case { measure: true, ..slow() });
        let ratios = [blind, told, seen].map(|time| time / healthy);
        println!("{hosts} hosts: {ratios:.2?} of the healthy time (blind, told, measured)");
        assert!(blind > 2.0 * healthy && seen < 1.15 * told, "{hosts} hosts: {ratios:.2?}");
    }
}

/// A slow NIC has few frames in flight, and credit for it waits behind the frames that others send
/// it. If credit counted as frames, an operation would take 15 % longer than the plan for that NIC's
/// rate.
#[test]
fn a_slow_nic_is_kept_busy() {
    const SLOW_MBPS: u64 = 20;
    let slow = |operations| Case {
        slow_nics: vec![(0, 0, SLOW_MBPS / 2)],
        nic_mbps: Some(SLOW_MBPS),
        ..case(3, 4, SLOW_MBPS, BYTES, operations)
    };
    let last = |case: Case| times_us(&outcome(&case)).split_off(1).into_iter().rev().take(2).sum();
    let topology = slow(1).topology.with_health(0, 0, Health::Slow(50)).unwrap();
    let told: u64 = last(Case { topology, ..slow(4) });
    let seen: u64 = last(Case { measure: true, ..slow(8) });
    println!("{told} us where it is told, {seen} us where it is measured, of two operations");
    assert!(seen * 100 < told * 107, "{seen} of {told} us");
}

/// The topology says 100 Gbit/s where there are 100 Mbit/s, so that short messages seem to cost as
/// much as long ones; then the way with the fewest messages is taken, which sends everything to
/// everybody. Measured, it is not.
#[test]
fn the_way_with_the_fewest_messages_is_left_where_bytes_count() {
    let wrong = || case(4, 4, 100_000, 96 << 10, 40);
    let last = |case: &Case| times_us(&outcome(case)).split_off(30).into_iter().sum::<u64>() as f64;
    let (blind, seen) = (last(&wrong()), last(&Case { measure: true, ..wrong() }));
    println!("{blind} us as it is said, {seen} us as it is");
    assert!(seen < 0.75 * blind, "{seen} of {blind} us");
}

/// What wanders a little does not have all ranks agree all the time.
#[test]
fn well_nics_are_agreed_on_once() {
    let outcome = outcome(&Case { measure: true, ..case(3, 4, MBPS, 1 << 20, 200) });
    let agreed = |notes: &Vec<unbroken_collective_protocol::Note>| {
        let replanned =
            |note: &&_| matches!(note, unbroken_collective_protocol::Note::Replanned { .. });
        notes.iter().filter(replanned).count()
    };
    let views: Vec<usize> = outcome.notes.iter().map(agreed).collect();
    assert!(views.iter().all(|views| (1..=3).contains(views)), "{views:?}");
}
