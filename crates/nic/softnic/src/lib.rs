//! An RNIC in user space: verbs over RoCEv2 on ordinary UDP sockets, in the application's own
//! process.
//!
//! [`SoftNics`] is the set of NICs of a process: those of a host of the emulated network, or the
//! addresses of real interfaces. [`SoftNics::open`] gives a [`Nic`], which is a
//! [`unbroken_verbs::Device`].
//!
//! ```text
//!   application thread: post_send, poll_cq ──┐            ┌── background thread: ppoll(socket, bell, next deadline)
//!                                            ▼            ▼
//!                                   one lock: Engine ── roce QPs ── registered memory
//!                                            │
//!                         1 socket in (UDP_GRO), 4 sockets out (UDP_SEGMENT)
//! ```
//!
//! Whoever has the lock drives the engine. A program that polls does all the work itself; the
//! background thread serves those that do not, runs timers, and stays out of the way otherwise (see
//! `background`).
//!
//! A NIC applies the faults of the emulated network to itself. A dead one stays dead; opening it
//! again, once the fault is cleared, gives a new one. Keys of memory regions are valid on all NICs
//! of a process, whenever they were opened. Plain NICs (see `plain`) have none of these liberties:
//! they are to what is above as RNICs would be.
//!
//! Files use those that stand before them: `memory`, `socket`, `faults`, `gids`; `config` and
//! `spec`; `engine`; `shared` (the engine behind its lock); `background`; `inner`; `qp`; `nic`;
//! `nics`.

mod background;
mod config;
mod copy;
mod describe;
mod engine;
mod faults;
mod flush;
mod gids;
mod inner;
mod inventory;
mod limits;
mod memory;
mod netlink;
mod nic;
mod nics;
mod plain;
mod poller;
mod progress_counters;
mod qp;
mod reminders;
mod shared;
mod socket;
mod spec;
#[cfg(target_arch = "x86_64")]
mod traps;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_traps.rs"]
mod traps;

pub use config::{Config, NicSource};
pub use inventory::{interface_index, inventory, NicInfo, PortInfo};
pub use nic::Nic;
pub use nics::SoftNics;
pub use traps::program_action;
pub use unbroken_fabric::DeviceKind;
pub use unbroken_wire::ROCE_PORT;
