//! Random topologies, collectives, choices and data.

use half::{bf16, f16};
use proptest::prelude::*;
use unbroken_schedule::binding::Repair;
use unbroken_schedule::{
    Choice, Collective, Counts, DataType, Fabric, Folding, Grouping, Health, Host, Matrix, Nic,
    Operation, Owners, Place, ReduceOp, Shape, Topology,
};

/// 1 to 4 hosts, 2 to 16 ranks anywhere on them, 1 to 4 NICs, some of which are dead or slow; host
/// 0 has all.
pub fn topology() -> impl Strategy<Value = Topology> {
    let health = prop_oneof![4 => Just(Health::Up), 2 => Just(Health::Down), 1 => (1u8..100).prop_map(Health::Slow)];
    let fabric = prop_oneof![Just(Fabric::RailOnly), Just(Fabric::AnyToAny)];
    (1usize..=4, 1usize..=4, fabric)
        .prop_flat_map(move |(hosts, nics, fabric)| {
            let health = prop::collection::vec(health.clone(), hosts * nics);
            let more = prop::collection::vec(0..hosts, 0..=(16 - hosts));
            // some hosts have two NUMA nodes, and a narrow link between them
            let numa = prop_oneof![Just(u64::MAX), any::<u64>()];
            (Just((hosts, nics, fabric)), health, more.prop_shuffle(), any::<bool>(), numa)
        })
        .prop_map(|((hosts, nics, fabric), health, more, in_blocks, numa)| {
            let node = |k: usize| if numa == u64::MAX { 0 } else { (numa >> (k % 64) & 1) as u8 };
            let mut on: Vec<usize> = (0..hosts).chain(more).collect();
            if on.len() == 1 {
                on.push(0);
            }
            if in_blocks {
                on.sort_unstable();
            } else {
                on.reverse();
            }
            let host = |h: usize| {
                let mut host = Host::new(nics, Nic::new(100_000));
                host.cross_numa_mbps = if numa & 1 == 0 { 1_000 } else { u32::MAX };
                for (k, (nic, health)) in host.nics.iter_mut().zip(&health[h * nics..]).enumerate()
                {
                    nic.numa = node(h + k);
                    nic.health = if h == 0 { Health::Up } else { *health };
                }
                // at least one is up
                if host.free_mbps() == 0 {
                    host.nics[h % nics].health = Health::Up;
                }
                host
            };
            let places = on
                .into_iter()
                .enumerate()
                .map(|(r, host)| Place { host, numa: node(r * 7 + 3) })
                .collect();
            Topology::new((0..hosts).map(host).collect(), places, fabric).unwrap()
        })
}

fn count() -> impl Strategy<Value = u64> {
    prop_oneof![1 => Just(0u64), 2 => 1u64..8, 4 => 1u64..200]
}

pub fn operation(ranks: usize) -> impl Strategy<Value = Operation> {
    let op = prop::sample::select(ReduceOp::ALL.to_vec());
    let counts = move || {
        let each = prop::collection::vec(prop_oneof![1 => Just(0u64), 3 => 0u64..40], ranks);
        prop_oneof![(0u64..40).prop_map(Counts::Equal), each.prop_map(|c| Counts::Each(c.into()))]
    };
    let each = prop::collection::vec(prop_oneof![1 => Just(0u64), 3 => 0u64..20], ranks * ranks);
    let matrix =
        prop_oneof![(0u64..20).prop_map(Matrix::Equal), each.prop_map(|c| Matrix::Each(c.into()))];
    prop_oneof![
        4 => (op.clone(), count()).prop_map(|(op, count)| Operation::AllReduce { op, count }),
        2 => (op.clone(), counts()).prop_map(|(op, counts)| Operation::ReduceScatter { op, counts }),
        2 => counts().prop_map(|counts| Operation::AllGather { counts }),
        1 => (0..ranks, count()).prop_map(|(root, count)| Operation::Broadcast { root, count }),
        1 => (op, 0..ranks, count()).prop_map(|(op, root, count)| Operation::Reduce { op, root, count }),
        1 => matrix.prop_map(|counts| Operation::AllToAll { counts }),
        1 => (0..ranks, 0..ranks, count()).prop_map(|(from, to, count)| Operation::SendRecv { from, to, count }),
        1 => Just(Operation::Barrier),
    ]
}

pub fn collective(ranks: usize) -> impl Strategy<Value = Collective> {
    let data = prop::sample::select(DataType::ALL.to_vec());
    (operation(ranks), data, any::<bool>()).prop_map(move |(operation, data, in_place)| {
        let in_place = in_place && !operation.is_pairwise();
        // Bitwise operators take integers alone.
        let takes = operation.reduce_op().is_none_or(|op| op.takes(data));
        let data = if takes { data } else { DataType::U16 };
        Collective::new(operation, data, in_place, ranks).unwrap()
    })
}

/// A choice that fits.
pub fn choice(topology: Topology, collective: &Collective) -> impl Strategy<Value = Choice> {
    let all = matches!(collective.operation(), Operation::AllReduce { .. } | Operation::Barrier);
    let shapes: &[Shape] = match all {
        true => &[Shape::Direct, Shape::Ring, Shape::Tree, Shape::OneShot, Shape::SubRings],
        false => &[Shape::Direct, Shape::Ring, Shape::Tree],
    };
    let grouping = prop::sample::select(vec![Grouping::Ranks, Grouping::Hosts]);
    let hosts: Vec<usize> = (0..topology.hosts().len()).collect();
    let owners = prop::option::of(prop::collection::vec(0u64..5, topology.ranks()));
    (
        prop::sample::select(shapes.to_vec()),
        grouping,
        any::<bool>(),
        prop::option::of(1usize..6),
        (8u64..200, 1u64..64),
        owners,
        prop::option::of(Just(hosts).prop_shuffle()),
    )
        .prop_map(
            move |(
                shape,
                grouping,
                in_order,
                channels,
                (chunk_bytes, divide_bytes),
                owners,
                ring,
            )| {
                let repair = if channels == Some(2) { Repair::Backup } else { Repair::Balance };
                let grouping = if shape == Shape::SubRings { Grouping::Hosts } else { grouping };
                let mut choice = Choice {
                    repair,
                    channels,
                    chunk_bytes,
                    divide_bytes,
                    ring,
                    ..Choice::new(shape, grouping)
                };
                let direct = matches!(shape, Shape::Direct | Shape::OneShot);
                if in_order && direct && grouping == Grouping::Hosts {
                    choice.folding = Folding::InOrder;
                }
                if all && !matches!(shape, Shape::OneShot | Shape::SubRings) {
                    let nodes = if grouping == Grouping::Hosts {
                        topology.hosts().len()
                    } else {
                        topology.ranks()
                    };
                    let reshapes = grouping == Grouping::Hosts && shape != Shape::Tree;
                    choice.owners = match owners {
                        Some(mut weights) => {
                            weights.truncate(nodes);
                            weights[0] += 1;
                            Owners::Weights(weights)
                        }
                        None if reshapes => Owners::ByCapacity,
                        None => Owners::Equal,
                    };
                }
                choice
            },
        )
}

/// What ranks have as input. `exact`: numbers whose sums and products do not depend on the order.
pub fn inputs(collective: &Collective, seed: u64, exact: bool) -> Vec<Vec<u64>> {
    let product = collective.operation().reduce_op() == Some(ReduceOp::Product);
    let mut state = seed;
    let mut bits = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.rotate_left(31)
    };
    let data = collective.data();
    let mut number = move |rank: usize| {
        let small = match product {
            // a power of two now and then; the rest signs
            true if rank.is_multiple_of(5) => [0.5, 2.0, 1.0, -4.0][bits() as usize % 4],
            true => [1.0, -1.0][bits() as usize % 2],
            false => (bits() % 7) as f64 - 3.0,
        };
        let wild = f64::from(bits() as i32) / 65_536.0;
        let x = if exact { small } else { wild };
        match data {
            DataType::F16 => u64::from(f16::from_f64(x).to_bits()),
            DataType::Bf16 => u64::from(bf16::from_f64(x).to_bits()),
            DataType::F32 => u64::from((x as f32).to_bits()),
            DataType::F64 => x.to_bits(),
            // integers wrap, so any will do
            _ => bits() & (u64::MAX >> (64 - 8 * data.bytes())),
        }
    };
    (0..collective.ranks())
        .map(|rank| {
            let range = collective.input_range(rank);
            (range.start..range.end).map(|_| number(rank)).collect()
        })
        .collect()
}
