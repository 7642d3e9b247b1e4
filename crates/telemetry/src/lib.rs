//! What a runtime folder tells: the folder itself, the event log, and the status of its processes.
//!
//! All processes of one fabric share a *runtime folder* ([`Runtime`]). In it lie the event log ([`EventLog`]: one JSON object a
//! line, appended with one write each, so that any number of processes write it without a lock) and one socket for each process
//! ([`StatusServer`]) that answers with its logical QPs.
//!
//! Shared pages of counters and faults lie in the folder `shm` of the runtime, which is always memory, not disk.
//!
//! Times are [`now_us`], CLOCK_MONOTONIC in µs, which all processes of a machine share; events also carry the wall clock.
//!
//! Failure cases: a folder that strangers could write to is refused; a line of the log that is not an event (a torn last line, a
//! newer version) is skipped; a process that does not answer its status socket in time is reported by its pid, not waited for.
#![forbid(unsafe_code)]

mod cause;
mod clock;
mod event;
mod log;
mod runtime;
mod server;
mod shm;
mod status;

pub use clock::{now_us, wall_us};
pub use event::{Event, Switch, SwitchKind, What};
pub use log::{read_events, EventLog, EventTail, LOG_LIMIT_BYTES};
pub use runtime::{process_is_alive, user_id, Runtime, RuntimeError, DEFAULT_VARIABLE};
pub use server::{answering_pids, query_status, StatusServer};
pub use status::{NicCounters, NicStatus, ProcessStatus, QpStatus};
