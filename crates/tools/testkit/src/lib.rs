//! Trials: real programs between two emulated hosts, watched from outside.
//!
//! The demo and the benches run unmodified programs (perftest) over a fabric of their own and look
//! at what the NICs count. A [`Lab`] is such a fabric: a runtime folder of its own in a temporary
//! folder, so that trials do not disturb each other or the user's fabric. A [`Running`] program
//! belongs to the lab's owner: it is killed when its handle is dropped, and its output is in a file
//! of the lab. A [`Pair`] is a server on one host and a client on another, as perftest has it. A
//! [`Watch`] reads counters.
//!
//! Invariants: nothing waits without a deadline; a program that was started is gone when its handle
//! is; a lab leaves nothing behind.
//!
//! Failure cases: a program that is not installed, ends early or does not listen in time is an
//! error with the end of its output.
#![forbid(unsafe_code)]

mod error;
mod lab;
mod output;
mod pair;
mod running;
mod watch;

pub use error::{Result, TrialError};
pub use lab::Lab;
pub use output::{bandwidth_gbps, latency_us, Latency};
pub use pair::{free_port, Pair, Spec};
pub use running::Running;
pub use watch::{Sample, Watch};
