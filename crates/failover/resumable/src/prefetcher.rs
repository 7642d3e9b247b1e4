//! The thread that brings regions to the NICs on which they were not made, so that they are there
//! when a QP comes. It is started with the first region, and ends with the memory.

use crate::lock;
use crate::memory::{LogicalMemory, Mr};
use crate::Spawn;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

#[derive(Default)]
struct Queue {
    /// At most a few for each region.
    regions: VecDeque<Weak<Mr>>,
    started: bool,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    news: Condvar,
}

/// What waits for the thread.
pub(crate) struct Prefetcher {
    shared: Arc<Shared>,
    spawn: Spawn,
}

impl Prefetcher {
    pub(crate) fn new(spawn: Spawn) -> Prefetcher {
        Prefetcher { shared: Arc::default(), spawn }
    }

    /// The thread is to look at a region.
    pub(crate) fn put(&self, memory: &Weak<LogicalMemory>, mr: &Arc<Mr>) {
        let mut q = lock(&self.shared.queue);
        q.regions.push_back(Arc::downgrade(mr));
        if !q.started {
            let (memory, shared) = (memory.clone(), self.shared.clone());
            // Without it regions come to a NIC when they are first needed there.
            q.started =
                (self.spawn)("unb-regions", Box::new(move || run(&memory, &shared))).is_ok();
            if !q.started {
                q.regions.clear();
            }
        }
        drop(q);
        self.shared.news.notify_one();
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        lock(&self.shared.queue).ended = true;
        self.shared.news.notify_one();
    }
}

fn run(memory: &Weak<LogicalMemory>, shared: &Shared) {
    loop {
        let mut q = lock(&shared.queue);
        while q.regions.is_empty() && !q.ended {
            q = shared.news.wait(q).unwrap_or_else(PoisonError::into_inner);
        }
        let next = q.regions.pop_front();
        drop(q);
        let (Some(mr), Some(memory)) = (next, memory.upgrade()) else { return };
        if let Some(mr) = mr.upgrade() {
            memory.fill_prepared(&mr);
        }
    }
}
