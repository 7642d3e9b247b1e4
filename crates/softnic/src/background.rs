//! The thread that works when no application thread does.
//!
//! Each opened NIC has one. It sleeps in `ppoll` on the NIC's socket, a bell and the next deadline. While an application thread
//! polls ([`Poller`]) it leaves everything to that thread: a packet would wake it for work that is about to be done anyway. It looks
//! again after a short while, or when the application says that it is about to wait for an event. A polling thread that is kept from
//! its core is waited for: it will poll as soon as it runs, and there is no core to spare for doing its work in its stead.
//!
//! It asks for a short time slice, which EEVDF kernels grant to anyone: a thread that asks for little is run soon after it wakes,
//! also on a core where an application spins.

use crate::nic::Shared;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering::{self, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};
use std::sync::mpsc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;
use unbroken_fabric::now_us;
use unbroken_verbs::{Error, Result};

/// How long a NIC is left to a polling thread before another look, at first and at most: an eighth of the time that it has been relied
/// on. A look takes the core from somebody, most often from that thread.
const LEAVE_US: u64 = 200;
const MAX_LEAVE_US: u64 = 1_000;
/// After bulk data more is likely to come at once: for so long the thread looks for it before it sleeps. Not after small messages,
/// since an application that waits for one may want this core.
const LINGER_US: u64 = 40;
/// The longest sleep. Nothing depends on it.
const SLEEP_US: u64 = 1_000_000;
/// Time slice asked for, in nanoseconds: the least that kernels grant.
const SLICE_NS: u64 = 100_000;
/// Rounds of waiting for a verb that wants the engine.
const GIVE_WAY_ROUNDS: u32 = 1024;

/// The least time over which the work of application threads is measured.
const WINDOW_US: u64 = 50;
/// What an empty poll takes until that is known, and what may be found, in nanoseconds: it is 200 on one machine and 1,000 on another.
const EMPTY_NS: u32 = 250;
const MIN_EMPTY_NS: u32 = 50;
const MAX_EMPTY_NS: u32 = 4000;
/// Of so many empty polls one is timed.
const TIMED_POLLS: u32 = 16;
/// A thread that has not polled for so long may have turned to something else.
const SILENT_US: u64 = 20;
/// It has if it then runs for so long without polling.
const GONE_US: u64 = 100;
/// Once a packet has waited for a thread that turned to something else, polling threads are not relied on for so long at first. It
/// is twice as long each time that it happens again soon, and half as long when it happens late.
const DISTRUST_US: u64 = 10_000;
/// The longest time of that.
const MAX_DISTRUST_US: u64 = 1_000_000;

/// How much application threads work on the NIC. One that polls a CQ spends most of its time in verbs (three quarters); one that looks at its memory,
/// or waits for events, does not, and needs the background thread also if it polls now and then.
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
    // SAFETY: gettid has no preconditions.
    static TID: libc::pid_t = unsafe { libc::gettid() };
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
        self.last_tid.store(TID.with(|tid| *tid), Relaxed);
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

    /// A poll that has found nothing to do was timed. What is known moves towards it by an eighth at most: the thread may have lost
    /// its core meanwhile.
    pub(crate) fn timed(&self, since: Instant) {
        let ns = u32::try_from(since.elapsed().as_nanos()).unwrap_or(u32::MAX);
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
        busy_us + u64::from(self.empty.swap(0, Relaxed)) * u64::from(self.empty_ns.load(Relaxed)) / 1000
    }
}

/// What the scheduler knows of the thread that polled last.
///
/// On a busy machine a polling thread may be kept from its core for milliseconds, which looks as if it had turned to something else.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Ran {
    tid: i32,
    cpu_us: u64,
}

impl Ran {
    fn of(poller: &Poller) -> Ran {
        let tid = poller.last_tid.load(Relaxed);
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // The kernel's name of a thread's CPU clock (CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED); a thread that has ended has none.
        // SAFETY: a live local.
        let known = tid > 0 && unsafe { libc::clock_gettime(!tid << 3 | 6, &raw mut t) } == 0;
        Ran { tid, cpu_us: if known { t.tv_sec as u64 * 1_000_000 + t.tv_nsec as u64 / 1000 } else { 0 } }
    }

    /// Whether the thread is ready to run. Where that cannot be known it is not.
    fn runnable(self) -> bool {
        let Ok(stat) = std::fs::read(format!("/proc/self/task/{}/stat", self.tid)) else { return false };
        // `tid (name) state`, and a name may have parentheses.
        let state = stat.iter().rposition(|b| *b == b')').and_then(|at| stat.get(at + 2));
        state == Some(&b'R')
    }
}

/// The background thread's opinion of the application threads.
struct Opinion {
    /// When it was last thought over.
    looked_us: u64,
    /// When the present measurement began, and how much the thread had run by then.
    since_us: u64,
    ran: Ran,
    polling: bool,
    /// The thread was found silent: when it had last polled, and how much it had run.
    suspect: Option<(u64, Ran)>,
    relied_since_us: u64,
    distrust_until_us: u64,
    distrust_us: u64,
}

impl Opinion {
    fn new(now_us: u64) -> Opinion {
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
    fn polling(&mut self, poller: &Poller, now_us: u64) -> bool {
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
    fn leave_us(&self, now_us: u64) -> u64 {
        match self.suspect {
            Some(_) => GONE_US,
            None => ((now_us - self.relied_since_us) / 8).clamp(LEAVE_US, MAX_LEAVE_US),
        }
    }

    /// Whether the thread that the NIC was left to has turned to something else: it has run for a while since it was first found
    /// silent, or it sleeps.
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

    /// An application thread waits for an event.
    fn waits(&mut self, now_us: u64) {
        (self.polling, self.suspect, self.since_us) = (false, None, now_us);
    }

    /// The NIC was left to a thread that turned to something else; `waited` says whether a packet waited for it.
    fn left_alone(&mut self, now_us: u64, waited: bool) {
        (self.polling, self.suspect) = (false, None);
        if waited {
            self.distrust_until_us = now_us + self.distrust_us;
            let soon = now_us - self.relied_since_us < self.distrust_us;
            let next_us = if soon { self.distrust_us * 2 } else { self.distrust_us / 2 };
            self.distrust_us = next_us.clamp(DISTRUST_US, MAX_DISTRUST_US);
        }
    }
}

/// The background thread of a NIC; dropping it ends the thread.
pub(crate) struct Background {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    pub(crate) fn start(shared: Arc<Shared>) -> Result<Background> {
        let name = format!("unb-{}", shared.name);
        let s = shared.clone();
        let thread = spawn(&name, move || run(&s)).map_err(|e| Error::os("starting a NIC's thread", &e))?;
        Ok(Background { shared, thread: Some(thread) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if crate::fork::abandoned() {
            // The thread is the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts a thread that runs at once when it is woken, and takes no signals: they are the application's. Returns when it runs, and has
/// the memory that the C library makes for a new thread.
///
/// Open MPI and UCX overwrite the first bytes of `mmap`, `munmap`, `mremap` and `madvise` while a program starts, without stopping other
/// threads: one that is inside of such a function returns into the middle of another instruction. So a verbs call that opens a device
/// leaves no thread behind that is still in one: everything that opening needs is done in the call, threads are waited for, and
/// `madvise`, which lasts, goes past the C library.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // The kernel keeps 15 bytes of a name.
    let name: String = name.chars().take(15).collect();
    // A thread inherits the mask: blocking before the start leaves no moment in which it could be chosen for a signal.
    // SAFETY: signal sets are plain bits, for which zero is valid; all pointers are to live locals.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let (runs, until_it_runs) = mpsc::channel();
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        ask_for_promptness();
        // Whoever started this thread waits for it, or is gone: both are well.
        let _ = runs.send(());
        drop(runs);
        body();
    });
    if thread.is_ok() {
        // An error says that the thread ended before it could say so, which its owner sees when it joins it.
        let _ = until_it_runs.recv();
    }
    // SAFETY: restores the mask that was read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    thread
}

/// Asks for a short time slice and exact sleeps; kernels that know nothing of it refuse, and nothing is lost.
fn ask_for_promptness() {
    // Sleeps end within a microsecond of the time asked for, not fifty.
    // SAFETY: no pointers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
    #[repr(C)]
    struct SchedAttr {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let size = std::mem::size_of::<SchedAttr>() as u32;
    // SAFETY: plain integers, for which zero is valid.
    let mut attr: SchedAttr = unsafe { std::mem::zeroed() };
    // SAFETY: a live struct of the size given; 0 is the calling thread.
    if unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) } != 0 {
        return;
    }
    (attr.size, attr.runtime) = (size, SLICE_NS);
    // SAFETY: a live struct that says its own size.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

/// Sleeps until the bell rings, something arrives at one of `sockets`, or `timeout_us` is over.
fn sleep(shared: &Shared, sockets: &[RawFd], timeout_us: u64) {
    let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut fds = [entry(shared.bell.as_raw_fd()), entry(-1), entry(-1)];
    for (to, fd) in fds[1..].iter_mut().zip(sockets) {
        to.fd = *fd;
    }
    let timeout =
        libc::timespec { tv_sec: (timeout_us / 1_000_000) as _, tv_nsec: (timeout_us % 1_000_000 * 1000) as _ };
    // SAFETY: live locals; entries with a negative descriptor are ignored.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as _, &raw const timeout, std::ptr::null()) };
    if fds[0].revents != 0 {
        // Takes all rings.
        let _ = shared.bell.take();
    }
}

fn run(shared: &Shared) {
    let mut opinion = Opinion::new(now_us());
    let mut linger_until_us = 0;
    while !shared.stop.load(Ordering::Acquire) {
        shared.wake_at_us.store(0, Ordering::Relaxed);
        let mut time_us = now_us();
        let relied = opinion.polling;
        let polling = opinion.polling(&shared.poller, time_us);
        let mut gone = relied && !polling;
        if polling {
            let leave_us = opinion.leave_us(time_us);
            shared.wake_at_us.store(time_us + leave_us, Ordering::Relaxed);
            sleep(shared, &[], leave_us);
            time_us = now_us();
            if !shared.poller.relied_on() {
                opinion.waits(time_us);
            } else if opinion.gone(&shared.poller, time_us) {
                gone = true;
            } else {
                continue;
            }
        }
        let mut e = shared.lock();
        let acks = !e.answer_is_likely();
        let work = e.drive(time_us, &shared.domain, acks);
        if gone {
            opinion.left_alone(time_us, work.received);
        }
        let Some(sockets) = e.rx_fds() else { return };
        if work.bulk {
            linger_until_us = time_us + LINGER_US;
        }
        if work.more || time_us < linger_until_us {
            drop(e);
            give_way(shared);
            continue;
        }
        let wake_at_us = e.patient_deadline_us(time_us).min(time_us + SLEEP_US);
        shared.wake_at_us.store(wake_at_us, Ordering::Relaxed);
        drop(e);
        give_way(shared);
        sleep(shared, &sockets, wake_at_us.saturating_sub(now_us()));
    }
}

/// Lets a verb that waits for the engine have it: a thread that takes a lock again at once would starve it.
fn give_way(shared: &Shared) {
    for round in 1..=GIVE_WAY_ROUNDS {
        if !shared.wanted() {
            return;
        }
        if round % 64 == 0 {
            // It may be on this core.
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_empty_polls_take_is_measured() {
        for ns in [100, 1000, 3000] {
            let p = Poller::default();
            for _ in 0..100 {
                p.timed(Instant::now() - Duration::from_nanos(ns));
            }
            // The thread loses its core.
            p.timed(Instant::now() - Duration::from_secs(1));
            (0..1000).for_each(|_| p.empty());
            let took_us = p.take_us(0);
            assert!(took_us >= ns && took_us <= ns * 3 / 2, "{took_us} us for a thousand of {ns} ns");
            assert_eq!(p.take_us(0), 0);
        }
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
