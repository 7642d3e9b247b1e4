//! Going home: what the product's worker does for QPs that are away from the path that they were
//! connected on, and how often they may.

use crate::world::{Event, Violation, World};
use unbroken_failover_protocol::{Policy, Reason, Switched};

/// How often a host looks, and how often it asks whether a path home lives: as the worker does.
pub(crate) const LOOK_US: u64 = 50_000;
/// See [`LOOK_US`].
const ASK_EVERY_LOOKS: u64 = 5;

impl World {
    /// A host looks at its QPs.
    pub(crate) fn look_home(&mut self, host: usize) -> Result<(), Violation> {
        let now_us = self.now_us;
        let asks = (now_us / LOOK_US).is_multiple_of(ASK_EVERY_LOOKS);
        for qp in 0..self.ends[host].len() {
            let executor = self.ends[host][qp].executor();
            let path = executor.active_path();
            if path.is_some_and(|path| self.health[host].is_shunned(path)) {
                let grey: Vec<_> = executor
                    .lqp()
                    .slots()
                    .iter()
                    .map(|(_, path)| path)
                    .filter(|path| self.health[host].is_grey(*path))
                    .collect();
                let begun = self.with(host, qp, |executor, io| {
                    executor.plan(io, Reason::Loss, |to| !grey.contains(&to))
                });
                self.stats.plans += u64::from(begun);
                self.pump(host, qp)?;
                continue;
            }
            let Some(home) = executor.home().filter(|_| executor.active_path().is_some()) else {
                continue;
            };
            let health = &mut self.health[host];
            let steady = health.is_steady(now_us, home);
            if asks && !health.is_dead(home) {
                health.ask(now_us, home, now_us);
            }
            if executor.may_go_home(now_us, steady).is_some() {
                let begun = self.with(host, qp, |executor, io| {
                    executor.plan(io, Reason::Failback, |to| to == home)
                });
                self.stats.plans += u64::from(begun);
            }
            self.pump(host, qp)?;
        }
        self.pump_health(host)?;
        self.push(now_us + LOOK_US, Event::Home { host });
        Ok(())
    }

    /// A QP has gone home. However a path flaps, that happens once in a time only.
    pub(crate) fn went_home(
        &mut self,
        host: usize,
        qp: usize,
        switched: &Switched,
    ) -> Result<(), Violation> {
        let (at_us, epoch) = (switched.started_us, switched.epoch);
        let last = self.homecomings[qp].replace((at_us, epoch));
        let again = last.filter(|&(_, last)| last != epoch); // both ends may have wanted it
        self.stats.homecomings += u64::from(again.is_some() || last.is_none());
        match again {
            Some((last_us, _)) if at_us < last_us + Policy::default().min_away_us => {
                Err(format!("host {host} qp {qp}: home at {last_us} us and again at {at_us} us"))
            }
            _ => Ok(()),
        }
    }
}
