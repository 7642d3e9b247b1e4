//! The transport of RoCEv2 as pure state machines: RC ([`RcQp`]), UC ([`UcQp`]) and UD ([`UdQp`]).
//!
//! A QP is given work requests, packets and the time, and gives back packets, completions and the
//! next deadline. It opens no socket, reads no clock, and touches memory only through [`Memory`].
//! Its shell pushes what [`RcQp::poll_transmit`] emits into datagrams (adding padding and ICRC),
//! and hands in what arrives once parsed and checked by `unbroken_wire`.
//!
//! What holds, whatever arrives:
//! - a WR completes at most once, WRs of a queue complete in order, and a success means that the
//!   peer executed it;
//! - memory is written only where a receive or a checked request of the peer says, by the expected
//!   packet only;
//! - every queue has its size from the start, and every buffer a bound. While nothing is lost, no
//!   packet and no WR allocates, but for a QP's first WR with inline data, atomic or window. What
//!   comes early is copied, and a switch of NICs takes copies, too;
//! - a QP that fails completes everything it holds, unless it was made to hold it
//!   ([`RcConfig::suspend_on_error`], [`UdConfig::suspend_on_error`]).
//!
//! Rooms: `requester` and `responder` are the two halves of RC; `sq`, `rq` and `reads` their
//! queues; `inbound` how RC and UC receive; `segment` how messages become packets; `early` what
//! came before its turn; `window` the congestion window; `room` what packets take up at their
//! receiver; `encoding` the specification's numbers; `attr` attributes and states; `migration`
//! alternate paths; `backlog` what moves from QP to QP.
#![forbid(unsafe_code)]

mod config;
mod connection;
mod early;
mod encoding;
mod inbound;
mod io;
mod migration;
mod mutants;
mod rc;
mod reads;
mod requester;
mod responder;
mod room;
mod rq;
mod segment;
mod sq;
mod uc;
mod ud;
mod window;

pub use config::RcConfig;
pub use io::{AtomicOp, MemError, Memory, PacketSink, Payload, PeerKeys, SinkError, UdSink};
pub use migration::Via;
#[doc(hidden)]
pub use mutants::Mutation;
pub use rc::RcQp;
pub use requester::RoundTrip;
pub use responder::RcEvent;
pub use room::{News, Room, MAX_BLOCK_COST};
pub use sq::SendRing;
pub use uc::{UcConfig, UcQp};
pub use ud::{UdConfig, UdQp, UdRoute};
