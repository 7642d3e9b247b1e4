//! The host edge's rules: which tc rules should exist, which do, and how to get from one to the
//! other (THORN-ML §5).
//!
//! On a host with two uplinks, EVPN fills the forwarding table (FDB) of a VXLAN device with the MAC
//! addresses that live on other hosts. A NIC does not look into that table; it follows tc flower
//! rules. This crate derives the rules from the table:
//!
//! - [`wanted`]: from the kernel's tables to the rules that should exist;
//! - [`diff`]: from what should and what does exist to the fewest messages, in an order in which no
//!   rule is ever missing;
//! - [`Reconciler`]: when to look, and what to do if notifications are lost, dumps are torn or
//!   batches end half-way.
//!
//! It does no I/O and reads no clock: tables come in, operations go out, time is `now_us`,
//! microseconds of any monotonic clock.
//!
//! What is ours is known by three marks: a reserved priority, a reserved range of handles, and our
//! cookie on every action. All else is never touched.
#![forbid(unsafe_code)]

mod diff;
mod model;
mod mutants;
mod reconciler;
mod wanted;

pub use diff::{diff, Plan};
pub use model::{
    Action, ActionId, ActionKind, ActionSpec, FdbEntry, Filter, Link, Mac, Match, Offload, Op, Own,
    Rules, Settings, Tables, Tenant, TunnelMatch, COOKIE, DEFAULT_PRIORITY, VXLAN_PORT,
};
#[doc(hidden)]
pub use mutants::Mutation;
pub use reconciler::{Command, Dump, Event, Reconciler, Status, Table, Timing, BATCH_OPS};
pub use wanted::{wanted, Wanted};
