//! Threads for work that nobody waits for at once: a bounded number of them, with a bounded queue.
//!
//! They start with the first job, and end with the pool, after the job that each of them has.

use crate::lock;
use crate::worker::Job;
use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Jobs that may wait.
const MOST_WAITING: usize = 64;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    over: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    news: Condvar,
}

/// The threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    most: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Pool {
    /// Up to so many threads.
    pub(crate) fn new(most: usize) -> Pool {
        Pool { shared: Arc::default(), most, threads: Mutex::default() }
    }

    /// How many there may be.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Takes a job, or gives it back.
    pub(crate) fn run(&self, job: Job) -> Result<(), Job> {
        let mut threads = lock(&self.threads);
        let mut queue = lock(&self.shared.queue);
        if queue.jobs.len() >= MOST_WAITING {
            return Err(job);
        }
        if threads.len() < self.most && threads.len() <= queue.jobs.len() {
            let shared = self.shared.clone();
            let name = format!("sdr-aside{}", threads.len());
            // Without a thread more, those that there are do it.
            let fresh = std::thread::Builder::new().name(name).spawn(move || serve(&shared));
            threads.extend(fresh);
        }
        if threads.is_empty() {
            return Err(job);
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.news.notify_one();
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.queue).over = true;
        self.shared.news.notify_all();
        let own = std::thread::current().id();
        for thread in lock(&self.threads).drain(..) {
            // A job may have held what the pool belonged to: no thread waits for itself.
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
    }
}

fn serve(shared: &Shared) {
    let mut queue = lock(&shared.queue);
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            drop(queue);
            // A job that panics has said so; the next ones are others'.
            let _ = catch_unwind(AssertUnwindSafe(job));
            queue = lock(&shared.queue);
        } else if queue.over {
            return;
        } else {
            queue = shared.news.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// All jobs are done, those that wait at the end, too, and by no more threads than it has.
    #[test]
    fn every_job_that_is_taken_is_done() {
        let (done, hear) = channel();
        let pool = Pool::new(2);
        let mut taken = 0;
        for _ in 0..200 {
            let done = done.clone();
            let job: Job = Box::new(move || done.send(std::thread::current().id()).unwrap());
            match pool.run(job) {
                Ok(()) => taken += 1,
                Err(job) => job(),
            }
        }
        drop(pool);
        drop(done);
        let mut threads: Vec<_> = hear.iter().collect();
        assert_eq!((threads.len(), taken > 0), (200, true));
        threads.retain(|id| *id != std::thread::current().id());
        threads.sort_by_key(|id| format!("{id:?}"));
        threads.dedup();
        assert!((1..=2).contains(&threads.len()), "{threads:?}");
    }

    #[test]
    fn what_does_not_fit_comes_back_and_a_panic_ends_one_job() {
        assert!(Pool::new(0).run(Box::new(|| ())).is_err(), "there is nobody");
        let pool = Pool::new(1);
        let ((began, hear), (go, wait)) = (channel(), channel::<()>());
        let first: Job = Box::new(move || {
            began.send(()).unwrap();
            let _ = wait.recv_timeout(PATIENCE);
            panic!("as it should");
        });
        assert!(pool.run(first).is_ok());
        hear.recv_timeout(PATIENCE).unwrap();
        let (done, all) = channel();
        let taken = (0..2 * MOST_WAITING)
            .take_while(|_| {
                let done = done.clone();
                pool.run(Box::new(move || done.send(()).unwrap())).is_ok()
            })
            .count();
        assert_eq!(taken, MOST_WAITING);
        go.send(()).unwrap();
        for _ in 0..taken {
            all.recv_timeout(PATIENCE).unwrap();
        }
    }
}
