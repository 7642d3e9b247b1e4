//! The planner's formulas against virtual time, and what it chooses.

use unbroken_schedule::cost::{time, Costs};
use unbroken_schedule::planner::{estimates, plan, Planned};
use unbroken_schedule::reshape::all_reduce_bound_us;
use unbroken_schedule::verify::{check, expected, Machine};
use unbroken_schedule::{
    Collective, Counts, DataType, Error, Fabric, Folding, Health, Host, Matrix, Nic, Operation,
    Owners, Plan, ReduceOp, Shape, Topology,
};

#[allow(dead_code)]
mod cases;

const SUM: ReduceOp = ReduceOp::Sum;

fn topology(
    hosts: usize,
    ranks: usize,
    nics: usize,
    fabric: Fabric,
    dead: &[(usize, usize)],
) -> Topology {
    let host = Host { memory_mbps: 7_200_000, ..Host::new(nics, Nic::new(400_000)) };
    let t = Topology::uniform(hosts, ranks, host, fabric).unwrap();
    dead.iter().fold(t, |t, (host, nic)| t.with_health(*host, *nic, Health::Down).unwrap())
}

fn choose(t: &Topology, operation: Operation, folding: Folding) -> Result<Planned, Error> {
    let collective = Collective::new(operation, DataType::F32, false, t.ranks()).unwrap();
    plan(t, &collective, &Costs::default(), folding)
}

fn all_reduce(bytes: u64) -> Operation {
    Operation::AllReduce { op: SUM, count: bytes / 4 }
}

/// What is chosen takes at most a quarter longer than the best of what was considered, and about as
/// long as was thought.
#[test]
fn what_is_chosen_is_nearly_the_best() {
    let costs = Costs::default();
    for (hosts, ranks, nics, dead) in
        [(2, 4, 4, None), (4, 2, 4, None), (4, 2, 4, Some((1, 2))), (8, 1, 2, Some((3, 0)))]
    {
        for fabric in [Fabric::AnyToAny, Fabric::RailOnly] {
            let t = topology(hosts, ranks, nics, fabric, dead.as_slice());
            for bytes in [256u64, 64 << 10, 4 << 20, 64 << 20] {
                let (n, count) = (t.ranks() as u64, bytes / 4);
                let operations = [
                    all_reduce(bytes),
                    Operation::ReduceScatter { op: SUM, counts: Counts::Equal(count / n) },
                    Operation::Broadcast { root: 0, count },
                ];
                for operation in operations {
                    let what = format!(
                        "{} of {bytes} bytes, {hosts} hosts, {fabric:?}, {dead:?}",
                        operation.name()
                    );
                    let c = Collective::new(operation, DataType::F32, false, t.ranks()).unwrap();
                    let considered = estimates(&t, &c, &costs, Folding::Any);
                    assert!(considered.is_sorted_by(|a, b| a.us <= b.us));
                    let us = |choice| {
                        time(&Plan::new(&t, &c, choice).unwrap().schedule(), &t, &costs).unwrap()
                    };
                    let all: Vec<f64> = considered.iter().map(|e| us(e.choice.clone())).collect();
                    let best = all.iter().copied().fold(f64::INFINITY, f64::min);
                    assert!(
                        all[0] <= 1.25 * best,
                        "{what}: {} takes {}, {best} is possible",
                        considered[0].us,
                        all[0]
                    );
                    let thought = considered[0].us / all[0];
                    assert!(
                        (0.6..1.75).contains(&thought),
                        "{what}: {} thought, {} taken",
                        considered[0].us,
                        all[0]
                    );
                }
            }
        }
    }
}

#[test]
fn size_and_health_decide() {
    let well = topology(4, 8, 8, Fabric::RailOnly, &[]);
    let sick = topology(4, 8, 8, Fabric::RailOnly, &[(1, 2)]);
    let chosen = |t: &Topology, bytes| {
        choose(t, all_reduce(bytes), Folding::InOrder).unwrap().plan.choice().clone()
    };
    assert_eq!(chosen(&well, 64).shape, Shape::OneShot);
    assert_eq!(chosen(&sick, 64).shape, Shape::OneShot, "little data does not feel a lost NIC");
    let large = chosen(&well, 1 << 28);
    assert_eq!((large.shape, large.owners), (Shape::Direct, Owners::Equal));
    let large = chosen(&sick, 1 << 28);
    assert_eq!((large.shape, large.owners), (Shape::Direct, Owners::ByCapacity));
    assert!(large.chunk_bytes <= 4 << 20);
}

/// What is chosen for slow NICs, of which one may be lost, takes no more than 3 % longer than the
/// bound, as long as messages are: chunks are many, all are divided among NICs, and none has a NIC
/// to itself while others wait.
#[test]
fn what_is_chosen_for_much_data_is_near_the_bound() {
    for hosts in [3, 4] {
        for dead in [&[][..], &[(0, 0)], &[(0, 0), (0, 5)], &[(0, 0), (1, 5)]] {
            for mib in [32, 64, 256] {
                let t = Topology::uniform(hosts, 1, Host::new(8, Nic::new(20)), Fabric::RailOnly)
                    .unwrap();
                let t = dead
                    .iter()
                    .fold(t, |t, (host, nic)| t.with_health(*host, *nic, Health::Down).unwrap());
                let plan = choose(&t, all_reduce(mib << 20), Folding::InOrder).unwrap().plan;
                let bound = all_reduce_bound_us(
                    mib << 20,
                    &t.hosts().iter().map(Host::free_mbps).collect::<Vec<_>>(),
                );
                let kept = bound / time(&plan.schedule(), &t, &Costs::default()).unwrap();
                assert!(
                    kept > 0.97,
                    "{hosts} hosts, {mib} MiB, {dead:?}: {kept}, {:?}",
                    plan.choice()
                );
            }
        }
    }
}

/// The same with fast NICs, for which 64 MiB take half a millisecond. Latency alone costs 2 % of
/// that, and the more hosts, the more messages. Estimates are near what is taken.
#[test]
fn what_is_chosen_after_a_loss_is_near_the_bound() {
    let bytes = 64 << 20;
    for (hosts, least) in [(4, 0.955), (8, 0.95), (16, 0.93)] {
        let t = Topology::uniform(hosts, 1, Host::new(8, Nic::new(200_000)), Fabric::RailOnly);
        let t = t.unwrap().with_health(1, 3, Health::Down).unwrap();
        let planned = choose(&t, all_reduce(bytes), Folding::InOrder).unwrap();
        let free: Vec<u64> = t.hosts().iter().map(Host::free_mbps).collect();
        let us = time(&planned.plan.schedule(), &t, &Costs::default()).unwrap();
        let (kept, estimate) = (all_reduce_bound_us(bytes, &free) / us, planned.considered[0].us);
        assert!(kept > least, "{hosts}: {kept}, {:?}", planned.plan.choice());
        assert!((estimate / us - 1.0).abs() < 0.03, "{hosts}: {estimate} for {us}");
    }
}

/// Why executors must let more than two short messages of a lane go ahead: queues of slow NICs are
/// tens of milliseconds long.
#[test]
fn two_short_messages_do_not_bridge_a_long_way() {
    let t = Topology::uniform(4, 1, Host::new(8, Nic::new(40)), Fabric::RailOnly).unwrap();
    let plan = choose(&t, all_reduce(64 << 20), Folding::InOrder).unwrap().plan;
    let bound = all_reduce_bound_us(64 << 20, &[320; 4]);
    let kept = |room| {
        let costs = Costs { room, nic_alpha_us: 30_000.0, ..Costs::default() };
        bound / time(&plan.schedule(), &t, &costs).unwrap()
    };
    let kept = [2, 4].map(kept);
    assert!(kept[0] < 0.85 && kept[1] > 0.96, "{kept:?}");
}

#[test]
fn every_operation_has_a_way() {
    let t = topology(3, 2, 2, Fabric::RailOnly, &[(0, 1)]);
    let counts = Counts::Equal(1000);
    for operation in [
        all_reduce(1 << 20),
        Operation::ReduceScatter { op: SUM, counts: counts.clone() },
        Operation::AllGather { counts },
        Operation::Broadcast { root: 3, count: 5000 },
        Operation::Reduce { op: SUM, root: 2, count: 5000 },
        Operation::AllToAll { counts: Matrix::Equal(100) },
        Operation::SendRecv { from: 1, to: 4, count: 5000 },
        Operation::Barrier,
        all_reduce(0),
    ] {
        for folding in [Folding::Any, Folding::InOrder] {
            let planned = choose(&t, operation.clone(), folding).unwrap();
            check(&planned.plan.schedule(), &t).unwrap();
        }
    }
    let alone = topology(1, 1, 0, Fabric::RailOnly, &[]);
    check(&choose(&alone, all_reduce(100), Folding::InOrder).unwrap().plan.schedule(), &alone)
        .unwrap();
}

/// R²CCL §6: hosts that have lost different rails, and share none, are not neighbours.
#[test]
fn hosts_without_a_common_rail_are_kept_apart() {
    let t = topology(4, 2, 2, Fabric::RailOnly, &[(0, 0), (1, 1)]);
    for folding in [Folding::Any, Folding::InOrder] {
        let planned = choose(&t, all_reduce(1 << 20), folding).unwrap();
        check(&planned.plan.schedule(), &t).unwrap();
    }
    let gather = Operation::AllGather { counts: Counts::Equal(10_000) };
    let planned = choose(&t, gather, Folding::Any).unwrap();
    check(&planned.plan.schedule(), &t).unwrap();
    assert_eq!(planned.plan.choice().ring, Some(vec![0, 2, 1, 3]));
    // with nobody in between there is no way
    let t = topology(2, 2, 2, Fabric::RailOnly, &[(0, 0), (1, 1)]);
    let error = choose(&t, all_reduce(1 << 20), Folding::Any).unwrap_err();
    assert!(matches!(error, Error::Parted { a: _, b: _, .. }), "{error}");
}

/// What is chosen changes with the health of NICs; what comes out does not, in any bit.
#[test]
fn results_in_order_are_the_same_with_and_without_failures() {
    let (well, sick) = (&[][..], &[(0, 1), (2, 0)][..]);
    for op in [SUM, ReduceOp::Product, ReduceOp::Avg] {
        for count in [5, 40_000] {
            let mut results = Vec::new();
            for dead in [well, sick] {
                let t = topology(3, 2, 2, Fabric::RailOnly, dead);
                let operation = Operation::AllReduce { op, count };
                let collective =
                    Collective::new(operation, DataType::Bf16, true, t.ranks()).unwrap();
                let inputs = cases::inputs(&collective, 11, false);
                let planned = plan(&t, &collective, &Costs::default(), Folding::InOrder).unwrap();
                let schedule = planned.plan.schedule();
                let mut machine = Machine::new(&schedule, &t, &inputs, 2, 3);
                machine.run().unwrap();
                machine.compare(&expected(&collective, &t, &inputs)).unwrap();
                results.push((planned.plan.choice().owners.clone(), machine.output(4)));
            }
            assert_eq!(results[0].1, results[1].1);
            assert!(count == 5 || results[0].0 != results[1].0, "another way was taken");
        }
    }
}

/// A rank of an AllToAll may know no more than what it sends and receives itself.
#[test]
fn ranks_need_not_know_what_others_exchange() {
    let t = topology(2, 2, 4, Fabric::AnyToAny, &[(0, 1)]);
    let counts: Vec<u64> = (0..16).map(|k| k * k * 10_000).collect();
    let program = |rank: usize, known: &dyn Fn(usize, usize) -> bool| {
        let counts = (0..16).map(|k| if known(k / 4, k % 4) { counts[k] } else { 0 }).collect();
        choose(&t, Operation::AllToAll { counts: Matrix::Each(counts) }, Folding::Any)
            .unwrap()
            .plan
            .program(rank)
    };
    for rank in 0..4 {
        assert_eq!(
            program(rank, &|_, _| true),
            program(rank, &|from, to| from == rank || to == rank)
        );
    }
}

/// The design's 1,024 ranks: the work follows the hosts and the chunks, not the bytes.
/// (`examples/planning.rs` has the time.)
#[test]
fn a_thousand_ranks_are_planned_with_little_work() {
    let dead: Vec<(usize, usize)> = (0..10).map(|k| (k * 13, k % 8)).collect();
    let t = topology(128, 8, 8, Fabric::RailOnly, &dead);
    for bytes in [1 << 20, 1 << 30, 1 << 36] {
        let Planned { plan, considered } = choose(&t, all_reduce(bytes), Folding::InOrder).unwrap();
        assert!(considered.len() < 20 && plan.shards().len() <= 8 * 128);
        // for each chunk: 127 peers twice each way, some over several NICs; 7 ranks of its own host
        // the same
        let steps = plan.program(16).steps.len() as u64;
        assert!(
            steps <= plan.chunks() * (4 * 127 + 10 * 2 * 7 + 4 * 7),
            "{steps} steps for {} chunks",
            plan.chunks()
        );
    }
}

/// What is chosen after a failure, message by message, takes at most 15 % longer than what was
/// chosen before takes over the NICs that are left, also where shards are too short to be divided
/// among them. (`crates/collective/simulate/tests/large.rs` has more bytes, by volumes.)
#[test]
fn what_is_chosen_for_short_shards_is_no_worse_than_what_was_there() {
    let costs = Costs::default();
    let mut worse = Vec::new();
    for (hosts, ranks) in [(4, 1), (4, 8), (8, 8), (16, 1)] {
        for fabric in [Fabric::RailOnly, Fabric::AnyToAny] {
            for kib in [256, 1024, 2048, 4096, 8192] {
                let t = topology(hosts, ranks, 8, fabric, &[]);
                let now = t.clone().with_health(1, 3, Health::Down).unwrap();
                let operation = all_reduce(kib << 10);
                let c = Collective::new(operation.clone(), DataType::F32, false, t.ranks());
                let c = c.unwrap();
                let us = |plan: &Plan, t: &Topology| time(&plan.schedule(), t, &costs).unwrap();
                let before = choose(&t, operation.clone(), Folding::Any).unwrap().plan;
                let kept = Plan::new(&now, &c, before.choice().clone()).unwrap();
                let ours = choose(&now, operation, Folding::Any).unwrap().plan;
                let [well, kept, now] = [us(&before, &t), us(&kept, &now), us(&ours, &now)];
                let what = format!(
                    "{hosts} hosts of {ranks}, {fabric:?}, {kib} KiB: {well:.1} us before, \
                     {kept:.1} kept, {now:.1} now, {:?} in {} chunks",
                    ours.choice().shape,
                    ours.chunks()
                );
                println!("{what}");
                if now > 1.15 * kept {
                    worse.push(what);
                }
            }
        }
    }
    assert!(worse.is_empty(), "{worse:#?}");
}
