//! Collective operations as data: who sends which part of a vector to whom, after what, on which
//! NIC.
//!
//! A *schedule* follows from a topology with the health of its NICs, an operation, and a choice of
//! how to do it. It is executed over real NICs, in virtual time, and in [`verify`] in memory alone;
//! all read the same data ([`schedule`] says how).
//!
//! - [`Topology`]: hosts, NICs, ranks. [`Collective`]: an operation on elements of a type.
//! - [`Plan`]: channels, shards, owners, chunks; from it each rank generates its own [`Program`],
//!   without the others.
//! - [`binding`]: which NICs carry a channel, dead and slow ones left out.
//! - [`reshape`]: AllReduce among hosts that carry unequally much, and the bound; [`paper`],
//!   [`rerank`]: R²CCL's way.
//! - [`planner`]: which plan is the fastest, by formulas; [`Form`]: plans by name; [`cost`]: how
//!   long a schedule takes, message by message.
//! - [`Flow`]: what a plan sends over which NICs in all, for models that follow volumes.
//! - [`verify`]: what must hold for every schedule, and an executor that runs ready steps in random
//!   order.
//!
//! Files use those that stand before them: `topology`, `operation` and `schedule`; `binding`;
//! `choice`; `relay`; `plan`; `planning` (makes plans), `flows` and `bundles` (volumes of plans)
//! and `generate` (programs of plans); `planner`.
//!
//! The crate does no I/O, reads no clock and starts no thread.
#![forbid(unsafe_code)]

pub mod binding;
mod builder;
mod bundles;
mod choice;
pub mod cost;
mod data;
mod error;
mod flows;
mod form;
mod generate;
mod operation;
pub mod paper;
mod plan;
pub mod planner;
mod planning;
mod rails;
mod relay;
pub mod rerank;
pub mod reshape;
pub mod schedule;
mod shape;
mod split;
mod topology;
pub mod verify;

pub use bundles::Bundle;
pub use choice::{Choice, Folding, Grouping, Owners, MAX_CHANNELS};
pub use data::{divide, DataType, ReduceOp};
pub use error::Error;
pub use flows::{Flow, Phase};
pub use form::Form;
pub use operation::{Collective, Counts, Matrix, Operation};
pub use plan::{Plan, Shard, MAX_CHUNKS};
pub use schedule::{Buffer, Lane, Path, Program, Schedule, Slice, Stage, Step, Work};
pub use shape::Shape;
pub use split::split;
pub use topology::{Fabric, Health, Host, Nic, Place, Topology, MAX_NICS, MAX_RANKS};
