//! The words of verbs as plain data.
//!
//! Every layer speaks of work requests, completions, keys and addresses. They are defined here
//! once, without I/O, so that the pure crates (`roce`, `path`, `sim`) and the shells (`softnic`,
//! `shift`, `preload`) mean the same thing. Where the C API of libibverbs fixes a layout or a
//! number ([`Wc`], [`Sge`], [`WcStatus`], …), the type here has that layout and number, so that a
//! value crosses the C boundary without a conversion.
#![forbid(unsafe_code)]

mod addr;
mod attr;
mod keys;
mod path;
mod pd;
mod wc;
mod wr;

pub use addr::{port_guid, Gid, GidType, MAX_QPN, PSN_MASK};
pub use attr::{Access, LinkLayer, Mtu, PathMigState, QpCaps, QpState, QpType};
pub use keys::{is_newer_key_set, NicKey};
pub use path::{PathAttr, PathError, MAX_FLOW_LABEL, MAX_SL, MAX_SRC_PATH_BITS};
pub use pd::PdHandle;
pub use wc::{Wc, WcFlags, WcOpcode, WcStatus};
pub use wr::{SendFlags, SendOpcode, Sge};
