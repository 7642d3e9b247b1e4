//! Which fault a switch answered.
//!
//! A process that switches must not look at the faults (on a real network there is nothing to look
//! at), so it logs only when it noticed. Whoever reads the log joins the two: the cause of a switch
//! is the last fault on its old path that was active when the failure was noticed. A QP that came
//! onto the path when the fault was there already meets it then, so its time counts from there. A
//! planned switch answers none: nothing had failed, and what was wrong on its path before was not
//! what it detected.

use std::collections::{HashMap, VecDeque};

use crate::event::{Event, Switch, SwitchKind, What};

/// Faults remembered.
const REMEMBERED: usize = 1024;
/// A fault that ended longer before the detection is not its cause.
const AFTERMATH_US: u64 = 10_000_000;

struct Seen {
    number: u64,
    fault: String,
    from_us: u64,
    until_us: Option<u64>,
    /// Of one that comes again: how often; else 0.
    every_us: u64,
    /// Of one that comes again: for how long it holds, each time.
    lasts_us: Option<u64>,
}

impl Seen {
    /// When it last began before `at_us`.
    fn began_us(&self, at_us: u64) -> Option<u64> {
        let last_us = at_us.min(self.until_us.unwrap_or(at_us));
        let since_us = last_us.checked_sub(self.from_us)?;
        Some(last_us - since_us.checked_rem(self.every_us).unwrap_or(since_us))
    }

    /// When a QP that has been on its path since `on_path_us` met it last before `at_us`: when it
    /// began, or, if the QP came later, when the QP came, unless it was over by then.
    fn met_us(&self, at_us: u64, on_path_us: u64) -> Option<u64> {
        let began_us = self.began_us(at_us)?;
        let over_us = self.lasts_us.map_or(u64::MAX, |lasts_us| began_us + lasts_us);
        let over_us = self.until_us.map_or(over_us, |until_us| until_us.min(over_us));
        (over_us > on_path_us || began_us >= on_path_us).then(|| began_us.max(on_path_us))
    }
}

/// Fills in `detect_us` of all switches of a log that is at hand as a whole, in its order.
pub fn fill_detect_us(events: &mut [Event]) {
    let mut causes = Causes::default();
    events.iter_mut().for_each(|event| causes.apply(event));
    events.iter_mut().for_each(|event| causes.review(event));
}

/// The place of a fault (`nic a/0 dead`, `loss cable a/0 1%`, `flap rail0 …`): its second word, or
/// the third behind the word `cable`. It is a NIC, which it strikes, or `rail0`: all NICs of that
/// index.
pub fn fault_place(fault: &str) -> Option<&str> {
    fault.split_whitespace().skip(1).find(|word| *word != "cable")
}

/// Takes the events in the order of the log and fills in `detect_us`.
#[derive(Default)]
pub(crate) struct Causes {
    /// By their places, the oldest first.
    faults: HashMap<String, VecDeque<Seen>>,
    /// All of them in their order, with their places; those that never were, too.
    order: VecDeque<(u64, String)>,
    next: u64,
}

impl Causes {
    pub(crate) fn apply(&mut self, event: &mut Event) {
        let time_us = event.time_us;
        match &mut event.what {
            What::Fault { fault, every_us, lasts_us } => {
                let seen = Seen {
                    number: self.next,
                    fault: fault.clone(),
                    from_us: time_us,
                    until_us: None,
                    every_us: every_us.unwrap_or(0),
                    lasts_us: *lasts_us,
                };
                self.remember(seen);
            }
            What::FaultClear { fault } => {
                let Some(place) = fault_place(fault) else { return };
                let Some(faults) = self.faults.get_mut(place) else { return };
                let open = |s: &&mut Seen| {
                    s.fault == *fault && s.until_us.is_none_or(|until_us| until_us > time_us)
                };
                for seen in faults.iter_mut().filter(open) {
                    seen.until_us = Some(time_us);
                }
                // Cleared before it fell due: it never was.
                faults.retain(|s| s.until_us.is_none_or(|until_us| until_us >= s.from_us));
                if faults.is_empty() {
                    self.faults.remove(place);
                }
            }
            What::Switch(switch) if switch.detect_us.is_none() => {
                switch.detect_us = self.detect_us(switch)
            }
            _ => {}
        }
    }

    fn remember(&mut self, seen: Seen) {
        let Some(place) = fault_place(&seen.fault).map(str::to_owned) else { return };
        if self.order.len() == REMEMBERED {
            self.forget_oldest();
        }
        self.next += 1;
        self.order.push_back((seen.number, place.clone()));
        self.faults.entry(place).or_default().push_back(seen);
    }

    fn forget_oldest(&mut self) {
        let Some((number, place)) = self.order.pop_front() else { return };
        let Some(faults) = self.faults.get_mut(&place) else { return };
        // One that never was is gone already.
        if faults.front().is_some_and(|first| first.number == number) {
            faults.pop_front();
        }
        if faults.is_empty() {
            self.faults.remove(&place);
        }
    }

    /// The same for a switch that was told before its fault: a fault that began later than the one
    /// that was found is the cause.
    pub(crate) fn review(&self, event: &mut Event) {
        let What::Switch(switch) = &mut event.what else { return };
        switch.detect_us = switch.detect_us.into_iter().chain(self.detect_us(switch)).min();
    }

    /// From the fault that a switch answered to its detection.
    fn detect_us(&self, switch: &Switch) -> Option<u64> {
        if switch.kind == SwitchKind::Planned {
            return None;
        }
        let at_us = switch.detected_at_us;
        self.cause(at_us, &switch.from, switch.on_path_since_us)
            .map(|from_us| at_us.saturating_sub(from_us))
    }

    /// When a QP that came onto the path `from` at `on_path_us` met the fault that was noticed at
    /// `at_us`.
    fn cause(&self, at_us: u64, from: &str, on_path_us: u64) -> Option<u64> {
        let rails = from.split('-').filter_map(|nic| nic.rsplit_once('/'));
        let rails: Vec<String> = rails.map(|(_, index)| format!("rail{index}")).collect();
        let places = from.split('-').chain(rails.iter().map(String::as_str));
        places
            .filter_map(|place| self.faults.get(place))
            .flatten()
            .filter(|s| {
                s.until_us.is_none_or(|until_us| until_us.saturating_add(AFTERMATH_US) >= at_us)
            })
            .filter_map(|s| s.met_us(at_us, on_path_us))
            .max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(fault: &str, time_us: u64) -> Event {
        Event::at(What::Fault { fault: fault.into(), lasts_us: None, every_us: None }, time_us)
    }

    fn clear(fault: &str, time_us: u64) -> Event {
        Event::at(What::FaultClear { fault: fault.into() }, time_us)
    }

    fn detect_us(log: &[Event], from: &str, detected_at_us: u64) -> Option<u64> {
        detect_since_us(log, from, 0, detected_at_us)
    }

    fn detect_since_us(
        log: &[Event],
        from: &str,
        on_path_since_us: u64,
        detected_at_us: u64,
    ) -> Option<u64> {
        detect_of_us(SwitchKind::Passive, log, from, on_path_since_us, detected_at_us)
    }

    fn detect_of_us(
        kind: SwitchKind,
        log: &[Event],
        from: &str,
        on_path_since_us: u64,
        detected_at_us: u64,
    ) -> Option<u64> {
        let mut causes = Causes::default();
        for event in log {
            causes.apply(&mut event.clone());
        }
        let mut switch = Event::now(What::Switch(Switch {
            kind,
            host: "a".into(),
            qp: 2,
            from: from.into(),
            to: "a/1-b/1".into(),
            epoch: 1,
            reason: "test".into(),
            on_path_since_us,
            detected_at_us,
            detect_us: None,
            switch_us: 1,
            replayed: 0,
        }));
        causes.apply(&mut switch);
        let applied = switch.clone();
        causes.review(&mut switch);
        assert_eq!(switch, applied, "the same log says the same");
        match switch.what {
            What::Switch(s) => s.detect_us,
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_last_fault_on_the_path_is_the_cause() {
        let log =
            [fault("nic a/0 dead", 100), fault("cable b/0 cut", 150), fault("nic c/0 dead", 160)];
        assert_eq!(detect_us(&log, "a/0-b/0", 200), Some(50));
        assert_eq!(detect_us(&log, "a/0-b/0", 120), Some(20));
        assert_eq!(detect_us(&log, "a/1-b/1", 200), None);
    }

    #[test]
    fn a_planned_switch_detects_nothing() {
        let log = [fault("loss cable a/0 1%", 100)];
        let detect = |kind| detect_of_us(kind, &log, "a/0-b/0", 0, 200);
        assert_eq!([SwitchKind::Passive, SwitchKind::Planned].map(detect), [Some(100), None]);
    }

    #[test]
    fn of_a_fault_that_comes_again_the_last_time_counts() {
        let again = What::Fault {
            fault: "flap cable a/0 down=5us up=45us".into(),
            lasts_us: Some(5),
            every_us: Some(50),
        };
        let log = [Event::at(again, 100), clear("flap cable a/0 down=5us up=45us", 220)];
        let detected = [99, 103, 160, 219, 500].map(|at_us| detect_us(&log, "a/0-b/0", at_us));
        assert_eq!(detected, [None, Some(3), Some(10), Some(19), Some(300)]);
    }

    #[test]
    fn a_qp_that_came_when_the_fault_was_there_meets_it_then() {
        let log = [fault("cable a/0 cut", 100)];
        let since = |on_path_us| detect_since_us(&log, "a/0-b/0", on_path_us, 900);
        assert_eq!([50, 100, 850].map(since), [Some(800), Some(800), Some(50)]);
        // It was over before the QP came: not this QP's cause.
        let log = [log[0].clone(), clear("cable a/0 cut", 500)];
        let since = |on_path_us| detect_since_us(&log, "a/0-b/0", on_path_us, 900);
        assert_eq!([50, 499, 500, 600].map(since), [Some(800), Some(401), None, None]);
    }

    #[test]
    fn of_a_fault_that_comes_again_what_the_qp_met_counts() {
        let again =
            What::Fault { fault: "cable a/0 cut".into(), lasts_us: Some(10), every_us: Some(50) };
        let log = [Event::at(again, 100)];
        // It holds from 200 to 210.
        let since = |on_path_us| detect_since_us(&log, "a/0-b/0", on_path_us, 230);
        assert_eq!([0, 199, 204, 215].map(since), [Some(30), Some(30), Some(26), None]);
    }

    #[test]
    fn the_same_fault_at_two_times() {
        let log = ["nic a/0 dead"; 2].map(|f| [fault(f, 100), clear(f, 200)]).concat();
        let log = [log, vec![fault("nic a/0 dead", 500), clear("nic a/0 dead", 600)]].concat();
        assert_eq!([150, 550].map(|at_us| detect_us(&log, "a/0-b/0", at_us)), [Some(50), Some(50)]);
        // All cleared early: what was still to come never was.
        let log = [log, vec![clear("nic a/0 dead", 120)]].concat();
        assert_eq!(
            [150, 550].map(|at_us| detect_us(&log, "a/0-b/0", at_us)),
            [Some(50), Some(450)]
        );
    }

    #[test]
    fn a_switch_of_a_rail_touches_its_nics() {
        let log = [fault("switch rail0 down", 100)];
        assert_eq!(detect_us(&log, "a/0-b/0", 200), Some(100));
        assert_eq!(detect_us(&log, "a/10-b/10", 200), None);
    }

    #[test]
    fn no_more_faults_are_remembered_than_that() {
        let mut causes = Causes::default();
        for n in 0..3 * REMEMBERED as u64 {
            causes.apply(&mut fault(&format!("nic a/{} dead", n % 1_500), n));
            causes.apply(&mut clear("nic a/7 dead", 0)); // of a/7, those before never were
        }
        assert_eq!(causes.order.len(), REMEMBERED);
        assert!(causes.faults.values().map(VecDeque::len).sum::<usize>() <= REMEMBERED);
        assert!(causes.faults.len() <= REMEMBERED && causes.faults.values().all(|f| !f.is_empty()));
    }

    #[test]
    fn a_fault_that_never_was_or_is_long_over_is_no_cause() {
        assert_eq!(
            detect_us(&[fault("nic a/0 dead", 100), clear("nic a/0 dead", 50)], "a/0-b/0", 200),
            None
        );
        assert_eq!(
            detect_us(&[fault("nic a/0 dead", 100), clear("nic a/0 dead", 150)], "a/0-b/0", 200),
            Some(100)
        );
        assert_eq!(
            detect_us(&[fault("nic a/0 dead", 1), clear("nic a/0 dead", 2)], "a/0-b/0", 60_000_000),
            None
        );
    }
}
