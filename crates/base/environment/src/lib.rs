//! The environment variables of the project: one table ([`VARIABLES`]), and one way to read them.
//!
//! A variable that is not in the table, or has a value that it cannot have, would do nothing at
//! all; so the command refuses it, and the library says it once ([`wrong`]). The list for people,
//! docs/reference/environment.md, is compared with the table by a test.
//!
//! An empty variable is one that is not set.
#![forbid(unsafe_code)]

mod check;
mod log_filter;
mod table;
mod values;

pub use check::{wrong, wrong_in, PREFIX};
pub use log_filter::{log_filter, parse_log_filter, LogFilter, LOG_PARTS};
pub use table::{
    variable, Part, Variable, APM, BACKUPS, COLL_ADDRESS, COLL_ANY_ORDER, COLL_CROSS_NUMA_RATE,
    COLL_LOGICAL, COLL_MEMORY_RATE, COLL_SHAPE, DEVICE, DEVICES, DEVICE_FAULTS, DEVICE_FLUSH,
    DEVICE_SEED, DIRECTORY, FAILBACK, FAILOVER, GID, HOST, LIBIBVERBS, LOG, LONGEST_SLEEP_US, MAP,
    NICS, RUNTIME, SHOW_EVENTS, TIMEOUT, VARIABLES,
};
pub use values::{parse_flag, Values, FLAG_WORDS};

/// What a variable is set to; `None` if it is empty or not set, or no UTF-8.
pub fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// A variable that is on or off. One that says neither has its default, and [`wrong`] names it.
pub fn flag(name: &str) -> bool {
    let default = || variable(name).is_some_and(|v| v.default == "1");
    text(name).and_then(|value| parse_flag(&value)).unwrap_or_else(default)
}
