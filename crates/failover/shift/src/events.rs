//! What a process reports: the event log, at once or deferred, and lines on stderr where they are
//! asked for.

use crate::deferred_log::DeferredLog;
use crate::log_lines::tell_event;
use unbroken_events::{Event, EventLog, What};
use unbroken_log::{tell, Level, Part};
use unbroken_runtime::Runtime;
use unbroken_verbs::{Alarm, Result};

/// Where the events of a process go.
pub(crate) struct Events {
    log: EventLog,
    deferred: DeferredLog,
}

impl Events {
    /// Events go into the runtime folder's log.
    pub(crate) fn new(runtime: &Runtime) -> Result<Events> {
        Ok(Events { log: EventLog::open(runtime), deferred: DeferredLog::new()? })
    }

    /// Writes an event to the log.
    pub(crate) fn emit(&self, what: What) {
        tell_event(&what);
        // The log is a report: that it cannot be written must not stop traffic.
        let _ = self.log.emit(&Event::at(what, unbroken_runtime::now_us()));
    }

    /// Writes several events to the log at once.
    pub(crate) fn emit_all(&self, all: impl Iterator<Item = What>) {
        let now_us = unbroken_runtime::now_us();
        self.write(&all.map(|what| Event::at(what, now_us)).collect::<Vec<_>>());
    }

    /// For the log: what happened at that time, from a thread that is not to wait for it, or that
    /// has many.
    pub(crate) fn defer(&self, what: What, time_us: u64) {
        self.write(&self.deferred.put(what, time_us));
    }

    /// Rings while deferred events are due.
    pub(crate) fn alarm(&self) -> &Alarm {
        self.deferred.alarm()
    }

    /// Writes the deferred events.
    pub(crate) fn write_deferred(&self) {
        self.write(&self.deferred.take());
    }

    fn write(&self, events: &[Event]) {
        if !events.is_empty() {
            events.iter().for_each(|event| tell_event(&event.what));
            // As above.
            let _ = self.log.emit_all(events);
        }
    }

    /// A trouble that stops nothing but that the user may want to know of.
    pub(crate) fn complain(&self, what: &str, error: &dyn std::fmt::Display) {
        tell(Part::Failover, Level::Warn, format_args!("{what}: {error}"));
    }

    /// The same, of the directory.
    pub(crate) fn complain_of_directory(&self, what: &str, error: &dyn std::fmt::Display) {
        tell(Part::Directory, Level::Warn, format_args!("{what}: {error}"));
    }
}
