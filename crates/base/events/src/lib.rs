//! What the processes of a runtime folder tell: the event log, and the status of each.
//!
//! The event log ([`EventLog`]) is one JSON object a line, appended with one write each, so that
//! any number of processes write it without a lock. Each process has one socket ([`StatusServer`])
//! that answers with its logical QPs.
//!
//! Times are [`unbroken_runtime::now_us`]; events also carry the wall clock.
//!
//! Failure cases: a line of the log that is not an event (a torn last line, a newer version) is
//! skipped; a process that does not answer its status socket in time is reported by its pid, not
//! waited for.
#![forbid(unsafe_code)]

mod cause;
mod counters;
mod event;
mod log;
mod sdr;
mod server;
mod status;
mod timeline;

pub use cause::{fault_place, fill_detect_us};
pub use counters::{Column, Counter, CounterMetric, NicCounter, NicCounters, NIC_COUNTERS};
pub use event::{Event, Switch, SwitchKind, What};
pub use log::{read_events, EventLog, EventTail, LOG_LIMIT_BYTES};
pub use sdr::{sdr_status, set_sdr_source, SdrStatus};
pub use server::{answering_processes, query_status, StatusServer};
pub use status::{BackupsStatus, NicStatus, ProcessStatus, QpStatus};
pub use timeline::{happened, Timeline};
