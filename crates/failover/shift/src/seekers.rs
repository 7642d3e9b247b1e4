//! QPs whose peer is not found yet, and those whose peer was found just now: when the directory is
//! asked for them. The worker's. What becomes of a QP is `qp`'s (`qp/seek`).
//!
//! A QP is asked for when the directory has news of its peer's address, when the peer itself is
//! heard of, when the directory is back, and after a pause that doubles each time: who is not in it
//! may be on the way, or may have no directory at all. One that is linked is looked up once more.
//!
//! Bounds: one entry for each QP; [`MAX_A_ROUND`] are looked at in one round of the worker; a QP is
//! asked for every [`MIN_PAUSE_US`] at most, whatever peers send.

use crate::core::Core;
use crate::due::Due;
use crate::qp::seek::Search;
use crate::qp::Qp;
use crate::qps::LogicalId;
use crate::worker_queue::QpAddr;
use std::collections::HashMap;
use unbroken_directory::Found;
use unbroken_runtime::now_us;

/// The first pause.
const MIN_PAUSE_US: u64 = 2_000;
/// The longest one.
const MAX_PAUSE_US: u64 = 600_000_000;
/// An entry that another process had under this number is gone or replaced by then.
const LOOK_AGAIN_US: u64 = 1_000_000;
/// QPs that are asked for in one round of the worker.
const MAX_A_ROUND: usize = 256;

struct Seeker {
    addr: QpAddr,
    pause_us: u64,
    asked_us: u64,
    /// There was an answer to the last question: the next is a new one.
    answered: bool,
}

/// See the module's text.
#[derive(Default)]
pub(crate) struct Seekers {
    all: HashMap<LogicalId, Seeker>,
    due: Due<LogicalId>,
    by_addr: HashMap<QpAddr, Vec<LogicalId>>,
}

impl Seekers {
    /// A QP was connected to that address, which was asked for then.
    pub(crate) fn seek(&mut self, core: &Core<Qp>, id: LogicalId, addr: QpAddr, now_us: u64) {
        self.forget(id);
        let linked =
            core.qps.get(id).is_some_and(|qp| qp.gate_now().is_some_and(|g| g.link.is_some()));
        let pause_us = if linked { LOOK_AGAIN_US } else { MIN_PAUSE_US };
        let seeker = Seeker { addr, pause_us, asked_us: now_us, answered: linked };
        self.all.insert(id, seeker);
        self.due.set(id, now_us + pause_us);
        self.by_addr.entry(addr).or_default().push(id);
    }

    /// When [`Seekers::work`] is due.
    pub(crate) fn deadline_us(&self) -> u64 {
        self.due.next_us()
    }

    /// Asks for those that are due.
    pub(crate) fn work(&mut self, core: &Core<Qp>, now_us: u64) {
        for id in self.due.take(now_us, MAX_A_ROUND) {
            let answered = self.all.get(&id).is_some_and(|seeker| seeker.answered);
            self.look(core, id, answered);
        }
    }

    /// There are answers.
    pub(crate) fn answered(&mut self, core: &Core<Qp>, addrs: &[QpAddr], _now_us: u64) {
        for addr in addrs {
            for id in self.by_addr.get(addr).cloned().unwrap_or_default() {
                if self.all.get(&id).is_some_and(|seeker| !seeker.answered) {
                    self.look(core, id, false);
                }
            }
        }
    }

    /// A QP's peer is heard of, or the QP has failed: it is asked for soon.
    pub(crate) fn hurry(&mut self, id: LogicalId, now_us: u64) {
        let Some(seeker) = self.all.get_mut(&id) else { return };
        seeker.pause_us = MIN_PAUSE_US;
        let soon_us = now_us.max(seeker.asked_us + MIN_PAUSE_US);
        let due_us = self.due.set(id, soon_us).unwrap_or(soon_us);
        self.due.set(id, soon_us.min(due_us));
    }

    /// The directory is back, and has forgotten all questions.
    pub(crate) fn ask_again(&mut self, now_us: u64) {
        let all: Vec<LogicalId> = self.all.keys().copied().collect();
        for id in all {
            let Some(seeker) = self.all.get_mut(&id) else { continue };
            (seeker.answered, seeker.pause_us) = (true, MIN_PAUSE_US);
            self.due.set(id, now_us);
        }
    }

    fn look(&mut self, core: &Core<Qp>, id: LogicalId, anew: bool) {
        let Some((addr, directory, qp)) = self
            .all
            .get(&id)
            .zip(core.directory.as_ref())
            .zip(core.qps.get(id))
            .map(|((seeker, directory), qp)| (seeker.addr, directory, qp))
        else {
            return self.forget(id);
        };
        let found = match anew {
            true => directory.ask_qp(addr.0, addr.1),
            false => directory.answer_qp(addr.0, addr.1),
        };
        let awaited = matches!(found, Ok(Found::Later));
        let linked = qp.gate_now().map(|g| g.link.is_some());
        let search = match linked {
            Some(true) if awaited => Search::Later,
            // Its program changes it just now.
            None => Search::Later,
            Some(_) => qp.found(qp.sought(addr, found)),
        };
        let now_us = now_us();
        let Some(seeker) = self.all.get_mut(&id) else { return };
        seeker.asked_us = now_us;
        match search {
            Search::Over => return self.forget(id),
            Search::Linked => (seeker.answered, seeker.pause_us) = (true, LOOK_AGAIN_US),
            Search::Nobody => (seeker.answered, seeker.pause_us) = (true, longer(seeker.pause_us)),
            Search::Later => (seeker.answered, seeker.pause_us) = (false, longer(seeker.pause_us)),
        }
        self.due.set(id, now_us + seeker.pause_us);
    }

    fn forget(&mut self, id: LogicalId) {
        let Some(seeker) = self.all.remove(&id) else { return };
        self.due.remove(id);
        if let Some(ids) = self.by_addr.get_mut(&seeker.addr) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_addr.remove(&seeker.addr);
            }
        }
    }
}

fn longer(pause_us: u64) -> u64 {
    (2 * pause_us).min(MAX_PAUSE_US)
}
