//! Two hosts of an emulated network in one process, each with a context.
#![allow(dead_code)] // each test file uses a part of it

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use unbroken::{Capabilities, Host};
use unbroken_fabric::{DeviceKind, Fabric, NicKind, Runtime, Shape};
use unbroken_sdr::{Context, ContextOptions, Protection, Qp, QpOptions, Workers};

/// How long anything may take before a test calls it lost.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct World {
    pub a: Context,
    pub b: Context,
    pub fabric: Fabric,
    pub folder: TempDir,
}

/// What NICs have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nics {
    /// All that softnics have.
    Full,
    /// The same without indirect keys.
    Masked,
    /// Plain ones: windows, and objects of their own.
    Plain,
}

pub const ALL_NICS: [Nics; 3] = [Nics::Full, Nics::Masked, Nics::Plain];

impl World {
    pub fn new(channels: u8, nics: &[usize]) -> World {
        World::of(Nics::Full, channels, nics)
    }

    pub fn of(kind: Nics, channels: u8, nics: &[usize]) -> World {
        World::between([kind; 2], channels, nics)
    }

    /// Hosts a and b whose channels are served by these.
    pub fn with_workers(workers: Arc<dyn Workers>, channels: u8, nics: &[usize]) -> World {
        World::made([Nics::Full; 2], channels, nics, Some(workers))
    }

    /// Hosts a and b; plain ones on both sides, or on none.
    pub fn between(kinds: [Nics; 2], channels: u8, nics: &[usize]) -> World {
        World::made(kinds, channels, nics, None)
    }

    fn made(
        kinds: [Nics; 2],
        channels: u8,
        nics: &[usize],
        workers: Option<Arc<dyn Workers>>,
    ) -> World {
        let folder =
            tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" })
                .unwrap();
        if kinds.contains(&Nics::Plain) {
            let kind = NicKind { device: DeviceKind::Plain, ..NicKind::default() };
            let shape = Shape { kind, ..Shape::of(0, &["a", "b"], 2) };
            Fabric::create(&Runtime::at(folder.path()).unwrap(), &shape).unwrap();
        }
        let all = ContextOptions::default().mask;
        let [a, b] = [("a", kinds[0]), ("b", kinds[1])].map(|(name, kind)| {
            let mask = Capabilities { indirect_keys: kind == Nics::Full, ..all };
            let options =
                ContextOptions { channels, nics: nics.to_vec(), mask, ..ContextOptions::default() };
            let own = workers.clone().unwrap_or_else(|| options.workers.clone());
            let options = ContextOptions { workers: own, ..options };
            let context =
                Context::open(&Host::bare(folder.path(), name).unwrap(), &options).unwrap();
            let right =
                if kind == Nics::Full { Protection::IndirectKeys } else { Protection::Windows };
            assert_eq!(context.protection(), right);
            context
        });
        let fabric = Fabric::open(&Runtime::at(folder.path()).unwrap()).unwrap();
        World { a, b, fabric, folder }
    }

    /// A queue pair of a, connected with one of b.
    pub fn pair(&self, options: &QpOptions) -> (Qp, Qp) {
        let (a, b) = (self.a.create_qp(options).unwrap(), self.b.create_qp(options).unwrap());
        a.connect(&b.info()).unwrap();
        b.connect(&a.info()).unwrap();
        (a, b)
    }

    /// Sets a fault, as a person would from outside.
    pub fn fault(&self, text: &str) {
        self.fabric.set(&text.parse().unwrap(), None).unwrap();
    }

    pub fn clear(&self) {
        self.fabric.clear(None).unwrap();
    }
}

#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Bytes that tell where they belong.
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..bytes).map(|_| next()).collect()
}
