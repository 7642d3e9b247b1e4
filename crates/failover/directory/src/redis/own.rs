//! What this process has entered, or wants to: the truth of which the server has a copy.
//!
//! Each entry is written when it changes, again and again before its lease ends, and when the
//! server may have lost it. All of it is the same write, so nobody needs to know which of these it
//! is.
//!
//! An entry that is taken out before the server can have seen it is simply forgotten. One that it
//! may have seen stays as a *removal* until the server has been told; removals count on their own,
//! so that a server that is away costs no room for what lives. Where they are too many, an entry is
//! left to end with its lease.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::command::{Command, Names, QpName};

/// What stands in the place of a process that has ended.
pub(crate) const ENDED: &[u8] = b"ended";
/// Most entries of a process.
pub(crate) const MAX_ENTRIES: usize = 1 << 20;
/// Queues that are no longer than this are not compacted.
const MIN_COMPACTED: usize = 1024;

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

/// Which queue an entry is in. (What is left of it in another is skipped.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    None,
    /// Of changes.
    Fresh,
    /// Of what the server had before.
    Again,
}

struct Item {
    /// `None`: it is to be taken out.
    value: Option<Vec<u8>>,
    queue: Queue,
    /// Others may know an older value.
    announce: bool,
    /// The server may have it.
    sent: bool,
}

/// See the module's text.
#[derive(Default)]
pub(crate) struct Own {
    /// Tells this process's entries of QPs from those of others.
    owner: u64,
    items: BTreeMap<Entry, Item>,
    /// How many of them are removals.
    removals: usize,
    /// What has changed.
    fresh: VecDeque<Entry>,
    /// What the server had before.
    again: VecDeque<Entry>,
    /// Changes that are on their way.
    writing: usize,
}

impl Own {
    /// Of a process with that number, which no other has.
    pub(crate) fn new(owner: u64) -> Own {
        Own { owner, ..Own::default() }
    }

    /// Enters something; false where there is no room.
    pub(crate) fn set(&mut self, entry: Entry, value: Vec<u8>) -> bool {
        let known = self.items.get(&entry).is_some_and(|item| item.value.is_some());
        if self.items.len() - self.removals >= MAX_ENTRIES && !known {
            return false;
        }
        let announced = matches!(entry, Entry::Moved(_));
        let first = Item { value: None, queue: Queue::None, announce: announced, sent: false };
        let was_there = self.items.contains_key(&entry);
        let item = self.items.entry(entry).or_insert(first);
        self.removals -= usize::from(was_there && item.value.is_none());
        // Who has seen the first value of a process must hear of the second.
        item.announce |= item.value.as_ref().is_some_and(|old| *old != value) || announced;
        item.value = Some(value);
        self.push_fresh(entry);
        true
    }

    /// Takes something out.
    pub(crate) fn remove(&mut self, entry: Entry) {
        let Some(item) = self.items.get_mut(&entry) else { return };
        if !item.sent {
            self.removals -= usize::from(item.value.is_none());
            self.items.remove(&entry);
            return self.compact();
        }
        if item.value.is_some() && self.removals >= MAX_ENTRIES {
            // It ends with its lease.
            self.items.remove(&entry);
            return self.compact();
        }
        self.removals += usize::from(item.value.is_some());
        (item.value, item.announce) = (None, true);
        self.push_fresh(entry);
    }

    fn push_fresh(&mut self, entry: Entry) {
        let Some(item) = self.items.get_mut(&entry) else { return };
        if item.queue != Queue::Fresh {
            item.queue = Queue::Fresh;
            self.fresh.push_back(entry);
        }
        self.compact();
    }

    /// Forgets what entries that are no more have left in the queues.
    fn compact(&mut self) {
        if self.fresh.len() + self.again.len() <= 4 * self.items.len() + MIN_COMPACTED {
            return;
        }
        let mut kept = BTreeSet::new();
        for (queue, which) in [(&mut self.fresh, Queue::Fresh), (&mut self.again, Queue::Again)] {
            queue.retain(|entry| {
                let item = self.items.get(entry);
                item.is_some_and(|item| item.queue == which) && kept.insert(*entry)
            });
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
            if item.queue == Queue::None {
                item.queue = Queue::Again;
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

    /// How much is in the queues.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.fresh.len() + self.again.len()
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
            let (entry, from) = match self.fresh.pop_front() {
                Some(entry) => (entry, Queue::Fresh),
                None => (self.again.pop_front()?, Queue::Again),
            };
            // It may be in both queues, or gone meanwhile.
            let Some(item) = self.items.get_mut(&entry) else { continue };
            if item.queue == from {
                (item.queue, item.sent) = (Queue::None, true);
                self.writing += usize::from(from == Queue::Fresh);
                return Some(entry);
            }
        }
    }

    /// The commands that write an entry.
    pub(crate) fn commands(&self, entry: Entry, names: &Names, lease_ms: u64) -> Vec<Command> {
        let Some(item) = self.items.get(&entry) else { return Vec::new() };
        let mut commands = vec![match (entry, item.value.clone()) {
            (Entry::Process(incarnation), value) => {
                // That a process has ended is kept for those who know it; that it is not there may
                // have other causes.
                let value = value.unwrap_or_else(|| ENDED.to_vec());
                Command::Set { name: names.process(incarnation), value, lease_ms }
            }
            (Entry::Qp(qp), Some(value)) => Command::SetSole {
                name: names.qp(&qp),
                field: self.owner().to_vec(),
                value,
                lease_ms,
            },
            (Entry::Qp(qp), None) => {
                Command::DeleteField { name: names.qp(&qp), field: self.owner().to_vec() }
            }
            (Entry::Moved(qp), value) => field(names.moved(), qp.0.to_vec(), value, lease_ms),
            (Entry::Listener(incarnation), value) => {
                field(names.listeners(), incarnation.to_be_bytes().to_vec(), value, lease_ms)
            }
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

    /// The process whose entries these are, as the field of a QP names it: what another has entered
    /// under the same name is not touched.
    fn owner(&self) -> [u8; 8] {
        self.owner.to_be_bytes()
    }

    /// Whether the server has been given this, and no change of it waits.
    pub(crate) fn is_written(&self, entry: Entry) -> bool {
        let item = self.items.get(&entry);
        item.is_some_and(|item| item.sent && item.queue == Queue::None && item.value.is_some())
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
            let Some(item) = self.items.get_mut(entry).filter(|item| item.queue == Queue::None)
            else {
                continue;
            };
            item.announce = false;
            if item.value.is_none() {
                self.items.remove(entry);
                self.removals -= 1;
            }
        }
    }
}

/// Writes a field of a table, or deletes it. Fields do not expire by themselves: who reads them
/// looks whether their process lives.
fn field(name: String, field: Vec<u8>, value: Option<Vec<u8>>, lease_ms: u64) -> Command {
    match value {
        Some(value) => Command::SetField { name, field, value, lease_ms: 2 * lease_ms },
        None => Command::DeleteField { name, field },
    }
}
