//! To whom CQs, SRQs and completion channels belong.
//!
//! On plain verbs each belongs to the device that made it, and is of no use to another. Where the
//! devices of a process share their objects ([`crate::Capabilities::shared_objects`]) they belong
//! to the process.

use std::sync::atomic::{AtomicU64, Ordering};

/// A device as the owner of what it made, or the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Owner(u64);

impl Owner {
    /// The process: the objects serve all devices that share theirs.
    pub const PROCESS: Owner = Owner(0);

    /// An owner that is no other's. A device that is opened anew is another owner.
    pub fn device() -> Owner {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Owner(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
