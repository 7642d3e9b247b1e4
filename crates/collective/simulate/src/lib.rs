//! What a lost NIC costs collectives, training jobs and serving, on thousands of GPUs.
//!
//! # The model
//!
//! A collective takes the time that its volumes take ([`unbroken_schedule::cost::volumes`]), over
//! NICs and the switches above them.
//!
//! A training job ([`job`]) has so many operations a step ([`exchange`]), one after the other, and
//! computes in between ([`step`]). Failures come at random or from a file ([`failures`],
//! [`trace`]). Serving of language models is a queueing simulation of its own: [`inference`].
//!
//! # Assumptions
//!
//! - All ranks begin at once, and nothing else uses the network.
//! - Switches spread what they carry evenly, and lose nothing. NICs carry their rate in both
//!   directions at once. Where leaves are oversubscribed, each host has its part of what leads up:
//!   those of other groups do the same at the same time.
//! - Computing and communicating do not overlap: a step takes the sum of both.
//! - Reducing and copying in memory take no time beside the links.
//! - After a failure the new plan is in force from the next operation on.
//! - An operation has all NICs of its hosts, also where few of their GPUs take part in it: what
//!   leaves a host goes to the NICs of others over NVLink.
//!
//! # Units
//!
//! Sizes are in bytes, rates in Mbit/s (bits in a µs), times in µs where a name ends in `_us` and
//! in seconds where it ends in `_s`.
//!
//! # Limits
//!
//! `tests/messages.rs` compares with [`unbroken_schedule::cost::time`], which follows every
//! message. Plans as the planner makes them, 1 to 256 MiB on small clusters: half of 200 cases
//! within 0.1 %, 189 within 3 %, the worst 18 % off. (The planner takes what volumes find fastest,
//! and so those of which they think too well.) Forms whose parts are unequal are further off:
//! the paper's rings by up to 8 %, rings with leaves by up to 14 %. Below 1 MiB nothing is claimed.
//! `benches/coll/simgrid.py` compares with SimGrid, which follows the same messages ([`messages`]),
//! `benches/coll/softnic.py` with collectives that run (docs/internals/collectives.md).
//!
//! The crate does no I/O, reads no clock and starts no thread. Random numbers come from a seed
//! ([`random`]).
#![forbid(unsafe_code)]

pub mod cluster;
mod error;
pub mod exchange;
pub mod failures;
pub mod inference;
pub mod job;
pub mod memory;
pub mod messages;
pub mod model;
pub mod outage;
pub mod preset;
pub mod random;
mod rates;
pub mod step;
mod stop;
pub mod strategy;
pub mod trace;

pub use error::Error;
pub use stop::Stop;
