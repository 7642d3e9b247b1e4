//! The threads of a device that make address handles ([`crate::ah`]).
//!
//! Nobody knows how long one takes: where a peer answers, a round trip; where nobody does, seconds.
//! So several threads make them, those first that are likely to be made, and addresses that nobody
//! has answered before may have half of the threads at most. So dead ones delay no good one for
//! long, however many there are.
//!
//! Bounds: [`THREADS`] threads a device, [`MOST_WAITING`] addresses that wait.

use crate::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Threads of a device, each started when it is first needed.
const THREADS: usize = 8;
/// Of these, so many are for addresses that nobody has answered.
const DOUBTFUL_THREADS: usize = THREADS / 2;
/// Addresses that wait for a thread.
const MOST_WAITING: usize = 1024;

/// How likely an address is answered; the least is the most likely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Doubt {
    /// How often nobody has answered.
    pub(crate) failures: u32,
    /// Bits in which it differs from our own, from the first that differs: those of one network
    /// have the fewest.
    pub(crate) distance: u32,
}

impl Doubt {
    fn is_doubtful(self) -> bool {
        self.failures > 0
    }
}

/// What waits, and who is at work.
struct Line<J> {
    waiting: BTreeMap<(Doubt, u64), J>,
    next: u64,
    threads: usize,
    idle: usize,
    /// Threads at doubtful addresses.
    doubtful: usize,
    ended: bool,
}

impl<J> Line<J> {
    fn put(&mut self, doubt: Doubt, job: J) -> bool {
        let room = self.waiting.len() < MOST_WAITING && !self.ended;
        if room {
            self.waiting.insert((doubt, self.next), job);
            self.next += 1;
        }
        room
    }

    /// The next for a thread that has nothing to do. The doubtful are last in order, so where the
    /// first is one, all are.
    fn take(&mut self) -> Option<(Doubt, J)> {
        let (doubt, _) = *self.waiting.first_key_value()?.0;
        if doubt.is_doubtful() {
            if self.doubtful >= DOUBTFUL_THREADS {
                return None;
            }
            self.doubtful += 1;
        }
        self.waiting.pop_first().map(|(_, job)| (doubt, job))
    }

    fn done(&mut self, doubt: Doubt) {
        self.doubtful -= usize::from(doubt.is_doubtful());
    }
}

impl<J> Default for Line<J> {
    fn default() -> Line<J> {
        let waiting = BTreeMap::new();
        Line { waiting, next: 0, threads: 0, idle: 0, doubtful: 0, ended: false }
    }
}

struct Shared<J> {
    line: Mutex<Line<J>>,
    news: Condvar,
}

/// The threads, which end with it.
pub(crate) struct Resolver<J: Send + 'static> {
    shared: Arc<Shared<J>>,
    work: fn(J),
}

impl<J: Send + 'static> Resolver<J> {
    /// Threads that do `work` with each.
    pub(crate) fn new(work: fn(J)) -> Resolver<J> {
        let shared = Shared { line: Mutex::default(), news: Condvar::new() };
        Resolver { shared: Arc::new(shared), work }
    }

    /// A thread is to see to it. False: there is too much to do, or no thread can be started.
    pub(crate) fn ask(&self, device: &str, doubt: Doubt, job: J) -> bool {
        let mut line = lock(&self.shared.line);
        if !line.put(doubt, job) {
            return false;
        }
        if line.idle < line.waiting.len() && line.threads < THREADS {
            let (shared, work) = (self.shared.clone(), self.work);
            let name = format!("unb-a-{device}");
            let started = unbroken_process::spawn(&name, move || run(&shared, work)).is_ok();
            line.threads += usize::from(started);
            if line.threads == 0 {
                line.waiting.clear();
                return false;
            }
        }
        drop(line);
        self.shared.news.notify_one();
        true
    }
}

impl<J: Send + 'static> Drop for Resolver<J> {
    fn drop(&mut self) {
        let mut line = lock(&self.shared.line);
        line.ended = true;
        let left = std::mem::take(&mut line.waiting);
        drop(line);
        self.shared.news.notify_all();
        drop(left);
    }
}

fn run<J>(shared: &Shared<J>, work: fn(J)) {
    loop {
        let mut line = lock(&shared.line);
        let (doubt, job) = loop {
            if line.ended {
                return;
            }
            if let Some(next) = line.take() {
                break next;
            }
            line.idle += 1;
            line = shared.news.wait(line).unwrap_or_else(PoisonError::into_inner);
            line.idle -= 1;
        };
        drop(line);
        work(job);
        lock(&shared.line).done(doubt);
        shared.news.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubt(failures: u32, distance: u32) -> Doubt {
        Doubt { failures, distance }
    }

    #[test]
    fn the_likely_come_first() {
        let mut line = Line::default();
        for (failures, distance) in [(2, 1), (0, 40), (0, 8), (1, 8), (0, 8)] {
            assert!(line.put(doubt(failures, distance), (failures, distance)));
        }
        let order: Vec<_> = std::iter::from_fn(|| line.take()).map(|(_, job)| job).collect();
        assert_eq!(order, [(0, 8), (0, 8), (0, 40), (1, 8), (2, 1)]);
    }

    #[test]
    fn those_that_nobody_answers_do_not_take_all_threads() {
        let mut line = Line::default();
        (0..100).for_each(|_| assert!(line.put(doubt(1, 1), "dead")));
        let taken = std::iter::from_fn(|| line.take()).count();
        assert_eq!(taken, DOUBTFUL_THREADS);
        line.put(doubt(0, 100), "good");
        assert_eq!(line.take().unwrap().1, "good");
        assert_eq!(line.take(), None);
        line.done(doubt(1, 1));
        assert_eq!(line.take().unwrap().1, "dead");
        (0..2 * MOST_WAITING).for_each(|_| _ = line.put(doubt(0, 0), "more"));
        assert_eq!(line.waiting.len(), MOST_WAITING);
    }

    #[test]
    fn its_threads_end_with_it() {
        let done = Arc::new((Mutex::new(0), Condvar::new()));
        let resolver = Resolver::new(|done: Arc<(Mutex<u32>, Condvar)>| {
            *lock(&done.0) += 1;
            done.1.notify_all();
        });
        (0..20).for_each(|n| assert!(resolver.ask("test", doubt(n % 2, n), done.clone())));
        let mut n = lock(&done.0);
        while *n < 20 {
            n = done.1.wait(n).unwrap();
        }
        drop(n);
        let shared = Arc::downgrade(&resolver.shared);
        drop(resolver);
        let start = std::time::Instant::now();
        while shared.strong_count() > 0 {
            assert!(start.elapsed().as_secs() < 20, "a thread is left");
            std::thread::yield_now();
        }
    }
}
