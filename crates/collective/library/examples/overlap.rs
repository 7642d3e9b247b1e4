//! A rank computes while the sums of what it has computed before are under way; a NIC dies
//! meanwhile, and every sum is right.
//!
//! All ranks are threads of this program: `cargo run --release --example overlap`

use std::time::Duration;

use unbroken::Host;
use unbroken_coll::{
    Bootstrap, Communicator, DataType, Group, Id, Memory, Operation, Options, ReduceOp,
};

const HOSTS: [&str; 3] = ["a", "b", "c"];
const ROUNDS: u64 = 40;
const COUNT: usize = 1 << 18;
const DEPTH: usize = 4;

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// What a rank has computed in a round.
fn numbers(round: u64, rank: usize) -> Vec<u8> {
    (0..COUNT as u64).flat_map(|k| (k * 7 + round * 13 + rank as u64).to_ne_bytes()).collect()
}

fn expect(round: u64, sums: &[u8]) -> Result<(), Failed> {
    let ranks = HOSTS.len() as u64;
    for (k, sum) in sums.chunks_exact(8).enumerate() {
        let want = ranks * (k as u64 * 7 + round * 13) + ranks * (ranks - 1) / 2;
        if sum != want.to_ne_bytes() {
            return Err(format!("round {round}: element {k} is wrong").into());
        }
    }
    Ok(())
}

fn rank(host: &Host, id: &Id, me: usize, breaks: impl Fn()) -> Result<u64, Failed> {
    let comm = Communicator::join(id, me, HOSTS.len(), host, Options::default())?;
    let operation = Operation::AllReduce { op: ReduceOp::Sum, count: COUNT as u64 };
    let mut under_way = std::collections::VecDeque::new();
    for round in 0..ROUNDS + DEPTH as u64 {
        if round < ROUNDS {
            let memory = Memory::InPlace(numbers(round, me));
            under_way.push_back(comm.begin(operation.clone(), DataType::U64, memory)?);
        }
        if round == ROUNDS / 2 {
            breaks();
        }
        // What is behind is checked while what is ahead is under way.
        if round >= DEPTH as u64 {
            let request = under_way.pop_front().ok_or("nothing is under way")?;
            expect(round - DEPTH as u64, &request.wait()?.into_output())?;
        }
    }
    // Neighbours exchange what they have; in whatever order they ask, neither waits for the other.
    let (next, last) = ((me + 1) % HOSTS.len(), (me + HOSTS.len() - 1) % HOSTS.len());
    let mut group = Group::new();
    group.send(&comm, DataType::U8, next, numbers(0, me))?;
    group.recv(&comm, DataType::U8, last, vec![0; 8 * COUNT])?;
    let came = group.run()?.pop().ok_or("nothing came")?.into_output();
    if came != numbers(0, last) {
        return Err("what the neighbour has sent is something else".into());
    }
    Ok(comm.counters().failures)
}

fn main() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let runtime = unbroken_fabric::Runtime::at(folder.path())?;
    let fabric = unbroken_fabric::Fabric::create(&runtime, &unbroken_fabric::Shape::standard(0))?;
    let id = Bootstrap::listen("127.0.0.1:0".parse()?, Duration::from_secs(60))?.id();
    let failed = std::thread::scope(|scope| {
        let start = |(me, name): (usize, &&str)| {
            let (fabric, folder, name) = (&fabric, folder.path(), name.to_string());
            scope.spawn(move || {
                let host = Host::emulated(folder, &name)?;
                rank(&host, &id, me, || {
                    if me == 0 {
                        fabric
                            .set(&"nic a/0 dead".parse().expect("a fault"), None)
                            .expect("the network is there");
                    }
                })
            })
        };
        let threads: Vec<_> = HOSTS.iter().enumerate().map(start).collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("no panic"))
            .collect::<Result<Vec<u64>, Failed>>()
    })?;
    if failed[0] == 0 {
        return Err("the NIC died, and no path has failed".into());
    }
    println!(
        "{ROUNDS} sums of {} ranks are right; {} paths of rank 0 failed",
        HOSTS.len(),
        failed[0]
    );
    Ok(())
}
