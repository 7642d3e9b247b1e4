//! Completion queues that are to be reminded of the event that they owe, see [`Cq::remind`].

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use unbroken_verbs::{Alarm, Cq, Result};

/// For so long a program that has armed a queue may take to poll it.
const MOMENT_US: u64 = 500;

struct Reminder {
    at_us: u64,
    cq: Weak<Cq>,
    owed_for: u64,
}

#[derive(Default)]
struct List {
    /// The first comes first; each queue is there once.
    reminders: VecDeque<Reminder>,
    /// When the alarm rings: no later than the first is due. `None`: it is not set.
    alarm_at_us: Option<u64>,
}

/// What the background thread of a NIC has to remind, and when.
pub(crate) struct Reminders {
    /// `None`: nobody is reminded any more.
    list: Mutex<Option<List>>,
    /// Whoever arms a queue sets it instead of waking the thread, which would take its core at
    /// once.
    alarm: Alarm,
}

impl Reminders {
    pub(crate) fn new() -> Result<Reminders> {
        Ok(Reminders { list: Mutex::new(Some(List::default())), alarm: Alarm::new()? })
    }

    fn list(&self) -> MutexGuard<'_, Option<List>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a queue, in place of what it was noted for before. False: nobody will remind it.
    pub(crate) fn add(&self, now_us: u64, cq: &Weak<Cq>, owed_for: u64) -> bool {
        let mut list = self.list();
        let Some(list) = &mut *list else { return false };
        let at_us = now_us + MOMENT_US;
        if list.alarm_at_us.is_none() {
            list.alarm_at_us = Some(at_us);
            self.alarm.set(at_us);
        }
        list.reminders.retain(|reminder| !reminder.cq.ptr_eq(cq));
        list.reminders.push_back(Reminder { at_us, cq: cq.clone(), owed_for });
        true
    }

    /// Reminds those whose time has come.
    pub(crate) fn run(&self, now_us: u64) {
        loop {
            let mut guard = self.list();
            let Some(list) = &mut *guard else { return };
            // Nearly always there is none.
            let Some(alarm_at_us) = list.alarm_at_us else { return };
            if list.reminders.front().is_none_or(|first| first.at_us > now_us) {
                if alarm_at_us <= now_us {
                    list.alarm_at_us = list.reminders.front().map(|first| first.at_us);
                    self.alarm.set(list.alarm_at_us.unwrap_or(u64::MAX));
                }
                return;
            }
            let due = list.reminders.pop_front();
            // The queue may be the last handle of something that takes locks of its own.
            drop(guard);
            if let Some((cq, owed_for)) =
                due.and_then(|due| Some((due.cq.upgrade()?, due.owed_for)))
            {
                cq.remind(Some(owed_for));
            }
        }
    }

    /// Reminds all, and takes no more.
    pub(crate) fn close(&self) {
        let all = self.list().take().unwrap_or_default();
        self.alarm.set(u64::MAX);
        for (cq, owed_for) in
            all.reminders.into_iter().filter_map(|due| Some((due.cq.upgrade()?, due.owed_for)))
        {
            cq.remind(Some(owed_for));
        }
    }
}

impl AsRawFd for Reminders {
    fn as_raw_fd(&self) -> RawFd {
        self.alarm.as_raw_fd()
    }
}
