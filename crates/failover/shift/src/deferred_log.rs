//! Events for the log that may wait for a moment.
//!
//! A migration takes some microseconds, a switch some tens, and a thousand queue pairs may move at
//! once: none of them is to pay for a write, nor for the worker's waking. So their events are kept
//! here; the worker writes them together when its alarm rings, and the process's end writes what is
//! left. A process that is killed loses those of its last millisecond.

use crate::lock::lock;
use std::sync::Mutex;
use unbroken_events::{Event, What};
use unbroken_runtime::now_us;
use unbroken_verbs::{Alarm, Result};

/// How long an event may wait.
const DEFER_US: u64 = 1_000;
/// Whoever finds so many writes them.
const MOST: usize = 1_024;

/// The events, and what wakes the worker for them.
#[derive(Debug)]
pub(crate) struct DeferredLog {
    events: Mutex<Vec<Event>>,
    /// Set while there are events.
    alarm: Alarm,
}

impl DeferredLog {
    pub(crate) fn new() -> Result<DeferredLog> {
        Ok(DeferredLog { events: Mutex::default(), alarm: Alarm::new()? })
    }

    /// Rings while there are events that have waited for long enough.
    pub(crate) fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// Keeps an event of that time; gives all where they are too many.
    #[must_use]
    pub(crate) fn put(&self, what: What, time_us: u64) -> Vec<Event> {
        let mut events = lock(&self.events);
        events.push(Event::at(what, time_us));
        match events.len() {
            1 => self.alarm.set(now_us() + DEFER_US),
            MOST.. => return self.empty(&mut events),
            _ => {}
        }
        Vec::new()
    }

    /// Takes all.
    pub(crate) fn take(&self) -> Vec<Event> {
        self.empty(&mut lock(&self.events))
    }

    /// Under the lock: else an alarm that another thread sets meanwhile would be lost, or ring for
    /// ever.
    fn empty(&self, events: &mut Vec<Event>) -> Vec<Event> {
        if !events.is_empty() {
            self.alarm.set(u64::MAX);
        }
        std::mem::take(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{poll, PollFd, PollFlags, Timespec};

    fn rings(log: &DeferredLog, within_s: i64) -> bool {
        let timeout = Timespec { tv_sec: within_s, tv_nsec: 0 };
        poll(&mut [PollFd::new(&log.alarm, PollFlags::IN)], Some(&timeout)).unwrap() == 1
    }

    #[test]
    fn the_alarm_rings_while_there_are_events_and_they_are_bounded() {
        let log = DeferredLog::new().unwrap();
        let what = |n: usize| What::PortDown { nic: format!("a/{n}") };
        assert!(log.take().is_empty() && !rings(&log, 0));
        assert!(log.put(what(0), 1).is_empty() && log.put(what(1), 2).is_empty());
        assert!(rings(&log, 10));
        assert_eq!(
            log.take().iter().map(|e| e.what.clone()).collect::<Vec<_>>(),
            [what(0), what(1)]
        );
        assert!(!rings(&log, 0));
        let given: Vec<_> = (0..MOST).map(|n| log.put(what(n), 3).len()).collect();
        assert_eq!((given[..MOST - 1].iter().sum::<usize>(), given[MOST - 1]), (0, MOST));
        assert!(log.take().is_empty() && !rings(&log, 0));
    }
}
