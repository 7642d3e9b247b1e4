//! How far an answer is.

use std::sync::atomic::{AtomicU64, Ordering};

use unbroken_simulate::Stop;

use crate::Result;

/// How far an answer is, and a way to call it off. It may be looked at from any thread.
#[derive(Debug, Default)]
pub struct Watch {
    stop: Stop,
    done: AtomicU64,
    all: AtomicU64,
}

impl Watch {
    /// The answer is not wanted any longer: whoever computes it ends soon, with an error of kind
    /// [`crate::Kind::Stopped`].
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// How many parts of it are done, and how many there are. None are while that is not known.
    pub fn far(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.all.load(Ordering::Relaxed))
    }

    /// So many parts more are done.
    pub fn add(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    /// So many parts there are.
    pub(crate) fn expect(&self, all: usize) {
        self.all.store(all as u64, Ordering::Relaxed);
    }

    /// What tells the simulator.
    pub(crate) fn stopper(&self) -> Stop {
        self.stop.clone()
    }

    /// An error once the answer is not wanted any longer.
    pub(crate) fn check(&self) -> Result {
        Ok(self.stop.check()?)
    }
}
