//! InfiniBand's communication manager (CM): how two programs agree on a connection.
//!
//! - [`Mad`] and [`Message`]: the messages as they are on the wire, 256 bytes each (InfiniBand
//!   Architecture Specification, volume 1, chapter 12).
//! - [`IpHeader`]: the addresses and the port that a connection by IP address has in front of the
//!   private data of its request (annex A11).
//! - [`Cm`]: all connections of a process. It is given messages, calls and the time, and returns
//!   messages, events and the next deadline.
//!
//! Nothing here opens a socket or reads a clock. Messages may be lost, doubled, or come late.
#![forbid(unsafe_code)]

mod connection;
mod fields;
mod ip;
mod mad;
mod manager;
mod message;
mod mutants;
mod reason;
#[cfg(test)]
mod tests;

pub use connection::{ConnId, Connect, Reply, State};
pub use ip::{service_id, IpHeader, PortSpace, IP_HEADER_BYTES};
pub use mad::{Mad, MAD_BYTES};
pub use manager::{Cm, CmError, Config, Event, Output, Peer, MAX_CONNECTIONS};
pub use message::{
    Apr, Disconnect, Lap, Message, Mra, Path, Rej, Rejected, Rep, Req, Rtu, SidrRep, SidrReq,
    SidrStatus,
};
pub use reason::Reason;
