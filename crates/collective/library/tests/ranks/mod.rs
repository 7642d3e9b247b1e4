//! Ranks as threads, on hosts of a fabric of their own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use unbroken::Host;
use unbroken_coll::{
    Bootstrap, Buffers, Communicator, DataType, Folding, Operation, Options, ReduceOp,
};
use unbroken_fabric::{DeviceKind, Runtime, Shape};
use unbroken_schedule::verify::expected;
use unbroken_schedule::{
    Buffer, Collective, Fabric as Rails, Host as HostShape, Nic, Place, Topology,
};

const PATIENCE: Duration = Duration::from_secs(30);

/// An emulated network of its own.
pub struct Fabric {
    folder: TempDir,
    pub breaker: Breaker,
}

/// Who breaks it, as a person would from outside.
#[derive(Clone)]
pub struct Breaker(Arc<unbroken_fabric::Fabric>);

impl Breaker {
    pub fn set(&self, fault: &str) {
        self.0.set(&fault.parse().unwrap(), None).unwrap();
    }

    #[allow(dead_code)]
    pub fn clear(&self) {
        self.0.clear(None).unwrap();
    }
}

impl Fabric {
    /// Hosts a to d with four NICs.
    pub fn new(device: DeviceKind) -> Fabric {
        let folder =
            tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" })
                .unwrap();
        let runtime = Runtime::at(folder.path()).unwrap();
        let mut shape = Shape::standard(0);
        shape.kind.device = device;
        let fabric = unbroken_fabric::Fabric::create(&runtime, &shape).unwrap();
        Fabric { folder, breaker: Breaker(Arc::new(fabric)) }
    }

    /// A communicator with a rank on each of these hosts; what each does.
    #[allow(dead_code)]
    pub fn run(&self, hosts: &[&str], options: &Options, work: impl Fn(&Communicator) + Sync) {
        self.give(hosts, options, |comm| work(&comm));
    }

    /// A communicator with a rank on each of these hosts, each with its options; what each does.
    #[allow(dead_code)]
    pub fn run_each(
        &self,
        hosts: &[&str],
        options: &[Options],
        work: impl Fn(&Communicator) + Sync,
    ) {
        self.give_each(hosts, options, |comm| work(&comm));
    }

    /// What ranks on these hosts are told that do not come together, each with its options.
    #[allow(dead_code)]
    pub fn join_all(&self, hosts: &[&str], options: &[Options]) -> Vec<String> {
        let bootstrap = Bootstrap::listen("127.0.0.1:0".parse().unwrap(), PATIENCE).unwrap();
        let (id, ranks) = (bootstrap.id(), hosts.len());
        std::thread::scope(|scope| {
            let mut joining = Vec::new();
            for (rank, (name, options)) in hosts.iter().zip(options).enumerate() {
                let (id, options) = (&id, options.clone());
                joining.push(scope.spawn(move || {
                    let host = Host::emulated(self.folder.path(), name).unwrap();
                    let joined = Communicator::join(id, rank, ranks, &host, options);
                    joined.err().map_or_else(String::new, |e| e.to_string())
                }));
            }
            joining.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// The same, to those who end their ends themselves.
    #[allow(dead_code)]
    pub fn give(&self, hosts: &[&str], options: &Options, work: impl Fn(Communicator) + Sync) {
        self.give_each(hosts, &vec![options.clone(); hosts.len()], work);
    }

    fn give_each(&self, hosts: &[&str], options: &[Options], work: impl Fn(Communicator) + Sync) {
        let bootstrap = Bootstrap::listen("127.0.0.1:0".parse().unwrap(), PATIENCE).unwrap();
        let id = bootstrap.id();
        std::thread::scope(|scope| {
            for (rank, (host, options)) in hosts.iter().zip(options).enumerate() {
                let (work, options) = (&work, options.clone());
                scope.spawn(move || {
                    let host = Host::emulated(self.folder.path(), host).unwrap();
                    let comm = Communicator::join(&id, rank, hosts.len(), &host, options).unwrap();
                    work(comm);
                });
            }
        });
    }
}

/// Elements that differ by rank, place and seed, small enough that no sum depends on its order.
fn inputs(collective: &Collective, seed: u64) -> Vec<Vec<u64>> {
    let product = collective.operation().reduce_op() == Some(ReduceOp::Product);
    let number = |rank: usize, k: u64| {
        let mixed = (seed ^ (rank as u64) << 32 ^ k).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let small = if product {
            [1.0, -1.0, 2.0][(mixed % if rank == 0 { 3 } else { 2 }) as usize]
        } else {
            (mixed % 7) as f64
        };
        match collective.data() {
            DataType::F16 => u64::from(half::f16::from_f64(small).to_bits()),
            DataType::Bf16 => u64::from(half::bf16::from_f64(small).to_bits()),
            DataType::F32 => u64::from((small as f32).to_bits()),
            DataType::F64 => small.to_bits(),
            data => mixed & (u64::MAX >> (64 - 8 * data.bytes())),
        }
    };
    let of = |rank| {
        let range = collective.input_range(rank);
        (range.start..range.end).map(|k| number(rank, k)).collect()
    };
    (0..collective.ranks()).map(of).collect()
}

fn bytes(elements: &[u64], size: usize) -> Vec<u8> {
    elements.iter().flat_map(|e| e.to_le_bytes().into_iter().take(size)).collect()
}

/// Does an operation on known numbers and compares the result.
pub fn check(
    comm: &Communicator,
    operation: &Operation,
    data: DataType,
    in_place: bool,
    seed: u64,
) {
    let (me, ranks) = (comm.rank(), comm.ranks());
    let collective = Collective::new(operation.clone(), data, in_place, ranks).unwrap();
    let size = collective.data().bytes() as usize;
    let inputs = inputs(&collective, seed);
    // The result does not depend on where ranks are.
    let shape = HostShape::new(1, Nic::new(1));
    let places = vec![Place { host: 0, numa: 0 }; ranks];
    let topology = Topology::new(vec![shape], places, Rails::RailOnly).unwrap();
    let want = bytes(&expected(&collective, &topology, &inputs)[me], size);
    let input = bytes(&inputs[me], size);
    let what = format!(
        "rank {me} of {ranks}, seed {seed}: {operation:?} of {data:?}, in place: {in_place}"
    );
    let len = |buffer| collective.buffer_len(me, buffer) as usize * size;
    let got = if in_place {
        let mut buffer = vec![0xa5; len(Buffer::Input).max(len(Buffer::Output))];
        let range = collective.input_range(me);
        if let Some(at) = (!range.is_empty()).then(|| collective.input(me, &range)).flatten() {
            buffer[at.start as usize * size..][..input.len()].copy_from_slice(&input);
        }
        comm.run(operation.clone(), data, Buffers::InPlace(&mut buffer))
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        let range = collective.output_range(me);
        let at = (!range.is_empty()).then(|| collective.output(me, &range)).flatten();
        at.map_or(Vec::new(), |at| buffer[at.start as usize * size..][..want.len()].to_vec())
    } else {
        let mut output = vec![0xa5; len(Buffer::Output)];
        let buffers = Buffers::Apart { input: &input, output: &mut output };
        comm.run(operation.clone(), data, buffers).unwrap_or_else(|e| panic!("{what}: {e}"));
        output
    };
    if let Some(at) = got.iter().zip(&want).position(|(a, b)| a != b) {
        panic!("{what}: byte {at} of {} is {:#x} instead of {:#x}", want.len(), got[at], want[at]);
    }
    assert_eq!(got.len(), want.len(), "{what}");
}

/// What every suite may ask for, by name.
pub fn options() -> Options {
    Options { payload_bytes: 4096, slots: 4, folding: Folding::Any, ..Options::default() }
}
