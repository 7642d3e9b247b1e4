//! The verbs interface: what a device offers, and how C programs see it.
//!
//! - [`device`]: the [`Device`] and [`DeviceQp`] traits, which are plain verbs, and
//!   [`ResumableQp`], which has what an exact switch needs (`quiesce`, `adopt`, `progress`).
//!   `shift` is written against these traits alone: what it learns of failures comes through them.
//! - [`cq`]: completion queues and channels. A CQ is a ring in this process's memory. Where the
//!   devices share their objects all of them push to it, so that a logical QP which moves to
//!   another NIC keeps completing, in order, where the application polls; else it belongs to one
//!   device ([`Owner`]).
//! - [`srq`]: shared receive queues, which belong to the process or to a device in the same way.
//! - [`keys`]: by which keys a peer's memory is known on each of its NICs.
//! - [`aliases`]: where UD QPs are that have moved, which all devices of a process share.
//! - [`attr`]: what a device and a port can do.
//! - [`lane`]: the way of a post to a provider's function, under one lock.
//! - [`abi`]: the layouts of libibverbs' C structures, checked against the installed header by
//!   `cargo xtask abi`.

pub mod abi;
mod alarm;
pub mod aliases;
pub mod attr;
pub mod channel;
mod cq;
pub mod device;
mod error;
mod eventfd;
pub mod handles;
pub mod keys;
pub mod lane;
mod owner;
mod shared;
pub mod srq;

pub use alarm::Alarm;
pub use aliases::UdAliases;
pub use attr::{DeviceAttr, GidEntry, PortAttr, PortState};
pub use channel::{CompChannel, HeldEvents};
pub use cq::{Cq, Driver, IdleHook, OverrunHook, RawCq, Source, Turn, BATCH};
pub use device::{
    Capabilities, Device, DeviceCounters, DeviceEvent, DeviceQp, EventSink, IndirectEntry,
    Leftovers, MemoryDomain, MrChange, MrKeys, PortEvent, QpEvent, QpInit, QpModify, QpSnapshot,
    RawQp, RemoteNic, ResumableQp, WindowType, NO_REGION,
};
pub use error::{Error, ErrorKind};
pub use eventfd::{duplicate, EventFd};
pub use keys::{KeyAnswer, KeyRow, KeyWaiter, RemoteKeys, Translation};
pub use lane::{Carrier, Lane, LaneCell, LaneGuard, LaneTurn};
pub use owner::Owner;
pub use shared::SharedWords;
pub use srq::{Feeder, LimitHook, Srq, SrqAttr};
pub use unbroken_types::{Backlog, MwBind, PostError, RcModify, RecvWr, SendBatch, SendWr, UdDest};

/// Result of a verb.
pub type Result<T> = std::result::Result<T, Error>;
/// How posting a list went. Err: how many of it were posted, and why not the next.
pub type ListResult = std::result::Result<(), (usize, Error)>;
