//! What is seen of a runtime folder.
//!
//! `unbroken status`, `metrics`, `health`, `top`, `web` and `report` show the same things in
//! different ways, so they are read in one place. [`status`](status()) is the least: NICs, and what
//! processes say of their queue pairs. An [`Observer`] looks again and again, follows the event log
//! too, and gives a [`Snapshot`] each time; it spends a hundredth of a core at most however many
//! queue pairs there are. What is made of a snapshot is pure: [`metrics()`] and [`health()`].
//!
//! Failure cases: a process that does not answer in time is shown with that, and not waited for; a
//! log line that is no event is skipped. Lists, tables and labels are bounded, since whoever may
//! write to the folder could fill them.
#![forbid(unsafe_code)]

mod act;
mod error;
mod families;
mod health;
mod metrics;
pub mod report;
mod snapshot;
mod status;
mod totals;
pub mod traces;
mod words;

pub use act::Action;
pub use error::{ObserveError, Result};
pub use families::Kind;
pub use health::{health, in_words, Health, HostHealth, Impaired, Verdict};
pub use metrics::{metrics, KINDS};
pub use snapshot::{host_of, Observer, QpCounts, SeenQp, Snapshot, MAX_QPS};
pub use status::{
    ask_processes, fabric, mark_drained, nic_statuses, nics, presence, status, whole_nic, Answers,
    Nics, Process, ProcessQp, Status,
};
pub use totals::{kind_name, outage_us, SwitchKey, Times, Totals, Trouble, BOUNDS_US, OTHER};
pub use unbroken_coll::Snapshot as Communicator;
pub use unbroken_edge_daemon::status::Uplink;
pub use words::{clock_in_words, event_in_words, wall_in_words};
