//! What a runtime folder tells: the folder itself, the event log, and the status of its processes.
//!
//! All processes of one fabric share a *runtime folder* ([`Runtime`]). In it lie the event log
//! ([`EventLog`]: one JSON object a line, appended with one write each, so that any number of
//! processes write it without a lock) and one socket for each process ([`StatusServer`]) that
//! answers with its logical QPs.
//!
//! Which processes live is told by locks ([`Presence`]), never by pids. Shared pages of counters
//! and faults lie in the folder `shm` of the runtime.
//!
//! Times are [`now_us`], CLOCK_MONOTONIC in µs, which all processes of a machine share; events also
//! carry the wall clock.
//!
//! Failure cases: a folder that strangers could write to is refused, and so is a file in it that is
//! a link, a FIFO or another user's ([`open_own`]); a line of the log that is not an event (a torn
//! last line, a newer version) is skipped; a process that does not answer its status socket in time
//! is reported by its pid, not waited for.
#![forbid(unsafe_code)]

mod cause;
mod clock;
mod drains;
mod event;
mod files;
mod log;
mod presence;
mod runtime;
mod server;
mod status;

pub use clock::{now_us, wall_us};
pub use drains::Drains;
pub use event::{Event, Switch, SwitchKind, What};
pub use files::{fill_random, open_own, FileLock};
pub use log::{read_events, EventLog, EventTail, LOG_LIMIT_BYTES};
pub use presence::{Mark, Marked, Presence, ProcessName, Turn};
pub use runtime::{make_folder, user_id, Runtime, RuntimeError, DEFAULT_VARIABLE};
pub use server::{
    answering_processes, bind_in, connect_in, listen_own, query_status, StatusServer,
};
pub use status::{NicCounters, NicStatus, ProcessStatus, QpStatus};
