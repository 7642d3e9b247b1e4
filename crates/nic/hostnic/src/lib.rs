//! The RDMA devices of the machine: [`unbroken_verbs::Device`] over the installed libibverbs.
//!
//! A device here has plain verbs and nothing beyond ([`unbroken_verbs::Capabilities`] is empty):
//! its CQs, SRQs, keys and protection domains are its own, and a QP that fails is flushed in
//! whatever way its provider has. What protection needs beyond that is supplied above, by
//! `unbroken-resumable`, as for any plain device.
//!
//! - [`library`]: the functions of libibverbs, opened at run time, so that nothing here needs
//!   rdma-core to be built, and machines without it lose nothing. A program may have our own
//!   definitions of these functions before libibverbs' ([`inside`] tells them apart).
//! - [`HostNics`]: the devices that were asked for, by name.
//! - `device`: an open device. Its thread takes the events of its context and of its completion
//!   channel.
//! - `cq`: a CQ of the provider behind a [`unbroken_verbs::Cq`]; whoever polls the ring in vain
//!   polls the provider's.
//! - `faults`: faults on demand, for programs that were started for them.
//! - `memory`, `srq`, `qp`, `ah`: the provider's objects, ended when the last user lets go.
//!
//! Lock order: a CQ's turn → the ring of its [`unbroken_verbs::Cq`]. A control verb runs under the
//! lock of its own object alone (a QP's attributes, a CQ's turn while it grows, the address handles
//! of a QP). Events are acknowledged before anything is done about them, so a verb that waits for
//! that never waits for us.
//!
//! A device is *alive* until it tells IBV_EVENT_DEVICE_FATAL or its descriptor says that the kernel
//! has taken it away. A dead one is looked for (`revival`) and opened anew by [`HostNics::open`]
//! once it can be used again.

mod ah;
mod bonds;
mod context;
mod convert;
mod counters;
mod cq;
mod device;
mod faults;
mod gids;
pub mod inside;
mod library;
mod memory;
mod nics;
mod qp;
mod removal;
mod resolver;
mod revival;
mod srq;
mod windows;

pub use bonds::{bond_legs, BondLeg};
pub use context::{PortView, MAX_GIDS};
pub use counters::{other_devices, OtherDevice};
pub use faults::{
    interface_of_link, DeviceFault, DeviceFaultForm, DeviceFaults, Harm, SetFault, Taker, When,
    DEVICE_FAULT_FORMS,
};
pub use gids::{choose_gid, GidChoice};
pub use nics::{HostNics, Wanted};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex; a panic elsewhere does not make a table useless.
fn lock<T: ?Sized>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pointer to an object of libibverbs, which its functions may be given in any thread.
struct Object<T>(*mut T);

// SAFETY: libibverbs' functions may be called by any thread with any of its objects.
unsafe impl<T> Send for Object<T> {}
// SAFETY: as above; the fields of the structure behind are read only where nobody writes them.
unsafe impl<T> Sync for Object<T> {}
