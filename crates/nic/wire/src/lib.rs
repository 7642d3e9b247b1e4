//! RoCEv2 on the wire: what a UDP datagram to port 4791 carries.
//!
//! ```text
//!   BTH (12 bytes) | extended headers (0–28) | payload | 0–3 bytes of padding | ICRC (4)
//! ```
//!
//! [`Packet::parse`] checks and reads without copying, [`HeaderBuf::new`] emits, [`Icrc`] and
//! [`strip_icrc`] make and check the ICRC. Nothing here allocates. Bytes that are not a packet give
//! an error and nothing else.
#![forbid(unsafe_code)]

mod icrc;
mod opcode;
mod packet;

pub use icrc::{strip_icrc, Icrc, IcrcChecker, IcrcFlow, IcrcSeed, ICRC_BYTES, POLYNOMIAL};
pub use opcode::{Op, Opcode, Transport, MAX_ACK_PAYLOAD};
pub use packet::{
    pad_of, Aeth, AtomicEth, Bth, Deth, Ext, HeaderBuf, Packet, ParseError, Reth, BTH_BYTES,
    DEFAULT_PKEY, MAX_HEADER,
};

/// The UDP port of RoCEv2.
pub const ROCE_PORT: u16 = 4791;
