//! What is due when, and which path is the best.

use super::{Action, Id, Kind, Machine, State, MAX_ACTIONS};
use crate::path::Path;

impl Machine {
    /// When [`Machine::due`] has something.
    pub fn next_us(&self) -> Option<u64> {
        self.timers.next_us()
    }

    /// What is to be done now, [`MAX_ACTIONS`] at most.
    pub fn due(&mut self, now_us: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        // Each turn takes a timer away or sets it later.
        for _ in 0..2 * MAX_ACTIONS {
            let Some(id) = self.timers.due(now_us).filter(|_| actions.len() < MAX_ACTIONS) else {
                break;
            };
            actions.extend(self.expire(id, now_us));
            self.set_timer(id);
        }
        actions
    }

    fn expire(&mut self, id: Id, now_us: u64) -> Option<Action> {
        let link = self.links.get_mut(&id)?;
        if link.deadline_us.take_if(|at_us| *at_us <= now_us).is_some() {
            let path = link.loaded.unwrap_or_default();
            match link.state {
                State::Rearm if !std::mem::replace(&mut link.late, true) => {
                    self.tell(id, Kind::LoadLate, path, now_us);
                }
                State::Migrating => self.migration_failed(id, now_us),
                _ => {}
            }
            return None;
        }
        if link.query_us.take_if(|at_us| *at_us <= now_us).is_some() {
            // What is loaded next depends on the answer; that sets the next query, too. Should
            // there be none, this does.
            link.revise_us = link.revise_us.map(|at_us| at_us.max(now_us + 1));
            self.query_later(id, now_us);
            return Some(Action::Query(id));
        }
        link.revise_us.take_if(|at_us| *at_us <= now_us)?;
        self.revise(id, now_us)
    }

    /// Loads the best path, if another one is loaded or none, and the library is to keep one
    /// loaded.
    fn revise(&mut self, id: Id, now_us: u64) -> Option<Action> {
        let best = self.pick(id, now_us);
        let link = self.links.get_mut(&id)?;
        let idle = matches!(link.state, State::Unloaded | State::Failed);
        if !link.keep || !(idle || matches!(link.state, State::Rearm | State::Armed)) {
            return None;
        }
        // A suspect is looked at again when it is none any more.
        link.revise_us =
            link.suspect.map(|(_, until_us)| until_us).filter(|until_us| *until_us > now_us);
        let best = best.filter(|best| link.loaded.is_none_or(|loaded| !best.is_way_of(&loaded)))?;
        let respecified = link.loaded.is_some();
        self.start_load(id, best);
        if respecified {
            self.tell(id, Kind::Respecified, best, now_us);
        }
        Some(Action::Load(id, best))
    }

    /// The best path but the one in use, if it is healthy. With `respecify`, the best that is
    /// healthy; one that is suspect last.
    pub(super) fn pick(&self, id: Id, now_us: u64) -> Option<Path> {
        let link = self.links.get(&id)?;
        let others = || link.paths.iter().filter(|p| !p.is_way_of(&link.primary));
        let healthy = |p: &&Path| self.ports[usize::from(p.attr.port)];
        let suspect = |p: &&Path| {
            link.suspect.is_some_and(|(s, until_us)| now_us < until_us && s.is_way_of(p))
        };
        if !self.settings.respecify {
            return others().next().filter(healthy).copied();
        }
        others().filter(healthy).find(|p| !suspect(p)).or_else(|| others().find(healthy)).copied()
    }
}
