//! The simulator: the product's switching logic (`path`) and transport (`roce`) in virtual time,
//! under random faults.
//!
//! A seed is a schedule ([`plan`]): a network, a few logical QPs between two hosts, work for them,
//! and faults. [`run`] plays it and checks, in every schedule, what must always hold (see [`app`],
//! and the last look at the end of `world`):
//! 1. every signalled send WR completes once, in order; every receive at most once, in order; each
//!    two-sided send consumes one; those of a shared queue that no message used are still there at
//!    the end;
//! 2. when a WC is delivered the memory that it speaks of is right, and no packet of an older epoch
//!    changes it afterwards; WRITEs become visible in their order;
//! 3. a WR marked NO_REPLAY leaves in one life of its QP only, and an atomic runs once; if either
//!    would have to leave in another life, both ends get their error;
//! 4. everything ends: with success where a path lives, or with the original error where the peer
//!    was killed;
//! 5. logical QPs that no fault touches do not switch;
//! 6. an error of an application's own ([`own`]) is delivered as such, in its place, and ends the
//!    QP: no switch brings it back to life;
//! 7. however a path flaps, a QP goes home once in a time only; and where keys are each NIC's own,
//!    a NIC is never given a key of another.
//!
//! A *mutant* ([`Mutant`], with the feature `mutants`) leaves one rule of the design out; the
//! checks must notice each.
#![forbid(unsafe_code)]

pub mod app;
mod drive;
pub mod end;
mod env;
pub mod flush;
mod home;
pub mod memory;
mod mutants;
pub mod net;
pub mod own;
pub mod phys;
pub mod plan;
pub mod rng;
mod srq;
pub mod stats;
mod taken;
mod world;

pub use mutants::Mutant;
pub use stats::Stats;
pub use world::{run, run_with, Violation};
