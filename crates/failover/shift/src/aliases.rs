//! The table of UD QPs that have moved, of this process and of all others: the directory's, and the
//! copy that the devices translate by.

use crate::events::Events;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use unbroken_directory::{Directory, MovedQp};
use unbroken_verbs::aliases::Alias;
use unbroken_verbs::UdAliases;

/// What a process knows of moved UD QPs.
pub(crate) struct Aliases {
    table: Arc<UdAliases>,
    /// Logical UD QPs of this process: without any, nothing is translated.
    users: AtomicUsize,
}

impl Aliases {
    pub(crate) fn new(table: Arc<UdAliases>) -> Aliases {
        Aliases { table, users: AtomicUsize::new(0) }
    }

    /// A UD QP is made: it may be sent to what has moved before, so the table is to be read.
    pub(crate) fn join(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    /// A UD QP is no more.
    pub(crate) fn leave(&self) {
        self.users.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether the process has UD QPs.
    pub(crate) fn used(&self) -> bool {
        self.users.load(Ordering::Acquire) > 0
    }

    /// Reads the table. It may wait for other processes: never under a gate.
    pub(crate) fn load(&self, directory: Option<&Arc<dyn Directory>>, events: &Events) {
        let Some(directory) = directory else { return };
        match directory.moved() {
            Ok(moved) => self.table.set(
                moved
                    .into_iter()
                    .map(|MovedQp { known, now, shown }| Alias { known, now, shown })
                    .collect(),
            ),
            Err(e) => {
                events.complain_of_directory("where UD queue pairs have moved cannot be read", &e)
            }
        }
    }
}
