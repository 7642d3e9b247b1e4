//! The emulated network of softnic: hosts, NICs, cables, one switch for each rail, and the faults
//! of each of them.
//!
//! There is no process that runs the network. Every process that has a NIC open applies the faults
//! that concern it, and reads them with a load from a page of shared memory. So a fabric is three
//! things in the runtime folder:
//! - `fabric.toml`: who is there ([`Host`]), and the second octet of all addresses
//!   (`127.<octet>.<host>.<nic>`);
//! - `shm/fabric.page`: the faults ([`Fault`]), each with the times at which it holds
//!   ([`Schedule`]);
//! - `shm/nics/<addr>.page` and `shm/proc/<process>.page`: what NICs ([`NicPage`]) and processes
//!   ([`GapRecorder`]) counted.
//!
//! A default fabric (hosts a to d, four NICs each) exists without any command: whoever comes first
//! makes the files.
//!
//! Invariants: a page is complete before it has its name; readers take no lock and are never
//! blocked by a writer that died; a fault with a later time, or with a schedule, needs no process
//! to wait for it.
//!
//! Failure cases: a wrong line in `fabric.toml` is an error that names the line; a page of another
//! version is refused; a runtime folder whose octet another living runtime holds is refused.
//!
//! `unsafe` code is in `map` alone; the layouts of pages are declared with it.
#![deny(unsafe_code)]

mod conditions;
mod config;
mod credit;
mod entry;
mod error;
mod fabric;
mod fault;
mod faultpage;
mod gap;
mod grammar;
mod kind;
mod line;
mod map;
mod nicpage;
mod octet;
mod random;
mod units;
mod view;

pub use conditions::{Burst, Conditions};
pub use config::{
    device_kind, device_kind_name, lid_of, link_layer, link_layer_name, mtu, on_one_rail, ports,
    DeviceKind, Host, NicKind, NicName, Shape, MAX_HOSTS, MAX_NICS, MAX_PORTS, SM_LID,
};
pub use credit::{packet_cost, Credit, PATIENCE_US};
pub use error::FabricError;
pub use fabric::{ActiveFault, Fabric, Schedule};
pub use fault::{Direction, Fault, Impairment, Place, Rail, Selector};
pub use gap::{Gap, GapRecorder, GapReport, GAP_MIN_US, GAP_RING};
pub use kind::{FaultForm, FAULT_FORMS};
pub use line::Line;
pub use nicpage::{NicPage, SlotCounters, SLOTS, TX_PORTS};
pub use random::random_schedule;
pub use unbroken_events::{NicCounter, NicCounters};
pub use unbroken_runtime::{now_us, Presence, ProcessName, Runtime, RuntimeError};
pub use units::TimeUs;
pub use view::{LinkState, NicView, PortConditions, ALL_PORTS};
