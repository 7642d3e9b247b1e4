//! Two hosts of an emulated network in one process, each with a context.
#![allow(dead_code)] // each test file uses a part of it

use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use unbroken::Host;
use unbroken_fabric::{Fabric, Runtime};
use unbroken_sdk::{Context, ContextOptions, Qp, QpOptions};

/// How long anything may take before a test calls it lost.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct World {
    pub a: Context,
    pub b: Context,
    pub fabric: Fabric,
    pub folder: TempDir,
}

impl World {
    pub fn new(channels: u8, nics: &[usize]) -> World {
        let folder = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" }).unwrap();
        let [a, b] = ["a", "b"].map(|name| {
            let options = ContextOptions { channels, nics: nics.to_vec(), ..ContextOptions::default() };
            Context::open(&Host::emulated(folder.path(), name).unwrap(), &options).unwrap()
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
