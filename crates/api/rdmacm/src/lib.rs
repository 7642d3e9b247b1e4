//! The kernel's `/dev/infiniband/rdma_cm`, answered in the process.
//!
//! librdmacm connects programs by IP address. Each of its calls is one `write` to that device, with
//! a pointer to where the answer goes. [`open`] gives a descriptor that stands for it, [`command`]
//! carries out what is written there. So an unmodified librdmacm, and every program over it, works
//! over the NICs of this process.
//!
//! - `abi`: commands and answers as bytes.
//! - `channel`: descriptors and the events that wait in them.
//! - `ports`: who has which port, in the runtime folder.
//! - `transport`: datagrams of the CM, over UD queue pairs.
//! - `state` and what is below it: ids, and what the commands do with them. The connections
//!   themselves are `unbroken_cm`'s.
//! - `service`: the lock, and the thread that receives and waits for deadlines.
//!
//! A forked child has nothing of this: its commands fail with EIO, as its verbs do.
#![forbid(unsafe_code)]

mod abi;
mod channel;
mod ids;
mod ports;
mod qp;
mod service;
mod state;
mod transport;

pub use abi::Errno;
pub use service::{command, finish, is_channel, open, Memory, Outcome};
