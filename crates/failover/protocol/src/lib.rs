//! The life of a logical QP: which path carries it, when it moves to another, and what is replayed
//! there.
//!
//! A *logical QP* is what the application holds. Behind it stands one physical QP at a time, on the
//! path (local NIC, remote NIC) that its *epoch* names. This crate decides; a shell (`shift`, or
//! the simulator) posts, polls, sends and moves. It does no I/O and reads no clock: time is
//! `now_us`, microseconds of any monotonic clock.
//!
//! - [`LogicalQp`]: one end of one logical QP: the passive switch (SHIFT §4) as a state machine.
//! - [`executor`]: carries out what it decides, over an [`Env`].
//! - [`message`]: the control messages that the two ends exchange, and their bytes.
//! - [`seal`]: what keeps strangers' messages out.
//! - [`slots`]: which path an epoch uses, the same at both ends.
//! - [`choice`]: which path, and so which epoch, a QP goes to.
//! - [`port_pairs`]: when a QP stays on its path and goes over other ports.
//! - [`silence`] and [`health`]: noticing that a QP makes no progress, and finding out whether its
//!   path lives, and how much it loses.
//! - [`repeats`]: when failures of QPs are their NIC's.
#![forbid(unsafe_code)]

mod action;
pub mod choice;
mod config;
pub mod executor;
pub mod health;
mod keys;
pub mod message;
mod mutants;
pub mod port_pairs;
mod qp;
pub mod repeats;
pub mod seal;
pub mod silence;
pub mod slots;

pub use action::{
    Action, Attempt, FailCause, OpenError, Opened, QuiesceError, Quiesced, Reason, Switched,
};
pub use choice::Policy;
pub use config::{Config, Counters};
pub use executor::{Asks, Ended, Env, Executor, PeerWord, StepError, Switch};
pub use message::{Endpoint, Message};
#[doc(hidden)]
pub use mutants::Mutation;
pub use qp::{LogicalQp, State};
pub use slots::{slot_of, Liveness, PortPath, SlotPath, SlotTable, SLOTS};
