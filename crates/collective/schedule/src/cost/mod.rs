//! What a schedule costs, in time.
//!
//! The model has two parameters for a message, as NCCL's: α, the time until it arrives if nothing
//! else is on the way, and β, the time for each byte, which follows from what NICs carry. Messages
//! that use a NIC at the same time share it fairly.
//!
//! - [`time`] follows every message of a schedule through virtual time (a *fluid* model: bytes
//!   flow, packets are not seen).
//! - [`volumes`] follows what plans send in all from rank to rank, which may cross [`Switches`].
//! - [`crate::planner`] has formulas as well, that take no longer for a thousand ranks than for
//!   two.

mod fluid;
mod links;
mod switches;
pub mod volumes;

pub use fluid::time;
pub use links::Links;
pub use switches::{Clos, Network, Switches};

/// How messages share a NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sharing {
    /// Lanes take turns, a message at a time: each has a part in proportion to its message. Chunks
    /// of unequal shards then end together, and everything is busy all the time.
    #[default]
    ByMessage,
    /// All have the same rate, as queue pairs of a NIC have that are left to themselves. Small
    /// shards then run ahead, and NICs are idle at the end: an AllReduce of three hosts, one of
    /// which has lost an eighth, takes a quarter longer than it must.
    ByByte,
}

/// What messages cost beside their bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// α between hosts, in µs: from when the sender may send until the receiver may use it, without
    /// the time that its bytes take.
    pub nic_alpha_us: f64,
    /// α within a host, in µs.
    pub memory_alpha_us: f64,
    /// How long a message keeps its NICs busy beside its bytes, in µs.
    pub message_us: f64,
    /// How many messages of a lane may be under way, sent and not yet taken; at least 1.
    pub room: usize,
    /// How messages share a NIC.
    pub sharing: Sharing,
}

impl Default for Costs {
    /// A cluster with RDMA: 5 µs between hosts, 1 µs within one.
    fn default() -> Costs {
        Costs {
            nic_alpha_us: 5.0,
            memory_alpha_us: 1.0,
            message_us: 0.1,
            room: 8,
            sharing: Sharing::ByMessage,
        }
    }
}
