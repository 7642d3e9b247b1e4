//! The life of a logical QP: which path carries it, when it moves to another, and what is replayed there.
//!
//! A *logical QP* is what the application holds. Behind it stands one physical QP at a time, on the path (local NIC, remote NIC)
//! that its *epoch* names. This crate decides; a shell (`shift`, or the simulator) posts, polls, sends and moves. It does no
//! I/O and reads no clock: time is `now_us`, microseconds of any monotonic clock.
//!
//! - [`LogicalQp`]: one end of one logical QP: the passive switch (SHIFT §4) as a state machine.
//! - [`message`]: the control messages that the two ends exchange, and their bytes.
//! - [`slots`]: which path an epoch uses, the same at both ends.
//! - [`stall`] and [`probe`]: noticing that a path has gone silent, without taking a slow peer for a dead path.
#![forbid(unsafe_code)]

mod action;
mod config;
pub mod message;
pub mod probe;
mod qp;
pub mod slots;
pub mod stall;

pub use action::{Action, FailCause, OpenError, Opened, QuiesceError, Quiesced, Reason, Switched};
#[doc(hidden)]
pub use config::Mutation;
pub use config::{Config, Counters};
pub use message::{Endpoint, Message};
pub use qp::{LogicalQp, State};
pub use slots::{psn_of, slot_of, Belief, Direction, SlotPath, SlotTable, SLOTS};
