//! What this process has entered, or wants to: the truth of which the server has a copy.
//!
//! Each entry is written when it changes, again and again before its lease ends, and when the
//! server may have lost it. All of it is the same write, so nobody needs to know which of these it
//! is.

use std::collections::{BTreeMap, VecDeque};

use super::command::{Command, Names, QpName};

/// What stands in the place of a process that has ended.
pub(crate) const ENDED: &[u8] = b"ended";
/// Most entries of a process.
pub(crate) const MAX_ENTRIES: usize = 1 << 20;
/// Bytes of the time in front of what a field has.
const UNTIL_BYTES: usize = 8;

/// What an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Entry {
    /// A process, by its incarnation.
    Process(u64),
    /// A logical QP.
    Qp(QpName),
    /// A UD QP that has moved.
    Moved(QpName),
    /// A process that wants to be told of UD QPs that have moved, by its incarnation.
    Listener(u64),
}

struct Item {
    /// `None`: it is to be taken out.
    value: Option<Vec<u8>>,
    /// It is in a queue.
    queued: bool,
    /// Others may know an older value.
    announce: bool,
}

/// See the module's text.
#[derive(Default)]
pub(crate) struct Own {
    items: BTreeMap<Entry, Item>,
    /// What has changed.
    fresh: VecDeque<Entry>,
    /// What the server had before.
    again: VecDeque<Entry>,
    /// Changes that are on their way.
    writing: usize,
}

impl Own {
    /// Enters something; false where there is no room.
    pub(crate) fn set(&mut self, entry: Entry, value: Vec<u8>) -> bool {
        if self.items.len() >= MAX_ENTRIES && !self.items.contains_key(&entry) {
            return false;
        }
        let announced = matches!(entry, Entry::Moved(_));
        let item = self.items.entry(entry).or_insert(Item {
            value: None,
            queued: false,
            announce: announced,
        });
        // Who has seen the first value of a process must hear of the second.
        item.announce |= item.value.as_ref().is_some_and(|old| *old != value) || announced;
        item.value = Some(value);
        self.fresh.push_back(entry);
        item.queued = true;
        true
    }

    /// Takes something out.
    pub(crate) fn remove(&mut self, entry: Entry) {
        if let Some(item) = self.items.get_mut(&entry) {
            (item.value, item.queued, item.announce) = (None, true, true);
            self.fresh.push_back(entry);
        }
    }

    /// Takes everything out.
    pub(crate) fn remove_all(&mut self) {
        let all: Vec<Entry> = self.items.keys().copied().collect();
        all.into_iter().for_each(|entry| self.remove(entry));
    }

    /// The server shall have everything again; `lost`: others may have seen it without.
    pub(crate) fn repeat(&mut self, lost: bool) {
        self.writing = 0;
        for (entry, item) in &mut self.items {
            item.announce |= lost && matches!(entry, Entry::Moved(_));
            if !std::mem::replace(&mut item.queued, true) {
                self.again.push_back(*entry);
            }
        }
    }

    /// What is entered as this.
    pub(crate) fn get(&self, entry: Entry) -> Option<&[u8]> {
        self.items.get(&entry)?.value.as_deref()
    }

    fn range(&self, from: Entry, to: Entry) -> impl Iterator<Item = (Entry, &[u8])> {
        self.items
            .range(from..=to)
            .filter_map(|(entry, item)| Some((*entry, item.value.as_deref()?)))
    }

    /// The UD QPs that have moved.
    pub(crate) fn moved(&self) -> impl Iterator<Item = (QpName, &[u8])> {
        let all = self.range(Entry::Moved(QpName([0; 20])), Entry::Moved(QpName([0xff; 20])));
        all.filter_map(|(entry, bytes)| match entry {
            Entry::Moved(qp) => Some((qp, bytes)),
            Entry::Process(_) | Entry::Qp(_) | Entry::Listener(_) => None,
        })
    }

    /// The processes that are entered: this one, once it has said where it can be reached.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.range(Entry::Process(0), Entry::Process(u64::MAX)).filter_map(|(entry, bytes)| {
            match entry {
                Entry::Process(incarnation) => Some((incarnation, bytes)),
                Entry::Qp(_) | Entry::Moved(_) | Entry::Listener(_) => None,
            }
        })
    }

    /// Whether the server has all changes.
    pub(crate) fn settled(&self) -> bool {
        self.fresh.is_empty() && self.writing == 0
    }

    /// Whether something is to be written.
    pub(crate) fn pending(&self) -> bool {
        !self.fresh.is_empty() || !self.again.is_empty()
    }

    /// Takes an entry to be written.
    pub(crate) fn take(&mut self) -> Option<Entry> {
        loop {
            let (entry, fresh) = match self.fresh.pop_front() {
                Some(entry) => (entry, true),
                None => (self.again.pop_front()?, false),
            };
            // It may be in both queues, or twice in one, or gone meanwhile.
            let Some(item) = self.items.get_mut(&entry) else { continue };
            if std::mem::take(&mut item.queued) {
                self.writing += usize::from(fresh);
                return Some(entry);
            }
        }
    }

    /// The commands that write an entry. `server_ms` is the server's time.
    pub(crate) fn commands(
        &mut self,
        entry: Entry,
        names: &Names,
        lease_ms: u64,
        server_ms: u64,
    ) -> Vec<Command> {
        let Some(item) = self.items.get_mut(&entry) else { return Vec::new() };
        let mut commands = vec![match (entry, item.value.clone()) {
            (Entry::Process(incarnation), value) => {
                // That a process has ended is kept for those who know it; that it is not there may
                // have other causes.
                let value = value.unwrap_or_else(|| ENDED.to_vec());
                Command::Set { name: names.process(incarnation), value, lease_ms }
            }
            (Entry::Qp(qp), Some(value)) => Command::Set { name: names.qp(&qp), value, lease_ms },
            (Entry::Qp(qp), None) => Command::Delete(names.qp(&qp)),
            (Entry::Moved(qp), value) => {
                field(names.moved(), qp.0.to_vec(), value, lease_ms, server_ms)
            }
            (Entry::Listener(incarnation), value) => field(
                names.listeners(),
                incarnation.to_be_bytes().to_vec(),
                value,
                lease_ms,
                server_ms,
            ),
        }];
        let line = match entry {
            Entry::Process(incarnation) => Some(incarnation.to_be_bytes().to_vec()),
            Entry::Moved(_) => Some(Vec::new()),
            Entry::Qp(_) | Entry::Listener(_) => None,
        };
        if let Some(line) = line.filter(|_| item.announce) {
            commands.push(Command::Announce {
                name: names.changes(),
                line,
                lease_ms: 4 * lease_ms,
            });
        }
        commands
    }

    /// Whether an entry is a UD QP that has moved since others have heard of it.
    pub(crate) fn has_moved(&self, entry: Entry) -> bool {
        let item = self.items.get(&entry).filter(|_| matches!(entry, Entry::Moved(_)));
        item.is_some_and(|item| item.announce && item.value.is_some())
    }

    /// These entries, which [`Own::take`] gave, were written.
    pub(crate) fn written(&mut self, entries: &[Entry]) {
        // Whatever is on its way is of one round.
        self.writing = 0;
        for entry in entries {
            let Some(item) = self.items.get_mut(entry).filter(|item| !item.queued) else {
                continue;
            };
            item.announce = false;
            if item.value.is_none() {
                self.items.remove(entry);
            }
        }
    }
}

/// Writes a field of a table, or deletes it. Fields do not expire by themselves: each begins with
/// the time at which it does.
fn field(
    name: String,
    field: Vec<u8>,
    value: Option<Vec<u8>>,
    lease_ms: u64,
    server_ms: u64,
) -> Command {
    match value {
        Some(value) => {
            let value = [&(server_ms + lease_ms).to_le_bytes(), &value[..]].concat();
            Command::SetField { name, field, value, lease_ms: 2 * lease_ms }
        }
        None => Command::DeleteField { name, field },
    }
}

/// The value of a field, if its time is not over.
pub(crate) fn current(field: &[u8], server_ms: u64) -> Option<&[u8]> {
    let (until, value) = field.split_first_chunk::<UNTIL_BYTES>()?;
    (u64::from_le_bytes(*until) >= server_ms).then_some(value)
}

/// Whether nobody can want a field any more: its owner has not renewed it for two leases.
pub(crate) fn forgotten(field: &[u8], server_ms: u64, lease_ms: u64) -> bool {
    field
        .first_chunk::<UNTIL_BYTES>()
        .is_none_or(|until| u64::from_le_bytes(*until).saturating_add(lease_ms) < server_ms)
}
