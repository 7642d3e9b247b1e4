//! The volumes of a plan are those of its programs, NIC by NIC.

use proptest::prelude::*;
use unbroken_schedule::verify::Traffic;
use unbroken_schedule::{
    Choice, Collective, Counts, DataType, Fabric, Flow, Grouping, Health, Host, Matrix, Nic,
    Operation, Owners, Path, Plan, ReduceOp, Shape, Topology,
};

/// Rounding to cache lines and messages that take turns.
const TOLERANCE: f64 = 0.03;

fn operation(kind: usize, ranks: usize, count: u64) -> Operation {
    let op = ReduceOp::Sum;
    match kind {
        0 => Operation::AllReduce { op, count },
        1 => Operation::ReduceScatter { op, counts: Counts::Equal(count / ranks as u64) },
        2 => Operation::AllGather { counts: Counts::Equal(count / ranks as u64) },
        3 => Operation::Broadcast { root: ranks - 1, count },
        4 => Operation::Reduce { op, root: 1 % ranks, count },
        5 => Operation::AllToAll { counts: Matrix::Equal(count / ranks as u64) },
        _ => Operation::SendRecv { from: 0, to: ranks - 1, count },
    }
}

fn sums(plan: &Plan, topology: &Topology) -> (Vec<Vec<[f64; 2]>>, f64) {
    let mut nics: Vec<Vec<[f64; 2]>> =
        topology.hosts().iter().map(|h| vec![[0.0; 2]; h.nics.len()]).collect();
    let mut memory = 0.0;
    plan.flows(|Flow { from, to, path, bytes, .. }| match path {
        Path::Memory => memory += bytes,
        Path::Nics { from: out, to: into } => {
            nics[topology.host_of(from)][out][0] += bytes;
            nics[topology.host_of(to)][into][1] += bytes;
        }
    });
    (nics, memory)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn flows_have_the_volumes_of_programs(
        (hosts, ranks, nics) in (2usize..5, 1usize..4, 1usize..5),
        dead in prop::collection::vec((0usize..4, 0usize..4), 0..3),
        kind in 0usize..7,
        shape in prop::sample::select(vec![Shape::Direct, Shape::OneShot, Shape::Ring, Shape::Tree, Shape::SubRings]),
        by_capacity in any::<bool>(),
        grouping in prop::sample::select(vec![Grouping::Hosts, Grouping::Ranks]),
        any_to_any in any::<bool>(),
    ) {
        let fabric = if any_to_any { Fabric::AnyToAny } else { Fabric::RailOnly };
        let mut topology =
            Topology::uniform(hosts, ranks, Host::new(nics, Nic::new(100_000)), fabric).unwrap();
        for (host, nic) in dead.into_iter().filter(|(h, n)| *h < hosts && *n < nics) {
            topology = topology.with_health(host, nic, Health::Down).unwrap();
        }
        let collective =
            Collective::new(operation(kind, hosts * ranks, 1 << 20), DataType::F32, false, hosts * ranks).unwrap();
        let owners = if by_capacity { Owners::ByCapacity } else { Owners::Equal };
        let choice = Choice { owners, chunk_bytes: 64 << 10, divide_bytes: 64, ..Choice::new(shape, grouping) };
        let plan = Plan::new(&topology, &collective, choice);
        prop_assume!(plan.is_ok());
        let plan = plan.unwrap();
        let counted = Traffic::of(&plan.schedule(), &topology);
        let (volumes, memory) = sums(&plan, &topology);
        let most = counted.sent.iter().chain(&counted.received).flatten().copied().max().unwrap_or(0) as f64;
        for (host, of_host) in volumes.iter().enumerate() {
            for (nic, has) in of_host.iter().enumerate() {
                let is = [counted.sent[host][nic] as f64, counted.received[host][nic] as f64];
                prop_assert!((0..2).all(|way| (has[way] - is[way]).abs() <= TOLERANCE * most),
                    "host {host} NIC {nic}: {has:?} for {is:?}");
            }
        }
        let of_all: u64 = counted.memory.iter().sum();
        prop_assert!((memory - of_all as f64).abs() <= TOLERANCE * of_all as f64, "{memory} for \
                                                                                   {of_all}");
    }
}

/// 1,000 hosts have millions of flows on eight channels, but few that differ. Whatever the tree, a
/// vector goes to and from all hosts but one.
#[test]
fn many_hosts_have_few_bundles() {
    let hosts = 1000;
    let topology =
        Topology::uniform(hosts, 1, Host::new(8, Nic::new(100_000)), Fabric::RailOnly).unwrap();
    let topology = topology.with_health(3, 1, Health::Down).unwrap();
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count: 1 << 30 };
    let collective = Collective::new(operation, DataType::F32, false, hosts).unwrap();
    for shape in [Shape::Direct, Shape::Ring, Shape::SubRings] {
        for owners in [Owners::Equal, Owners::ByCapacity] {
            let choice =
                Choice { owners, chunk_bytes: 64 << 10, ..Choice::new(shape, Grouping::Hosts) };
            let plan = Plan::new(&topology, &collective, choice.clone()).unwrap();
            let (mut bundles, mut bytes) = (0, 0.0);
            plan.bundles(&vec![0; hosts], |bundle| {
                let pairs = bundle.senders.len() * bundle.degrees().0 * bundle.levels;
                bundles += 1;
                bytes += bundle.flow.bytes * pairs as f64;
            });
            assert!(bundles < 500_000, "{choice:?}: {bundles}");
            let vectors = bytes / f64::from(1u32 << 31) / 2.0 / (hosts - 1) as f64;
            let rings = shape == Shape::SubRings;
            assert!(rings || (vectors - 2.0).abs() < 1e-6, "{choice:?}: {vectors}");
        }
    }
}
