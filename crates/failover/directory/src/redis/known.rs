//! What this process knows of others: the cache, and what is to be asked.
//!
//! A *process* that was found once stays known: its control addresses are what a switch needs, also
//! while the server is away. Only its own word that it has ended takes it out; that it is not in
//! the directory may be the server's loss. A *QP* is asked for each time that it is connected to,
//! and what was found is forgotten when the server is lost.
//!
//! A question is *waiting*, then *sent* with a round, then answered. Asked again while it is sent,
//! it waits again, and the answer that is under way is dropped: it may be older than what it is
//! about. Questions are bounded; what cannot be asked now is asked by whoever looks for the answer
//! later. Of answers about QPs those make room that were looked at, and only then the oldest.
//!
//! A *UD QP that has moved* is one as long as its process has an entry of its own, which the server
//! lets expire. Nobody compares clocks: the server's may jump, and then living processes have no
//! entry until they see that and enter it again. So an owner that was seen counts as living until
//! it has had no entry for a lease, by this process's own clock; and of a table that the server has
//! lost, this process goes on with what it has read.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::command::{QpName, TABLE};
use super::own;
use crate::record::{MovedQp, ProcessRecord, QpRecord};

/// Look-ups that may wait.
const MAX_ASKED: usize = 4096;
/// QPs of others that are known at a time.
const MAX_QPS: usize = 16_384;
/// Processes that are known at a time; the one that was not used for longest makes room.
const MAX_PROCESSES: usize = 16_384;
/// What is known of a process is not asked for again sooner than this.
const FRESH_MS: u64 = 20;

/// Questions, and whether they are sent.
struct Questions<K>(BTreeMap<K, bool>);

impl<K> Default for Questions<K> {
    fn default() -> Questions<K> {
        Questions(BTreeMap::new())
    }
}

impl<K: Ord + Copy> Questions<K> {
    /// Asks, again if it is being asked just now; false where too many wait.
    fn ask(&mut self, what: K) -> bool {
        let room = self.0.len() < MAX_ASKED || self.0.contains_key(&what);
        if room {
            self.0.insert(what, false);
        }
        room
    }

    /// Asks, unless that is done; false where too many wait.
    fn ask_once(&mut self, what: K) -> bool {
        self.0.contains_key(&what) || self.ask(what)
    }

    /// What to ask now, at most so many.
    fn take(&mut self, max: usize) -> Vec<K> {
        let waiting = self.0.iter_mut().filter(|(_, sent)| !**sent).take(max);
        waiting
            .map(|(what, sent)| {
                *sent = true;
                *what
            })
            .collect()
    }

    /// An answer has come; false where it is none to what is asked now.
    fn answered(&mut self, what: K) -> bool {
        let sent = self.0.get(&what) == Some(&true);
        if sent {
            self.0.remove(&what);
        }
        sent
    }
}

/// What was found out about a QP.
struct QpAnswer {
    /// The error: bytes that are no entry.
    found: Result<Option<QpRecord>, usize>,
    /// Somebody has looked at it.
    seen: bool,
    /// Tells it from earlier ones in the queue.
    number: u64,
}

/// Whether the process of moved QPs lives.
#[derive(Clone, Copy, Debug)]
struct Owner {
    /// Since when it has no entry, by our clock; `None`: it has one.
    missing_since_ms: Option<u64>,
    /// It had one when it was looked for first.
    seen: bool,
}

impl Owner {
    fn lives(&self, now: Now) -> bool {
        match self.missing_since_ms {
            None => true,
            Some(since_ms) => self.seen && now.ms < since_ms + now.lease_ms,
        }
    }
}

/// This process's time, and the lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) ms: u64,
    pub(crate) lease_ms: u64,
}

struct Process {
    /// `None`: it has ended.
    record: Option<ProcessRecord>,
    asked_ms: u64,
    used_ms: u64,
}

/// See the module's text.
#[derive(Default)]
pub(crate) struct Known {
    qps: HashMap<QpName, QpAnswer>,
    /// Answers about QPs in their order; those that are no more are skipped.
    qp_order: VecDeque<(QpName, u64)>,
    qp_answers: u64,
    processes: HashMap<u64, Process>,
    qps_asked: Questions<QpName>,
    processes_asked: Questions<u64>,
    /// QPs that are found, and wait for their process.
    for_process: HashMap<u64, Vec<QpName>>,
    /// QPs that there is news of.
    answered: Vec<QpName>,
    moved: BTreeMap<QpName, (u64, MovedQp)>,
    /// The server had lost the table when it was read last.
    moved_lost: bool,
    /// Those of them that live, as was told last.
    shown: BTreeMap<QpName, MovedQp>,
    /// Whether the table of moved QPs is to be read; `None`: nobody has wanted it so far.
    moved_asked: Option<bool>,
    /// The processes of moved QPs and of those that listen.
    owners: HashMap<u64, Owner>,
    owners_asked: Questions<u64>,
    /// Those that want to be told of moved QPs.
    listeners: BTreeMap<u64, ProcessRecord>,
    /// Whether the table of those is to be read.
    listeners_asked: bool,
}

impl Known {
    // --- QPs
    // -----------------------------------------------------------------------------------------------------------------

    /// Asks for a QP anew: what was found, or is under way, is no answer. False where too many
    /// look-ups wait.
    pub(crate) fn ask_qp(&mut self, qp: QpName) -> bool {
        self.qps.remove(&qp);
        self.qps_asked.ask(qp)
    }

    /// Asks for a QP, unless that is done, and keeps what was found so far.
    pub(crate) fn ask_qp_once(&mut self, qp: QpName) -> bool {
        self.qps_asked.ask_once(qp)
    }

    /// What is known of a QP: `None`: nothing. The error: its entry, of so many bytes, is none.
    pub(crate) fn qp(&mut self, qp: &QpName) -> Option<Result<Option<QpRecord>, usize>> {
        self.qps.get_mut(qp).map(|answer| {
            answer.seen = true;
            answer.found
        })
    }

    /// Takes an answer: the entries that are there under its name. More than one: a process has
    /// not taken out its own yet, and nobody can tell which is the one.
    pub(crate) fn qp_answer(&mut self, qp: QpName, fields: &[(Vec<u8>, Vec<u8>)]) {
        if !self.qps_asked.answered(qp) {
            return;
        }
        let found = match fields {
            [(_, bytes)] => QpRecord::decode(bytes).ok_or(bytes.len()).map(Some),
            _ => Ok(None),
        };
        match found {
            Ok(Some(record)) if !self.processes.contains_key(&record.qp.incarnation) => {
                let waiting = self.for_process.entry(record.qp.incarnation).or_default();
                waiting.push(qp);
                self.processes_asked.ask_once(record.qp.incarnation);
            }
            _ => self.answered.push(qp),
        }
        self.make_room_for_qp();
        self.qp_answers += 1;
        let number = self.qp_answers;
        self.qps.insert(qp, QpAnswer { found, seen: false, number });
        self.qp_order.push_back((qp, number));
    }

    /// Those that were looked at are forgotten first: others wait for the rest.
    fn make_room_for_qp(&mut self) {
        if self.qps.len() < MAX_QPS {
            // Answers that were replaced leave their place in the queue.
            if self.qp_order.len() > 2 * MAX_QPS {
                let qps = &self.qps;
                self.qp_order
                    .retain(|(qp, number)| qps.get(qp).is_some_and(|a| a.number == *number));
            }
            return;
        }
        let half = self.qps.len() / 2;
        for seen_only in [true, false] {
            let qps = &mut self.qps;
            self.qp_order.retain(|(qp, number)| {
                let Some(answer) = qps.get(qp).filter(|a| a.number == *number) else {
                    return false;
                };
                let goes = qps.len() > half && (answer.seen || !seen_only);
                if goes {
                    qps.remove(qp);
                }
                !goes
            });
            if self.qps.len() < MAX_QPS {
                return;
            }
        }
    }

    /// The QPs that there is news of since the last call.
    pub(crate) fn take_answered(&mut self) -> Vec<QpName> {
        std::mem::take(&mut self.answered)
    }

    // --- processes
    // -------------------------------------------------------------------------------------------------------------

    /// What is known of a process, which is asked for again.
    pub(crate) fn process(
        &mut self,
        incarnation: u64,
        now_ms: u64,
    ) -> Option<Option<ProcessRecord>> {
        match self.processes.get_mut(&incarnation) {
            Some(process) => {
                process.used_ms = now_ms;
                if process.record.is_some() && process.asked_ms + FRESH_MS <= now_ms {
                    process.asked_ms = now_ms;
                    self.processes_asked.ask(incarnation);
                }
                Some(process.record.clone())
            }
            None => {
                self.processes_asked.ask(incarnation);
                None
            }
        }
    }

    /// A process has changed, as somebody says.
    pub(crate) fn process_changed(&mut self, incarnation: u64) {
        if self.processes.contains_key(&incarnation) {
            self.processes_asked.ask(incarnation);
        }
    }

    pub(crate) fn process_answer(&mut self, incarnation: u64, now_ms: u64, value: Option<&[u8]>) {
        self.processes_asked.answered(incarnation);
        self.answered.extend(self.for_process.remove(&incarnation).unwrap_or_default());
        let record = match value {
            Some(own::ENDED) => None,
            Some(bytes) => match ProcessRecord::decode(bytes) {
                Some((_, record)) => Some(record),
                None => return,
            },
            None => return,
        };
        if self.processes.len() >= MAX_PROCESSES && !self.processes.contains_key(&incarnation) {
            let oldest =
                self.processes.iter().min_by_key(|(_, process)| process.used_ms).map(|(i, _)| *i);
            oldest.map(|incarnation| self.processes.remove(&incarnation));
        }
        let used_ms = self.processes.get(&incarnation).map_or(now_ms, |process| process.used_ms);
        self.processes.insert(incarnation, Process { record, asked_ms: now_ms, used_ms });
    }

    /// Those that are known and live.
    pub(crate) fn processes(&self) -> BTreeMap<u64, ProcessRecord> {
        let known = self
            .processes
            .iter()
            .filter_map(|(incarnation, process)| Some((*incarnation, process.record.clone()?)));
        // What a listener says of itself may be as old as its last renewal.
        self.listeners.clone().into_iter().chain(known).collect()
    }

    // --- UD QPs that have moved
    // --------------------------------------------------------------------------------------------------

    /// What is known of them, which is asked for again.
    pub(crate) fn moved(&mut self, now: Now) -> BTreeMap<QpName, MovedQp> {
        self.moved_asked = Some(true);
        self.living(now)
    }

    fn living(&self, now: Now) -> BTreeMap<QpName, MovedQp> {
        let lives = |owner| self.owners.get(owner).is_some_and(|o| o.lives(now));
        let living = self.moved.iter().filter(|(_, (owner, _))| lives(owner));
        living.map(|(qp, (_, moved))| (*qp, *moved)).collect()
    }

    /// There is news of them, as somebody says.
    pub(crate) fn moved_changed(&mut self) {
        self.moved_asked = self.moved_asked.map(|_| true);
    }

    /// Whether anybody has wanted to know of them.
    pub(crate) fn listens(&self) -> bool {
        self.moved_asked.is_some()
    }

    /// There is something to tell to those who listen.
    pub(crate) fn ask_listeners(&mut self) {
        self.listeners_asked = true;
    }

    /// Whether to ask for them now.
    pub(crate) fn take_listeners(&mut self) -> bool {
        std::mem::take(&mut self.listeners_asked)
    }

    pub(crate) fn listeners_answer(&mut self, fields: &[(Vec<u8>, Vec<u8>)]) {
        let decode = |(name, value): &(Vec<u8>, Vec<u8>)| {
            let incarnation = u64::from_be_bytes(name.as_slice().try_into().ok()?);
            Some((incarnation, ProcessRecord::decode(value)?.1))
        };
        self.listeners = fields.iter().filter_map(decode).collect();
        self.listeners.keys().for_each(|owner| {
            self.owners_asked.ask_once(*owner);
        });
    }

    /// Whether to ask now.
    pub(crate) fn take_moved(&mut self) -> bool {
        self.moved_asked.as_mut().is_some_and(std::mem::take)
    }

    /// Takes the table in. Whether that is news shows when its owners are known to live.
    pub(crate) fn moved_answer(&mut self, fields: &[(Vec<u8>, Vec<u8>)]) {
        self.moved_lost = !self.moved.is_empty() && !fields.iter().any(|(name, _)| name == TABLE);
        if self.moved_lost {
            return;
        }
        let decode = |(name, value): &(Vec<u8>, Vec<u8>)| {
            let (owner, moved) = MovedQp::decode(name, value)?;
            Some((QpName::new(moved.known.0, moved.known.1), (owner, moved)))
        };
        self.moved = fields.iter().filter_map(decode).collect();
        for (owner, _) in self.moved.values() {
            self.owners_asked.ask_once(*owner);
        }
    }

    /// Asks again for owners that have no entry, or of whom nothing is known.
    pub(crate) fn ask_missing(&mut self) {
        if self.moved_lost {
            self.moved_changed();
        }
        let (owners, asked) = (&self.owners, &mut self.owners_asked);
        let of_moved = self.moved.values().map(|(owner, _)| owner);
        for owner in of_moved.chain(self.listeners.keys()) {
            if owners.get(owner).is_none_or(|o| o.missing_since_ms.is_some()) {
                asked.ask_once(*owner);
            }
        }
    }

    /// Takes in whether an owner has an entry.
    pub(crate) fn owner_answer(&mut self, incarnation: u64, has: bool, now: Now) {
        self.owners_asked.answered(incarnation);
        if self.owners.len() >= MAX_PROCESSES && !self.owners.contains_key(&incarnation) {
            // Those that still have something are found again.
            self.owners.clear();
        }
        let first = Owner { missing_since_ms: None, seen: has };
        let owner = self.owners.entry(incarnation).or_insert(first);
        owner.seen |= has;
        let since_ms = owner.missing_since_ms.or(Some(now.ms));
        owner.missing_since_ms = since_ms.filter(|_| !has);
    }

    /// Whether what [`Known::moved`] gives is another than it was at the last call.
    pub(crate) fn moved_is_news(&mut self, now: Now) -> bool {
        let living = self.living(now);
        let news = living != self.shown;
        self.shown = living;
        news
    }

    /// Whether nobody can want what a process left in a table any more: it has had no entry for two
    /// leases, as long as this process has looked.
    pub(crate) fn forgotten(&self, incarnation: u64, now: Now) -> bool {
        let owner = self.owners.get(&incarnation);
        owner
            .and_then(|owner| owner.missing_since_ms)
            .is_some_and(|since_ms| now.ms >= since_ms + 2 * now.lease_ms)
    }

    /// The owners of entries in tables, for those that are to be looked at.
    pub(crate) fn take_owners(&mut self, max: usize) -> Vec<u64> {
        self.owners_asked.take(max)
    }

    // --- the server
    // --------------------------------------------------------------------------------------------------------------

    /// Whether something is to be asked.
    pub(crate) fn pending(&self) -> bool {
        let waits = |asked: &bool| !*asked;
        self.moved_asked == Some(true)
            || self.listeners_asked
            || self.qps_asked.0.values().any(waits)
            || self.processes_asked.0.values().any(waits)
            || self.owners_asked.0.values().any(waits)
            || !self.answered.is_empty()
    }

    /// What to ask now, at most so many of each.
    pub(crate) fn take(&mut self, max: usize) -> (Vec<QpName>, Vec<u64>) {
        (self.qps_asked.take(max), self.processes_asked.take(max))
    }

    /// The server is lost: nothing that was asked will be answered.
    pub(crate) fn lost(&mut self) {
        self.qps.clear();
        self.qp_order.clear();
        self.qps_asked.0.clear();
        self.processes_asked.0.clear();
        self.owners_asked.0.clear();
        self.for_process.clear();
        self.answered.clear();
    }

    /// The server is back, and may have heard things meanwhile.
    pub(crate) fn ask_all(&mut self) {
        // Beyond the bound they are asked for when they are used.
        for incarnation in
            self.processes.iter().filter(|(_, p)| p.record.is_some()).map(|(i, _)| *i)
        {
            self.processes_asked.ask(incarnation);
        }
        self.moved_changed();
    }
}
