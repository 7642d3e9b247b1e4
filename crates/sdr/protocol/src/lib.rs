//! Software-defined reliability (SDR), after Khalilov et al.: a receive buffer has a bitmap that
//! says which chunks of it have come, and what is done about the others is software. This crate
//! decides; it does no I/O, reads no clock and starts no thread, so that the same code runs over
//! queue pairs, in simulation and under the fuzzer.
//!
//! ```text
//!        user's messages                                  reliable (write, read, adapt)
//!   sends ─── packets ───►   network   ─── completions ───►  board (bitmaps)
//!     ▲                                                         │
//!     └────────── clearing (control messages) ◄──────────── receives (slots, keys, generations)
//! ```
//!
//! - [`imm`]: the 32 bits that say which packet of which message came; [`attr`]: what both ends
//!   agree on.
//! - [`board`]: packet bitmaps, coalesced into the chunk bitmap; [`receives`]: slots, and the two
//!   stages of protection against late packets.
//! - [`clearing`]: order-based matching by clear-to-send; [`sends`]: messages, as their sender sees
//!   them; [`packets`]: their pieces, cut into packets.
//! - [`write`], [`read`]: one reliable write, as its two ends see it; [`reliable`]: many of them
//!   over a queue pair; [`adapt`]: the choice of their scheme; [`injection`]: how fast they leave.
//! - [`control`]: the codec of what the two ends tell each other.
//!
//! Failure cases are in the modules; what goes for all: a lost control message is said again, one
//! that comes twice changes nothing, strangers' are dropped, and nothing grows with what a peer
//! says.
#![forbid(unsafe_code)]

pub mod adapt;
pub mod attr;
pub mod board;
pub mod clearing;
pub mod control;
mod copies;
pub mod imm;
pub mod injection;
mod least;
mod mutants;
pub mod packets;
pub mod read;
pub mod receives;
pub mod reliable;
pub mod sends;
pub mod submessages;
pub mod write;
