//! Physical QPs that are made ahead of the switch that needs them (SHIFT §4.2: the verbs of control
//! are repeated on the backup NICs beforehand). QPs that have been left are ended by their device's
//! own thread ([`ResumableQp::retire`]).
//!
//! On an RNIC each verb of control takes 0.1 to several ms, so hundreds of QPs made in an outage
//! would make it as long as seconds. A QP of such a device has one backup: on the NIC that a switch
//! would choose now if its own failed, in INIT, without receives. A thread makes it. A switch that
//! goes there takes it; one that goes elsewhere makes its QP itself.
//!
//! ```text
//! linked, NIC back, switched ──> wanted ──(thread)──> ready ──> taken by a switch ──> wanted ...
//!                                  ▲                    │
//!                                  └── another NIC ─────┤
//!                                                       └──> destroyed with its QP
//! ```
//!
//! Invariants:
//! 1. Nothing of a backup is seen: it completes nothing, is lent no receive and is in no table
//!    before it is taken.
//! 2. A QP has one backup at most, and never on the NIC that it is on.
//! 3. When a program's destroying of a QP has returned, nothing that was made for it is left:
//!    [`Backups::wait_for`] waits for the verb that the thread is in the middle of. It does not wait
//!    for a NIC that answers no command; what comes of that is destroyed when it does.
//! 4. The thread waits until the program has not connected a QP for [`QUIET_US`], [`PATIENCE_US`]
//!    at most: it does not stand in the way of the program's own verbs.
//!
//! Failure cases: the NIC dies with a ready backup (it is of a device that is not the NIC's any
//! more, so that it is not taken, and destroyed); the NIC takes no more QPs (there is none, the log
//! says so once, and the switch tries itself); the program destroys, resets or ends the QP while
//! its backup is made (it is destroyed before the program's destroying returns; after a reset it is
//! taken by a later connection if it is on the right NIC).
//!
//! It stands below the QP; what the thread does with one is `qp`'s (`qp/backup`).
//!
//! Not for QPs with an SRQ: the backup NIC would have to be lent receives that nothing uses.

use crate::lock::lock;
use crate::qps::LogicalId;
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use unbroken_events::BackupsStatus;
use unbroken_runtime::now_us;
use unbroken_types::Access;
use unbroken_verbs::{Device, Leftovers, ResumableQp};

/// A program that has connected nothing for this long is not in the middle of its set-up.
const QUIET_US: u64 = 20_000;
/// The longest that a backup is not made because others are connected.
const PATIENCE_US: u64 = 500_000;
/// The program waits for a verb of the thread as long as any NIC that answers takes for one.
const VERB_TIME: Duration = Duration::from_millis(200);

/// A physical QP in INIT, for a later life of a QP.
pub(crate) struct Backup {
    pub(crate) nic: usize,
    /// As the NIC was open then.
    pub(crate) device: Arc<dyn Device>,
    pub(crate) access: Option<Access>,
    pub(crate) phys: Arc<dyn ResumableQp>,
}

#[derive(Default)]
struct Queue {
    wanted: VecDeque<LogicalId>,
    /// The same.
    known: HashSet<LogicalId>,
    /// When the first and the last of them came.
    first_us: u64,
    last_us: u64,
    /// The QP that the thread is at.
    busy: Option<LogicalId>,
    runs: bool,
    ended: bool,
    // What has been done.
    made: u64,
    making_us: u64,
    failures: u64,
}

/// The QPs that want a backup, and the thread that makes them.
#[derive(Default)]
pub(crate) struct Backups {
    queue: Mutex<Queue>,
    news: Condvar,
    done: Condvar,
}

impl Backup {
    /// Whether it can carry a QP on that device.
    pub(crate) fn is_of(&self, nic: usize, device: &Arc<dyn Device>) -> bool {
        self.nic == nic && Arc::ptr_eq(&self.device, device)
    }
}

impl Backups {
    /// The thread runs.
    pub(crate) fn started(&self) {
        lock(&self.queue).runs = true;
    }

    /// A QP is to be looked at: it may want a backup.
    pub(crate) fn look_at(&self, id: LogicalId) {
        let mut q = lock(&self.queue);
        if !q.runs || q.ended || !q.known.insert(id) {
            return;
        }
        q.last_us = now_us();
        if q.wanted.is_empty() {
            q.first_us = q.last_us;
        }
        q.wanted.push_back(id);
        drop(q);
        self.news.notify_one();
    }

    /// Waits until the thread is not at that QP, which is marked as destroyed. No gate may be held.
    pub(crate) fn wait_for(&self, id: LogicalId) {
        let mut q = lock(&self.queue);
        if q.known.remove(&id) {
            q.wanted.retain(|other| *other != id);
        }
        let busy = |q: &mut Queue| q.busy == Some(id);
        drop(self.done.wait_timeout_while(q, VERB_TIME, busy));
    }

    /// The thread is to end.
    pub(crate) fn stop(&self) {
        lock(&self.queue).ended = true;
        self.news.notify_one();
    }

    /// What has been done, where devices have these leftovers. How many QPs have their backup is for
    /// the caller to say.
    pub(crate) fn status(&self, left: Leftovers) -> BackupsStatus {
        let q = lock(&self.queue);
        BackupsStatus {
            ready: 0,
            awaited: q.wanted.len() as u32 + u32::from(q.busy.is_some()),
            made: q.made,
            mean_us: q.making_us.checked_div(q.made).unwrap_or(0),
            failures: q.failures,
            unanswered: left.unanswered,
            undestroyed: left.undestroyed,
        }
    }

    /// A backup was made in that time, or could not be. Gives whether the log is to have that.
    pub(crate) fn count(&self, made: bool, took_us: u64) -> bool {
        let mut q = lock(&self.queue);
        match made {
            true => (q.made, q.making_us) = (q.made + 1, q.making_us + took_us),
            false => q.failures += 1,
        }
        !made && q.failures == 1
    }

    /// The thread is done with the QP that [`Backups::next`] gave.
    pub(crate) fn finished(&self) {
        lock(&self.queue).busy = None;
        self.done.notify_all();
    }

    /// The next QP; none: the thread is to end.
    pub(crate) fn next(&self) -> Option<LogicalId> {
        let mut q = lock(&self.queue);
        loop {
            let wait_us = match q.wanted.front() {
                _ if q.ended => return None,
                None => u64::MAX,
                Some(_) => {
                    (q.last_us + QUIET_US).min(q.first_us + PATIENCE_US).saturating_sub(now_us())
                }
            };
            if wait_us == 0 {
                let id = q.wanted.pop_front()?;
                q.known.remove(&id);
                q.busy = Some(id);
                return Some(id);
            }
            q = match wait_us {
                u64::MAX => self.news.wait(q).unwrap_or_else(PoisonError::into_inner),
                us => {
                    let us = Duration::from_micros(us);
                    self.news.wait_timeout(q, us).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
