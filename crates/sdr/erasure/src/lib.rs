//! Erasure codes for messages over lossy links: parity chunks that bring lost data chunks back
//! without a round trip.
//!
//! A message is cut into submessages of *k* data chunks, and each has *m* parity chunks. Two kinds
//! of code ([`Kind`]): MDS recovers from any *m* losses; XOR is much cheaper and recovers from one
//! in each of its *m* groups. [`Code`] says which, and has an id for the wire: the same id means
//! the same bytes, whoever encodes.
//!
//! [`Code::encode`] makes parity, [`Code::recover`] brings lost data chunks back, in place. Neither
//! allocates, and both work on chunks wherever they lie ([`Code::encode_region`],
//! [`Code::recover_region`]: one behind the other). The last data chunk may be shorter than the
//! others; it counts as if it had zeros behind it.
//!
//! The arithmetic is done by a [`Backend`]. This crate's own ([`Kernel`]) need nothing, and take
//! the widest instructions that the processor has; ISA-L is another one (`unbroken-erasure-isal`).
//! All give the same bytes.
//!
//! Failure cases: what is given and does not fit the code gets a [`CodeError`] that says what would
//! be right; nothing has been written then.
//!
//! The crate does no I/O. It uses `unsafe` for the vector instructions of x86 and nothing else.

mod code;
mod coder;
mod error;
mod field;
mod kernel;
mod set;

pub use code::{Code, Kind};
pub use error::CodeError;
pub use kernel::{check_shapes, Backend, Kernel};
pub use set::ChunkSet;

/// The most data chunks of a code.
pub const MAX_DATA: usize = 128;
/// The most parity chunks of a code. With [`MAX_DATA`] they fit into the field's 256 elements.
pub const MAX_PARITY: usize = 32;
