//! Ranks that forward between NUMA nodes, while NICs come and go: results are right, and nobody
//! stands still.

#[allow(dead_code)]
mod world;

#[cfg(feature = "mutants")]
use unbroken_collective_protocol::Mutant;
use unbroken_collective_protocol::Rank;
use unbroken_schedule::{
    Collective, DataType, Fabric, Folding, Host, Nic, Operation, Place, ReduceOp, Topology,
};
use world::{wrong, Case, Fault, Planned, Random};

const MOST_US: u64 = 30_000_000;
const RUNS: u64 = 400;

/// Two or three hosts of two nodes with two NICs and one or two ranks each, over a link that has
/// no room.
fn topology(random: &mut Random) -> Topology {
    let hosts = 2 + random.below(2) as usize;
    let each = 2 + 2 * random.below(2) as usize;
    let mut host = Host { cross_numa_mbps: 1_000, ..Host::new(4, Nic::new(100_000)) };
    (2..4).for_each(|nic| host.nics[nic].numa = 1);
    let place = |rank: Rank| Place { host: rank / each, numa: (rank % each / (each / 2)) as u8 };
    let places = (0..hosts * each).map(place).collect();
    Topology::new(vec![host; hosts], places, Fabric::RailOnly).unwrap()
}

fn case(seed: u64) -> Case {
    let mut random = Random(seed);
    let topology = topology(&mut random);
    let ranks = topology.ranks();
    let ops: Vec<Collective> = (0..6)
        .map(|k| match k % 2 {
            0 => {
                let count = [1, 300, 5_000][random.below(3) as usize];
                let operation = Operation::AllReduce { op: ReduceOp::Sum, count };
                Collective::new(operation, DataType::I32, random.below(2) == 0, ranks).unwrap()
            }
            _ => world::collective(&mut random, ranks),
        })
        .collect();
    let inputs = ops.iter().map(|c| world::inputs(&mut random, c)).collect();
    let host = random.below(topology.hosts().len() as u64) as u32;
    let node = 2 * random.below(2) as u8;
    let dies = |rail: u8, random: &mut Random| Planned {
        fault: Fault::NicDead { host, rail },
        after_writes: 1 + random.below(100),
        lasts_us: (random.below(3) == 0).then(|| 1_000 + random.below(30_000)),
    };
    let faults = vec![dies(node, &mut random), dies(node + 1, &mut random)];
    Case {
        script: vec![ops; ranks],
        inputs,
        faults,
        seed: random.bits(),
        slots: 2 + random.below(4),
        payload: [256, 1024, 4096][random.below(3) as usize],
        mutant: None,
        held_one_in: 50,
        timeout_us: 2_000_000,
        leave: true,
        folding: Folding::Any,
        form: None,
        window: 8,
        nic_mbps: None,
        slow_nics: Vec::new(),
        measure: false,
        rails_apart: false,
        late_us: 0,
        topology,
    }
}

#[test]
fn ranks_that_forward_stand_still_for_nothing() {
    let mut bad = Vec::new();
    for seed in 0..RUNS {
        let case = case(seed);
        if let Some(what) = wrong(&case, &world::run(&case, MOST_US)) {
            bad.push((seed, what));
        }
    }
    assert!(bad.is_empty(), "{} of {RUNS}: {:?}", bad.len(), &bad[..bad.len().min(5)]);
}

#[test]
#[cfg(feature = "mutants")]
#[should_panic(expected = "it lies aside")]
fn receives_that_become_ready_late_are_noticed() {
    for seed in 0..RUNS {
        let case = Case { mutant: Some(Mutant::LateReady), ..case(seed) };
        world::run(&case, MOST_US);
    }
}
