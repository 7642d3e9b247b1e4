//! FRR's daemons are watched by their pidfds, and started again when one has ended: at once, and
//! after a longer and longer wait if it does not live.
//!
//! A start may take seconds, so another thread does it: BFD's word must not wait for it.

use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use rustix::event::{eventfd, EventfdFlags, PollFd, PollFlags};

use super::{Frr, NAMES};
use crate::error::{EdgeError, Result};
use crate::folder::Folder;
use crate::process::Running;

/// The first wait, and the longest.
const FIRST_US: u64 = 250_000;
const LONGEST_US: u64 = 30_000_000;
/// Daemons that have lived for so long after a start are well again.
const WELL_US: u64 = 10_000_000;

/// When the next start may be.
#[derive(Debug, Default)]
struct Backoff {
    wait_us: u64,
    next_us: u64,
    started_us: u64,
}

impl Backoff {
    /// A daemon has ended, or a start has failed.
    fn failed(&mut self, now_us: u64) {
        let well = now_us >= self.started_us + WELL_US;
        self.wait_us = match self.wait_us {
            _ if well || self.started_us == 0 => 0,
            0 => FIRST_US,
            wait => (2 * wait).min(LONGEST_US),
        };
        self.next_us = now_us + self.wait_us;
    }

    fn started(&mut self, now_us: u64) {
        self.started_us = now_us;
    }
}

/// What has happened to FRR.
#[derive(Debug)]
pub(crate) enum News {
    /// This daemon has ended.
    Ended(&'static str),
    /// These daemons were started.
    Started(Vec<&'static str>),
    /// They could not be.
    Failed(EdgeError),
}

/// The watch.
pub(crate) struct Watch {
    frr: Frr,
    alive: Vec<(&'static str, Running)>,
    start: Option<JoinHandle<Result<Vec<&'static str>>>>,
    /// Readable when a start is over.
    over: OwnedFd,
    backoff: Backoff,
    /// Some daemon is missing.
    due: bool,
    next_look_us: u64,
}

impl Watch {
    /// Watches an instance.
    pub(crate) fn open(frr: Frr) -> Result<Watch> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let over = eventfd(0, flags).map_err(EdgeError::at("eventfd"))?;
        let backoff = Backoff::default();
        let (alive, start) = (Vec::new(), None);
        Ok(Watch { frr, alive, start, over, backoff, due: false, next_look_us: 0 })
    }

    /// What to wait for.
    pub(crate) fn files(&self) -> impl Iterator<Item = PollFd<'_>> {
        let handles = self.alive.iter().map(|(_, running)| running.handle());
        handles.chain([&self.over]).map(|file| PollFd::new(file, PollFlags::IN))
    }

    /// The next time that [`Watch::look`] has something to do.
    pub(crate) fn deadline_us(&self) -> u64 {
        match self.due && self.start.is_none() {
            true => self.next_look_us.min(self.backoff.next_us),
            false => self.next_look_us,
        }
    }

    /// Looks after the daemons; with `whole`, also for those that somebody else has started.
    pub(crate) fn look(&mut self, now_us: u64, again_us: u64) -> Vec<News> {
        let mut news = self.ended(now_us);
        news.extend(self.started(now_us));
        if self.start.is_some() {
            self.next_look_us = now_us + again_us;
            return news;
        }
        if now_us >= self.next_look_us || self.due {
            self.find();
            self.due = self.alive.len() < NAMES.len();
            self.next_look_us = now_us + again_us;
        }
        if self.due && now_us >= self.backoff.next_us {
            self.begin(now_us);
        }
        news
    }

    fn ended(&mut self, now_us: u64) -> Vec<News> {
        let (ended, alive): (Vec<_>, Vec<_>) =
            self.alive.drain(..).partition(|(_, running)| running.has_ended());
        self.alive = alive;
        if !ended.is_empty() {
            self.due = true;
            self.backoff.failed(now_us);
        }
        ended.into_iter().map(|(name, _)| News::Ended(name)).collect()
    }

    /// What became of a start that is over.
    fn started(&mut self, now_us: u64) -> Option<News> {
        let job = self.start.take_if(|job| job.is_finished())?;
        let _ = rustix::io::read(&self.over, &mut [0; 8]);
        self.next_look_us = now_us;
        let panicked = |_| Err(EdgeError::Frr("starting FRR has panicked".into()));
        match job.join().unwrap_or_else(panicked) {
            Ok(names) if names.is_empty() => None,
            Ok(names) => Some(News::Started(names)),
            Err(error) => {
                self.backoff.failed(now_us);
                Some(News::Failed(error))
            }
        }
    }

    fn find(&mut self) {
        let Ok(folder) = Folder::open(&self.frr.folder) else { return };
        for name in NAMES {
            if self.alive.iter().all(|(known, _)| *known != name) {
                self.alive.extend(Frr::running(&folder, name).map(|running| (name, running)));
            }
        }
    }

    fn begin(&mut self, now_us: u64) {
        let frr = self.frr.clone();
        self.backoff.started(now_us);
        match self.over.try_clone() {
            Ok(over) => {
                self.start = Some(std::thread::spawn(move || {
                    let done = frr.start();
                    let _ = rustix::io::write(&over, &1u64.to_ne_bytes());
                    done
                }));
            }
            // Too many files are open: the next look tries again.
            Err(_) => self.backoff.failed(now_us),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_does_not_live_is_started_less_and_less_often() {
        let (mut backoff, mut now_us, mut waits) = (Backoff::default(), 1, Vec::new());
        for _ in 0..12 {
            backoff.failed(now_us);
            waits.push(backoff.next_us - now_us);
            now_us = backoff.next_us;
            backoff.started(now_us);
            now_us += 1000;
        }
        assert_eq!(waits[..4], [0, 250_000, 500_000, 1_000_000]);
        assert_eq!(waits[11], LONGEST_US);
        backoff.failed(now_us + WELL_US);
        assert_eq!(backoff.next_us, now_us + WELL_US, "one that has lived is started at once");
    }
}
