//! Vectors that are long enough for chunks to begin at cache lines: every element is in exactly one
//! chunk of one shard, however unequal owners are.

#[allow(dead_code)]
mod cases;

use proptest::prelude::*;
use unbroken_schedule::cost::Costs;
use unbroken_schedule::planner::plan;
use unbroken_schedule::verify::{expected, Machine};
use unbroken_schedule::{
    Choice, Collective, DataType, Fabric, Folding, Grouping, Health, Host, Nic, Operation, Owners,
    Plan, ReduceOp, Shape, Topology,
};

fn all_reduce(count: u64, ranks: usize) -> Collective {
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count };
    Collective::new(operation, DataType::F32, false, ranks).unwrap()
}

/// Hosts some of whose NICs are slower than others, as measured.
fn unequal() -> impl Strategy<Value = Topology> {
    let health =
        prop_oneof![2 => Just(Health::Up), 1 => (1u8..15).prop_map(|n| Health::Slow(5 * n))];
    (2usize..6, 1usize..5).prop_flat_map(move |(hosts, nics)| {
        prop::collection::vec(health.clone(), hosts * nics).prop_map(move |health| {
            let host = Host::new(nics, Nic::new(100));
            let topology = Topology::uniform(hosts, 1, host, Fabric::RailOnly).unwrap();
            health.iter().enumerate().fold(topology, |topology, (k, health)| {
                topology.with_health(k / nics, k % nics, *health).unwrap()
            })
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chunks_tile_the_vector(
        topology in unequal(),
        count in 1u64..4_000_000,
        channels in prop_oneof![Just(None), (1usize..6).prop_map(Some)],
        chunk_bytes in 1u64..1_000_000,
        shape in prop::sample::select(vec![Shape::Direct, Shape::Ring]),
        weights in prop::collection::vec(1u64..1000, 6),
        by_capacity in any::<bool>(),
    ) {
        let hosts = topology.hosts().len();
        let owners = match by_capacity {
            true => Owners::ByCapacity,
            false => Owners::Weights(weights[..hosts].to_vec()),
        };
        let choice = Choice { owners, channels, chunk_bytes, ..Choice::new(shape, Grouping::Hosts) };
        let plan = Plan::new(&topology, &all_reduce(count, hosts), choice)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        let chunks = plan.shards().iter().flat_map(|shard| {
            (0..plan.chunks()).map(|chunk| plan.chunk(shard, chunk)).collect::<Vec<_>>()
        });
        let mut chunks: Vec<_> = chunks.filter(|chunk| !chunk.is_empty()).collect();
        chunks.sort_unstable_by_key(|chunk| chunk.start);
        let mut end = 0;
        for chunk in chunks {
            prop_assert_eq!(chunk.start, end, "a gap, or twice");
            end = chunk.end;
        }
        prop_assert_eq!(end, count);
    }
}

/// One case whose result was wrong, in 90 of a million elements: the owners' parts of a chunk began
/// at cache lines for some, and anywhere for others.
#[test]
fn unequal_owners_of_a_long_vector_leave_nothing_out() {
    let slow = [
        (0, 3, 45),
        (1, 0, 45),
        (1, 1, 60),
        (1, 2, 50),
        (1, 3, 45),
        (2, 0, 50),
        (2, 2, 50),
        (2, 3, 45),
        (3, 2, 55),
    ];
    let topology = Topology::uniform(4, 1, Host::new(4, Nic::new(83)), Fabric::RailOnly).unwrap();
    let topology = slow.iter().fold(topology, |topology, (host, nic, percent)| {
        topology.with_health(*host, *nic, Health::Slow(*percent)).unwrap()
    });
    let collective = all_reduce(1 << 20, 4);
    let planned = plan(&topology, &collective, &Costs::default(), Folding::InOrder).unwrap();
    let schedule = planned.plan.schedule();
    let inputs = cases::inputs(&collective, 3, false);
    let mut machine = Machine::new(&schedule, &topology, &inputs, 2, 3);
    machine.run().unwrap();
    machine.compare(&expected(&collective, &topology, &inputs)).unwrap();
}
