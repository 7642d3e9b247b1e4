//! How long planning takes: an AllReduce of 1 GiB, rails apart, NICs dead on some hosts. For all
//! ranks alike the choice among all ways; for one rank its program, healthy and beside a dead NIC.
//! The least of several runs.
//!
//! usage: `cargo run --release --example planning [HOSTS [DEAD]]`

use std::hint::black_box;
use std::time::Instant;

use unbroken_schedule::cost::Costs;
use unbroken_schedule::planner::plan;
use unbroken_schedule::{
    Collective, DataType, Fabric, Folding, Health, Host, Nic, Operation, ReduceOp, Topology,
};

const RANKS_PER_HOST: usize = 8;
const RUNS: usize = 20;

fn least_ms<T>(mut work: impl FnMut() -> T) -> f64 {
    let run = |_| {
        let begin = Instant::now();
        black_box(work());
        begin.elapsed().as_secs_f64() * 1e3
    };
    (0..RUNS).map(run).fold(f64::INFINITY, f64::min)
}

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse().expect("a number"));
    let hosts: usize = args.next().unwrap_or(128);
    let dead: usize = args.next().unwrap_or(10);
    let host = Host::new(8, Nic::new(200_000));
    let mut topology =
        Topology::uniform(hosts, RANKS_PER_HOST, host, Fabric::RailOnly).expect("hosts");
    for k in 0..dead {
        topology = topology.with_health(k * 13 % hosts, k % 8, Health::Down).expect("a NIC");
    }
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count: 1 << 28 };
    let collective =
        Collective::new(operation, DataType::F32, false, topology.ranks()).expect("an AllReduce");
    for folding in [Folding::InOrder, Folding::Any] {
        let make = || plan(&topology, &collective, &Costs::default(), folding).expect("a plan");
        let planned = make();
        let chosen = planned.plan.choice();
        println!(
            "{} ranks, {dead} NICs dead, {folding:?}: {:?} of {} ways, {:?}, {} chunks: {:.2} ms",
            topology.ranks(),
            chosen.shape,
            planned.considered.len(),
            chosen.owners,
            planned.plan.chunks(),
            least_ms(make),
        );
        for (what, rank) in [("beside a dead NIC", 0), ("elsewhere", RANKS_PER_HOST * (hosts / 2))]
        {
            let steps = planned.plan.program(rank).steps.len();
            println!(
                "  program of a rank {what}: {steps} steps, {:.2} ms",
                least_ms(|| planned.plan.program(rank))
            );
        }
    }
}
