//! Whether application threads poll, so that the NIC may be left to them.
//!
//! Verbs note in the [`Poller`] of a NIC what they do there, with a few plain stores; the
//! background thread looks at it now and then and forms its [`Opinion`]. It asks the scheduler,
//! too: on a busy machine a polling thread may be kept from its core for milliseconds, which looks
//! as if it had turned to something else.

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};
use unbroken_process::ProcessGuard;

/// How long a NIC is left to a polling thread before another look, at first and at most: an eighth
/// of the time that it has been relied on. A look takes the core from somebody, most often from
/// that thread.
const LEAVE_US: u64 = 200;
const MAX_LEAVE_US: u64 = 1_000;
/// The least time over which the work of application threads is measured.
const WINDOW_US: u64 = 50;
/// What an empty poll takes until that is known, and what may be found, in nanoseconds: it is 200
/// on one machine and 1,000 on another.
const EMPTY_NS: u32 = 250;
const MIN_EMPTY_NS: u32 = 50;
const MAX_EMPTY_NS: u32 = 4000;
/// Of so many empty polls one is timed.
const TIMED_POLLS: u32 = 16;
/// A thread that has not polled for so long may have turned to something else.
const SILENT_US: u64 = 20;
/// It has if it then runs for so long without polling.
const GONE_US: u64 = 100;
/// Once a packet has waited for a thread that turned to something else, polling threads are not
/// relied on for so long at first. It is twice as long each time that it happens again soon, and
/// half as long when it happens late.
const DISTRUST_US: u64 = 10_000;
/// The longest time of that.
const MAX_DISTRUST_US: u64 = 1_000_000;
/// A polling thread that has been kept from its core for so long, more than the slice of whoever
/// has it, is not waited for: what has come in is handled in its stead, since the peer waits for
/// it, too.
const STARVED_US: u64 = 5_000;

/// How much application threads work on the NIC. One that polls a CQ spends most of its time in
/// verbs (three quarters); one that looks at its memory, or waits for events, does not, and needs
/// the background thread also if it polls now and then.
///
/// Counts that are lost between two threads do no harm.
pub(crate) struct Poller {
    /// Polls that found nothing to do.
    empty: AtomicU32,
    /// What one of them takes.
    empty_ns: AtomicU32,
    /// Time spent in verbs that did something.
    busy_us: AtomicU32,
    /// When a thread last polled, and which.
    last_us: AtomicU64,
    last_tid: AtomicI32,
    /// A thread is driving the engine.
    inside: AtomicBool,
    /// The background thread has left the NIC to it.
    left: AtomicBool,
}

thread_local! {
    /// The thread's, and the process that it was asked in: a forked child has another.
    static TID: Cell<Option<(ProcessGuard, libc::pid_t)>> = const { Cell::new(None) };
}

#[inline]
fn tid() -> libc::pid_t {
    match TID.get() {
        Some((process, tid)) if !process.elsewhere() => tid,
        _ => ask_for_tid(),
    }
}

#[cold]
fn ask_for_tid() -> libc::pid_t {
    // SAFETY: gettid has no preconditions.
    let tid = unsafe { libc::gettid() };
    TID.set(Some((ProcessGuard::now(), tid)));
    tid
}

impl Default for Poller {
    fn default() -> Poller {
        Poller {
            empty: AtomicU32::new(0),
            empty_ns: AtomicU32::new(EMPTY_NS),
            busy_us: AtomicU32::new(0),
            last_us: AtomicU64::new(0),
            last_tid: AtomicI32::new(0),
            inside: AtomicBool::new(false),
            left: AtomicBool::new(false),
        }
    }
}

impl Poller {
    /// A thread polls.
    #[inline]
    pub(crate) fn enter(&self, now_us: u64) {
        self.last_us.store(now_us, Relaxed);
        self.last_tid.store(tid(), Relaxed);
    }

    /// A poll found nothing to do, or another thread at work.
    #[inline]
    pub(crate) fn empty(&self) {
        self.empty.store(self.empty.load(Relaxed).saturating_add(1), Relaxed);
    }

    /// When the poll that begins now began, if it is one to be timed.
    #[inline]
    pub(crate) fn time(&self) -> Option<Instant> {
        self.empty.load(Relaxed).is_multiple_of(TIMED_POLLS).then(Instant::now)
    }

    /// A poll that has found nothing to do took so long. What is known moves towards it by an
    /// eighth at most: the thread may have lost its core meanwhile.
    pub(crate) fn timed(&self, took: Duration) {
        let ns = u32::try_from(took.as_nanos()).unwrap_or(u32::MAX);
        let known_ns = self.empty_ns.load(Relaxed);
        let ns = ns.clamp(known_ns - known_ns / 8, known_ns + known_ns / 8);
        self.empty_ns.store(ns.clamp(MIN_EMPTY_NS, MAX_EMPTY_NS), Relaxed);
    }

    /// A verb worked from `since_us` until now.
    #[inline]
    pub(crate) fn busy(&self, since_us: u64, now_us: u64) {
        let time_us = now_us.saturating_sub(since_us) as u32;
        self.busy_us.store(self.busy_us.load(Relaxed).saturating_add(time_us), Relaxed);
        // A long drive is no silence.
        self.last_us.store(now_us, Relaxed);
    }

    /// A thread begins or ends driving the engine.
    #[inline]
    pub(crate) fn set_inside(&self, inside: bool) {
        self.inside.store(inside, Relaxed);
    }

    /// Whether the NIC is left to a polling thread.
    #[inline]
    pub(crate) fn relied_on(&self) -> bool {
        self.left.load(Relaxed)
    }

    /// It is about to wait for an event; gives whether the background thread must be told.
    pub(crate) fn wait(&self) -> bool {
        self.busy_us.store(0, Relaxed);
        self.empty.store(0, Relaxed);
        self.left.load(Relaxed) && self.left.swap(false, Relaxed)
    }

    /// Time spent in verbs since the last call.
    fn take_us(&self, now_us: u64) -> u64 {
        let inside_us = match self.inside.load(Relaxed) {
            true => now_us.saturating_sub(self.last_us.load(Relaxed)),
            false => 0,
        };
        let busy_us = u64::from(self.busy_us.swap(0, Relaxed)) + inside_us;
        busy_us
            + u64::from(self.empty.swap(0, Relaxed)) * u64::from(self.empty_ns.load(Relaxed)) / 1000
    }
}

/// What the scheduler knows of the thread that polled last.
///
/// On a busy machine a polling thread may be kept from its core for milliseconds, which looks as if
/// it had turned to something else.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Ran {
    tid: i32,
    cpu_us: u64,
}

impl Ran {
    fn of(poller: &Poller) -> Ran {
        let tid = poller.last_tid.load(Relaxed);
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // The kernel's name of a thread's CPU clock (CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED); a
        // thread that has ended has none. SAFETY: a live local.
        let known = tid > 0 && unsafe { libc::clock_gettime(!tid << 3 | 6, &raw mut t) } == 0;
        Ran {
            tid,
            cpu_us: if known { t.tv_sec as u64 * 1_000_000 + t.tv_nsec as u64 / 1000 } else { 0 },
        }
    }

    /// Whether the thread is ready to run. Where that cannot be known it is not.
    fn runnable(self) -> bool {
        let Ok(stat) = std::fs::read(format!("/proc/self/task/{}/stat", self.tid)) else {
            return false;
        };
        // `tid (name) state`, and a name may have parentheses.
        let state = stat.iter().rposition(|b| *b == b')').and_then(|at| stat.get(at + 2));
        state == Some(&b'R')
    }
}

/// What the background thread is to do with a NIC that it had left to a polling thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Takeover {
    /// Leave it again.
    Leave,
    /// Do what is there to be done, once: the thread has been kept from its core for too long.
    Once,
    /// Take it over: the thread has turned to something else.
    Over,
}

/// The background thread's opinion of the application threads.
pub(crate) struct Opinion {
    /// When it was last thought over.
    looked_us: u64,
    /// When the present measurement began, and how much the thread had run by then.
    since_us: u64,
    ran: Ran,
    pub(crate) polling: bool,
    /// The thread was found silent: when it had last polled, and how much it had run.
    suspect: Option<(u64, Ran)>,
    relied_since_us: u64,
    distrust_until_us: u64,
    distrust_us: u64,
}

impl Opinion {
    pub(crate) fn new(now_us: u64) -> Opinion {
        let ran = Ran { tid: 0, cpu_us: 0 };
        Opinion {
            looked_us: now_us,
            since_us: now_us,
            ran,
            polling: false,
            suspect: None,
            relied_since_us: now_us,
            distrust_until_us: 0,
            distrust_us: DISTRUST_US,
        }
    }

    /// Whether an application thread polls, so that the NIC may be left to it.
    pub(crate) fn polling(&mut self, poller: &Poller, now_us: u64) -> bool {
        if now_us - self.looked_us >= WINDOW_US {
            self.looked_us = now_us;
            let ran = Ran::of(poller);
            let ran_us = match ran.tid == self.ran.tid {
                true => ran.cpu_us.saturating_sub(self.ran.cpu_us),
                false => now_us - self.since_us,
            };
            if ran_us >= SILENT_US {
                let works = poller.take_us(now_us) * 4 > ran_us * 3;
                let polling = works && now_us >= self.distrust_until_us;
                if polling && !self.polling {
                    self.relied_since_us = now_us;
                }
                self.polling = polling;
                (self.since_us, self.ran) = (now_us, ran);
            } else if self.polling {
                // It has hardly run, so it is what it was, unless it sleeps.
                self.polling = ran.runnable();
            }
        }
        poller.left.store(self.polling, Relaxed);
        self.polling
    }

    /// How long the NIC may be left to the polling thread before another look.
    pub(crate) fn leave_us(&self, now_us: u64) -> u64 {
        match self.suspect {
            Some(_) => GONE_US,
            None => ((now_us - self.relied_since_us) / 8).clamp(LEAVE_US, MAX_LEAVE_US),
        }
    }

    /// Whether the thread that the NIC was left to has turned to something else: it has run for a
    /// while since it was first found silent, or it sleeps.
    fn gone(&mut self, poller: &Poller, now_us: u64) -> bool {
        let polled_us = poller.last_us.load(Relaxed);
        if polled_us + SILENT_US >= now_us || poller.inside.load(Relaxed) {
            self.suspect = None;
            return false;
        }
        let ran = Ran::of(poller);
        match self.suspect {
            Some((since_us, then)) if since_us == polled_us && then.tid == ran.tid => {
                ran.cpu_us.saturating_sub(then.cpu_us) >= GONE_US || !ran.runnable()
            }
            _ => {
                self.suspect = Some((polled_us, ran));
                false
            }
        }
    }

    /// Another look at the thread that the NIC is left to.
    pub(crate) fn turn(&mut self, poller: &Poller, now_us: u64) -> Takeover {
        if self.gone(poller, now_us) {
            return Takeover::Over;
        }
        let starved =
            poller.last_us.load(Relaxed) + STARVED_US <= now_us && !poller.inside.load(Relaxed);
        if starved {
            Takeover::Once
        } else {
            Takeover::Leave
        }
    }

    /// An application thread waits for an event.
    pub(crate) fn waits(&mut self, now_us: u64) {
        (self.polling, self.suspect, self.since_us) = (false, None, now_us);
    }

    /// The NIC was left to a thread that turned to something else; `waited` says whether a packet
    /// waited for it.
    pub(crate) fn left_alone(&mut self, now_us: u64, waited: bool) {
        (self.polling, self.suspect) = (false, None);
        if waited {
            self.distrust_until_us = now_us + self.distrust_us;
            let soon = now_us - self.relied_since_us < self.distrust_us;
            let next_us = if soon { self.distrust_us * 2 } else { self.distrust_us / 2 };
            self.distrust_us = next_us.clamp(DISTRUST_US, MAX_DISTRUST_US);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_empty_polls_take_is_measured() {
        for ns in [100, 1000, 3000] {
            let p = Poller::default();
            for _ in 0..100 {
                p.timed(Duration::from_nanos(ns));
            }
            // The thread loses its core.
            p.timed(Duration::from_secs(1));
            (0..1000).for_each(|_| p.empty());
            let took_us = p.take_us(0);
            assert!(
                took_us >= ns && took_us <= ns * 3 / 2,
                "{took_us} us for a thousand of {ns} ns"
            );
            assert_eq!(p.take_us(0), 0);
        }
    }

    #[test]
    fn a_thread_without_a_core_is_not_waited_for_for_ever() {
        let turn = |inside: bool, later_us: u64| {
            let (p, mut o) = (Poller::default(), Opinion::new(0));
            p.enter(10_000);
            p.set_inside(inside);
            o.turn(&p, 10_000 + later_us)
        };
        assert_eq!(turn(false, SILENT_US), Takeover::Leave);
        assert_eq!(turn(false, STARVED_US - 1), Takeover::Leave);
        assert_eq!(turn(false, STARVED_US), Takeover::Once);
        assert_eq!(turn(true, STARVED_US), Takeover::Leave, "it has the engine");
    }

    #[test]
    fn one_poll_of_a_few_is_timed() {
        let p = Poller::default();
        let timed = (0..160).filter(|_| {
            let timed = p.time().is_some();
            p.empty();
            timed
        });
        assert_eq!(timed.count(), 10);
    }

    #[test]
    fn a_thread_that_polls_for_long_is_left_alone_for_longer() {
        let mut o = Opinion::new(0);
        assert_eq!(o.leave_us(100), LEAVE_US);
        assert_eq!(o.leave_us(4_000), 500);
        assert_eq!(o.leave_us(1_000_000), MAX_LEAVE_US);
        o.suspect = Some((0, Ran { tid: 0, cpu_us: 0 }));
        assert_eq!(o.leave_us(1_000_000), GONE_US);
    }
}
