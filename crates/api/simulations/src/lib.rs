//! What `unbroken plan`, `unbroken simulate` and Python's `unbroken.simulate` ask the simulator of
//! clusters, and its answers.
//!
//! Questions are command lines in both cases: Python's keywords become options. So names, defaults,
//! bounds and errors are the same, and there is one place for each. An answer is plain data, which
//! serde makes JSON of. The command shows it as tables, Python as dictionaries.
//!
//! | module | question |
//! | --- | --- |
//! | [`plan`] | what is chosen for each collective after a failure, and what that costs |
//! | [`messages`] | every message of a plan, for other simulators; of the command alone |
//! | [`run`] | a job that loses NICs at given times, or as a file says |
//! | [`sweep`] | NICs lost at random; also in parts, which may be computed elsewhere |
//! | [`month`] | failures and repairs at random |
//! | [`serve`] | a language model that answers requests |
//!
//! Whoever asks keeps a [`Watch`]: how far it is, and a way to call it off. Threads end with the
//! answer, so a process may fork between questions.
#![deny(unsafe_code)]

mod error;
mod file;
pub mod messages;
pub mod month;
pub mod options;
pub mod plan;
mod python;
mod question;
pub mod run;
pub mod serve;
pub mod sweep;
mod watch;

pub use error::{Error, Kind, Result};
pub use watch::Watch;

/// Runs something on so many cores, or on all, in threads of its own.
fn on_cores<T: Send>(cores: Option<u16>, run: impl FnOnce() -> T + Send) -> Result<T> {
    let count = usize::from(cores.unwrap_or(0));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(count).build();
    match pool {
        Ok(pool) => Ok(pool.install(run)),
        Err(e) => Err(Error::system(None, format!("cannot start threads: {e}"))),
    }
}
