//! Logical QPs over the devices of a host: what the application holds goes on when a NIC, a port, a
//! cable or a switch fails.
//!
//! From top to bottom; a file uses those below it:
//!
//! - [`api`]: what the C layer and the Rust API call.
//! - `worker`: one thread for each process: device events, control messages, stalls, deadlines.
//!   Parts of it: `failback` (planned switches: back to the first path, and away from drained NICs)
//!   `moved_qps` (tells the directory where UD QPs are), and `seekers` (QPs whose peer is not found
//!   yet).
//! - `inbound`: control messages that arrive, handled by the worker or by whoever polls.
//! - `link`, `datagram`: what is done with connected QPs and with UD QPs when they move; `explain`:
//!   why a QP was given up, in words. `port_pairs`: automatic path migration: a QP stays on its
//!   NICs and goes over other ports of theirs.
//! - `qp`: the logical QP.
//! - `core`: the process: the tables below, put together.
//! - The tables: `nics` (NICs and their control endpoints), `qps` (QPs, of whatever type),
//!   `contexts` (opened devices), `peer` (other processes), `aliases` (UD QPs that have moved);
//!   `control` (control messages), `events` (what is reported; `log_lines`: on stderr, `probes`: to
//!   tracers), `settings`, `preference` (which NICs QPs go to first), `worker_queue` (what the
//!   worker is to do), `due` (and when), `backups` (QPs made ahead), `parallel` (threads for many
//!   QPs), `directory_monitor`. None knows a QP.
//! - [`NicSet`]: the NICs that all of this runs over. Nothing here names a kind of device, and
//!   failures are learnt of through `verbs::Device` alone.
#![forbid(unsafe_code)]

mod aliases;
pub mod api;
mod async_events;
mod backups;
mod contexts;
mod control;
mod control_batch;
mod control_endpoint;
mod core;
mod datagram;
mod deferred_log;
mod directory_monitor;
mod due;
mod events;
mod explain;
mod failback;
mod fitness;
mod inbound;
mod link;
mod lock;
mod log_lines;
mod moved_qps;
mod nic_set;
mod nics;
mod own_events;
mod parallel;
mod peer;
mod plain;
mod port_pairs;
mod preference;
mod probes;
mod qp;
mod qps;
mod random;
mod seekers;
mod settings;
#[cfg(test)]
mod tests;
mod worker;
mod worker_queue;

pub use nic_set::NicSet;
pub use preference::Place;
pub use settings::failover_is_on;

// Tests run over software NICs, whose `NicSet` names this crate as others do.
#[cfg(test)]
extern crate self as unbroken_shift;
#[cfg(test)]
#[path = "../../../api/nics/src/logical.rs"]
mod logical;
#[cfg(test)]
#[path = "../../../api/nics/src/soft.rs"]
mod soft;
