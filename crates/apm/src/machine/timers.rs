//! When each queue pair is to be looked at next.

use super::Id;
use std::collections::{BTreeSet, HashMap};

/// One time for each.
#[derive(Debug, Default)]
pub(super) struct Timers {
    order: BTreeSet<(u64, Id)>,
    at_us: HashMap<Id, u64>,
}

impl Timers {
    /// Sets it anew; `None` takes it away.
    pub(super) fn set(&mut self, id: Id, at_us: Option<u64>) {
        if self.at_us.get(&id).copied() == at_us {
            return;
        }
        self.remove(id);
        if let Some(at_us) = at_us {
            self.at_us.insert(id, at_us);
            self.order.insert((at_us, id));
        }
    }

    pub(super) fn remove(&mut self, id: Id) {
        if let Some(at_us) = self.at_us.remove(&id) {
            self.order.remove(&(at_us, id));
        }
    }

    pub(super) fn next_us(&self) -> Option<u64> {
        self.order.first().map(|(at_us, _)| *at_us)
    }

    /// The first whose time has come.
    pub(super) fn due(&self, now_us: u64) -> Option<Id> {
        self.order.first().filter(|(at_us, _)| *at_us <= now_us).map(|(_, id)| *id)
    }
}
