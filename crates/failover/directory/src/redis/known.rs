//! What this process knows of others: the cache, and what is to be asked.
//!
//! A *process* that was found once stays known: its control addresses are what a switch needs, also
//! while the server is away. Only its own word that it has ended takes it out; that it is not in
//! the directory may be the server's loss. A *QP* is asked for each time that it is connected to,
//! and what was found is forgotten when the server is lost: a QP that cannot be looked up is not
//! protected.

use std::collections::{BTreeMap, HashMap};

use super::command::QpName;
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

/// Answers about one thing, and whether to ask.
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

    /// What to ask now, at most so many.
    fn take(&mut self, max: usize) -> Vec<K> {
        let waiting = self.0.iter_mut().filter(|(_, asked)| !**asked).take(max);
        waiting
            .map(|(what, asked)| {
                *asked = true;
                *what
            })
            .collect()
    }

    /// It is answered, unless it was asked again meanwhile.
    fn answered(&mut self, what: K) {
        if self.0.get(&what) == Some(&true) {
            self.0.remove(&what);
        }
    }
}

/// What was found out about a QP, by the round of that number.
struct QpAnswer {
    round: u64,
    /// The error: bytes that are no entry.
    found: Result<Option<QpRecord>, usize>,
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
    processes: HashMap<u64, Process>,
    qps_asked: Questions<QpName>,
    processes_asked: Questions<u64>,
    moved: BTreeMap<QpName, MovedQp>,
    /// Whether the table of moved QPs is to be read; `None`: nobody has wanted it so far.
    moved_asked: Option<bool>,
    /// Those that want to be told of moved QPs.
    listeners: BTreeMap<u64, ProcessRecord>,
    /// Whether the table of those is to be read.
    listeners_asked: bool,
}

impl Known {
    // --- QPs
    // -----------------------------------------------------------------------------------------------------------------

    /// Asks for a QP; false where too many look-ups wait.
    pub(crate) fn ask_qp(&mut self, qp: QpName) -> bool {
        self.qps_asked.ask(qp)
    }

    /// Whether a QP and its process were asked for since that round.
    pub(crate) fn answered(&self, qp: &QpName, round: u64) -> bool {
        self.qps.get(qp).filter(|answer| answer.round > round).is_some_and(|answer| {
            match &answer.found {
                Ok(Some(record)) => !self.processes_asked.0.contains_key(&record.incarnation),
                _ => true,
            }
        })
    }

    pub(crate) fn forget_qp(&mut self, qp: &QpName) {
        self.qps.remove(qp);
    }

    /// What is known of a QP: `None`: nothing. The error: its entry, of so many bytes, is none.
    pub(crate) fn qp(&self, qp: &QpName) -> Option<Result<Option<QpRecord>, usize>> {
        self.qps.get(qp).map(|answer| answer.found)
    }

    pub(crate) fn qp_answer(&mut self, qp: QpName, round: u64, value: Option<&[u8]>) {
        self.qps_asked.answered(qp);
        let found = value.map(|bytes| QpRecord::decode(bytes).ok_or(bytes.len())).transpose();
        if let Ok(Some(record)) = found {
            if !self.processes.contains_key(&record.incarnation) {
                self.processes_asked.ask(record.incarnation);
            }
        }
        if self.qps.len() >= MAX_QPS {
            // They are needed while a QP is connected, and not afterwards.
            self.qps.clear();
        }
        self.qps.insert(qp, QpAnswer { round, found });
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
    pub(crate) fn moved(&mut self) -> &BTreeMap<QpName, MovedQp> {
        self.moved_asked = Some(true);
        &self.moved
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

    pub(crate) fn listeners_answer(&mut self, fields: &[(Vec<u8>, Vec<u8>)], server_ms: u64) {
        let decode = |(name, field): &(Vec<u8>, Vec<u8>)| {
            let incarnation = u64::from_be_bytes(name.as_slice().try_into().ok()?);
            let (_, record) = ProcessRecord::decode(own::current(field, server_ms)?)?;
            Some((incarnation, record))
        };
        self.listeners = fields.iter().filter_map(decode).collect();
    }

    /// Whether to ask now.
    pub(crate) fn take_moved(&mut self) -> bool {
        self.moved_asked.as_mut().is_some_and(std::mem::take)
    }

    /// Takes the table in; gives whether it has changed.
    pub(crate) fn moved_answer(&mut self, fields: &[(Vec<u8>, Vec<u8>)], server_ms: u64) -> bool {
        let decode = |(name, field): &(Vec<u8>, Vec<u8>)| {
            let (_, moved) = MovedQp::decode(name, own::current(field, server_ms)?)?;
            Some((QpName::new(moved.known.0, moved.known.1), moved))
        };
        let fresh: BTreeMap<QpName, MovedQp> = fields.iter().filter_map(decode).collect();
        let changed = fresh != self.moved;
        self.moved = fresh;
        changed
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
    }

    /// What to ask now, at most so many of each.
    pub(crate) fn take(&mut self, max: usize) -> (Vec<QpName>, Vec<u64>) {
        (self.qps_asked.take(max), self.processes_asked.take(max))
    }

    /// The server is lost: nothing that was asked will be answered.
    pub(crate) fn lost(&mut self) {
        self.qps.clear();
        self.qps_asked.0.clear();
        self.processes_asked.0.clear();
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
