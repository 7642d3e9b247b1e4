//! The vocabulary of verbs as plain data.
//!
//! Work requests ([`SendWr`], [`RecvWr`]), completions ([`Wc`]), keys, addresses, changes of queue
//! pairs ([`RcModify`]), and what is outstanding on one ([`Backlog`], [`Progress`]). All layers
//! speak of these. They are defined here once, without I/O, so that every device (the software NIC,
//! a NIC of the machine) and everything above it means the same. Where the C API of libibverbs
//! fixes a layout or a number ([`Wc`], [`Sge`], [`WcStatus`], …), the type here has it, so that a
//! value crosses the C boundary without a conversion.
#![forbid(unsafe_code)]

mod addr;
mod attr;
mod backlog;
mod completions;
mod grh;
mod hold;
mod keys;
mod modify;
mod path;
mod pd;
mod recv_ring;
mod wc;
mod work_request;
mod wr;

pub use addr::{port_guid, Gid, GidType, MAX_QPN, PSN_MASK};
pub use attr::{Access, LinkLayer, Mtu, PathMigState, QpCaps, QpState, QpType};
pub use backlog::{
    Backlog, Messages, Outstanding, PeerDone, Progress, RecvEntry, Replay, SendEntry, Sends,
};
pub use completions::{Completions, SharedReceives};
pub use grh::Grh;
pub use keys::{is_newer_key_set, next_key_set, NicKey, FIRST_KEY_SET};
pub use modify::{ModifyError, RcModify, UdModify, MAX_RD_ATOMIC};
pub use path::{PathAttr, PathError, MAX_FLOW_LABEL, MAX_SL, MAX_SRC_PATH_BITS};
pub use pd::PdHandle;
pub use recv_ring::{QueuedRecv, RecvRing};
pub use wc::{Wc, WcFlags, WcOpcode, WcStatus};
pub use work_request::{
    check_datagram, check_send, send_len, KeyChange, MwBind, PostError, RecvWr, SendBatch, SendWr,
    UdDest, ATOMIC_BYTES, GRH_BYTES, MAX_MESSAGE_BYTES,
};
pub use wr::{SendFlags, SendOpcode, Sge};
