//! What has happened so far, as people read it.
//!
//! A fault that is set for a time writes its beginning and its end at once, with the times at which
//! they will be. Whoever reads the log before that must not be told that they have been; and a
//! fault that is cleared before its time has an end in the log that never comes.

use std::collections::HashSet;

use crate::event::{Event, What};

/// Faults whose end is remembered.
const REMEMBERED: usize = 1024;

/// Takes events in the order of the log and gives them when they have happened.
#[derive(Debug, Default)]
pub struct Timeline {
    /// In the order of their times.
    waiting: Vec<Event>,
    /// Faults that have been cleared, until they are set again.
    cleared: HashSet<String>,
}

impl Timeline {
    /// Takes events in, in the order of the log.
    pub fn add(&mut self, events: Vec<Event>) {
        for event in events {
            if let What::FaultClear { fault } = &event.what {
                self.forget_later(fault, event.time_us);
            }
            self.waiting.push(event);
        }
        self.waiting.sort_by_key(|event| event.time_us);
    }

    /// A fault is cleared at `at_us`: what would have become of it later does not come.
    fn forget_later(&mut self, cleared: &str, at_us: u64) {
        self.waiting.retain(|event| match &event.what {
            What::Fault { fault, .. } | What::FaultClear { fault } => {
                fault != cleared || event.time_us <= at_us
            }
            _ => true,
        });
    }

    /// What has happened by `now_us` and was not given before, in the order of the times.
    pub fn due(&mut self, now_us: u64) -> Vec<Event> {
        let due = self.waiting.partition_point(|event| event.time_us <= now_us);
        let mut due: Vec<Event> = self.waiting.drain(..due).collect();
        due.retain(|event| self.happened(event));
        due
    }

    /// A fault that was cleared is not cleared again.
    fn happened(&mut self, event: &Event) -> bool {
        match &event.what {
            What::Fault { fault, .. } => {
                self.cleared.remove(fault);
                true
            }
            What::FaultClear { fault } => {
                if self.cleared.len() >= REMEMBERED {
                    self.cleared.clear();
                }
                self.cleared.insert(fault.clone())
            }
            _ => true,
        }
    }
}

/// Of events in the order of the log, those that have happened by `now_us`, in the order of their
/// times.
pub fn happened(events: Vec<Event>, now_us: u64) -> Vec<Event> {
    let mut timeline = Timeline::default();
    timeline.add(events);
    timeline.due(now_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(at_us: u64) -> Event {
        let fault = "nic a/0 dead".to_owned();
        Event::at(What::Fault { fault, lasts_us: None, every_us: None }, at_us)
    }

    fn clear(at_us: u64) -> Event {
        Event::at(What::FaultClear { fault: "nic a/0 dead".into() }, at_us)
    }

    fn times(events: &[Event]) -> Vec<u64> {
        events.iter().map(|event| event.time_us).collect()
    }

    #[test]
    fn an_end_is_not_told_before_it_comes() {
        let mut log = Timeline::default();
        log.add(vec![fault(10), clear(5_000)]);
        assert_eq!(times(&log.due(20)), [10]);
        log.add(vec![Event::at(What::PortActive { nic: "a/1".into() }, 30)]);
        assert_eq!(times(&log.due(4_999)), [30]);
        assert_eq!(times(&log.due(5_000)), [5_000]);
        assert!(log.due(u64::MAX).is_empty());
    }

    #[test]
    fn a_fault_that_is_cleared_early_is_cleared_once() {
        let log = vec![fault(10), clear(5_000), clear(700)];
        assert_eq!(times(&happened(log.clone(), 9_000)), [10, 700]);
        // Also where its end was told before the log says that it came early.
        let mut follows = Timeline::default();
        follows.add(log[..2].to_vec());
        assert_eq!(times(&follows.due(6_000)), [10, 5_000]);
        follows.add(vec![clear(5_500)]);
        assert!(follows.due(9_000).is_empty());
        follows.add(vec![fault(9_500), clear(9_600)]);
        assert_eq!(times(&follows.due(9_700)), [9_500, 9_600], "set again, it has another end");
    }

    #[test]
    fn a_fault_that_is_cleared_before_its_time_never_was() {
        assert_eq!(times(&happened(vec![fault(5_000), clear(100)], 9_000)), [100]);
    }
}
