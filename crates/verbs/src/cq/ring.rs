//! The ring of a queue: what waits, and what of it raises an event.

use unbroken_types::Wc;

/// When the next pushed WC raises an event on the channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Armed {
    No,
    Solicited,
    Any,
}

pub(super) struct Ring {
    /// Power-of-two storage; `head` and `len` in entries.
    pub(super) slots: Box<[Wc]>,
    pub(super) head: usize,
    pub(super) len: usize,
    /// What the application asked for; or the entries of the source.
    pub(super) limit: usize,
    pub(super) armed: Armed,
    /// WCs pushed so far, those without room included; the WC pushed last has this number.
    pub(super) pushed: u64,
    /// The numbers of the last WC, and of the last that a request for solicited ones is for, that
    /// came since the last event. 0: none.
    pub(super) silent: u64,
    pub(super) silent_solicited: u64,
    /// The program armed the queue while this WC waited, one of those, and has got no event yet. 0:
    /// none.
    pub(super) owed_for: u64,
    /// The number of the WC that was pushed last when the last event was raised.
    pub(super) told: u64,
    /// The first WC that the last event was raised for. 0: none, or the queue was armed since.
    pub(super) event_for: u64,
    pub(super) overrun: bool,
    /// See [`Cq::nudge`].
    pub(super) nudged: bool,
}

impl Ring {
    /// What pollers are told of its length: an overrun ring has something to say to them, even
    /// where it is empty, as has one that was nudged.
    pub(super) fn hint(&self) -> u32 {
        (self.len as u32).max(u32::from(self.overrun || self.nudged))
    }

    /// Takes note of a WC that has been pushed; whether it raises the event that was asked for.
    #[inline]
    pub(super) fn came(&mut self, solicited: bool) -> bool {
        self.pushed += 1;
        let fire = match self.armed {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => solicited,
        };
        if fire {
            self.said(self.pushed);
            return true;
        }
        self.silent = self.pushed;
        if solicited {
            self.silent_solicited = self.pushed;
        }
        false
    }

    /// An event is raised, for what is there from the WC `first` on.
    pub(super) fn said(&mut self, first: u64) {
        (self.armed, self.silent, self.silent_solicited, self.owed_for) = (Armed::No, 0, 0, 0);
        (self.told, self.event_for) = (self.pushed, first);
    }

    /// The first WC that came since the last event.
    pub(super) fn first_untold(&self) -> u64 {
        self.told + 1
    }

    /// Whether the last event was raised for the WC that is polled next.
    pub(super) fn event_is_for_next(&self) -> bool {
        self.event_for != 0 && self.pushed - self.len as u64 + 1 >= self.event_for
    }

    /// The last WC that waits, that the queue is armed for, and that came since the last event. 0:
    /// none.
    pub(super) fn waits_in_silence(&self) -> u64 {
        let last = match self.armed {
            Armed::No => 0,
            Armed::Solicited => self.silent_solicited,
            Armed::Any => self.silent,
        };
        if self.waits(last) {
            last
        } else {
            0
        }
    }

    /// Whether the WC of that number waits. Those that wait are the last `len`, see [`Cq::purge`].
    pub(super) fn waits(&self, number: u64) -> bool {
        number > self.pushed - self.len as u64
    }
}
