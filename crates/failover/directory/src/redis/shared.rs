//! The book, as the thread and those who ask share it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::book::Book;
use crate::directory::News;

/// What the thread and all others share.
pub(super) struct Shared {
    pub(super) book: Mutex<Book>,
    /// There is something to do for the thread.
    pub(super) work: Condvar,
    /// Something is answered, or the state is another.
    pub(super) done: Condvar,
    pub(super) started: Instant,
    pub(super) news: Box<dyn Fn(News) + Send + Sync>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Waits for so long at most until the book is as wanted.
    pub(super) fn wait<'a>(
        &'a self,
        book: MutexGuard<'a, Book>,
        wait: Duration,
        wanted: impl Fn(&Book) -> bool,
    ) -> MutexGuard<'a, Book> {
        let waited = self.done.wait_timeout_while(book, wait, |book| !wanted(book));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
