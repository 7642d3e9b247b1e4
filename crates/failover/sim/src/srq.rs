//! A shared receive queue of the simulator. Only one logical QP takes from each, so that its
//! receives complete in order; but it does so in all its lives.

use crate::memory::PD;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use unbroken_types::{PdHandle, RecvRing, RecvWr, SharedReceives};

struct State {
    ring: RecvRing,
    given_back: u64,
}

/// A queue.
pub struct SharedQueue {
    state: Mutex<State>,
    /// The mutant: what a QP has taken does not come back.
    loses: bool,
}

impl SharedQueue {
    /// An empty one.
    pub fn new(loses: bool) -> Arc<SharedQueue> {
        Arc::new(SharedQueue {
            state: Mutex::new(State { ring: RecvRing::new(8, 2), given_back: 0 }),
            loses,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a receive.
    pub fn post(&self, wr: &RecvWr<'_>) -> Result<(), String> {
        self.state().ring.push(wr).map_err(|e| format!("post to the shared queue: {e}"))
    }

    /// Receives that are there.
    pub fn len(&self) -> usize {
        self.state().ring.len() as usize
    }

    /// How often one came back.
    pub fn given_back(&self) -> u64 {
        self.state().given_back
    }
}

impl SharedReceives for SharedQueue {
    fn take(&self, to: &mut dyn FnMut(&RecvWr<'_>)) -> bool {
        let mut s = self.state();
        let Some(wr) = s.ring.oldest() else { return false };
        to(&wr);
        s.ring.remove_oldest();
        true
    }

    fn give_back(&self, wr: &RecvWr<'_>) {
        let mut s = self.state();
        s.given_back += 1;
        if !self.loses {
            s.ring.push_front(wr);
        }
    }

    fn max_sge(&self) -> u32 {
        2
    }

    fn pd(&self) -> PdHandle {
        PD
    }
}
