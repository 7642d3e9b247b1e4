//! Queues of operations that are over: any number of requests, any number of threads that wait.
//!
//! A request that is watched ([`crate::Request::notify`]) puts its tag into the queue exactly once,
//! when it is over, whatever came of it. The thread that drives does so, under the communicator's
//! lock; a queue's own lock is held for a moment alone, and taken last.
//!
//! A queue has at most one tag for each operation that is watched, and those are bounded by what
//! communicators let be under way.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The tags of operations that are over, in the order in which they ended.
#[derive(Debug, Default)]
pub struct Completions {
    inner: Mutex<Inner>,
    /// A tag has come, or the queue was closed.
    came: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    tags: VecDeque<u64>,
    closed: bool,
}

impl Completions {
    /// An empty queue.
    pub fn new() -> Arc<Completions> {
        Arc::default()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, tag: u64) {
        self.lock().tags.push_back(tag);
        self.came.notify_one();
    }

    /// Takes the next tag; sleeps for up to `most` until there is one. `None`: the time is over, or
    /// the queue is closed and empty.
    pub fn take(&self, most: Duration) -> Option<u64> {
        let began = Instant::now();
        let mut inner = self.lock();
        loop {
            if let Some(tag) = inner.tags.pop_front() {
                return Some(tag);
            }
            let left = most
                .checked_sub(began.elapsed())
                .filter(|left| !left.is_zero() && !inner.closed)?;
            inner = self.came.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Wakes all who wait: from now on nobody sleeps here. Tags that are there, or come, can still
    /// be taken.
    pub fn close(&self) {
        self.lock().closed = true;
        self.came.notify_all();
    }
}

/// That one operation is to be told of when it is over.
pub(crate) struct Watch {
    queue: Arc<Completions>,
    tag: u64,
}

impl Watch {
    pub(crate) fn new(queue: Arc<Completions>, tag: u64) -> Watch {
        Watch { queue, tag }
    }

    /// It is over.
    pub(crate) fn tell(self) {
        self.queue.push(self.tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_come_in_order_and_a_closed_queue_keeps_nobody() {
        let queue = Completions::new();
        assert_eq!(queue.take(Duration::ZERO), None);
        (1..=3).for_each(|tag| queue.push(tag));
        assert_eq!([(); 3].map(|()| queue.take(Duration::ZERO)), [Some(1), Some(2), Some(3)]);
        let waits = std::thread::spawn({
            let queue = queue.clone();
            move || queue.take(Duration::from_secs(60))
        });
        queue.close();
        assert_eq!(waits.join().unwrap(), None);
        queue.push(4);
        assert_eq!(
            (queue.take(Duration::from_secs(60)), queue.take(Duration::from_secs(60))),
            (Some(4), None)
        );
    }
}
