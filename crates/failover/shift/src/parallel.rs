//! Many QPs at once: a switch waits for verbs of control, which sleep in the kernel or wait for
//! firmware, so that threads help on any number of cores.
//!
//! Whoever has something to do for many QPs hands it over and waits until it is done, so that
//! nothing is different from doing it by itself, but the time. What is done for each takes that
//! QP's gate, and nothing else that another could wait for.

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use std::sync::OnceLock;

/// Verbs that are on their way to the NICs at a time. mlx5 takes 31 commands at once.
const THREADS: usize = 16;

/// The threads of a process; none before [`Parallel::begin`].
#[derive(Default)]
pub(crate) struct Parallel(OnceLock<ThreadPool>);

impl Parallel {
    /// Starts the threads, unless that is done.
    pub(crate) fn begin(&self) -> Result<(), ThreadPoolBuildError> {
        if self.0.get().is_none() {
            let spawn = |thread: rayon::ThreadBuilder| {
                let body = move || {
                    unbroken_process::ask_for_precedence();
                    thread.run();
                };
                unbroken_process::spawn("unb-switch", body).map(drop)
            };
            let pool =
                ThreadPoolBuilder::new().num_threads(THREADS).spawn_handler(spawn).build()?;
            let _ = self.0.set(pool);
        }
        Ok(())
    }

    /// Does it for each of them, in any order, and returns when all is done.
    pub(crate) fn each<T: Sync>(&self, items: &[T], work: impl Fn(&T) + Sync) {
        match self.0.get() {
            Some(pool) if items.len() > 1 => {
                pool.install(|| items.par_iter().with_max_len(1).for_each(&work));
            }
            _ => items.iter().for_each(work),
        }
    }
}
