//! Logical QPs over the devices of a host: what the application holds goes on when a NIC, a port, a
//! cable or a switch fails.
//!
//! - [`front`]: what the C layer calls.
//! - `qp`, `link`: the logical QP; carries out what the pure crate `path` decides.
//! - `datagram`: logical UD QPs, which move by themselves.
//! - `aliases`: where UD QPs are that have moved.
//! - `homing`: planned switches: when a QP goes back, and away from NICs that are drained.
//! - `lanes`: automatic path migration: a QP stays on its NICs and goes over other ports of theirs.
//! - `worker`: one thread for each process: device events, control messages, stalls, deadlines.
//! - `inbound`: control messages that arrive, handled by the worker or by whoever polls.
//! - `own_events`: what a verb of the program's own raises.
//! - `preference`: which NICs QPs go to first: a map, and how near NICs are.
//! - `explain`: why a QP was given up, in words.
//! - `control`, `outbox`, `peer`: how processes talk to each other and what they know of each
//!   other.
//! - `plain`: QPs of devices that have plain verbs only, which are not protected.
//! - `lookout`: which directory, and what it tells by itself.
//! - [`NicSet`]: the NICs that all of this runs over. Nothing here names a kind of device, and
//!   failures are learnt of through `verbs::Device` alone.
#![forbid(unsafe_code)]

mod aliases;
mod control;
mod core;
mod datagram;
mod explain;
pub mod front;
mod homing;
mod inbound;
mod lanes;
mod later;
mod link;
mod lookout;
mod nic_set;
mod outbox;
mod own_events;
mod peer;
mod plain;
mod preference;
mod qp;
#[cfg(test)]
mod tests;
mod worker;

pub use nic_set::{failover_is_on, NicSet};
pub use preference::Place;

// Tests run over software NICs, whose `NicSet` names this crate as others do.
#[cfg(test)]
extern crate self as unbroken_shift;
#[cfg(test)]
#[path = "../../../api/nics/src/soft.rs"]
mod soft;
