//! The QP table: finds logical QPs by the names that events and messages carry, and says what is
//! known of all of them together.
//!
//! It is generic, so that it stands below the QP: it keeps QPs and asks them nothing.

use crate::lock::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Names of a logical QP: (index of the default NIC, logical QPN).
pub(crate) type LogicalId = (usize, u32);
/// Names of a physical QP: (index of its NIC, its QPN).
pub(crate) type PhysicalId = (usize, u32);

struct Names<Q> {
    /// With the physical one of each: to end one of thousands touches no other.
    logical: HashMap<LogicalId, (Arc<Q>, PhysicalId)>,
    physical: HashMap<PhysicalId, LogicalId>,
}

/// The logical QPs of a process.
pub(crate) struct QpTable<Q> {
    names: Mutex<Names<Q>>,
    /// QPs with sends outstanding, as far as is known: those whose idle flag is off. The innermost
    /// lock.
    busy: Mutex<Vec<LogicalId>>,
    /// A QP may be on another path than the one that it was connected on.
    displaced: AtomicBool,
    /// QPs that are between two paths, or prepare to leave one.
    switching: AtomicU32,
    /// How many QPs were handed out.
    #[cfg(test)]
    pub(crate) touched: AtomicU32,
}

impl<Q> Default for QpTable<Q> {
    fn default() -> QpTable<Q> {
        let names = Names { logical: HashMap::new(), physical: HashMap::new() };
        QpTable {
            names: Mutex::new(names),
            busy: Mutex::default(),
            displaced: AtomicBool::new(false),
            switching: AtomicU32::new(0),
            #[cfg(test)]
            touched: AtomicU32::new(0),
        }
    }
}

impl<Q> QpTable<Q> {
    /// Enters a QP with its physical one.
    pub(crate) fn add(&self, id: LogicalId, qp: &Arc<Q>, physical: PhysicalId) {
        let mut names = lock(&self.names);
        names.logical.insert(id, (qp.clone(), physical));
        names.physical.insert(physical, id);
    }

    /// Takes a QP out.
    pub(crate) fn remove(&self, id: LogicalId) {
        let mut names = lock(&self.names);
        if let Some((_, physical)) = names.logical.remove(&id) {
            names.physical.remove(&physical);
        }
    }

    /// A logical QP has a new physical one; the old name is forgotten.
    pub(crate) fn rename_physical(&self, id: LogicalId, old: PhysicalId, new: PhysicalId) {
        let mut names = lock(&self.names);
        // One that was ended meanwhile has no name.
        let Some((_, physical)) = names.logical.get_mut(&id) else { return };
        *physical = new;
        names.physical.remove(&old);
        names.physical.insert(new, id);
    }

    /// The logical QP of that name.
    pub(crate) fn get(&self, id: LogicalId) -> Option<Arc<Q>> {
        #[cfg(test)]
        self.touched.fetch_add(1, Ordering::Relaxed);
        lock(&self.names).logical.get(&id).map(|(qp, _)| qp.clone())
    }

    /// The logical QP that a physical one belongs to.
    pub(crate) fn by_physical(&self, id: PhysicalId) -> Option<Arc<Q>> {
        let names = lock(&self.names);
        names.physical.get(&id).and_then(|id| names.logical.get(id)).map(|(qp, _)| qp.clone())
    }

    /// All logical QPs.
    pub(crate) fn all(&self) -> Vec<Arc<Q>> {
        #[cfg(test)]
        self.touched.fetch_add(lock(&self.names).logical.len() as u32, Ordering::Relaxed);
        lock(&self.names).logical.values().map(|(qp, _)| qp.clone()).collect()
    }

    /// The same, if no other thread is at the table.
    pub(crate) fn try_all(&self) -> Option<Vec<Arc<Q>>> {
        let names = self.names.try_lock().ok()?;
        Some(names.logical.values().map(|(qp, _)| qp.clone()).collect())
    }

    /// Whether some QP is such a one. Asked under the table's lock.
    pub(crate) fn any(&self, is_such: impl Fn(&Q) -> bool) -> bool {
        lock(&self.names).logical.values().any(|(qp, _)| is_such(qp))
    }

    /// How many QPs are such. Asked without the table's lock.
    pub(crate) fn count(&self, is_such: impl Fn(&Q) -> bool) -> u32 {
        self.all().iter().filter(|qp| is_such(qp)).count() as u32
    }

    /// A QP has sends outstanding from now on. Whoever calls it sees to it that each is there once
    /// at most.
    pub(crate) fn add_busy(&self, id: LogicalId) {
        lock(&self.busy).push(id);
    }

    /// The QPs that had sends outstanding; those that still have are to be put back.
    pub(crate) fn take_busy(&self) -> Vec<LogicalId> {
        std::mem::take(&mut *lock(&self.busy))
    }

    /// How many QPs are between two paths, or prepare to leave one.
    pub(crate) fn switching(&self) -> u32 {
        self.switching.load(Ordering::Relaxed)
    }

    /// A QP was one of those, and is.
    pub(crate) fn count_switching(&self, was: bool, is: bool) {
        match (was, is) {
            (false, true) => self.switching.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.switching.fetch_sub(1, Ordering::Relaxed),
            _ => return,
        };
    }

    /// A QP has left its path: it may want to go back.
    pub(crate) fn note_displaced(&self) {
        self.displaced.store(true, Ordering::Relaxed);
    }

    /// No QP is known to be displaced, until one is noted again.
    pub(crate) fn forget_displaced(&self) {
        self.displaced.store(false, Ordering::Relaxed);
    }

    /// Whether some QP may be displaced.
    pub(crate) fn any_displaced(&self) -> bool {
        self.displaced.load(Ordering::Relaxed)
    }
}
