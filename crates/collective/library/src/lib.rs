//! Collective operations over verbs that keep running when NICs, ports, cables and switches fail.
//!
//! Ranks meet by an [`Id`], and each has a [`Communicator`]. What is sent follows from a plan that
//! all make alike (`unbroken_schedule`); how it is sent, and goes on over another NIC, is decided
//! by an engine without I/O (`unbroken_collective_protocol`, where the state machine, the
//! invariants and the failure cases are written down). This crate has its hands: NICs, shared
//! memory within a host, TCP out of band.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use unbroken_coll::{Bootstrap, Communicator, DataType, Options, ReduceOp};
//! let patience = std::time::Duration::from_secs(60);
//! let bootstrap = Bootstrap::listen("127.0.0.1:0".parse()?, patience)?; // rank 0's process; all are given its id
//! let (id, rank, ranks) = (bootstrap.id(), 0, 2);
//! let host = unbroken::Host::from_env()?;
//! let comm = Communicator::join(&id, rank, ranks, &host, Options::default())?;
//! let mut sums: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|x| x.to_ne_bytes()).collect();
//! comm.all_reduce(DataType::F32, ReduceOp::Sum, &mut sums)?;
//! # Ok(())
//! # }
//! ```
//!
//! Operations are queued and done in order. [`Communicator::run`] waits; [`Communicator::begin`]
//! gives a [`Request`], and the communicator's thread goes on with it while the program computes. A
//! [`Group`] begins several at once. From C the same is `include/unbroken/coll.h`.
#![deny(unsafe_code)]
#![warn(missing_debug_implementations)]

mod acceptor;
mod adapter;
mod anysource;
mod auth;
mod bootstrap;
mod c;
mod channel;
mod communicator;
mod completions;
mod conn;
mod debug;
mod ending;
mod env;
mod error;
mod group;
mod limits;
mod line;
mod memory;
mod net;
mod numa;
mod oob;
mod operands;
mod options;
mod request;
mod span;
mod split;
mod state;
mod status;

pub use bootstrap::{Bootstrap, Id};
pub use communicator::Communicator;
pub use completions::Completions;
pub use error::{Error, Result};
pub use group::Group;
pub use limits::raise_descriptor_limit;
pub use numa::Numa;
pub use operands::Buffers;
pub use options::Options;
pub use request::{Memory, Request};
pub use status::{snapshots, Away, Counters, Done, Happening, Measured, Snapshot};
pub use unbroken_collective_protocol::{Failure, Rank};
pub use unbroken_schedule::{Counts, DataType, Folding, Form, Matrix, Operation, ReduceOp};
