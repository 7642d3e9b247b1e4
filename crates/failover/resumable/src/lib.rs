//! Devices that hold their work, over devices that have plain verbs only.
//!
//! A plain device flushes a QP that fails, and its protection domains, keys, CQs and SRQs are its
//! own. What a switch needs beyond that is supplied here, once, so that everything above sees a
//! [`Device`](unbroken_verbs::Device) with the capabilities `holds` and `shared_objects`:
//!
//! - [`ResumableDevice`] wraps an open device. Its RC QPs keep a journal (`unbroken-journal`): they
//!   hold on failure, stop, and take over work. UD and UC QPs pass through; they cannot be moved.
//! - [`LogicalMemory`] is the process's table of protection domains and regions, with a handle on
//!   each NIC. Local keys are translated where a QP is away from the NIC whose keys the application
//!   has; remote keys by what the peer has said ([`unbroken_verbs::RemoteKeys`]).
//! - The application's CQ stays the ring that it is. Behind it each device has a CQ of its own,
//!   whose completions are brought over by whoever polls, or by a thread of the device where the
//!   application waits for an event.
//! - The application's SRQ stays the queue that it is. Each device's own is lent a share of its
//!   receives.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use unbroken_verbs::{Device, EventSink, Result};
//! # fn f(open: impl Fn(usize, Arc<dyn EventSink>) -> Result<Arc<dyn Device>>,
//! #      sink: Arc<dyn EventSink>, host: unbroken_resumable::Host) -> Result<()> {
//! use unbroken_resumable::{ResumableDevice, LogicalMemory, EventInterceptor};
//! let memory = LogicalMemory::new(2, host.spawn);             // once in a process
//! let interceptor = EventInterceptor::new(sink); // for each device, each time it is opened
//! let device = open(0, interceptor.clone())?;
//! let resumable = ResumableDevice::new(0, device, &interceptor, &memory, host)?;
//! # Ok(()) }
//! ```
//!
//! Lock order: the turn of a CQ → a QP's state (its lane's lock) → a device's own locks, a CQ's
//! ring. Events arrive under a device's locks, so they are only noted there.
#![deny(unsafe_code)]

mod alive;
mod commands;
mod cq;
mod device;
mod interceptor;
mod memory;
mod numbered;
mod overruns;
mod pass;
mod prefetcher;
mod qp;
mod quiesce;
#[allow(unsafe_code)]
mod row;
mod srq;
mod waker;

pub use device::ResumableDevice;
pub use interceptor::EventInterceptor;
pub use memory::LogicalMemory;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// How threads are started: as the devices start theirs, which a program must not notice.
pub type Spawn = fn(&str, Box<dyn FnOnce() + Send>) -> std::io::Result<()>;

/// What is asked of the process around it.
#[derive(Clone, Copy)]
pub struct Host {
    /// How threads are started.
    pub spawn: Spawn,
    /// Microseconds of a monotonic clock.
    pub now_us: fn() -> u64,
}

/// Locks a mutex; a panic elsewhere does not make a table useless.
pub(crate) fn lock<T: ?Sized>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
