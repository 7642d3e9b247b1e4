//! What a plain QP has taken from a shared queue.

use crate::phys::translated;
use crate::srq::SharedQueue;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use unbroken_types::{PdHandle, RecvEntry, RecvWr, SharedReceives};

/// Remembers what was taken from a shared queue, as the product remembers what a device was lent.
pub(crate) struct Taken {
    queue: Arc<SharedQueue>,
    /// By which key its NIC knows the memory.
    local_key: u32,
    /// Those whose completions nobody has looked at.
    entries: Mutex<Vec<RecvEntry>>,
}

impl Taken {
    pub(crate) fn new(queue: &Arc<SharedQueue>, local_key: u32) -> Taken {
        Taken { queue: queue.clone(), local_key, entries: Mutex::default() }
    }

    pub(crate) fn entries(&self) -> MutexGuard<'_, Vec<RecvEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn forget(&self, wr_id: u64) -> Option<RecvEntry> {
        let mut entries = self.entries();
        let i = entries.iter().position(|entry| entry.wr_id == wr_id)?;
        Some(entries.remove(i))
    }

    /// The QP was destroyed: what it has taken and not told of goes back, in its order.
    pub(crate) fn end(&self) {
        let left = std::mem::take(&mut *self.entries());
        for entry in left.iter().rev() {
            self.queue.give_back(&RecvWr { wr_id: entry.wr_id, sges: &entry.sges });
        }
    }

    /// The receive of a completion goes back unused.
    pub(crate) fn unused(&self, wr_id: u64) {
        if let Some(entry) = self.forget(wr_id) {
            self.queue.give_back(&RecvWr { wr_id, sges: &entry.sges });
        }
    }
}

impl SharedReceives for Taken {
    fn take(&self, to: &mut dyn FnMut(&RecvWr<'_>)) -> bool {
        let mut entries = self.entries();
        self.queue.take(&mut |wr| {
            entries.push(RecvEntry { wr_id: wr.wr_id, sges: wr.sges.to_vec() });
            to(&RecvWr { sges: &translated(wr.sges, self.local_key), ..*wr });
        })
    }
    fn give_back(&self, wr: &RecvWr<'_>) {
        self.unused(wr.wr_id);
    }
    fn max_sge(&self) -> u32 {
        self.queue.max_sge()
    }
    fn pd(&self) -> PdHandle {
        self.queue.pd()
    }
}
