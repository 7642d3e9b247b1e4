//! The runtime folder: what all processes of one fabric share, and which of them live.
//!
//! All processes of one fabric share a *runtime folder* ([`Runtime`]). Which of them live is told
//! by locks ([`Presence`]), never by pids. Shared pages of counters and faults lie in the folder
//! `shm` of the runtime; here are also the ways to open its files ([`open_own`], [`FileLock`]) and
//! sockets ([`bind_in`]), and which NICs are drained ([`Drains`]).
//!
//! Times are [`now_us`], CLOCK_MONOTONIC in µs, which all processes of a machine share.
//!
//! Failure cases: a folder that strangers could write to is refused, and so is a file in it that is
//! a link, a FIFO or another user's ([`open_own`]).
#![forbid(unsafe_code)]

mod clock;
mod drains;
mod files;
mod presence;
mod reset;
mod runtime;
mod sockets;

pub use clock::{now_us, wall_us};
pub use drains::Drains;
pub use files::{fill_random, open_found, open_named, open_own, read_named, FileLock};
pub use presence::{Mark, Marked, Presence, ProcessName, TurnGuard};
pub use reset::{reset, ResetError};
pub use runtime::{make_folder, user_id, Runtime, RuntimeError, DEFAULT_VARIABLE};
pub use sockets::{bind_in, connect_in, listen_own};
