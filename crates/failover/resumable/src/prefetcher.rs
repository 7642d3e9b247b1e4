//! The threads that bring regions to the NICs on which they were not made, so that they are there
//! when a QP comes. The kernel pins the pages of a region in one thread, and a large one takes
//! seconds: as many as [`MAX_THREADS`] are made side by side. A thread is started when a region
//! comes that all others are too busy for, and ends with the memory.

use crate::lock;
use crate::memory::{LogicalMemory, Mr};
use crate::Spawn;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

/// Regions that are made side by side.
pub(crate) const MAX_THREADS: usize = 4;

#[derive(Default)]
struct Queue {
    /// At most a few for each region.
    regions: VecDeque<Weak<Mr>>,
    threads: usize,
    /// Of these, the ones that wait for a region.
    idle: usize,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    news: Condvar,
}

/// What waits for the threads.
pub(crate) struct Prefetcher {
    shared: Arc<Shared>,
    spawn: Spawn,
}

impl Prefetcher {
    pub(crate) fn new(spawn: Spawn) -> Prefetcher {
        Prefetcher { shared: Arc::default(), spawn }
    }

    /// A thread is to look at a region.
    pub(crate) fn put(&self, memory: &Weak<LogicalMemory>, mr: &Arc<Mr>) {
        self.add(memory, |q| q.regions.push_back(Arc::downgrade(mr)));
    }

    /// The same, before all others. False: there is no thread.
    pub(crate) fn put_first(&self, memory: &Weak<LogicalMemory>, mr: &Arc<Mr>) -> bool {
        self.add(memory, |q| q.regions.push_front(Arc::downgrade(mr)))
    }

    fn add(&self, memory: &Weak<LogicalMemory>, put: impl FnOnce(&mut Queue)) -> bool {
        let mut q = lock(&self.shared.queue);
        put(&mut q);
        if q.idle < q.regions.len() && q.threads < MAX_THREADS {
            let (memory, shared) = (memory.clone(), self.shared.clone());
            let started = (self.spawn)("unb-regions", Box::new(move || run(&memory, &shared)));
            q.threads += usize::from(started.is_ok());
        }
        // Without any, regions come to a NIC when they are first needed there.
        let any = q.threads > 0;
        if !any {
            q.regions.clear();
        }
        drop(q);
        self.shared.news.notify_one();
        any
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        lock(&self.shared.queue).ended = true;
        self.shared.news.notify_all();
    }
}

fn run(memory: &Weak<LogicalMemory>, shared: &Shared) {
    loop {
        let mut q = lock(&shared.queue);
        while q.regions.is_empty() && !q.ended {
            q.idle += 1;
            q = shared.news.wait(q).unwrap_or_else(PoisonError::into_inner);
            q.idle -= 1;
        }
        let next = q.regions.pop_front();
        drop(q);
        let (Some(mr), Some(memory)) = (next, memory.upgrade()) else { return };
        if let Some(mr) = mr.upgrade() {
            memory.fill_prepared(&mr);
        }
    }
}
