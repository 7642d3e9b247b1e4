//! Receives from whichever rank sends first.
//!
//! Such a receive waits until something with its tag has come, from any rank, that no receive from
//! that rank takes; then it becomes a receive from that rank (*bound*), with a ticket of that
//! channel. Earlier ones are bound first.
//!
//! | state | event | then |
//! | --- | --- | --- |
//! | waiting | something with its tag has come from a rank | bound to that rank's channel |
//! | waiting | nothing has come for as long as an operation may stand still | ended: an error, and nothing of its memory was touched |
//! | waiting | this rank ends the communicator, or all others have | ended |
//! | waiting | the communicator breaks, or its request is dropped | forgotten |
//! | bound | its ticket is over, and that was seen | forgotten |

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use unbroken_collective_protocol::Rank;
use unbroken_schedule::DataType;

use crate::completions::Watch;
use crate::span::Span;

/// A receive that has no rank yet.
pub(crate) struct Waiting {
    pub(crate) tag: u64,
    pub(crate) data: DataType,
    pub(crate) into: Span,
    pub(crate) watch: Option<Watch>,
    since: Instant,
}

/// What became of a receive from any rank.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    /// Nothing has come.
    Waits,
    /// It is this ticket of that channel.
    Bound { channel: usize, ticket: u64, from: Rank },
    /// Nothing comes any more, or nothing has come in time.
    Ended(String),
}

/// The receives of a communicator that take what comes from any rank.
#[derive(Default)]
pub(crate) struct AnySource {
    next: u64,
    waiting: VecDeque<(u64, Waiting)>,
    found: BTreeMap<u64, Found>,
}

impl AnySource {
    /// How many have no rank yet.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// One more; its number.
    /// The memory stays until it is over or forgotten.
    pub(crate) fn push(&mut self, tag: u64, data: DataType, into: Span) -> u64 {
        let number = self.next;
        self.next += 1;
        self.waiting
            .push_back((number, Waiting { tag, data, into, watch: None, since: Instant::now() }));
        number
    }

    /// Takes the first that waits for a tag.
    pub(crate) fn take(&mut self, tag: u64) -> Option<(u64, Waiting)> {
        let at = self.waiting.iter().position(|(_, waiting)| waiting.tag == tag)?;
        self.waiting.remove(at)
    }

    /// One that was taken has a rank.
    pub(crate) fn bind(&mut self, number: u64, channel: usize, ticket: u64, from: Rank) {
        self.found.insert(number, Found::Bound { channel, ticket, from });
    }

    /// What became of one.
    pub(crate) fn find(&self, number: u64) -> Found {
        self.found.get(&number).cloned().unwrap_or(Found::Waits)
    }

    /// Tells when one that waits is over.
    pub(crate) fn watch(&mut self, number: u64, watch: Watch) {
        if let Some((_, waiting)) = self.waiting.iter_mut().find(|(n, _)| *n == number) {
            waiting.watch.get_or_insert(watch);
        }
    }

    /// Nobody asks for one any more.
    pub(crate) fn forget(&mut self, number: u64) {
        self.waiting.retain(|(n, _)| *n != number);
        self.found.remove(&number);
    }

    /// Ends those that have waited for longer than `most`.
    pub(crate) fn expire(&mut self, most: Duration) {
        while self.waiting.front().is_some_and(|(_, first)| first.since.elapsed() > most) {
            let Some((number, waiting)) = self.waiting.pop_front() else { return };
            let text = format!(
                "no rank has sent anything with tag {} within {} s",
                waiting.tag,
                most.as_secs()
            );
            self.found.insert(number, Found::Ended(text));
            waiting.watch.into_iter().for_each(Watch::tell);
        }
    }

    /// Nothing comes any more: ends all that wait.
    pub(crate) fn end(&mut self, why: &str) {
        for (number, waiting) in self.waiting.drain(..) {
            self.found.insert(number, Found::Ended(why.into()));
            waiting.watch.into_iter().for_each(Watch::tell);
        }
    }

    /// The communicator is broken: none of them is touched from now on.
    pub(crate) fn clear(&mut self) {
        self.waiting.drain(..).filter_map(|(_, waiting)| waiting.watch).for_each(Watch::tell);
    }
}
